"""Times and events in a table per site: the rows of `from_csv`, gaps filled as ever, and one line for what is wrong."""

import json
import warnings

import numpy as np
import pytest
import torch
from site_files import write

import fedbayes as fb
from fedbayes.data import holdings
from fedbayes.data.survival import cut_times
from fedbayes.errors import InputError

HEAD = "age,sex,days,died"
NORTH = ["50,1,30,1", "61,0,400.5,0", "47,1,12,1", "55,0,77,0", "64,1,5,1"]
SOUTH = ["30,0,210,0", "70,1,8,1", "52,0,33,1", "41,1,90,0"]
ASKED = {"target": "days", "event": "died"}


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, north=[HEAD, *NORTH], south=[HEAD, *SOUTH])


def patients(seed, rows=60, gaps=0.0, unit=100.0):
    random = np.random.default_rng(seed)
    age, dose = random.normal(60, 9, rows), random.normal(5, 1, rows)
    event = random.exponential(unit * np.exp((60 - age) / 9))
    lost = random.exponential(2 * unit, rows)
    age[random.random(rows) < gaps] = np.nan
    return {"age": age, "dose": dose, "days": np.minimum(event, lost), "died": event <= lost}


def as_lines(table):
    rows = zip(*(column.tolist() for column in table.values()))
    return [",".join(table), *(",".join(str(1 * v) if v == v else "" for v in row) for row in rows)]


@pytest.mark.parametrize("likelihood", ["hazard", "cox"])
def test_tables_without_gaps_are_those_of_from_csv(tmp_path, likelihood):
    write(tmp_path, north=as_lines(patients(0)), south=as_lines(patients(1, 40)))
    plain = fb.data.from_csv(tmp_path, ["days", "died"], kind="survival").sites()
    clients = fb.data.from_tables(tmp_path, "days", event="died", seed=None)
    for part in ("x", "y", "test_x", "test_y"):
        ours, theirs = getattr(clients.data, part), getattr(plain.data, part)
        assert torch.equal(ours, theirs)
        assert ours.dtype == theirs.dtype
    assert (clients.names, clients.data.columns) == (plain.names, plain.data.columns)
    assert clients.data.times == plain.data.times
    assert (clients.data.kind, clients.data.classes, clients.data.target_scale) == ("survival", 1, None)
    for k in range(2):
        assert torch.equal(clients.train_rows(k), plain.train_rows(k))
        assert torch.equal(clients.test_rows(k), plain.test_rows(k))
    torch.testing.assert_close(clients.data.prepare(clients.data.x), plain.data.prepare(plain.data.x))
    options = {"method": fb.methods.pvi(lr=0.05, epochs=2), "rounds": 3, "likelihood": likelihood}
    x = clients.data.test_x
    ours, theirs = (fb.fit("linear", one, **options).predict(x) for one in (clients, plain))
    torch.testing.assert_close(ours.survival, theirs.survival)


@pytest.mark.parametrize("missing", ["median", "mean", "drop"])
@pytest.mark.parametrize("scale", ["federation", "site", "none"])
def test_columns_are_coded_as_with_another_target(missing, scale):
    sites = {name: patients(seed, gaps=0.2) for seed, name in enumerate("ab")}
    sites = {name: {**t, "ward": np.array(["x", "y", None] * 20, object)} for name, t in sites.items()}
    options = {"missing": missing, "scale": scale, "test": 0.25}
    clients = fb.data.from_tables(sites, "days", event="died", **options)
    bare = {name: {n: v for n, v in table.items() if n != "died"} for name, table in sites.items()}
    real = fb.data.from_tables(bare, "days", kind="real", **options)
    assert clients.data.coding.columns == real.data.coding.columns
    assert clients.data.coding.site_scales == real.data.coding.site_scales
    torch.testing.assert_close(clients.data.x, real.data.x, equal_nan=True)
    torch.testing.assert_close(clients.data.test_x, real.data.test_x, equal_nan=True)
    times = real.data.target_scale.undo(real.data.y)[:, 0]
    torch.testing.assert_close(clients.data.y[:, 0], times, rtol=1e-4, atol=1e-3)
    assert clients.data.prepare == real.data.prepare


