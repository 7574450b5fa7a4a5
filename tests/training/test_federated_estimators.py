"""scikit-learn's estimators: its own checks, pipelines, grid search, sites as groups, and what pickles keep."""

import pickle

import numpy as np
import pytest
import torch
from sklearn.base import clone
from sklearn.feature_selection import SelectKBest
from sklearn.linear_model import BayesianRidge, LogisticRegression
from sklearn.model_selection import GridSearchCV, LeaveOneGroupOut, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.utils.estimator_checks import estimator_checks_generator, parametrize_with_checks
from torch import nn

import fedbayes as fb
from fedbayes.data.values import Values
from fedbayes.errors import InputError

QUICK = fb.methods.fedavg(epochs=40, batch=512, optimiser="adam", lr=0.1)


@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([cls(method=QUICK, rounds=1) for cls in (fb.FederatedClassifier, fb.FederatedRegressor)])
def test_scikit_learns_own_checks(estimator, check):
    check(estimator)


DEFAULTS = [fb.FederatedClassifier(), fb.FederatedRegressor()]
# Of the checks on the defaults, those that look at what a fit came to: seconds, where all of them take minutes.
SHORT = ("check_fit_idempotent", "check_methods_subset_invariance", "check_dict_unchanged", "check_n_features_in")


def name_of(check):
    return getattr(check, "func", check).__name__


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", SHORT)
@pytest.mark.parametrize("estimator", DEFAULTS, ids=lambda e: type(e).__name__)
def test_the_defaults_pass_some_of_scikit_learns_checks(estimator, name):
    checks = [(e, check) for e, check in estimator_checks_generator(clone(estimator)) if name_of(check) == name]
    assert checks
    for e, check in checks:
        check(e)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@parametrize_with_checks([clone(estimator) for estimator in DEFAULTS])
def test_the_defaults_pass_all_of_scikit_learns_checks(estimator, check):
    check(estimator)


def patients(n=240, seed=0):
    """Three sites with shifts of their own; the second column is noise."""
    random = np.random.default_rng(seed)
    sites = np.array(["aachen", "basel", "cadiz"])[np.arange(n) % 3]
    X = random.normal(size=(n, 3)) + (np.arange(n) % 3)[:, None] * np.array([0.5, 0, 0])
    margin = 2 * X[:, 0] - X[:, 2] + random.normal(0, 1, n) - 0.5
    return X, np.where(margin > 0, "ill", "well"), margin, sites


def test_the_defaults_are_as_good_as_logistic_regression():
    X, y, _, sites = patients(360)
    model = fb.FederatedClassifier().fit(X[:240], y[:240], sites=sites[:240])
    ours = -np.log(model.predict_proba(X[240:])[np.arange(120), (y[240:] == "well").astype(int)]).mean()
    plain = LogisticRegression().fit(X[:240], y[:240]).predict_proba(X[240:])
    assert ours < -np.log(plain[np.arange(120), (y[240:] == "well").astype(int)]).mean() + 0.02
    assert model.score(X[240:], y[240:]) > 0.8
    assert model.classes_.tolist() == ["ill", "well"]
    assert model.sites_.tolist() == ["aachen", "basel", "cadiz"]
    again = pickle.loads(pickle.dumps(model))
    np.testing.assert_array_equal(again.predict_proba(X), model.predict_proba(X))
    assert len(again.run_.journal) == len(model.run_.journal)


def test_a_regression_says_how_sure_it_is():
    X, _, y, sites = patients(240)
    model = fb.FederatedRegressor(rounds=15).fit(X[:180], y[:180], sites=sites[:180])
    mean, std = model.predict(X[180:], return_std=True)
    reference, width = BayesianRidge().fit(X[:180], y[:180]).predict(X[180:], return_std=True)
    assert np.abs(mean - reference).max() < 0.3
    np.testing.assert_allclose(std, width, rtol=0.2)
    far = model.predict(X[180:] + 30, return_std=True)[1]
    assert (far > std).all()


