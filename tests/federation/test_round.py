"""Rounds: who takes part, what is added, who is left out, when to stop."""

from functools import partial

import pytest
import torch
from torch import nn

from fedbayes import Gaussian, Point, data, pool
from fedbayes.federation.cohorts import cohort_size
from fedbayes.federation.contributions import contribute
from fedbayes.federation.program import Context
from fedbayes.federation.round import close_round, open_round
from fedbayes.federation.rule import Rule
from fedbayes.federation.weighting import WEIGHTINGS
from fedbayes.methods import fedavg, fedvi, method_named
from fedbayes.training.fit import fit as fit_anyhow
from fedbayes.training.prepare import prepare as prepare_anyhow
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

# The loop engine is the specification; that others agree with it is a law of engines.
fit, prepare = (partial(f, engine="loop") for f in (fit_anyhow, prepare_anyhow))


def _net(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, outputs)


def _clients(sizes=(6, 9, 4, 12, 7), seed=0, test=True):
    g = torch.Generator().manual_seed(seed)
    pairs = [(torch.randn(n, 3, generator=g), torch.randint(2, (n,), generator=g)) for n in sizes]
    rows = (torch.randn(20, 3, generator=g), torch.randint(2, (20,), generator=g))
    return data.from_clients(pairs, rows if test else None, classes=2)


FAST = {"epochs": 1, "batch": 5}


def _task(method=None, clients=None, **options):
    return prepare(_net(), clients or _clients(), method=method or fedavg(**FAST), **options)


def _orders(task, count, clients=5, **options):
    state = task.begin().state
    choose = {"clients": clients, "cohort": task.cohort, "seed": task.seed, **options}
    return [open_round(task.program, state._replace(round=r), **choose) for r in range(count)]


def test_a_cohort_is_chosen_by_its_address():
    task = _task(cohort=2)
    a, b = (_orders(task, 20) for _ in range(2))
    assert [o.cohort for o in a] == [o.cohort for o in b]
    assert [o.cohort for o in a] != [o.cohort for o in _orders(task, 20, seed=1)]
    assert len({o.cohort for o in a}) > 5
    for order in a:
        assert len(set(order.cohort)) == 2
        assert set(order.cohort) <= set(range(5))
        assert order.dropped == ()


def test_every_client_is_as_likely_as_any_other():
    orders = _orders(_task(cohort=2), 2000)
    counts = torch.bincount(torch.tensor([k for o in orders for k in o.cohort]), minlength=5)
    assert ((counts - 800).abs() < 5 * (2000 * 0.4 * 0.6) ** 0.5).all()


@pytest.mark.parametrize(
    ("cohort", "size"), [(None, 40), (1, 1), (40, 40), (0.25, 10), (1.0, 40), (0.001, 1), (0.99, 40)]
)
def test_a_cohort_is_everybody_a_number_or_a_fraction(cohort, size):
    assert cohort_size(cohort, 40) == size


@pytest.mark.parametrize("cohort", [0, -1, 41, 1.5, 0.0, float("nan"), float("inf"), True, "10", [3]], ids=str)
def test_an_impossible_cohort_is_refused(cohort):
    with pytest.raises(ValueError, match="cohort"):
        cohort_size(cohort, 40)


def test_drop_outs_happen_at_their_rate_and_by_address():
    task = _task()
    orders = _orders(task, 1000, dropout=0.3)
    gone = sum(len(o.dropped) for o in orders)
    assert abs(gone - 1500) < 5 * (5000 * 0.3 * 0.7) ** 0.5
    assert all(sorted(o.cohort + o.dropped) == list(range(5)) for o in orders)
    assert [o.dropped for o in orders] == [o.dropped for o in _orders(task, 1000, dropout=0.3)]


def test_drop_outs_do_not_change_who_is_asked():
    task = _task(cohort=3)
    asked, kept = (_orders(task, 20, dropout=share) for share in (0.0, 0.5))
    assert [o.cohort for o in asked] == [tuple(sorted(o.cohort + o.dropped)) for o in kept]


def test_a_round_in_which_all_drop_out_leaves_the_posterior_as_it_was():
    run = fit(_net(), _clients(), method=fedavg(**FAST), rounds=12, cohort=1, dropout=0.7, seed=0)
    empty = [r for r in run.journal if r["cohort"] == 0]
    assert empty
    assert len(empty) < 12
    task = _task(cohort=1, dropout=0.7, rounds=12)
    before = task.begin()
    for progress, record in rounds(task, before, Memory()):
        same = torch.equal(progress.state.broadcast["model"].mean, before.state.broadcast["model"].mean)
        assert same == (record["cohort"] == 0)
        assert progress.state.round == before.state.round + 1
        assert record["bytes_up"] == (0 if same else 4 * 8)
        before = progress


