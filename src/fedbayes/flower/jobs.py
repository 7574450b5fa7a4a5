"""Jobs beside training, on the posterior of a run folder: calibrate at all sites, look at all watches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from fedbayes.errors import InputError, unknown
from fedbayes.evaluate.conformal import BY_KIND, QUANTILES, THRESHOLDS, WAYS, WITHOUT_CLASSES, Gathered, default_way
from fedbayes.evaluate.noised import CALIBRATION, cautious, check_noised
from fedbayes.experiments.build import build
from fedbayes.experiments.experiment import Experiment, folder_name
from fedbayes.flower.border import LARGEST, WEIGHT, Refusal, guarded, listed, names, opened, whole
from fedbayes.flower.counting import secure_counts
from fedbayes.flower.federated import carried, federated
from fedbayes.flower.looks import COUNTS, job_edges, spread_at
from fedbayes.flower.node import CALIBRATE, PROMISE, WATCH
from fedbayes.flower.post import Answer, Post
from fedbayes.flower.remote import Remote
from fedbayes.flower.wire import Head, Letter, Refused, write
from fedbayes.runs import calibrated, checkpoint, watched
from fedbayes.runs import martingale as bets
from fedbayes.runs.calibrated import Calibrated
from fedbayes.runs.home import ledger_of
from fedbayes.runs.watched import Alarm, Channel, State
from fedbayes.scores.label_shift import quantile_of_quantiles
from fedbayes.training.private import check_public
from fedbayes.training.run import Run

Value = TypeVar("Value")


class Told(NamedTuple):
    """How a client's promise did, and its thresholds."""

    rows: int
    hits: int
    size: float
    thresholds: torch.Tensor
    mix: torch.Tensor


