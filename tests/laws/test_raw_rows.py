"""Every way to predict takes rows in their own units, whichever way the data came and were standardised.

The reference knows nothing of standardisation: the same network trained on arrays that were standardised by hand.
"""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.experiments.sites import alone, everybody
from fedbayes.export.predictions import predict_file
from fedbayes.export.program import predictor_of
from fedbayes.runs.folder import run as train

ROWS, TEST = 120, 40
NAMES = ("year", "income", "share")
SIDES = slice(ROWS), slice(ROWS, None)


def table(seed=0):
    """Columns with offsets and scales of their own, and three classes."""
    random = np.random.default_rng(seed)
    x = np.array([2000.0, 5e4, 0.3]) + random.normal(size=(ROWS + TEST, 3)) * np.array([8.0, 2e4, 0.1])
    z = (x - x.mean(0)) / x.std(0)
    y = np.digitize(z[:, 0] + z[:, 1] - z[:, 2], [-0.7, 0.7])
    return x, y


def by_hand(x):
    """Float32 arrays standardised by the training rows, as numpy does it."""
    return ((x - x[:ROWS].mean(0)) / x[:ROWS].std(0)).astype(np.float32)


def from_arrays(x, y, folder):
    return fb.data.from_arrays(x[:ROWS], y[:ROWS], x[ROWS:], y[ROWS:], standardise=True)


def from_clients(x, y, folder):
    sites = [(x[k:ROWS:4], y[k:ROWS:4]) for k in range(4)]
    return fb.data.from_clients(sites, (x[ROWS:], y[ROWS:]), standardise=True).data


def from_csv(x, y, folder):
    for name, rows in (("train", slice(ROWS)), ("test", slice(ROWS, None))):
        lines = [",".join([*(repr(float(v)) for v in row), str(c)]) for row, c in zip(x[rows], y[rows])]
        (folder / f"{name}.csv").write_text("\n".join([",".join([*NAMES, "sort"]), *lines]))
    return fb.data.from_csv(folder / "train.csv", "sort", kind="classes", test=folder / "test.csv")


def from_tables(x, y, folder):
    train, test = ({**{n: x[rows, j] for j, n in enumerate(NAMES)}, "sort": y[rows]} for rows in SIDES)
    return fb.data.from_tables({"all": train}, "sort", labels=[0, 1, 2], test={"all": test}).data


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 3))


def fit(data, method=None):
    clients = data.split(fb.partition.iid(), clients=3, seed=0)
    method = method or fb.methods.feduab(epochs=5, lr=0.4, test_draws=4)
    return fb.fit(network(), clients, method=method, rounds=2)


@pytest.fixture(scope="module", params=[from_arrays, from_clients, from_csv, from_tables], ids=lambda way: way.__name__)
def pair(request, tmp_path_factory):
    """A run on rows in their own units, and one on rows that were standardised by hand; the new rows for each."""
    folder = tmp_path_factory.mktemp("table")
    x, y = table()
    data = request.param(x, y, folder)
    z = by_hand(x)
    if request.param is from_clients:  # its rows lie client after client
        order = np.concatenate([np.arange(k, ROWS, 4) for k in range(4)])
    else:
        order = np.arange(ROWS)
    plain = fb.data.from_arrays(z[:ROWS][order], y[:ROWS][order], z[ROWS:], y[ROWS:])
    return SimpleNamespace(
        ours=fit(data), hand=fit(plain), raw=x[ROWS:], seen=torch.from_numpy(z[ROWS:]), folder=folder
    )


def exported(run, x):
    with torch.no_grad():
        return predictor_of(run, "ensemble")(torch.from_numpy(x))["probs"]


# Each way as (run on raw rows, run on rows standardised by hand).
WAYS = {
    "predict": lambda p: (p.ours.predict(p.raw).probs, p.hand.predict(p.seen).probs),
    "predict of the stored test rows": lambda p: (
        p.ours.predict(p.ours.task.clients.data.test_x).probs,
        p.hand.predict(p.seen).probs,
    ),
    "personal": lambda p: (p.ours.personal(1).predict(p.raw).probs, p.hand.personal(1).predict(p.seen).probs),
    "ensemble": lambda p: (exported(p.ours, p.raw), p.hand.predict(p.seen).probs),
    "ood": lambda p: tuple(
        torch.stack(list(fb.ood.scores(run, x).values()))
        for run, x in ((p.ours, torch.from_numpy(p.raw)), (p.hand, p.seen))
    ),
    "ood of float32": lambda p: tuple(
        fb.ood.scores(run, x, only=["energy"])["energy"]
        for run, x in ((p.ours, torch.from_numpy(p.raw).float()), (p.hand, p.seen))
    ),
    "conformal": lambda p: (
        fb.calibrate.conformal(p.ours, 0.9).sets(p.ours.predict(p.raw)),
        fb.calibrate.conformal(p.hand, 0.9).sets(p.hand.predict(p.seen)),
    ),
    "scores": lambda p: tuple(torch.tensor(list(run.scores().values())) for run in (p.ours, p.hand)),
    "personal scores": lambda p: tuple(torch.tensor(list(run.personal_scores().values())) for run in (p.ours, p.hand)),
}