def test_pipelines_searches_and_sites_as_groups():
    X, y, _, sites = patients(120)
    pipeline = make_pipeline(SelectKBest(k=2), fb.FederatedClassifier(method=QUICK, rounds=1))
    pipeline.fit(X, y, federatedclassifier__sites=sites)
    assert pipeline.score(X, y) > 0.75
    scores = cross_val_score(
        fb.FederatedClassifier(method=QUICK, rounds=1),
        X,
        y,
        groups=sites,
        cv=LeaveOneGroupOut(),
        params={"sites": sites},
    )
    assert scores.shape == (3,)
    assert scores.mean() > 0.7
    search = GridSearchCV(
        fb.FederatedClassifier(method=QUICK, rounds=1), {"scale": ["federation", "site"]}, cv=LeaveOneGroupOut()
    )
    search.fit(X, y, groups=sites, sites=sites)
    assert search.n_splits_ == 3
    assert search.best_params_["scale"] in ("federation", "site")
    assert set(search.best_estimator_.sites_) == set(sites)
    assert clone(search.best_estimator_).get_params()["method"].options == QUICK.options


def test_a_network_of_the_users_own_stays_as_it_is():
    X, y, _, sites = patients(60)
    network = nn.Linear(X.shape[1], 2)
    before = network.weight.clone()
    fb.FederatedClassifier(network, method=QUICK, rounds=1).fit(X, y, sites=sites)
    assert network.weight.dtype == torch.float32
    assert torch.equal(network.weight, before)


def test_missing_values_and_weights_of_classes():
    X, y, _, sites = patients(120)
    X[::7, 0] = np.nan
    plain = fb.FederatedClassifier(method=QUICK, rounds=1).fit(X, y, sites=sites)
    assert plain.score(X, y) > 0.7
    heavy = fb.FederatedClassifier(method=QUICK, rounds=1, class_weight={"ill": 20.0}).fit(X, y, sites=sites)
    assert (heavy.predict(X) == "ill").sum() > (plain.predict(X) == "ill").sum()


@pytest.mark.parametrize(
    ("weights", "says"),
    [({"Ill": 20.0}, "y has no class 'Ill'; its classes are"), ([1, 20], "must be balanced, or a mapping")],
)
def test_weights_of_no_class_are_refused(weights, says):
    X, y, _, sites = patients(60)
    with pytest.raises(InputError, match=says):
        fb.FederatedClassifier(method=QUICK, rounds=1, class_weight=weights).fit(X, y, sites=sites)


class Frame:
    """A data frame by the interchange protocol: numbers with gaps, and words."""

    def __init__(self, **columns):
        self.columns = columns
        self.shape = (len(next(iter(columns.values())).data), len(columns))

    def __dataframe__(self, allow_copy=True):
        return self

    def get_chunks(self):
        return [self]

    def column_names(self):
        return list(self.columns)

    def get_column_by_name(self, name):
        return self.columns[name]


def test_data_frames_keep_their_categories(monkeypatch):
    X, y, _, sites = patients(120)
    wards = np.array(["north", "south"], object)[(X[:, 0] > 0.5).astype(int)]
    frame = Frame(dose=Values(X[:, 2], "number"), ward=Values(wards))
    monkeypatch.setattr("fedbayes.data.frames.columns_of", lambda frame, blanks: frame.columns)
    model = fb.FederatedClassifier(method=QUICK, rounds=1).fit(frame, y, sites=sites)
    assert [column["kind"] for column in model.coding_["columns"]] == ["number", "category"]
    assert model.score(frame, y) > 0.7
    with pytest.warns(UserWarning, match="column 'ward': 'east' in 120 of 120 rows is in no training row"):
        model.predict(Frame(dose=frame.columns["dose"], ward=Values(np.full(120, "east", object))))


@pytest.mark.parametrize(
    ("sites", "says"), [(["a"] * 5, "inconsistent numbers of samples"), ([None] * 120, "sites: some rows have none")]
)
def test_sites_that_do_not_fit(sites, says):
    X, y, _, _ = patients(120)
    with pytest.raises(ValueError, match=says):
        fb.FederatedClassifier().fit(X, y, sites=sites)
    with pytest.raises(InputError, match="y has one class"):
        fb.FederatedClassifier().fit(X, ["ill"] * 120)
