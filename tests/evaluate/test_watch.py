"""A watch on a site: quiet while nothing changes, an alarm that names the change, the same bits after a kill."""

import math
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.data import from_arrays
from fedbayes.errors import InputError
from fedbayes.evaluate.stream import read_stream
from fedbayes.report.watch import write_page
from fedbayes.runs import watched


@pytest.fixture(scope="module")
def blobs():
    """Four classes in the plane, 300 held-out rows at each of two sites."""
    random = torch.Generator().manual_seed(0)
    y = torch.randint(0, 4, (1600,), generator=random)
    centres = 3.0 * torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    x = centres[y] + torch.randn(1600, 2, generator=random)
    clients = from_arrays(x[:600], y[:600], x[600:], y[600:], kind="classes", classes=4).split(
        fb.partition.iid(), clients=2, seed=0, test_per_client=250
    )
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
    method = fb.methods.feduab(draws=5, lr=0.1, epochs=3, batch=30)
    return fb.fit(net, clients, method=method, rounds=6, engine="loop", evaluate_every=6)


def rows(run, count=300, seed=0):
    """New rows, as the sites' own."""
    random = torch.Generator().manual_seed(100 + seed)
    y = torch.randint(0, 4, (count,), generator=random)
    centres = 3.0 * torch.tensor([[1.0, 0], [0, 1], [-1, 0], [0, -1]])
    return centres[y] + torch.randn(count, 2, generator=random), y.double()


def bits(state):
    return [(c.name, c.fortune.logs.tobytes(), c.counts.tobytes()) for c in state.channels], state.history, state.alarms


def test_a_quiet_stream_is_quiet(blobs):
    for site in (0, "1"):
        watch = fb.watch(blobs, site)
        assert watch.scores == ("epistemic", "energy", "entropy", "mix", "label")
        assert watch.update(*rows(blobs)) is None
        assert watch.state.rows == watch.state.labelled == 300
        assert "quiet" in repr(watch)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda x, y: (3 * x + 4, y), "inputs"),
        (lambda x, y: (x[y == 2], y[y == 2]), "label mix"),
        (lambda x, y: (x, (y + (torch.arange(len(y)) % 2)) % 4), "noise"),
    ],
    ids=["inputs", "label mix", "noise"],
)
def test_a_change_is_found_and_named(blobs, change, kind):
    watch = fb.watch(blobs, 0)
    x, y = rows(blobs, 100)
    watch.update(x, y, times=[f"day {i}" for i in range(100)])
    x, y = change(*rows(blobs, 800, seed=1))
    alarm = watch.update(x[:150], y[:150], times=[f"day {100 + i}" for i in range(150)])
    assert alarm is not None
    assert 100 < alarm.row <= 250
    assert alarm.kind == kind
    assert alarm.time == f"day {alarm.row - 1}"
    assert watched.KINDS[kind] in str(alarm)


@pytest.mark.parametrize("cuts", [[1, 127, 172], [100] * 3])
def test_a_watch_that_is_killed_goes_on_with_the_same_bits(blobs, tmp_path, cuts):
    x, y = rows(blobs)
    y[::7] = math.nan
    x[200:] += 4
    whole = fb.watch(blobs, 0)
    whole.update(x, y)
    start = 0
    for size in cuts:
        watch = fb.watch(blobs, 0, folder=tmp_path)  # of the file alone
        watch.update(x[start : start + size], y[start : start + size])
        start += size
    again = watched.read(watched.path_of(tmp_path, "0"))
    assert bits(again) == bits(whole.state)
    assert again.labelled == whole.state.labelled < 300


def test_every_site_has_a_file_of_its_own(blobs, tmp_path):
    x, y = rows(blobs, 20)
    sites = ["北京", "上海", "va north", "va/north", "va-north", "va.north_2"]
    for i, site in enumerate(sites, 1):
        fb.watch(blobs, site, reference="none", folder=tmp_path).update(x[:i], y[:i])
    assert {state.site: state.rows for state in watched.states_in(tmp_path)} == {s: i for i, s in enumerate(sites, 1)}
    assert watched.path_of(tmp_path, "va.north_2").name == "va.north_2.npz"
    watched.path_of(tmp_path, "上海").rename(tmp_path / "watch" / "-.npz")  # as it was called before
    assert watched.at(tmp_path, "北京").rows == 1
    assert fb.watch(blobs, "上海", reference="none", folder=tmp_path).state.rows == 2
    assert len(watched.states_in(tmp_path)) == len(sites)


