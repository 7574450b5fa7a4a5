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


def signed_text(purpose: str, root: bytes) -> str:
    """What a client signs of its promise, for those who are no neighbours of it."""
    return f"{purpose} {root.hex()}"


class Evidence(NamedTuple):
    """That a client's shares of its seed are not of the seed that it promised: its own promise, and the shares."""

    client: int
    attempt: str
    promise: bytes
    shares: dict[int, bytes]  # by the holder's place in the promise, as many as give a secret
    key: bytes  # its public key, and its signature of the promise by it
    proof: bytes

    @classmethod
    def against(
        cls, client: int, attempt: str, promise: Promise, shares: Mapping[int, bytes], signed: tuple[bytes, bytes]
    ) -> Evidence:
        used = sorted(shares)[: masks.threshold(len(promise.holders))]
        return cls(client, attempt, promise.block, {promise.holders.index(k): shares[k] for k in used}, *signed)

    def holds(self, root: bytes | None, purpose: str) -> bool:
        """Whether no seed that the client promised can come of its shares.

        A neighbour has the promise's root from the client itself; without, the client's signature must do.
        """
        promise = Promise(self.promise, range((len(self.promise) - WHOLE) // (2 * SHORT)))
        if root is None:
            known = masks.proves(self.key, self.proof, signed_text(purpose, promise.root))
        else:
            known = promise.root == root
        return (
            known
            and len(self.shares) == masks.threshold(len(promise.holders))
            and all(at in promise.holders for at in self.shares)
            and all(short(share) == promise.share(at, of_key=False) for at, share in self.shares.items())
            and seed_of(promise, self.shares) is None
        )

    def written(self) -> bytes:
        shares = {str(at): share.hex() for at, share in self.shares.items()}
        blocks = [block.hex() for block in (self.promise, self.key, self.proof)]
        return json.dumps([self.client, self.attempt, shares, *blocks]).encode()

    @classmethod
    def read(cls, block: bytes) -> Evidence:
        client, attempt, shares, *blocks = json.loads(block)
        promise, key, proof = map(bytes.fromhex, blocks)
        return cls(client, attempt, promise, {int(at): bytes.fromhex(s) for at, s in shares.items()}, key, proof)
