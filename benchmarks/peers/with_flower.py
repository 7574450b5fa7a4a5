"""FedAvg on Flower's simulation: its FedAvg strategy, one core for each of Ray's workers, in PyTorch."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import setting
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.nn.functional import cross_entropy


def network(state: dict[str, torch.Tensor]) -> nn.Sequential:
    linear = [nn.Linear(*reversed(w.shape)) for w in list(state.values())[::2]]
    made = nn.Sequential(*[layer for each in linear for layer in (each, nn.ReLU())][:-1])
    made.load_state_dict(state)
    return made


def client_app(place: str, batch: int, lr: float) -> ClientApp:
    """Clients whose rows are read from files of the folder, without a copy."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        torch.set_num_threads(1)
        k = int(context.node_config["partition-id"])
        x, y = (torch.from_numpy(np.load(f"{place}/{name}.npy", mmap_mode="r")[k].copy()) for name in "xy")
        model = network(message.content["arrays"].to_torch_state_dict())
        optimiser = torch.optim.SGD(model.parameters(), lr=lr)
        for rows in torch.randperm(len(y)).split(batch):
            optimiser.zero_grad()
            cross_entropy(model(x[rows]), y[rows]).backward()
            optimiser.step()
        reply = {"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": len(y)})}
        return Message(content=RecordDict(reply), reply_to=message)

    return app


def main() -> None:
    given, laps = setting.read(), setting.Laps()
    test_x, test_y = torch.from_numpy(given.test_x), torch.from_numpy(given.test_y)

    @torch.no_grad()
    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord:
        accuracy = float((network(arrays.to_torch_state_dict())(test_x).argmax(1) == test_y).float().mean())
        if round:
            laps.end(accuracy)
        return MetricRecord({"accuracy": accuracy})

    server = ServerApp()

    @server.main()
    def run(grid: Grid, context: Context) -> None:
        state = {name: torch.from_numpy(value) for name, value in given.torch_state().items()}
        share = given.cohort / len(given.y)
        strategy = FedAvg(fraction_train=share, fraction_evaluate=0.0, min_available_nodes=len(given.y))
        strategy.start(
            grid=grid, initial_arrays=ArrayRecord(state), num_rounds=given.rounds, evaluate_fn=evaluate, timeout=600
        )

    # Ray's workers give way to all other processes (niceness 15), and hardly run beside a busy one; here all are equal.
    os.environ.setdefault("RAY_worker_niceness", "0")
    with tempfile.TemporaryDirectory() as place:
        for name in ("x", "y"):
            np.save(Path(place) / f"{name}.npy", getattr(given, name))
        run_simulation(
            server_app=server,
            client_app=client_app(place, given.batch, given.lr),
            num_supernodes=len(given.y),
            backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
        )
    if len(laps.ends) < given.rounds:
        sys.exit(f"Flower's simulation ended after {len(laps.ends)} of {given.rounds} rounds")
    laps.tell("flwr", "ray", "torch", threads=os.cpu_count() or 1, processor=False)


if __name__ == "__main__":
    main()
