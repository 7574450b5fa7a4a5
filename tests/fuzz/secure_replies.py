"""Replies of one client to the letters of a secure sum, changed: it is refused or counted to the bit, and nothing ends.

The client may have seen what the others said in the same step, may say again what it or they said before, and may deal
false shares in boxes that are right.
"""

import random
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import Verdict

SHARED = Path(__file__).parent.parent / "shared"
SECURE = ("train.keys", "train.shares", "train.masked", "train.unmask")
PLAIN = (
    None, True, 0, 1, -1, 2**53, 2**63 - 1, 10**400, 0.5, float("nan"), float("inf"), "", "x", "\x1b[2J", "a\nb",
    "z" * 100_000, b"", b"\0", bytes(33), bytes(52), b"x" * 100_000,
)  # fmt: skip
TYPES = ("<f8", "<f4", ">u8", "<i8", "<u4", "|b1", "<c16", "<U3", "|S8", "|O", "<M8[s]")


def world() -> Any:
    """The federation, with the sums that are known."""
    if str(SHARED) not in sys.path:
        sys.path.insert(0, str(SHARED))
    import secure_federation

    secure_federation.whole()
    secure_federation.others()
    return secure_federation


class Evil:
    """What one client does in one round; by its seed."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.kinds = rng.sample(SECURE, rng.choice((1, 1, 1, 2)))
        self.deals = rng.random() < 0.1
        self.unseen = False  # whether it has changed what nobody can look at, or may look as it likes
        self.post: Any = None

    def spoil(self, kind: str, k: int, letter: Any, reply: Any) -> Any:
        from fedbayes.flower.wire import Letter

        if kind not in self.kinds or not isinstance(reply, Letter) or self.rng.random() < 0.1:
            return reply
        if self.rng.random() < 0.1:
            self.unseen |= bool(reply.arrays)  # a vector that is another's, or an old one, is as good as any
            return self.another(reply)
        head, arrays = dict(reply.head), dict(reply.arrays)
        for _ in range(self.rng.choice((1, 1, 2, 3))):
            ways: list[Callable[..., None]] = [self.field, self.inside, self.inside]
            if arrays:
                self.unseen = True
                ways += [self.array, self.words]
            self.rng.choice(ways)(head, arrays)
        return Letter(head, arrays)

    def another(self, reply: Any) -> Any:
        """Another reply in the place of this one: somebody's, an old one, none."""
        from fedbayes.flower.wire import Letter

        told = [said for replies in self.post.said.values() for said in replies if said is not None]
        mine = [Letter({**said.head, "client": reply.head["client"]}, said.arrays) for said in told]
        others = (None, "error 3: gone", Letter({}, {}), Letter({"refused": self.value()}, {}))
        return self.rng.choice([*told, *mine, *mine, *others])

    def value(self) -> Any:
        one = self.rng.choice(PLAIN)
        return [one] * self.rng.choice((0, 1, 4, 5, 1000)) if self.rng.random() < 0.3 else one

    def field(self, head: dict[str, Any], arrays: dict[str, Any]) -> None:
        """A field that is missing, another, or one too many."""
        key, way = self.rng.choice([*head]), self.rng.random()
        if way < 0.2:
            del head[key]
        elif way < 0.3:
            head[self.rng.choice(("refused", "x", "\x1b", "metric.kl"))] = self.value()
        else:
            head[key] = self.value()

    def inside(self, head: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Bytes or a list of the reply, changed in a place, or those of another client."""
        keys = [key for key, value in head.items() if isinstance(value, bytes | list)]
        if not keys:
            return
        key = self.rng.choice(keys)
        copies = [said.head[key] for replies in self.post.said.values() for said in replies if key in said.head]
        if self.rng.random() < 0.25 and copies:
            head[key] = self.rng.choice(copies)
        elif isinstance(head[key], bytes):
            head[key] = self.bytes(head[key])
        else:
            head[key] = self.list([*head[key]], copies)

    def bytes(self, data: bytes) -> bytes:
        at = self.rng.randrange(len(data) + 1)
        changed = data[:at] + self.rng.randbytes(1) + data[at + 1 :]
        return self.rng.choice((changed, changed, data[:at], data + b"\0", data[::-1], bytes(len(data)), b""))

    def list(self, values: list[Any], copies: list[Any]) -> list[Any]:
        way = self.rng.randrange(8)
        if not values or way == 0:
            return [*values, self.value()]
        at = self.rng.randrange(len(values))
        if way == 1:
            del values[at]
        elif way == 2:
            values.append(values[at])
        elif way == 3:
            self.rng.shuffle(values)
        elif way == 4:
            values[at] = self.value()
        elif way == 5:
            values[at] = self.bytes(values[at]) if isinstance(values[at], bytes) else [values[at], values[at]]
        elif way == 6:
            values[at] = values[self.rng.randrange(len(values))]
        elif others := [v for copy in copies if isinstance(copy, list) for v in copy]:
            values[at] = self.rng.choice(others)
        return values

    def array(self, head: dict[str, Any], arrays: dict[str, Any]) -> None:
        """An array of another type, shape or name, one too many or too few."""
        name = self.rng.choice([*arrays])
        a, way = arrays[name], self.rng.randrange(6)
        if way == 0:
            del arrays[name]
        elif way == 1:
            arrays[self.rng.choice(("more", "", "\x1b", "sum"))] = arrays.pop(name)
        elif not isinstance(a, np.ndarray) or a.dtype.kind not in "uf":
            arrays[name] = self.value()
        elif way == 2:
            arrays[name] = np.zeros(a.shape, self.rng.choice(TYPES))
        elif way == 3:
            flat = a.reshape(-1)
            arrays[name] = self.rng.choice((a[None], flat[:-1], np.repeat(flat, 2), flat[:0]))
        elif way == 4:
            arrays[name] = self.rng.choice((a.reshape(-1)[::-1], np.asfortranarray(a[None]), a.tolist(), None))
        else:
            arrays["more"] = np.ones(3)

    def words(self, head: dict[str, Any], arrays: dict[str, Any]) -> None:
        """Other numbers: what a mask hides, and what travels in the clear."""
        name = self.rng.choice([*arrays])
        a = arrays[name]
        if not isinstance(a, np.ndarray) or not a.size or a.dtype.kind not in "uf":
            return
        a = a.copy()
        spots = self.rng.sample(range(a.size), self.rng.choice((1, 1, a.size)))
        if a.dtype.kind == "u":
            add = self.rng.choice((1, 2**30, 2**50, 2**61, 2**62, 2**63, 2**64 - 2**61))
            a.reshape(-1)[spots] += np.array(add % 2 ** (8 * a.itemsize)).astype(a.dtype)
        else:
            a.reshape(-1)[spots] = self.rng.choice((0.0, -1.0, 1e7, 1e300, np.inf, np.nan))
        arrays[name] = a

    @contextmanager
    def under(self, kind: str) -> Iterator[None]:
        """Shares that are of nothing, or of another secret, for some holders or all."""
        from fedbayes.flower import masks

        real = masks.create_shares
        if self.deals and kind == "train.shares":
            masks.create_shares = lambda *given: [
                share[:4] + self.rng.randbytes(len(share) - 4) if self.rng.random() < 0.6 else share
                for share in real(*given)
            ]
        try:
            yield
        finally:
            masks.create_shares = real


def case(seed: int, folder: Path) -> Verdict:
    """One round with one evil client."""
    federation = world()
    evil = Evil(random.Random(seed))
    evil.post = federation.Post(evil.spoil, evil.under)
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        outcome, notes = federation.summed(evil.post)
    texts = [*outcome.left_out.values(), *notes]
    if bad := [text for text in texts if not text.isprintable() or len(text) > 2000]:
        return Verdict("words", f"{len(bad[0])} characters: {bad[0][:200]!r}")
    fate = federation.verdict(outcome)
    if fate in ("refused", "counted"):
        return Verdict({"refused": "refused", "counted": "done"}[fate])
    honest = [k for k in outcome.left_out if k != federation.EVIL]
    if evil.unseen and (fate == "changed" or not outcome.counted) and (not outcome.counted or not honest):
        return Verdict("done")  # another posterior, or a round that is skipped: nobody can know by whose fault
    return Verdict("others", fate)
