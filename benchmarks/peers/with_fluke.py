"""FedAvg by fluke: its FedAVG, its own equal split of the same rows, in PyTorch."""

from __future__ import annotations

from typing import Any

import setting
import torch
from fluke import DDict, FlukeENV
from fluke.algorithms.fedavg import FedAVG
from fluke.data import DataContainer, DataSplitter
from fluke.evaluation import ClassificationEval
from fluke.utils import FederationObserver
from torch import nn


class Ends(FederationObserver):
    """Notes each round's accuracy, and its end."""

    def __init__(self, laps: setting.Laps) -> None:
        self.laps, self.accuracy = laps, float("nan")

    def server_evaluation(self, round: int, eval_type: str, evals: dict[str, float], **rest: Any) -> None:
        self.accuracy = evals["accuracy"]

    def end_round(self, round: int) -> None:
        self.laps.end(self.accuracy)


def main() -> None:
    given, laps = setting.read(), setting.Laps()
    state = {name: torch.from_numpy(value) for name, value in given.torch_state().items()}
    linear = [nn.Linear(*reversed(w.shape)) for w in list(state.values())[::2]]
    network = nn.Sequential(*[layer for each in linear for layer in (each, nn.ReLU())][:-1])
    network.load_state_dict(state)
    x, y = torch.from_numpy(given.x).flatten(0, 1), torch.from_numpy(given.y).flatten()
    rows = DataContainer(x, y, torch.from_numpy(given.test_x), torch.from_numpy(given.test_y), num_classes=10)
    world = FlukeENV()
    world.set_seed(0)
    world.set_device("cpu")
    world.set_inmemory(True)
    world.set_evaluator(ClassificationEval(eval_every=1, n_classes=10))
    world.set_eval_cfg(server=True, locals=False, pre_fit=False, post_fit=False)
    client = {
        "batch_size": given.batch,
        "local_epochs": 1,
        "loss": "CrossEntropyLoss",
        "optimizer": {"name": "SGD", "lr": given.lr},
        "scheduler": {"name": "StepLR", "step_size": 1, "gamma": 1},
    }
    options = DDict({"client": client, "server": {"weighted": True}, "model": network})
    algorithm = FedAVG(len(given.y), DataSplitter(rows, distribution="iid"), options)
    algorithm.set_callbacks(Ends(laps))
    algorithm.run(given.rounds, given.cohort / len(given.y))
    laps.tell("fluke-fl", "torch", threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
