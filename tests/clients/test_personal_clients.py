"""What stays home, whose prior it is, and who follows whom: the clients of FedPer, LG-FedAvg, BPFed and pFedBayes."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.bilevel import bilevel
from fedbayes.clients.client import Batch, Client, Info, Learner, Phase, Upload
from fedbayes.clients.home import Split
from fedbayes.clients.optimisers import OPTIMISERS, sgd
from fedbayes.clients.schedules import WITHIN
from fedbayes.data import from_clients
from fedbayes.engine.loop import Loop
from fedbayes.errors import InputError
from fedbayes.noise import Tape
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import Gaussian, softplus_inverse
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory


def federation(clients: int = 4, n: int = 12) -> fb.data.Clients:
    random = torch.Generator().manual_seed(1)
    x = torch.randn(clients, n, 5, generator=random)
    y = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()
    return from_clients(list(zip(x, y)), test=(x.flatten(0, 1), y.flatten()), kind="classes", classes=3)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3))


def test_a_network_cut_by_pattern_and_merged_again_is_the_same():
    layout = Layout.of(network())
    q = Gaussian(torch.randn(layout.size), torch.rand(layout.size) + 0.1, layout)
    split = Split.of({"model": layout}, ("3.*", "0.bias"))
    shared, home = split.cut({"model": q})
    assert shared["model"].layout.names == ("0.weight", "2.weight", "2.bias")
    assert home["model"].layout.names == ("0.bias", "3.weight", "3.bias")
    again = split.merge(shared, home)["model"]
    assert torch.equal(again.mean, q.mean)
    assert torch.equal(again.scale, q.scale)
    assert again.layout == layout


@pytest.mark.parametrize(
    ("method", "travels"),
    [("fedper", {"0.weight", "0.bias"}), ("lg_fedavg", {"3.weight", "3.bias"}), ("bpfed", {"0.weight", "0.bias"})],
)
def test_only_what_is_shared_travels_and_the_rest_goes_on_at_home(method, travels):
    task = prepare(network(), federation(), method=method, rounds=2, cohort=2, seed=3)
    sent = task.orders(task.begin())[-1].broadcast
    assert set(sent["model"].layout.names) - {"2.weight", "2.bias"} == travels
    own = Memory()
    (_, first), (_, second) = rounds(task, task.begin(), own)
    assert first["bytes_up"] < 4 * sum(p.numel() for p in network().parameters()) * 2 * 2
    assert set(own.rows) <= set(range(4))
    assert "personal" in second
    kept = {n for row in own.rows.values() for q in row["home"].values() for n in q.layout.names}
    assert not kept & travels


def test_the_head_is_the_last_layer_of_any_network_and_a_stray_pattern_is_refused():
    task = prepare(network(), federation(), method=fb.methods.fedper(), rounds=1)
    assert not any(n.startswith("3.") for n in task.program.initial["model"].layout.names)
    with pytest.raises(InputError, match=r"home: no weight matches 'classifier"):
        prepare(network(), federation(), method=fb.methods.fedper(home=("classifier.*",)), rounds=1)
    with pytest.raises(InputError, match="nothing would be left to share"):
        prepare(network(), federation(), method=fb.methods.fedper(home=("*",)), rounds=1)


def test_a_method_without_a_global_model_says_so_and_its_scores_are_personal():
    run = fb.fit(network(), federation(), method="fedper", rounds=2)
    with pytest.raises(InputError, match="no global model"):
        run.predict(run.task.clients.data.test_x)
    last = run.journal[-1]
    assert last["test"]["accuracy"] == last["personal"]["accuracy"]
    assert last["personal"]["clients"] == 4
    assert run.personal(2).predict(run.task.clients.data.test_x).probs.shape == (48, 3)


@pytest.mark.parametrize("engine", ["loop", "stacked"])
@pytest.mark.parametrize("method", ["fedavg", "feduab", "pvi", "pfedbayes", "bpfed", "fedper"])
def test_personal_evaluation_changes_nothing_and_repeats(method, engine):
    def run(every):
        made = fb.methods.method_named(method, {"epochs": 1})
        return fb.fit(network(), federation(), method=made, rounds=3, cohort=2, engine=engine, personal_every=every)

    with_them, without = run(2), run(0)
    for part, q in with_them.parts.items():
        assert torch.equal(q.mean, without.parts[part].mean), part
    assert with_them.journal[1]["personal"]["clients"] == 4
    assert with_them.personal_scores() == with_them.journal[2]["personal"]
    a, b = (with_them.personal(1).parts["model"].mean for _ in range(2))
    assert torch.equal(a, b)


def test_engines_make_the_same_personal_models():
    def parts(engine):
        net = network().double()
        run = fb.fit(net, federation(), method="feduab", rounds=1, engine=engine)
        return [run.personal(k).parts["model"] for k in range(4)]

    for a, b in zip(parts("loop"), parts("stacked"), strict=True):
        torch.testing.assert_close(a.mean, b.mean, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(a.scale, b.scale, rtol=1e-9, atol=1e-9)


def test_a_personal_model_of_fedavg_is_a_round_of_training_from_the_broadcast():
    """Without noise or shuffling that matters (one batch), it is what the client would upload next."""
    task = prepare(network(), federation(), method=fb.methods.fedavg(batch=12, epochs=1, lr=0.1), rounds=1, seed=5)
    run = fb.fit(network(), federation(), method=fb.methods.fedavg(batch=12, epochs=1, lr=0.1), rounds=1, seed=5)
    order = task.orders(run.progress)[-1]
    upload, _ = Loop(task.engine.store, seed=5).client(task.program, order, 1, None)
    torch.testing.assert_close(run.personal(1).parts["model"].mean, upload.parts["model"].mean)


def still_inner(q: Gaussian) -> Client:
    """A variational client whose q does not move, to watch what its copy does."""
    vectors = {"mean": q.mean, "rho": softplus_inverse(q.scale)}
    zero = torch.zeros(())
    return Client(
        lambda own, info: Learner(vectors, {}, (), zero, zero),
        (Phase(lambda state, b, tape, info: state, 1, 1),),
        lambda state, info: Upload({"model": q}, {}, {}),
    )


def test_the_copy_of_pfedbayes_follows_the_gradient_of_kl():
    torch.manual_seed(0)
    q = Gaussian(torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.2)
    v = Gaussian(torch.randn(6, dtype=torch.float64), torch.rand(6, dtype=torch.float64) + 0.2)
    client = bilevel(still_inner(q), optimiser=sgd(), kl="constant")
    one = torch.ones((), dtype=torch.float64)
    info = Info({"model": v}, {"global_lr": 0.01 * one, "kl_weight": 3 * one}, torch.tensor(0), torch.tensor(1), (one,))
    state = client.start({"model": q}, info)
    moved = client.phases[0].step(state, Batch(one, one, None, torch.tensor(0)), Tape(), info)

    mean, rho = v.mean.clone().requires_grad_(), softplus_inverse(v.scale).requires_grad_()
    kl = 3 * q.kl(Gaussian(mean, nn.functional.softplus(rho)))
    slopes = torch.autograd.grad(kl, (mean, rho))
    torch.testing.assert_close(moved.copy["mean"], mean - 0.01 * slopes[0])
    torch.testing.assert_close(moved.copy["rho"], rho - 0.01 * slopes[1])


@pytest.mark.parametrize("within", WITHIN)
def test_both_rates_of_pfedbayes_follow_the_schedule_within_a_round(within, monkeypatch):
    """The copy's is three times the other's in every step."""
    rates: dict[tuple[str, ...], list[float]] = {}
    update = sgd().update

    def watched(state, vectors, gradients, rate):
        rates.setdefault(tuple(vectors), []).append(float(rate))
        return update(state, vectors, gradients, rate)

    monkeypatch.setitem(OPTIMISERS, "sgd", lambda momentum: sgd()._replace(update=watched))
    method = fb.methods.pfedbayes(
        **{"optimiser": "sgd", "lr": 0.01, "global_lr": 0.03, "epochs": 2, "batch": 4, "lr_within": within}
    )
    fb.fit(network(), federation(1), method=method, rounds=1, engine="loop")
    own = next(each for names, each in rates.items() if "points" in names)[:6]
    copy = next(each for names, each in rates.items() if "points" not in names)[:6]
    assert len(own) == 6
    assert copy == pytest.approx([3 * rate for rate in own], rel=1e-5)
    assert (len({*own}) == 1) is (within == "constant")


def test_pfedbayes_keeps_its_personal_posterior_and_uploads_the_copy():
    task = prepare(network(), federation(), method=fb.methods.pfedbayes(points=("2.*",)), rounds=2, cohort=4)
    own = Memory()
    steps = list(rounds(task, task.begin(), own))
    assert len(steps) == 2
    assert set(own.rows) == {0, 1, 2, 3}
    shared = steps[-1][0].state.broadcast["model"]
    assert all(not torch.equal(row["model"].mean, shared.mean) for row in own.rows.values())
