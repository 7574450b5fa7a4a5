"""A table per site: kinds found, missing values, agreed categories, scales by sums; and one line for what is wrong."""

import warnings

import numpy as np
import pytest
import torch
from site_files import write

import fedbayes as fb
from fedbayes.data import agreement, holdings, site_tables, summary
from fedbayes.data.frames import site_tables as read_tables
from fedbayes.errors import InputError

HEAD = "age,sex,seen,grade,ill"
NORTH = ["50,m,2024-01-05,low,no", "61,f,2024-02-01,mid,yes", "?,f,2024-02-11,low,no", "47,m,2024-03-01,high,yes"]
SOUTH = ["30,f,2023-12-31,mid,no", "70,m,2024-05-31,,yes", "55,,2024-01-01,low,no", "52,f,2024-01-02,mid,yes"]


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, north=[HEAD, *NORTH], south=[HEAD, *SOUTH])


def columns(clients):
    return {column.name: column for column in clients.data.coding.columns}


def test_kinds_are_found_and_rows_stay_raw(folder):
    clients = fb.data.from_tables(folder, "ill", test=0.0, kinds={"grade": ["low", "mid", "high"]})
    data, found = clients.data, columns(clients)
    assert {name: column.kind for name, column in found.items()} == {
        "age": "number",
        "sex": "category",
        "seen": "date",
        "grade": "ordered",
    }
    assert (clients.names, data.class_names, data.columns) == (("north", "south"), ("no", "yes"), tuple(found))
    assert data.x[0].tolist() == [50, 1, np.datetime64("2024-01-05", "D").astype(int), 0]
    assert data.x[2, 0].isnan()
    assert data.x[6, 1].isnan()
    assert data.coding.seen == (
        "age",
        "age missing",
        "sex=f",
        "sex=m",
        "sex missing",
        "seen",
        "grade",
        "grade missing",
    )
    seen = data.prepare(data.x)
    assert seen.shape[1:] == data.seen_shape == (8,)
    ages = np.array([50, 61, 47, 30, 70, 55, 52])
    torch.testing.assert_close(seen[0, 0], torch.tensor((50 - ages.mean()) / ages.std()).double())
    torch.testing.assert_close(seen[2, :2], torch.tensor([(52 - ages.mean()) / ages.std(), 1]).double())  # the median
    assert seen[:, 2:5].sum(1).tolist() == [1.0] * 8


@pytest.mark.parametrize("base", [0.0, 1.6e9])
def test_scales_by_sums_equal_those_of_the_pooled_rows(base):
    random = np.random.default_rng(0)
    parts = [base + random.normal(k, 1 + k, 40 + 30 * k) for k in range(3)]
    moments = [summary.Moments.of(part) for part in parts]
    total = moments[0] + moments[1] + moments[2]
    pooled = np.concatenate(parts)
    assert total.mean == pytest.approx(pooled.mean(), rel=1e-14)
    assert total.deviation == pytest.approx(pooled.std(), rel=1e-6)
    bins = summary.added(summary.bins_of(parts[0]), summary.added(*map(summary.bins_of, parts[1:])))
    assert sum(count for count, _ in bins.values()) == len(pooled)
    assert summary.median_of(bins) == pytest.approx(np.median(pooled), rel=0.01, abs=0.01)


@pytest.mark.parametrize("values", [[1, 2, 2, 9], [-3, -3, 0, 1, 50], [0.0, 0.0], [4.5], [-1, 1]])
def test_medians_of_few_values_are_exact(values):
    assert summary.median_of(summary.bins_of(np.array(values, float))) == np.median(values)


def test_only_training_rows_are_fitted(folder):
    write(folder, probe=[HEAD, "900,x,2024-01-01,low,no", "51,f,2024-01-01,low,yes", *NORTH[:1]])
    sites = {name: folder / f"{name}.csv" for name in ("north", "south")}
    with pytest.warns(UserWarning, match="north, column 'sex': 'x' in 1 of 3 rows is in no training row; coded as"):
        held = fb.data.from_tables(sites, "ill", test={"north": folder / "probe.csv"})
    plain = fb.data.from_tables(sites, "ill", test=0.0)
    assert held.data.coding == plain.data.coding
    assert held.test.sizes.tolist() == [3, 0]
    assert held.data.test_x[0, :2].tolist() == [900, -1]
    assert held.data.prepare(held.data.test_x)[0, 2:5].tolist() == [0, 0, 0]


