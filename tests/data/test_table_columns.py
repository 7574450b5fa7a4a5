"""Columns of tables: what no number can be made of is refused by a line that names the column; codes stay apart."""

import numpy as np
import pytest

import fedbayes as fb
from fedbayes.data.values import canonical
from fedbayes.errors import InputError

LABELS = ["no", "yes"] * 5


def tables(**columns):
    """Two sites that have the same columns, and labels."""
    return {site: {**columns, "ill": LABELS} for site in ("north", "south")}


@pytest.mark.parametrize("empty", [[""] * 10, np.full(10, np.nan)], ids=["texts", "numbers"])
@pytest.mark.parametrize("kind", [None, "number", "date", "category", ["low", "high"]])
def test_a_column_without_values_is_named_whatever_it_is_told_to_be(empty, kind):
    kinds = {} if kind is None else {"ca": kind}
    with pytest.raises(InputError, match=r"column 'ca' has no value at any site \(north, south\); drop = \['ca'\]"):
        fb.data.from_tables(tables(age=np.arange(10.0), ca=empty), "ill", kinds=kinds)


@pytest.mark.parametrize("kind", [None, "number"])
@pytest.mark.parametrize("size", ["1e200", "-1e101", 1e300])
def test_numbers_whose_squares_are_none_are_refused(size, kind):
    kinds = {} if kind is None else {"age": kind}
    says = r"site north, column 'age': -?1e\+\d+ is no measurement, .*; mend it, or leave"
    with pytest.raises(InputError, match=says):
        fb.data.from_tables(tables(age=[*range(9), size]), "ill", kinds=kinds, test=0.0)


@pytest.mark.parametrize(
    ("word", "code"),
    [
        *((word, "1") for word in (1, 1.0, True, "1", "1.0", "1.", "+1", "01", " 1 ")),
        *((word, "0") for word in (0, -0.0, "-0", "00", "0.0")),
        *((word, "-120") for word in (-120, "-120.00")),
        *((word, word) for word in ("1E2", "1e0", "2_0", "1_000", "0x1", "1.5", "1.50", "inf", "A1", "")),
        ("9007199254740993", "9007199254740993"),
        ("1" * 5000, "1" * 5000),
        (2**2000, str(2**2000)),
        (1.5, "1.5"),
        (None, None),
        (float("nan"), None),
    ],
)
def test_categories_are_one_where_they_are_the_same_decimal(word, code):
    assert canonical(np.array([word], object)).tolist() == [code]


def test_codes_with_underscores_are_no_numbers():
    ward = ["1_2", "3_4"] * 5
    coding = fb.data.from_tables(tables(ward=ward), "ill", test=0.0).data.coding
    assert coding.columns[0].values == ("1_2", "3_4")
    with pytest.raises(InputError, match=r"column 'ward': '1_2' \(row 1\) is not a number"):
        fb.data.from_tables(tables(ward=ward), "ill", kinds={"ward": "number"}, test=0.0)


@pytest.mark.parametrize(
    ("y", "said"),
    [([0, 1], "0 and 1"), ([1, 2], "1 and 2"), ([-1, 1], "-1 and 1"), ([1, 2, 3], "1 to 3"), ([0, 1, 2, 3], "0 to 3")],
)
@pytest.mark.parametrize("kind", [float, str])
def test_few_whole_numbers_as_target_are_asked_about(y, said, kind):
    sites = {site: {"age": np.arange(60.0), "ill": np.array([*map(kind, y)] * (60 // len(y)))} for site in ("a", "b")}
    says = f"target 'ill' holds the whole numbers {said}, which may be classes or measurements; say kind = "
    with pytest.raises(InputError, match=says):
        fb.data.from_tables(sites, "ill")
    for kind in ("classes", "real"):
        assert fb.data.from_tables(sites, "ill", kind=kind).data.kind == kind


@pytest.mark.parametrize("y", [range(20), range(40, 61), [1, 2, 2.5] * 4, [10, 20, 30] * 4, [5] * 9, ["1", "", "1.5"]])
def test_other_numbers_as_target_are_measurements(y):
    sites = {"a": {"age": np.arange(float(len(y))), "cost": list(y)}}
    assert fb.data.summary_of(sites, "cost", test=0.0)[0].target.kind == "number"


def test_a_target_beyond_all_bounds_is_no_class():
    sites = tables(age=range(10), dose=range(10))
    for size, says in (("1e200", "1e\\+200 is no measurement"), (np.inf, "the value of row 10 is infinite")):
        sites["south"]["age"] = [*range(9), size]
        with pytest.raises(InputError, match=f"site south, target 'age': {says}"):
            fb.data.from_tables(sites, "age", test=0.0)
