"""What a run promises at each site: thresholds of sets, intervals or lower bounds, and how they did; in one file."""

from __future__ import annotations

import hashlib
import json
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes import scores as of
from fedbayes.errors import InputError, unknown
from fedbayes.federation.kept import LONE_NOISE, NOISE_PART
from fedbayes.files import arrays_in, reading
from fedbayes.model.predictive import Predictive
from fedbayes.posterior.values import flatten_parts
from fedbayes.runs.evaluation import save as save_arrays
from fedbayes.runs.shapes import check_calibration
from fedbayes.training.run import Run

FILE = "calibration.npz"
MEND = "run `fedbayes calibrate` again"


@dataclass(frozen=True)
class Calibrated:
    """Thresholds by site [K, C] (for real targets and survival [K, 1]), and what keeps the promise for any other site.

    `everywhere` [C] is the threshold of all rows together, which a site that is not known has. `counts` [C, B + 1] are
    the added histograms over `edges`, by class where targets are classes, and `mix` [K, C] the sites' label mixes.
    """

    kind: str
    score: str
    way: str
    coverage: float
    sites: tuple[str, ...]
    thresholds: Tensor
    everywhere: Tensor
    rows: int
    counts: Tensor = field(repr=False)
    edges: Tensor = field(repr=False)
    mix: Tensor = field(repr=False)
    spread: Tensor = field(repr=False)  # of the training targets: the unit where a regression claims none
    penalty: float = 0.01  # of regularised scores
    free: int = 2
    confidence: float | None = None
    source: str = ""
    rounds: int | None = None  # of the posterior whose promises they are
    posterior: str = ""  # its checksum
    judged: dict[str, np.ndarray] = field(default_factory=dict, repr=False)  # by site: rows, hits, size

    def threshold(self, site: int | str | None = None) -> Tensor:
        """The threshold of a site by number or name; of all rows together without one."""
        return self.everywhere if site is None else self.thresholds[self.number(site)]

    def number(self, site: int | str) -> int:
        """A site's number, from its name or number."""
        if isinstance(site, str) and site in self.sites:
            return self.sites.index(site)
        if not str(site).isdecimal() or int(site) >= len(self.sites):
            raise unknown("site", str(site), self.sites)
        return int(site)

    def for_mix(self, mix: Tensor) -> Tensor:
        """Thresholds [C] for a label mix [C] that no site had."""
        if self.kind != "classes":
            raise InputError(f"a label mix needs classes; the run predicts {self.kind}")
        return of.shifted_thresholds(self.counts, self.edges, mix, self.coverage, self.confidence)

    def class_scores(self, p: Predictive) -> Tensor:
        """Scores [N, C] of every class; higher is stranger."""
        return class_scores(self.score, p.probs.cpu(), self.penalty, self.free)

    def sets(self, p: Predictive, site: int | str | None = None) -> Tensor:
        """Membership [N, C]: the classes that can't be ruled out."""
        self._needs("classes", "sets")
        return self.class_scores(p) <= self.threshold(site)

    def interval(self, p: Predictive, site: int | str | None = None) -> tuple[Tensor, Tensor]:
        """Lower and upper ends [N, D] in the target's units; several outputs are covered at once."""
        self._needs("real", "intervals")
        p, t = p.cpu(), float(self.threshold(site))
        if self.score == "quantile":
            low, high = quantiles_of(p, self.coverage)
            middle, move = (low + high) / 2, t * self.spread.to(low)
            return torch.minimum(low - move, middle), torch.maximum(high + move, middle)
        half = t * scale_of(p, self.spread)
        return p.mean - half, p.mean + half

    def lower(self, p: Predictive, site: int | str | None = None) -> Tensor:
        """Times [N] that are outlived as often as promised."""
        self._needs("survival", "lower bounds")
        return of.survival_lower(p.survival.cpu(), torch.tensor(p.times), float(self.threshold(site)))

    def covered(self, p: Predictive, y: Tensor, site: int | str | None = None) -> Tensor:
        """Which truths [N] are held; of survival, which rows were seen alive at their bound or lived beyond it."""
        if self.kind == "classes":
            return self.sets(p, site).gather(1, y.long()[:, None])[:, 0]
        if self.kind == "survival":
            return y[:, 0] >= self.lower(p, site)
        low, high = self.interval(p, site)
        return ((low <= y) & (y <= high)).all(-1)

    def sizes(self, p: Predictive, site: int | str | None = None) -> Tensor:
        """How much is promised, [N]: classes in a set, the width of an interval, the bound on a time."""
        if self.kind == "classes":
            return self.sets(p, site).double().sum(1)
        if self.kind == "survival":
            return self.lower(p, site)
        low, high = self.interval(p, site)
        return (high - low).double().mean(-1)

    def _needs(self, kind: str, what: str) -> None:
        if self.kind != kind:
            raise InputError(f"{what} are for {kind} targets; the run predicts {self.kind}")