def test_a_site_column_and_one_file_per_site_are_the_same(folder, tmp_path_factory):
    other = tmp_path_factory.mktemp("one")
    rows = [*(f"{row},north" for row in NORTH), *(f"{row},south" for row in SOUTH)]
    write(other, all=[f"{HEAD},hospital", *rows[::-1]])
    one = fb.data.from_tables(other / "all.csv", "ill", site="hospital", test=0.0)
    two = fb.data.from_tables(folder, "ill", test=0.0)
    assert one.data.coding == two.data.coding
    torch.testing.assert_close(one.data.x[:4].flip(0), two.data.x[:4], equal_nan=True)
    frame = {"age": [1.0, np.nan, 3.0, 4.0], "who": ["a", "b", "a", "b"], "y": [0.5, 1.5, 2.5, 3.5]}
    mapped = fb.data.from_tables(frame, "y", site="who", test=0.0)
    assert (mapped.names, mapped.data.kind, mapped.sizes.tolist()) == (("a", "b"), "real", [2, 2])
    torch.testing.assert_close(mapped.data.target_scale.undo(mapped.data.y)[:, 0], torch.tensor([0.5, 2.5, 1.5, 3.5]))


def test_files_of_the_same_sites_have_the_same_columns(tmp_path):
    rows = [[f"{i},{'ab'[i % 2]},{('no', 'yes')[i // 2 % 2]}" for i in range(8 * k, 8 * k + 8)] for k in (0, 1)]
    write(tmp_path, y2023=["age,who,ill", *rows[0]], y2024=["age,who,ill,dose", *(f"{row},1" for row in rows[1])])
    (tmp_path / "again").mkdir()
    write(tmp_path / "again", y2023=["age,who,ill,dose", *(f"{row},1" for row in rows[1])])
    for sites, other in ((tmp_path, "y2024"), ([tmp_path / "y2023.csv", tmp_path / "again/y2023.csv"], "y2023")):
        with pytest.raises(InputError, match=f"table y2023 has no column 'dose', which table {other} has; add it"):
            fb.data.from_tables(sites, "ill", site="who", test=0.0)
    clients = fb.data.from_tables(tmp_path, "ill", site="who", drop=["dose"], test=0.0)
    assert (clients.names, clients.sizes.tolist(), clients.data.columns) == (("a", "b"), [8, 8], ("age",))
    assert clients.data.x[clients.train_rows(1)].flatten().tolist() == [1.0, 3, 5, 7, 9, 11, 13, 15]


def test_the_split_is_drawn_by_class_at_each_site_alone():
    random = np.random.default_rng(0)
    sites = {s: {"x": random.normal(size=50), "y": np.array(["a"] * 40 + ["b"] * 10)} for s in ("one", "two")}
    both = fb.data.from_tables(sites, "y", seed=3)
    assert both.test_label_counts().tolist() == [[8, 2], [8, 2]]
    alone = fb.data.from_tables({"two": sites["two"]}, "y", seed=3)
    assert torch.equal(alone.data.test_x, both.data.test_x[both.test_rows(1)])
    assert not torch.equal(fb.data.from_tables(sites, "y", seed=4).data.test_x, both.data.test_x)


@pytest.mark.parametrize("labels", [None, {"well": ["no", "a cold"], "ill": ["yes"], "unsure": ["zmaybe"]}])
def test_a_class_of_one_row_is_trained_on(labels):
    table = {"x": np.arange(48.0), "y": np.array(["no"] * 24 + ["yes"] * 23 + ["zmaybe"])}  # the last of 48 is drawn
    for seed in (None, 0, 1):
        clients = fb.data.from_tables({"a": table}, "y", seed=seed, labels=labels)
        assert clients.label_counts().tolist() == [[19, 19, 1]]
        said = fb.data.summary_of({"a": table}, "y", seed=seed, labels=labels)
        coding = fb.data.agree_on(said, "y", labels=labels)
        assert torch.equal(fb.data.from_tables({"a": table}, coding=coding, seed=seed).data.x, clients.data.x)