def test_what_was_not_written_is_bet_on_again(blobs, tmp_path, monkeypatch):
    x, y = rows(blobs)
    whole = fb.watch(blobs, 1)
    whole.update(x, y)
    watch = fb.watch(blobs, 1, folder=tmp_path)
    kept = watched.write
    written: list[int] = []

    def dying(path: Path, state: watched.State) -> None:
        if state.rows > 128:
            raise KeyboardInterrupt
        written.append(state.rows)
        kept(path, state)

    monkeypatch.setattr(watched, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        watch.update(x, y)
    monkeypatch.setattr(watched, "write", kept)
    again = fb.watch(blobs, 1, folder=tmp_path)
    assert again.state.rows == written[-1] == 128
    again.update(x[128:], y[128:])
    assert bits(again.state) == bits(whole.state)


def test_a_stranger_is_compared_with_the_federation_or_with_itself(blobs):
    x, y = rows(blobs)
    stranger = fb.watch(blobs, "north", reference="federation")
    assert stranger.state.reference > 250
    assert stranger.update(x + 5, y) is not None
    alone = fb.watch(blobs, "north", reference="none")
    assert alone.update(x + 5, y) is None  # strange from the beginning, but it does not change
    assert alone.update(x - 5, y) is not None


def test_regressions_are_watched_too():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(700, 3, generator=random)
    y = x.sum(1, keepdim=True) + 0.3 * torch.randn(700, 1, generator=random)
    clients = from_arrays(x[:300], y[:300], x[300:], y[300:], standardise=True).split(fb.partition.iid(), clients=2)
    net = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 1))
    run = fb.fit(net, clients, method=fb.methods.feduab(draws=5, lr=0.05), rounds=3, engine="loop", evaluate_every=3)
    watch = fb.watch(run, 0)
    assert watch.scores == ("epistemic", "mean", "label")
    new = torch.randn(300, 3, generator=random)
    truth = new.sum(1, keepdim=True) + 0.3 * torch.randn(300, 1, generator=random)
    assert watch.update(new[:150], truth[:150]) is None
    alarm = watch.update(new[150:], truth[150:] + 4 * torch.randn(150, 1, generator=random))
    assert alarm is not None
    assert alarm.kind == "noise"


def test_predictions_in_large_units_are_watched_as_those_in_small_ones():
    random = torch.Generator().manual_seed(0)
    x = torch.randn(300, 3, generator=random)
    y, fortunes = x.sum(1, keepdim=True), []
    for unit, zero in ((1.0, 0.0), (2.0**20, 2.0**22)):  # costs, say
        own = unit * y + zero
        clients = from_arrays(x[:100], own[:100], x[100:], own[100:], standardise=True).split(
            fb.partition.iid(), clients=2
        )
        watch = fb.watch(fb.fit("linear", clients, method=fb.methods.fedavg(epochs=3), rounds=1), 0, labels=False)
        watch.update(x + 1.0)
        fortunes.append(watch.state.logs["mean"])
    assert min(fortunes) > 10
    assert fortunes[1] == pytest.approx(fortunes[0], rel=0.1)


def test_labels_of_survival_are_times_and_of_several_targets_all_of_them():
    random = torch.Generator().manual_seed(0)
    x, time = torch.randn(80, 2, generator=random), torch.rand(80, generator=random) + 0.1
    seen = torch.stack([time, torch.ones(80)], 1)
    runs = {}
    for kind, y, net in (("survival", seen, nn.Linear(2, 1)), ("real", torch.stack([time, -time], 1), nn.Linear(2, 2))):
        clients = from_arrays(x[:40], y[:40], x[40:], y[40:], kind=kind).split(fb.partition.iid(), clients=2)
        runs[kind] = fb.fit(net, clients, method=fb.methods.fedavg(epochs=1), rounds=1)
    one, both = (fb.watch(runs["survival"], 0) for _ in range(2))
    one.update(x, time)  # as a column of a file
    both.update(x, seen)
    assert one.state.labelled == 80
    assert bits(one.state) == bits(both.state)
    with pytest.raises(InputError, match="one number for each row, the run predicts 2"):
        fb.watch(runs["real"], 0).update(x, time)


