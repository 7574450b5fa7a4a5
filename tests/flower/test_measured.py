"""A post with a clock: who is silent is given up when most have answered, and who is slow has its own time."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
from in_process import InProcess

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.federated import carried, run
from fedbayes.flower.measured import Deadline, Measured
from fedbayes.flower.post import Answer, exchange
from fedbayes.flower.settings import settings_of
from fedbayes.flower.wire import Letter


class Slow:
    """A post whose nodes need so many seconds of a clock that moves when somebody looks; None: for ever."""

    pause = 0.0

    def __init__(self, seconds: dict[int, float | None], error: set[int] = frozenset()) -> None:
        self.seconds, self.error, self.now, self.sent, self.kinds = seconds, error, 0.0, {}, []

    def clock(self) -> float:
        return self.now

    def nodes(self) -> list[int]:
        return [*self.seconds]

    def push(self, kind: str, letters: Mapping[int, Letter], seconds: float) -> dict[str, int]:
        self.kinds.append(kind)
        ids = {f"{len(self.kinds)}.{node}": node for node in letters}
        self.sent |= {key: (node, self.now) for key, node in ids.items()}
        return ids

    def pull(self, ids: Iterable[str]) -> list[tuple[str, Answer]]:
        self.now += 0.5
        replies: list[tuple[str, Answer]] = []
        for key in ids:
            node, began = self.sent[key]
            needs = self.seconds[node]
            if needs is not None and self.now - began >= needs:
                replies.append((key, "error 4: no memory" if node in self.error else Letter({}, {})))
        return replies


def asked(
    post: Slow, measured: Measured, kind: str = "train", nodes: Iterable[int] | None = None
) -> tuple[dict, float]:
    """The answers of one exchange, and how long it lasted by the post's clock."""
    measured.nodes()
    began = post.now
    letters = {node: Letter({"client": node}, {}) for node in (post.seconds if nodes is None else nodes)}
    ids, answers = measured.push(kind, letters, 600.0), {}
    while len(answers) < len(ids) and post.now - began < 600:
        answers |= {ids[key]: answer for key, answer in measured.pull([k for k in ids if ids[k] not in answers])}
    return answers, post.now - began


def test_a_silent_node_costs_a_multiple_of_what_the_others_need_and_not_the_time_out() -> None:
    post = Slow({0: 4.0, 1: 5.0, 2: None})
    measured = Measured(post, Deadline(quorum=0.6, slack=3.0), post.clock)
    answers, seconds = asked(post, measured)
    assert 15 < seconds <= 16
    assert answers[2] == "no reply within 15 s, 3 times what clients need"
    assert isinstance(answers[0], Letter)


@pytest.mark.parametrize(
    ("deadline", "error"),
    [
        (Deadline(quorum=1.0), frozenset()),  # all are waited for
        (Deadline(quorum=0.7), frozenset()),  # two of three are not 0.7
        (Deadline(quorum=0.6, least=3), frozenset()),  # a round needs three
        (Deadline(quorum=0.6), {1}),  # an error is no answer
    ],
)
def test_without_a_quorum_everybody_has_the_whole_time(deadline: Deadline, error: set[int]) -> None:
    post = Slow({0: 4.0, 1: 5.0, 2: None}, error)
    answers, seconds = asked(post, Measured(post, deadline, post.clock))
    assert (seconds, 2 in answers) == (600.0, False)


def test_who_is_slow_is_given_up_once_and_then_has_its_own_time() -> None:
    post = Slow({0: 4.0, 1: 4.0, 2: 40.0})
    measured = Measured(post, Deadline(quorum=0.6, slack=3.0), post.clock)
    first, seconds = asked(post, measured)
    assert isinstance(first[2], str)
    assert seconds < 13
    post.now += 60
    again, seconds = asked(post, measured)  # its late reply is met here, and measured
    assert isinstance(again[2], Letter)
    assert seconds == 40
    assert not any(batch.waiting for batch in measured.batches)


