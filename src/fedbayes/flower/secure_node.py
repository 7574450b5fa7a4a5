"""A client's side of a secure sum: four letters a round, of which the third trains."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from fedbayes.federation.round import contribute
from fedbayes.flower import masks
from fedbayes.flower.fixed import METRIC, flat, quantise, split
from fedbayes.flower.kept import Kept
from fedbayes.flower.node import Node
from fedbayes.flower.shown import LEAST, Sum, digest
from fedbayes.flower.wire import Letter, Refused

# What each letter may follow in one attempt at a round: a server that asks twice could subtract what it got. Only the
# last may come again, word for word, for a reply may be lost: its answer is the same, and says nothing new.
ORDER: dict[str, tuple[str, ...]] = {
    "train.keys": (),
    "train.shares": ("train.keys",),
    "train.masked": ("train.shares",),
    "train.unmask": ("train.masked", "train.unmask"),
}


def answer(node: Node, kind: str, letter: Letter, kept: Kept) -> Letter:
    """The reply to one of the four letters; what must stay secret until the next lies in `kept.secret`."""
    block = kept.secret.fetch()
    secret: dict[str, Any] = json.loads(block) if block and ORDER[kind] else {}
    at = [letter.head["run"], letter.head["round"], letter.head["attempt"]]
    if ORDER[kind] and (secret.get("at") != at or secret.get("after") not in ORDER[kind]):
        raise Refused(f"a secure sum asks in turn: {kind} came without {ORDER[kind][0]} of the same attempt")
    secret["at"] = at
    kept.secret.store(b"")  # whatever happens now, no letter is answered twice
    made = ANSWERS[kind](node, letter, kept, secret)
    kept.secret.store(json.dumps({**secret, "after": kind}).encode())
    return made


def keys(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """Two new key pairs: one for the masks, one for the boxes in which shares travel."""
    (mask_private, mask_public), (box_private, box_public) = masks.key_pair(), masks.key_pair()
    secret |= {"mask": mask_private.hex(), "box": box_private.hex(), "public": mask_public.hex()}
    return Letter(node.reply(letter, mask_key=mask_public, box_key=box_public), {})


def shares(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """The mask's seed and key, shared among the neighbours: a box for each that only it can open."""
    head = letter.head
    near = dict(zip(head["near"], zip(head["mask_keys"], head["box_keys"])))
    public = [key for pair in near.values() for key in pair]
    if node.client in near or len({*public}) < len(public) or len(near) + 1 < LEAST:
        raise Refused("its neighbours' keys are too few, or not one of each")
    holders = sorted([node.client, *near])
    needed = masks.threshold(len(holders))
    seed = os.urandom(32)
    parts = zip(
        masks.create_shares(seed, needed, len(holders)),
        masks.create_shares(bytes.fromhex(secret["mask"]), needed, len(holders)),
    )
    given = dict(zip(holders, parts))
    name = f"{node.client}".encode()
    boxes = {
        k: masks.box(masks.agreed(bytes.fromhex(secret["box"]), pair[1]), name, f"{k}".encode(), *given[k])
        for k, pair in near.items()
    }
    secret |= {
        "seed": seed.hex(),
        "near": {str(k): [key.hex() for key in pair] for k, pair in near.items()},
        "held": {str(node.client): [share.hex() for share in given[node.client]]},
    }
    return Letter(node.reply(letter, to=list(boxes), boxes=list(boxes.values())), {})


def masked(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """A client's round, its statistics as whole numbers under its masks."""
    head, program = letter.head, node.task.program
    _take_boxes(node, secret, dict(zip(head["sources"], head["boxes"])))
    trained = node.trained(letter, kept)
    upload, info = trained.upload, trained.info
    assert program.pooling.weighting.weigh is not None
    main = program.prediction.part
    # Only ratios of weights matter to a rule: in units of a typical one their sums need few bits.
    weight = program.pooling.weighting.weigh(upload.parts[main], info.broadcast[main], info.n) / head["weight_unit"]
    terms, finite = contribute(program, upload, info, weight)
    if not bool(finite):
        raise Refused("its weight was not finite")
    figures = {name: torch.as_tensor(value).double() for name, value in upload.metrics.items()}
    hidden, clear = split(program, {**terms, **({METRIC: figures} if figures else {})})
    vector = quantise(hidden, head["clients"])
    vector = vector + masks.mask(bytes.fromhex(secret["seed"]), masks.purpose("own", *secret["at"]), len(vector))
    for k in map(int, secret["held"]):
        if k != node.client:
            key = masks.agreed(bytes.fromhex(secret["mask"]), bytes.fromhex(secret["near"][str(k)][0]))
            pair = masks.mask(key, masks.purpose("pair", *secret["at"]), len(vector))
            vector = vector + pair if node.client > k else vector - pair
    secret["broadcast"] = digest(head["method"], trained.broadcast)
    kept.put(head["round"], upload.own, head["counted"], trained.own)
    arrays = {"sum": vector, **{name: np.asarray(t.cpu()) for name, t in flat(clear).items()}}
    return Letter(node.reply(letter, own=bool(upload.own), lost=trained.lost, figures=sorted(figures)), arrays)


def unmask(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """Shares of the seeds of those in the sum, and of the keys of neighbours who are not; never both of one client."""
    alive, gone = sorted({*letter.head["alive"]}), sorted({*letter.head["gone"]})
    known, near = {int(k) for k in secret["held"]}, {*alive} & {int(k) for k in secret["held"]}
    if {*alive} & {*gone} or not {*gone} <= known or node.client not in alive:
        raise Refused("it was asked for shares that together would show a client's upload")
    if not 0 <= alive[0] <= alive[-1] < len(node.task.clients):
        raise Refused("it was asked for a sum over clients that are not in the experiment")
    if len(near) < masks.threshold(len(secret["near"]) + 1):
        raise Refused("too few of its neighbours are left to hide one another")
    if secret.setdefault("given", [alive, gone]) != [alive, gone]:
        raise Refused("a secure sum asks in turn: it gave the shares of another sum of this attempt already")
    run, number, _ = secret["at"]
    kept.shown.admit(Sum(f"{run} {letter.head['method']} {number}", secret["broadcast"], frozenset(alive)))
    held = {k: [bytes.fromhex(share) for share in secret["held"][str(k)]] for k in known}
    of = sorted(near | {*gone})
    return Letter(node.reply(letter, of=of, shares=[held[k][0] if k in near else held[k][1] for k in of]), {})


def _take_boxes(node: Node, secret: dict[str, Any], boxes: dict[int, bytes]) -> None:
    """Keep the shares that came in boxes, each from who it says it is from."""
    for source, sealed in boxes.items():
        if str(source) not in secret["near"]:
            raise Refused(f"client {source} is no neighbour of it")
        key = masks.agreed(bytes.fromhex(secret["box"]), bytes.fromhex(secret["near"][str(source)][1]))
        try:
            sender, receiver, *parts = masks.opened(key, sealed)
        except Exception as error:
            raise Refused(f"the box of client {source} can't be opened") from error
        if (sender, receiver) != (f"{source}".encode(), f"{node.client}".encode()):
            raise Refused(f"the box of client {source} is not from it, or not for client {node.client}")
        secret["held"][str(source)] = [part.hex() for part in parts]
    if len(secret["held"]) < masks.threshold(len(secret["near"]) + 1):
        raise Refused("too few of its neighbours are left to hide one another")


ANSWERS: dict[str, Callable[[Node, Letter, Kept, dict[str, Any]], Letter]] = {
    "train.keys": keys,
    "train.shares": shares,
    "train.masked": masked,
    "train.unmask": unmask,
}