def test_a_stream_is_read_with_labels_and_times(blobs, tmp_path):
    path = tmp_path / "stream.csv"
    path.write_text("when,a,b,y\nmon,0.5,1,2\ntue,1,2,\n")
    stream = read_stream(path, blobs, label="y", time="when")
    assert stream.x.tolist() == [[0.5, 1], [1, 2]]
    assert stream.times == ["mon", "tue"]
    assert stream.y is not None
    assert stream.y[0] == 2
    assert math.isnan(stream.y[1])
    with pytest.raises(InputError, match="data row 1"):
        read_stream(path, blobs)
    path.write_text("a,b\n0.5,1\n1,2\n")
    assert read_stream(path, blobs).x.tolist() == [[0.5, 1], [1, 2]]
    with pytest.raises(InputError, match="no column 'y'"):
        read_stream(path, blobs, label="y")


def test_labels_that_are_numbers_are_no_places_among_the_classes(tmp_path):
    site = {"a": [float(k) for k in range(40)], "grade": [1 + k % 2 for k in range(40)]}
    clients = fb.data.from_tables({"va": site, "bn": site}, "grade", kind="classes")
    run = fb.fit("linear", clients, rounds=1)
    path = tmp_path / "stream.csv"
    path.write_text("a,grade\n1,1.0\n2,2\n , \n3,\n")
    stream = read_stream(path, run, label="grade")
    assert stream.y is not None
    assert stream.y[:2].tolist() == [0, 1]
    path.write_text("a,grade\n1,0\n")
    with pytest.raises(InputError, match="'0' is no label; there are 1, 2"):
        read_stream(path, run, label="grade")


@pytest.mark.parametrize("options", [{"site_effects": True}, {"scale": "site"}])
def test_rows_of_a_named_site_have_its_effects(tmp_path, options):
    """A stream, or a file whose promise is of a site, need not say in each row whose it is."""
    sites = {
        name: {"a": [float(k + 50 * i) for k in range(40)], "ill": [k % 2 for k in range(40)]}
        for i, name in enumerate(("va", "bn"))
    }
    clients = fb.data.from_tables(sites, "ill", kind="classes", **options)
    run = fb.fit("linear", clients, rounds=1)
    path, said = tmp_path / "new.csv", tmp_path / "said.csv"
    path.write_text("a\n60\n70\n")
    said.write_text("a,site\n60,bn\n70,bn\n")
    wanted = read_stream(said, run).x
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert read_stream(path, run, site="bn").x.tolist() == wanted.tolist()
        watch = fb.watch(run, "bn")
        watch.update({"a": [60.0, 70.0]})
    assert read_stream(said, run, site="va").x.tolist() == wanted.tolist()
    with pytest.warns(UserWarning, match="no column 'site'"):
        assert read_stream(path, run, site="nowhere").x.tolist() != wanted.tolist()


@pytest.mark.parametrize(("sign", "suffix"), [(",", "csv"), (";", "csv"), ("\t", "csv"), ("\t", "tsv")])
def test_labels_of_a_stream_are_coded_as_the_target_of_the_tables_was(tmp_path, sign, suffix):
    site = {"a": [float(k) for k in range(40)], "num": [k % 4 for k in range(40)]}
    clients = fb.data.from_tables({"va": site, "bn": site}, "num", labels={"healthy": [0], "ill": [1, 2, 3]})
    run = fb.fit(nn.Linear(*clients.data.shape, 2), clients, method=fb.methods.fedavg(epochs=1), rounds=1)
    assert fb.watch(run, 1).state.site == fb.watch(run, "1").state.site == "bn"
    path = tmp_path / f"stream.{suffix}"
    path.write_text("a, num\n1,3\n2,0.0\n3,?\n4,ill\n5,7\n".replace(",", sign))
    stream = read_stream(path, run, label="num")
    assert stream.y is not None
    assert stream.y[[0, 1, 3]].tolist() == [1, 0, 1]
    assert math.isnan(stream.y[2])
    with pytest.raises(InputError, match="classes from 0 to 1"):
        fb.watch(run, "va").update(stream.x, stream.y)


def test_the_page_has_a_line_for_each_site(blobs, tmp_path):
    with pytest.raises(InputError, match="has no watch yet"):
        write_page(tmp_path)
    x, y = rows(blobs)
    fb.watch(blobs, 0, folder=tmp_path).update(x, y)
    fb.watch(blobs, 1, folder=tmp_path).update(x + 5, y)
    text = write_page(tmp_path).read_text()
    assert "1 of 2 sites have changed" in text
    assert text.index(">1</th>") < text.index(">0</th>")  # who has changed comes first
    assert "the inputs changed" in text


