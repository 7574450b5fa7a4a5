"""The predictive distribution of a posterior, and how its uncertainty splits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.func import vmap

from fedbayes.model.classifier import Group, group_of
from fedbayes.model.likelihood import Weights
from fedbayes.model.model import Model
from fedbayes.noise import Tape, address, generator, seeded
from fedbayes.posterior.values import Draws, Grafted, LowRank, Point, Posterior
from fedbayes.scores.additive import SUMS, Sums


class Predictive(NamedTuple):
    """What a posterior says of N inputs, from Monte Carlo draws of the weights.

    `mean` [N, C] are class (or label) probabilities, or means of real targets. `aleatoric` [N, C] is the variance that
    remains when the weights are known, averaged over draws; `epistemic` [N, C] the variance between draws; they add up
    to `total` (Kwon et al., 2018; for classes the diagonals of FedUAB eq. 12, `.sum(-1)` gives the trace).
    Of survival the `mean` is the curve at `times`; 90 % of the draws' curves lie between `low` and `high`.
    """

    mean: Tensor
    aleatoric: Tensor
    epistemic: Tensor
    expected_entropy: Tensor  # [N], mean over draws of the entropy of one draw's prediction, in nats
    kind: str = "classes"
    low: Tensor | None = None
    high: Tensor | None = None
    times: tuple[float, ...] = ()

    @property
    def probs(self) -> Tensor:
        """Probabilities [N, C] of a classification."""
        if self.kind == "real":
            raise TypeError("a regression has no class probabilities; use .mean and .total")
        return self.mean

    @property
    def survival(self) -> Tensor:
        """Chances [N, T] of no event until each of `times`."""
        if self.kind != "survival":
            raise TypeError(f"this predicts {self.kind}, no survival")
        return self.mean

    def at(self, rows: Tensor) -> Predictive:
        """Some rows of it."""
        return self._each(lambda t: t[rows.to(t.device)])

    def cpu(self) -> Predictive:
        """The same on the host."""
        return self._each(lambda t: t.cpu())

    def _each(self, change: Callable[[Tensor], Tensor]) -> Predictive:
        return Predictive._make(change(t) if isinstance(t, Tensor) else t for t in self)

    def sums(self, y: Tensor) -> Sums:
        """The sums behind the scores for targets in their own units."""
        sums = SUMS[self.kind][0]
        if self.kind == "real":
            return sums(self.mean, self.total, y)
        if self.kind == "survival":
            return sums(self.mean, y, times=torch.tensor(self.times, device=self.mean.device))
        return sums(self.mean, y)

    @property
    def total(self) -> Tensor:
        return self.aleatoric + self.epistemic

    @property
    def entropy(self) -> Tensor:
        """Entropy [N] of the averaged prediction in nats: all uncertainty, of data and of weights."""
        return _entropy(self.probs, self.kind)

    @property
    def mutual_information(self) -> Tensor:
        """What the draws disagree on, [N] in nats; higher means less familiar."""
        return (self.entropy - self.expected_entropy).clamp(min=0)


def joined(pieces: Sequence[Predictive]) -> Predictive:
    """Predictions of one kind, one after another."""
    columns = zip(*pieces)
    return Predictive._make(torch.cat(own) if isinstance(own[0], Tensor) else own[0] for own in columns)


def _entropy(probs: Tensor, kind: str) -> Tensor:
    if kind == "real":
        return probs.new_zeros(probs.shape[:-1])
    own = torch.special.entr(probs)
    return (own if kind == "classes" else own + torch.special.entr(1 - probs)).sum(-1)


def draw_weights(parts: Mapping[str, Posterior], draws: int, *place: int | str) -> dict[str, Tensor]:
    """Weight vectors [Z, P] of each part. Z is the number of members where a part is an ensemble (Draws)."""
    return _drawn(parts, draws, _noise(parts, draws, *place))


def _drawn(parts: Mapping[str, Posterior], draws: int, noise: Mapping[str, Tensor]) -> dict[str, Tensor]:
    draws = _count(parts, draws)
    vectors = {}
    for name, q in parts.items():
        if isinstance(q, Point | Draws):
            vectors[name] = q.values if isinstance(q, Draws) else q.mean.expand(draws, -1)
        else:
            vectors[name] = q.at(noise[name].to(q.mean.dtype))
    return vectors


def _noise(parts: Mapping[str, Posterior], draws: int, *place: int | str) -> dict[str, Tensor]:
    """The standard normals [Z, P] of each part that has a density."""
    draws, noise = _count(parts, draws), {}
    for name, q in parts.items():
        if not isinstance(q, Point | Draws):
            size = q.normals if isinstance(q, LowRank | Grafted) else q.mean.shape[-1]
            normals = _normals if draws * size <= MOST_CACHED else _normals.__wrapped__
            noise[name] = normals(draws, size, q.mean.device, (*place, name))
    return noise


def _count(parts: Mapping[str, Posterior], draws: int) -> int:
    return next((q.values.shape[0] for q in parts.values() if isinstance(q, Draws)), draws)


MOST_CACHED = 2**24  # normals of one address that are cached for the next prediction, at most


@lru_cache(maxsize=4)
def _normals(draws: int, weights: int, device: torch.device, place: tuple[int | str, ...]) -> Tensor:
    """Standard normals of an address on a device; a run is evaluated with the same ones again and again."""
    return torch.randn(draws, weights, generator=generator(*place)).to(device)


Summaries = tuple[Tensor, ...]  # the first four fields of a Predictive; of survival its band too
Own = dict[str, Posterior]
Carry = Callable[[Callable[[Own], Summaries], Own], Summaries]


def directly(summarise: Callable[[Own], Summaries], parts: Own) -> Summaries:
    """Summaries computed here and now."""
    return summarise(parts)


def predictive(
    model: Model,
    parts: Mapping[str, Posterior],
    x: Tensor,
    *,
    draws: int = 1,
    seed: int = 0,
    dropout: bool = False,
    closed: bool = False,
    batch: int | None = None,
    carry: Carry = directly,
) -> Predictive:
    """Predict N inputs with `draws` draws of the weights, the same draws for every input.

    Costs draws * N forward passes and memory O(draws * batch * C + N * C). The same seed gives the same
    draws only for an equal number of them; a Point without dropout needs one draw. A part `noise` holds the
    variance of the targets' noise, which then stands for the likelihood's own, and a factor on the variance between
    draws. `closed`: the exact moments of a linear network, without draws. `carry(f, parts)` carries out f(parts), which
    stays on the device; not used with dropout, whose normals are the host's. A network that was trained in bfloat16
    predicts in the precision of its weights.
    """
    model = model.exact
    if closed:
        return _in_units(model, _noisy(parts, _linear(model, parts, x)))
    if all(isinstance(parts[p], Point) for p in model.layouts) and not dropout:
        draws = 1
    many = batch or _rows_at_once(model, parts, x, draws if dropout else 0)
    # Generators: for what can't be taken over, such as alpha dropout.
    with torch.no_grad(), seeded(seed, "predict", "torch", device=x.device):
        own = {p: parts[p] for p in model.layouts}
        noise = _noise(own, draws, seed, "predict")
        classifier = classifier_of(model, own, x)

        def summarise(own: Own) -> Summaries:
            drawn, pieces = _drawn(own, draws, noise), []
            for start in range(0, max(len(x), 1), many):
                rows, place = x[start : start + many], (seed, "predict", start)
                means, variances = each_draw(
                    model, drawn, rows, model.moments, place, dropout=dropout, classifier=classifier
                )
                pieces.append(_summaries(means, variances, model.likelihood.kind))
            return tuple(torch.cat(column) for column in zip(*pieces))

        summaries = directly(summarise, own) if dropout else carry(summarise, own)
    mean, aleatoric, epistemic, entropy, *band = summaries
    low, high = band or (None, None)
    kind, times = model.likelihood.kind, model.likelihood.times
    whole = Predictive(mean, aleatoric, epistemic, entropy, kind, low, high, times)
    return _in_units(model, _noisy(parts, whole))


def _summaries(means: Tensor, variances: Tensor, kind: str) -> Summaries:
    centre = means.mean(0)
    four = centre, variances.mean(0), (means - centre).square().mean(0), _entropy(means, kind).mean(0)
    return (*four, *band_of(means)) if kind == "survival" else four


def band_of(means: Tensor, level: float = 0.9) -> tuple[Tensor, Tensor]:
    """The quantiles of draws [Z, ...] between which so large a share of them lies, interpolated."""
    ranked, last = means.sort(0).values, means.shape[0] - 1
    ends = []
    for place in (last * (1 - level) / 2, last * (1 + level) / 2):
        below = int(place)
        above = min(below + 1, last)
        ends.append(ranked[below] + (place - below) * (ranked[above] - ranked[below]))
    return ends[0], ends[1]


def _in_units(model: Model, p: Predictive) -> Predictive:
    """From standardised targets to the original units."""
    if model.units is None:
        return p
    shift, scale = (torch.as_tensor(u).to(p.mean) for u in model.units)
    return p._replace(mean=p.mean * scale + shift, aleatoric=p.aleatoric * scale**2, epistemic=p.epistemic * scale**2)


def _noisy(parts: Mapping[str, Posterior], p: Predictive) -> Predictive:
    """With the observation noise that was estimated, where one was."""
    if "noise" not in parts:
        return p
    variance, factor = parts["noise"].mean.to(p.mean).reshape(2, -1)
    return p._replace(aleatoric=variance.expand_as(p.mean), epistemic=factor * p.epistemic)


def _linear(model: Model, parts: Mapping[str, Posterior], x: Tensor) -> Predictive:
    """Moments of w^T x under independent normals, mean^T x and (scale^2)^T x^2 (FedAG eq. 6).

    The second is the same network with variances for weights and squares for inputs.
    """
    moments = {part: parts[part].moments() for part in model.layouts}
    with torch.no_grad():
        weights = model.weights({part: mean for part, (mean, _) in moments.items()})
        spreads = model.weights({part: variance for part, (_, variance) in moments.items()})
        mean, aleatoric = model.moments(model.output(weights, x), weights)
        epistemic = model.as_seen.output(spreads, model.inputs(x).square()).to(mean)
    return Predictive(mean, aleatoric, epistemic, mean.new_zeros(len(mean)), model.likelihood.kind)


def each_draw(
    model: Model,
    drawn: dict[str, Tensor],
    x: Tensor,
    read: Callable[[Tensor, Weights], tuple[Tensor, ...]],
    place: tuple[int | str, ...],
    *,
    dropout: bool = False,
    classifier: Group | None = None,
) -> tuple[Tensor, ...]:
    """What `read` makes of the output for a batch and the weights, under each draw [Z, P]: tensors [Z, n, ...].

    `place` is the address of the noise of dropout. `classifier` is all that differs between the draws, where that is
    known: its features are then computed once.
    """
    count = next(iter(drawn.values())).shape[0]
    group = classifier
    if group is not None and not dropout:
        first = {part: v[0] for part, v in drawn.items()}
        seen, weights = group.look(first, x), model.weights(first)
        vectors = drawn[group.part].index_select(-1, group.places)
        return vmap(lambda w: read(group.output(w, seen, first), weights))(vectors)

    def one(vectors: dict[str, Tensor], noise: Tensor | None) -> tuple[Tensor, ...]:
        weights = model.weights(vectors)
        return read(model.output(weights, x, None if noise is None else Tape(noise)), weights)

    def noises() -> Iterator[Tensor | None]:
        """The noise of one draw after another: large networks can't hold that of all."""
        if not dropout:
            yield from [None] * count
            return
        random = torch.Generator(x.device).manual_seed(address(*place))
        used = _dropout_normals(model, {part: v[0] for part, v in drawn.items()}, x)
        yield from (torch.randn(used, generator=random, device=x.device) for _ in range(count))

    # Stacked convolutions are slower than one after another on a CPU; on a GPU this saves memory, speed not measured.
    if count > 1 and not model.convolves:
        noise = torch.stack(list(noises())) if dropout else None  # type: ignore[arg-type]
        try:
            return vmap(one, in_dims=(0, None if noise is None else 0), randomness="different")(drawn, noise)
        except (RuntimeError, ValueError):
            pass  # a network that vmap can't take; what is wrong with it otherwise shows below
    rows = [one({part: v[z] for part, v in drawn.items()}, noise) for z, noise in enumerate(noises())]
    return tuple(torch.stack(column) for column in zip(*rows))