def _by_hand(task, state, weight, order=None):
    """A round's uploads one by one, and their weights."""
    order = order or open_round(task.program, state, clients=5, cohort=5, seed=task.seed)
    uploads = [task.engine.client(task.program, order, k, None)[0].parts["model"] for k in order.cohort]
    return uploads, [weight(q, k) for k, q in zip(order.cohort, uploads, strict=True)]


def test_fedavg_is_the_average_by_size():
    task = _task()
    uploads, weights = _by_hand(task, task.begin().state, lambda q, k: (6, 9, 4, 12, 7)[k])
    want = sum(w * q.mean for q, w in zip(uploads, weights, strict=True)) / sum(weights)
    run = fit(_net(), _clients(), method=fedavg(**FAST), rounds=1)
    torch.testing.assert_close(run.posterior.mean, want)


@pytest.mark.parametrize("weighting", ["equal", "size", "distance", "discrepancy", "discrepancy_max"])
@pytest.mark.parametrize("rule", ["lp", "wc"])
def test_a_round_equals_pooling_its_uploads_by_hand(rule, weighting):
    method = fedvi(rule=rule, weighting=weighting, initial=0.3, lr=0.5, **FAST)
    task = _task(method)
    broadcast = task.program.initial["model"]
    uploads, _ = _by_hand(task, task.begin().state, lambda q, k: 1.0)
    compare = WEIGHTINGS[weighting].compare
    if compare is not None:
        assert task.program.needs_uploads
        weights = compare(uploads)
    else:
        sizes = torch.tensor([6, 9, 4, 12, 7])
        weights = [WEIGHTINGS[weighting].weigh(q, broadcast, n) for q, n in zip(uploads, sizes, strict=True)]
        weights = torch.stack([w.double() for w in weights])
    want = pool(rule, uploads, weights, broadcast)
    run = fit(_net(), _clients(), method=method, rounds=1)
    torch.testing.assert_close(run.posterior.mean, want.mean, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(run.posterior.scale, want.scale, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("server", ["sgd", "adam"])
def test_the_servers_optimiser_steps_along_the_pooled_move(server):
    method = fedavg(server=server, server_lr=0.7, server_momentum=0.6, **FAST)
    task = _task(method, rounds=4)
    parameter = task.program.initial["model"].mean.double().requires_grad_()
    optimiser = {
        "sgd": lambda: torch.optim.SGD([parameter], lr=0.7, momentum=0.6),
        "adam": lambda: torch.optim.Adam([parameter], lr=0.7),
    }[server]()
    state = task.begin().state
    for progress, _ in rounds(task, task.begin(), Memory()):
        uploads, weights = _by_hand(task, state, lambda q, k: (6, 9, 4, 12, 7)[k])
        # In float64: the move is a small difference, and Adam divides by its size.
        pooled = sum(w * q.mean.double() for q, w in zip(uploads, weights, strict=True)) / sum(weights)
        parameter.grad = parameter.detach() - pooled
        optimiser.step()
        state = progress.state
        torch.testing.assert_close(state.broadcast["model"].mean, parameter.detach().float(), rtol=1e-3, atol=1e-3)


def test_the_servers_optimiser_leaves_pooled_scales_alone():
    method = fedvi(server="sgd", server_lr=1.0, server_momentum=0.0, **FAST)
    stepped = fit(_net(), _clients(), method=method, rounds=2).posterior
    plain = fit(_net(), _clients(), method=fedvi(**FAST), rounds=2).posterior
    torch.testing.assert_close(stepped.mean, plain.mean)
    torch.testing.assert_close(stepped.scale, plain.scale)


def _with_a_bad_client():
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(8, 3, generator=g), torch.randn(8, 1, generator=g)) for _ in range(4)]
    pairs[2] = (pairs[2][0] * 1e8, pairs[2][1])  # squared loss explodes within a few steps
    return data.from_clients(pairs, (torch.randn(5, 3, generator=g), torch.randn(5, 1, generator=g)))


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_a_client_that_diverges_is_left_out_and_named(method):
    clients = _with_a_bad_client()
    options = {"lr": 0.01, "epochs": 5, "batch": 4}
    run = fit(_net(1), clients, method=method_named(method, options), rounds=3)
    for record in run.journal:
        assert list(record["left_out"]) == ["2"]
        assert "not finite" in record["left_out"]["2"]
        assert "lr" in record["left_out"]["2"]
        assert all(torch.isfinite(torch.tensor(v)) for v in record["train"].values())
    assert torch.isfinite(run.posterior.mean).all()
    # The federation is the one that the other three make by themselves.
    task = prepare(_net(1), clients, method=method_named(method, options), rounds=1)
    state = task.begin().state
    order = open_round(task.program, state, clients=4, cohort=4, seed=0)._replace(cohort=(0, 1, 3))
    outcome = task.engine.run(task.program, order, lambda k: None)
    alone, _ = close_round(Context(task.program, order, outcome, task.engine, lambda k: None), state)
    with_all = next(rounds(task, task.begin(), Memory()))[0].state
    # Not to the bit: three stacked clients may be multiplied by other code than four.
    torch.testing.assert_close(with_all.broadcast["model"].mean, alone.broadcast["model"].mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_round_in_which_all_diverge_leaves_the_posterior_as_it_was_and_is_the_last(engine):
    g = torch.Generator().manual_seed(0)
    pairs = [(1e12 * torch.randn(8, 3, generator=g), torch.randn(8, 1, generator=g)) for _ in range(2)]
    task = prepare_anyhow(_net(1), data.from_clients(pairs), method=fedavg(lr=1.0, **FAST), rounds=3, engine=engine)
    ((progress, record),) = rounds(task, task.begin(), Memory())
    assert len(record["left_out"]) == 2
    assert record["stopped"] == record["diverged"]
    assert torch.equal(progress.state.broadcast["model"].mean, task.program.initial["model"].mean)


def test_a_diverged_client_is_left_out_where_the_server_compares_uploads_too():
    method = fedvi(weighting="discrepancy", optimiser="sgd", lr=0.01, epochs=5, batch=4)
    run = fit(_net(1), _with_a_bad_client(), method=method, rounds=2)
    assert all(list(r["left_out"]) == ["2"] for r in run.journal)
    assert torch.isfinite(run.posterior.mean).all()
    assert (run.posterior.scale > 0).all()


@pytest.mark.parametrize(
    "q",
    [
        Gaussian(torch.zeros(8), torch.tensor([-1.0] + [1.0] * 7)),  # its square looks like any other
        Gaussian(torch.zeros(8), torch.tensor([0.0] + [1.0] * 7)),
        Gaussian(torch.tensor([torch.nan] + [0.0] * 7), torch.ones(8)),
        Gaussian(torch.zeros(8), torch.tensor([torch.inf] + [1.0] * 7)),
    ],
    ids=["negative scale", "zero scale", "mean no number", "infinite scale"],
)
@pytest.mark.parametrize("rule", ["nwa", "log_pool", "blind"])
def test_an_upload_that_is_no_distribution_is_not_counted(q, rule):
    blind = Rule(lambda q, w, reference: {"weight": w.double()}, lambda total, reference: reference, "sees nothing")
    task = _task(fedvi(rule=blind if rule == "blind" else rule, **FAST))
    order = open_round(task.program, task.begin().state, clients=5, cohort=5, seed=0)
    fine, info = task.engine.client(task.program, order, 0, None)
    assert contribute(task.program, fine, info)[1]
    assert not contribute(task.program, fine._replace(parts={"model": q}), info)[1]


def _overfitting():
    """Few noisy labels and many features: validation NLL falls, then rises."""
    g = torch.Generator().manual_seed(5)
    weights = torch.randn(20, generator=g)
    pairs = []
    for _ in range(3):
        x = torch.randn(16, 20, generator=g)
        y = (x @ weights + 3 * torch.randn(16, generator=g) > 0).long()
        pairs.append((x, y))
    return data.from_clients(pairs, classes=2)


def test_early_stopping_returns_the_best_validated_posterior():
    def run(**options):
        torch.manual_seed(0)
        net = nn.Linear(20, 2)
        return fit(net, _overfitting(), method=fedavg(lr=0.3, epochs=2, batch=8), validation=0.25, **options)

    stopped = run(rounds=60, patience=3)
    nlls = [r["validation"]["nll"] for r in stopped.journal]
    best = min(range(len(nlls)), key=nlls.__getitem__)
    assert len(nlls) < 60
    assert best == len(nlls) - 4
    assert f"round {best + 1}" in stopped.journal[-1]["stopped"]
    assert torch.equal(stopped.posterior.mean, run(rounds=best + 1).posterior.mean)
    assert not torch.equal(stopped.posterior.mean, stopped.progress.state.broadcast["model"].mean)


def test_patience_counts_evaluations():
    torch.manual_seed(0)
    options = {"rounds": 60, "validation": 0.25, "patience": 2, "evaluate_every": 3}
    run = fit(nn.Linear(20, 2), _overfitting(), method=fedavg(lr=0.3, epochs=2, batch=8), **options)
    judged = [r["round"] for r in run.journal if "validation" in r]
    assert judged == list(range(3, 3 * len(judged) + 1, 3))
    assert len(run.journal) == run.progress.best.round + 6


def test_a_validation_score_that_is_no_number_is_never_the_best(monkeypatch):
    nlls = iter([float("nan"), 3.0, float("nan"), 2.0])
    monkeypatch.setattr("fedbayes.training.rounds.scores_on", lambda *_: {"nll": next(nlls)})
    run = fit(nn.Linear(20, 2), _overfitting(), method=fedavg(**FAST), rounds=4, validation=0.25)
    assert run.progress.best.round == 4
    assert run.progress.best.score == 2.0


def test_held_out_rows_are_never_trained_on():
    task = prepare(nn.Linear(20, 2), _overfitting(), method=fedavg(**FAST), validation=0.25)
    trained = set(torch.cat([task.clients.train_rows(k) for k in range(3)]).tolist())
    assert len(task.validation) == 12
    assert not trained & set(task.validation.tolist())
    assert len(trained) + len(task.validation) == 48


def test_training_goes_on_from_init():
    net, clients = _net(), _clients()
    whole = fit(net, clients, method=fedavg(**FAST), rounds=1)
    start = {"model": Point(torch.arange(8.0), whole.posterior.layout)}
    assert torch.equal(fit(net, clients, method=fedavg(**FAST), rounds=0, init=start).posterior.mean, torch.arange(8.0))
    moved = fit(net, clients, method=fedavg(lr=1e-9, **FAST), rounds=1, init=start).posterior.mean
    torch.testing.assert_close(moved, torch.arange(8.0), rtol=1e-5, atol=1e-5)


def test_an_init_of_another_kind_or_network_is_refused():
    layout = prepare(_net(), _clients(), method="fedavg").program.initial["model"].layout
    wrong = {
        "kind": {"model": Gaussian(torch.zeros(8), torch.ones(8))},
        "length": {"model": Point(torch.zeros(7))},
        "layout": {"model": Point(torch.zeros(8), layout.select("weight"))},
        "part": {"modle": Point(torch.zeros(8))},
    }
    words = {"kind": "must be a Point", "length": "over 8 weights", "layout": "another network", "part": "'model'"}
    for case, init in wrong.items():
        with pytest.raises(ValueError, match=words[case]):
            fit(_net(), _clients(), method="fedavg", rounds=1, init=init)


def test_an_init_that_is_no_distribution_is_refused():
    bad = {"model": Gaussian(torch.zeros(8), -torch.ones(8))}
    with pytest.raises(ValueError, match="scale must be positive"):
        fit(_net(), _clients(), method="feduab", rounds=1, init=bad)


def test_the_journal_tells_each_rounds_messages_and_scores():
    run = fit(_net(), _clients(), method=fedvi(**FAST), rounds=2, cohort=3)
    for number, record in enumerate(run.journal, 1):
        assert record["round"] == number
        assert record["cohort"] == 3
        assert record["bytes_up"] == record["bytes_down"] == 3 * 2 * 4 * 8  # mean and scale, 8 weights, 4 bytes
        assert set(record["train"]) == {"loss", "kl", "negative_curvature"}
        assert 0 <= record["test"]["accuracy"] <= 1
    assert run.scores() == run.journal[-1]["test"]


def test_dwc_floors_are_in_the_journal():
    run = fit(_net(), _clients(), method=fedvi(rule="dwc", optimiser="sgd", kl_weight=0.0, lr=0.5, **FAST), rounds=1)
    assert run.journal[0]["floored"] >= 0


def test_without_a_test_set_there_are_no_test_scores():
    run = fit(_net(), _clients(test=False), method=fedavg(**FAST), rounds=1)
    assert run.journal[0]["test"] == {}


def test_zero_rounds_give_the_start():
    run = fit(_net(), _clients(), method="feduab", rounds=0)
    assert run.journal == []
    assert torch.equal(run.posterior.mean, nn.utils.parameters_to_vector(_net().parameters()))


def test_batch_norm_buffers_are_averaged_by_size_and_counters_take_the_largest():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    task = prepare(net, _clients(), method=fedavg(**FAST), rounds=1)
    order = open_round(task.program, task.begin().state, clients=5, cohort=5, seed=0)
    uploads = [task.engine.client(task.program, order, k, None)[0].parts for k in range(5)]
    sizes = torch.tensor([6.0, 9, 4, 12, 7])
    want = (sizes[:, None] * torch.stack([u["buffers"].mean for u in uploads])).sum(0) / sizes.sum()
    run = fit(net, _clients(), method=fedavg(weighting="equal", **FAST), rounds=1)
    torch.testing.assert_close(run.parts["buffers"].mean, want)
    assert run.parts["counters"].mean.tolist() == [3]  # 12 rows in batches of 5
    assert run.parts["counters"].mean.dtype == torch.int64
