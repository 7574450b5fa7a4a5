"""Attacks as data: what clients that lie train on and upload. In simulation, for any method with a pooled posterior.

Notation: what the server sent q_0 = N(m_0, s_0^2); a client's true upload N(m_k, s_k^2) of n_k rows. Attackers train as
everybody does, and then lie: they know all honest uploads of the round. For points, which have no scales, the size of
honest changes stands in for s_0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from statistics import NormalDist
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedbayes.errors import InputError, unknown
from fedbayes.federation.program import Attacked, Contribution, Order, Program
from fedbayes.model.parts import is_static
from fedbayes.noise import generator, normals
from fedbayes.posterior.values import Gaussian, LowRank, Parts, Point, Posterior

SHARE = 0.2  # of the clients, by default
APART = 0.1  # of the honest deviations: how far attackers stay from one another who know that copies count once
SURE = 1e-4  # the scale of clients that claim to be sure, in units of the broadcast's


class Scene(NamedTuple):
    """What attackers know of one part in a round; uploads are stacked, the attackers' [A, P] and the honest [H, P]."""

    sent: Posterior
    true: Posterior
    honest: Posterior
    strength: float
    normals: Callable[[], Tensor]  # [A, P], by address: seed, round, client

    @property
    def changes(self) -> Tensor:
        """What honest clients have changed [H, P]."""
        return self.honest.mean - self.sent.mean

    @property
    def unit(self) -> Tensor:
        """The broadcast's scales, or the size of an honest change where there are none."""
        if isinstance(self.true, Gaussian) and isinstance(self.sent, Gaussian):
            return self.sent.scale
        return self.changes.square().mean().sqrt().expand_as(self.sent.mean)

    @property
    def attackers(self) -> int:
        return len(self.true.mean)


class Attack(NamedTuple):
    """A way to lie: with the uploads' parts, with their numbers of rows, with the targets that attackers train on."""

    name: str
    about: str
    upload: Callable[[Scene], Posterior] | None = None  # of one part, stacked over the attackers
    rows: Callable[[Tensor, float], Tensor] | None = None  # numbers of rows [A] that they claim, of the true ones
    targets: Callable[[Tensor, int], Tensor] | None = None  # of their training rows, and the number of classes
    strength: float = 1.0
    scales: bool = False  # speaks of scales alone: points have none
    copies: bool = False  # all upload what one honest client does
    apart: float = 0.0  # and each moves by so many deviations of honest uploads, in a direction of its own

    @property
    def in_uploads(self) -> bool:
        """Whether it changes uploads, and not the attackers' data alone."""
        return self.upload is not None or self.rows is not None or self.copies


def _sign_flip(scene: Scene) -> Posterior:
    return with_mean(scene.true, scene.sent.mean - scene.strength * (scene.true.mean - scene.sent.mean))


def _noise(scene: Scene) -> Posterior:
    size = scene.changes.square().mean().sqrt()
    return with_mean(scene.true, scene.sent.mean + scene.strength * size * scene.normals())


def quantile(clients: int, attackers: int) -> float:
    """How many deviations from the mean pass for honest (Baruch et al., 2019): half of all must be farther away.

    >>> round(quantile(50, 12), 3)
    0.336
    """
    honest = clients - attackers
    needed = clients // 2 + 1 - attackers
    return max(0.0, NormalDist().inv_cdf(min(max((honest - needed) / honest, 0.01), 0.99)))


def _alie(scene: Scene) -> Posterior:
    """Baruch et al. (2019): mean - z deviations of what honest clients send, for means and log scales alike."""
    honest = scene.honest
    z = scene.strength * quantile(scene.attackers + len(honest.mean), scene.attackers)

    def below(t: Tensor) -> Tensor:
        return t.mean(0) - z * t.std(0, correction=0)

    lie = with_mean(scene.true, below(honest.mean).expand_as(scene.true.mean))
    if isinstance(lie, Gaussian) and isinstance(honest, Gaussian):
        lie = replace(lie, scale=below(honest.scale.log()).exp().expand_as(lie.scale))
    return lie