@pytest.mark.parametrize(
    "spelt", [("1", "0"), ("true", "false"), ("TRUE", "FALSE"), ("1.0", "0.0"), (" True", "False "), ("01", "00")]
)
def test_events_as_tables_have_them(folder, tmp_path, spelt):
    said = dict(zip("10", spelt))
    lines = [f"{row.rpartition(',')[0]},{said[row[-1]]}" for row in NORTH]
    other = write(tmp_path, north=[HEAD, *lines])
    plain = fb.data.from_tables(folder, **ASKED, test=0.0)
    assert torch.equal(fb.data.from_tables(other, **ASKED, test=0.0).data.y, plain.data.y)
    assert plain.data.y[:5].tolist() == [[30, 1], [400.5, 0], [12, 1], [77, 0], [5, 1]]


def test_flags_of_frames_are_events():
    pandas = pytest.importorskip("pandas")
    table = patients(0)
    frame = pandas.DataFrame(table)
    one, two = (fb.data.from_tables({"a": given}, **ASKED).data for given in (table, frame))
    assert torch.equal(one.y, two.y)
    assert one.y[:, 1].unique().tolist() == [0, 1]


def test_curves_are_cut_by_training_rows_or_where_it_is_said():
    sites = {name: patients(seed, unit=10.0**seed) for seed, name in enumerate("abc")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clients = fb.data.from_tables(sites, **ASKED, left_out="c")
        given = fb.data.from_tables(sites, **ASKED, times=[1, 5, 20])
    rows = torch.cat([clients.train_rows(0), clients.train_rows(1)])
    assert clients.data.times == cut_times(clients.data.y[rows]) == clients.data.coding.times
    assert given.data.times == (1.0, 5.0, 20.0)


def test_a_summary_does_not_say_whose_event_was_seen_when(folder):
    """Any exchange of events between patients, and of times, leaves it as it is."""
    said = fb.data.summary_of(folder, **ASKED, test=0.0)
    shuffled = {}
    for name, rows in (("north", NORTH), ("south", SOUTH)):
        cells = [row.split(",") for row in rows]
        events = sorted(row[3] for row in cells)
        shuffled[name] = [HEAD, *(",".join([*row[:3], event]) for row, event in zip(cells, events))]
    write(folder, **shuffled)
    assert fb.data.summary_of(folder, **ASKED, test=0.0) == said
    north = said[0]
    assert north.target.bins == {}
    assert north.target.moments.mean == pytest.approx(np.mean([30, 400.5, 12, 77, 5]))
    assert north.event.counts == {"0": 2, "1": 3}
    assert list(north.columns) == ["age", "sex"]


@pytest.mark.parametrize("effects", [False, True])
def test_agreement_needs_statistics_and_times(folder, tmp_path, effects):
    whole = fb.data.from_tables(folder, **ASKED, test=0.25, times=[20, 100], site_effects=effects)
    files = []
    for site in ("north", "south"):
        said = fb.data.summary_of(folder / f"{site}.csv", **ASKED, test=0.25, site_effects=effects)
        fb.data.save_summaries(said, tmp_path / f"{site}.json")
        files.append(tmp_path / f"{site}.json")
    coding = fb.data.agree_on(files, **ASKED, times=[20, 100])
    assert coding == whole.data.coding
    coding.save(tmp_path / "coding.json")
    assert fb.data.read_coding(tmp_path / "coding.json") == coding
    south = fb.data.from_tables(folder / "south.csv", coding=tmp_path / "coding.json", test=0.25).data
    own = whole.train_rows(1)
    assert torch.equal(south.y, whole.data.y[own])
    torch.testing.assert_close(south.x, whole.data.x[own])
    server = fb.data.blank(tmp_path / "coding.json")
    for what in ("shape", "prepare", "kind", "classes", "times", "coding"):
        assert getattr(server, what) == getattr(whole.data, what) == getattr(south, what)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"times": ()}, "times: no site tells when its events came; say where survival curves are cut, such as"),
        ({"event": None}, "times: curves of survival alone are cut; name the column of events: event = "),
        ({"event": None, "times": ()}, "site north counts events; name their column"),
        ({"labels": ["0", "1"]}, "labels: the target is a time beside the event 'died', no class"),
        ({"times": [5, 3]}, "times must rise from above 0"),
    ],
)
def test_agreements_that_are_refused(folder, options, says):
    said = fb.data.summary_of(folder, **ASKED, test=0.0)
    with pytest.raises(ValueError, match=says):
        fb.data.agree_on(said, **{**ASKED, "times": [20], **options})


