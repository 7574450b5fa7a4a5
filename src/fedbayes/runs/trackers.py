"""Trackers over the journal's records: MLflow, TensorBoard and W&B, for `fit(on_round=...)` and the command line."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import folder_name, table_of
from fedbayes.files import write_atomically
from fedbayes.runs import journal
from fedbayes.runs.folder import Watch
from fedbayes.runs.home import experiment_in
from fedbayes.training.flat import flat
from fedbayes.training.run import Run
from fedbayes.training.task import Task

RUN_ID = "mlflow.txt"  # in a run folder: the MLflow run that it is tracked as
WANDB_ID = "wandb.txt"  # the same of Weights & Biases
LONGEST = 500  # characters of a parameter, which MLflow limits


class Sink(Protocol):
    """Where the numbers of one run go."""

    def log(self, number: int, values: Mapping[str, float]) -> None: ...
    def close(self, finished: bool) -> None: ...


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers of a round, by names such as `test/accuracy`."""
    rows = {name.replace(".", "/"): v for name, v in flat(record).items() if name != "round"}
    numeric = {name: float(v) for name, v in rows.items() if isinstance(v, int | float)}
    return {name: v for name, v in numeric.items() if math.isfinite(v)}


class Tracker:
    """A callback of `fit`: opens a sink at a run's first round, and closes it after the last."""

    def __init__(self, opened: Callable[[Task], Sink]) -> None:
        self.opened = opened
        self.sinks: dict[int, Sink] = {}

    def __call__(self, run: Run, record: Mapping[str, Any]) -> None:
        key = id(run.task)
        if key not in self.sinks:
            self.sinks[key] = self.opened(run.task)
        self.sinks[key].log(record["round"], numbers_of(record))
        if run.task.done(run.progress):
            self.sinks.pop(key).close("diverged" not in record)


def with_sink(watch: Watch, opened: Callable[[str, Task, int], Sink]) -> Watch:
    """The watch of a command, with each round also sent to a sink, one per method; `opened` is told the rounds done."""
    open_now: list[Sink] = []

    def begun(method: str, task: Task, records: list[journal.Record]) -> None:
        watch.begun(method, task, records)
        if not task.rounds or len(records) < task.rounds:
            open_now.append(opened(method, task, len(records)))

    def round(record: journal.Record) -> None:
        open_now[-1].log(record["round"], numbers_of(record))  # first: what is shown may end in Ctrl-C
        watch.round(record)

    def ended(method: str, was_finished: bool) -> None:
        watch.ended(method, was_finished)
        while open_now:
            open_now.pop().close(True)

    return replace(watch, begun=begun, round=round, ended=ended)


class Events:
    """TensorBoard's event files in a folder."""

    def __init__(self, folder: Path, after: int = 0) -> None:
        # What an earlier process wrote of later rounds is purged.
        self.writer = _package("torch.utils.tensorboard", "tensorboard").SummaryWriter(
            str(folder), purge_step=after + 1 if after else None
        )

    def log(self, number: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, number)
        self.writer.flush()

    def close(self, finished: bool) -> None:
        self.writer.close()


class MLflowRun:
    """A run on an MLflow server; `run_id` goes on with one that was begun."""

    def __init__(
        self, uri: str | None, experiment: str, name: str, parameters: Mapping[str, Any], run_id: str | None = None
    ) -> None:
        mlflow = _package("mlflow", "mlflow")
        self.metric, self.client = mlflow.entities.Metric, mlflow.MlflowClient(uri)
        if run_id is None:
            at = self.client.get_experiment_by_name(experiment)
            key = self.client.create_experiment(experiment) if at is None else at.experiment_id
            run_id = self.client.create_run(key, run_name=name, tags={"mlflow.source.name": "fedbayes"}).info.run_id
            for parameter, value in parameters.items():
                self.client.log_param(run_id, parameter, str(value)[:LONGEST])
        else:
            self.client.update_run(run_id, status="RUNNING")
        self.run_id: str = run_id

    def log(self, number: int, values: Mapping[str, float]) -> None:
        now = time.time_ns() // 1_000_000
        self.client.log_batch(self.run_id, metrics=[self.metric(name, v, now, number) for name, v in values.items()])

    def close(self, finished: bool) -> None:
        self.client.set_terminated(self.run_id, "FINISHED" if finished else "FAILED")


