"""Nodes on this machine whose every reply is changed at random: Flower carries it, and the honest client trains on."""

import json
import os
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from machines import Machines

import fedbayes as fb
from fedbayes.flower.places import FILE
from fedbayes.posterior.values import check

pytestmark = pytest.mark.flower

ROUNDS = int(os.environ.get("FUZZ_ROUNDS", "5"))  # four changed replies in each
SEED = os.environ.get("FUZZ_SEED", "")  # other changes
NODES = {"clear": 3, "secure": 6}  # of them two lie
LIAR = """
import random, sys, zlib
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedbayes.flower.apps import client_app, server_app
from fedbayes.flower.grid import ARRAYS, array_record, letter_of
from fedbayes.flower.node import SECURE
from fedbayes.flower.wire import Letter

sys.path.insert(0, "FUZZ")
import replies

EXPERIMENT = Path(__file__).parent.parent / "experiment.toml"
server = server_app(EXPERIMENT)
inner = client_app(EXPERIMENT)
client = ClientApp()


def answer(message, context):
    reply = inner(message, context)
    if not context.node_config.get("liar"):
        return reply
    letter, kind = letter_of(reply.content), message.metadata.message_type
    at = f"{letter.head.get('round')} {context.node_config['partition-id']}"
    if kind in SECURE and kind != random.Random(zlib.crc32(f"{at}SEED".encode())).choice(SECURE):
        return reply  # one of the four letters of a secure sum is changed: after it none is asked for
    seed = f"{kind} {at}SEED"
    rng = random.Random(zlib.crc32(seed.encode()))
    hidden = kind == "train.masked"  # other numbers under a mask are another posterior, and nobody's fault
    while True:
        changed = replies.content(Letter(letter.head, {}) if hidden else letter, rng)
        if hidden and ARRAYS in changed and rng.random() < 0.8:
            changed[ARRAYS] = array_record(letter)
        try:
            changed.object_id
            break
        except Exception:  # what Flower can't write would end this node's own process, and nobody else's
            continue
    with (Path(context.node_config["state"]) / "lies").open("a") as file:
        file.write(seed + "\\n")
    return Message(changed, reply_to=message)


client.query()(inner)
client.train()(answer)
for kind in SECURE:
    client.train(kind.removeprefix("train."))(answer)
client.evaluate()(answer)
"""


@pytest.mark.parametrize("mode", NODES)
def test_nodes_that_lie_in_every_reply_do_not_stop_the_honest_ones(
    mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = NODES[mode] - 2
    machines = Machines(tmp_path / "liars", nodes=NODES[mode])
    monkeypatch.syspath_prepend(str(machines.folder))
    fuzz = str(Path(__file__).parent.parent / "fuzz")
    (machines.folder / machines.folder.name / "app.py").write_text(LIAR.replace("FUZZ", fuzz).replace("SEED", SEED))
    try:
        machines.superlink()
        for k in range(NODES[mode]):
            machines.node(k, more="liar=true" if k >= honest else "")
        flower = {"timeout": 90, "wait": 200, "client_scores": True, "max_offences": 0, "secure": mode == "secure"}
        machines.experiment(method="feduab", rounds=ROUNDS, clients=NODES[mode], flower=flower)
        folder = machines.complete("runs/liars")
        told = [machines.folder / f"state/node-{k}/lies" for k in range(honest, NODES[mode])]
        lies = sum(len(file.read_text().splitlines()) for file in told)
    finally:
        machines.stop()
    run = fb.load(folder)
    check(run.posterior)
    assert len(run.journal) == ROUNDS
    assert lies >= 3 * ROUNDS
    words = [text for r in run.journal for text in [*r["left_out"].values(), *r.get("notes", [])]]
    assert all(text.isprintable() and len(text) < 700 for text in words)
    assert not [r["left_out"] for r in run.journal for k in range(honest) if str(k) in r["left_out"]]
    assert not [text for text in words for k in range(honest) if f"client {k} was left out" in text]
    print(f"{lies} changed replies, {sum(len(r['left_out']) for r in run.journal)} uploads refused")
    keys = json.loads((folder / FILE).read_text())  # by which Flower knows the nodes, each for its own client
    assert set(keys) == {str(k) for k in range(NODES[mode])}
    assert len(set(keys.values())) == NODES[mode]