def calibrate(
    experiment: Experiment,
    folder: str | Path,
    post: Post,
    *,
    coverage: float = 0.9,
    way: str | None = None,
    score: str | None = None,
    confidence: float | None = None,
    epsilon: float | None = None,
    penalty: float = 0.01,
    free: int = 2,
) -> Calibrated:
    """Calibrate a trained run at the clients behind a post: histograms are added, thresholds are made at each site.

    Writes `calibration.npz` into the run's folder, as `fedbayes calibrate` does.
    """
    job = Job(experiment, folder, post)
    way = way or default_way(job.kind, noisy=epsilon is not None)
    about = _about(job.kind, way, score, {"coverage": coverage, "penalty": penalty, "free": free})
    about |= {"confidence": confidence or 0.0, "spread": spread_at(job.task), "epsilon": epsilon or 0.0}
    if epsilon is None:
        check_public(job.task.privacy)
    else:
        check_noised(about["way"], about["score"], epsilon)
    classes = job.task.clients.data.classes if job.kind == "classes" else 1
    edges = job_edges(about, classes)
    counts, one, rows = torch.zeros(classes, len(edges) + 1, dtype=torch.float64), None, 0
    if epsilon is not None:  # from here on nodes send what tells of their rows
        if not job.engine.roll.online():
            raise InputError("no client answered (no node is online)")
        job.run.spend(CALIBRATION, epsilon)
    if about["way"] == QUANTILES:
        one, rows = _quantile(job, about)
    else:
        counts = _summed(job, about, tuple(counts.shape))
    value = counts.numpy() if one is None else np.full((1, 1), one)
    hidden = job.engine.settings.secure or epsilon is not None
    told = job.ask(PROMISE, about, {COUNTS: value}, lambda a, e, n: _told(a, e, classes, n // 2, hidden))
    answers = dict(told)
    if not answers:
        raise InputError(f"no client answered ({'; '.join(job.take_notes()) or 'no node is online'})")
    made = _made(job, about, Gathered(counts, [], edges), answers, confidence)
    if one is not None:
        made = replace(made, everywhere=torch.full((classes,), one, dtype=torch.float64), rows=rows)
    calibrated.write(job.home, made)
    return made


def _about(kind: str, way: str, score: str | None, numbers: Head) -> Head:
    """What clients must know to calibrate, checked."""
    score = score or BY_KIND[kind][0]
    able = [s for s in BY_KIND[kind] if s != "weighted"]
    if score not in able:
        raise unknown(f"conformal score for {kind} on Flower", score, able)
    ways = WAYS if kind == "classes" else WITHOUT_CLASSES
    if way not in ways:
        raise unknown("way to calibrate on Flower", way, ways)
    return {"score": score, "way": way, **numbers}


def _summed(job: Job, about: Head, shape: tuple[int, ...]) -> torch.Tensor:
    """The added histograms of all clients, in the clear or under masks; cautious where they are noised."""
    epsilon = about["epsilon"]
    sent = (shape[0], shape[1] + 1) if epsilon else shape
    if job.engine.settings.secure:
        counts, sites = secure_counts(job.engine.asking, job.run._final, about, sent)
    else:
        own = _own(job, about, lambda a, e, n: _counts(a, e, sent, None if epsilon else (n + 1) // 2))
        counts, sites = torch.stack([own[k] for k in sorted(own)]).sum(0), len(own)
    return cautious(counts, sites, epsilon) if epsilon else counts


def _quantile(job: Job, about: Head) -> tuple[float, int]:
    """The one of the clients' quantiles that covers as promised, and how many rows they are of."""
    if job.engine.settings.secure:
        raise InputError(f"way {QUANTILES!r} needs every site's own number, which a secure sum hides; take another")
    if about["confidence"]:
        raise InputError("confidence: one number from each site says nothing of it; take another way")
    own = _own(job, about, lambda a, e, n: (_number(a, e), (n + 1) // 2))
    numbers, rows = (torch.tensor([own[k][i] for k in sorted(own)], dtype=torch.float64) for i in range(2))
    return quantile_of_quantiles(numbers, rows, about["coverage"]), int(rows.sum())


def _own(job: Job, about: Head, parse: Callable[[Answer, Head, int], Value]) -> dict[int, Value]:
    """What each client answers to being asked to calibrate."""
    own = dict(job.ask(CALIBRATE, about, {}, parse))
    if not own:
        raise InputError(f"no client sent a histogram ({'; '.join(job.take_notes()) or 'no node is online'})")
    return own


def _made(job: Job, about: Head, sums: Gathered, told: dict[int, Told], confidence: float | None) -> Calibrated:
    """What clients told, as the calibration of a run."""
    who, epsilon = sorted(told), about["epsilon"]
    hidden = job.engine.settings.secure or epsilon
    classes, coverage = len(sums.counts), about["coverage"]
    mixes = torch.ones(len(who), classes, dtype=torch.float64) / classes
    _, everywhere = THRESHOLDS["pooled"](sums, mixes, coverage, confidence)
    thresholds = torch.stack([told[k].thresholds for k in who])
    if hidden and about["way"] in ("pooled", "by_class"):  # which are the same everywhere
        thresholds, _ = THRESHOLDS[about["way"]](sums, mixes, coverage, confidence)
    made = Calibrated(
        *(job.kind, about["score"], about["way"], coverage, tuple(job.task.clients.name(k) for k in who)),
        *(thresholds, everywhere, int(sums.counts.sum()), sums.counts, sums.edges),
        *(torch.stack([told[k].mix for k in who]), torch.tensor(about["spread"], dtype=torch.float64)),
        penalty=about["penalty"],
        free=about["free"],
        confidence=confidence,
        source="half of the clients' test rows"
        + (f"; noised, epsilon {epsilon:g} for every row" if epsilon else "")
        + ("; sites keep their thresholds" if hidden else ""),
        **calibrated.posterior_of(job.run),
    )
    for name in ("rows", "hits", "size"):
        made.judged[name] = np.array([getattr(told[k], name) for k in who], dtype=np.float64)
    if epsilon:
        made.judged["size"][:] = np.nan  # which is not told
    return made


def watch(experiment: Experiment, folder: str | Path, post: Post, *, alpha: float = 0.05) -> list[State]:
    """Let every client that has a stream bet on what has come into it; writes what they say into the run's folder."""
    job = Job(experiment, folder, post)
    check_public(job.task.privacy, "fortunes of bets", mend="")
    states = []
    for k, state in job.ask(WATCH, {"alpha": alpha}, {}, _state):
        state.site, state.alpha = job.task.clients.name(k), alpha
        watched.write(watched.path_of(job.home, state.site), state)
        states.append(state)
    if not states:
        raise InputError(f"no client watches a stream ({'; '.join(job.take_notes()) or 'no node is online'})")
    return states


class Job:
    """A trained run at the server, and the clients behind a post."""

    def __init__(self, experiment: Experiment, folder: str | Path, post: Post) -> None:
        x = carried(experiment)
        one = x.only(x.method)
        self.home = Path(folder) / folder_name(x.method) if x.methods else Path(folder)
        paths = checkpoint.paths(self.home)
        if not paths:
            raise InputError(f"{self.home} has no checkpoint yet: train it first")
        task = build(one)
        progress = checkpoint.read(paths[-1], one, task)[0]
        self.task = federated(post).bind(one, task, self.home)
        assert isinstance(self.task.engine, Remote)
        self.engine = self.task.engine
        self.run = Run(self.task, progress, [], ledger=ledger_of(self.home))
        self.kind = self.task.program.model.likelihood.kind
        if not self.task.program.prediction.whole or self.kind not in BY_KIND:
            raise InputError(
                f"{x.method} predicts {self.kind} by personal models or labels, which can't be looked at here"
            )

    def ask(
        self,
        kind: str,
        about: Head,
        arrays: dict[str, np.ndarray],
        parse: Callable[[Answer, Head, int], Value],
    ) -> Iterator[tuple[int, Value]]:
        """What clients with test rows answer to a letter with the posterior; who can't be read is named in a note."""
        engine, state = self.engine, self.run._final
        posterior, told = engine.posterior_of(state)
        sent = {**write(posterior, engine.settings.coding), **arrays}
        online = engine.roll.online()
        cards = {card.client: card for card in engine.roll.cards.values()}
        nodes = {node: k for k, node in online.items() if cards[k].test_rows}
        head = {**engine.asking.coded(), **told, **about}
        letters = {node: Letter({**head, "client": k}, sent) for node, k in nodes.items()}
        answers: dict[int, Value] = {}
        for node, answer in engine.asking.exchange(kind, letters):
            k = nodes[node]
            value = guarded(k, parse, answer, engine.asking.expected(k, state.round), cards[k].test_rows)
            if isinstance(value, Refusal):
                engine.asking.notes.append(str(value))
                engine.roll.count(value)
            else:
                answers[k] = value
        yield from sorted(answers.items())

    def take_notes(self) -> list[str]:
        return self.engine.take_notes()


def _array(letter: Letter, name: str, shape: tuple[int, ...]) -> np.ndarray:
    a = letter.arrays.get(name)
    if not isinstance(a, np.ndarray) or a.dtype != np.float64 or a.shape != shape:
        raise Refused(f"its {name} is of another type or shape")
    return a


def _counts(answer: Answer, expected: Head, shape: tuple[int, ...], rows: int | None) -> torch.Tensor:
    """A histogram: whole numbers, of as many rows as calibrate; None: noised, and of any sign and sum."""
    counts = _array(opened(answer, expected), COUNTS, shape)
    if not (np.isfinite(counts).all() and (counts == np.round(counts)).all() and (np.abs(counts) < 2**40).all()):
        raise Refused("its histogram holds what are no counts")
    if rows is not None and (counts < 0).any():
        raise Refused("its histogram holds what are no counts")
    if rows is not None and counts.sum() != rows:
        raise Refused(f"its histogram is of {counts.sum():g} rows, but {rows} of its test rows calibrate")
    return torch.from_numpy(counts.copy())


def _number(answer: Answer, expected: Head) -> float:
    """A quantile of scores; infinite where a client has too few rows for one."""
    number = float(_array(opened(answer, expected), COUNTS, (1, 1))[0, 0])
    if np.isnan(number):
        raise Refused("its quantile is no number")
    return number


def _told(answer: Answer, expected: Head, classes: int, rows: int, hidden: bool) -> Told:
    letter = opened(answer, expected)
    count = whole(letter.head, "rows", rows, rows)
    hits = whole(letter.head, "hits", 0, count)
    size = letter.head.get("size")
    if hidden:  # without a limit, which promises nothing that the server does not know
        letter = Letter(letter.head, {"thresholds": np.full(classes, np.inf), "mix": np.full(classes, 1 / classes)})
    thresholds, mix = (_array(letter, name, (classes,)) for name in ("thresholds", "mix"))
    if type(size) is not float or not 0 <= size <= LARGEST or np.isnan(thresholds).any():
        raise Refused("its size or thresholds are no numbers")
    if not ((mix >= 0).all() and abs(mix.sum() - 1) < 1e-6):
        raise Refused("its label mix is no mix")
    return Told(count, hits, size, torch.from_numpy(thresholds.copy()), torch.from_numpy(mix.copy()))


def _state(answer: Answer, expected: Head, rows: int) -> State:
    """What a client tells of its watch, as a state without counts: they stay at home."""
    letter = opened(answer, expected)
    seen, reference = whole(letter.head, "rows", 0, 2**53), whole(letter.head, "reference", 0, 2**53)
    scores, kinds = (listed(letter.head, name, str, 32) for name in ("channels", "kinds"))
    if not scores or len(scores) != len(kinds) or not {*kinds} <= {*watched.KINDS}:
        raise Refused("its channels have no known kinds")
    names(scores, "channel")
    logs = _array(letter, "logs", (len(scores),))
    history = letter.arrays.get("history")
    if not isinstance(history, np.ndarray) or history.size > (watched.LONGEST + 1) * (1 + len(scores)):
        raise Refused("its history is too long")
    history = history.reshape(-1, 1 + len(scores))
    if history.dtype != np.float64 or not (np.abs([*history.flat, *logs]) <= WEIGHT).all():
        raise Refused(f"its history holds what is no number, or beyond {WEIGHT:g}")
    if ((history[:, 0] < 0) | (history[:, 0] > seen)).any():
        raise Refused(f"its history is of rows outside the {seen} that it has seen")
    alarms = [_alarm(text, scores, seen) for text in listed(letter.head, "alarms", str, 32)]
    channels = [
        Channel(name, kind, np.zeros((1, 1)), bets.Fortune(seen, np.array([log])))
        for name, kind, log in zip(scores, kinds, logs)
    ]
    return State("", 0.05, 0, reference, channels, rows=seen, history=history.tolist(), alarms=alarms)


def _alarm(text: str, scores: list[str], seen: int) -> Alarm:
    row, score, kind, how = text.split("|")
    if score not in scores or kind not in watched.KINDS or how not in watched.HOW or not 1 <= int(row) <= seen:
        raise Refused(f"its alarm can't be read, or is of no row of the {seen} that it has seen")
    return Alarm(int(row), "", score, kind, how)


JOBS: dict[str, Callable[..., Any]] = {"calibrate": calibrate, "watch": watch}
