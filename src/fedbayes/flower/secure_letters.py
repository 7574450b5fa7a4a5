"""The four replies of a secure sum as typed values: whatever is wrong with one is a refusal of its sender.

Each parser runs inside the border's guard. What is under a mask can't be looked at; all else is checked here, once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedbayes.flower import masks
from fedbayes.flower.border import FIGURES, block, listed, names, opened, truth
from fedbayes.flower.fixed import RANGE
from fedbayes.flower.post import Answer
from fedbayes.flower.promises import Promise, short, signed_text
from fedbayes.flower.wire import Head, Refused

BOX = 1024  # bytes of a box, at most
SUM = "sum"  # the array of words under masks


class Keys(NamedTuple):
    """A client's public keys, of which it has shown that they are its own."""

    mask: bytes
    box: bytes


def keys_of(answer: Answer, expected: Head, purpose: str) -> Keys:
    head = opened(answer, expected).head
    keys = Keys(block(head, "mask_key", masks.PUBLIC), block(head, "box_key", masks.PUBLIC))
    for key, name in zip(keys, ("mask_proof", "box_proof")):
        if not masks.proves(key, block(head, name, masks.PROOF), purpose):
            raise Refused(f"{name} does not show that its key is its own")
    if keys.mask == keys.box:
        raise Refused("its two keys are one")
    return keys


class Dealt(NamedTuple):
    """Boxes with a client's shares, by receiver, and what it promises of them."""

    boxes: dict[int, bytes]
    promise: Promise
    proof: bytes  # that the promise is its own


class Dealer(NamedTuple):
    """Who deals: its number, its neighbours, its public key, and for what it signs."""

    client: int
    near: Sequence[int]
    key: bytes
    purpose: str


def dealt_of(answer: Answer, expected: Head, dealer: Dealer) -> Dealt:
    head, near = opened(answer, expected).head, dealer.near
    boxes = listed(head, "boxes", bytes, len(near))
    if len(boxes) != len(near) or not all(0 < len(sealed) <= BOX for sealed in boxes):
        raise Refused(f"its boxes are not {len(near)} of at most {BOX} bytes")
    size = Promise.size(len(near) + 1)
    promise = Promise(block(head, "promise", size), sorted([dealer.client, *near]))
    if len(promise.block) != size:
        raise Refused(f"its promise is {len(promise.block)} bytes, not {size}")
    proof = block(head, "promise_proof", masks.PROOF)
    if not masks.proves(dealer.key, proof, signed_text(dealer.purpose, promise.root)):
        raise Refused("promise_proof does not show that its promise is its own")
    return Dealt(dict(zip(near, boxes)), promise, proof)


class Form(NamedTuple):
    """What a masked upload must be: how many words without figures, what travels in the clear, whose boxes it had."""

    words: int
    clear: Mapping[str, Tensor]  # as the broadcast would be
    sources: Sequence[int]


class Masked(NamedTuple):
    """A client's statistics under its masks, what travels beside them, and whose boxes it could not open."""

    vector: np.ndarray
    clear: dict[str, Tensor]
    figures: tuple[str, ...]
    own: bool
    lost: bool
    bad: frozenset[int]


def masked_of(answer: Answer, expected: Head, form: Form) -> Masked:
    letter = opened(answer, expected)
    head, arrays = letter.head, letter.arrays
    figures = names(listed(head, "figures", str, FIGURES))
    bad = frozenset(listed(head, "bad", int, len(form.sources)))
    if not bad <= {*form.sources}:
        raise Refused("it names boxes that it was not given")
    if arrays.keys() != {SUM, *form.clear}:
        raise Refused(f"what it sends in the clear is not {', '.join(form.clear) or 'nothing'}")
    vector, size = arrays[SUM], form.words + len(figures)
    if not isinstance(vector, np.ndarray) or vector.dtype != np.uint64 or vector.shape != (size,):
        raise Refused(f"its masked sum is not {size} words of 64 bits")
    clear = {name: _maximum(arrays[name], like, name) for name, like in form.clear.items()}
    return Masked(vector, clear, figures, truth(head, "own"), truth(head, "lost"), bad)


def _maximum(a: np.ndarray, like: Tensor, name: str) -> Tensor:
    """A statistic of which the largest is taken: near the broadcast's, so that no client runs away with it."""
    expected = like.cpu().numpy()
    if not isinstance(a, np.ndarray) or a.dtype != expected.dtype or a.shape != expected.shape:
        raise Refused(f"its {name} is of another type or shape")
    t = torch.from_numpy(a.copy())
    if not bool(((t.double() - like.cpu().double()).abs() <= RANGE).all()):
        raise Refused(f"its {name} is not finite, or beyond {RANGE:.3g}")
    return t


class Given(NamedTuple):
    """Shares by owner, and seeds of the noise that is too much."""

    shares: dict[int, bytes]
    noise: list[bytes]


def shares_of(answer: Answer, expected: Head, wanted: Mapping[int, bytes], pieces: int) -> Given:
    """What takes masks off, and so many pieces of noise; `wanted` has the digest of each share."""
    head = opened(answer, expected).head
    of, shares = listed(head, "of", int, len(wanted)), listed(head, "shares", bytes, len(wanted))
    if of != sorted(wanted) or len(shares) != len(of):
        raise Refused("its shares are not those that it was asked for")
    for k, share in zip(of, shares):
        if len(share) != masks.SHARE or short(share) != wanted[k]:
            raise Refused(f"its share of client {k}'s mask is not the one that it was given")
    noise = listed(head, "noise", bytes, pieces) if pieces else []
    if len(noise) != pieces or any(len(seed) != masks.SEED for seed in noise):
        raise Refused(f"its noise is not {pieces} seeds")
    return Given(dict(zip(of, shares)), noise)


def words(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many words statistics of these shapes are."""
    return sum(math.prod(shape) for shape in shapes.values())
