"""How a client answers beside training: histograms to calibrate by, how promises do at home, a watch on its stream."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.engine.choice import quick_cpu, tensor_cores
from fedbayes.errors import InputError, one_line
from fedbayes.evaluate.calibration import target_spread
from fedbayes.evaluate.conformal import QUANTILES, THRESHOLDS, Gathered, edges_of, site_histograms
from fedbayes.evaluate.noised import check_noised, coarse, noised, noised_hits, source_of
from fedbayes.evaluate.stream import read_stream
from fedbayes.evaluate.watch import watch as watch_of
from fedbayes.federation.kept import apart
from fedbayes.federation.program import FederationState
from fedbayes.flower.kept import Kept
from fedbayes.flower.node import Node
from fedbayes.flower.wire import Coding, Head, Letter, Refused, read
from fedbayes.model.predictive import Predictive
from fedbayes.noise import generator
from fedbayes.posterior.values import Parts
from fedbayes.runs.calibrated import Calibrated
from fedbayes.scores.conformal import conformal_threshold
from fedbayes.scores.label_shift import mix_by_em, mix_of_labels
from fedbayes.training.private import check_public
from fedbayes.training.run import Run
from fedbayes.training.task import Progress
from fedbayes.training.tested import predict_with

COUNTS = "calibration"  # the array of added histograms in a letter, beside the posterior's


def run_of(node: Node, letter: Letter, like: Parts) -> Run:
    """The run of the posterior that a letter carries, at this client."""
    arrays = {name: a for name, a in letter.arrays.items() if name != COUNTS}
    parts = read(arrays, like, Coding(letter.head["dtype"], letter.head["delta"]), what="broadcast")
    broadcast, beside = apart(parts)
    state = FederationState(letter.head["round"], broadcast, kept=beside)
    return Run(node.task, Progress(state), [])


def job_edges(head: Head, classes: int) -> Tensor:
    """The edges of a job's histograms; few where they are noised."""
    edges = edges_of(head["score"], classes, head["penalty"], head["free"])
    return coarse(edges) if head["epsilon"] else edges


