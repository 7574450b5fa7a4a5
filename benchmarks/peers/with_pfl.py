"""FedAvg by pfl: its FederatedAveraging on its simulated back end, in PyTorch."""

from __future__ import annotations

import setting
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from torch.nn.functional import cross_entropy


class MLP(nn.Sequential):
    """With the two functions that pfl calls."""

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Weighted]:
        return {"accuracy": Weighted(float((self(x).argmax(1) == y).sum()), len(y))}


class Evaluation(TrainingProcessCallback):
    """All test rows after every round."""

    def __init__(self, test: Dataset, laps: setting.Laps) -> None:
        self.test, self.laps = test, laps

    def after_central_iteration(
        self, aggregate_metrics: Metrics, model: PyTorchModel, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        scores = dict(model.evaluate(self.test, eval_params=NNEvalHyperParams(local_batch_size=len(self.test))))
        self.laps.end(next(iter(scores.values())).overall_value)
        return False, Metrics()


def main() -> None:
    given, laps = setting.read(), setting.Laps()
    state = {name: torch.from_numpy(value) for name, value in given.torch_state().items()}
    linear = [nn.Linear(*reversed(w.shape)) for w in list(state.values())[::2]]
    network = MLP(*[layer for made in linear for layer in (made, nn.ReLU())][:-1])
    network.load_state_dict(state)
    model = PyTorchModel(network, torch.optim.SGD, torch.optim.SGD(network.parameters(), lr=1.0))
    held = {k: [torch.from_numpy(x), torch.from_numpy(y)] for k, (x, y) in enumerate(zip(given.x, given.y))}
    clients = FederatedDataset.from_slices(held, get_user_sampler("random", list(held)))
    test = Dataset([torch.from_numpy(given.test_x), torch.from_numpy(given.test_y)])
    FederatedAveraging().run(
        backend=SimulatedBackend(training_data=clients, val_data=clients),
        model=model,
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=given.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=given.cohort,
            val_cohort_size=0,
        ),
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=given.lr, local_batch_size=given.batch
        ),
        callbacks=[Evaluation(test, laps)],
    )
    laps.tell("pfl", "torch", threads=torch.get_num_threads())


if __name__ == "__main__":
    main()
