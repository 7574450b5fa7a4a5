"""Run an experiment into a folder, go on after a crash, load the result again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from fedbayes.data import Clients
from fedbayes.engine.clock import EVALUATION, START, share
from fedbayes.errors import Diverged, InputError, one_line
from fedbayes.experiments.build import build, check_tables, clients_of
from fedbayes.experiments.experiment import Experiment, folder_name, to_toml
from fedbayes.experiments.keys import FLOWER, SAVED
from fedbayes.experiments.tables import check_spread
from fedbayes.runs import checkpoint, coding, evaluation, journal, samples, saved
from fedbayes.runs.changes import finish
from fedbayes.runs.home import experiment_in, ledger_of, locked, refuse_another, refuse_saved
from fedbayes.runs.own import OwnFiles
from fedbayes.runs.recording import CONFIG, Recording, write_once
from fedbayes.training import hub
from fedbayes.training.callbacks import called_back
from fedbayes.training.fit import refuse_diverged
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Run
from fedbayes.training.task import Progress, Task

Step = tuple[Progress, journal.Record]


@dataclass(frozen=True)
class Watch:
    """What is called while a run goes on; by default nothing is."""

    begun: Callable[[str, Task, list[journal.Record]], None] = lambda method, task, records: None
    client: Callable[[], None] = lambda: None
    round: Callable[[journal.Record], None] = lambda record: None
    ended: Callable[[str, bool], None] = lambda method, was_finished: None


@dataclass(frozen=True)
class Carrier:
    """Trains clients elsewhere than in this process: binds a task to itself, and runs its rounds."""

    bind: Callable[[Experiment, Task, Path], Task]
    rounds: Callable[..., Iterator[Step]]


def run(
    experiment: Experiment,
    folder: str | Path,
    watch: Watch | None = None,
    *,
    network: nn.Module | None = None,
    clients: Clients | None = None,
    carrier: Carrier | None = None,
) -> dict[str, Run]:
    """Train into a folder, one run per method; where the folder holds this experiment already, go on with it.

    `network` and `clients` stand in for what the experiment names, for code that can't be imported by name.
    """
    folder = Path(folder)
    if experiment.engine == FLOWER and carrier is None:
        raise InputError('engine = "flower" runs by `fedbayes run` or `flwr run`; in Python use fedbayes.flower')
    if network is None:
        refuse_saved(experiment, folder)
    check_tables(experiment)
    experiment = experiment.settled
    refuse_another(experiment, folder)
    if not (folder / CONFIG).is_file():
        check_spread(experiment)
    with locked(folder):
        with share(START):
            if clients is None:
                clients = clients_of(experiment)
            # Everything is bound before anything is written, so that a wrong name leaves no run behind.
            tasks = {
                method: build(experiment.only(method), network=network, clients=clients)
                for method in experiment.all_methods
            }
        write_once(folder / CONFIG, to_toml(experiment))
        runs, failures = {}, []
        for method, task in tasks.items():
            where = folder / folder_name(method) if experiment.methods else folder
            x = experiment.only(method)
            bound = task if carrier is None else carrier.bind(x, task, where)
            steps = rounds if carrier is None else carrier.rounds
            try:
                runs[method] = train(x, bound, where, watch or Watch(), rounds=steps)
            except Diverged as error:  # the other methods of a comparison are trained all the same
                failures.append(error)
        if failures:
            raise failures[0]
        with share(EVALUATION):
            _compare(folder, runs, experiment.method)
    return runs


def resume(
    folder: str | Path,
    watch: Watch | None = None,
    *,
    network: nn.Module | None = None,
    clients: Clients | None = None,
) -> dict[str, Run]:
    """Go on with the experiment of a folder from its last checkpoint: same result as if nothing had happened."""
    finish(folder)
    return run(experiment_in(folder), folder, watch, network=network, clients=clients)


def load(
    folder: str | Path,
    *,
    network: nn.Module | None = None,
    clients: Clients | None = None,
    device: str | None = None,
) -> Run:
    """The run of a folder again, from its last checkpoint: posterior, predictions, scores, journal.

    `network` and `clients` stand in for user code that can't be imported here; what `fb.save` has written needs the
    network, and the clients only to be scored. "hf://owner/name" is a model that `run.push` has written to the Hugging
    Face Hub: it comes without data, and predicts.
    """
    if str(folder).startswith(hub.SCHEME):
        if clients is not None:
            raise InputError("clients: a model of the Hub comes without data; leave it out")
        return Run(*hub.fetch(str(folder), network, device or "cpu"), [])
    folder = whole = Path(folder)
    experiment = experiment_in(folder).settled
    if experiment.network == SAVED:
        return saved.loaded(folder, network, clients, device or "cpu")
    if experiment.methods:
        folder, experiment = folder / folder_name(experiment.method), experiment.only(experiment.method)
    here = experiment if device is None else replace(experiment, device=device)
    paths = checkpoint.paths(folder)
    if not paths:
        raise InputError(f"{folder} has no checkpoint yet; run `fedbayes resume {whole}` to train it")
    if clients is None:
        clients = coding.clients_by(here, folder)
    task = build(here, network=network, clients=clients)
    progress, index, widths, _ = checkpoint.read(paths[-1], here, task)
    task.go_on_with(widths)
    if not task.done(progress):
        warnings.warn(
            f"{folder} is not finished: this is round {progress.state.round} of {task.rounds}; "
            f"`fedbayes resume {whole}` goes on",
            UserWarning,
            stacklevel=2,
        )
    own = OwnFiles(folder / "own", task.device, index)
    return Run(task, progress, journal.upto(folder, progress.state.round), own, ledger_of(folder))


def train(
    experiment: Experiment,
    task: Task,
    folder: Path,
    watch: Watch,
    *,
    called: str | None = None,
    rounds: Callable[..., Iterator[Step]] = rounds,
) -> Run:
    """Train one method into its folder, from the last checkpoint on."""
    name = called or experiment.method
    recording = Recording(experiment, task, folder, lambda method, *rest: watch.begun(name, *rest))
    steps = rounds(task, recording.progress, recording.own, watch.client)
    for progress, record in _named(name, called_back(task, steps, recording.records, recording.own)):
        recording.add(progress, record)
        watch.round(record)
    refuse_diverged(recording.records, f"; what {name} had learned before is kept in {folder}")
    with within_memory(name):
        result, was_finished = recording.end()
    watch.ended(name, was_finished)
    return replace(result, ledger=ledger_of(folder))


@contextmanager
def within_memory(method: str) -> Iterator[None]:
    """Running out of memory as one line."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not isinstance(error, MemoryError) and "allocate" not in str(error):
            raise
        raise InputError(
            f"{method} needs more memory than there is ({one_line(error)}); lower batch, draws or at_once"
        ) from error


def _named(method: str, steps: Iterator[Step]) -> Iterator[Step]:
    """Rounds whose errors of value, such as scores that are not finite, name the method and the round."""
    number = 0
    try:
        with within_memory(method):
            for step in steps:
                number = step[0].state.round
                yield step
    except InputError:
        raise
    except ValueError as error:
        raise InputError(
            f"{method} failed in the round after {number or 'the last checkpoint'}: {error} "
            "Checkpoints before it are kept; --debug shows where."
        ) from error


def _compare(folder: Path, runs: dict[str, Run], main: str) -> None:
    """Let every method look at the same three inputs; those of a private run, where test rows are public."""
    if any(run.task.privacy is not None and not run.task.privacy.public_test for run in runs.values()):
        return
    if not (folder / samples.FILE).is_file():
        arrays = samples.three({folder_name(method): run for method, run in runs.items()}, folder_name(main))
        if arrays is not None:
            evaluation.save(folder / samples.FILE, arrays)
