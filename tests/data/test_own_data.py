"""A user's own data: arrays, torch data sets, folders of .npy, CSV tables, one a client."""

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from fedbayes.data import from_arrays, from_csv, from_datasets, from_folder, partition

X = np.arange(12, dtype=np.float64).reshape(6, 2)


@pytest.mark.parametrize(
    ("y", "kind", "classes", "shape"),
    [
        ([0, 2, 1, 0, 2, 1], "classes", 3, (6,)),
        (np.linspace(0, 1, 6), "real", 1, (6, 1)),
        (np.zeros((6, 2)), "real", 2, (6, 2)),
        (np.eye(6, dtype=np.int64)[:, :4], "labels", 4, (6, 4)),
        (torch.tensor([True, False] * 3), "classes", 2, (6,)),
    ],
)
def test_the_kind_follows_from_the_targets(y, kind, classes, shape):
    data = from_arrays(X, y)
    assert (data.kind, data.classes, tuple(data.y.shape)) == (kind, classes, shape)
    assert data.x.dtype == torch.float32
    assert data.y.dtype == (torch.int64 if kind == "classes" else torch.float32)
    assert len(data.test_x) == 0


@pytest.mark.parametrize(("given", "kept"), [("uint8", "uint8"), ("int32", "int64"), ("bool", "float32")])
def test_inputs_keep_what_the_network_casts(given, kept):
    assert str(from_arrays(X.astype(given), [0] * 6).x.dtype) == f"torch.{kept}"


def test_standardised_by_training_statistics_only():
    test_x = 100 + X
    data = from_arrays(X, X[:, 0], test_x, test_x[:, 0], standardise=True)
    seen = data.prepare(data.x)
    np.testing.assert_allclose(seen.mean(0), 0, atol=1e-12)
    np.testing.assert_allclose(seen.std(0, correction=0), 1, rtol=1e-12)
    np.testing.assert_array_equal(data.test_x, test_x)  # in their own units
    np.testing.assert_allclose(data.test_y[:, 0], (test_x[:, 0] - X[:, 0].mean()) / X[:, 0].std(), rtol=1e-5)
    np.testing.assert_allclose(data.target_scale.undo(data.test_y)[:, 0], test_x[:, 0], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "options", "says"),
    [
        ((X, [0] * 5), {}, "6 inputs but 5 targets"),
        ((X, [0] * 6, X), {}, "test_x and test_y together"),
        ((X, [0] * 6, X[:, :1], [0] * 6), {}, "same shape and type"),
        ((X, [0, 1, 2, 3, 4, 9]), {"classes": 5}, "label 9 at row 5"),
        ((np.where(X == 3, np.inf, X), [0] * 6), {}, r"training part: x is not finite in 1 of 6 rows \(first: row 1\)"),
        ((X, np.full(6, np.nan)), {}, "training part: y is not finite"),
        ((X, [0] * 6, X, [0] * 5 + [3]), {"classes": 2}, "test part: label 3"),
        ((X, np.full((6, 2), 2)), {}, "labels must be 0 or 1"),
    ],
)
def test_bad_arrays(arguments, options, says):
    with pytest.raises(ValueError, match=says):
        from_arrays(*arguments, **options)


def test_torch_data_sets():
    train = TensorDataset(torch.randint(0, 255, (5, 1, 4, 4), dtype=torch.uint8), torch.arange(5))
    data = from_datasets(train, TensorDataset(*train[:2]))
    assert data.x.equal(train.tensors[0])
    assert (data.classes, len(data.test_x)) == (5, 2)
    assert from_datasets([(np.zeros(3), 1), (np.ones(3), 0)]).y.tolist() == [1, 0]
    with pytest.raises(ValueError, match="give the set a transform"):
        from_datasets([(np.zeros(3), 1), (np.ones(4), 0)])
    with pytest.raises(ValueError, match="train is empty"):
        from_datasets([])


def save(folder, **arrays):
    folder.mkdir(parents=True, exist_ok=True)
    for key, array in arrays.items():
        np.save(folder / f"{key}.npy", array)


def test_a_folder_of_arrays(tmp_path):
    save(tmp_path / "a", x=X, y=np.arange(6), test_x=X[:2], test_y=np.arange(2))
    data = from_folder(tmp_path / "a")
    assert (data.name, len(data), len(data.test_x), data.classes) == ("a", 6, 2, 6)


def test_one_folder_or_file_a_client(tmp_path):
    save(tmp_path / "b/one", x=X, y=np.arange(6), test_x=X[:1], test_y=np.arange(1))
    np.savez(tmp_path / "b/two.npz", x=X[:2], y=np.arange(2), test_x=X[:2], test_y=np.arange(2))
    data = from_folder(tmp_path / "b")
    clients = data.split(partition.natural(), data.owners)
    assert clients.sizes.tolist() == [6, 2]
    assert clients.test.sizes.tolist() == [1, 2]
    save(tmp_path / "b/none", x=X, y=np.arange(6))  # a client without test rows leaves the others theirs
    data = from_folder(tmp_path / "b")
    clients = data.split(partition.natural(), data.owners)
    assert dict(zip(clients.names, clients.test.sizes.tolist())) == {"none": 0, "one": 1, "two": 2}
    save(tmp_path / "b", test_x=X, test_y=np.arange(6))
    assert from_folder(tmp_path / "b").test_owner is None
    assert len(from_folder(tmp_path / "b").test_x) == 6


