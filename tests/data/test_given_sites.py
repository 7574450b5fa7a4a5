"""Sites as users have them: torch data sets, rows with named columns, names, labels that are words."""

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from fedbayes.data import from_arrays, from_clients, from_datasets

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 0, 1, 1, 0])
WORDS = np.array(["ill", "well", "ill", "well", "well", "ill"])


class Named:
    """Rows as mappings, as Hugging Face's `datasets` give them."""

    def __init__(self, **columns):
        self.columns = columns

    def __len__(self):
        return 6

    def __getitem__(self, i):
        return {name: values[i] for name, values in self.columns.items()}


class Endless(IterableDataset):
    def __iter__(self):
        yield X[0], Y[0]


WHOLE = TensorDataset(X, Y)


@pytest.mark.parametrize(
    "sites",
    [
        [(X[:3], Y[:3]), (X[3:], Y[3:])],
        [Subset(WHOLE, range(3)), Subset(WHOLE, range(3, 6))],
        [TensorDataset(X[:3], Y[:3]), (X[3:].numpy(), Y[3:].tolist())],
        [(X[:3].numpy().astype(">f4"), Y[:3].numpy().astype(">i8")), (X[3:].numpy().astype(np.longdouble), Y[3:])],
        [Subset([(x.numpy().astype(">f4"), int(y)) for x, y in WHOLE], rows) for rows in (range(3), range(3, 6))],
        {"north": (X[:3], WORDS[:3]), "south": (X[3:], list(WORDS[3:]))},
        {"north": (X[:3], WORDS[:3].astype(object)), "south": (X[3:], WORDS[3:])},
    ],
)
def test_sites_of_all_kinds_are_the_same_federation(sites):
    clients = from_clients(sites, test=sites if isinstance(sites, dict) else list(sites))
    assert torch.equal(clients.data.x, X)
    assert torch.equal(clients.data.y, Y)
    assert torch.equal(clients.data.test_y, Y)
    assert clients.sizes.tolist() == [3, 3]
    if isinstance(sites, dict):
        assert clients.names == ("north", "south")
        assert clients.data.class_names == ("ill", "well")


def test_rows_with_named_columns():
    plain = from_datasets(Named(image=X.numpy(), label=Y.tolist()))
    assert torch.equal(plain.x, X)
    assert torch.equal(plain.y, Y)
    chosen = from_datasets(Named(a=X.numpy(), b=WORDS, c=Y), columns=("a", "b"))
    assert torch.equal(chosen.y, Y)
    with pytest.raises(ValueError, match="'aa': did you mean 'a'"):
        from_datasets(Named(a=X.numpy(), b=WORDS), columns=("aa", "b"))
    with pytest.raises(ValueError, match="rows with a, b, c: say which are x and y"):
        from_datasets(Named(a=X, b=X, c=Y))


def test_words_take_the_order_they_are_given():
    data = from_arrays(X, WORDS, X, WORDS, class_names=("well", "ill", "dead"))
    assert data.y.tolist() == (1 - Y).tolist()
    assert data.classes == 3
    with pytest.raises(ValueError, match="'ill', which is none of the class_names"):
        from_arrays(X, WORDS, class_names=("well", "sick"))


@pytest.mark.parametrize(
    ("sites", "says"),
    [
        ([DataLoader(WHOLE)], "client 0 is a loader of batches: give its data set"),
        ([Endless()], "client 0 is a Endless: give .x, y., or a torch data set with a length"),
        ([X], "client 0 is a Tensor: give"),
        ([({"image": X, "age": X[:2]}, Y)], "client 0: field age has 2 rows, the first 6: give as many"),
        ([(X, torch.zeros(6, 4, 4).long())], r"y has shape \[6, 4, 4\], a target for each place"),
        ([([[1.0], [1.0, 2.0]], [0, 1])], "x has rows of several shapes"),
        ([(np.array([["a", "b"]] * 6), Y)], "x holds str.* values, not numbers: for tables with texts use from_tables"),
        ([(X, WORDS), (X, Y)], "words at some sites and numbers at others"),
    ],
)
def test_what_can_not_be_taken_is_said_in_one_line(sites, says):
    with pytest.raises(ValueError, match=says):
        from_clients(sites)


def test_sets_of_hugging_face_are_sites_with_names_and_classes():
    datasets = pytest.importorskip("datasets")
    image = pytest.importorskip("PIL.Image")
    pixels = np.random.default_rng(0).integers(0, 255, (6, 5, 4, 3)).astype("uint8")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["ill", "well"])})
    table = {"image": [image.fromarray(p) for p in pixels], "label": [0, 1] * 3}
    one = datasets.Dataset.from_dict(table, features=features)
    clients = from_clients(datasets.DatasetDict({"north": one, "south": one.select(range(4))}))
    assert clients.names == ("north", "south")
    assert clients.sizes.tolist() == [6, 4]
    assert clients.data.class_names == ("ill", "well")
    assert np.array_equal(clients.data.x[:6].numpy(), np.moveaxis(pixels, -1, 1))  # channels first
    assert from_datasets(one).class_names == ("ill", "well")
