"""IVON's steps by draws of the weights, as one kernel: the client's own steps, on the same noise, up to rounding."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

import fedbayes as fb
from fedbayes.clients.ivon import IvonStep
from fedbayes.data import from_clients
from fedbayes.engine.fast import drawn, forms, fused
from fedbayes.engine.steps import Steps, one_by_one, stacked_step
from fedbayes.engine.work import Table, Work
from fedbayes.experiments.experiment import Experiment
from fedbayes.posterior.layout import Layout
from fedbayes.runs.folder import resume, run
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory, Run

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")  # slow, but the same kernel
pytest.importorskip("triton", reason="needs Triton, which comes with PyTorch for CUDA")
pytestmark = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(DEVICE == "cpu", reason="needs a CUDA device")
PUBLISHED = {"beta2": 0.99, "curvature": "price", "prior_step": "explicit", "kl": "1/n"}
CASES: dict[str, dict[str, Any]] = {
    "by default": {},
    "as published": PUBLISHED,
    "price, not remembered": {"curvature": "price", "lr_within": "constant"},
    "average, remembered": {"beta2": 0.9},
    "from the broadcast": {"prior": "broadcast", "kl": "1/B"},
    "published, from the broadcast": {**PUBLISHED, "prior": "broadcast"},
}


class Counting(nn.Module):
    """A convolution, and a buffer that each pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.head = nn.Conv2d(1, 3, 3, bias=False), nn.Linear(3 * 5 * 9, 3)
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.filters(x.reshape(-1, 1, 7, 11)))
        self.largest.copy_(torch.maximum(self.largest, h.detach().mean()))
        return self.head(h.flatten(1))


def network(name: str) -> nn.Module:
    torch.manual_seed(1)
    if name == "convolution":
        return Counting()
    if name == "without biases":
        layers = nn.Linear(77, 40, bias=False), nn.Sigmoid(), nn.Linear(40, 3, bias=False)
    elif name == "linear":
        layers = (nn.Linear(77, 3),)
    else:
        layers = nn.Linear(77, 20), nn.Tanh(), nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 3)
    return nn.Sequential(nn.Flatten(), *layers)


def clients(sizes: list[int], kind: str = "classes") -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 77, generator=random), torch.randint(3, (n,), generator=random)) for n in sizes]
    if kind == "real":
        pairs = [(x, torch.randn(len(x), 3, generator=random)) for x, _ in pairs]
        return from_clients(pairs, test=pairs[0], kind=kind)
    return from_clients(pairs, test=pairs[0], kind=kind, classes=3)


def method(**options: Any) -> Any:
    return fb.methods.fedivon(**{"epochs": 2, "batch": 5, "estimator": "weight", **options})


def own_copy(state: Any) -> Any:
    return tree_map(lambda t: t.clone(memory_format=torch.contiguous_format), state)


def all_steps(work: Work, state: Any, several: Any, noise: Tensor) -> Any:
    x, y, rows = work.store.x, work.store.y, work.table.rows.to(work.store.x.device)
    flags = [None] * len(rows) if work.table.live is None else work.table.live.to(x.device).unbind(0)
    return several(state, x[rows], y[rows], flags, noise, torch.arange(len(rows), device=x.device), work.info)


def watch(monkeypatch: pytest.MonkeyPatch, look: Any) -> list[Any]:
    """What `look(work, state, noise)` finds before each phase of steps is run."""
    found: list[Any] = []
    whole = Steps._run

    def watched(self: Steps, work: Work, state: Any) -> Any:
        found.append(look(work, state, work.noise(0, len(work.table.rows))))
        return whole(self, work, state)

    monkeypatch.setattr(Steps, "_run", watched)
    return found


def ways(work: Work) -> list[Any]:
    """The steps by a gradient of any network, and of a chain those by the fused kernels."""
    program, form = drawn.slopes(work.phase, work.together, work.table.live is not None), forms.drawn_chain(work.phase)
    assert forms.drawn(work.phase) is work.phase.step
    assert (form is None) == (isinstance(work.phase.step.model.module, Counting))
    either = [drawn.stepping(work.phase, work.together, program)]
    return either if form is None else [*either, drawn.on_chain(form, work.phase)]


def gap(work: Work, state: Any, noise: Tensor) -> float:
    """The largest difference of a state after all steps of each way, relative where values are large."""
    plain = stacked_step(work.phase, work.together, work.table.live is not None)
    theirs = tree_leaves(all_steps(work, state, one_by_one(plain), noise))
    ours = [tree_leaves(all_steps(work, own_copy(state), several, noise)) for several in ways(work)]
    pairs = [pair for leaves in ours for pair in zip(leaves, theirs, strict=True)]
    return max(float(((a - b).abs() / b.abs().clamp(min=1)).max()) for a, b in pairs)