class WandbRun:
    """A run of Weights & Biases, which WANDB_MODE=offline keeps on this machine; `run_id` goes on with one."""

    def __init__(self, project: str, name: str, config: Mapping[str, Any], run_id: str | None = None) -> None:
        package = _package("wandb", "wandb")
        resumed = {} if run_id is None else {"id": run_id, "resume": "allow"}
        self.run = package.init(project=project, name=name, config=dict(config), reinit="create_new", **resumed)
        self.run_id: str = self.run.id

    def log(self, number: int, values: Mapping[str, float]) -> None:
        self.run.log(dict(values), step=number)

    def close(self, finished: bool) -> None:
        self.run.finish(exit_code=0 if finished else 1)


def _about(task: Task) -> dict[str, Any]:
    """The settings of a `fit` that trackers keep."""
    settings = {"method": task.method, "rounds": task.rounds, "cohort": task.cohort, "seed": task.seed}
    return settings | {"clients": len(task.clients), "data": task.clients.data.name, "engine": task.choice}


def mlflow(uri: str | None = None, *, experiment: str = "fedbayes", name: str | None = None) -> Tracker:
    """Track a `fit` on MLflow: `on_round=fb.trackers.mlflow("http://localhost:5000")`; by default as MLflow is set."""
    _package("mlflow", "mlflow")

    return Tracker(lambda task: MLflowRun(uri, experiment, name or task.method, _about(task)))


def wandb(project: str = "fedbayes", *, name: str | None = None) -> Tracker:
    """Track a `fit` on Weights & Biases: `on_round=fb.trackers.wandb("my-project")`; offline by WANDB_MODE."""
    _package("wandb", "wandb")
    return Tracker(lambda task: WandbRun(project, name or task.method, _about(task)))


def tensorboard(folder: str | Path) -> Tracker:
    """Track a `fit` for TensorBoard: `on_round=fb.trackers.tensorboard("events/my")`."""
    _package("torch.utils.tensorboard", "tensorboard")
    return Tracker(lambda task: Events(Path(folder)))


def with_events(watch: Watch, folder: Path) -> Watch:
    """The watch, with each round's numbers also written to `folder/tensorboard/<method>`."""
    _package("torch.utils.tensorboard", "tensorboard")  # a missing package fails before the first round
    return with_sink(watch, lambda method, task, after: Events(folder / "tensorboard" / folder_name(method), after))


def with_mlflow(watch: Watch, folder: Path, uri: str | None) -> Watch:
    """The watch, with each method's rounds also sent to MLflow; a run that goes on is the same run there."""
    _package("mlflow", "mlflow")
    return _with_runs(watch, folder, RUN_ID, lambda *about: MLflowRun(uri, "fedbayes", *about))


def with_wandb(watch: Watch, folder: Path, project: str) -> Watch:
    """The watch, with each method's rounds also sent to Weights & Biases; a run that goes on is the same run there."""
    _package("wandb", "wandb")
    return _with_runs(watch, folder, WANDB_ID, lambda *about: WandbRun(project, *about))


def _with_runs(watch: Watch, folder: Path, file: str, begin: Callable[..., MLflowRun | WandbRun]) -> Watch:
    """The watch with a sink per method that `begin` opens; a file of the run folder says which run it is there."""

    def opened(method: str, task: Task, after: int) -> Sink:
        home = folder / folder_name(method) if (folder / folder_name(method)).is_dir() else folder
        kept = home / file
        run_id = kept.read_text(encoding="utf-8").strip() if after and kept.is_file() else None
        values = {key: v for key, v in table_of(experiment_in(home)).items() if key != "methods"}
        sink = begin(f"{folder.resolve().name} {folder_name(method)}", values, run_id)
        write_atomically(kept, sink.run_id + "\n")
        return sink

    return with_sink(watch, opened)


def _package(module: str, extra: str) -> Any:
    from importlib import import_module

    try:
        return import_module(module)
    except ImportError as error:
        raise InputError(
            f"this needs the package {extra}, which is not installed; install it with: pip install 'fedbayes[{extra}]'"
        ) from error