def test_labels_may_be_sets_of_values():
    table = {"x": np.arange(6.0), "grade": np.array([0, 1.0, 2, 0, 4, 3])}
    clients = fb.data.from_tables({"a": table}, "grade", labels={"healthy": [0], "ill": [1, 2, 3, 4]}, test=0.0)
    assert clients.data.class_names == ("healthy", "ill")
    assert clients.data.y.tolist() == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("missing", ["median", "mean", "drop"])
def test_what_is_missing_is_filled_or_dropped(missing):
    table = {"x": [1.0, 2.0, 9.0, np.nan], "y": np.array([0.1, 0.2, 0.3, 0.4])}
    clients = fb.data.from_tables({"a": table}, "y", missing=missing, test=0.0)
    column = clients.data.coding.columns[0]
    assert len(clients.data) == (3 if missing == "drop" else 4)
    assert column.gaps == (missing != "drop")
    assert column.fill == pytest.approx(4.0 if missing == "mean" else 2.0)


def test_scales_of_the_site_itself():
    sites = {
        s: {"x": np.array([1.0, 2.0, 3.0, 4.0]) + shift, "y": np.arange(4.0)} for s, shift in (("a", 0), ("b", 99))
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        clients = fb.data.from_tables(sites, "y", kind="real", scale="site", test=0.0)
    data = clients.data
    seen = data.prepare(data.x)
    torch.testing.assert_close(seen[:4], seen[4:])
    torch.testing.assert_close(seen[:4].std(correction=0), torch.tensor(1.0).double())
    with pytest.warns(UserWarning, match="the table has no column 'site'; its rows are scaled as those of no"):
        strange = site_tables.coded({"x": [52.0]}, data.coding)  # of no known site: by the federation's
    assert data.prepare(strange).item() == pytest.approx(0.0, abs=1e-9)
    with pytest.warns(UserWarning, match="no site 'B' trained, its rows have the federation's scale; a, b did"):
        assert site_tables.coded({"x": [2.5, 52.0], "site": ["a", "B"]}, data.coding)[:, -1].tolist() == [0, -1]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        here = site_tables.coded({"x": [2.5, 101.5], "site": ["a", "b"]}, data.coding)
    torch.testing.assert_close(data.prepare(here), torch.zeros(2, 1).double())


@pytest.mark.filterwarnings("ignore:site")
def test_agreement_needs_statistics_alone(folder, tmp_path):
    """As on machines that never see each other's rows: each writes a file, one gathers them, each codes its own."""
    whole = fb.data.from_tables(folder, "ill", test=0.25, kinds={"grade": ["low", "mid", "high"]})
    files = []
    for site in ("north", "south"):
        said = fb.data.summary_of(folder / f"{site}.csv", "ill", test=0.25, kinds={"grade": ["low", "mid", "high"]})
        fb.data.save_summaries(said, tmp_path / f"{site}.json")
        files.append(tmp_path / f"{site}.json")
    coding = fb.data.agree_on(files, "ill")
    assert coding == whole.data.coding
    coding.save(tmp_path / "coding.json")
    assert fb.data.read_coding(tmp_path / "coding.json") == coding
    south = fb.data.from_tables(folder / "south.csv", coding=tmp_path / "coding.json", test=0.25)
    torch.testing.assert_close(south.data.x, whole.data.x[whole.train_rows(1)], equal_nan=True)
    server = fb.data.blank(tmp_path / "coding.json")
    assert (server.shape, server.prepare, server.classes) == (whole.data.shape, whole.data.prepare, 2)
    assert server.prepare(server.x).isfinite().all()


def test_a_file_that_is_no_coding_is_refused(tmp_path):
    (tmp_path / "coding.json").write_text('{"columns": [{"name": "x"}]}')
    with pytest.raises(InputError, match="is no whole coding"):
        fb.data.read_coding(tmp_path / "coding.json")
    (tmp_path / "sums.json").write_text('[{"site": "a", "columns": {"x": 3}}]')
    with pytest.raises(InputError, match="holds no summaries"):
        fb.data.agree_on([tmp_path / "sums.json"], "y")


def test_shifted_columns_and_new_gaps_are_reported():
    random = np.random.default_rng(0)
    table = {"weight": random.normal(70, 10, 60), "y": random.normal(size=60)}
    coding = fb.data.from_tables({"a": table}, "y").data.coding
    with pytest.warns(UserWarning, match="column 'weight': the mean of 30 rows is .*e.04, in training 6.*same unit"):
        site_tables.coded({"weight": 1000 * random.normal(70, 10, 30)}, coding)
    with pytest.warns(UserWarning, match="missing in 1 of 2 rows, and in no training row; it is taken for"):
        site_tables.coded({"weight": [70.0, np.nan]}, coding)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        site_tables.coded({"weight": random.normal(70, 10, 30)}, coding)


WRONG = {
    "a column missing at one site": (
        {"south": ["age,seen,grade,ill", "1,2024-01-01,low,no", "2,2024-01-01,low,yes"]},
        r"site south has no column 'sex', which site north has; add it there .*drop = \['sex'\]",
    ),
    "a column too many": (
        {"south": [f"{HEAD},x", *(f"{row},1" for row in SOUTH)]},
        "site north has no column 'x', which site south has",
    ),
    "columns of one site alone": (
        {"south": ["age,seen,grade,ill,x", "1,2024-01-01,low,no,3", "2,2024-01-01,low,yes,4"]},
        r"site south has no column 'sex', which site north has; add it .* or drop all 2 .*: drop = \['sex', 'x'\]",
    ),
    "no target": ({"south": ["age,sex\n1,2"]}, "site south has no column 'ill', the target; it has age, sex"),
    "all values missing": (
        {
            s: [HEAD, *(f"?,{row.partition(',')[2]}" for row in rows)]
            for s, rows in (("north", NORTH), ("south", SOUTH))
        },
        r"column 'age' has no value at any site \(north, south\); drop = \['age'\]",
    ),
    "all labels missing": (
        {"south": [HEAD, *(f"{row.rpartition(',')[0]}," for row in SOUTH)]},
        "site south, target 'ill' has no value in any of its 4 rows; leave the site out",
    ),
    "a label missing": (
        {"south": [HEAD, *SOUTH, "30,f,2024-01-01,low,"]},
        r"site south, target 'ill' is missing in 1 of 5 rows \(first: row 5\)",
    ),
    "one class": (
        {"south": [HEAD, *(row.replace("yes", "no") for row in SOUTH)]},
        "site south, target 'ill': all 4 training rows are 'no'; leave the site out",
    ),
    "one row": ({"south": [HEAD, SOUTH[0]]}, "site south has 1 row to train on; leave the site out"),
    "no row": ({"south": [HEAD]}, "site south has no rows; leave it out"),
    "a date as text": (
        {"south": [HEAD, *SOUTH, "30,f,31.05.2024,low,yes"]},
        "site south, column 'seen': '31.05.2024' looks like a date; write dates as 2024-05-31",
    ),
    "a decimal comma": (
        {"south": [HEAD.replace(",", ";"), *(f"0,5;{row.partition(',')[2].replace(',', ';')}" for row in SOUTH)]},
        "site south, column 'age': '0,5' looks like a number with a decimal comma; write 0.5, drop the column, or say",
    ),
    "a decimal comma in the target": (
        {"south": [HEAD.replace(",", ";"), *(f"{row.rpartition(',')[0].replace(',', ';')};-12,75" for row in SOUTH)]},
        "site south, target 'ill': '-12,75' looks like a number with a decimal comma; write -12.75, or say kind = .cl",
    ),
    "a date among numbers": (
        {"south": [HEAD, *(f"2024-01-01,{row.partition(',')[2]}" for row in SOUTH)]},
        "site south, column 'age' is a date, at other sites a number; write it there as they do",
    ),
    "a word among numbers": (
        {"south": [HEAD, *SOUTH, "old,f,2024-01-01,low,yes"]},
        r"site south, column 'age' is a category \(old, 30\), at other sites a number",
    ),
    "a limit of detection among measurements": (
        {"south": [HEAD, *(f"{'<20' if i == 6 else 20 + i},m,2024-01-01,low,{'yn'[i % 2]}" for i in range(12))]},
        r"site south, column 'age': '<20' \(row 7\) is no number, as 11 of its 12 values are; mend it, name it among b",
    ),
    "labels in two cases": (
        {"south": [HEAD, *(row.replace("yes", "Yes") for row in SOUTH)]},
        r"target 'ill': 'yes' and 'Yes' differ in case alone; .* labels = \{ \"yes\" = \[\"yes\", \"Yes\"\], \.\.\. \}",
    ),
    "a name per patient": (
        {
            s: [HEAD, *(f"p{i}{s},m,2024-01-01,low,{'yes' if i % 2 else 'no'}" for i in range(80))]
            for s in ("north", "south")
        },
        r"column 'age' has 160 different values, such as 'p0north'; is it a name or a number of patients\? drop",
    ),
    "a torn line": ({"south": [HEAD, "1,2"]}, r"south\.csv, line 2: 2 fields under 5 columns"),
    "a torn line after blank ones": ({"south": [HEAD, "", SOUTH[0], "", "", "1,2"]}, r"south\.csv, line 6: 2 fields"),
    "two columns of a name": ({"south": ["age,age", "1,2"]}, "two columns 'age'"),
    "no head": ({"south": ["1,2,3,4,5", "1,2,3,4,5"]}, "no line of names at its top; give columns"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_what_is_wrong_is_named_by_site_and_column(folder, fault):
    sites, says = WRONG[fault]
    write(folder, **sites)
    with pytest.raises(InputError, match=says) as caught:
        fb.data.from_tables(folder, "ill", test=0.0)
    assert "\n" not in str(caught.value)


def measured(score):
    return {"age": [40.0 + i for i in range(40)], "score": [score(i) for i in range(40)]}


REAL = {
    "a word among targets": (lambda i: "n/a" if i == 5 else str(i), r"target 'score': 'n/a' \(row 6\) is no number"),
    "targets that are too large": (lambda i: 1e22 * i, r"deviation is .*e\+23, and must be between 1e-05 and 1e\+15"),
    "targets that are too small": (lambda i: 1e-9 * i, "deviation is .*e-08, .*; give it in another unit"),
}


@pytest.mark.parametrize("fault", REAL)
def test_real_targets_that_are_refused(fault):
    score, says = REAL[fault]
    with pytest.raises(InputError, match=says):
        fb.data.from_tables({"a": measured(score), "b": measured(score)}, "score", test=0.0)


def test_targets_in_another_unit_are_reported():
    sites = {
        "a": measured(lambda i: i + 0.5),
        "b": measured(lambda i: i + 0.5),
        "c": measured(lambda i: 1000 * i + 0.5),
    }
    with pytest.warns(
        UserWarning, match="site c, target 'score': the mean of 40 rows is 1.95e.04, .* is it the same unit"
    ):
        fb.data.from_tables(sites, "score", test=0.0)


def test_codes_with_words_among_them_are_a_category_and_so_is_what_is_told(folder):
    """A few numbers beside a word are codes; of many it is said by kinds, and kept with the coding."""
    codes = [f"{'unknown' if i == 3 else i % 5},m,2024-01-01,low,{'yn'[i % 2]}" for i in range(30)]
    write(folder, north=[HEAD, *codes], south=[HEAD, *codes])
    assert columns(fb.data.from_tables(folder, "ill", test=0.0))["age"].kind == "category"
    codes = [f"{'V45' if i == 3 else f'{250 + i}.1'},m,2024-01-01,low,{'yn'[i % 2]}" for i in range(30)]
    write(folder, north=[HEAD, *codes], south=[HEAD, *codes])
    coding = fb.data.from_tables(folder, "ill", test=0.0, kinds={"age": "category"}).data.coding
    assert fb.data.from_tables(folder, test=0.0, coding=coding).data.coding == coding


def test_categories_that_differ_in_case_alone_are_reported(folder):
    write(folder, south=[HEAD, *(row.replace(",f,", ",F,") for row in SOUTH)])
    with pytest.warns(UserWarning, match="column 'sex': 'F' and 'f' differ in case alone and are two categories"):
        fb.data.from_tables(folder, "ill", test=0.0)


def test_lines_of_blanks_are_no_rows(folder):
    write(folder, south=[HEAD, *SOUTH, " , , , , ", ",,,,", "   "])
    assert fb.data.from_tables(folder, "ill", test=0.0).sizes.tolist() == [4, 4]


def test_a_date_is_reported_as_a_day(folder):
    coding = fb.data.from_tables(folder, "ill", test=0.0).data.coding
    new = {"age": ["50"], "sex": ["f"], "seen": [""], "grade": ["low"]}
    with pytest.warns(UserWarning, match="column 'seen': missing in 1 of 1 rows, .*; it is taken for 2024-0"):
        site_tables.coded(new, coding)


def test_one_column_to_drop_needs_no_list(folder):
    alone, listed = (fb.data.from_tables(folder, "ill", test=0.0, drop=drop) for drop in ("seen", ["seen"]))
    assert "seen" not in alone.data.columns
    assert alone.data.columns == listed.data.columns


def test_a_site_may_be_a_column_of_its_own(folder):
    clients = fb.data.from_tables(folder, "ill", test=0.0, site_effects=True)
    coding = clients.data.coding
    assert coding.seen[-2:] == ("site=north", "site=south")
    assert clients.data.prepare(clients.data.x)[:, -2:].tolist() == [[1, 0]] * 4 + [[0, 1]] * 4
    new = {"age": [50.0], "sex": ["f"], "seen": ["2024-01-01"], "grade": ["low"]}
    with pytest.warns(UserWarning, match="has no column 'site'; its rows are seen as those of no known site"):
        assert clients.data.prepare(site_tables.coded(new, coding))[0, -2:].tolist() == [0, 0]
    known = site_tables.coded({**new, "site": ["south"]}, coding)
    assert clients.data.prepare(known)[0, -2:].tolist() == [0, 1]
    said = [fb.data.summary_of(folder / f"{s}.csv", "ill", test=0.0, site_effects=True)[0] for s in ("north", "south")]
    assert fb.data.agree_on(said, "ill") == coding
    again = fb.data.from_tables(folder, test=0.0, coding=coding)
    torch.testing.assert_close(again.data.x, clients.data.x, equal_nan=True)


def test_a_column_called_site_is_one_as_others(folder):
    """Whether it is the network's way to know the site is said by the option, not by what the column holds."""
    for site, rows in (("north", NORTH), ("south", SOUTH)):
        write(folder, **{site: [f"site,{HEAD}", *(f"{site},{row}" for row in rows)]})
    clients = fb.data.from_tables(folder, "ill", test=0.0)
    coding = clients.data.coding
    assert (coding.site_effects, coding.columns[0].values) == (False, ("north", "south"))
    again = fb.data.from_tables(folder, test=0.0, coding=coding)
    assert again.data.coding == coding
    assert fb.data.agree_on(fb.data.summary_of(folder, "ill", test=0.0), "ill") == coding


def test_nothing_is_fitted_on_a_site_that_is_left_out(folder):
    alone = fb.data.from_tables(folder / "north.csv", "ill", test=0.0).data.coding.columns
    for left_out in ("south", 1):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            both = fb.data.from_tables(folder, "ill", test=0.0, left_out=left_out)
        assert both.data.coding.columns == alone
        assert len(both) == 2


@pytest.mark.parametrize(("left_out", "fitted"), [(1, ("1", "3")), ("1", ("2", "3")), (0, ("2", "3"))])
def test_a_number_is_a_place_and_a_text_a_name(left_out, fitted):
    sites = {name: {"x": np.arange(4.0), "y": ["a", "b"] * 2} for name in ("1", "2", "3")}
    clients = fb.data.from_tables(sites, "y", test=0.0, left_out=left_out)
    assert clients.data.coding.sites == fitted == clients.without(left_out).names


@pytest.mark.parametrize(("left_out", "says"), [("north", "north is the only site"), ("nort", "no client 'nort'")])
def test_a_site_that_cannot_be_left_out(folder, left_out, says):
    with pytest.raises(InputError, match=says):
        fb.data.from_tables(folder / "north.csv", "ill", test=0.0, left_out=left_out)


def test_labels_outside_the_agreed_ones(folder):
    write(folder, south=[HEAD, *SOUTH, "30,f,2024-01-01,low,maybe"])
    with pytest.raises(InputError, match=r"site south, target 'ill': label 'maybe' \(row 5, 1 in all\) is none of the"):
        fb.data.from_tables(folder, "ill", labels=["no", "yes"])  # the number of the row is that of the table


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"missing": "zero"}, "unknown missing 'zero'"),
        ({"scale": "sites"}, "did you mean 'site'"),
        ({"thin": "ignore"}, "unknown thin"),
        ({"drop": ["agee"]}, "column to drop 'agee': did you mean 'age'"),
        ({"kinds": {"agee": "category"}}, "column in kinds 'agee': did you mean 'age'"),
        ({"kinds": {"age": "float"}}, "'age' is told to be 'float'; give number"),
        ({"kinds": {"grade": ["low", "mid"]}}, "site north, column 'grade': 'high' is none of the ordered values"),
        ({"test": 1.5}, "share in"),
        ({"kind": "labels"}, "kind must be classes or real"),
        ({"labels": {"a": ["no"], "b": ["no"]}}, "'no' is of class 'a' and of 'b'"),
        ({"target": "ills"}, "has no column 'ills', the target"),
    ],
)
def test_options_that_do_not_fit(folder, options, says):
    with pytest.raises(InputError, match=says):
        fb.data.from_tables(folder, **{"target": "ill", "test": 0.0, **options})


