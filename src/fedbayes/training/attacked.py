"""A federation some of whose clients attack it, in simulation: who they are, and what they train on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedbayes.data import Clients
from fedbayes.errors import InputError
from fedbayes.federation.attacks import SHARE, Attack, attack_named, attackers_of, with_attack
from fedbayes.federation.program import Program


def attacked(
    program: Program,
    clients: Clients,
    attack: str | Attack | None,
    attackers: float | Sequence[int | str] | None,
    strength: float | None,
    seed: int,
) -> tuple[Program, Tensor | None]:
    """The program under attack, and the targets to train on where attackers have changed theirs."""
    if attack is None:
        for name, value in (("attackers", attackers), ("attack_strength", strength)):
            if value is not None:
                raise InputError(f"{name}: there is no attack; name one, such as attack = 'sign_flip', or leave it out")
        return program, None
    way = attack_named(attack, strength)
    chosen = attackers_of(SHARE if attackers is None else attackers, clients.names, len(clients), seed)
    program = with_attack(program, way, chosen, seed)
    data = clients.data
    if way.targets is None or not chosen:
        return program, None
    if data.kind != "classes":
        raise InputError(f"attack: {way.name} turns class labels about; {data.name} has {data.kind} targets")
    rows = torch.cat([clients.train_rows(k) for k in chosen])
    targets = data.y.clone()
    targets[rows] = way.targets(data.y[rows], data.classes)
    return program, targets
