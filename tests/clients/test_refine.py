"""Classifiers refined at home: what is gathered, what a flow is fitted to, and that training stays what it was."""

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.clients.laplace import CLASSIFIER, log_likelihood
from fedbayes.clients.refine import first_directions, first_flow
from fedbayes.data import from_clients
from fedbayes.errors import InputError
from fedbayes.federation.weighting import WEIGHTINGS
from fedbayes.methods import METHODS
from fedbayes.model.classifier import group_of
from fedbayes.model.likelihood import normal
from fedbayes.options import options_of
from fedbayes.posterior.flow import Flowed, Radial, reverse_kl
from fedbayes.posterior.full import FullGaussian
from fedbayes.posterior.spliced import Grafted
from fedbayes.posterior.values import Gaussian, Point
from fedbayes.training.personal import gather, personal_models

SIZES = (9, 6, 13)
QUICK = {"epochs": 1, "batch": 8, "lr": 0.1}
FLOW = {"refine": "flow", "flow_length": 2, "flow_epochs": 2, "flow_batch": 6, "flow_draws": 2, "flow_lr": 0.02}
OTHER = {"sent": "own", "own": "sent"}  # priors of a flow


def federation(sizes=SIZES, classes=3) -> fb.data.Clients:
    g = torch.Generator().manual_seed(1)
    pairs = []
    for n in sizes:
        x = torch.randn(n, 5, generator=g)
        pairs.append((x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()))
    test = (torch.cat([x for x, _ in pairs]), torch.cat([y for _, y in pairs]))
    return from_clients(pairs, test=test, kind="classes", classes=classes)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.BatchNorm1d(6), nn.Linear(6, 3)).double()


def trained(method: str, engine: str = "auto", clients=None, **options) -> fb.Run:
    made = fb.methods.method_named(method, {**QUICK, **options})
    clients = clients or federation()
    return fb.fit(network(), clients, method=made, rounds=2, engine=engine, evaluate_every=5, seed=2)


KINDS = {
    "fedavg, laplace": {"refine": "laplace"},
    "fedavg, laplace, diagonal": {"refine": "laplace", "hessian": "diag"},
    "fedavg, flow": FLOW,
    "fedavg, swag": {"refine": "laplace", "posterior": "swag", "walk_epochs": 2},
    "lg_fedavg, flow over swag, every round": {**FLOW, "posterior": "swag", "laplace": "every", "walk_epochs": 2},
    "fedavg, flow, every round": {**FLOW, "laplace": "every", "hessian": "full"},
    "fedavg, flow towards its own posterior": {**FLOW, "flow_prior": "own"},
    "fedavg, flow over what is trained": {**FLOW, "after": "trained"},
    "fedavg, flow over a hidden layer": {**FLOW, "classifier": ("0.*",), "hessian": "full"},
    "fedper, flow": FLOW,
    "fedper, laplace, full": {"refine": "laplace", "hessian": "full"},
    "lg_fedavg, flow": FLOW,
    "feduab, flow": FLOW,
    "feduab, laplace": {"refine": "laplace"},
    "bpfed, flow": FLOW,
    "pfedbayes, flow": FLOW,
    "feddyn, flow": FLOW,
    "fedlap, laplace, every round": {"refine": "laplace", "laplace": "every"},
    "scaffold, flow, every round": {**FLOW, "laplace": "every"},
}
REFINING = [name for name, method in METHODS.items() if "refine" in options_of(method)]


