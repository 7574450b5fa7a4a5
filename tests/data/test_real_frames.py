"""Frames of pandas, polars and pyarrow, and their Parquet files, are read as the same table of plain columns is."""

import math
from datetime import UTC, date, datetime
from decimal import Decimal

import numpy as np
import pytest
import torch

import fedbayes as fb
from fedbayes.data.lists import columns_of_lists
from fedbayes.errors import InputError

COLUMNS = {
    "age": [61.5, None, 47.0, 52.25, 70.0, 38.5],
    "visits": [1, 4, 2, 2, 7, 3],
    "smokes": [True, False, False, True, True, False],
    "ward": ["a", "b", None, "a", "c", "b"],
    "seen": ["2024-05-31", "2024-06-01", "2023-12-24", "2024-01-01", "2024-02-29", "2022-07-15"],
    "grade": ["low", "mid", "high", "mid", "low", "high"],
    "ill": ["yes", "no", "yes", "no", "yes", "no"],
}
GRADES = ["low", "mid", "high"]


def pandas_frame():
    pandas = pytest.importorskip("pandas", reason="pandas is not installed")
    frame = pandas.DataFrame({name: values for name, values in COLUMNS.items() if name != "grade"})
    frame["seen"] = pandas.to_datetime(frame["seen"])
    frame["grade"] = pandas.Categorical(COLUMNS["grade"], GRADES, ordered=True)
    return frame[list(COLUMNS)]


def polars_frame():
    polars = pytest.importorskip("polars", reason="polars is not installed")
    return polars.DataFrame(COLUMNS).with_columns(
        polars.col("seen").str.to_date(), polars.col("grade").cast(polars.Enum(GRADES))
    )


def arrow_table():
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
    table = pyarrow.table(COLUMNS)
    days = pyarrow.array([date.fromisoformat(day) for day in COLUMNS["seen"]], pyarrow.date32())
    return table.set_column(table.schema.get_field_index("seen"), "seen", days)


FRAMES = {"pandas": pandas_frame, "polars": polars_frame, "pyarrow": arrow_table}


def plain():
    """The same as columns of numpy."""
    numbers = {"age": [math.nan if v is None else v for v in COLUMNS["age"]], "visits": COLUMNS["visits"]}
    words = {name: np.array(COLUMNS[name], object) for name in ("ward", "seen", "grade", "ill")}
    numbers["smokes"] = COLUMNS["smokes"]
    table = {**{name: np.array(values, float) for name, values in numbers.items()}, **words}
    return {name: table[name] for name in COLUMNS}


def clients_of(table):
    return fb.data.from_tables({"basel": table}, "ill", kinds={"grade": GRADES}, test=0.0)


def same(ours, theirs):
    assert ours.data.coding.seen == theirs.data.coding.seen
    torch.testing.assert_close(ours.data.prepare(ours.data.x), theirs.data.prepare(theirs.data.x))
    assert ours.data.y.tolist() == theirs.data.y.tolist()


@pytest.mark.parametrize("library", FRAMES)
def test_a_frame_is_the_table_of_its_columns(library):
    same(clients_of(FRAMES[library]()), clients_of(plain()))


@pytest.mark.parametrize("library", FRAMES)
def test_so_is_a_parquet_file_that_it_wrote(library, tmp_path):
    frame, path = FRAMES[library](), tmp_path / "basel.parquet"
    if library == "pandas":
        pytest.importorskip("pyarrow", reason="pandas writes Parquet by pyarrow, which is not installed")
        frame.to_parquet(path)
    elif library == "polars":
        frame.write_parquet(path)
    else:
        from pyarrow import parquet

        parquet.write_table(frame, path)
    same(fb.data.from_tables([path], "ill", kinds={"grade": GRADES}, test=0.0), clients_of(plain()))


@pytest.mark.parametrize("library", FRAMES)
def test_a_frame_to_predict_needs_no_target(library):
    run = fb.fit("linear", clients_of(plain()), rounds=1, evaluate_every=1)
    frame, table = FRAMES[library](), plain()
    torch.testing.assert_close(run.predict(frame).probs, run.predict(table).probs)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_an_estimator_takes_a_frame(library):
    frame = FRAMES[library]()
    x = frame.drop(columns="ill") if library == "pandas" else frame.drop("ill")
    model = fb.FederatedClassifier(rounds=1).fit(x, COLUMNS["ill"], sites=["basel", "cadiz"] * 3)
    assert model.predict_proba(x).shape == (6, 2)
    assert model.n_features_in_ == len(COLUMNS) - 1


class Column:
    """Stands for a column of an Arrow table, where that is not installed."""

    def __init__(self, values):
        self.to_pylist = lambda: values


class ArrowLike:
    def __init__(self, **columns):
        self.column_names, self.schema = list(columns), self
        self.column = {name: Column(values) for name, values in columns.items()}.__getitem__

    def field(self, name):
        return Field()


class Field:
    type = object()


def test_lists_of_values_are_numbers_dates_or_texts():
    days = [date(1970, 1, 2), None, date(2024, 2, 29)]
    moments = [datetime(1970, 1, 1, 12), datetime(1970, 1, 3, tzinfo=UTC), None]
    table = ArrowLike(n=[1, None, Decimal("2.5")], on=days, at=moments, word=[" a ", "?", None])
    columns = columns_of_lists(table, ("?",))
    np.testing.assert_array_equal(columns["n"].data, [1, np.nan, 2.5])
    np.testing.assert_array_equal(columns["on"].data, [1, np.nan, 19782])
    np.testing.assert_array_equal(columns["at"].data, [0.5, 2, np.nan])
    assert columns["word"].data.tolist() == ["a", None, None]
    assert [column.kind for column in columns.values()] == ["number", "date", "date", ""]
    with pytest.raises(InputError, match="column 'c' of the data frame holds dict; turn it into numbers"):
        columns_of_lists(ArrowLike(c=[{}]), ())
