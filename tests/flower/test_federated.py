"""Clients behind a post: the same answer as the loop engine, and a round that closes whatever some of them say."""

import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from in_process import InProcess, Spoil

import fedbayes as fb
from fedbayes.data import Clients
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.federated import carried, run
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter, Refused, check_head, head_of
from fedbayes.posterior.values import check
from fedbayes.runs import journal
from fedbayes.runs.folder import run as run_here

FLOW = {"flow_epochs": 1, "flow_length": 2, "flow_draws": 2}
# Each method by a row: its options, and what the experiment needs beside them.
METHODS: dict[str, dict[str, object]] = {
    "fedavg": {},
    "fedavg, batch norm": {"network": "flower_code:norm_net"},
    "fedavg, discrepancy": {"options": {"weighting": "discrepancy"}},
    "fedavg, server adam": {"options": {"server": "adam", "server_lr": 0.1}},
    "fedavg, own pieces": {
        "partition": "flower_code:in_turn",
        "stages": ({"stage": "flower_code:shrinking", "factor": 0.7},),
        "options": {"client": "flower_code:descent", "test_draws": None},
    },
    "fedprox": {},
    "feduab": {},
    "feduab, cohort": {"clients": 5, "cohort": 2, "dropout": 0.3, "rounds": 4},
    "feduab, validation": {"validation": 0.2},
    "feduab, adapters": {"adapters": {"pattern": "1", "rank": 2}},
    "pvi, adapters": {"adapters": {"pattern": "1", "rank": 2, "full": ["3.bias"]}},
    "fedavg, fields": {"data": "flower_code:fields", "network": "flower_code:taker", "adapters": {"rank": 2}},
    "fedvi": {"options": {"rule": "dwc", "weighting": "equal"}},
    "fedag": {"data": "flower_code:line", "options": {"noise": "heldout"}, "personal_every": 2},
    "pvi": {"rounds": 3, "options": {"damping": 0.3}},
    "bayes_admm": {"rounds": 3, "options": {"rho": 2.0}},
    "bayes_admm, slow sites": {"clients": 5, "cohort": 2, "rounds": 4, "options": {"gamma": 0.2}},
    "fedivon": {},
    "feddyn": {"rounds": 2, "options": {"test_draws": None}},
    "scaffold": {"rounds": 3, "clients": 5, "cohort": 2, "options": {"test_draws": None}},
    "laplace": {"rounds": 4, "options": {"epochs": None}},
    "pfedbayes": {"rounds": 3, "personal_every": 1},
    "bpfed": {"rounds": 3},
    "fedper": {"rounds": 3},
    "lg_fedavg": {},
    "fedppd": {"options": {"test_draws": None}},
    "fedswag": {},
    "fedpa": {},
    "fedbe": {"partition_options": {"server": 10}, "options": {"server_epochs": 1, "server_batch": 5}},
    "fedppd_distill": {
        "partition_options": {"server": 10},
        "options": {"test_draws": None, "server_epochs": 1, "server_batch": 5},
    },
    "fedavg_pf": {"personal_every": 2, "options": {"laplace": "every", **FLOW}},
    "fedper_pf": {"options": FLOW},
    "lg_fedavg_pf": {"options": {"laplace": "every", **FLOW}},
}


def federate(experiment: Experiment, folder: Path, post: InProcess | None = None) -> fb.Run:
    return run(experiment, folder, post or InProcess(carried(experiment)))[experiment.method]


def alone(experiment: Experiment, folder: Path) -> fb.Run:
    return run_here(replace(experiment, engine="loop"), folder)[experiment.method]


def same(a: fb.Run, b: fb.Run, tolerance: float = 1e-9) -> None:
    ours, theirs = a.progress.state.broadcast, b.progress.state.broadcast
    assert ours.keys() == theirs.keys()
    for part in ours:
        for field in ("mean", "scale", "tril", "values"):
            if field in ours[part].__dataclass_fields__:
                torch.testing.assert_close(
                    getattr(ours[part], field), getattr(theirs[part], field), rtol=tolerance, atol=tolerance
                )