def classifier_of(model: Model, parts: Mapping[str, Posterior], x: Tensor) -> Group | None:
    """The network's last linear map, where it is grafted on a network of points: all that differs between draws."""
    grafts = [q for part, q in parts.items() if part in model.layouts and not isinstance(q, Point)]
    if len(grafts) != 1 or not len(x):
        return None
    (q,) = grafts
    if not isinstance(q, Grafted) or not isinstance(q.stock, Point) or q.graft.layout is None:
        return None
    group = group_of(model, model.module, q.graft.layout.names, x[:1])
    return group if group.linear else None


def _dropout_normals(model: Model, vectors: Mapping[str, Tensor], x: Tensor) -> int:
    """How many normals the dropout of one forward pass reads, by a dry run."""
    tape = Tape()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        model.output(model.weights(vectors), x, tape)
    return tape.used


MOST_NORMALS = {"cpu": 2**25, "cuda": 2**30}  # of dropout in memory at once


def _rows_at_once(model: Model, parts: Mapping[str, Posterior], x: Tensor, masks: int) -> int:
    """Rows of a batch whose activations fit in memory, and the noise of so many dropout masks."""
    most = 1024 if x.device.type == "cpu" else 4096 if model.convolves else 16384
    if not masks or not len(x):
        return most
    each = _dropout_normals(model, {part: parts[part].mean for part in model.layouts}, x[:1])
    together = each * (1 if model.convolves else masks)
    return max(1, min(most, MOST_NORMALS.get(x.device.type, 2**25) // max(1, together)))