def test_who_was_late_a_few_times_and_then_is_silent_is_waited_for_once() -> None:
    post = Slow(dict.fromkeys(range(10), 10.0))
    measured = Measured(post, Deadline(quorum=0.6, slack=3.0), post.clock)
    seconds = []
    for needs in (10.0, 25.0, 70.0, 190.0, None, None, None):
        post.seconds[9] = needs
        seconds.append(asked(post, measured)[1])
    assert seconds == [10, 25, 70, 190, 300.5, 30.5, 30.5]  # 30 times what the others need, not 3 times 190
    post.now += 600
    post.seconds[9] = 70.0
    assert asked(post, measured)[1] == 30.5
    post.now += 60
    assert asked(post, measured)[1] == 70  # its late answer has earned its own time back


def test_after_a_whole_time_out_nobody_has_its_own_time() -> None:
    post = Slow(dict.fromkeys(range(3), 60.0))
    measured = Measured(post, Deadline(quorum=0.6, slack=3.0), post.clock)
    seconds = []
    for needs in (60.0, 170.0, 250.0, None, None):
        post.seconds[2] = needs
        seconds.append(asked(post, measured)[1])
    assert seconds == [60, 170, 250, 600, 180.5]


def test_who_always_answers_too_late_does_not_hold_the_rounds_up() -> None:
    post = Slow({**dict.fromkeys(range(4), 4.0), 4: 130.0})
    measured = Measured(post, Deadline(quorum=0.6, slack=3.0), post.clock)
    for _ in range(4):
        assert asked(post, measured)[1] == 12.5
        post.now += 150
    post.seconds[4] = 100.0  # 25 times what the others need
    asked(post, measured)
    post.now += 100
    assert asked(post, measured)[1] == 100


def test_a_node_that_says_nothing_of_itself_is_given_up_while_the_others_are_known() -> None:
    """After no reply a node is asked alone who it is: it has a multiple of what nodes need for that."""
    post = Slow({0: 2.0, 1: 2.0, 2: 2.0})
    measured = Measured(post, Deadline(quorum=0.6, slack=3.0), post.clock)
    asked(post, measured, "query")
    post.seconds[2] = None
    answers, seconds = asked(post, measured, "query", [2])
    assert isinstance(answers[2], str)
    assert 6 < seconds <= 7
    lonely = Slow({2: None})
    assert asked(lonely, Measured(lonely, Deadline(quorum=0.6), lonely.clock), "query")[1] == 600


def test_letters_that_are_never_answered_are_not_kept_for_ever() -> None:
    post = Slow({0: 1.0, 1: 1.0, 2: None})
    measured = Measured(post, Deadline(quorum=0.6), post.clock)
    for _ in range(50):
        asked(post, measured)
        post.now += 300
    assert len(measured.late) <= 3
    assert len(measured.batches) <= 3
    assert max(map(len, measured.before.values())) <= 5


def test_exchanges_pass_through_it() -> None:
    post = Slow({0: 1.0, 1: 1.0, 2: None})
    measured = Measured(post, Deadline(quorum=0.6), post.clock)
    answers = dict(exchange(measured, "train", {n: Letter({}, {}) for n in post.seconds}, math.inf))
    assert [type(answers[n]) for n in range(3)] == [Letter, Letter, str]


def test_a_silent_client_is_left_out_of_rounds_with_its_reason(tiny: Experiment, tmp_path: Path) -> None:
    x = replace(tiny, flower={**tiny.flower, "timeout": 60, "wait": 60, "quorum": 0.6, "min_clients": 2})
    post = InProcess(carried(x), spoil=lambda kind, k, letter, answer: None if kind != "query" and k == 1 else answer)
    made = run(x, tmp_path, post)["feduab"]
    for record in made.journal:
        assert record["took_part"] == [0, 2]
        assert "times what clients need" in record["left_out"]["1"]
        assert record["seconds"] < 30


@pytest.mark.parametrize("wrong", [{"quorum": 0}, {"quorum": 1.5}, {"quorum": "most"}, {"slack": 0.5}, {"slack": True}])
def test_settings_are_checked(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=f"flower: {next(iter(wrong))} must be"):
        settings_of(wrong, 3)