def close(a: object, b: object) -> bool:
    """Equal but for the last digits of numbers: scores are added up by other code at a node than in the engine."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(close(a[key], b[key]) for key in a)
    return a == pytest.approx(b, rel=1e-9) if isinstance(a, float) else a == b


@pytest.mark.parametrize("row", METHODS)
def test_every_method_gives_what_the_loop_engine_gives(tiny: Experiment, tmp_path: Path, row: str) -> None:
    extra = dict(METHODS[row])
    given = {**tiny.options, **extra.pop("options", {})}
    options = {key: v for key, v in given.items() if v is not None}  # None: the method takes no such option
    x = replace(tiny, method=row.split(",")[0], options=options, **extra)
    far, near = federate(x, tmp_path / "far"), alone(x, tmp_path / "near")
    same(far, near)
    for ours, theirs in zip(far.journal, near.journal, strict=True):
        for key in ("cohort", "dropped", "left_out", "train", "test", "validation", "personal"):
            assert close(ours.get(key), theirs.get(key)), key


def test_a_comparison_runs_each_of_its_methods(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, methods=("fedavg", "pvi"), method="pvi", rounds=1)
    far = run(x, tmp_path / "far", InProcess(carried(x)))
    near = run_here(replace(x, engine="loop"), tmp_path / "near")
    for method in x.methods:
        same(far[method], near[method])


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_fewer_bytes_give_nearly_the_same_posterior(tiny: Experiment, tmp_path: Path, dtype: str) -> None:
    near = alone(tiny, tmp_path / "near")
    far = federate(replace(tiny, flower={**tiny.flower, "dtype": dtype, "delta": True}), tmp_path / "far")
    same(far, near, {"float32": 1e-5, "float16": 0.01, "bfloat16": 0.05}[dtype])
    share = {"float32": 0.5, "float16": 0.25, "bfloat16": 0.25}[dtype]  # the network is held in float64
    for key in ("bytes_down", "bytes_up"):
        assert far.journal[-1][key] == share * near.journal[-1][key]


def sites_of_tables() -> Clients:
    """Three tables whose network is in float32, as tables' are."""
    random = np.random.default_rng(0)
    tables = {}
    for name in "abc":
        x = random.normal(size=(30, 2))
        tables[name] = {"u": x[:, 0], "v": x[:, 1], "ill": np.where(x @ [1, -2] + random.normal(size=30) > 0, "y", "n")}
    return fb.data.from_tables(tables, "ill", site_effects=True)


def test_whole_covariances_travel_in_full(tiny: Experiment, tmp_path: Path) -> None:
    """In float64 from a network in float32, in float32 where that is asked for, and not in half precision."""
    x = replace(tiny, data="test_federated:sites_of_tables", network="by_site", method="laplace", options={}, rounds=4)
    near = alone(x, tmp_path / "near")
    assert near.posterior.mean.dtype == torch.float32
    far = federate(x, tmp_path / "far")
    same(far, near, 1e-5)
    assert far.journal[-1]["bytes_up"] == near.journal[-1]["bytes_up"] == 2 * far.journal[-1]["bytes_down"]
    same(federate(replace(x, flower={**x.flower, "dtype": "float32"}), tmp_path / "single"), near, 1e-4)
    for dtype in ("float16", "bfloat16"):
        with pytest.raises(InputError, match=f"laplace adds inverses .* {dtype} leaves too few.*set dtype = 'float32'"):
            federate(replace(x, flower={**x.flower, "dtype": dtype}), tmp_path / dtype)


def _with(letter: Answer, *, head: dict | None = None, **arrays: np.ndarray) -> Letter:
    assert isinstance(letter, Letter)
    named = {key.replace("__", "."): a for key, a in arrays.items()}
    return Letter({**letter.head, **(head or {})}, {**letter.arrays, **named})


def _mean(a: Answer) -> np.ndarray:
    assert isinstance(a, Letter)
    return a.arrays["model.mean"].copy()


def _nan(a: Answer) -> np.ndarray:
    mean = _mean(a)
    mean[0] = np.nan
    return mean


# What client 1 may answer, and the word by which the journal remembers it.
SPOILT: dict[str, tuple[Callable[[Answer], Answer | None], str]] = {
    "late": (lambda a: None, "no reply within 0.2 s"),
    "an error": (lambda a: "error 4: ZeroDivisionError", "ZeroDivisionError"),
    "nan": (lambda a: _with(a, model__mean=_nan(a)), "1 of .* not finite"),
    "negative scale": (lambda a: _with(a, model__scale=-_mean(a).__abs__()), "scale must be positive"),
    "another shape": (lambda a: _with(a, model__mean=_mean(a)[:-1]), "shape"),
    "another type": (lambda a: _with(a, model__mean=_mean(a).astype("float32")), "float32, not float64"),
    "another part": (lambda a: _with(a, other__mean=_mean(a)), "not expected"),
    "overflow": (lambda a: _with(a, model__scale=np.full_like(_mean(a), 1e-200)), "scales below"),
    "another round": (lambda a: _with(a, head={"round": 7}), "round is 7"),
    "another layout": (lambda a: _with(a, head={"layouts": "x"}), "layouts is 'x'"),
    "another version": (lambda a: _with(a, head={"version": "9"}), "version is '9'"),
    "another wire": (lambda a: _with(a, head={"format": 2}), "format is 2"),
    "another method": (lambda a: _with(a, head={"method": "fedavg"}), "method is 'fedavg'"),
    "another run": (lambda a: _with(a, head={"run": "y"}), "run is 'y'"),
    "another's name": (lambda a: _with(a, head={"client": 0}), "client is 0"),
    "no rows": (lambda a: _with(a, head={"rows": 0}), "rows must be"),
    "rows of text": (lambda a: _with(a, head={"rows": "many"}), "rows must be"),
    "its own refusal": (lambda a: Letter({"refused": "out of memory"}, {}), "out of memory"),
}