def test_a_watch_goes_on_as_it_began_or_says_with_what(blobs, tmp_path):
    """What is not asked for again is as it was."""
    asked = {"scores": ["entropy", "epistemic"], "alpha": 0.01, "reference": "none"}
    fb.watch(blobs, 0, **asked, folder=tmp_path).save()
    for again in ({}, asked, {"scores": ["epistemic", "entropy"]}):
        state = fb.watch(blobs, 0, **again, folder=tmp_path).state
        assert (state.alpha, state.reference) == (0.01, 0)
    for other, began in (
        ({"scores": ["entropy"]}, "scores entropy,epistemic"),
        ({"alpha": 0.05}, "alpha 0.01"),
        ({"reference": "own"}, "a reference of 0 rows"),
    ):
        with pytest.raises(InputError, match=f"began with {began}; delete it, and the watch begins anew"):
            fb.watch(blobs, 0, **{**asked, **other}, folder=tmp_path)


def test_histories_stay_short_and_keep_their_ends(blobs):
    state = fb.watch(blobs, 0).state
    for _ in range(5000):
        state.rows += 1
        state.remember([0.0] * len(state.channels))
    assert len(state.history) <= watched.LONGEST
    assert np.diff([point[0] for point in state.history]).min() == state.step


def test_what_can_t_be_watched_says_so(blobs, tmp_path):
    with pytest.raises(InputError, match="unknown site 'north'"):
        fb.watch(blobs, "north")
    with pytest.raises(InputError, match="unknown reference"):
        fb.watch(blobs, 0, reference="others")
    with pytest.raises(InputError, match="alpha is the chance of a false alarm"):
        fb.watch(blobs, 0, alpha=5)
    with pytest.raises(InputError, match="unknown score for this run"):
        fb.watch(blobs, 0, scores=["entropi"])
    with pytest.raises(InputError, match="2 targets for 3 rows"):
        fb.watch(blobs, 0).update(torch.zeros(3, 2), [0, 1])
    with pytest.raises(InputError, match="classes from 0 to 3"):
        fb.watch(blobs, 0).update(torch.zeros(1, 2), [9])
    with pytest.raises(InputError, match="classes from 0 to 3"):
        fb.watch(blobs, 0).update(torch.zeros(1, 2), [1.5])
    (tmp_path / "s.csv").write_text("a,b,y\n1,2,ill\n")
    with pytest.raises(InputError, match="'ill' is no label; there are 0 to 3"):
        read_stream(tmp_path / "s.csv", blobs, label="y")
    with pytest.raises(InputError, match="takes no labels: it began so; delete it, and the watch begins anew"):
        fb.watch(blobs, 0, labels=False).update(torch.zeros(1, 2), [0])
    watch = fb.watch(blobs, 0, folder=tmp_path)
    watch.state.run = "another"
    watch.save()
    with pytest.raises(InputError, match="watches another posterior"):
        fb.watch(blobs, 0, folder=tmp_path)
    watched.path_of(tmp_path, "0").write_bytes(b"PK nothing")
    with pytest.raises(InputError, match="the watch begins anew"):
        fb.watch(blobs, 0, folder=tmp_path)


def test_a_watch_does_not_go_on_with_a_posterior_that_was_fitted_anew(blobs, tmp_path):
    watch = fb.watch(blobs, 0, folder=tmp_path)
    watch.update(rows(blobs, 20)[0])
    method = fb.methods.feduab(draws=5, lr=0.01, epochs=3, batch=30)
    net = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 4))
    anew = fb.fit(net, blobs.task.clients, method=method, rounds=6, engine="loop", evaluate_every=6)
    with pytest.raises(InputError, match="watches another posterior"):
        fb.watch(anew, 0, folder=tmp_path)
    assert fb.watch(blobs, 0, folder=tmp_path).state.rows == 20


def test_a_file_that_can_t_be_read_is_named_and_the_others_are_on_the_page(blobs, tmp_path):
    watch = fb.watch(blobs, 0, folder=tmp_path)
    watch.update(rows(blobs, 20)[0])
    watched.path_of(tmp_path, "bad").write_bytes(b"no archive")
    with pytest.warns(UserWarning, match="a watch was left out: .*bad.npz can't be read"):
        page = write_page(tmp_path).read_text()
    assert "all 1 sites are quiet" in page
