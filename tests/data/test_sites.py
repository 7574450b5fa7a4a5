"""Sites in files of their own: test rows stay with their site, columns are found by name, names are kept."""

import numpy as np
import pytest
import torch

from fedbayes.data import from_arrays, from_clients, from_csv, from_folder, partition

SITES = {"north": 10, "east": 20, "south": 15}


def write(folder, name, rows, columns=("age", "dose", "ill"), base=0.0, **extra):
    """Ages tell the site and the row, doses are -age, ill is 0 or 1."""
    table = {
        "age": [base + i for i in range(rows)],
        "dose": [-(base + i) for i in range(rows)],
        "ill": [i % 2 for i in range(rows)],
        **{key: [value] * rows for key, value in extra.items()},
    }
    head = [*columns, *extra]
    lines = [",".join(str(table[column][i]) for column in head) for i in range(rows)]
    (folder / f"{name}.csv").write_text("\n".join([",".join(head), *lines]) + "\n")


@pytest.fixture
def hospitals(tmp_path):
    """Three files whose columns stand in different orders."""
    orders = [("age", "dose", "ill"), ("ill", "dose", "age"), ("dose", "age", "ill")]
    for base, (name, rows), order in zip((0.0, 1000.0, 2000.0), SITES.items(), orders):
        write(tmp_path, name, rows, order, base)
    return tmp_path


def test_a_site_is_tested_on_its_own_rows(hospitals):
    data = from_csv(hospitals, "ill", kind="classes", test=0.2)
    clients = data.split(partition.natural(), 3)
    assert clients.names == ("east", "north", "south")
    assert clients.test.sizes.tolist() == [4, 2, 3]
    age = data.columns.index("age")
    for k, name in enumerate(clients.names):
        base = {"north": 0, "east": 1000, "south": 2000}[name]
        ages = torch.cat([data.x[clients.train_rows(k), age], data.test_x[clients.test_rows(k), age]])
        assert sorted(ages.tolist()) == [base + i for i in range(SITES[name])]


def test_columns_are_found_by_name(hospitals):
    data = from_csv(hospitals, "ill", kind="classes")
    assert data.columns == ("dose", "age")  # as in the first file, by its name
    age, dose = (data.columns.index(name) for name in ("age", "dose"))
    assert torch.equal(data.x[:, dose], -data.x[:, age])
    assert float(data.x[:, age].min()) >= 0


def test_owners_of_a_column_keep_their_test_rows(tmp_path):
    lines = [f"{i},{i % 3 + 0.5},{'abc'[i % 3]}" for i in range(30)]
    (tmp_path / "t.csv").write_text("\n".join(["x,y,site", *lines]))
    data = from_csv(tmp_path / "t.csv", "y", owner="site", test=0.2)
    clients = data.split(partition.natural(), 3)
    assert clients.names == ("a", "b", "c")
    for k in range(3):
        assert clients.test.sizes[k] == 2
        assert (data.test_x[clients.test_rows(k), 0] % 3 == k).all()
    (tmp_path / "new.csv").write_text("site,y,x\nb,1.5,1\nz,7.5,2\n")  # a site that no one trains
    held = from_csv(tmp_path / "t.csv", "y", owner="site", test=tmp_path / "new.csv")
    clients = held.split(partition.natural(), 3)
    assert (held.owner_names, clients.names) == (("a", "b", "c", "z"), ("a", "b", "c"))
    assert clients.test.sizes.tolist() == [0, 1, 0]


def test_a_test_file_for_all_belongs_to_nobody(hospitals, tmp_path_factory):
    there = tmp_path_factory.mktemp("test")
    write(there, "test", 6)
    data = from_csv(hospitals, "ill", kind="classes", test=there / "test.csv")
    assert data.test_owner is None
    assert len(data.test_x) == 6


