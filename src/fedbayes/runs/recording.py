"""A run on its way into a folder: own rows, then the journal, then the checkpoint that commits both."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedbayes.engine.clock import EVALUATION, FILES, share
from fedbayes.errors import InputError, NotFinite
from fedbayes.experiments.experiment import Experiment, to_toml
from fedbayes.federation.ledger import total
from fedbayes.files import write_atomically
from fedbayes.runs import checkpoint, coding, evaluation, journal
from fedbayes.runs.own import OwnFiles
from fedbayes.runs.releases import releases_in
from fedbayes.training.run import Run
from fedbayes.training.task import Progress, Task

CONFIG = "config.toml"
CHANGING = "changing.toml"  # what it will be, while a change of the experiment is being written
SECONDS = 2.0  # between checkpoints where the experiment does not say how many rounds

Begun = Callable[[str, Task, list[journal.Record]], None]


class Recording:
    """The folder of one run, opened at its last checkpoint: `add` each round, `end` when there are no more."""

    def __init__(
        self,
        experiment: Experiment,
        task: Task,
        folder: Path,
        begun: Begun = lambda method, task, records: None,
        *,
        seconds: float = SECONDS,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        write_once(folder / CONFIG, to_toml(experiment))
        coding.keep(folder, task.clients.data.coding)
        coding.keep_rows(folder, experiment, task)
        self.experiment, self.task, self.folder = experiment, task, folder
        self.progress, self.own, line = self._last()
        if task.privacy is not None:
            _check_remembers(folder, self.progress.state.round)
        if line:
            journal.complete(folder, line, self.progress.state.round)
        self.records = journal.cut(folder, self.progress.state.round)
        begun(experiment.method, task, self.records)
        if not task.done(self.progress):
            (folder / evaluation.FILE).unlink(missing_ok=True)
        self._kept = [self.own.index.files]
        self._saved, self._seconds = time.monotonic(), seconds

    def add(self, progress: Progress, record: journal.Record) -> None:
        """Take a round in; a checkpoint follows when it is due.

        A private round is committed before a line of it is seen: whoever kills the process then has seen one noisy sum
        of the round or none, and never a second one.
        """
        self.progress = progress
        with share(FILES):
            self.records.append(record)
            if self.task.privacy is not None:
                self._commit(journal.line_of(record))
            journal.append(self.folder, record)
            if self.task.privacy is None and self._due():
                journal.sync(self.folder)
                self._commit()
            if not self.task.done(progress):
                self.own.compact()

    def _commit(self, line: str = "") -> None:
        self.own.write()
        own = self.own.index.as_tensors()
        checkpoint.write(self.folder, self.experiment, self.task, self.progress, own, line)
        self._kept = [*self._kept[-1:], self.own.index.files]
        self.own.sweep(self._kept)
        self._saved = time.monotonic()

    def end(self) -> tuple[Run, bool]:
        """The run, with its table and evaluation on disk; and whether they had been there before."""
        run = Run(self.task, self.progress, self.records, self.own)
        was_finished = (self.folder / evaluation.FILE).is_file()
        if not was_finished:
            with share(FILES):
                journal.write_table(self.folder, self.records)
            with share(EVALUATION), suppress(NotFinite):  # of a run that diverged, as its last record says
                evaluation.write(self.folder, run)
        return run, was_finished

    def _due(self) -> bool:
        if self.task.done(self.progress):
            return True
        every = self.experiment.checkpoint_every
        if every is None:
            return time.monotonic() - self._saved > self._seconds
        return self.progress.state.round % every == 0

    def _last(self) -> tuple[Progress, OwnFiles, str]:
        """The progress of the last checkpoint, its clients' own state, its line; the start where there is none yet."""
        folder, task, line = self.folder, self.task, ""
        for stray in [*folder.glob(".*.????????"), *folder.glob("checkpoints/.*")]:
            stray.unlink()  # half-written neighbours of a killed process
        paths = checkpoint.paths(folder)
        if not paths:
            progress = task.begin()
            own = OwnFiles(folder / "own", task.device)
            if task.rounds == 0:
                checkpoint.write(folder, self.experiment, task, progress, own.index.as_tensors())
        else:
            last = checkpoint.read(paths[-1], self.experiment, task, rows=task.clients.train.digest)
            progress, line = last.progress, last.line
            task.go_on_with(last.widths)
            own = OwnFiles(folder / "own", task.device, last.own)
        own.sweep_strays([checkpoint.own_index(path).files for path in paths[:-1]])
        return progress._replace(beside=total(releases_in(folder))), own, line


def _check_remembers(folder: Path, number: int) -> None:
    """Refuse to release a private round for a second time: its journal is never ahead of its checkpoint."""
    told = len(journal.read(folder))
    if told > number:
        raise InputError(
            f"{folder} has told of {told} private rounds, and its last checkpoint is of round {number}: going on would "
            "show rounds under two noises and forget what they have spent; put checkpoints/ back from a copy, or begin "
            "another run"
        )


def write_once(path: Path, text: str) -> None:
    """Write a file unless it is there."""
    if not path.is_file():
        write_atomically(path, text)
