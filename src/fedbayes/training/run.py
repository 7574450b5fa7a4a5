"""A trained federation: its posterior, its journal, its predictions and scores, and what its clients keep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor, nn

from fedbayes.clients.client import Own
from fedbayes.data.fields import Fields, has_fields
from fedbayes.data.given import native
from fedbayes.data.lists import is_frame
from fedbayes.data.site_tables import coded
from fedbayes.engine.choice import tensor_cores
from fedbayes.errors import InputError, unknown
from fedbayes.federation.kept import apart
from fedbayes.federation.ledger import Ledger, Release
from fedbayes.federation.program import BY_MEMBERS, FederationState
from fedbayes.federation.round import predicting
from fedbayes.model.predictive import Predictive
from fedbayes.posterior.values import Parts, Posterior
from fedbayes.scores import SUMS
from fedbayes.scores.additive import Sums
from fedbayes.scores.by_site import SiteScores
from fedbayes.training import hub
from fedbayes.training.frames import columns_of, frame_of
from fedbayes.training.influence import table_of
from fedbayes.training.modules import module_of
from fedbayes.training.observation import with_noise as estimated
from fedbayes.training.personal import personal_models, personal_scores, refined_task, sums_of
from fedbayes.training.private import check_public
from fedbayes.training.task import Federation, Progress, Task
from fedbayes.training.tested import by_site, check_whole, predict_with


class OwnStore(Protocol):
    """Where the own state of clients lives between rounds."""

    def get(self, client: int) -> Own | None: ...
    def put(self, number: int, rows: Mapping[int, Own]) -> None: ...
    def expect(self, clients: Iterable[int]) -> None: ...


class Memory:
    """Own state in a dict: O(clients that took part)."""

    def __init__(self) -> None:
        self.rows: dict[int, Own] = {}

    def get(self, client: int) -> Own | None:
        return self.rows.get(client)

    def put(self, number: int, rows: Mapping[int, Own]) -> None:
        self.rows.update({k: own for k, own in rows.items() if own})

    def expect(self, clients: Iterable[int]) -> None:
        """Nothing to load: all is in memory."""


SHOWN = ("accuracy", "concordance", "rmse", "nll", "ece")  # scores of a run's short summary


@dataclass(frozen=True, repr=False)
class Run:
    """A trained federation: its posterior, its journal, and predictions."""

    task: Task
    progress: Progress
    journal: list[dict[str, Any]]
    own: OwnStore = field(default_factory=Memory, repr=False)
    ledger: Ledger = field(default_factory=Ledger, repr=False)  # what was released of rows beside the rounds

    @property
    def parts(self) -> Parts:
        """All parts that predict: the best validated ones where there was a validation split."""
        return predicting(self.task.program, self._final)

    @cached_property
    def _final(self) -> FederationState:
        best = self.progress.best
        return observed(self.task, self.progress.state if best is None else best.state)

    @property
    def posterior(self) -> Posterior:
        """The posterior over the network's weights; under FedAG the normal, also where the uploads predict."""
        return self._final.broadcast[self.task.program.prediction.part]

    def predict(self, x: Any, *, draws: int | None = None) -> Predictive:
        """Predictions with their uncertainty parts for inputs [N, ...], stored as the training inputs were.

        Where the run was trained on tables (`fb.data.from_tables`), also for a table: a file, a data frame, or a
        mapping from columns to values.
        """
        check_whole(self, "run.personal(client).predict(x)")
        with tensor_cores("float32"):
            return predict_with(self.task, self.parts, self.stored(x), draws=draws)

    def stored(self, x: Any, site: str | None = None) -> Tensor:
        """Inputs in the dtype of the training inputs, checked; tables are coded as the training rows were, of `site`
        where they do not say whose rows they are."""
        data = self.task.clients.data
        if data.coding is not None and (is_frame(x) or isinstance(x, str | Path | Mapping)):
            x = coded(x, data.coding, site)
        if isinstance(data.prepare, Fields) and has_fields(x):
            x = data.prepare.pack(x)
        x = torch.as_tensor(native(x) if isinstance(x, np.ndarray) else x)
        shape = data.shape
        if tuple(x.shape[1:]) != shape:
            raise InputError(
                f"x has shape {list(x.shape)}; the network was trained on inputs [N, {', '.join(map(str, shape))}]"
            )
        if data.unusable(x):
            raise InputError("x holds values that are not finite; drop or fill them")
        stored = x.to(data.x.dtype)
        if data.unusable(stored):
            kind = str(stored.dtype).removeprefix("torch.")
            raise InputError(
                f"x holds values too large for {kind}, as the training inputs are stored; drop or fill them"
            )
        if not stored.is_floating_point() and not torch.equal(stored.to(x.dtype), x):
            kind = str(stored.dtype).removeprefix("torch.")
            raise InputError(f"x holds values that {kind} can't; give inputs as the training inputs were stored")
        return stored

    @overload
    def scores(self, *, draws: int | None = None, by: None = None) -> dict[str, float]: ...
    @overload
    def scores(self, *, draws: int | None = None, by: str) -> SiteScores: ...

    def scores(self, *, draws: int | None = None, by: str | None = None) -> dict[str, float] | SiteScores:
        """Scores on the whole test set; of the personal models where there is no global one.

        With `by="site"`: of each client's own test rows, with their errors, the worst site and the spread.
        """
        check_public(self.task.privacy, "scores", mend="")
        if by is not None:
            if by != "site":
                raise unknown("way to score by", by, ["site"])
            return by_site(self, draws)
        if not self.task.program.prediction.whole:
            return self.personal_scores()
        scores = evaluate(self.task, self._final, draws=draws)
        return scores or self._no_test_rows()

    def personal(self, client: int | str) -> Personal:
        """The model that a client, by number or by name, makes its own by training on its rows once more."""
        if isinstance(client, str):
            if not self.task.clients.names:
                raise InputError(
                    f"client {client!r}: clients have no names, but numbers below {len(self.task.clients)}"
                )
            if client not in self.task.clients.names:
                raise unknown("client", client, self.task.clients.names)
            client = self.task.clients.names.index(client)
        if not 0 <= client < len(self.task.clients):
            raise InputError(f"client {client}: there are {len(self.task.clients)}, numbered from 0")
        for cohort in personal_models([self.home], [[client]]):
            for _, parts in cohort[0]:
                return Personal(self, parts)
        raise InputError(f"client {client}: its personal model is not finite (did it diverge? try a smaller lr)")

    def personal_scores(self) -> dict[str, float]:
        """Scores of all clients' personal models on their own test rows."""
        check_public(self.task.privacy, "scores", mend="")
        return personal_scores([self.home])[0] or self._no_test_rows()

    def _no_test_rows(self) -> dict[str, float]:
        if self._loaded_alone:
            raise InputError("this model was loaded without its data: score its predictions of rows that you have")
        name = self.task.clients.data.name
        raise InputError(
            f"{name} has no test rows to score: give some with the data, as test= of from_clients and from_tables, or "
            "as test_x and test_y of from_arrays"
        )

    @property
    def _loaded_alone(self) -> bool:
        """Whether it is a model of the Hub, which comes without rows and journal."""
        return bool(self.progress.state.round) and not self.journal

    def __repr__(self) -> str:
        task, clients = self.task, self.task.clients
        weights = task.program.initial[task.program.prediction.part].mean.shape[-1]
        if self._loaded_alone:
            parts = [f"{task.method}: {clients.data.name}, {weights:,} weights", f"{self.progress.state.round} rounds"]
            return f"Run({'; '.join(parts)}; loaded without its data)"
        parts = [f"{task.method}: {len(clients)} clients of {clients.data.name}, {weights:,} weights"]
        parts.append(f"{len(self.journal)} of {task.rounds} rounds")
        tested = [record for record in self.journal if record.get("test")]
        if tested:
            shown = [f"{name} {tested[-1]['test'][name]:.4f}" for name in SHOWN if name in tested[-1]["test"]]
            parts.append(f"{', '.join(shown)} in round {tested[-1]['round']}")
        left_out = sum(len(record["left_out"]) for record in self.journal)
        if left_out:
            parts.append(f"{left_out} uploads left out, see run.journal")
        if self.journal and "stopped" in self.journal[-1]:
            parts.append(f"stopped: {self.journal[-1]['stopped'][:100]}")
        return f"Run({'; '.join(parts)})"

    @property
    def epsilon(self) -> float | None:
        """What a private run has spent, at its delta, calibrations under noise among it; None: it is not private."""
        privacy = self.task.privacy
        return None if privacy is None else privacy.epsilon(self.progress.accounts) + self.ledger.epsilon

    def spend(self, what: str, epsilon: float) -> None:
        """Put a release of rows into the account before it is made; refused where it would pass the run's budget."""
        privacy, accounts = self.task.privacy, self.progress.accounts
        self.ledger.add(
            Release(what, epsilon, self.progress.state.round),
            lambda before: None if privacy is None else privacy.check_room(accounts, before, what, epsilon),
        )

    @property
    def broadcast(self) -> Parts:
        """All parts that the server would send next, or the best validated ones: what another run can begin with."""
        return self._final.broadcast

    def module(self, draw: int | None = None) -> nn.Module:
        """The network as a plain module in evaluation mode, at the posterior's mean, or at one draw by its number.

        It takes what the network sees, `run.task.clients.data.prepare(x)` of stored rows.
        """
        return module_of(self.task, self.parts, draw)

    def state_dict(self, draw: int | None = None) -> dict[str, Tensor]:
        """The network's state dict, at the posterior's mean, or at one draw by its number."""
        return self.module(draw).state_dict()

    def push(self, place: str, *, network: str | None = None, private: bool = True, message: str | None = None) -> str:
        """Upload the model and a card to the Hugging Face Hub, as `owner/name`; `fb.load("hf://owner/name")` reads it.

        `network` names one of the library's own networks, so that who loads it need not give it. The repository is
        made where there is none, private by default.
        """
        return hub.push(self, place, network=network, private=private, message=message)

    def to_columns(self, what: str = "journal") -> dict[str, list[Any]]:
        """A table as columns: `journal` (a row per round), `scores` (per site and score) or `predictions` (per row)."""
        if what != "journal":
            check_public(self.task.privacy, what, mend="")
        return columns_of(self, self.journal, what)

    def to_frame(self, what: str = "journal") -> Any:
        """The same as a data frame of pandas, or of polars where that alone is installed."""
        return frame_of(self.to_columns(what))

    def influence(self) -> list[dict[str, Any]]:
        """Who moved the model: one row per client and round, as the journal has them.

        `change` is the rms of a client's change in units of the broadcast, before any bound; `share` its share of the
        pooled precision (of the weight, under rules that do not weigh by precision), after it; `capped` the share of
        its weights that claimed too much; `clipped` whether its change was shortened; `twins` with how many others it
        counted as one; `refused` why it was left out.
        """
        return table_of(self.journal)

    def refined(self, refine: str = "flow", **options: Any) -> Run:
        """The same run with personal models that are refined in another way; options as in `methods.refined`."""
        return replace(self, task=refined_task(self.task, refine=refine, **options))

    @property
    def home(self) -> Federation:
        """The federation as its personal models see it."""
        final = self._final
        state = self.progress.state._replace(broadcast=final.broadcast, kept=final.kept)
        return Federation(self.task, state, self.own.get)