def test_summaries_without_events_are_refused(folder):
    said = fb.data.summary_of(folder, "days", kind="real", test=0.0)
    with pytest.raises(InputError, match="site north counts no events; have it write its summary with event = 'died'"):
        fb.data.agree_on(said, **ASKED, times=[20])


@pytest.mark.parametrize(
    "change", [{"event": None}, {"kind": "real"}, {"times": []}, {"times": [3, 2]}, {"times": [float("nan")]}]
)
def test_a_coding_that_was_damaged_is_refused(folder, tmp_path, change):
    path = tmp_path / "coding.json"
    fb.data.from_tables(folder, **ASKED, test=0.0).data.coding.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(InputError, match="is no whole coding"):
        fb.data.read_coding(path)


def test_a_coding_of_before_is_read(folder, tmp_path):
    path = tmp_path / "coding.json"
    coding = fb.data.from_tables(folder, "days", kind="real", test=0.0).data.coding
    table = {key: value for key, value in coding.as_table().items() if key not in ("event", "times")}
    path.write_text(json.dumps(table))
    assert fb.data.read_coding(path) == coding


def south(field, value, row=1):
    """The table of the south with another field in one row."""
    cells = [line.split(",") for line in SOUTH]
    cells[row][HEAD.split(",").index(field)] = value
    return [HEAD, *map(",".join, cells)]


