"""What a client promises of the shares that it deals: by their digests every share, and who spoilt one, can be told.

A promise is one block of bytes: the digest of the seed, then for each holder, in the order of the clients, the digests
of its share of the seed and of its share of the key. It tells nothing of a share, which is as random as it is long.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fedbayes.flower import masks

WHOLE, SHORT = 32, 16  # bytes of the digest of a seed or a promise, and of a share


def whole(content: bytes) -> bytes:
    return hashlib.sha256(b"whole" + content).digest()


def short(share: bytes) -> bytes:
    return hashlib.sha256(b"share" + share).digest()[:SHORT]


def pair(seed_share: bytes, key_share: bytes) -> bytes:
    """The digests of a holder's two shares."""
    return short(seed_share) + short(key_share)


class Promise(NamedTuple):
    """A client's promise, and to whom it deals."""

    block: bytes
    holders: Sequence[int]  # sorted, itself among them

    @classmethod
    def size(cls, holders: int) -> int:
        return WHOLE + 2 * SHORT * holders

    @classmethod
    def of(cls, seed: bytes, shares: Mapping[int, tuple[bytes, bytes]]) -> Promise:
        holders = sorted(shares)
        return cls(whole(seed) + b"".join(pair(*shares[k]) for k in holders), holders)

    @property
    def root(self) -> bytes:
        return whole(self.block)

    @property
    def seed(self) -> bytes:
        return self.block[:WHOLE]

    def pair(self, holder: int) -> bytes:
        start = WHOLE + 2 * SHORT * self.holders.index(holder)
        return self.block[start : start + 2 * SHORT]

    def share(self, holder: int, *, of_key: bool) -> bytes:
        """The digest of a holder's share of the key, or of the seed."""
        return self.pair(holder)[SHORT if of_key else 0 :][:SHORT]


def seed_of(promise: Promise, shares: Mapping[int, bytes]) -> bytes | None:
    """The seed that shares give; None where it is not the one that was promised."""
    secret = _combined(promise, shares)
    return secret if secret is not None and whole(secret) == promise.seed else None


def key_of(promise: Promise, shares: Mapping[int, bytes], public: bytes) -> bytes | None:
    """The private key that shares give; None where it is not that of a public key."""
    secret = _combined(promise, shares)
    if secret is None or len(secret) != masks.PRIVATE:
        return None
    try:
        return secret if masks.public_of(secret) == public else None
    except ValueError:  # no key at all
        return None


def _combined(promise: Promise, shares: Mapping[int, bytes]) -> bytes | None:
    needed = masks.threshold(len(promise.holders))
    try:
        secret: bytes = masks.combine_shares([shares[k] for k in sorted(shares)[:needed]])
    except Exception:  # whatever the library makes of shares that were never of one secret
        return None
    return secret


class Evidence(NamedTuple):
    """That a client's shares of its seed are not of the seed that it promised: its own promise, and the shares."""

    client: int
    attempt: str
    promise: bytes
    shares: dict[int, bytes]  # by the holder's place in the promise, as many as give a secret

    @classmethod
    def against(cls, client: int, attempt: str, promise: Promise, shares: Mapping[int, bytes]) -> Evidence:
        used = sorted(shares)[: masks.threshold(len(promise.holders))]
        return cls(client, attempt, promise.block, {promise.holders.index(k): shares[k] for k in used})

    def holds(self, root: bytes) -> bool:
        """Whether it tells against the client who gave this root: no seed that it promised can come of its shares."""
        promise = Promise(self.promise, range((len(self.promise) - WHOLE) // (2 * SHORT)))
        return (
            promise.root == root
            and len(self.shares) == masks.threshold(len(promise.holders))
            and all(at in promise.holders for at in self.shares)
            and all(short(share) == promise.share(at, of_key=False) for at, share in self.shares.items())
            and seed_of(promise, self.shares) is None
        )

    def written(self) -> bytes:
        shares = {str(at): share.hex() for at, share in self.shares.items()}
        return json.dumps([self.client, self.attempt, self.promise.hex(), shares]).encode()

    @classmethod
    def read(cls, block: bytes) -> Evidence:
        client, attempt, promise, shares = json.loads(block)
        return cls(
            client, attempt, bytes.fromhex(promise), {int(at): bytes.fromhex(share) for at, share in shares.items()}
        )
