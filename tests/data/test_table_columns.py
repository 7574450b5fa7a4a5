"""Columns of tables: what no number can be made of is refused by one line that names the column, and codes stay apart."""

import numpy as np
import pytest

import fedbayes as fb
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