@pytest.mark.parametrize("kind", KINDS)
def test_engines_make_the_same_refined_models_alone_and_in_a_cohort(kind):
    """`personal(k)` makes a cohort of one; `personal_scores` judges models that are made together."""
    method, options = kind.split(",")[0], KINDS[kind]
    loop, stacked = (trained(method, engine, **options) for engine in ("loop", "stacked"))
    noise = torch.randn(3, 69, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    (cohort,) = personal_models([stacked.home], [range(3)])
    for k, together in cohort[0]:
        a, b = loop.personal(k).parts["model"], stacked.personal(k).parts["model"]
        assert isinstance(a, Grafted)
        normals = noise[:, : a.normals]
        torch.testing.assert_close(a.at(normals), b.at(normals), rtol=1e-7, atol=1e-8)
        torch.testing.assert_close(together["model"].at(normals), b.at(normals), rtol=1e-7, atol=1e-8)
    assert not stacked.task.engine.take_notes()  # nothing fell back to the loop
    if options["refine"] == "flow":
        graft = loop.personal(1).parts["model"].graft
        assert isinstance(graft, Flowed)
        assert not torch.equal(graft.mean, graft.base.mean)  # it went somewhere


@pytest.mark.parametrize("when", ["end", "every"])
@pytest.mark.parametrize("method", REFINING)
def test_every_method_refines_its_classifier(method, when):
    server = {"server_data": torch.randn(64, 5)} if method == "fedbe" else {}
    made = fb.methods.method_named(method, {**QUICK, **FLOW, "laplace": when})
    run = fb.fit(network(), federation(), method=made, rounds=1, seed=2, **server)
    assert isinstance(run.personal(0).parts["model"], Grafted)
    assert 0 < run.personal_scores()["nll"] < 20
    if run.task.program.prediction.whole:
        assert 0 < run.scores()["nll"] < 20


@pytest.mark.parametrize("method", ["fedavg", "fedper", "lg_fedavg", "feduab", "feddyn", "scaffold"])
def test_refinement_changes_nothing_of_the_training(method):
    plain, refined = trained(method), trained(method, **FLOW)
    for part, q in plain.progress.state.broadcast.items():
        assert torch.equal(q.mean, refined.progress.state.broadcast[part].mean), part
    refined.personal_scores()
    assert refined.own.rows.keys() == plain.own.rows.keys()
    again = plain.refined(**FLOW)  # after the fact
    assert again.personal_scores() == refined.personal_scores()
    assert again.refined("none").personal_scores() == plain.refined("none").personal_scores()


def test_a_model_as_received_is_the_broadcast_and_what_is_at_home():
    run = trained("fedavg", refine="none")
    assert torch.equal(run.personal(1).parts["model"].mean, run.posterior.mean)
    run = trained("fedper", refine="none")
    whole, layout = run.personal(1).parts["model"].mean, run.task.program.model.layouts["model"]
    named = layout.split(whole)
    assert torch.equal(named["0.weight"].flatten(), run.progress.state.broadcast["model"].mean[:30])
    head = run.own.rows[1]["home"]["model"]
    assert torch.equal(named["3.weight"].flatten(), head.layout.split(head.mean)["3.weight"].flatten())


@pytest.mark.parametrize("hessian", ["diag", "kron", "full"])
def test_what_is_gathered_is_the_pool_of_posteriors_at_the_broadcast(hessian):
    run = trained("fedavg", refine="laplace", hessian=hessian)
    q = gather(run.home).gathered[CLASSIFIER]
    program = run.task.gather
    orders = [run.home.order([k], "gather") for k in range(3)]
    sent = [run.task.engine.run(program, order, run.own.get) for order in orders]
    one = [program.pooling.rules[CLASSIFIER].decode(s.terms[CLASSIFIER], Point(q.mean, q.layout)) for s in sent]
    pooled = fb.pool(program.pooling.rules[CLASSIFIER], one, SIZES)
    torch.testing.assert_close(q.moments()[1], pooled.moments()[1], rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(q.mean, run.posterior.mean[-21:], rtol=1e-6, atol=1e-6)
    assert isinstance(q, Gaussian if hessian == "diag" else FullGaussian)
    sampled = run.personal(0).parts["model"]
    torch.testing.assert_close(sampled.graft.moments()[1], q.moments()[1])
    assert torch.equal(sampled.stock.mean, run.posterior.mean)


@pytest.mark.parametrize("weighting", WEIGHTINGS)
def test_what_is_gathered_is_weighed_by_size_where_training_measures_distances(weighting):
    run = trained("fedavg", refine="laplace", weighting=weighting)
    pooled = gather(run.home).gathered[CLASSIFIER]
    equal = gather(trained("fedavg", refine="laplace", weighting="equal").home._replace(state=run.home.state))
    size = gather(trained("fedavg", refine="laplace", weighting="size").home._replace(state=run.home.state))
    same = equal if weighting == "equal" else size
    assert not torch.equal(equal.gathered[CLASSIFIER].tril, size.gathered[CLASSIFIER].tril)
    torch.testing.assert_close(pooled.tril, same.gathered[CLASSIFIER].tril, rtol=1e-10, atol=1e-12)


def test_every_round_the_posterior_travels_and_the_global_model_predicts_by_it():
    run = trained("fedavg", refine="laplace", laplace="every")
    plain = trained("fedavg")
    assert run.journal[0]["bytes_up"] - plain.journal[0]["bytes_up"] == 3 * 8 * (21 + 21 * 21)
    assert isinstance(run.parts["model"], Grafted)
    x = run.task.clients.data.test_x
    p = run.predict(x, draws=200)
    assert (p.epistemic.sum(-1) > 0).all()
    q = run.progress.state.broadcast[CLASSIFIER]
    torch.testing.assert_close(q.mean, plain.posterior.mean[-21:], rtol=1e-9, atol=1e-9)


def test_a_flow_comes_closer_to_the_clients_posterior_than_its_base():
    """Measured by the whole reverse KL on all rows of the client, up to the same constant, for either prior."""
    options = {
        **FLOW,
        "flow_epochs": 30,
        "flow_lr": 0.04,
        "flow_length": 6,
        "flow_draws": 8,
        "prior_of": "fixed",
        "prior_precision": 0.5,
    }
    run = trained("fedavg", clients=federation((14, 9, 20)), **options)
    task, model = run.task, run.task.program.model
    noise = torch.randn(1000, 21, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    refined = {prior: run.refined(**options, flow_prior=prior) for prior in ("sent", "own")}
    made = {prior: dict(next(personal_models([r.home], [range(3)]))[0]) for prior, r in refined.items()}
    own = Gaussian(torch.zeros(21).double(), torch.full((21,), 2.0**0.5).double())
    for k in range(3):
        flows = {prior: models[k]["model"].graft for prior, models in made.items()}
        base = flows["sent"].base
        rows = task.clients.train_rows(k)
        x, y = task.clients.data.x[rows], task.clients.data.y[rows]
        group = group_of(model, model.module, ("head",), x[:1])
        vectors = {part: q.mean for part, q in made["sent"][k].items()} | {"model": run.posterior.mean}
        seen = group.look(vectors, x)
        still = Flowed(base, Radial(**first_flow(base.mean, first_directions(6, len(base.mean)))))
        for asked, prior in {"sent": base, "own": own}.items():

            def target(draws, seen=seen, y=y, group=group, vectors=vectors, prior=prior):
                fit = torch.func.vmap(lambda w: log_likelihood(w, group, seen, y, None, vectors))(draws)
                return fit + prior.log_prob(draws)

            before, away = (float(reverse_kl(q, target, noise)) for q in (still, flows[OTHER[asked]]))
            after = float(reverse_kl(flows[asked], target, noise))
            assert after < before - 0.2, (k, asked, before, after)
            assert after < away, (k, asked, after, away)


def test_a_variational_posterior_refined_by_laplace_is_exact_for_a_linear_gaussian_model():
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(n, 3, generator=g).double(), torch.randn(n, 1, generator=g).double()) for n in (12, 7)]
    clients = from_clients(pairs, pairs[0], kind="real")
    torch.manual_seed(0)
    method = fb.methods.feduab(refine="laplace", hessian="full", epochs=1, batch=4, lr=0.01)
    run = fb.fit(nn.Linear(3, 1).double(), clients, method=method, rounds=1, likelihood=normal(0.5), evaluate_every=9)
    prior = run.posterior
    for k in range(2):
        rows = clients.train_rows(k)
        x, y = clients.data.x[rows].double(), clients.data.y[rows].double()
        design = torch.cat([x, torch.ones(len(x), 1).double()], 1)
        precision = design.T @ design / 0.25 + torch.diag(prior.scale**-2)
        mean = torch.linalg.solve(precision, design.T @ y[:, 0] / 0.25 + prior.mean * prior.scale**-2)
        q = run.personal(k).parts["model"].graft
        torch.testing.assert_close(q.mean, mean, rtol=1e-6, atol=1e-7)
        torch.testing.assert_close(q.covariance, torch.linalg.inv(precision), rtol=1e-6, atol=1e-8)


EDGES = {
    "one class": ([(5, 0), (9, None)], 3),
    "fewer rows than classes": ([(2, None), (9, None)], 3),
    "one row": ([(1, None), (9, None)], 3),
}


@pytest.mark.parametrize("method", ["fedavg_pf", "fedper_pf", "lg_fedavg_pf"])
@pytest.mark.parametrize("edge", EDGES)
def test_clients_with_little_to_say_have_finite_refined_models(method, edge):
    sites, classes = EDGES[edge]
    g = torch.Generator().manual_seed(0)
    pairs = []
    for n, label in sites:
        y = torch.randint(classes, (n,), generator=g) if label is None else torch.full((n,), label)
        pairs.append((torch.randn(n, 5, generator=g), y))
    clients = from_clients(pairs, pairs[1], kind="classes", classes=classes)
    run = trained(method, clients=clients, **{**FLOW, "hessian": "full"})
    scores = run.personal_scores()
    assert scores["clients"] == 2
    assert 0 < scores["nll"] < 20
    probs = run.personal(0).predict(clients.data.test_x).probs
    assert torch.isfinite(probs).all()


def test_swag_has_the_moments_of_a_plain_walk_of_the_classifier():
    """One batch of all rows in a fixed order would be drawn with replacement: with one row there is no choice."""
    g = torch.Generator().manual_seed(0)
    pairs = [(torch.randn(1, 5, generator=g), torch.tensor([2])) for _ in range(2)]
    clients = from_clients(pairs, pairs[1], kind="classes", classes=3)
    options = {"refine": "laplace", "posterior": "swag", "walk_epochs": 7, "walk_lr": 0.3}
    run = trained("fedavg", clients=clients, **options)
    own = network()
    layout = run.task.program.model.layouts["model"]
    own.load_state_dict(layout.split(run.posterior.mean), strict=False)
    own.load_state_dict(run.task.program.model.layouts["buffers"].split(run.parts["buffers"].mean), strict=False)
    own.eval()
    walks = []
    for x, y in pairs:
        features, head = own[:3](x.double()).detach(), nn.Linear(6, 3).double()
        head.load_state_dict(own[3].state_dict())
        optimiser, seen = torch.optim.SGD(head.parameters(), lr=0.3), []
        for _ in range(7):
            optimiser.zero_grad()
            nn.functional.cross_entropy(head(features), y).backward()
            optimiser.step()
            seen.append(nn.utils.parameters_to_vector(head.parameters()).detach().clone())
        walks.append(torch.stack(seen))
    means, variances = (
        torch.stack([f(w) for w in walks]) for f in (lambda w: w.mean(0), lambda w: w.var(0, correction=0))
    )
    q = gather(run.home).gathered[CLASSIFIER]
    torch.testing.assert_close(q.mean, means.mean(0), rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(q.scale**2, variances.mean(0) + means.var(0, correction=0), rtol=1e-5, atol=1e-11)


def test_swag_at_home_is_refused():
    with pytest.raises(InputError, match="swag"):
        trained("fedper", refine="flow", posterior="swag")


def test_ood_scores_and_predictions_take_refined_models():
    run = trained("fedavg_pf", **FLOW)
    x = run.task.clients.data.test_x[:7]
    personal = run.personal(1)
    probs = personal.predict(x, draws=500).probs
    torch.testing.assert_close(probs.sum(-1), torch.ones(7).double())
    found = fb.ood.scores(personal.as_run, x)
    assert {"msp", "entropy", "energy", "max_logit", "odin", "mutual_information", "epistemic"} <= set(found)
    torch.testing.assert_close(found["msp"], 1 - personal.predict(x).probs.amax(-1), rtol=1e-9, atol=1e-9)
    assert (found["mutual_information"] > 0).all()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"refine": "flown"}, "refine"),
        ({"refine": "flow", "hessian": "block"}, "hessian"),
        ({"refine": "flow", "flow_length": 0}, "flow_length"),
        ({"refine": "flow", "flow_lr": -1.0}, "flow_lr"),
        ({"flow_length": 3}, "refine"),
        ({"refine": "flow", "prior_of": "broadcast"}, "every"),
        ({"refine": "flow", "classifier": ("tail.*",)}, "tail"),
        ({"refine": "flow", "posterior": "mcmc"}, "posterior"),
        ({"refine": "flow", "flow_prior": "none"}, "flow_prior"),
    ],
    ids=str,
)
def test_options_that_make_no_sense_are_refused_by_name(options, words):
    with pytest.raises(InputError, match=words):
        trained("fedavg", **options)


def test_a_normal_over_the_network_has_no_other_prior():
    with pytest.raises(InputError, match="flow_prior"):
        trained("feduab", **FLOW, flow_prior="own")


def test_a_prior_that_is_broadcast_narrows_the_posterior_round_by_round():
    made = fb.methods.fedavg(**QUICK, refine="laplace", laplace="every", prior_of="broadcast", hessian="full")
    widths = []
    for rounds in (1, 4):
        run = fb.fit(network(), federation(), method=made, rounds=rounds, evaluate_every=9)
        q = run.progress.state.broadcast[CLASSIFIER]
        widths.append(float(torch.logdet(q.covariance)))
    assert widths[1] < widths[0]
