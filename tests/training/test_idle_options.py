"""Options that were set and change nothing: said in one line where that is so, and nowhere else."""

import warnings

import pytest
import torch
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import experiment_of
from fedbayes.methods import METHODS, method_named
from fedbayes.options import options_of
from fedbayes.runs import journal
from fedbayes.training.prepare import prepare

SIZES = (30, 12, 50)
IVON = {"optimiser": "ivon"}


@pytest.fixture(scope="module")
def clients():
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(n, 3, generator=random) for n in SIZES]
    sites = [(x.numpy(), (x[:, 0] + 0.3 * x[:, 1] > 0).long().numpy()) for x in rows]
    return fb.data.from_clients(sites, test=sites)


def _trained(clients, name, options, given, *, lines=False):
    torch.manual_seed(1)
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    short = {"epochs": 1} if "epochs" in options_of(METHODS[name]) else {}
    server = {"server_data": torch.randn(64, 3)} if name in ("fedbe", "fedppd_distill") else {}
    arguments = {"method": method_named(name, {**short, **options}), "rounds": 2, "engine": "loop", **server, **given}
    if lines:
        return prepare(network, clients, **arguments).idle
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = fb.fit(network, clients, **arguments)
    each = [getattr(q, name, None) for q in run.parts.values() for name in ("mean", "scale")]
    return torch.cat([t.flatten().double() for t in each if isinstance(t, torch.Tensor)])


def _cases():
    for name, method in METHODS.items():
        open_ones = {*options_of(method)} - {*method.fixed}
        yield name, {}, {}, {"cap_rows": 20}
        yield from ((name, {}, {key: 0.4}, {}) for key in ("outliers", "initial") if key in open_ones)
        if name in ("fedavg", "fedag", "fedvi", "fedbe"):
            weightings = ("equal", "size", "distance", "discrepancy")
            yield from ((name, {"weighting": w}, {}, {"cap_rows": 20}) for w in weightings)
    for name, options in (
        ("fedvi", {"prior": "broadcast"}),
        ("fedvi", {"weighting": "distance"}),
        ("fedvi", {"beta2": 0.9}),
        ("fedvi", {"optimiser": "sgd", "lr": 0.05}),
        ("feduab", {**IVON, "prior": "fixed"}),
        ("bpfed", IVON),
        ("pvi", {"beta2": 0.9}),
        ("pvi", {"optimiser": "sgd", "lr": 0.05}),
    ):
        yield name, options, {"initial": 0.3}, {}


@pytest.mark.parametrize(("name", "options", "more", "given"), [*_cases()], ids=str)
def test_an_option_is_said_to_change_nothing_where_it_does(clients, name, options, more, given):
    key = next(iter({**more, **given}))
    without, with_it = _trained(clients, name, options, {}), _trained(clients, name, {**options, **more}, given)
    said = [line for line in _trained(clients, name, {**options, **more}, given, lines=True) if line.startswith(key)]
    assert bool(said) == torch.equal(without, with_it)
    assert all(f"changes nothing in {name}" in line and "leave it out" in line for line in said)
    assert not any(line.startswith(key) for line in _trained(clients, name, options, {}, lines=True))


def test_a_cap_of_precision_is_in_units_of_the_first_scales(clients):
    assert not _trained(clients, "fedvi", {"initial": 0.3}, {"cap_precision": 2.0}, lines=True)


def test_rows_count_for_statistics_that_are_averaged_by_size(clients):
    network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2))
    method = fb.methods.fedavg(weighting="equal")
    assert not prepare(network, clients, method=method, rounds=1, cap_rows=20).idle


def test_inputs_of_a_server_that_trains_nothing_are_warned_of_and_in_the_journal(clients):
    method, inputs = fb.methods.fedavg(outliers=0.3), torch.zeros(64, 3)
    with pytest.warns(UserWarning, match="server_data changes nothing in fedavg: .*take fedbe") as caught:
        run = fb.fit("linear", clients, method=method, rounds=2, server_data=inputs)
    assert {w.filename for w in caught} == {__file__}
    lines = [str(w.message) for w in caught if "changes nothing" in str(w.message)]
    assert lines == run.journal[0]["notes"]
    assert [line.split()[0] for line in lines] == ["outliers", "server_data"]
    assert not any("changes nothing" in note for note in run.journal[1].get("notes", ()))


def test_a_comparison_says_it_once_for_the_method_that_has_no_use(tmp_path):
    (tmp_path / "two.toml").write_text(
        'data = "digits"\nclients = 3\nnetwork = "linear"\nmethods = ["feduab", "pvi"]\nrounds = 2\n'
        "options = { initial = 0.05, epochs = 1 }"
    )
    done = CliRunner().invoke(app, ["run", str(tmp_path / "two.toml"), "--output", str(tmp_path / "two")])
    said = " ".join(done.output.split())
    assert done.exit_code == 0
    assert said.count("pvi: initial changes nothing in pvi") == 1
    assert "feduab: initial" not in said
    assert "initial changes nothing in pvi" in journal.read(tmp_path / "two" / "pvi")[0]["notes"][0]


def test_on_flower_precision_is_capped_in_units_of_the_first_scales():
    table = {"data": "digits", "clients": 3, "network": "linear", "engine": "flower", "rounds": 1}
    for method, said in (("fedvi", 0), ("pvi", 1)):
        task = build(experiment_of({**table, "method": method, "options": {"initial": 0.3}}))
        assert len(task.idle) == said