WRONG = {
    "no event column": (
        ["age,sex,days", *(row.rpartition(",")[0] for row in SOUTH)],
        "site south has no column 'died', the event; add it there, 1 where it was seen .*; it has age, sex, days",
    ),
    "no column of times": (["age,sex,died", "1,0,1", "2,0,0"], "site south has no column 'days', the target; it has"),
    "a word": (south("died", "dead"), r"site south, event 'died': 'dead' \(row 2, 1 in all\) is neither 0 nor 1"),
    "a third code": (south("died", "2"), r"site south, event 'died': '2' \(row 2, 1 in all\) is neither 0 nor 1, f"),
    "an event missing": (south("died", ""), r"site south, event 'died' is missing in 1 of 4 rows \(first: row 2\); dr"),
    "a time missing": (south("days", "NA"), r"site south, target 'days' is missing in 1 of 4 rows \(first: row 2\)"),
    "no event told": (
        [HEAD, *(f"{row.rpartition(',')[0]}," for row in SOUTH)],
        "site south, event 'died' has no value in any of its 4 rows; leave the site out",
    ),
    "a time below 0": (south("days", "-3"), r"site south, target 'days': time '-3' \(row 2, 1 in all\) is below 0; me"),
    "a time without end": (south("days", "inf"), r"site south, target 'days': time 'inf' \(row 2, 1 in all\) is no ti"),
    "a time in float64": (south("days", "1e80"), "site south, target 'days': time '1e80' .* is no time"),
    "a date": (south("days", "2024-05-31"), "site south, target 'days' holds dates; give the time from entry to event"),
    "a word for a time": (
        south("days", "long"),
        r"site south, target 'days': time 'long' \(row 2, 1 in all\) is no number; mend",
    ),
    "a decimal comma": (
        south("days", '"3,5"'),
        r"site south, target 'days': time '3,5' \(row 2, 1 in all\) is no numbe",
    ),
    "times alone": (["days,died", "3,1", "4,0"], "site south has no column but the target 'days' and the event 'died'"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_named_by_site_and_column(folder, fault):
    lines, says = WRONG[fault]
    write(folder, south=lines)
    with pytest.raises(InputError, match=says) as caught:
        fb.data.from_tables(folder, **ASKED, test=0.0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [np.inf, -1.0])
def test_times_of_frames_are_checked(value):
    table = {**patients(0), "days": np.array([*range(1, 60), value], float)}
    with pytest.raises(InputError, match=r"site a, target 'days': time '(inf|-1.0)' \(row 60, 1 in all\)"):
        fb.data.from_tables({"a": table}, **ASKED)
    dated = {**patients(0), "days": np.arange(60).astype("datetime64[D]")}
    with pytest.raises(InputError, match="site a, target 'days' holds dates"):
        fb.data.from_tables({"a": dated}, **ASKED)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"target": None}, "target: event 'died' says whether it was seen at a time; name the column of times"),
        ({"target": ["days", "died"]}, r"target: tables have one column .*: target = \"time\", event = \"event\""),
        ({"event": None, "kind": "survival"}, "kind: survival needs a column of events beside the times in 'days'"),
        ({"kind": "classes"}, "kind: a target with an event, 'died', is of survival, not 'classes'; leave one out"),
        ({"event": "days"}, "event: 'days' is the target, a time"),
        ({"event": ["died"]}, "event: it is one column, not"),
        ({"event": "dead"}, "site north has no column 'dead', the event"),
        ({"labels": ["0", "1"]}, "labels: the target is a time beside the event 'died', no class; leave labels out"),
        ({"times": [0, 3]}, "times must rise from above 0"),
        ({"event": None, "kind": "real", "times": [3]}, "times: curves of survival alone are cut; name the column of"),
    ],
)
def test_options_that_do_not_fit(folder, options, says):
    with pytest.raises(ValueError, match=says) as caught:
        fb.data.from_tables(folder, **{**ASKED, "test": 0.0, **options})
    assert "\n" not in str(caught.value)


def test_events_that_nobody_saw(folder):
    lines = {s: [HEAD, *(f"{row[:-1]}0" for row in rows)] for s, rows in (("north", NORTH), ("south", SOUTH))}
    write(folder, south=lines["south"])
    with pytest.warns(UserWarning, match="site south, event 'died': none was seen in 4 training rows"):
        fb.data.from_tables(folder, **ASKED, test=0.0)
    write(folder, **lines)
    with pytest.raises(InputError, match=r"event 'died': no event was seen in any training row \(north, south\); are"):
        fb.data.from_tables(folder, **ASKED, test=0.0)


def test_rows_with_gaps_in_targets_may_be_dropped(folder):
    write(folder, south=south("died", ""), north=[HEAD, *NORTH, "33,1,,1"])
    clients = fb.data.from_tables(folder, **ASKED, test=0.0, missing="drop")
    assert clients.sizes.tolist() == [5, 3]


def test_times_in_another_unit_are_reported():
    sites = {name: patients(seed, unit=3000.0 if name == "h" else 100.0) for seed, name in enumerate("abcdefgh")}
    with pytest.warns(UserWarning, match=r"site h, target 'days': the mean of .*; is it the same unit\?"):
        fb.data.from_tables(sites, **ASKED)


def test_a_look_shows_times_and_the_share_of_events(folder):
    write(folder, south=south("died", ""))  # gaps are what one looks for
    held = holdings.holdings(fb.data.summary_of(folder, **ASKED, test=0.0, seed=None))
    cells = [*holdings.site_table(held).columns[3].cells]
    days = ([30, 400.5, 12, 77, 5], [210, 8, 33, 90])
    spreads = [f"{np.mean(part):.4g} ± {np.std(part):.4g}" for part in days]
    assert cells == [f"{spreads[0]}, 60% events", f"{spreads[1]}, 33% events"]
    legend = holdings.figure(held).axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["event", "no event"]
