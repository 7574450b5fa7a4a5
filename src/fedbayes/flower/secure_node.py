"""A client's side of a secure sum: four letters a round, of which the third trains."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedbayes.federation.contributions import contribute
from fedbayes.federation.program import Terms
from fedbayes.flower import masks, noise_shares
from fedbayes.flower.fixed import METRIC, RANGE, flat, quantise, split
from fedbayes.flower.kept import Kept
from fedbayes.flower.node import Node
from fedbayes.flower.promises import Evidence, Promise, pair, signed_text
from fedbayes.flower.secure_letters import SUM
from fedbayes.flower.shown import LEAST, ONCE, Sum, digest
from fedbayes.flower.wire import Head, Letter, Refused

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
    secret: dict[str, Any] = json.loads(block) if block else {}
    at = [letter.head["run"], letter.head["round"], letter.head["attempt"]]
    if ORDER[kind] and (secret.get("at") != at or secret.get("after") not in ORDER[kind]):
        raise Refused(f"a secure sum asks in turn: {kind} came without {ORDER[kind][0]} of the same attempt")
    if not ORDER[kind]:
        secret = {"past": _past(secret, at)}
        if node.task.program.pooling.private is not None and (secret["past"] or kept.shown.has(_round(letter.head))):
            raise Refused(ONCE)
    secret["at"] = at
    kept.secret.store(b"")  # whatever happens now, no letter is answered twice
    made = ANSWERS[kind](node, letter, kept, secret)
    kept.secret.store(json.dumps({**secret, "after": kind}).encode())
    return made


def _round(head: Head) -> str:
    """The name by which a round is remembered longer than its run."""
    return f"{head['run']} {head['method']} {head['round']}"


def _past(secret: dict[str, Any], at: list[Any]) -> dict[str, Any]:
    """What attempts at this round have promised for whose sum shares were given, by attempt."""
    if secret.get("at", [])[:2] != at[:2]:
        return {}
    if "given" not in secret:
        return dict(secret["past"])
    return {**secret["past"], secret["at"][2]: {"clients": secret["given"][0], "roots": secret["roots"]}}


def keys(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """Two new key pairs: one for the masks, one for the boxes in which shares travel; and that they are its own."""
    text = masks.purpose(f"key {node.client}", *secret["at"])
    pairs = {"mask": masks.key_pair(), "box": masks.key_pair()}
    secret |= {name: private.hex() for name, (private, _) in pairs.items()}
    public = {f"{name}_key": public for name, (_, public) in pairs.items()}
    proofs = {f"{name}_proof": masks.proof(private, text) for name, (private, _) in pairs.items()}
    return Letter(node.reply(letter, **public, **proofs), {})


def shares(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """The mask's seed and key, shared among the neighbours: a box for each that only it can open."""
    head = letter.head
    near = dict(zip(head["near"], zip(head["mask_keys"], head["box_keys"])))
    public = [key for pair in near.values() for key in pair]
    if node.client in near or len({*public}) < len(public) or len(near) + 1 < LEAST:
        raise Refused("its neighbours' keys are too few, or not one of each")
    holders = sorted([node.client, *near])
    needed = masks.threshold(len(holders))
    seed = os.urandom(masks.SEED)
    parts = zip(
        masks.create_shares(seed, needed, len(holders)),
        masks.create_shares(bytes.fromhex(secret["mask"]), needed, len(holders)),
    )
    given = dict(zip(holders, parts))
    promise = Promise.of(seed, given)
    name = f"{node.client}".encode()
    boxes = [
        masks.box(masks.agreed(bytes.fromhex(secret["box"]), key), name, f"{k}".encode(), *given[k], promise.root)
        for k, (_, key) in near.items()
    ]
    secret |= {
        "seed": seed.hex(),
        "near": {str(k): [key.hex() for key in pair] for k, pair in near.items()},
        "held": {str(node.client): [share.hex() for share in given[node.client]]},
        "roots": {str(node.client): promise.root.hex()},
    }
    text = signed_text(masks.purpose(f"promise {node.client}", *secret["at"]), promise.root)
    proof = masks.proof(bytes.fromhex(secret["mask"]), text)
    return Letter(node.reply(letter, boxes=boxes, promise=promise.block, promise_proof=proof), {})


