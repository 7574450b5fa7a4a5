"""Private sums on Flower: noise by the server, or by the clients under their masks, where nobody sees the bare sum."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')
pytest.importorskip("dp_accounting", reason='needs dp-accounting: pip install "fedbayes[dp]"')

from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import InProcess, Spoil

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.federation.accounting import Spent
from fedbayes.federation.program import Outcome
from fedbayes.flower import noise_shares, secure_round
from fedbayes.flower.apps import _say
from fedbayes.flower.federated import carried, run
from fedbayes.flower.kept import Kept, in_memory
from fedbayes.flower.node import SECURE
from fedbayes.flower.post import Answer
from fedbayes.flower.secure_sum import TooFew
from fedbayes.flower.shown import LEAST, ONCE, Shown, Sum
from fedbayes.flower.status import FILE, lines, standings
from fedbayes.flower.wire import Letter, Refused
from fedbayes.training import rounds as training

pytestmark = pytest.mark.flower
CLIP, NOISE = 0.5, 4.0
AT = ["a run", 3, "0-ab"]


@settings(max_examples=200)
@given(st.integers(3, 60), st.integers(0, 200), st.integers(0, 2), st.data())
def test_noise_has_the_variance_asked_for_whoever_drops_out(least: int, more: int, colluding: int, data: Any) -> None:
    """What is left of the shares of those in the sum, without those of who colludes: never less than asked for."""
    clients = least + more
    places = noise_shares.steps(least, clients)
    assert places[0] == least
    assert places[-1] == clients
    assert len(places) <= noise_shares.STEPS + 2
    pieces = noise_shares.deviations(places, colluding, 1.7)
    alive = data.draw(st.integers(least, clients))
    silent = data.draw(st.integers(0, alive - colluding))  # who do not tell what is too much
    gone = noise_shares.surplus(places, alive)
    each, all_of_it = sum(d**2 for d in pieces[gone:]), sum(d**2 for d in pieces)
    variance = (alive - colluding - silent) * each + silent * all_of_it
    assert variance >= 1.7**2 * (1 - 1e-9)
    step = max(j for j in places if j <= alive)
    assert (alive - colluding) * each == pytest.approx(1.7**2 * (alive - colluding) / (step - colluding))
    if alive in places:
        assert (alive - colluding) * each == pytest.approx(1.7**2)


def test_pieces_that_are_told_are_taken_off_to_the_last_digit() -> None:
    places = noise_shares.steps(3, 6)
    pieces, size = noise_shares.deviations(places, 0, 1.0), 4001
    seeds = [[bytes([k, i]) * 16 for i in range(len(pieces))] for k in range(5)]
    whole = sum(noise_shares.share(own, pieces, AT, size) for own in seeds)
    many = noise_shares.surplus(places, 5)
    told = {k: own[:many] for k, own in enumerate(seeds)}
    rest = whole - torch.from_numpy(noise_shares.excess(told, pieces, AT, size))
    kept = sum(d * noise_shares.piece(own[i], AT, i, size) for own in seeds for i, d in list(enumerate(pieces))[many:])
    torch.testing.assert_close(rest, kept, rtol=0, atol=1e-12)
    assert float(rest.std()) == pytest.approx(1.0, abs=0.05)
    assert float(whole.std()) == pytest.approx((5 / 3) ** 0.5, abs=0.06)


@pytest.fixture
def x(tiny: Experiment) -> Experiment:
    private = {"private": "clients", "noise_multiplier": NOISE, "private_clip": CLIP}
    options = {**tiny.options, "weighting": "equal"}
    return replace(
        tiny, network="mlp", clients=6, cohort=None, rounds=2, options=options, flower={"timeout": 5.0}, **private
    )


def federate(x: Experiment, folder: Path, spoil: Spoil | None = None) -> tuple[fb.Run, InProcess]:
    post = InProcess(carried(x), spoil=spoil)
    return run(x, folder, post)[x.method], post


def secure(x: Experiment, **more: Any) -> Experiment:
    return replace(x, flower={**x.flower, "secure": True, **more})


def numbers(outcome: Outcome) -> torch.Tensor:
    assert outcome.terms is not None
    return torch.cat([t.reshape(-1) for s in outcome.terms.values() for t in s.values()])


@pytest.fixture
def sums(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What the server has of each round before anything else is done with it."""
    seen: list[Outcome] = []
    close = training.close

    def looked_at(task: Any, progress: Any, own: Any, plan: Any, outcome: Outcome) -> Any:
        seen.append(outcome)
        return close(task, progress, own, plan, outcome)

    monkeypatch.setattr(training, "close", looked_at)
    return seen


