"""Attacks on the secure sum: a curious server subtracts, a client comes late, and none of them learns an upload."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import InProcess, Spoil

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.federation.program import Outcome, Terms
from fedbayes.flower import secure_node
from fedbayes.flower.federated import carried, run
from fedbayes.flower.fixed import flat
from fedbayes.flower.kept import in_memory, shown_in_file
from fedbayes.flower.node import SECURE, Node
from fedbayes.flower.secure_sum import SecureSum
from fedbayes.flower.shown import LEAST, OFTEN, Clients, Shown, Sum, few
from fedbayes.flower.wire import Refused

pytestmark = pytest.mark.flower

KEYS, SHARES, MASKED, UNMASK = SECURE


class Watched:
    """What a server saw of the sums, and the uploads that it would like to see."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.sums: list[tuple[Clients, Terms]] = []
        self.uploads: dict[int, Terms] = {}
        at: list[int] = []
        sum_up, train, quantise = SecureSum.run, Node.trained, secure_node.quantise

        def summed(secure: SecureSum, *given: object) -> Outcome:
            outcome = sum_up(secure, *given)
            self.sums.append((frozenset(outcome.own), outcome.terms))
            return outcome

        def trained(node: Node, *given: object) -> object:
            at[:] = [node.client]
            return train(node, *given)

        def quantised(terms: Terms, clients: int) -> np.ndarray:
            self.uploads.setdefault(at[0], terms)
            return quantise(terms, clients)

        monkeypatch.setattr(SecureSum, "run", summed)
        monkeypatch.setattr(Node, "trained", trained)
        monkeypatch.setattr(secure_node, "quantise", quantised)

    def learnt(self) -> list[int]:
        """The clients whose upload is the difference of two sums."""
        found = []
        for (a, of_a), (b, of_b) in combinations(self.sums, 2):
            if len(a ^ b) != 1:
                continue
            (client,) = a ^ b
            sign = 1 if client in a else -1
            first, second, upload = (flat(terms) for terms in (of_a, of_b, self.uploads[client]))
            close = [float((sign * (first[n] - second[n]) - upload[n]).abs().max()) for n in first]
            if max(close) < 1e-6:
                found.append(client)
        return found


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    return Watched(monkeypatch)


@pytest.fixture
def five(tiny: Experiment) -> Experiment:
    return replace(tiny, clients=5, rounds=1, flower={"wait": 0.2, "timeout": 0.2, "secure": True})


def late(*clients: int, kind: str = MASKED, times: int = 1) -> Spoil:
    """Clients whose first replies of a kind come too late."""
    left = dict.fromkeys(clients, times)

    def spoil(asked: str, k: int, letter: object, answer: object) -> object:
        if asked == kind and left.get(k, 0):
            left[k] -= 1
            return None
        return answer

    return spoil


def sums_asked(post: InProcess) -> set[tuple[int, ...]]:
    return {tuple(letter.head["alive"]) for kind, _, letter in post.asked if kind == UNMASK}


def test_a_late_client_is_not_the_difference_of_two_attempts(five: Experiment, tmp_path: Path, watched) -> None:
    """The round needs five; the first attempt has four, and ends before anything is unmasked."""
    x = replace(five, flower={**five.flower, "min_clients": 5})
    post = InProcess(carried(x), spoil=late(4))
    (made,) = run(x, tmp_path, post).values()
    assert watched.learnt() == []
    assert sums_asked(post) == {(0, 1, 2, 3, 4)}
    assert made.journal[0]["left_out"] == {}
    assert "was begun anew: 4 clients answered, a secure sum needs 5" in "".join(made.journal[0]["notes"])


def test_two_attempts_share_no_mask(five: Experiment, tmp_path: Path) -> None:
    vectors: list[np.ndarray] = []
    swallow = late(4)

    def look(kind: str, k: int, letter: object, answer: object) -> object:
        if kind == MASKED and k == 0:
            vectors.append(answer.arrays["sum"])
        return swallow(kind, k, letter, answer)

    x = replace(five, flower={**five.flower, "min_clients": 5})
    run(x, tmp_path, post := InProcess(carried(x), spoil=look))
    first, second = vectors
    assert not (first == second).any()
    bits = np.unpackbits((first - second).view(np.uint8))  # noise, where the upload beneath is the same
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5
    attempts = {letter.head["attempt"] for kind, _, letter in post.asked if kind == MASKED}
    assert sorted(a.split("-")[0] for a in attempts) == ["0", "1"]


class Crash(Exception):
    pass


def test_a_server_that_begins_a_round_again_gets_the_same_sum_or_none(five, tmp_path, watched, monkeypatch) -> None:
    """It dies, or says so, after it has seen the sum of four, and asks for that of five; with the four it goes on."""
    post = InProcess(carried(five), spoil=late(4))
    with monkeypatch.context() as patch:
        patch.setattr("fedbayes.training.rounds.close_round", _crash)
        with pytest.raises(Crash):
            run(five, tmp_path, post)
    assert sums_asked(post) == {(0, 1, 2, 3)}
    with pytest.raises(InputError, match=r"would show client 4"):
        run(five, tmp_path, post)
    assert watched.learnt() == []
    post.spoil = late(4)
    (made,) = run(five, tmp_path, post).values()
    assert [*made.journal[0]["left_out"]] == ["4"]
    assert watched.learnt() == []
    a, b = (flat(terms) for _, terms in watched.sums)
    assert all(bool((a[name] == b[name]).all()) for name in a)