def _ipm(scene: Scene) -> Posterior:
    """Xie et al. (2020): the sum keeps its size and turns its sign."""
    return with_mean(scene.true, (scene.sent.mean - scene.strength * scene.changes.mean(0)).expand_as(scene.true.mean))


def _apart(scene: Scene) -> Posterior:
    """Deviations of each weight over honest clients, in random directions: as honest clients differ, but less."""
    spread = scene.honest.mean.std(0, correction=0)
    return with_mean(scene.true, scene.true.mean + scene.strength * spread * scene.normals())


def _overconfident(scene: Scene) -> Posterior:
    far = scene.sent.mean + scene.strength * scene.unit
    return _sure(scene._replace(true=with_mean(scene.true, far.expand_as(scene.true.mean))))


def _sure(scene: Scene) -> Posterior:
    q = scene.true
    return replace(q, scale=(SURE * scene.unit).expand_as(q.scale)) if isinstance(q, Gaussian) else q


def _underconfident(scene: Scene) -> Posterior:
    q = scene.true
    return replace(q, scale=scene.strength * scene.unit.expand_as(q.scale)) if isinstance(q, Gaussian) else q


ATTACKS: dict[str, Attack] = {
    attack.name: attack
    for attack in (
        Attack("sign_flip", "m_0 - strength (m_k - m_0)", _sign_flip, strength=4.0),
        Attack("noise", "m_0 + strength * size of an honest change * normals", _noise, strength=10.0),
        Attack("label_flip", "trains on C - 1 - y", targets=lambda y, classes: classes - 1 - y),
        Attack("alie", "mean - strength * z * deviation of honest uploads (Baruch et al., 2019)", _alie),
        Attack("ipm", "m_0 - strength * mean of honest changes (Xie et al., 2020)", _ipm, strength=0.5),
        Attack("mimic", "all upload what one honest client does", copies=True),
        Attack("overconfident", f"mean m_0 + strength s_0, scale {SURE} s_0", _overconfident, strength=10.0),
        Attack("certain", f"the true mean with scale {SURE} s_0", _sure, scales=True),
        Attack("underconfident", "the true mean with scale strength * s_0", _underconfident, strength=1e4, scales=True),
        Attack("inflated_counts", "claims strength times its rows", rows=lambda n, s: (n * s).to(n), strength=10.0),
        Attack("ipm_apart", f"ipm, each {APART} honest deviations away", _ipm, strength=0.5, apart=APART),
        Attack("mimic_apart", f"mimic, each {APART} honest deviations away", copies=True, apart=APART),
    )
}


def attack_named(attack: str | Attack, strength: float | None = None) -> Attack:
    """An attack by its name in the table, or itself; with a strength of its own where one is given."""
    if isinstance(attack, str):
        if attack not in ATTACKS:
            raise unknown("attack", attack, ATTACKS)
        attack = ATTACKS[attack]
    if not isinstance(attack, Attack):
        raise InputError(f"attack must be a name or a fedbayes.attacks.Attack, not a {type(attack).__name__}")
    return attack if strength is None else attack._replace(strength=strength)


def with_mean(q: Posterior, mean: Tensor) -> Posterior:
    """The same posterior about another mean."""
    assert isinstance(q, Point | Gaussian | LowRank)
    return replace(q, mean=mean.to(q.mean))


def attackers_of(asked: Any, names: Sequence[str], clients: int, seed: int) -> tuple[int, ...]:
    """Who attacks: a share or a number of all clients, drawn by address, or clients by number or name."""
    if isinstance(asked, list | tuple):
        numbers = {name: k for k, name in enumerate(names)}
        known = [numbers.get(one, -1) if isinstance(one, str) else int(one) for one in asked]
        for one, k in zip(asked, known):
            if not 0 <= k < clients:
                raise InputError(f"attackers: there is no client {one!r}; they are 0 to {clients - 1}, or their names")
        chosen = set(known)
    else:
        count = int(asked) if isinstance(asked, Integral) or not asked else max(1, round(asked * clients))
        if count > clients:
            raise InputError(f"attackers: {count} were asked for, but there are only {clients} clients")
        chosen = set(torch.randperm(clients, generator=generator(seed, "attackers"))[:count].tolist())
    if chosen and len(chosen) == clients:
        raise InputError("attackers: all clients attack, nobody is honest; name fewer")
    return tuple(sorted(chosen))