@pytest.mark.parametrize(
    ("columns", "extra", "says"),
    [
        (("age", "ill"), {}, r"west\.csv has no column 'dose'; it has age, ill"),
        (("age", "ill"), {"weight": 1}, r"west\.csv has no column 'dose'; it has age, ill, weight"),
        (("age", "dose", "ill"), {"sex": 1}, r"west\.csv has a column 'sex' that the other tables lack"),
        (("age", "dose"), {}, r"west\.csv has no column 'ill'"),
        (("age", "age", "dose", "ill"), {}, r"west\.csv has two columns 'age'"),
    ],
)
def test_columns_that_do_not_match_are_named(hospitals, columns, extra, says):
    write(hospitals, "west", 5, columns, **extra)
    with pytest.raises(ValueError, match=says):
        from_csv(hospitals, "ill", kind="classes")


def test_a_site_keeps_a_row_to_train_on(hospitals):
    write(hospitals, "tiny", 1)
    assert from_csv(hospitals, "ill", kind="classes", test=0.2).owners == 4
    with pytest.raises(ValueError, match=r"test=0\.9 leaves tiny no row to train on"):
        from_csv(hospitals, "ill", kind="classes", test=0.9)


def test_folders_name_their_sites(tmp_path):
    for name in ("left", "right"):
        (tmp_path / name).mkdir()
        np.save(tmp_path / name / "x.npy", np.zeros((3, 2)))
        np.save(tmp_path / name / "y.npy", np.arange(3))
    np.savez(tmp_path / "third.npz", x=np.zeros((2, 2)), y=np.arange(2))
    clients = from_folder(tmp_path).split(partition.natural(), 3)
    assert clients.names == ("left", "right", "third")
    assert "left, right, third" in repr(clients)
    assert clients.pooled().names == ()


def test_no_owner_is_left_out_unasked():
    x = np.zeros((40, 1))
    data = from_clients([(x[:10], np.arange(10) % 2)] * 4).data
    for clients, each in ((3, 1), (1, 3)):
        with pytest.raises(ValueError, match=r"leave out 1 of the 4 owners: set clients=4"):
            data.split(partition.natural(owners_each=each), clients)
    assert len(data.split(partition.natural(some=True), 3)) == 3
    assert data.split(partition.natural(owners_each=2), 2).sizes.tolist() == [20, 20]


AMBIGUOUS = {
    "0 and 1": [0.0, 1.0] * 4,
    "column": np.array([[0.0], [1.0]] * 4),
    "float32": np.array([0, 1, 1, 0, 1], np.float32),
    "three classes": [0.0, 1.0, 2.0] * 3,
    "labels": np.eye(3),
}


@pytest.mark.parametrize("y", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_floating_class_numbers_are_no_silent_regression(y):
    y, x = np.asarray(y), np.zeros((len(y), 2))
    says = "which may be classes or measurements: say kind='classes'.*or kind='real' for a regression"
    with pytest.raises(ValueError, match=says):
        from_arrays(x, y)
    with pytest.raises(ValueError, match=says):
        from_clients([(x, y)])
    assert from_arrays(x, y, kind="real").kind == "real"
    if y.ndim == 1:
        assert from_arrays(x, y, kind="classes").y.dtype == torch.int64


@pytest.mark.parametrize("y", [np.arange(6.0), np.linspace(0, 1, 9), np.zeros(9), [0.0, 1.0, 1.5, 0.0], [3.0, 4.0] * 5])
def test_measurements_stay_a_regression(y):
    assert from_arrays(np.zeros((len(y), 1)), y).kind == "real"


def test_sites_are_looked_at_together():
    """A site whose patients all happen to be 0.0 or 1.0 does not make the others ambiguous."""
    x = np.zeros((6, 1))
    clients = from_clients([(x, np.array([0.0, 1.0] * 3)), (x, np.linspace(0, 3, 6))])
    assert clients.data.kind == "real"


def test_a_table_of_0_and_1_asks_which(hospitals):
    with pytest.raises(ValueError, match="say kind='classes'"):
        from_csv(hospitals, "ill")
    assert from_csv(hospitals, "ill", kind="real").kind == "real"