def class_scores(score: str, probs: Tensor, penalty: float, free: int) -> Tensor:
    """Scores [N, C] by name."""
    if score == "regularised":
        return of.regularised_scores(probs, penalty, free)
    return {"least_ambiguous": of.least_ambiguous_scores, "adaptive": of.adaptive_scores}[score](probs)


def scale_of(p: Predictive, spread: Tensor) -> Tensor:
    """The claimed standard deviation, or the training targets' where none is claimed."""
    total = p.total
    return torch.where(total > 0, total.sqrt(), spread.to(total))


def quantiles_of(p: Predictive, coverage: float) -> tuple[Tensor, Tensor]:
    """The ends [N, D] between which a normal of the predicted moments has so much of its mass."""
    half = p.total.double().sqrt() * float(torch.special.ndtri(torch.tensor((1 + coverage) / 2, dtype=torch.float64)))
    return p.mean.double() - half, p.mean.double() + half


def write(folder: str | Path, made: Calibrated) -> Path:
    """Write `calibration.npz` into a run's folder."""
    path = Path(folder) / FILE
    head: dict[str, Any] = {name: getattr(made, name) for name in (*HEAD, *POSTERIOR)}
    arrays = {name: getattr(made, name).double().cpu().numpy() for name in TENSORS}
    judged = {f"judged_{name}": values for name, values in made.judged.items()}
    names = np.array(made.sites, dtype=str)
    save_arrays(path, {**arrays, **judged, "sites": names, "head": np.array(json.dumps(head))})
    return path


HEAD = ("kind", "score", "way", "coverage", "rows", "penalty", "free", "confidence", "source")
POSTERIOR = ("rounds", "posterior")  # which files of an earlier version do not have
TENSORS = ("thresholds", "everywhere", "counts", "edges", "mix", "spread")
JUDGED = ("rows", "hits", "size")


def posterior_of(run: Run) -> dict[str, Any]:
    """What names the posterior that a run predicts by: its round, and a checksum."""
    # Without the observation noise, which may be estimated anew, and rounds otherwise on another machine.
    parts = {part: q for part, q in run.parts.items() if part not in (NOISE_PART, LONE_NOISE)}
    digest = hashlib.blake2b(digest_size=16)
    for name, t in sorted(flatten_parts(parts)[0].items()):
        digest.update(f"{name} {t.dtype} {list(t.shape)}".encode())
        digest.update(t.detach().cpu().contiguous().numpy().tobytes())
    return {"rounds": run.progress.state.round, "posterior": digest.hexdigest()}


def read(folder: str | Path, run: Run | None = None) -> Calibrated:
    """The calibration of a run's folder; with the run it must be of its posterior, and is refused where it is not."""
    path = Path(folder) / FILE
    if not path.is_file():
        raise InputError(f"{folder} is not calibrated yet: run `fedbayes calibrate {folder}` first")
    arrays = arrays_in(path, MEND)
    with reading(path, MEND):
        check_calibration(arrays)
        head = json.loads(str(arrays["head"]))
        tensors: dict[str, Any] = {name: torch.from_numpy(arrays[name].astype(np.float64)) for name in TENSORS}
        judged = {name: arrays[f"judged_{name}"] for name in JUDGED if f"judged_{name}" in arrays}
        of_which = {name: head[name] for name in POSTERIOR if name in head}
        made = Calibrated(
            **{name: head[name] for name in HEAD},
            **of_which,
            **tensors,
            sites=tuple(arrays["sites"].tolist()),
            judged=judged,
        )
    if run is not None:
        _check_posterior(made, run, path)
    return made


def _check_posterior(made: Calibrated, run: Run, path: Path) -> None:
    """Refuse promises of another posterior; those of an earlier version do not say of which they are."""
    if not made.posterior:
        warnings.warn(f"{path} does not say of which round its promises are; {MEND} to be sure", stacklevel=3)
        return
    now = posterior_of(run)
    if made.posterior != now["posterior"]:
        same = made.rounds == now["rounds"]
        whose = "another posterior" if same else f"round {made.rounds}, the run is at round {now['rounds']}"
        raise InputError(f"{path}: its promises are of {whose}; {MEND}")