def masked(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """A client's round, its statistics as whole numbers under its masks."""
    head, program = letter.head, node.task.program
    bad = _take_boxes(node, secret, head)
    trained = node.trained(letter, kept)
    upload, info = trained.upload, trained.info
    # Only ratios of weights matter to a rule: in units of a typical one their sums need few bits.
    terms, finite, _ = contribute(program, upload, info, unit=head["weight_unit"])
    if not bool(finite):
        raise Refused("its weight was not finite")
    private = program.pooling.private
    # A figure is only told: one that does not fit into the sum is no reason to leave the client out of it.
    told = upload.metrics if private is None else {}
    figures = {name: _within(torch.as_tensor(value)) for name, value in told.items()}
    hidden, clear = split(program, {**terms, **({METRIC: figures} if figures else {})})
    if private is not None:
        hidden = _with_noise(node, secret, hidden, private.clip * private.noise, head)
    vector = quantise(hidden, head["clients"])
    vector = vector + masks.mask(bytes.fromhex(secret["seed"]), masks.purpose("own", *secret["at"]), len(vector))
    for k in secret["sources"]:
        key = masks.agreed(bytes.fromhex(secret["mask"]), bytes.fromhex(secret["near"][str(k)][0]))
        mask = masks.mask(key, masks.purpose("pair", *secret["at"]), len(vector))
        vector = vector + mask if node.client > k else vector - mask
    secret["broadcast"] = digest(head["method"], trained.broadcast)
    kept.put(head["round"], upload.own, head["counted"], trained.own)
    arrays = {SUM: vector, **{name: np.asarray(t.cpu()) for name, t in flat(clear).items()}}
    said = {"own": bool(upload.own), "lost": trained.lost, "figures": sorted(figures), "bad": bad}
    return Letter(node.reply(letter, **said), arrays)


def unmask(node: Node, letter: Letter, kept: Kept, secret: dict[str, Any]) -> Letter:
    """Shares of the seeds of those in the sum, and of the keys of neighbours who are not; never both of one client."""
    alive, gone = sorted({*letter.head["alive"]}), sorted({*letter.head["gone"]})
    known = {node.client, *secret["sources"]}
    near = {*alive} & known
    if {*alive} & {*gone} or not {*gone} <= known or node.client not in alive:
        raise Refused("it was asked for shares that together would show a client's upload")
    if not 0 <= alive[0] <= alive[-1] < len(node.task.clients):
        raise Refused("it was asked for a sum over clients that are not in the experiment")
    if len(near) < masks.threshold(len(secret["near"]) + 1):
        raise Refused("too few of its neighbours are left to hide one another")
    fresh = "given" not in secret
    if secret.setdefault("given", [alive, gone]) != [alive, gone]:
        raise Refused("a secure sum asks in turn: it gave the shares of another sum of this attempt already")
    key = _round(letter.head)
    for written in letter.head["evidence"]:
        _strike(secret, Evidence.read(written), kept, key)
    once = fresh and node.task.program.pooling.private is not None
    kept.shown.admit(Sum(key, secret["broadcast"], frozenset(alive)), once=once)
    held = {int(k): [bytes.fromhex(share) for share in pair] for k, pair in secret["held"].items()}
    of = sorted((near | {*gone}) & {*held})
    said: Head = {"of": of, "shares": [held[k][0] if k in near else held[k][1] for k in of]}
    if "noise" in secret:
        many = noise_shares.surplus(secret["steps"], len(alive))
        said["noise"] = [bytes.fromhex(seed) for seed in secret["noise"][:many]]
    return Letter(node.reply(letter, **said), {})


def _with_noise(node: Node, secret: dict[str, Any], terms: Terms, deviation: float, head: Head) -> Terms:
    """Statistics with this client's share of the sum's noise; the seeds of what may be too much are kept."""
    places = noise_shares.steps(node.least, head["clients"])
    if not node.colluding < node.least <= head["clients"]:
        raise Refused(f"a private sum of {head['clients']} clients is below its own threshold of {node.least}")
    sizes = noise_shares.deviations(places, node.colluding, deviation)
    seeds = [os.urandom(masks.SEED) for _ in sizes]
    secret |= {"noise": [seed.hex() for seed in seeds[:-1]], "steps": places}
    named = flat(terms)
    noise = noise_shares.share(seeds, sizes, secret["at"], sum(t.numel() for t in named.values()))
    noisy: Terms = {}
    for (name, t), own in zip(named.items(), noise.split([t.numel() for t in named.values()])):
        part, key = name.split("/")
        noisy.setdefault(part, {})[key] = t.double() + own.reshape(t.shape).to(t.device)
    return noisy


def _strike(secret: dict[str, Any], evidence: Evidence, kept: Kept, key: str) -> None:
    """Strike a client from a sum that its own false shares have kept from being shown: it is not hidden any more."""
    told = secret["past"].get(evidence.attempt)
    if told is None:  # it gave no shares in that attempt, and has nothing to strike
        return
    root = told["roots"].get(str(evidence.client))
    run, number, _ = secret["at"]
    purpose = masks.purpose(f"promise {evidence.client}", run, number, evidence.attempt)
    if not evidence.holds(None if root is None else bytes.fromhex(root), purpose):
        raise Refused(f"there is no evidence against client {evidence.client}")
    kept.shown.strike(key, frozenset(told["clients"]), evidence.client)


def _within(figure: Tensor) -> Tensor:
    return figure.double().nan_to_num(RANGE, RANGE, -RANGE).clamp(-RANGE, RANGE)


def _take_boxes(node: Node, secret: dict[str, Any], head: Head) -> list[int]:
    """Keep the shares that came in boxes, each from who it says it is from; gives those whose boxes can't be used."""
    sources = head["sources"]
    secret["sources"] = sources
    if not {*map(str, sources)} <= {*secret["near"]} or len({*sources}) < len(sources):
        raise Refused("boxes came from clients that are no neighbours of it")
    if len(sources) + 1 < masks.threshold(len(secret["near"]) + 1):
        raise Refused("too few of its neighbours are left to hide one another")
    bad = []
    for source, sealed, promised in zip(sources, head["boxes"], head["promises"], strict=True):
        key = masks.agreed(bytes.fromhex(secret["box"]), bytes.fromhex(secret["near"][str(source)][1]))
        try:
            sender, receiver, of_seed, of_key, root = masks.opened(key, sealed)
            fits = (sender, receiver) == (f"{source}".encode(), f"{node.client}".encode())
            fits &= len(of_seed) == len(of_key) == masks.SHARE
            fits &= pair(of_seed, of_key) + root == promised
        except Exception:  # whatever is in another's box must not stop this client
            fits = False
        if not fits:
            bad.append(source)
            continue
        secret["held"][str(source)] = [of_seed.hex(), of_key.hex()]
        secret["roots"][str(source)] = root.hex()
    return bad


ANSWERS: dict[str, Callable[[Node, Letter, Kept, dict[str, Any]], Letter]] = {
    "train.keys": keys,
    "train.shares": shares,
    "train.masked": masked,
    "train.unmask": unmask,
}