@pytest.mark.parametrize("way", WAYS)
def test_every_way_to_predict_takes_raw_rows(pair, way):
    ours, hand = WAYS[way](pair)
    torch.testing.assert_close(ours.double(), hand.double(), rtol=1e-3, atol=1e-4)


def test_the_score_of_a_run_is_that_of_its_predictions(pair):
    """The fault as users met it: a run of high accuracy that guesses when asked for the same rows."""
    y = pair.ours.task.clients.data.test_y
    accuracy = float((pair.ours.predict(pair.raw).probs.argmax(-1) == y).double().mean())
    assert accuracy == pytest.approx(pair.ours.scores()["accuracy"], abs=1e-6)
    assert accuracy > 0.6


def raw_table():
    """As a user's own code names it in an experiment."""
    x, y = table()
    return from_arrays(x, y, None)


def test_a_run_folder_predicts_raw_rows_from_files(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    experiment = Experiment(
        data="test_raw_rows:raw_table", network="linear", clients=3, partition="iid", rounds=1, options={"epochs": 2}
    )
    train(experiment, tmp_path / "run")
    x, _ = table()
    np.save(tmp_path / "x.npy", x[ROWS:])
    np.savetxt(tmp_path / "x.csv", x[ROWS:], delimiter=",", fmt="%.17g")
    run = fb.load(tmp_path / "run")
    expected = run.predict(run.task.clients.data.test_x).probs
    for source in ("x.npy", "x.csv"):
        arrays, _ = predict_file(tmp_path / "run", tmp_path / source)
        np.testing.assert_allclose(arrays["probs"], expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("method", ["fedavg", "fedag"])
@pytest.mark.parametrize("given", [torch.float32, torch.float64])
def test_columns_far_from_zero_keep_their_digits(method, given):
    """Seconds since 1970 that differ by hours: in float32 they are worth 128 seconds each."""
    random = np.random.default_rng(0)
    hours = random.normal(size=(60, 1))
    x = torch.tensor(1.6e9 + 100 * hours, dtype=torch.float64)
    y = torch.tensor(3 * hours, dtype=torch.float32)
    data = fb.data.from_arrays(x[:40], y[:40], x[40:], y[40:], kind="real", standardise=True)
    options = {"epochs": 20, "lr": 0.1}
    run = fb.fit(
        nn.Linear(1, 1),
        data.split(fb.partition.iid(), clients=2),
        method=fb.methods.method_named(method, options),
        rounds=10,
    )
    assert run.scores()["rmse"] < 0.05
    mean = run.predict(x[40:]).mean
    assert float((mean - y[40:]).abs().max()) < 0.1
    if given == torch.float32:  # rows that came rounded stay rounded, but nothing is lost on top
        rounded = run.predict(x[40:].float()).mean
        slope = float(run.predict(x[:1] + 100.0).mean - run.predict(x[:1]).mean) / 100
        torch.testing.assert_close(
            rounded - mean, slope * (x[40:].float().double() - x[40:]).float(), atol=1e-3, rtol=0
        )


def test_the_adversary_moves_what_the_network_sees():
    """A step of .1 is a tenth of a standard deviation, not a tenth of a year."""
    x, y = table()
    method = fb.methods.fedavg(epochs=2, lr=0.1, adversarial=0.1)
    z = by_hand(x)
    ours, hand = fit(from_arrays(x, y, None), method), fit(fb.data.from_arrays(z[:ROWS], y[:ROWS]), method)
    torch.testing.assert_close(ours.posterior.mean, hand.posterior.mean, rtol=1e-4, atol=1e-5)


def at_site(client, shared=False):
    x, y = table()
    rows = slice(0, 1) if client is None else slice(client, ROWS, 2)
    if shared:
        prepare = fb.data.Standardise(x[:ROWS].mean(0), x[:ROWS].std(0))
        return fb.data.from_arrays(x[rows], y[rows], classes=3, prepare=prepare)
    return fb.data.from_arrays(x[rows], y[rows], classes=3, standardise=True)


def test_sites_that_standardise_by_their_own_rows_are_refused():
    """Each machine would see the same patient in units of its own."""
    with pytest.raises(InputError, match="client 0 is standardised by its own rows; give all sites the same numbers"):
        everybody(at_site, {}, 2)
    clients = everybody(at_site, {"shared": True}, 2)
    assert clients.data.prepare == alone(at_site, {"shared": True}, 2, 1).data.prepare


@pytest.mark.parametrize(
    ("mean", "std", "says"),
    [([0.0], [1.0, 1.0], "one number for each column"), ([0.0], [0.0], "positive"), ([np.nan], [1.0], "finite")],
)
def test_numbers_that_can_not_standardise(mean, std, says):
    with pytest.raises(ValueError, match=says):
        fb.data.Standardise(mean, std)


def test_two_preparations_are_refused():
    x, y = table()
    with pytest.raises(ValueError, match="don't standardise them too"):
        fb.data.from_arrays(x, y, standardise=True, prepare=fb.data.Prepare((0.5,), (2.0,)))