@dataclass(frozen=True)
class Personal:
    """A client's personal model: its parts, and predictions by them."""

    run: Run
    parts: Parts = field(repr=False)

    def predict(self, x: Any, *, draws: int | None = None) -> Predictive:
        """Predictions with their uncertainty parts, as `Run.predict`."""
        with tensor_cores("float32"):
            return predict_with(self.run.task, self.parts, self.run.stored(x), draws=draws)

    def module(self, draw: int | None = None) -> nn.Module:
        """The client's network as a plain module, as `Run.module`."""
        return module_of(self.run.task, self.parts, draw)

    @property
    def as_run(self) -> Run:
        """A run that predicts by this model, for all that takes runs: OOD scores, calibration."""
        task = self.run.task
        prediction = task.program.prediction._replace(whole=True, parts=lambda parts: parts, members=False)
        program = task.program._replace(prediction=prediction)
        broadcast, beside = apart(self.parts)
        state = self.run.progress.state._replace(broadcast=broadcast, kept=beside)
        progress = self.run.progress._replace(state=state, best=None)
        return Run(replace(task, program=program), progress, [], ledger=self.run.ledger)


def observed(task: Task, state: FederationState) -> FederationState:
    """The state with the observation noise that its members have, where it is needed and not yet known."""
    beside = state.kept
    if task.program.prediction.noise not in BY_MEMBERS or beside.noise is not None:
        return state
    if not beside.members:  # no client has answered yet
        return state
    if not beside.who:
        raise InputError("noise: these networks don't say which clients trained them; train the run again")
    return with_noise(task, state, beside.who)


