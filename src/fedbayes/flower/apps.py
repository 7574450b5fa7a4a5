"""The two apps of a federation, from an experiment's file: what `[tool.flwr.app.components]` names."""

from __future__ import annotations

import inspect
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedbayes.errors import InputError, disk_advice, unknown
from fedbayes.experiments.build import options_of_method
from fedbayes.experiments.experiment import Experiment, parse, read, with_settings
from fedbayes.flower.answers import LOOKS, answer
from fedbayes.flower.federated import carried, run
from fedbayes.flower.grid import GridPost, content_of, letter_of
from fedbayes.flower.jobs import JOBS
from fedbayes.flower.kept import Kept, Slot, in_file, shown_in_file
from fedbayes.flower.library import ClientApp, ConfigRecord, Context, Grid, Message, ServerApp
from fedbayes.flower.node import EVALUATE, QUERY, REFINE, SECURE, TRAIN, Node
from fedbayes.flower.shown import Shown
from fedbayes.flower.wire import Letter
from fedbayes.runs.folder import Watch
from fedbayes.runs.journal import Record
from fedbayes.training import influence

OWN = "fedbayes.own"


def server_app(experiment: str | Path) -> ServerApp:
    """The server of an experiment. Run configuration: `output`, the run folder; `set`, as of `fedbayes run`; `job`:
    train, or on what was trained calibrate or watch; `job-options`: what these take, such as "way=blended"."""
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        x = _configured(experiment, context)
        folder = Path(str(context.run_config.get("output", f"runs/{Path(experiment).stem}")))
        print(f"fedbayes: run folder {folder.resolve()}", flush=True)
        try:
            job = str(context.run_config.get("job", "train"))
            if job in JOBS:  # on the posterior of a run that was trained before
                options = job_options(job, str(context.run_config.get("job-options", "")))
                print(f"fedbayes: {JOBS[job](x, folder, GridPost(grid), **options)}", flush=True)
            elif job != "train":
                raise unknown("job", job, ["train", *JOBS])
            else:
                run(x, folder, GridPost(grid), Watch(round=_say))
        except InputError as error:
            print(f"error: {error}", flush=True)
            raise
        except OSError as error:
            print(f"error: {disk_advice(error, 'the run goes on when it is started again')}", flush=True)
            raise
        print(f"fedbayes: finished; the posterior is in {folder.resolve()}", flush=True)

    return app


def job_options(job: str, text: str) -> dict[str, Any]:
    """Options of a job from words `key=value`, checked against what it takes."""
    known = [name for name, p in inspect.signature(JOBS[job]).parameters.items() if p.kind is p.KEYWORD_ONLY]
    options: dict[str, Any] = {}
    for word in shlex.split(text):
        key, sign, value = word.partition("=")
        if not sign or key not in known:
            raise unknown(f"option of the job {job}", key, known)
        options[key] = parse(value, key)
    return options


def client_app(experiment: str | Path, *, state: str | Path | None = None) -> ClientApp:
    """The clients of an experiment. Node configuration: `partition-id`, the client's number; `state`, a folder for
    what it keeps, so that a node that starts again still has it; `device`; for the job `watch` `stream`, a file that
    new rows come into, and `label`, the column of their labels."""
    app = ClientApp()

    def answering(kind: str) -> Any:
        def answer(message: Message, context: Context) -> Message:
            letter = letter_of(message.content)
            folder = context.node_config.get("state", state)
            reply = _answer(
                _configured(experiment, context), kind, letter, context, None if folder is None else str(folder)
            )
            return Message(content_of(reply), reply_to=message)

        return answer

    app.query()(answering(QUERY))
    app.train()(answering(TRAIN))
    for kind in SECURE:
        app.train(kind.removeprefix(f"{TRAIN}."))(answering(kind))
    app.evaluate()(answering(EVALUATE))
    app.evaluate("refine")(answering(REFINE))
    for kind in LOOKS:
        app.evaluate(kind.removeprefix(f"{EVALUATE}."))(answering(kind))
    return app


def _configured(experiment: str | Path, context: Context) -> Experiment:
    """The experiment of the file, with the run's settings laid over it."""
    given = shlex.split(str(context.run_config.get("set", "")))
    x = read(experiment)
    return carried(with_settings(x, given, options_of_method) if given else x)


def _answer(x: Experiment, kind: str, letter: Letter, context: Context, state: str | None) -> Letter:
    client = context.node_config.get("partition-id")
    if type(client) is not int:
        raise InputError(f'this node does not know its client: start it with --node-config "partition-id=0" ({client})')
    method = str(letter.head.get("method"))
    if method not in x.all_methods:
        return Letter({"refused": f"method is {method!r}, not one of {', '.join(x.all_methods)}"}, {})
    device = str(context.node_config.get("device", x.device))
    node = Node(replace(x.only(method), device=device), client)
    given = {name: context.node_config.get(name) for name in ("stream", "label")}
    node.stream, node.label = (None if v is None else str(v) for v in given.values())
    node.state = state
    return answer(node, kind, letter, _kept(context, state, f"{letter.head.get('run')}.{method}", client))


def _kept(context: Context, folder: str | Path | None, name: str, client: int) -> Kept:
    """What a client keeps, in the folder where there is one, else in Flower's context, which ends with the run."""
    name = f"{name}.{client}"
    secret, totals = (_slot(context, f"{OWN}.{name}.{what}") for what in ("secret", "totals"))
    if folder is not None:
        plain = "".join(c if c.isalnum() else "-" for c in name)
        shown = shown_in_file(Path(folder) / f"sums-{client}.json")
        return in_file(Path(folder) / f"{plain}.safetensors", secret, shown, totals)
    return Kept(*_slot(context, f"{OWN}.{name}"), secret, Shown(*_slot(context, f"{OWN}.{name}.sums")), totals)


def _slot(context: Context, key: str) -> Slot:
    """A place in Flower's context."""

    def fetch() -> bytes | None:
        record = context.state.config_records.get(key)
        block: Any = None if record is None else record["block"]
        return block

    def store(block: bytes) -> None:
        context.state[key] = ConfigRecord({"block": block})

    return Slot(fetch, store)


def _say(record: Record) -> None:
    """One line a round: who answered, what it scored, who was left out."""
    scores = {**record.get("test", {})}
    shown = " ".join(
        f"{name} {scores[name]:.4f}" for name in ("accuracy", "concordance", "rmse", "nll", "ece") if name in scores
    )
    left = "".join(f"; client {k} left out: {why}" for k, why in record["left_out"].items())
    notes = "".join(f"; {note}" for note in record.get("notes", []))
    owner = influence.owner(record)
    owned = "" if owner is None else f"; {influence.warning(*owner)}"
    took = f"{record['seconds']:.1f} s " if "seconds" in record else ""  # of private clients it tells who came
    spent = f"; epsilon {record['epsilon']:.4g}" if "epsilon" in record else ""
    print(f"round {record['round']}: {took}{shown}{spent}{left}{owned}{notes}", flush=True)
