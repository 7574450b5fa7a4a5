"""A client that keeps some of its weights at home, by name pattern: FedPer, LG-FedAvg, BPFed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fedbayes.clients.client import Client, Info, Own, Phase, Upload
from fedbayes.errors import InputError
from fedbayes.noise import Tape
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import Parts, Posterior, fields_of


class Split(NamedTuple):
    """The layouts of a network's parts: whole, of what travels, and of what stays; a part may be all one or other."""

    whole: Mapping[str, Layout]
    shared: Mapping[str, Layout]
    home: Mapping[str, Layout]

    @classmethod
    def of(cls, layouts: Mapping[str, Layout], patterns: tuple[str, ...]) -> Split:
        shared = {part: layout.without(*patterns) for part, layout in layouts.items()}
        home = {part: layout.select(*patterns) for part, layout in layouts.items()}
        return cls(dict(layouts), *({p: lay for p, lay in side.items() if lay.names} for side in (shared, home)))

    def cut(self, parts: Parts) -> tuple[Parts, Parts]:
        """Whole parts as what travels and what stays."""
        shared, home = (
            {part: _each(layout, [(parts[part], self.whole[part])]) for part, layout in side.items()}
            for side in (self.shared, self.home)
        )
        return shared, home

    def merge(self, shared: Parts, home: Parts) -> Parts:
        """The inverse of `cut`."""
        sides = ((shared, self.shared), (home, self.home))
        return {
            part: _each(layout, [(parts[part], cut[part]) for parts, cut in sides if part in cut])
            for part, layout in self.whole.items()
        }


def _each(layout: Layout, sources: list[tuple[Posterior, Layout]]) -> Any:
    """A value over `layout` from values that hold its entries, tensor by tensor."""
    kind: Any = type(sources[0][0])
    other = [type(q).__name__ for q, _ in sources if type(q) is not kind]
    if other:
        raise InputError(
            f"rule: weights are {kind.__name__} at home and {other[0]} when pooled; use one that keeps them"
        )
    vectors = []
    for name in fields_of(kind):
        named: dict[str, Tensor] = {}
        for q, own in sources:
            named |= own.split(getattr(q, name))
        vectors.append(layout.join(named))
    return kind(*vectors, layout)


class State(NamedTuple):
    """The inner client's state, and the broadcast as it sees it: what came, and what was at home."""

    inner: Any
    whole: Parts


def keep_home(inner: Client, split: Split, first: Parts) -> Client:
    """`inner`, whose weights of `split.home` never travel: they go on from where the client left them.

    The inner client sees a whole broadcast, in which they stand for themselves; so a variational client's prior of its
    own weights is its own last posterior (BPFed). `first` are the whole parts before the first round.
    """

    def start(own: Own, info: Info) -> State:
        whole = split.merge(info.broadcast, own["home"])
        return State(inner.start(own.get("inner", {}), info._replace(broadcast=whole)), whole)

    def stepping(phase: Phase) -> Phase:
        def step(state: State, b: Any, tape: Tape, info: Info) -> State:
            return state._replace(inner=phase.step(state.inner, b, tape, info._replace(broadcast=state.whole)))

        def begin(state: State, info: Info) -> State:
            assert phase.begin is not None
            return state._replace(inner=phase.begin(state.inner, info._replace(broadcast=state.whole)))

        return phase._replace(step=step, begin=begin if phase.begin else None)

    def finish(state: State, info: Info) -> Upload:
        done = inner.finish(state.inner, info._replace(broadcast=state.whole))
        shared, home = split.cut(done.parts)
        return Upload(shared, {"home": home, **({"inner": done.own} if done.own else {})}, done.metrics)

    def nothing(broadcast: Parts) -> Own:
        home = split.cut(first)[1]
        own = inner.first(split.merge(broadcast, home))
        return {"home": home, **({"inner": own} if own else {})}

    return Client(start, tuple(map(stepping, inner.phases)), finish, nothing)


def whole_model(client: Client, finish: Any) -> Client:
    """A client of `keep_home` whose upload is the whole model: its personal one. `finish` is the inner client's."""

    def done(state: State, info: Info) -> Upload:
        upload = finish(state.inner, info._replace(broadcast=state.whole))
        return Upload(upload.parts, {}, upload.metrics)

    return client._replace(finish=done)