def with_noise(task: Task, state: FederationState, members: Sequence[int] | None = None) -> FederationState:
    """The state with the observation noise on the rows of the clients who trained it, all or `members`."""
    data = task.clients.data
    rows = [task.clients.train_rows(k) for k in (range(len(task.clients)) if members is None else members)]
    return estimated(task.program, state, [(data.x[r].to(task.device), data.y[r].to(task.device)) for r in rows])


def evaluate(task: Task, state: FederationState, *, draws: int | None = None) -> dict[str, float]:
    """Scores of a posterior on the whole test set; empty where there is none."""
    data = task.clients.data
    return scores_on(task, state, data.test_x, data.test_y, "test", draws) if len(data.test_x) else {}


def scores_on(
    task: Task, state: FederationState, x: Tensor, y: Tensor, which: str, draws: int | None = None
) -> dict[str, float]:
    """Scores of a posterior on rows."""
    return SUMS[task.program.model.likelihood.kind][1](score_sums(task, state, x, y, which, draws))


def score_sums(task: Task, state: FederationState, x: Tensor, y: Tensor, which: str, draws: int | None = None) -> Sums:
    """The sums behind a posterior's scores on rows; those of several clients add up to the federation's."""
    return sums_of(task, predict_with(task, predicting(task.program, state), x, draws=draws, which=which), y)
