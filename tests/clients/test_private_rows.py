"""Private steps against a loop over rows, with the noise and the samples that they should have."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.client import Batch, Info, Phase
from fedbayes.clients.ghost import of_points
from fedbayes.clients.point import _loss
from fedbayes.clients.private_rows import ROW_BATCH, ROW_CLIP, ROW_NOISE, by_row, private_gradients
from fedbayes.clients.variational import Expectation
from fedbayes.engine.batches import schedule, widest
from fedbayes.engine.chunks import chunks_of
from fedbayes.engine.feed import table_of
from fedbayes.errors import InputError
from fedbayes.federation.accounting import Spent, epsilon_of
from fedbayes.model.chain import chain_of
from fedbayes.model.estimators import plan
from fedbayes.model.likelihood import categorical, normal
from fedbayes.model.model import Model
from fedbayes.noise import Key, Tape, normals
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')
CLIP, NOISE = 0.5, 1.3
PRIVATE: dict[str, Any] = {"private": "rows", "noise_multiplier": 2.0, "private_clip": CLIP, "private_seed": 0}
METHODS = {
    "fedavg": fb.methods.fedavg(epochs=2, batch=4, lr=0.3),
    "fedprox": fb.methods.fedprox(epochs=1, batch=5, lr=0.2, optimiser="adam"),
    "feduab": fb.methods.feduab(epochs=2, batch=4, lr=0.1),
    "weights": fb.methods.feduab(estimator="weight", division=1.0, epochs=1, batch=4, train_draws=2),
    "pvi": fb.methods.pvi(epochs=1, batch=4, optimiser="sgd", train_draws=1),
    "fedivon": fb.methods.fedivon(epochs=2, batch=4, lr=0.05),
    "fedvi": fb.methods.fedvi(epochs=1, batch=4, train_draws=2),
    "bayes_admm": fb.methods.bayes_admm(epochs=1, batch=5, optimiser="ivon"),
}


def loss(vectors: dict[str, torch.Tensor], b: Batch, tape: Tape) -> Any:
    value = ((b.x @ vectors["a"] + vectors["c"].sum() - b.y) ** 2).mean()
    return value, ()


def info(n: int, batch: float) -> Info:
    options = {ROW_CLIP: CLIP, ROW_NOISE: NOISE, ROW_BATCH: batch}
    told = {name: torch.tensor(v, dtype=torch.float64) for name, v in options.items()}
    return Info({}, told, torch.tensor(0), torch.tensor(n), ())


def test_rows_are_shortened_one_by_one_and_noise_is_added_once() -> None:
    random = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 3, generator=random).double(), torch.randn(6, generator=random).double()
    x[2] *= 1e3
    vectors = {"a": torch.randn(3, generator=random).double(), "c": torch.zeros(2).double()}
    mask = torch.tensor([1, 1, 1, 0, 1, 1]).bool()  # the last place is nobody's
    noise = torch.randn(5, generator=random).double()
    batch = Batch(x, y, mask, torch.tensor(0))
    rows = by_row(loss, lambda row, tape: (row, tape), batch.step)
    g = private_gradients(rows, vectors, batch, Tape(noise), info(20, 4.0))
    want = CLIP * NOISE * noise.numpy()
    lengths = []
    for k in (0, 1, 2, 4):
        gap = 2 * float(x[k] @ vectors["a"] - y[k])
        row = gap * np.concatenate([x[k].numpy(), [1.0, 1.0]])
        lengths.append(np.linalg.norm(row))
        want = want + row * min(1, CLIP / np.linalg.norm(row))
    assert max(lengths) > 100 * CLIP
    np.testing.assert_allclose(torch.cat([g["a"], g["c"]]).numpy(), want / 4, rtol=1e-5)
    few = private_gradients(rows, vectors, batch, Tape(noise), info(2, 4.0))
    np.testing.assert_allclose(few["a"].numpy(), 2 * g["a"].numpy())  # of a client that has two rows


def test_a_gradient_that_is_not_finite_counts_as_none() -> None:
    x = torch.tensor([[1.0, 0, 0], [torch.inf, 0, 0], [0, 0, 0]]).double()
    vectors = {"a": torch.ones(3).double(), "c": torch.zeros(1).double()}
    batch = Batch(x, torch.zeros(3).double(), None, torch.tensor(0))
    rows = by_row(loss, lambda row, tape: (row, tape), batch.step)
    g = private_gradients(rows, vectors, batch, Tape(torch.zeros(4).double()), info(9, 1.0))
    assert float(torch.cat([g["a"], g["c"]]).norm()) == pytest.approx(CLIP, rel=1e-5)


def test_samples_are_poisson_and_a_step_without_rows_is_taken() -> None:
    rows = torch.arange(100, 130)
    phase = Phase(lambda *a: None, 200, 3, private=True)
    plan = schedule(rows, phase, Key("k"), 0, 0, 0)
    assert plan.live is not None
    steps = 200 * 10
    assert plan.rows.shape == plan.live.shape == (steps, 1, plan.rows.shape[-1])
    assert bool(plan.live[..., -1].all())
    inside = plan.live[:, 0, :-1]
    counts = inside.sum(1).double()
    assert abs(float(counts.mean()) - 3) < 5 * (2.7 / steps) ** 0.5
    assert abs(float(counts.var()) - 2.7) < 0.45
    assert float(counts.min()) == 0
    for step in range(50):
        sample = plan.rows[step, 0, :-1][inside[step]].tolist()
        assert len({*sample}) == len(sample)
        assert {*sample} <= {*rows.tolist()}
    whole = schedule(rows, phase._replace(batch=64, epochs=2), Key("k"), 0, 0, 0)
    assert whole.rows.shape == (2, 1, 31)
    assert bool(whole.live.all())


def test_noise_of_a_key_has_a_long_address() -> None:
    a, b = (normals(1000, Key("a" * 64), 0, 1, step) for step in (0, 1))
    assert not torch.equal(a, b)
    assert torch.equal(a[:10], normals(10, Key("a" * 64), 0, 1, 0))
    assert not torch.equal(a[:10], normals(10, "a" * 64, 0, 1, 0))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("scale", [None, 0.5])
def test_lengths_and_sums_by_layers_are_those_of_each_row(scale: float | None, bias: bool) -> None:
    """Of points and of normals, over three layers and all functions between them."""
    torch.manual_seed(2)
    layers = [nn.Linear(3, 5, bias), nn.Tanh(), nn.Linear(5, 4), nn.Sigmoid(), nn.Linear(4, 4), nn.ReLU()]
    net = nn.Sequential(*layers, nn.Linear(4, 2, bias)).double()
    likelihood = categorical() if scale is None else normal(scale)
    model = Model.of(net, likelihood)
    chain = chain_of(model)
    assert chain is not None
    x = torch.randn(6, 3).double()
    y = torch.tensor([0, 1, 1, 0, 1, 0]) if scale is None else torch.randn(6, 2).double()
    x[4, 0] = torch.inf
    factor = torch.tensor([0.5, 1.0, 0.0, 2.0, 0.0, 0.3]).double()
    mean = model.initial()["model"]
    local = plan(model, "model", x[:1], "local")
    how = Expectation(model, local, chain=chain)
    vectors = {"mean": mean, "scale": 0.1 + torch.rand_like(mean)}
    unit, z, step = 0.5 + torch.rand_like(mean), torch.randn(6, local.normals).double(), torch.tensor(0)
    pairs = [
        (how.rows({}, {}, step, unit), how._replace(chain=None).rows({}, {}, step, unit), vectors),
        (of_points(chain, "model"), by_row(_loss(model), lambda row, tape: ({}, row, tape), step), {"model": mean}),
    ]
    for quick, plain, values in pairs:
        one, two = quick(values, x, y, z), plain(values, x, y, z)
        known = torch.isfinite(two.square)
        assert known.tolist() == [True, True, True, True, False, True]
        torch.testing.assert_close(one.square[known], two.square[known])
        assert not bool(torch.isfinite(one.square[~known]).any())
        torch.testing.assert_close(one.total(factor), two.total(factor))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def sites() -> list[Any]:
    random = torch.Generator().manual_seed(0)
    x = [torch.randn(n, 3, generator=random) for n in (4, 9, 26)]
    return [(rows, (rows[:, 0] > 0).long()) for rows in x]


@pytest.mark.parametrize("name", METHODS)
def test_engines_agree_on_private_steps(name: str) -> None:
    runs = [
        fb.fit(network(), sites(), method=METHODS[name], rounds=2, engine=e, **PRIVATE) for e in ("loop", "stacked")
    ]
    for part in runs[0].parts:
        one, two = (run.parts[part] for run in runs)
        torch.testing.assert_close(one.mean, two.mean, rtol=1e-4, atol=1e-5)
        if hasattr(one, "scale"):
            torch.testing.assert_close(one.scale, two.scale, rtol=1e-4, atol=1e-5)
    assert all(record["train"] == {} and "test" not in record for record in runs[0].journal)


def test_each_site_has_an_account_of_its_own() -> None:
    run = fb.fit(network(), sites(), method=METHODS["fedavg"], rounds=3, **PRIVATE)
    rows = [(1.0, 2), (4 / 9, 6), (4 / 26, 14)]  # rate, steps of a round
    assert run.progress.accounts == {str(k): (Spent(rate, 2.0, 3 * steps),) for k, (rate, steps) in enumerate(rows)}
    each = [epsilon_of((Spent(rate, 2.0, 3 * steps),), 1e-5) for rate, steps in rows]
    assert run.epsilon == pytest.approx(max(each))
    assert run.journal[-1]["epsilon"] == run.epsilon


def test_epsilon_is_kept_by_the_site_that_spends_most() -> None:
    options = {**PRIVATE, "noise_multiplier": None, "epsilon": 2.0}
    run = fb.fit(network(), sites(), method=METHODS["fedavg"], rounds=3, **options)
    assert 1.98 < run.epsilon <= 2.0
    less = 0.95 * run.task.privacy.noise
    task = prepare(network(), sites(), method=METHODS["fedavg"], rounds=3, **{**options, "noise_multiplier": less})
    assert task.privacy.rounds_left({}, 3) == 2


def test_noise_of_steps_is_the_systems_own() -> None:
    options = {name: v for name, v in PRIVATE.items() if name != "private_seed"}
    a, b = (fb.fit(network(), sites(), method=METHODS["fedavg"], rounds=1, **options) for _ in range(2))
    assert not torch.equal(a.posterior.mean, b.posterior.mean)


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (fb.methods.fedivon(curvature="squared"), "take the noise for curvature"),
        (fb.methods.fedlap_cov(), "no private form"),
        ("fedppd", "no private form"),
    ],
)
def test_steps_without_a_private_form_are_refused(method: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        fb.fit(network(), sites(), method=method, rounds=1, **PRIVATE)


def test_noise_that_is_judged_on_rows_is_refused() -> None:
    clients = [(x, x[:, :1]) for x, _ in sites()]
    with pytest.raises(InputError, match="judged on clients' rows"):
        fb.fit(nn.Linear(3, 1), clients, method=fb.methods.fedag(epochs=1), rounds=1, **PRIVATE)


def test_batch_norm_is_refused() -> None:
    mixing = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    with pytest.raises(InputError, match="mixes the rows"):
        fb.fit(mixing, sites(), method=METHODS["fedavg"], rounds=1, **PRIVATE)


def test_large_noise_drowns_and_small_noise_learns() -> None:
    random = torch.Generator().manual_seed(3)
    x = [torch.randn(80, 3, generator=random) for _ in range(4)]
    clients = [(rows, (rows[:, 0] > 0).long()) for rows in x]
    x_new = torch.randn(300, 3, generator=random)
    method = fb.methods.fedavg(epochs=2, batch=20, lr=0.5)
    right = {}
    for noise in (0.3, 300.0):
        run = fb.fit(nn.Linear(3, 2), clients, method=method, rounds=6, **{**PRIVATE, "noise_multiplier": noise})
        right[noise] = float((run.predict(x_new).probs.argmax(-1) == (x_new[:, 0] > 0).long()).double().mean())
    assert right[0.3] > 0.93
    assert right[300.0] < 0.9


def test_tables_of_private_steps_are_of_one_width_where_they_are_a_graph() -> None:
    """Samples that differ from round to round fit into it, and the last place of all says that a step is taken."""
    task = prepare(network(), sites(), method=METHODS["feduab"], rounds=9, engine="stacked", **PRIVATE)
    order = task.plan(task.begin()).closing
    bound = task.engine.bound(task.program, order)
    phase, widths, flexible = task.program.client.phases[0], set(), set()
    for number in range(9):
        at = order._replace(round=number)
        seats = [seat for chunk in chunks_of([bound], [at]) for seat in chunk]
        for mode, seen in (("eager", flexible), ("graph", widths)):
            bound.steps.mode = mode
            table = table_of([bound], [at], seats, 0)
            seen.add(table.rows.shape[-1])
            taken = [len(bound.schedule(number, seat.client, 0).rows) for seat in seats]
            for c, (seat, steps) in enumerate(zip(seats, taken)):
                assert bool(table.live[:steps, c, 0, -1].all())
                assert not bool(table.live[steps:, c].any())
                inside = bound.schedule(number, seat.client, 0).live[:, 0, :-1].sum(1)
                assert torch.equal(table.live[:steps, c, 0, :-1].sum(1), inside)
    assert widths == {max(widest(n, phase) for n in (4, 9, 26))}
    assert len(flexible) > 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["fedavg", "feduab"])
def test_private_steps_as_a_graph_are_the_eager_ones(name: str) -> None:
    """With noise that changes nothing; normals of outputs are drawn anew in each way, so that these are made small."""
    method = METHODS[name] if name == "fedavg" else fb.methods.feduab(epochs=2, batch=4, lr=0.1, initial=1e-6)
    options = {**PRIVATE, "noise_multiplier": 1e-6}
    ways = []
    for way in ("off", "graph"):
        task = prepare(network(), sites(), method=method, rounds=3, device="cuda", compile=way, engine="stacked",
                       evaluate_every=9, **options)  # fmt: skip
        steps = rounds(task, task.begin(), Memory())
        ways.append([next(steps)[0].state.broadcast["model"].mean for _ in range(2)][-1])
        assert task.engine.steps.mode == {"off": "eager", "graph": "graph"}[way], task.engine.take_notes()
    torch.testing.assert_close(*ways, rtol=1e-3, atol=1e-4)
