"""A sweep is its members: the same answers as alone, each in a folder of its own, and resumable."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from fedbayes.data import Dataset
from fedbayes.errors import InputError
from fedbayes.experiments.build import build, options_of_method
from fedbayes.experiments.experiment import Experiment, to_toml, with_settings
from fedbayes.runs.folder import load, resume, run
from fedbayes.runs.home import locked
from fedbayes.runs.records import runs_in
from fedbayes.runs.sweep import members_of, program_of, sweep, values_of
from fedbayes.training.fit import train
from fedbayes.training.rounds import rounds_together
from fedbayes.training.run import Memory

DIGITS = Experiment(
    data="digits",
    partition="dirichlet",
    partition_options={"alpha": 0.5},
    clients=8,
    cohort=3,
    rounds=2,
    network_options={"hidden": [8]},
    options={"epochs": 1, "test_draws": 2},
    evaluate_every=2,
)


def test_values_are_ranges_or_lists() -> None:
    assert values_of("seed=0..2") == ("seed", ["0", "1", "2"])
    assert values_of("kl_weight=1e-5, 1e-4") == ("kl_weight", ["1e-5", "1e-4"])


@pytest.mark.parametrize("bad", ["seed", "seed=", "=1", "seed=3..1"])
def test_an_odd_range_is_refused_by_name(bad: str) -> None:
    with pytest.raises(InputError, match="--over"):
        values_of(bad)


def test_members_are_all_combinations_and_say_what_may_be_one_program() -> None:
    members = members_of(DIGITS, ["seed=0..1", "lr=0.01,0.1", "batch=5,10"])
    assert len(members) == 8
    assert members["seed=1,lr=0.1,batch=5"].options["lr"] == 0.1
    assert len({program_of(member) for member in members.values()}) == 2  # batch is a shape, seed and lr are numbers


def test_a_switched_off_term_is_another_program() -> None:
    members = members_of(replace(DIGITS, method="fedavg"), ["weight_decay=0.0,0.1,0.2"])
    assert len({program_of(member) for member in members.values()}) == 2


def test_the_folder_of_a_sweep_says_how_it_goes_on(tmp_path: Path) -> None:
    sweep(DIGITS, ["seed=0..1"], tmp_path)
    with pytest.raises(InputError, match=r"is a sweep: give one of its runs, such as .*seed=0, or the same `fedbayes"):
        resume(tmp_path)


def test_every_member_equals_its_run_alone(tmp_path: Path) -> None:
    made = sweep(DIGITS, ["seed=0..1", "kl_weight=1e-4,1e-2"], tmp_path / "sweep")
    alone = run(replace(DIGITS, seed=1, options={**DIGITS.options, "kl_weight": 1e-2}), tmp_path / "alone")["feduab"]
    member = made["seed=1,kl_weight=1e-2"]
    torch.testing.assert_close(member.posterior.mean, alone.posterior.mean, rtol=1e-5, atol=1e-6)
    assert len(runs_in(tmp_path / "sweep")) == 4
    again = load(tmp_path / "sweep" / "seed=1,kl_weight=1e-2")
    assert torch.equal(again.posterior.mean, member.posterior.mean)


def test_a_sweep_goes_on_where_it_was(tmp_path: Path) -> None:
    whole = sweep(DIGITS, ["seed=0..1"], tmp_path / "whole")
    sweep(replace(DIGITS, rounds=1), ["seed=0..1"], tmp_path / "cut")
    for name in ("seed=0", "seed=1"):
        config = tmp_path / "cut" / name / "config.toml"
        config.write_text(config.read_text().replace("rounds = 1", "rounds = 2"))
    went_on = sweep(DIGITS, ["seed=0..1"], tmp_path / "cut")
    for name in whole:
        assert torch.equal(went_on[name].posterior.mean, whole[name].posterior.mean)
        assert [r["round"] for r in went_on[name].journal] == [1, 2]
    again = sweep(DIGITS, ["seed=0..1"], tmp_path / "cut")
    assert torch.equal(again["seed=0"].posterior.mean, whole["seed=0"].posterior.mean)


def test_numbers_are_read_as_people_write_them() -> None:
    written = {".2": 0.2, "5.": 5.0, "-1": -1, "1e-5": 1e-5, "2.e-3": 2e-3, "+.5": 0.5, "3": 3}
    for text, number in written.items():
        set_so = with_settings(DIGITS, [f"options.lr={text}"], options_of_method).options["lr"]
        assert set_so == number
        assert type(set_so) is type(number)
    assert with_settings(DIGITS, ["data_options.sizes=[.2, 5., 1]"], options_of_method).data_options["sizes"] == [
        0.2, 5.0, 1,
    ]  # fmt: skip
    assert with_settings(DIGITS, ["data=v1.x:made"], options_of_method).data == "v1.x:made"
    members = members_of(replace(DIGITS, method="pvi"), ["damping=.2,.5,1."])
    assert [member.options["damping"] for member in members.values()] == [0.2, 0.5, 1.0]


class Turned(nn.Module):
    """Turns its inputs by a tensor that is neither a weight nor a buffer."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.turn = torch.randn(64, 8)
        self.last = nn.Linear(8, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(x.flatten(1) @ self.turn)


def test_members_whose_networks_hold_other_plain_tensors_are_trained_apart(tmp_path: Path) -> None:
    turned = replace(DIGITS, network=f"{__name__}:Turned", network_options={}, method="fedavg")
    made = sweep(turned, ["seed=0..1"], tmp_path / "sweep")
    alone = run(replace(turned, seed=1), tmp_path / "alone")["fedavg"]
    torch.testing.assert_close(made["seed=1"].posterior.mean, alone.posterior.mean, rtol=1e-5, atol=1e-6)


def site(client: int | None, rows: int = 12) -> Dataset:
    """One site's rows: its own, whoever else there is."""
    random = torch.Generator().manual_seed(0 if client is None else 1 + client)
    x, y = torch.randn(rows, 4, generator=random), torch.randint(2, (rows,), generator=random)
    return Dataset("sites", x, y, x[:4], y[:4], "classes", 2)


def test_sites_that_are_asked_one_by_one_may_be_more_or_fewer(tmp_path: Path) -> None:
    asked = replace(DIGITS, data=f"{__name__}:site", partition="iid", partition_options={}, cohort=2, method="fedavg")
    made = sweep(asked, ["clients=2,5"], tmp_path / "sweep")
    for clients in (2, 5):
        alone = run(replace(asked, clients=clients), tmp_path / f"{clients}")["fedavg"]
        assert len(made[f"clients={clients}"].task.clients) == clients
        torch.testing.assert_close(
            made[f"clients={clients}"].posterior.mean, alone.posterior.mean, rtol=1e-5, atol=1e-6
        )


def test_nothing_is_fitted_on_a_site_that_a_member_leaves_out(tmp_path: Path) -> None:
    for k, name in enumerate(("aachen", "basel", "cadiz")):
        lines = [f"{i + 9 * k},{name if i % 2 else 'any'},{'yes' if i % 3 else 'no'}" for i in range(30)]
        (tmp_path / f"{name}.csv").write_text("\n".join(["age,ward,ill", *lines]))
    options = {"sites": str(tmp_path / "*.csv"), "target": "ill"}
    tables = Experiment(data="tables", data_options=options, network="linear", method="fedavg", rounds=1)
    made = sweep(tables, ["leave_out=aachen,cadiz"], tmp_path / "sweep")
    for site in ("aachen", "cadiz"):
        member = made[f"leave_out={site}"]
        alone = run(replace(tables, leave_out=site), tmp_path / f"without-{site}")["fedavg"]
        assert site not in member.task.clients.data.coding.columns[1].values
        assert member.task.clients.data.coding == alone.task.clients.data.coding
        torch.testing.assert_close(member.posterior.mean, alone.posterior.mean, rtol=1e-5, atol=1e-6)


def test_a_comparison_is_not_swept(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="one method"):
        sweep(replace(DIGITS, methods=("fedavg", "feduab")), ["seed=0..1"], tmp_path)


SERVERS = [
    {"rule": rule, "weighting": weighting, "prior": "broadcast"}
    for rule, weighting in [
        ("nwa", "size"),
        ("ws", "equal"),
        ("wc", "distance"),
        ("lp", "discrepancy"),
        ("dwc", "size"),
    ]
]


def test_rules_and_weightings_are_one_program_and_each_member_equals_its_run_alone() -> None:
    members = [
        replace(DIGITS, method="fedvi", seed=m % 2, options={**DIGITS.options, "lr": 0.02, "kl": "1/n", **options})
        for m, options in enumerate(SERVERS)
    ]
    assert len({program_of(member) for member in members}) == 1
    tasks = [build(member) for member in members]
    *_, last = rounds_together(tasks, [t.begin() for t in tasks], [Memory() for _ in tasks])
    for member, entry in zip(members, last):
        assert entry is not None
        progress, record = entry
        alone = train(build(member))
        for field in ("mean", "scale"):
            ours, want = (getattr(p["model"], field) for p in (progress.state.broadcast, alone.parts))
            torch.testing.assert_close(ours, want, rtol=1e-5, atol=1e-6)
        assert record["test"]["nll"] == pytest.approx(alone.journal[-1]["test"]["nll"], rel=1e-4)
        assert ("floored" in record) == (member.options["rule"] == "dwc")


def test_the_client_of_a_member_is_not_free() -> None:
    fixed = replace(DIGITS, method="fedvi", options={"kl": "1/n"})
    members = members_of(fixed, ["rule=nwa,ws", "prior=fixed,broadcast"])
    assert len({program_of(member) for member in members.values()}) == 2
    members = members_of(replace(DIGITS, method="fedvi"), ["rule=nwa,ws"])  # whose KL has other weights
    assert len({program_of(member) for member in members.values()}) == 2


def test_a_sweep_has_its_folder_to_itself_and_members_share_it(tmp_path: Path) -> None:
    """Two sweeps at once, a sweep beside a member, a member beside the sweep: one of the two is told to wait."""
    short = replace(DIGITS, rounds=1)
    folder = tmp_path / "sweep"
    with locked(folder), pytest.raises(InputError, match="sweep is in use by another process"):
        sweep(short, ["seed=0..1"], folder)
    assert not (folder / "sweep.toml").exists()
    sweep(short, ["seed=0..1"], folder)
    with locked(folder), pytest.raises(InputError, match="sweep is in use by another process"):
        resume(folder / "seed=0")
    with locked(folder / "seed=0"):
        resume(folder / "seed=1")  # another member does not wait
        with pytest.raises(InputError, match="seed=0 is in use by another process"):
            resume(folder / "seed=0")
        with pytest.raises(InputError, match="sweep is in use by another process"):
            sweep(short, ["seed=0..1"], folder)


def test_of_two_sweeps_at_once_one_succeeds(tmp_path: Path) -> None:
    """The second process is refused in one line, and what the first one wrote is a whole sweep."""
    (tmp_path / "x.toml").write_text(to_toml(replace(DIGITS, rounds=3)))
    command = [sys.executable, "-m", "fedbayes", "sweep", "x.toml", "--over", "seed=0..1", "--output", "both"]
    both = [subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=1000)[1] for process in both]
    assert sorted(process.returncode for process in both) == [0, 2]
    assert sum("both is in use by another process" in text for text in said) == 1
    assert [len(files.records) for files in runs_in(tmp_path / "both")] == [3, 3]
