"""What the clients of a chunk are told, and which of it has an axis of clients."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map

from fedbayes.clients.client import Info
from fedbayes.engine.outcomes import Seat
from fedbayes.federation.program import Order, Program

# Which fields of Info have an axis of clients: in one federation only what is the client's own; in a sweep all, but
# for the constants that its members have in common.
ONE_FEDERATION = Info(broadcast=None, options=None, round=None, n=0, batches=0, constants=None)  # type: ignore[arg-type]
SEVERAL = Info(broadcast=0, options=0, round=0, n=0, batches=0, constants=0)  # type: ignore[arg-type]


class Constants(NamedTuple):
    """The constants of federations that are trained as one, by name.

    Those that are equal in all, such as a large frozen body, are held once (axis None); others are stacked over the
    federations (axis 0).
    """

    programs: tuple[Program, ...]
    values: Mapping[str, Any]
    axes: Mapping[str, int | None]

    @classmethod
    def of(cls, programs: Sequence[Program]) -> Constants:
        known = [program.known for program in programs]
        axes = {name: None if _equal([one[name] for one in known]) else 0 for name in known[0]}
        values = {
            name: known[0][name] if axis is None else stack([one[name] for one in known]) for name, axis in axes.items()
        }
        return cls(tuple(programs), values, axes)

    def are_of(self, programs: Sequence[Program]) -> bool:
        """Whether they are those of these very programs."""
        return len(programs) == len(self.programs) and all(a is b for a, b in zip(programs, self.programs))

    @property
    def info_axes(self) -> Info:
        """Which fields of Info have an axis of clients."""
        return ONE_FEDERATION if len(self.programs) == 1 else SEVERAL._replace(constants=self.axes)


def stack(trees: Sequence[Any]) -> Any:
    return tree_map(lambda *leaves: torch.stack(leaves), *trees)


def _equal(trees: Sequence[Any]) -> bool:
    first, *others = [tree_leaves(tree) for tree in trees]
    return all(a is b or torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


def info_of(constants: Constants, orders: Sequence[Order], seats: list[Seat], device: torch.device) -> Info:
    """What each client of the chunk knows, with the axes that `constants.info_axes` says."""
    program = constants.programs[0]
    dtype = orders[0].broadcast[program.prediction.part].mean.dtype
    sizes = torch.tensor([len(seat.rows) for seat in seats])
    batches = tuple((-(-sizes // phase.batch)).to(device) for phase in program.client.phases)
    # A number that a member does not have is one that none of its pieces reads: a bound, say.
    names = dict.fromkeys(name for order in orders for name in order.options)
    numbers = [[order.options.get(name, math.nan) for order in orders] for name in names]
    options = dict(zip(names, torch.tensor(numbers, dtype=dtype, device=device)))  # all at once: copies are what costs
    number = torch.tensor([order.round for order in orders], device=device)
    if len(orders) == 1:
        options, number = tree_map(lambda t: t[0], (options, number))
        return Info(orders[0].broadcast, options, number, sizes.to(device), batches, constants.values)
    member = torch.tensor([seat.member for seat in seats], device=device)

    def of_clients(tree: Any) -> Any:
        return tree_map(lambda t: t[member], tree)

    own = {
        name: value if constants.axes[name] is None else of_clients(value) for name, value in constants.values.items()
    }
    broadcast = of_clients(stack([order.broadcast for order in orders]))
    return Info(broadcast, of_clients(options), of_clients(number), sizes.to(device), batches, own)
