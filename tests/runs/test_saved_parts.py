"""Runs that trained a part of their network, adapters or a student: saved whole, and loaded into a fresh network."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.export.program import export_adapters

METHOD = fb.methods.feduab(epochs=1, draws=3)


def texts() -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    lengths = torch.randint(1, 8, (45, 1), generator=random)
    x = torch.randint(1, 20, (45, 7), generator=random) * (torch.arange(7) < lengths)
    pairs = list(zip(x.split(15), torch.randint(3, (45,), generator=random).split(15)))
    return fb.data.from_clients(pairs, test=pairs[0], kind="classes", classes=3)


def rows() -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    x = torch.randn(45, 8, generator=random)
    pairs = list(zip(x.split(15), torch.randint(3, (45,), generator=random).split(15)))
    return fb.data.from_clients(pairs, test=pairs[0], kind="classes", classes=3)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


class Encoder(nn.Module):
    """A stock Transformer's encoder under a mask of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(20, 8, padding_idx=0), nn.Linear(8, 3)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layers(self.words(x), src_key_padding_mask=x == 0)[:, 0])


class Shifted(nn.Module):
    """A buffer of its own, beside no weight and outside the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.register_buffer("shift", torch.rand(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x - self.shift).relu())


class LowRank(nn.Module):
    """Low-rank factors that the user wrote, by the names that ours have."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.lora_A, self.lora_B = nn.Parameter(torch.rand(2, inputs)), nn.Parameter(torch.zeros(outputs, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.lora_A.T @ self.lora_B.T


def low_rank() -> nn.Module:
    return nn.Sequential(LowRank(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


PARTLY = {
    "the user's own factors": (low_rank, rows, {}),
    "ours beside the user's": (low_rank, rows, {"adapters": {"rank": 2, "pattern": "2", "full": ("0.lora_*", "4.*")}}),
    "a perceptron": (mlp, rows, {"adapters": {"rank": 2}}),
    "both factors": (mlp, rows, {"adapters": {"rank": 2, "both": True}}),
    "norms in full": (mlp, rows, {"adapters": {"rank": 2, "full": ("1.*", "3.*")}}),
    "the last layer": (Shifted, rows, {"adapters": {"rank": 0}}),
    "half precision": (lambda: nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 3)).half(), rows, {"adapters": {"rank": 2}}),
    "attention": (Encoder, texts, {"adapters": {"rank": 2}}),
    "layers of an encoder": (Encoder, texts, {"adapters": {"rank": 2, "pattern": "*linear*"}}),
    "a frozen body": (mlp, rows, {"frozen": ("0.*", "1.*")}),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors", "error:.*is for reports")
@pytest.mark.parametrize("name", PARTLY)
def test_what_was_trained_beside_a_body_is_saved_with_it(name: str, tmp_path: Path) -> None:
    network, clients, options = PARTLY[name][0], PARTLY[name][1](), PARTLY[name][2]
    given = network()
    run = fb.fit(given, clients, method=METHOD, rounds=2, **options)
    loaded, x = fb.load(fb.save(run, tmp_path / "run"), network=network()), clients.data.test_x
    torch.testing.assert_close(loaded.predict(x).probs, run.predict(x).probs)
    ours, theirs = run.module(), loaded.module()
    torch.testing.assert_close(dict(theirs.state_dict()), dict(ours.state_dict()))
    assert [type(layer) for layer in theirs.modules()] == [type(layer) for layer in given.modules()]
    goes_on = fb.fit(given, clients, method=METHOD, rounds=0, init=loaded, **options)
    assert torch.equal(goes_on.posterior.mean, run.posterior.mean)
    mine = run.personal(1)
    again = fb.load(fb.save(mine.as_run, tmp_path / "mine"), network=network())
    torch.testing.assert_close(again.predict(x).probs, mine.predict(x).probs)
    if options.get("adapters", {}).get("rank"):
        assert export_adapters(loaded, tmp_path / "peft")


def test_another_network_than_that_of_the_adapters_is_refused(tmp_path: Path) -> None:
    folder = fb.save(fb.fit(mlp(), rows(), method=METHOD, rounds=1, adapters={"rank": 2}), tmp_path / "run")
    others: list[Callable[[], nn.Module]] = [
        lambda: nn.Linear(8, 3),
        lambda: nn.Sequential(nn.Linear(8, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Linear(5, 3)),
        lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.ReLU(), nn.Linear(6, 3)),
    ]
    for other in others:
        with pytest.raises(InputError) as refusal:
            fb.load(folder, network=other())
        assert "\n" not in str(refusal.value)


FROZEN: dict[str, Callable[[dict[str, Tensor]], object]] = {
    "A is gone": lambda held: held.pop("0.lora_A"),
    "A is a number": lambda held: held.update({"0.lora_A": torch.tensor(1.0)}),
    "another weight": lambda held: held.update({"7.weight": torch.ones(2)}),
    "another shape": lambda held: held.update({"0.weight": torch.ones(2)}),
}


@pytest.mark.parametrize("how", FROZEN)
def test_a_file_of_frozen_weights_that_does_not_fit_is_refused(how: str, tmp_path: Path) -> None:
    folder = fb.save(fb.fit(mlp(), rows(), method="fedavg", rounds=1, adapters={"rank": 2}), tmp_path / "run")
    file = folder / "model" / "frozen.safetensors"
    held = load_file(file)
    FROZEN[how](held)
    save_file(held, file)
    with pytest.raises(InputError) as refusal:
        fb.load(folder, network=mlp())
    assert "\n" not in str(refusal.value)


@pytest.mark.filterwarnings("error:.*is for reports")
@pytest.mark.parametrize("method", [fb.methods.fedppd(epochs=1), fb.methods.fedppd_distill(epochs=1, server_batch=8)])
def test_a_student_is_saved_with_its_statistics(method: fb.methods.Method, tmp_path: Path) -> None:
    clients = rows()
    server = {"server_data": clients.data.x} if method.name == "fedppd_distill" else {}
    run = fb.fit(mlp(), clients, method=method, rounds=2, **server)
    loaded, x = fb.load(fb.save(run, tmp_path / "run"), network=mlp()), clients.data.test_x
    torch.testing.assert_close(loaded.predict(x).probs, run.predict(x).probs)
