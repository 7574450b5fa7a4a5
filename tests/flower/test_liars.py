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
LIAR = """
import random, sys, zlib
from pathlib import Path

from flwr.app import Message
from flwr.clientapp import ClientApp

from fedbayes.flower.apps import client_app, server_app
from fedbayes.flower.grid import letter_of

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
    letter = letter_of(reply.content)
    seed = f"{message.metadata.message_type} {letter.head.get('round')} {context.node_config['partition-id']}"
    changed = replies.content(letter, random.Random(zlib.crc32(seed.encode())))
    with (Path(context.node_config["state"]) / "lies").open("a") as file:
        file.write(seed + "\\n")
    return Message(changed, reply_to=message)


client.query()(inner)
client.train()(answer)
client.evaluate()(answer)
"""


def test_nodes_that_lie_in_every_reply_do_not_stop_the_honest_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machines = Machines(tmp_path / "liars", nodes=3)
    monkeypatch.syspath_prepend(str(machines.folder))
    fuzz = str(Path(__file__).parent.parent / "fuzz")
    (machines.folder / machines.folder.name / "app.py").write_text(LIAR.replace("FUZZ", fuzz))
    try:
        machines.superlink()
        machines.node(0)
        for k in (1, 2):
            machines.node(k, more="liar=true")
        flower = {"timeout": 300, "wait": 200, "client_scores": True, "max_offences": 0}
        machines.experiment(method="feduab", rounds=ROUNDS, flower=flower)
        folder = machines.complete("runs/liars")
        lies = sum(len((machines.folder / f"state/node-{k}/lies").read_text().split("\n")) - 1 for k in (1, 2))
    finally:
        machines.stop()
    run = fb.load(folder)
    check(run.posterior)
    assert len(run.journal) == ROUNDS
    assert lies >= 3 * ROUNDS
    words = [text for r in run.journal for text in [*r["left_out"].values(), *r.get("notes", [])]]
    assert all(text.isprintable() and len(text) < 700 for text in words)
    assert not any("0" in record["left_out"] for record in run.journal)
    assert not any("client 0 was left out" in text for text in words)
    print(f"{lies} changed replies, {sum(len(r['left_out']) for r in run.journal)} uploads refused")
    keys = json.loads((folder / FILE).read_text())  # by which Flower knows the nodes, each for its own client
    assert set(keys) == {"0", "1", "2"}
    assert len(set(keys.values())) == 3
