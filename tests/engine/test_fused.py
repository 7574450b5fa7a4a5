"""The fused kernels take the clients' own steps, on the same noise, up to rounding."""

import os
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.engine import choice
from fedbayes.engine.fast import forms, fused
from fedbayes.engine.steps import Steps, stacked_step
from fedbayes.engine.work import Work
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # slow, but the same kernels
pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch for CUDA")
pytestmark = pytest.mark.gpu
LAYERS = {
    "relu": nn.Sequential(nn.Flatten(), nn.Linear(130, 20), nn.ReLU(), nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 3)),
    "tanh": nn.Sequential(nn.Flatten(), nn.Linear(130, 20, bias=False), nn.Tanh(), nn.Linear(20, 3)),
    "sigmoid": nn.Sequential(nn.Flatten(), nn.Linear(130, 70), nn.Sigmoid(), nn.Linear(70, 3, bias=False)),
    "linear": nn.Sequential(nn.Flatten(), nn.Linear(130, 3)),
}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "several draws": {"draws": 3},
    "momentum": {"momentum": 0.9},
    "falling": {"lr_within": "falling", "kl": "blundell"},
    "fixed prior": {"prior": "fixed", "kl": "1/n", "prior_scale": 0.7},
}
NATURAL: dict[str, dict[str, Any]] = {
    "by default": {},
    "as published": {"beta2": 0.99, "curvature": "price", "prior_step": "explicit", "kl": "1/n"},
    "several draws": {"train_draws": 3, "lr_within": "constant"},
}


def clients(sizes: list[int], kind: str) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    pairs = []
    for n in sizes:
        x = torch.randn(n, 130, generator=random)
        y = torch.randint(3, (n,), generator=random) if kind == "classes" else torch.randn(n, 3, generator=random)
        pairs.append((x, y))
    more = {"classes": 3} if kind == "classes" else {}
    return from_clients(pairs, test=pairs[0], kind=kind, **more)


def gap(work: Work, state: Any) -> float:
    """The largest difference of a state after all steps, relative where values are large."""
    form = forms.bayes(work.phase) or forms.points(work.phase)
    assert form is not None
    assert fused.fits(form, work.phase.batch)
    plain, quick = (stacked_step(work.phase, work.together, work.table.live is not None), fused.stepping(form))
    ours, theirs = tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), state), state
    x, y = work.store.x, work.store.y
    rows = work.table.rows.to(x.device)
    flags = [None] * len(rows) if work.table.live is None else work.table.live.to(x.device).unbind(0)
    for s in range(len(rows)):
        at, noise = torch.tensor(s, device=x.device), work.noise(s, 1)[0]
        batch = x[rows[s]], y[rows[s]], flags[s], noise, at, work.info
        theirs, ours = plain(theirs, *batch), quick(ours, *batch)
    pairs = zip(tree_leaves(ours), tree_leaves(theirs), strict=True)
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)


def gaps(layers: str, method: Any, sizes: list[int], kind: str, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How far fused steps are from the client's own in two rounds."""
    found: list[float] = []
    whole = Steps._run

    def watched(self: Steps, work: Work, state: Any) -> Any:
        found.append(gap(work, state))
        return whole(self, work, state)

    monkeypatch.setattr(Steps, "_run", watched)
    torch.manual_seed(1)
    fit(LAYERS[layers], clients(sizes, kind), method=method, rounds=1, engine="stacked", compile="off", device=DEVICE)
    return found


@pytest.mark.parametrize(
    ("layers", "case", "sizes", "kind"),
    [
        *((layers, "plain", [12, 12, 12], "classes") for layers in LAYERS),
        *(("relu", case, [12, 3, 7], "classes") for case in CASES),
        ("tanh", "several draws", [12, 3, 7], "real"),
    ],
)
def test_a_fused_step_is_the_clients_own(
    layers: str, case: str, sizes: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = fb.methods.feduab(**{"epochs": 2, "batch": 5, "lr": 0.1, "kl_weight": 0.05, **CASES[case]})
    found = gaps(layers, method, sizes, kind, monkeypatch)
    assert found
    assert max(found) < 2e-5


@pytest.mark.parametrize(
    ("layers", "options", "sizes", "kind"),
    [
        *((layers, {}, [12, 12, 12], "classes") for layers in LAYERS),
        ("relu", {"momentum": 0.9}, [12, 3, 7], "classes"),
        ("sigmoid", {"lr_within": "falling"}, [12, 3, 7], "classes"),
        ("tanh", {}, [12, 3, 7], "real"),
    ],
)
def test_a_fused_step_of_points_is_the_clients_own(
    layers: str, options: dict[str, Any], sizes: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choice, "_by_hand", lambda *_: None)  # which a CPU would have in their place
    method = fb.methods.fedavg(epochs=2, batch=5, lr=0.1, **options)
    found = gaps(layers, method, sizes, kind, monkeypatch)
    assert found
    assert max(found) < 2e-5


@pytest.mark.parametrize("options", [{"weight_decay": 0.1}, {"clip": 1.0}, {"optimiser": "adam"}])
def test_points_with_more_than_their_loss_have_no_fused_step(options: dict[str, Any]) -> None:
    task = prepare(LAYERS["relu"], clients([12, 12], "classes"), method=fb.methods.fedavg(**options))
    assert forms.points(task.program.client.phases[0]) is None


@pytest.mark.parametrize(
    ("layers", "case", "sizes", "kind"),
    [
        *((layers, "by default", [12, 12, 12], "classes") for layers in ("tanh", "sigmoid")),
        *(("relu", case, [12, 3, 7], "classes") for case in NATURAL),
        ("tanh", "by default", [12, 3, 7], "real"),
    ],
)
def test_a_fused_step_of_ivon_is_the_clients_own(
    layers: str, case: str, sizes: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method = fb.methods.fedivon(**{"epochs": 2, "batch": 5, **NATURAL[case]})
    found = gaps(layers, method, sizes, kind, monkeypatch)
    assert found
    assert max(found) < 5e-5