@pytest.mark.parametrize(
    ("name", "case", "sizes", "kind"),
    [
        *(("chain", case, [12, 3, 7], "classes") for case in CASES),
        *(("convolution", case, [10, 10], "classes") for case in ("by default", "as published")),
        ("chain", "by default", [12], "classes"),
        ("chain", "from the broadcast", [12, 3, 7], "real"),
        ("without biases", "by default", [10, 10], "classes"),
        ("without biases", "as published", [12, 3, 7], "real"),
        ("linear", "by default", [10, 10], "classes"),
    ],
)
def test_a_step_is_the_clients_own(
    name: str, case: str, sizes: list[int], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "OWN", 1000)
    found = watch(monkeypatch, gap)
    made = method(**CASES[case])
    fit(network(name), clients(sizes, kind), method=made, rounds=2, engine="stacked", compile="off", device=DEVICE)
    assert len(found) == 2 or len(sizes) > 2
    assert found
    assert max(found) < 5e-5


def test_members_of_a_sweep_have_priors_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = watch(monkeypatch, gap)
    how: dict[str, Any] = {"rounds": 2, "engine": "stacked", "compile": "off", "device": DEVICE}
    methods = [method(prior="broadcast", lr=lr, initial=first) for lr, first in ((0.1, 0.1), (0.3, 0.2))]
    tasks = [prepare(network("chain"), clients([7, 7]), method=one, **how) for one in methods]
    list(rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks]))
    assert len(found) == 2
    assert max(found) < 5e-5


