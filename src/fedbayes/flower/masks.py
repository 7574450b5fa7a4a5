"""Keys, shares and masks of a secure sum: SecAgg+ (Bell et al., 2020), after Bonawitz et al. (2017).

A client hides its vector under a mask of its own and one agreed with each neighbour, added by one of the two and taken
off by the other: in the sum of all they cancel. Each secret is shared among the neighbours, so that the masks of who
drops out can be taken off without it. Key agreement, encryption and Shamir's sharing are Flower's. The masks are not:
its generator folds a seed into 32 bits, which can be searched; here it is AES-256 in counter mode under the whole key.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from fedbayes.flower.library import (
    combine_shares,
    create_shares,
    decrypt,
    encrypt,
    generate_shared_key,
    sign_message,
    verify_signature,
)

__all__ = ["agreed", "box", "combine_shares", "create_shares", "key_pair", "mask", "neighbours", "opened", "threshold"]

NEIGHBOURS = 32  # that a client has on each side, at most: a cohort of up to 65 is a complete graph
CURVE = ec.SECP256R1()  # keys live for one attempt at a round
PRIVATE, PUBLIC, PROOF = 32, 33, 72  # bytes of a key, of its point on the curve, and of a signature at most
SEED, SHARE = 32, 52  # bytes of a seed, and of a share: 4 for its number, then the secret in three blocks of 16


def key_pair() -> tuple[bytes, bytes]:
    """A private and a public key."""
    number = ec.generate_private_key(CURVE).private_numbers().private_value.to_bytes(PRIVATE, "big")
    return number, public_of(number)


def public_of(private: bytes) -> bytes:
    """The public key of a private one."""
    return _private(private).public_key().public_bytes(Encoding.X962, PublicFormat.CompressedPoint)


def _private(key: bytes) -> ec.EllipticCurvePrivateKey:
    return ec.derive_private_key(int.from_bytes(key, "big"), CURVE)


def agreed(private: bytes, public: bytes) -> bytes:
    """The key that two clients have in common, each from its own private key and the other's public one."""
    point = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    shared: bytes = generate_shared_key(_private(private), point)
    return shared


def proof(private: bytes, text: str) -> bytes:
    """That one has a private key, for a text that says for whom and for what: a copied public key has none."""
    signature: bytes = sign_message(_private(private), text.encode())
    return signature


def proves(public: bytes, given: bytes, text: str) -> bool:
    """Whether a proof is that of the holder of a key, for this text."""
    try:
        point = ec.EllipticCurvePublicKey.from_encoded_point(CURVE, public)
    except ValueError:  # not a point of the curve
        return False
    return bool(verify_signature(point, text.encode(), given))


def box(key: bytes, *contents: bytes) -> bytes:
    """Contents that only the holder of the key can read."""
    lengths = b"".join(len(content).to_bytes(4, "little") for content in contents)
    sealed: bytes = encrypt(key, len(contents).to_bytes(1, "little") + lengths + b"".join(contents))
    return sealed


def opened(key: bytes, sealed: bytes) -> list[bytes]:
    """The inverse of `box`; some exception where the box was not closed with this key."""
    plain: bytes = decrypt(key, sealed)
    lengths = [int.from_bytes(plain[1 + 4 * i : 5 + 4 * i], "little") for i in range(plain[0])]
    contents, at = [], 1 + 4 * plain[0]
    for length in lengths:
        contents.append(plain[at : at + length])
        at += length
    return contents


def mask(seed: bytes, purpose: str, size: int) -> np.ndarray:
    """So many words of 64 bits that only the holders of the seed can tell from noise; others for another purpose."""
    key = hashlib.sha256(purpose.encode() + b"\0" + seed).digest()
    stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(stream.update(bytes(8 * size)), np.uint64)


def purpose(what: str, run: str, number: int, attempt: str) -> str:
    """What a mask is for: each attempt at a round has masks of its own, whatever its keys are."""
    return f"{what} {run} {number} {attempt}"


def neighbours(clients: Sequence[int], seed: int) -> dict[int, list[int]]:
    """Who shares masks with whom: each with up to `NEIGHBOURS` on either side of a shuffled ring, itself not."""
    ring = list(clients)
    random.Random(seed).shuffle(ring)
    n, reach = len(ring), min(NEIGHBOURS, len(ring) // 2)
    near = {k: {ring[(at + step) % n] for step in range(-reach, reach + 1)} for at, k in enumerate(ring)}
    return {k: sorted(others - {k}) for k, others in near.items()}


def threshold(holders: int) -> int:
    """How many of those who hold a share of a secret, its owner among them, must give it: more than half."""
    return holders // 2 + 1