def test_bad_folders(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no x\.npy"):
        from_folder(tmp_path)
    save(tmp_path / "c", x=X)
    with pytest.raises(FileNotFoundError, match="has no y"):
        from_folder(tmp_path / "c")
    np.save(tmp_path / "c/y.npy", np.array([{}, {}], object), allow_pickle=True)
    with pytest.raises(ValueError, match="plain arrays"):
        from_folder(tmp_path / "c")
    save(tmp_path / "e/one", x=X, y=np.arange(6), test_x=X)
    with pytest.raises(ValueError, match="one has test_x alone: save test_x and test_y together, or neither"):
        from_folder(tmp_path / "e")
    save(tmp_path / "d/one", x=X, y=np.arange(5))
    with pytest.raises(ValueError, match="client one: 6 inputs and 5 targets"):
        from_folder(tmp_path / "d")


def table(path, rows=10, word="t"):
    lines = [f"{i},{i * i},{'ab'[i % 2]},{word}{i % 3}" for i in range(rows)]
    path.write_text("size,weight,site,sort\n" + "\n".join(lines) + "\n")
    return path


def test_a_table_of_real_targets(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b,c\n" + "\n".join(f"{i},{2 * i},{3 * i}" for i in range(10)))
    data = from_csv(path, "c")
    assert (data.kind, data.x.shape, data.test_x.shape) == ("real", (8, 2), (2, 2))
    rows = torch.cat([data.target_scale.undo(data.y), data.target_scale.undo(data.test_y)]).flatten()
    np.testing.assert_allclose(sorted(rows.tolist()), 3 * np.arange(10), atol=1e-5)
    assert float(data.y.mean()) == pytest.approx(0, abs=1e-6)
    two = from_csv(path, ["b", "c"], standardise=False, test=0)
    assert (two.classes, two.shape, len(two.test_x)) == (2, (1,), 0)


def test_a_table_of_words_with_owners(tmp_path):
    path = table(tmp_path / "t.csv")
    data = from_csv(path, "sort", kind="classes", owner="site", test=0.0)
    assert data.class_names == ("t0", "t1", "t2")
    assert data.y.tolist() == [i % 3 for i in range(10)]
    assert data.owner.tolist() == [i % 2 for i in range(10)]
    assert data.shape == (2,)
    assert from_csv(table(path, 12, ""), "sort", kind="classes", owner="site").class_names == ("0", "1", "2")


def test_one_table_a_client(tmp_path):
    for name, rows in (("one", 10), ("two", 5)):
        (tmp_path / f"{name}.csv").write_text("a,y\n" + "\n".join(f"{i},{i}" for i in range(rows)))
    for path in (tmp_path, [tmp_path / "one.csv", tmp_path / "two.csv"]):
        data = from_csv(path, "y")
        assert data.split(partition.natural(), 2).sizes.tolist() == [8, 4]
    held = from_csv(tmp_path / "one.csv", "y", test=tmp_path / "two.csv")
    assert (len(held), len(held.test_x)) == (10, 5)


@pytest.mark.parametrize(
    ("text", "options", "says"),
    [
        ("a,b\n1,2\n", {"target": "c"}, "no column 'c'; it has a, b"),
        ("a,b\n", {"target": "b"}, "has no rows"),
        ("", {"target": "b"}, "no column"),
        ("a,b\n1,2,3\n", {"target": "b"}, "line 2: 3 fields under 2 columns"),
        ("a,b\n\n1,2\n\n1,2,3\n", {"target": "b"}, "line 5: 3 fields under 2 columns"),
        ("a,b\nred,2\n", {"target": "b"}, "column 'a', line 2: 'red' is not a number: .* from_tables takes"),
        ("a,b\n1,red\n", {"target": "b"}, "kind='classes'"),
        ("a,b\n1,nan\n2,3\n", {"target": "b", "test": 0.0}, "y is not finite"),
        ("a,b\n1,2\n", {"target": "b", "test": 1.5}, "share in"),
        ("a,b\n1,2\n", {"target": ["a", "b"], "kind": "classes"}, "one column"),
    ],
)
def test_bad_tables(tmp_path, text, options, says):
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=says):
        from_csv(tmp_path / "t.csv", **options)


def test_whole_numbers_may_be_many_classes_but_not_a_million():
    assert from_arrays(np.zeros((100, 2)), np.arange(100)).classes == 100
    with pytest.raises(ValueError, match="label 2000000 would make 2000001 classes: number the classes from 0"):
        from_arrays(np.zeros((1, 2)), np.array([2_000_000]))