@pytest.mark.parametrize("case", ["by default", "as published"])
def test_a_client_that_waits_stays_as_it_is(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(work: Work, state: Any, noise: Tensor) -> list[tuple[Any, Any]]:
        assert work.table.live is not None
        assert work.table.live.flatten(2).any(-1).sum(0).tolist() == [6, 4]
        short = work._replace(table=Table(work.table.rows[:4], work.table.live[:4]))
        return [
            tuple(all_steps(w, own_copy(state), several, noise[: len(w.table.rows)]) for w in (work, short))
            for several in ways(work)
        ]

    found = watch(monkeypatch, look)
    made = method(**CASES[case])
    fit(network("chain"), clients([12, 7]), method=made, rounds=1, engine="stacked", compile="off", device=DEVICE)
    ((any_network, chain),) = found
    for whole, short in (any_network, chain):
        for a, b in zip(tree_leaves(whole), tree_leaves(short), strict=True):
            assert torch.equal(a[1], b[1])
        assert not torch.equal(whole.vectors["mean"][0], short.vectors["mean"][0])


@pytest.mark.parametrize("case", ["by default", "as published"])
def test_both_ways_make_the_same_noise(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(work: Work, state: Any, noise: Tensor) -> list[Any]:
        made = []
        for several in ways(work):
            torch.manual_seed(3)
            made.append(all_steps(work, own_copy(state), several, work.silence(0, len(work.table.rows))))
        return made

    found = watch(monkeypatch, look)
    made = method(**CASES[case])
    fit(network("chain"), clients([10] * 3), method=made, rounds=1, engine="stacked", compile="off", device=DEVICE)
    ((any_network, chain),) = found
    for a, b in zip(tree_leaves(any_network), tree_leaves(chain), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_normals_by_a_counter_are_those_of_the_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "OWN", 1000)

    def look(work: Work, state: Any, noise: Tensor) -> tuple[Tensor, Any, Any, Any]:
        pieces = drawn.pieces_of(work.phase.step.model.layouts["model"])  # type: ignore[attr-defined]
        assert len(pieces) == 2
        program, seen = drawn.slopes(work.phase, work.together, False), []

        def noted(state: Any, xs: Tensor, ys: Tensor, live: Any, weights: Tensor, at: Tensor, info: Any) -> Any:
            w = torch.cat(drawn.by_piece(pieces, weights), 1)
            seen.append((w - state.vectors["mean"]) * state.vectors["precision"].sqrt())
            return program(state, xs, ys, live, weights, at, info)

        def once(noise: Tensor, program: Any) -> Any:
            torch.manual_seed(3)
            return all_steps(work, own_copy(state), drawn.stepping(work.phase, work.together, program), noise)

        ours = once(work.silence(0, len(work.table.rows)), noted)
        z = torch.stack(seen)
        return z, ours, once(z, program), once(work.silence(0, len(work.table.rows)), program)

    found = watch(monkeypatch, look)
    made = method(beta2=0.9, epochs=4)
    fit(network("chain"), clients([10] * 4), method=made, rounds=1, engine="stacked", compile="off", device=DEVICE)
    ((z, ours, given, again),) = found
    for a, b, c in zip(tree_leaves(ours), tree_leaves(given), tree_leaves(again), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
        assert torch.equal(a, c)
    steps, several, size = z.shape
    assert (steps, several) == (8, 4)
    flat = z.double().cpu().flatten()
    n = len(flat)
    assert abs(flat.mean()) < 4 / n**0.5
    assert abs(flat.var() - 1) < 4 * (2 / n) ** 0.5
    place = torch.arange(1, n + 1) / n
    assert (torch.special.ndtr(flat.sort().values) - place).abs().max() < 2 / n**0.5  # Kolmogorov and Smirnov
    rows = z.double().cpu().reshape(steps * several, size)
    others = torch.corrcoef(rows) - torch.eye(len(rows))
    assert others.abs().max() < 5 / size**0.5  # of clients and steps
    for lag in (1, 2, 128, 256, 512):  # of places
        assert abs((rows[:, lag:] * rows[:, :-lag]).mean()) < 4 / (len(rows) * (size - lag)) ** 0.5
    assert len(flat.round(decimals=3).unique()) > 3000


def test_large_tensors_are_pieces_and_what_is_between_them_is_one() -> None:
    many = drawn.OWN
    layout = Layout(("a", "b", "c", "d", "e", "f"), ((3,), (2,), (many,), (2, many), (5,), (1, 4)))
    pieces = drawn.pieces_of(layout)
    assert [(piece.begin, piece.layout.names) for piece in pieces] == [
        (0, ("a", "b")),
        (5, ("c",)),
        (5 + many, ("d",)),
        (5 + 3 * many, ("e", "f")),
    ]
    assert sum(piece.layout.size for piece in pieces) == layout.size
    weights = torch.arange(2.0 * layout.size).reshape(2, layout.size)
    views = drawn.by_piece(pieces, weights)
    assert [v.shape for v in views] == [(2, piece.layout.size) for piece in pieces]
    assert torch.equal(torch.cat([v.flatten() for v in views]), weights.flatten())


@pytest.mark.parametrize(
    ("options", "taken"),
    [
        *((options, True) for options in CASES.values()),
        ({"estimator": "local"}, False),
        ({"train_draws": 2}, False),
        ({"clip_step": 0.1}, False),
        ({"curvature": "squared"}, False),
    ],
)
def test_which_steps_have_the_form(options: dict[str, Any], taken: bool) -> None:
    task = prepare(network("chain"), clients([7, 7]), method=method(**options), rounds=1)
    (phase,) = task.program.client.phases
    assert (forms.drawn(phase) is phase.step) == taken


def test_chains_have_the_form_of_points_that_are_draws() -> None:
    for name, chain in (("chain", True), ("linear", True), ("convolution", False)):
        task = prepare(network(name), clients([7, 7]), method=method(), rounds=1)
        form = forms.drawn_chain(task.program.client.phases[0])
        assert (form is not None and form.drawn) == chain


def test_steps_that_read_other_noise_or_have_points_lack_the_form() -> None:
    for layer in (nn.Dropout(0.2), nn.BatchNorm1d(5)):
        module = nn.Sequential(nn.Flatten(), nn.Linear(77, 5), layer, nn.Linear(5, 3))
        task = prepare(module, clients([7, 7]), method=method(), rounds=1)
        assert forms.drawn(task.program.client.phases[0]) is None


@pytest.mark.parametrize(
    ("name", "batch", "fewest", "under_tf32", "way"),
    [
        ("chain", 5, drawn.FEWEST, True, forms.Bayes),
        ("chain", 5, drawn.FEWEST, False, type(None)),
        ("chain", 5, 0, False, IvonStep),
        ("chain", 200, drawn.FEWEST, True, type(None)),
        ("chain", 200, 0, True, IvonStep),
        ("convolution", 5, 0, True, IvonStep),
    ],
)
def test_which_kernels_a_graph_has(
    name: str, batch: int, fewest: int, under_tf32: bool, way: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(drawn, "FEWEST", fewest)
    monkeypatch.setattr(fused, "available", lambda: under_tf32)
    found = watch(monkeypatch, lambda work, *_: Steps("graph")._form(work))
    made = method(batch=batch)
    fit(network(name), clients([10, 10]), method=made, rounds=1, engine="stacked", compile="off", device=DEVICE)
    (form,) = found
    assert type(form) is way


def go(monkeypatch: pytest.MonkeyPatch, way: str) -> list[Any]:
    """Steps of graphs go this way from now on, in any precision; with a count of their graphs."""
    counted: list[Any] = []
    monkeypatch.setattr(drawn, "FEWEST", 0 if way == "any network" else 2**60)
    monkeypatch.setattr(drawn, "OWN", 1000)
    monkeypatch.setattr(fused, "available", lambda: way == "chain")
    if way != "compiled":
        name = "on_chain" if way == "chain" else "stepping"
        whole = getattr(drawn, name)
        monkeypatch.setattr(drawn, name, lambda *given: counted.append(0) or whole(*given))
    return counted


def trained(monkeypatch: pytest.MonkeyPatch, way: str, case: str, sizes: list[int], **how: Any) -> Run:
    """A run of graphs whose steps go this way."""
    made = method(**{"test_draws": 20, **CASES[case]})
    how = {"rounds": 3, "engine": "stacked", "compile": "graph", "device": DEVICE, **how}
    with monkeypatch.context() as patch:
        counted = go(patch, way)
        done = fit(network("chain"), clients(sizes), method=made, **how)
    assert bool(counted) == (way != "compiled")
    assert not [note for record in done.journal for note in record.get("notes", []) if "instead of" in note]
    return done


WAYS = pytest.mark.parametrize("way", ["any network", "chain"])


@needs_cuda
@WAYS
@pytest.mark.parametrize(
    ("case", "sizes"),
    [
        ("by default", [12, 3, 7]),
        ("as published", [20, 20, 20]),
        ("published, from the broadcast", [12, 3, 7]),
        ("from the broadcast", [20, 20, 20]),
    ],
)
def test_graphs_with_and_without_the_kernel_agree_on_the_same_noise(
    case: str, sizes: list[int], way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A round is one replay, which draws its noise first.
    monkeypatch.setattr(Work, "silence", lambda self, first, steps: self.noise(first, steps))
    ours, theirs = (trained(monkeypatch, one, case, sizes).posterior for one in (way, "compiled"))
    torch.testing.assert_close(ours.mean, theirs.mean, rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(ours.scale, theirs.scale, rtol=1e-3, atol=1e-5)


@needs_cuda
@WAYS
@pytest.mark.parametrize("case", ["by default", "as published"])
def test_graphs_with_noise_of_their_own_learn_alike(case: str, way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [trained(monkeypatch, one, case, [110, 101, 90], rounds=8) for one in (way, "compiled")]
    ours, theirs = (run.posterior for run in runs)
    assert not torch.equal(ours.mean, theirs.mean)
    first, second = (run.journal[-1]["train"]["loss"] for run in runs)
    assert abs(first - second) < 0.15 * abs(second)
    assert abs((ours.scale / theirs.scale).log().mean()) < 0.03
    together = torch.stack([ours.mean, theirs.mean]).flatten(1)
    assert torch.corrcoef(together)[0, 1] > 0.35


@needs_cuda
@WAYS
def test_a_resumed_run_has_the_same_bits(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = go(monkeypatch, way)
    x = Experiment(
        **{"data": "digits", "clients": 6, "rounds": 4, "network_options": {"hidden": [8]}, "method": "fedivon"},
        options={"epochs": 3, "batch": 7, "test_draws": 2, "estimator": "weight", **PUBLISHED},
        **{"engine": "stacked", "compile": "graph", "device": DEVICE, "checkpoint_every": 1},
    )
    run(x, tmp_path / "whole")
    run(replace(x, rounds=2), tmp_path / "cut")
    config = tmp_path / "cut" / "config.toml"
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 4"))
    again, whole = resume(tmp_path / "cut")["fedivon"], resume(tmp_path / "whole")["fedivon"]
    assert len(counted) >= 3
    assert torch.equal(again.posterior.mean, whole.posterior.mean)
    assert torch.equal(again.posterior.scale, whole.posterior.scale)


@needs_cuda
@WAYS
def test_steps_are_compiled_where_the_kernel_fails(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> Any:
        raise RuntimeError("no kernel today")

    go(monkeypatch, way)
    monkeypatch.setattr(drawn, "_kernels", broken)
    how: dict[str, Any] = {"rounds": 2, "engine": "stacked", "compile": "graph", "device": DEVICE}
    done = fit(network("chain"), clients([12, 12]), method=method(), **how)
    notes = [note for record in done.journal for note in record.get("notes", [])]
    assert "steps are compiled instead of fused: no kernel today" in notes