def test_the_server_adds_the_noise_and_the_journal_tells_of_nobody(x: Experiment, tmp_path: Path, sums) -> None:
    made, _ = federate(replace(x, cohort=4), tmp_path)
    assert made.progress.accounts == {"": (Spent(4 / 6, NOISE, 2),)}
    assert not any(outcome.noisy for outcome in sums)
    assert max(float(numbers(outcome).norm()) for outcome in sums) <= 6 * CLIP
    for record in made.journal:
        assert not {"took_part", "client_seconds", "phases", "seconds", "influence"} & {*record}
        assert record["cohort"] == 4
        assert record["left_out"] == {} == record["train"]
        assert len(record["release"]) == 16
    assert len({record["release"] for record in made.journal}) == 2


@pytest.mark.parametrize("gone", [(), (1,), (1, 4)])
def test_under_masks_the_sum_has_its_noise_before_the_server_sees_it(x: Experiment, tmp_path, sums, gone) -> None:
    """Beside the same sum in the clear; clients that drop out with their uploads leave the noise as it should be."""
    still = replace(x, rounds=1, options={**x.options, "lr": 0.0001}, flower={"timeout": 0.5})

    def drop(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        return None if k in gone and kind in (SECURE[2], "train") else answer

    federate(still, tmp_path / "clear", drop)
    made, post = federate(secure(still), tmp_path / "hidden", drop)
    clear, hidden = sums
    assert hidden.noisy
    noise = numbers(hidden) - numbers(clear)
    assert len(noise) > 500
    assert float(noise.std()) == pytest.approx(CLIP * NOISE, rel=5 / (2 * len(noise)) ** 0.5)
    assert abs(float(noise.mean())) < 5 * CLIP * NOISE / len(noise) ** 0.5
    assert {k for kind, k, _ in post.asked if kind == SECURE[3]} == {*range(6)} - {*gone}
    assert made.progress.accounts == {"": (Spent(1.0, NOISE, 1),)}
    assert made.journal[0]["left_out"] == {}


def test_one_who_keeps_its_seeds_leaves_more_noise(x: Experiment, tmp_path: Path, sums) -> None:
    still = secure(replace(x, rounds=1, options={**x.options, "lr": 0.0001}), timeout=0.5, attempts=1)
    federate(still, tmp_path, lambda kind, k, letter, a: None if (kind, k) == (SECURE[3], 2) else a)
    noise = numbers(sums[0])
    want = CLIP * NOISE * (5 / 6 + 1 / 3) ** 0.5
    assert float(noise.std()) == pytest.approx(want, rel=5 / (2 * len(noise)) ** 0.5)


def test_a_private_sum_of_a_round_is_given_once(x: Experiment, tmp_path: Path, monkeypatch) -> None:
    """A server that has got a sum and asks for another with other noise."""
    real, refusals = secure_round.SecureRound._sum, []

    def twice(self: Any, attempt: Any) -> Outcome:
        outcome = real(self, attempt)
        again = self._attempt(7)
        again.before = []
        with pytest.raises(TooFew):
            real(self, again)
        refusals.extend(refusal.reason for refusal in again.refusals.values())
        return outcome

    monkeypatch.setattr(secure_round.SecureRound, "_sum", twice)
    federate(secure(replace(x, rounds=1)), tmp_path)
    assert len(refusals) == 6
    assert all(ONCE in reason for reason in refusals)


def test_a_private_sum_is_admitted_once_whomever_it_is_over() -> None:
    shown = Shown(*in_memory())
    shown.admit(Sum("run method 3", "a broadcast", frozenset(range(6))), once=True)
    for clients in (range(6), range(LEAST), range(6, 12)):
        with pytest.raises(Refused, match="one sum under two noises"):
            shown.admit(Sum("run method 3", "another", frozenset(clients)), once=True)
    shown.admit(Sum("run method 4", "another", frozenset(range(6))), once=True)


@pytest.mark.parametrize("anew", [False, True])
def test_a_round_whose_sum_was_shown_and_lost_is_over(x: Experiment, tmp_path: Path, monkeypatch, sums, anew) -> None:
    """The server dies between the last letter of round 2 and its checkpoint, and is started again.

    `anew` by another `flwr run`, whose nodes have a new context and remember what lies in their state folders alone.
    """
    x, real = secure(replace(x, rounds=3)), secure_round.SecureRound._closed
    post = InProcess(carried(x))

    def dying(self: Any, attempt: Any, outcome: Outcome) -> Outcome:
        if self.order.round == 1:
            raise KeyboardInterrupt
        return real(self, attempt, outcome)

    with monkeypatch.context() as patch:
        patch.setattr(secure_round.SecureRound, "_closed", dying)
        with pytest.raises(KeyboardInterrupt):
            run(x, tmp_path, post)
    if anew:
        post.made = {key: (node, Kept(*in_memory(), shown=kept.shown)) for key, (node, kept) in post.made.items()}
    made = run(x, tmp_path, post)[x.method]
    assert [outcome.terms is None for outcome in sums] == [False, True, False]
    assert made.progress.accounts == {"": (Spent(1.0, NOISE, 3),)}
    assert len({record["release"] for record in made.journal}) == 3


@pytest.mark.parametrize("cohort", ["the same", "others too"])
def test_a_round_is_over_once_shares_of_its_sum_are_asked_for(x: Experiment, tmp_path: Path, sums, cohort: str) -> None:
    """The server dies with just enough shares: who gave none yet would take part in a sum under other noise."""
    x = secure(replace(x, rounds=2, clients=9), wait=0.2)
    post, given = InProcess(carried(x)), set[int]()

    def die(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        if kind == SECURE[3]:
            given.add(k)
            if len(given) == 5:  # a majority of nine
                raise KeyboardInterrupt
        return answer

    post.spoil = die
    with pytest.raises(KeyboardInterrupt):
        run(x, tmp_path, post)
    post.spoil, before = lambda kind, k, letter, answer: answer, len(post.asked)
    if cohort == "others too":  # of those who gave their shares nobody is there to say so
        post.there = [100 + k for k in range(9) if k not in given]
    made = run(x, tmp_path, post)[x.method]
    assert [outcome.terms is None for outcome in sums] == [True, False]
    asked = [(kind, letter.head["round"]) for kind, _, letter in post.asked[before:] if kind in SECURE]
    assert {number for _, number in asked} == {1}
    assert made.progress.accounts == {"": (Spent(1.0, NOISE, 2),)}


@pytest.mark.parametrize("noisy", [True, False])
def test_counts_under_noise_are_added_once_whatever_is_lost(x: Experiment, tmp_path: Path, noisy: bool) -> None:
    """Most shares of a first attempt are lost. Plain counts are asked for again; noised ones would have other noise."""
    from fedbayes.flower.jobs import calibrate

    x = secure(replace(x, private=None, noise_multiplier=None, private_clip=1.0, clients=9, rounds=1))
    federate(x, tmp_path)
    attempts, lost = [], []

    def lose(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        if letter.head.get("purpose") != "calibrate":
            return answer
        attempts.append(letter.head["attempt"])
        if kind == SECURE[3] and len({*attempts}) == 1 and k > 2:
            lost.append(k)
            return None
        return answer

    post = InProcess(carried(x), spoil=lose)
    act = lambda: calibrate(x, tmp_path, post, way="by_class", coverage=0.6, epsilon=1e4 if noisy else None)  # noqa: E731
    if noisy:
        with pytest.raises(InputError, match="the round is over: shares of its sum were asked for"):
            act()
    else:
        act()
    assert lost
    assert len({*attempts}) == (1 if noisy else 2)


@pytest.mark.parametrize("hidden", [False, True])
def test_the_sign_of_life_tells_phase_and_round_alone(x: Experiment, tmp_path: Path, hidden: bool) -> None:
    seen: list[dict[str, Any]] = []
    words: list[list[str]] = []

    def look(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        seen.append(json.loads((tmp_path / FILE).read_text()))
        if kind in (SECURE[2], "train") and letter.head["round"] == 1:
            words.append(lines(standings(tmp_path)[0]))
        return answer

    x = secure(x) if hidden else replace(x, cohort=4)
    federate(x, tmp_path, lambda kind, k, letter, a: look(kind, k, letter, a) if (tmp_path / FILE).exists() else a)
    seen.append(json.loads((tmp_path / FILE).read_text()))
    assert {key for sign in seen for key in sign} == {"round", "phase", "since", "time"}
    assert {sign["round"] for sign in seen} == {1, 2}
    for told in words:
        assert [line[:13] for line in told] == ["feduab: in pr", "  now: round "]
        assert not [line for line in told if "waiting" in line]


def test_a_round_of_too_few_has_noise_alone(x: Experiment, tmp_path: Path, sums) -> None:
    few = secure(replace(x, rounds=1, cohort=4, private_seed=0), min_clients=4)
    seed = next(s for s in range(50) if _drawn(s) < 4)
    made, post = federate(replace(few, private_seed=seed), tmp_path)
    assert sums[0].terms is None
    assert not [kind for kind, _, _ in post.asked if kind in SECURE]
    assert made.progress.accounts[""][0].uses == 1
    assert not torch.equal(made.posterior.mean, made.task.program.initial["model"].mean)


def _drawn(seed: int) -> int:
    from fedbayes.federation.randomness import Randomness

    return len(Randomness(seed).sample(6, 4 / 6, 0))


def test_what_would_tell_of_clients_is_refused(x: Experiment, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="client_scores"):
        federate(replace(x, flower={"client_scores": True}), tmp_path / "a")
    with pytest.raises(InputError, match="colluding"):
        federate(secure(x, colluding=3), tmp_path / "b")


def test_the_line_of_a_private_round_tells_epsilon_and_of_nobody(x: Experiment, tmp_path: Path, capsys) -> None:
    made, _ = federate(replace(x, rounds=1), tmp_path)
    _say(made.journal[0])
    line = capsys.readouterr().out
    assert line.startswith("round 1: ; epsilon ")
    assert " s " not in line