def only(client: int, change: Callable[[Answer], Answer | None], *, kind: str = "train", times: int = 9) -> Spoil:
    left = [times]

    def spoil(what: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        if what != kind or k != client or not left[0]:
            return answer
        left[0] -= 1
        return change(answer)

    return spoil


@pytest.mark.parametrize("what", SPOILT)
def test_a_reply_that_cant_be_used_is_left_out_with_its_reason(tiny: Experiment, tmp_path: Path, what: str) -> None:
    change, words = SPOILT[what]
    x = replace(tiny, flower={**tiny.flower, "min_clients": 2})
    made = federate(x, tmp_path, InProcess(carried(x), spoil=only(1, change, times=1)))
    first, second = made.journal
    assert list(first["left_out"]) == ["1"]
    assert first["took_part"] == [0, 2]
    assert second["took_part"] == [0, 1, 2]
    assert re.search(words, first["left_out"]["1"])
    assert second["left_out"] == {}
    check(made.posterior)


def test_a_round_without_one_client_is_the_round_of_the_others(tiny: Experiment, tmp_path: Path) -> None:
    """What is left out leaves nothing behind: the sum is that of a cohort without it."""
    x = replace(tiny, rounds=1, data="flower_code:site")
    spoilt = federate(x, tmp_path / "a", InProcess(carried(x), spoil=only(1, lambda a: None)))
    absent = InProcess(carried(x))
    absent.there.remove(101)
    without = federate(x, tmp_path / "b", absent)
    same(spoilt, without)
    assert without.journal[0]["left_out"] == {"1": "no node was online"}


def test_too_few_answers_ask_again_those_who_did_not(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, rounds=1, flower={**tiny.flower, "min_clients": 3})
    post = InProcess(carried(x), spoil=only(1, lambda a: None, times=2))
    far = federate(x, tmp_path / "far", post)
    same(far, alone(x, tmp_path / "near"), 1e-12)  # who answers at last is added at last
    assert [k for kind, k, _ in post.asked if kind == "train"] == [0, 1, 2, 1, 1]
    assert any("asked again" in note for note in far.journal[0]["notes"])


@pytest.mark.parametrize("method", ["feduab", "pvi", "bpfed"])
def test_a_run_that_had_too_few_goes_on_as_if_nothing_had_happened(
    tiny: Experiment, tmp_path: Path, method: str
) -> None:
    """Clients that had trained the lost round keep what was counted, and not what was lost."""
    x = replace(tiny, method=method, rounds=3, flower={**tiny.flower, "min_clients": 3, "attempts": 1})
    lost: list[bool] = []

    def spoil(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        if kind == "train" and k == 2 and letter.head["round"] == 1 and not lost:
            lost.append(True)
            return None
        return answer

    post = InProcess(carried(x), tmp_path / "nodes", spoil)
    with pytest.raises(InputError, match=r"round 2: 2 clients answered, min_clients is 3 \(client 2: no reply"):
        federate(x, tmp_path / "far", post)
    assert len(journal.read(tmp_path / "far")) == 1
    # A new server, and nodes that were started anew: what they keep lies in files.
    far = federate(x, tmp_path / "far", InProcess(carried(x), tmp_path / "nodes"))
    same(far, alone(x, tmp_path / "near"))


def test_a_late_upload_does_not_count_at_home_either(tiny: Experiment, tmp_path: Path) -> None:
    """PVI: a client whose change was lost goes on from the factor that the server has."""
    x = replace(tiny, method="pvi", rounds=3)

    def factors(spoil: Spoil | None) -> list[int]:
        post = InProcess(carried(x), spoil=spoil)
        federate(x, tmp_path / str(spoil), post)
        return [letter.head["counted"] for kind, k, letter in post.asked if kind == "train" and k == 1]

    assert factors(None) == [-1, 0, 1]
    assert factors(only(1, lambda a: None, times=1)) == [-1, -1, 1]


def test_a_client_that_lost_its_state_says_so(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, method="pvi")

    def lose(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        if kind == "train" and k == 1 and letter.head["round"] == 0:
            (tmp_path / "nodes" / "101").unlink()
        return answer

    far = federate(x, tmp_path / "run", InProcess(carried(x), tmp_path / "nodes", lose))
    assert "client 1 had lost its own state, and began anew" in far.journal[1]["notes"]


def test_others_stand_in_for_who_is_not_online(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, clients=6, cohort=2, rounds=1)
    cohort = [k for kind, k, _ in asked(x, tmp_path / "a", lambda post: None) if kind == "train"]
    gone = asked(x, tmp_path / "b", lambda post: post.there.remove(100 + cohort[0]))
    now = [k for kind, k, _ in gone if kind == "train"]
    assert len(now) == 2
    assert cohort[1] in now
    assert cohort[0] not in now
    assert journal.read(tmp_path / "b")[0]["took_part"] == sorted(now)


def asked(x: Experiment, folder: Path, change: Callable[[InProcess], None]) -> list[tuple[str, int, Letter]]:
    post = InProcess(carried(x))
    change(post)
    federate(x, folder, post)
    return post.asked


def test_a_node_that_comes_later_joins_the_next_round(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, rounds=3)

    def join(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        if kind == "train" and letter.head["round"] == 1 and 102 not in post.there:
            post.there.append(102)
        return answer

    post = InProcess(carried(x), spoil=join)
    post.there.remove(102)
    made = federate(x, tmp_path, post)
    assert [list(r["left_out"]) for r in made.journal] == [["2"], ["2"], []]
    assert "client 2 is online with 20 rows" in made.journal[2]["notes"]


TURNED_AWAY = {
    "no reply": (lambda a: None, "no reply within"),
    "an error": (lambda a: "error 1: no module named mine", "no module named mine"),
    "another version": (lambda a: _with(a, head={"version": "0.0"}), "version is '0.0'"),
    "another experiment": (lambda a: Letter({"refused": "experiment is 'x'"}, {}), "experiment is 'x'"),
    "no such client": (lambda a: _with(a, head={"client": 9}), "client number 9"),
    "a negative number": (lambda a: _with(a, head={"client": -1}), "a whole number from 0 to 2"),
}


@pytest.mark.parametrize("what", TURNED_AWAY)
def test_a_node_that_does_not_belong_is_turned_away(tiny: Experiment, tmp_path: Path, what: str) -> None:
    change, words = TURNED_AWAY[what]
    x = replace(tiny, rounds=1)
    made = federate(x, tmp_path, InProcess(carried(x), spoil=only(2, change, kind="query")))
    assert made.journal[0]["left_out"] == {"2": "no node was online"}
    (note,) = [note for note in made.journal[0]["notes"] if note.startswith("node 102 was turned away: ")]
    assert words in note


def test_a_node_that_was_turned_away_may_try_again(tiny: Experiment, tmp_path: Path) -> None:
    """It may have been started anew under the same key."""
    x = replace(tiny, rounds=4)
    once = only(2, lambda a: "error 1: not ready", kind="query", times=1)

    def slowly(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        time.sleep(0.1 if kind == "train" else 0.0)
        return once(kind, k, letter, answer)

    made = federate(x, tmp_path, InProcess(carried(x), spoil=slowly))
    assert "2" in made.journal[0]["left_out"]
    assert made.journal[-1]["left_out"] == {}


def test_two_nodes_cant_speak_for_one_client(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, rounds=1, data="flower_code:site")
    taken = only(2, lambda a: _with(a, head={"client": 0}), kind="query")
    record = federate(x, tmp_path, InProcess(carried(x), spoil=taken)).journal[0]
    assert any("another node speaks for client 0 already" in note for note in record["notes"])
    assert record["left_out"]["2"] == "no node was online"


def test_nobody_online_is_an_error_and_no_endless_wait(tiny: Experiment, tmp_path: Path) -> None:
    post = InProcess(carried(tiny))
    post.there.clear()
    with pytest.raises(InputError, match="0 clients answered"):
        federate(tiny, tmp_path, post)


@pytest.mark.parametrize("method", ["feduab", "fedag", "bpfed"])
def test_sites_that_know_only_their_own_rows_give_the_same(tiny: Experiment, tmp_path: Path, method: str) -> None:
    x = replace(tiny, data="flower_code:site", method=method)
    far, near = federate(x, tmp_path / "far"), alone(x, tmp_path / "near")
    same(far, near)
    assert int(far.task.clients.sizes.max()) == 0
    for ours, theirs in zip(far.journal, near.journal, strict=True):
        assert ours["test"] == pytest.approx(theirs["test"], rel=1e-12)
    loaded = fb.load(tmp_path / "far")
    same(loaded, near)
    if method == "bpfed":
        with pytest.raises(InputError, match="stay with the clients"):
            loaded.personal(0)


def test_clients_score_beside_the_server_where_asked(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(
        tiny, data="flower_code:site", data_options={"public": True}, flower={**tiny.flower, "client_scores": True}
    )
    record = federate(x, tmp_path).journal[-1]
    assert record["test_clients"] == pytest.approx(record["test"], rel=1e-12)  # their rows are the server's, dealt out


PREDICTING: dict[str, dict[str, object]] = {
    "fedswag": {"covariance": "low_rank", "rank": 3},
    "fedavg": {},
}


@pytest.mark.parametrize("method", PREDICTING)
@pytest.mark.parametrize("dtype", ["held", "bfloat16"])
def test_clients_score_what_predicts_whatever_it_is(tiny: Experiment, tmp_path: Path, method: str, dtype: str) -> None:
    """A normal with factors, a network: the clients' rows are the server's, dealt out."""
    flower = {**tiny.flower, "client_scores": True, "dtype": dtype, "delta": True}
    options = {"epochs": 2, "batch": 8, **({} if method == "fedavg" else {"test_draws": 3}), **PREDICTING[method]}
    x = replace(tiny, data="flower_code:site", data_options={"public": True})
    x = replace(x, method=method, options=options, flower=flower)
    for record in federate(x, tmp_path).journal:
        assert not any("left out of the scores" in note for note in record.get("notes", []))
        close = {"held": 1e-9, "bfloat16": 0.1}[dtype]
        assert record["test_clients"]["count"] == record["test"]["count"]
        assert record["test_clients"]["nll"] == pytest.approx(record["test"]["nll"], rel=close)


@pytest.mark.parametrize("spoilt", [{"nll": np.array(np.nan)}, {"count": np.zeros(2)}])
def test_sums_that_cant_be_added_are_left_out_of_the_scores(
    tiny: Experiment, tmp_path: Path, spoilt: dict[str, np.ndarray]
) -> None:
    x = replace(tiny, data="flower_code:site", rounds=1)
    change = only(1, lambda a: _with(a, **spoilt), kind="evaluate")
    record = federate(x, tmp_path, InProcess(carried(x), spoil=change)).journal[0]
    assert record["test"]["count"] == 16.0
    assert any("client 1 was left out of the scores" in note for note in record["notes"])


def test_settings_are_checked_before_the_first_round(tiny: Experiment, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a cohort has 3 clients"):
        federate(replace(tiny, flower={"min_clients": 4}), tmp_path, InProcess(carried(tiny)))


def test_noise_that_is_judged_on_rows_needs_them(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, data="flower_code:line_site", method="fedag")
    with pytest.raises(InputError, match="the server has no rows to judge it by"):
        federate(x, tmp_path)


def test_statistics_are_not_taken_again(tiny: Experiment, tmp_path: Path) -> None:
    normed = replace(tiny, network="flower_code:norm_net", method="fedavg", options={"norm_passes": 1})
    with pytest.raises(InputError, match="norm_passes: on Flower a round is one exchange"):
        federate(normed, tmp_path)


def test_the_flower_engine_needs_flower_to_carry_it(tiny: Experiment, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="fedbayes run"):
        run_here(replace(tiny, engine="flower"), tmp_path)


def test_only_what_is_trained_travels_and_another_body_is_refused(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, rounds=1, adapters={"pattern": "1", "rank": 2})
    post = InProcess(carried(x))
    done = federate(x, tmp_path / "run", post)
    sizes = {kind: letter.size for kind, _, letter in post.asked}
    trained = 2 * 8 * (6 * 2 + 6 * 3 + 3)  # mean and scale of B and of the last layer, in float64
    assert sizes["train"] == trained
    assert done.parts["model"].layout.names == ("1.lora_B", "3.weight", "3.bias")
    with pytest.raises(
        Refused, match=r"body is 'another', not '[0-9a-f]{16}': load the same frozen weights everywhere"
    ):
        check_head({**head_of(x, "l", "another")}, head_of(x, "l", done.task.program.model.body))