def halves(node: Node) -> tuple[Tensor, Tensor]:
    """The client's test rows: those that calibrate, and those that judge."""
    rows = node.task.clients.test_rows(node.client)
    order = torch.randperm(len(rows), generator=generator(node.task.seed, "calibrate", node.client))
    return rows[order[: (len(rows) + 1) // 2]], rows[order[(len(rows) + 1) // 2 :]]


def _predicted(node: Node, run: Run, rows: Tensor) -> tuple[Predictive, Tensor]:
    data = node.task.clients.data
    with quick_cpu(), tensor_cores(node.task.precision):
        p = predict_with(node.task, run.parts, data.test_x[rows]).cpu()
    y = data.test_y[rows].cpu()
    return p, y if data.target_scale is None else data.target_scale.undo(y)


def _check(node: Node, head: Head) -> None:
    """Refuse what would show rows that noise must hide, whatever the server asks for."""
    try:
        if head["epsilon"]:
            check_noised(head["way"], head["score"], head["epsilon"])
        else:
            check_public(node.task.privacy)
    except InputError as error:
        raise Refused(one_line(error)) from error


def _histograms(node: Node, run: Run, head: dict[str, Any]) -> tuple[Tensor, Predictive, Tensor, Tensor]:
    """Counts of the calibrating half, its predictions and targets, and the edges."""
    _check(node, head)
    rows, _ = halves(node)
    if not len(rows):
        raise Refused("it has no test rows")
    p, y = _predicted(node, run, rows)
    classes = p.mean.shape[-1] if p.kind == "classes" else 1
    edges = job_edges(head, classes)
    spread = torch.tensor(head["spread"], dtype=torch.float64)
    with quick_cpu():
        counts = site_histograms(*(p, y, head["score"], edges, spread, head["coverage"], head["penalty"], head["free"]))
    return counts, p, y, edges


def histograms(node: Node, state: FederationState, head: dict[str, Any], kept: Kept) -> Tensor:
    """The client's counts under a posterior, for a sum under masks."""
    return _sent(_histograms(node, Run(node.task, Progress(state), []), head)[0], head, kept)


def _sent(counts: Tensor, head: Head, kept: Kept) -> Tensor:
    """Counts as they leave a client: noised where the job says so, and the totals of classes kept as they were sent."""
    if not head["epsilon"]:
        return counts
    sent = noised(counts, head["epsilon"], source_of())
    kept.totals.store(sent[:, -1].numpy().tobytes())
    return sent


def _mix(node: Node, head: Head, own: Tensor, p: Predictive, everywhere: Tensor, kept: Kept) -> Tensor:
    """The client's mix of labels; under noise by what it has sent, for how it does must tell no more of its rows."""
    if p.kind != "classes" or head["way"] == QUANTILES or (head["epsilon"] and head["way"] != "label_shift"):
        return torch.full((len(own),), 1 / len(own), dtype=torch.float64)  # which nobody needs to know
    if head["epsilon"]:
        block = kept.totals.fetch()
        if block is None:
            raise Refused("it has sent no noised counts of this calibration: begin it again")
        return mix_of_labels(torch.from_numpy(np.frombuffer(block).copy()).clamp_min(0), everywhere)
    if head["way"] == "unlabelled":
        return mix_by_em(p.probs, everywhere / everywhere.sum())
    if node.task.privacy is not None:  # of its training rows nothing is told without noise
        return mix_of_labels(own.sum(1), everywhere)
    data, clients = node.task.clients.data, node.task.clients
    trained = torch.bincount(data.y[clients.train_rows(node.client)].cpu(), minlength=data.classes)
    return mix_of_labels(own.sum(1) + trained, everywhere)


def calibrate(node: Node, letter: Letter, kept: Kept, like: Parts) -> Letter:
    """A histogram of scores of the rows that calibrate, by class where targets are classes; or its quantile alone."""
    if node.secure:
        raise Refused("its experiment says secure = true: histograms leave it under masks alone")
    head = letter.head
    counts, _, _, edges = _histograms(node, run_of(node, letter, like), head)
    if head["way"] == QUANTILES:
        one = conformal_threshold(counts.sum(0), edges, head["coverage"])
        return Letter(node.reply(letter), {COUNTS: np.full((1, 1), one)})
    return Letter(node.reply(letter), {COUNTS: _sent(counts, head, kept).numpy()})


def promise(node: Node, letter: Letter, kept: Kept, like: Parts) -> Letter:
    """Thresholds for this client's own mix of labels, and how they do on the rows that judge."""
    head, run = letter.head, run_of(node, letter, like)
    own, p, y, edges = _histograms(node, run, head)
    counts = torch.from_numpy(letter.arrays[COUNTS].astype(np.float64))
    if counts.shape != ((1, 1) if head["way"] == QUANTILES else own.shape):
        raise Refused("the added histograms are of another shape")
    mix = _mix(node, head, own, p, counts.sum(1), kept)[None]
    confidence = head["confidence"] if head["confidence"] > 0 else None
    if head["way"] == QUANTILES:  # the server's one number, for every class
        thresholds = counts.expand(1, len(own))
        pooled = thresholds[0]
    else:
        thresholds, pooled = THRESHOLDS[head["way"]](
            Gathered(counts, [] if head["epsilon"] else [own], edges), mix, head["coverage"], confidence
        )
    made = Calibrated(
        *(p.kind, head["score"], head["way"], head["coverage"], ("here",), thresholds, pooled, int(counts.sum())),
        *(counts, edges, mix, torch.tensor(head["spread"], dtype=torch.float64)),
        penalty=head["penalty"],
        free=head["free"],
    )
    _, rows = halves(node)
    hits, size = 0, 0.0
    if len(rows):
        p, y = _predicted(node, run, rows)
        hits, size = int(made.covered(p, y, 0).sum()), float(made.sizes(p, 0).mean())
    if head["epsilon"]:
        hits, size = noised_hits(hits, len(rows), head["epsilon"], source_of()), 0.0
    said = {"rows": len(rows), "hits": hits, "size": size}
    # Where its histogram was hidden, its mix and what follows from it stay at home too.
    hidden = node.secure or head["epsilon"]
    shown = {} if hidden else {"thresholds": thresholds[0].numpy(), "mix": mix[0].numpy()}
    return Letter(node.reply(letter, **said), shown)


def watch(node: Node, letter: Letter, kept: Kept, like: Parts) -> Letter:
    """Bet on what has come into the client's stream since the last look; its state stays with the client."""
    if node.stream is None:
        raise Refused('it has no stream: start its node with --node-config "stream=/path/stream.csv"')
    head, run = letter.head, run_of(node, letter, like)
    name = node.task.clients.name(node.client)
    home = None if node.state is None else Path(node.state) / re.sub(r"[^A-Za-z0-9_.-]+", "-", str(head["run"]))
    try:
        check_public(node.task.privacy, "fortunes of bets", mend="")
        with quick_cpu(), tensor_cores(node.task.precision):
            made = watch_of(run, name, alpha=head["alpha"], labels=bool(node.label), folder=home)
            stream = read_stream(Path(node.stream), run, label=node.label, site=name)
            before = made.state.rows
            made.update(stream.x[before:], None if stream.y is None else stream.y[before:])
    except InputError as error:
        raise Refused(one_line(error)) from error
    state = made.state
    alarms = [f"{a.row}|{a.score}|{a.kind}|{a.how}" for a in state.alarms]
    said = {"rows": state.rows, "reference": state.reference, "alarms": alarms}
    said |= {"channels": [c.name for c in state.channels], "kinds": [c.kind for c in state.channels]}
    logs = np.array([float(c.fortune.log) for c in state.channels])
    return Letter(node.reply(letter, **said), {"history": np.array(state.history, dtype=np.float64), "logs": logs})


def spread_at(task: Any) -> list[float]:
    """The unit of real targets that claim none, as the server knows it."""
    if not len(task.clients.data.y):
        return [1.0]
    return [float(v) for v in target_spread(Run(task, Progress(FederationState(0, {})), []))]
