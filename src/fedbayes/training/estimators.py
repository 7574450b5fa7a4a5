"""Federated training as scikit-learn estimators: for pipelines, grid searches and cross-validation, sites as groups."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import (
    _check_feature_names,
    _check_n_features,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)

from fedbayes.data.coding import coding_of
from fedbayes.data.frames import SiteTable, table_of
from fedbayes.data.lists import is_frame
from fedbayes.data.site_tables import coded, from_tables, without_rows
from fedbayes.data.values import Values, canonical
from fedbayes.errors import InputError, shown
from fedbayes.model.predictive import Predictive
from fedbayes.training.defaults import default_likelihood, network_for
from fedbayes.training.fit import train
from fedbayes.training.prepare import prepare
from fedbayes.training.run import Run
from fedbayes.training.task import Task

TARGET = "(target)"
NUMBERS: dict[str, Any] = {"dtype": np.float64, "ensure_all_finite": "allow-nan"}
ONE = "all"  # the site of rows that come without one


class _Federated(BaseEstimator):
    """What both estimators share: tables of sites from X, y and sites, training, and a state that can be pickled."""

    def __init__(
        self,
        network: Any = "linear",
        *,
        method: Any = None,
        rounds: int | None = None,
        missing: str = "median",
        scale: str = "federation",
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        self.network = network
        self.method = method
        self.rounds = rounds
        self.missing = missing
        self.scale = scale
        self.device = device
        self.random_state = random_state

    def _fitted(self, X: Any, y: np.ndarray, sites: Any, **options: Any) -> _Federated:
        """Train on rows whose targets are texts of class numbers, or numbers."""
        table = self._table(X, reset=True)
        owners = np.full(len(y), ONE, object) if sites is None else canonical(np.asarray(sites))
        check_consistent_length(y, owners, np.zeros(table.rows))
        if any(owner is None for owner in owners):
            raise InputError("sites: some rows have none; name one for each row")
        whole = SiteTable(ONE, {**table.columns, TARGET: Values(y, "" if y.dtype == object else "number")})
        tables = {site: whole.pick(owners == site)._replace(site=site) for site in sorted(set(owners.tolist()))}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="site ")  # that sites differ is what they are there for
            clients = from_tables(
                tables, TARGET, missing=self.missing, scale=self.scale, test=0.0, thin="keep", name="X", **options
            )
        self.coding_ = clients.data.coding.as_table()  # type: ignore[union-attr]
        self.sites_ = np.array(clients.names)
        self.run_ = train(self._task(clients))
        return self

    def _task(self, clients: Any) -> Task:
        likelihood = default_likelihood(clients.data)
        # In float64: rows predicted alone and together then agree to all digits that anybody looks at.
        # A copy, as the user's own module stays as it is.
        network = copy.deepcopy(network_for(self.network, clients.data, likelihood, self._seed)).double()
        weights = self._weights()
        return prepare(
            network,
            clients,
            method=self.method,
            rounds=self.rounds,
            seed=self._seed,
            device=self.device,
            likelihood=likelihood,
            class_weights=weights,
        )

    @property
    def _seed(self) -> int:
        given = self.random_state
        if isinstance(given, np.random.RandomState):
            return int(given.get_state()[1][0])  # type: ignore[index]
        return 0 if given is None else int(given)

    def _weights(self) -> Any:
        return None

    def _table(self, X: Any, *, reset: bool) -> SiteTable:
        """X as a table: a data frame as it is, anything else as columns of numbers."""
        if is_frame(X):
            _check_feature_names(self, X, reset=reset)
            _check_n_features(self, X, reset=reset)
            return table_of(X, name="X")
        x = validate_data(self, X, reset=reset, **NUMBERS, ensure_min_samples=2 if reset else 1)
        return SiteTable("X", {f"x{j}": Values(x[:, j], "number") for j in range(x.shape[1])})

    def _predicted(self, X: Any, sites: Any = None) -> Predictive:
        check_is_fitted(self, "run_")
        table = self._table(X, reset=False)
        if sites is not None:
            table = table._replace(columns={**table.columns, "site": Values(canonical(np.asarray(sites)))})
        with warnings.catch_warnings():
            if not is_frame(X):
                warnings.filterwarnings("ignore", message="site X")
            return self.run_.predict(coded(table, coding_of(self.coding_))).cpu()

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.missing != "drop"
        tags.non_deterministic = False
        return tags

    def __getstate__(self) -> dict[str, Any]:
        """The state without the run's program, which is made anew from the rest."""
        state = dict(super().__getstate__())
        run = state.pop("run_", None)
        return state if run is None else {**state, "_learned": (run.progress, run.journal)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        learned = state.pop("_learned", None)
        super().__setstate__(state)
        if learned is not None:
            self.run_ = Run(self._task(without_rows(coding_of(self.coding_))), *learned)


class FederatedClassifier(ClassifierMixin, _Federated):
    """A classifier trained across sites: `fit(X, y, sites=...)`, each site's rows being one client's.

    `network` is a module or a name ("linear", "mlp"), `method` and `rounds` are those of `fb.fit`, by default what
    suits tables. X is an array or a data frame; missing values are filled (`missing`), columns standardised by sums
    over sites (`scale`). `class_weight` is None, "balanced" or a mapping from classes to weights. Without sites all
    rows are one site's. The run is in `run_`.
    """

    def __init__(
        self,
        network: Any = "linear",
        *,
        method: Any = None,
        rounds: int | None = None,
        missing: str = "median",
        scale: str = "federation",
        class_weight: Any = None,
        device: str = "cpu",
        random_state: int = 0,
    ) -> None:
        super().__init__(
            network,
            method=method,
            rounds=rounds,
            missing=missing,
            scale=scale,
            device=device,
            random_state=random_state,
        )
        self.class_weight = class_weight

    def fit(self, X: Any, y: Any, sites: Any = None) -> FederatedClassifier:
        """Train on rows X [n, F] with classes y [n] of sites [n]."""
        if not is_frame(X):
            X, y = validate_data(self, X, y, **NUMBERS, ensure_min_samples=2)
        y = column_or_1d(y, warn=True)
        check_classification_targets(y)
        self.classes_, codes = np.unique(y, return_inverse=True)
        if len(self.classes_) < 2:
            raise InputError(f"y has one class, {self.classes_[0]!r}; a classifier needs at least two")
        numbers = [str(c) for c in range(len(self.classes_))]
        words = np.array(numbers, object)[codes]
        self._fitted(X, words, sites, labels=numbers, kind="classes")
        return self

    def predict_proba(self, X: Any, sites: Any = None) -> np.ndarray:
        """Probabilities [n, classes], in the order of `classes_`, averaged over the posterior."""
        probs: np.ndarray = self._predicted(X, sites).probs.double().numpy()
        return probs / probs.sum(1, keepdims=True)

    def predict(self, X: Any, sites: Any = None) -> np.ndarray:
        """The likeliest class of each row."""
        probs = self.predict_proba(X, sites)
        classes: np.ndarray = self.classes_[probs.argmax(1)]
        return classes

    def _weights(self) -> Any:
        given = self.class_weight
        if given is None or isinstance(given, str):
            return given
        classes = self.classes_.tolist()
        if not isinstance(given, Mapping):
            raise InputError(f"class_weight must be balanced, or a mapping from classes to weights, not {shown(given)}")
        strange = [c for c in given if c not in classes]
        if strange and any(c not in given for c in classes):
            names = ", ".join(map(repr, classes[:5]))
            raise InputError(f"class_weight: y has no class {strange[0]!r}; its classes are {names}")
        return [float(given.get(c, 1.0)) for c in classes]


class FederatedRegressor(RegressorMixin, _Federated):
    """A regression trained across sites: `fit(X, y, sites=...)`; `predict(X, return_std=True)` says how sure it is.

    Parameters as in `FederatedClassifier`. The observation noise is learned beside the network.
    """

    def fit(self, X: Any, y: Any, sites: Any = None) -> FederatedRegressor:
        """Train on rows X [n, F] with targets y [n] of sites [n]."""
        if not is_frame(X):
            X, y = validate_data(self, X, y, y_numeric=True, **NUMBERS, ensure_min_samples=2)
        y = column_or_1d(y, warn=True).astype(np.float64)
        self._fitted(X, y, sites, kind="real")
        return self

    def predict(self, X: Any, sites: Any = None, return_std: bool = False) -> Any:
        """Means [n]; with `return_std` also standard deviations [n] of new targets, noise and ignorance together."""
        p = self._predicted(X, sites)
        mean = p.mean[:, 0].double().numpy()
        return (mean, p.total[:, 0].double().sqrt().numpy()) if return_std else mean