def _crash(*given: object) -> None:
    raise Crash


@pytest.mark.parametrize("forgetful", [False, True], ids=["nodes that run on", "nodes that start again"])
def test_a_second_run_from_the_same_broadcast_does_not_show_the_difference(five, tmp_path, watched, forgetful) -> None:
    """A server may give a run another name; the nodes remember what they trained from, also when they start again."""
    first, second = (_Stored(carried(five), tmp_path / "state") for _ in range(2))
    first.spoil = late(4)
    run(five, tmp_path / "0", first)
    with pytest.raises(InputError, match=r"would show client 4"):
        run(five, tmp_path / "1", second if forgetful else first)
    assert watched.learnt() == []
    other = replace(five, seed=five.seed + 1)
    run(other, tmp_path / "2", _Stored(carried(other), tmp_path / "state"))


class _Stored(InProcess):
    """Nodes that remember sums in files, as with a state folder."""

    def _answer(self, kind: str, node: int, letter: object) -> object:
        key = letter.head["method"], node
        if key not in self.made:
            super()._answer("query", node, letter)
            self.made[key][1].shown = shown_in_file(self.folder / f"sums-{node}.json")
        return super()._answer(kind, node, letter)


def test_replies_to_the_last_letter_that_are_lost_are_asked_for_again(five, tmp_path, watched) -> None:
    """Without a majority of shares the sum can't be seen; asked again in the same words the nodes give them again."""
    post = InProcess(carried(five), spoil=late(0, 1, 2, kind=UNMASK))
    (made,) = run(five, tmp_path, post).values()
    assert made.journal[0]["left_out"] == {}
    assert [kind for kind, k, _ in post.asked if k == 0].count(MASKED) == 1
    assert len(watched.sums) == 1


def test_after_a_sum_that_failed_a_few_more_are_not_let_in(five, tmp_path, watched) -> None:
    """Four are in the first sum, whose shares never come; a second over five would show client 4, if they came late."""
    held = late(0, 1, 2, kind=UNMASK, times=3)
    spoil = late(4)
    post = InProcess(carried(five), spoil=lambda *given: spoil(*given) and held(*given))
    with pytest.raises(InputError, match=r"beside a sum of this round that may be known, .* would show client 4"):
        run(five, tmp_path, post)
    assert watched.learnt() == []
    assert sums_asked(post) == {(0, 1, 2, 3)}


clients = st.frozensets(st.integers(0, 9), min_size=1)


@settings(max_examples=300)
@given(st.lists(clients, min_size=1, max_size=4), st.data())
def test_few_finds_exactly_the_combinations_over_fewer_than_three(sums, data) -> None:
    """Against all whole combinations of small coefficients, and against the null space of the others' rows."""
    table = np.array([[k in s for s in sums] for k in range(10)], dtype=float)
    for factors in np.ndindex(*[5] * len(sums)):
        over = np.flatnonzero(table @ (np.array(factors) - 2))
        if 0 < len(over) < LEAST:
            assert few(sums)
            break
    if found := few(sums):
        assert len(found) < LEAST
        others = [k for k in range(10) if k not in found]
        _, size, v = np.linalg.svd(table[others])
        null = v[(size > 1e-9).sum() :]
        assert np.abs(table[sorted(found)] @ null.T).max() > 1e-9


def test_what_a_node_lets_pass() -> None:
    def at(number: int, broadcast: str, *who: int) -> Sum:
        return Sum(f"run fedavg {number}", broadcast, frozenset(who))

    shown = Shown(*in_memory())
    shown.admit(at(0, "a", *range(8)))
    shown.admit(at(0, "a", *range(8)))
    for refused in (
        at(0, "a", *range(7)),  # one less
        at(0, "b", *range(9)),  # the same round from another broadcast
        at(7, "a", *range(6)),  # another round from the same broadcast
        at(1, "c", 0, 1),  # two
    ):
        with pytest.raises(Refused, match="would show client"):
            shown.admit(refused)
    shown.admit(at(0, "a", *range(5)))  # three less
    with pytest.raises(Refused, match="would show client 8 alone"):
        shown.admit(at(0, "a", 5, 6, 7, 8))  # far from each, but not from both together
    shown.admit(at(1, "b", *range(7)))
    assert len(shown.sums()) == 3
    many = Shown(*in_memory())
    for number in range(OFTEN):
        many.admit(at(0, "a", *range(4 * number, 4 * number + 4)))
    with pytest.raises(Refused, match=f"{OFTEN} sums"):
        many.admit(at(0, "a", *range(100, 104)))


def test_a_memory_that_cant_be_read_shows_nothing(tmp_path: Path) -> None:
    (tmp_path / "sums.json").write_bytes(b"[[1, 2]")
    with pytest.raises(Refused, match="can't be read"):
        shown_in_file(tmp_path / "sums.json").admit(Sum("run", "a", frozenset(range(4))))