def test_thin_sites_may_be_kept_or_left_out(folder):
    write(folder, south=[HEAD, SOUTH[0]])
    assert fb.data.from_tables(folder, "ill", test=0.0, thin="keep").sizes.tolist() == [4, 1]
    with pytest.warns(UserWarning, match="site south has 1 row to train on; it is left out"):
        assert fb.data.from_tables(folder, "ill", test=0.0, thin="drop").names == ("north",)


def test_parquet_needs_a_reader(tmp_path, monkeypatch):
    monkeypatch.setattr("fedbayes.data.frames.PARQUET", {"no_such_reader": "read"})
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    with pytest.raises(InputError, match="need pyarrow, polars or pandas; install one, or save the table as"):
        read_tables(tmp_path)


def test_what_each_site_holds(folder):
    held = holdings.holdings(fb.data.summary_of(folder, "ill", test=0.0, seed=None))
    assert held.missing[0].tolist() == [0.25, 0, 0, 0]
    assert held.shift[0, list(held.columns).index("sex")] == pytest.approx(abs(2 / 4 - 2 / 3))
    ages = [np.array([50, 61, 47]), np.array([30, 70, 55, 52])]
    assert held.shift[0, 0] == pytest.approx((ages[0].mean() - ages[1].mean()) / np.concatenate(ages).std())
    assert holdings.site_table(held).row_count == 2
    assert holdings.column_table(held).row_count == 4
    assert holdings.figure(held).axes
    assert agreement.class_by_value(["a", 1.0]) == (None, ("a", "1"))


def test_a_column_that_a_site_never_filled_is_reported():
    full = {"a": np.arange(6.0), "b": np.arange(6.0) ** 2, "ill": np.array(["no", "yes"] * 3, object)}
    empty = {**full, "b": np.full(6, np.nan)}
    with pytest.warns(UserWarning, match="site south, column 'b': all 6 values are missing; what other sites have"):
        fb.data.from_tables({"north": full, "south": empty}, "ill", test=0.0)