def with_attack(program: Program, attack: Attack, clients: tuple[int, ...], seed: int) -> Program:
    """The program whose server is lied to by some clients; unchanged where there are none."""
    parts = attacked_parts(program)
    if not parts:
        raise InputError(f"attack: this method pools nothing that {attack.name} could change")
    kinds = {type(program.initial[part]) for part in parts}
    if attack.scales and Gaussian not in kinds:
        raise InputError(f"attack: {attack.name} speaks of scales, and points have none; use another, or a posterior")
    if not clients:
        return program

    def tell(order: Order, uploads: list[Contribution]) -> list[Contribution]:
        return lies(attack, parts, frozenset(clients), seed, order, uploads)

    attacked = Attacked(attack.name, clients, tell if attack.in_uploads else None)
    return program._replace(pooling=program.pooling._replace(attacked=attacked))


def attacked_parts(program: Program) -> list[str]:
    """The parts that attackers lie about: all that are trained and pooled, and have a mean to move."""
    takes = Point | Gaussian | LowRank
    return [p for p in program.pooling.rules if not is_static(p) and isinstance(program.initial[p], takes)]


def lies(
    attack: Attack,
    parts: Sequence[str],
    clients: frozenset[int],
    seed: int,
    order: Order,
    uploads: list[Contribution],
) -> list[Contribution]:
    """The uploads of a round as the server gets them: the attackers' changed, all others as they are."""
    liars = [u for u in uploads if u.client in clients]
    # Where nobody in the cohort is honest, they know what they would have sent themselves.
    honest = [u for u in uploads if u.client not in clients] or liars
    if not liars:
        return uploads
    if attack.copies:
        rank = torch.randperm(1 + max(u.client for u in uploads), generator=generator(seed, "mimic")).tolist()
        one = min(honest, key=lambda u: rank[u.client])
        told = [one._replace(client=u.client) for u in liars]
    else:
        told = _told(attack, parts, seed, order, liars, honest)
    if attack.apart:
        told = _told(attack._replace(upload=_apart, strength=attack.apart, rows=None), parts, seed, order, told, honest)
    by_client = {u.client: u for u in told}
    return [by_client.get(u.client, u) for u in uploads]


def _told(
    attack: Attack, parts: Sequence[str], seed: int, order: Order, liars: list[Contribution], honest: list[Contribution]
) -> list[Contribution]:
    rows = [u.n for u in liars]
    if attack.rows is not None:
        rows = list(attack.rows(torch.stack(rows), attack.strength).unbind())
    lies: Mapping[str, Posterior] = {}
    if attack.upload is not None:
        lies = {part: attack.upload(_scene(attack, part, seed, order, liars, honest)) for part in parts}
    told = []
    for place, (u, n) in enumerate(zip(liars, rows)):
        changed: Parts = {part: tree_map(lambda t, k=place: t[k], q) for part, q in lies.items()}
        told.append(u._replace(parts={**u.parts, **changed}, n=n))
    return told


def _scene(
    attack: Attack, part: str, seed: int, order: Order, liars: list[Contribution], honest: list[Contribution]
) -> Scene:
    sent, true = order.broadcast[part], stacked([u.parts[part] for u in liars])

    def noise() -> Tensor:
        count = math.prod(true.mean.shape[1:])
        drawn = [normals(count, seed, order.round, u.client, "attack", part) for u in liars]
        return torch.stack(drawn).reshape(true.mean.shape).to(true.mean)

    return Scene(sent, true, stacked([u.parts[part] for u in honest]), attack.strength, noise)


def stacked(qs: Sequence[Any]) -> Any:
    """Posteriors of one kind as one, stacked."""
    return tree_map(lambda *leaves: torch.stack(leaves), *qs)
