"""Data sets and clients: rows, test rows of the same mix, held-out rows, and what the network sees."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedbayes.data import Prepare, Scale, from_arrays, from_clients, load, partition


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_embedded_sets(digits):
    assert (len(digits), len(digits.test_x), digits.shape, digits.classes) == (1442, 355, (1, 8, 8), 10)
    assert digits.x.dtype == torch.float32
    assert (float(digits.x.min()), float(digits.x.max())) == (0, 1)
    assert torch.bincount(digits.test_y).min() >= 34  # A fifth of every class.
    table = load("diabetes")
    assert (table.kind, table.classes, table.x.shape, table.y.shape) == ("real", 1, (354, 10), (354, 1))
    assert table.y.mean().abs() < 1e-6
    assert table.target_scale.undo(table.test_y).min() >= 25  # The original units.


def test_a_client_is_rows_of_data_held_once(digits):
    clients = digits.split(partition.dirichlet(0.5), 20, seed=3)
    assert len(clients) == 20
    assert clients.data is digits
    assert sum(len(clients.train_rows(k)) for k in range(20)) == int(clients.sizes.sum()) == 1442
    assert clients.train_rows(-1).equal(clients.train_rows(19))
    with pytest.raises(IndexError, match="client 20 of 20"):
        clients.train_rows(20)
    counted = torch.stack([torch.bincount(digits.y[clients.train_rows(k)], minlength=10) for k in range(20)])
    assert clients.label_counts().equal(counted)


def test_the_seed_decides_and_test_rows_do_not_disturb_training_rows(digits):
    one, two = (digits.split(partition.dirichlet(0.5), 20, seed=3, test_per_client=n) for n in (None, 5))
    assert one.train.flat.equal(two.train.flat)
    assert not one.train.flat.equal(digits.split(partition.dirichlet(0.5), 20, seed=4).train.flat)


@settings(max_examples=25)
@given(clients=st.integers(1, 30), seed=st.integers(0, 1000), each=st.integers(1, 30))
def test_test_rows_have_the_mix_of_the_training_rows(clients, seed, each):
    data = load("digits")
    split = data.split(partition.dirichlet_own(), clients, seed, test_per_client=each)
    assert split.test.sizes.tolist() == [each] * clients
    train, test = split.label_counts(), split.test_label_counts()
    assert ((test / each - train / train.sum(1, keepdim=True)).abs() <= 1 / each + 1e-6).all()
    assert all(len(torch.unique(rows)) == each for rows in split.test)


def test_test_rows_overlap_only_when_a_class_has_run_out(digits):
    split = digits.split(partition.labels_per_client(2), 10, test_per_client=10)
    assert len(torch.unique(split.test.flat)) == 100
    split = digits.split(partition.labels_per_client(2), 50)
    assert 0 < int(split.test.sizes.min()) < 100  # Two classes of the test part have no hundred rows.
    with pytest.raises(ValueError, match="lower test_per_client"):
        digits.split(partition.labels_per_client(2), 50, test_per_client=100)


def test_real_targets_get_equal_test_shares():
    split = load("diabetes").split(partition.iid(), 4, test_per_client=22)
    assert split.test.sizes.tolist() == [22] * 4
    assert len(torch.unique(split.test.flat)) == 88
    with pytest.raises(ValueError, match="no labels to count"):
        split.label_counts()


def test_no_test_part_means_no_test_rows():
    data = from_arrays(np.zeros((6, 2), np.float32), [0, 1] * 3)
    assert data.split(partition.iid(), 3).test.sizes.tolist() == [0, 0, 0]


@settings(max_examples=25)
@given(fraction=st.floats(0, 0.99), clients=st.integers(1, 200), seed=st.integers(0, 99))
def test_holdout_cuts_a_share_and_leaves_everyone_a_row(fraction, clients, seed):
    split = load("digits").split(partition.dirichlet(0.2), clients, seed)
    kept, held = split.holdout(fraction, seed)
    assert int(kept.sizes.min()) >= 1
    for k in range(clients):
        n = int(split.sizes[k])
        assert len(held[k]) == min(round(n * fraction), n - 1)
        assert torch.cat([kept.train_rows(k), held[k]]).sort()[0].equal(split.train_rows(k).sort()[0])
    assert kept.test is split.test


def test_server_rows_are_at_no_client(digits):
    split = digits.split(partition.iid(server=0.25), 5)
    assert len(split.server) == 360
    assert not torch.isin(split.train.flat, split.server).any()


def test_a_users_own_partition_is_a_function(digits):
    split = digits.split(lambda labels, clients, rng: [np.arange(k, 1442, clients) for k in range(clients)], 3)
    assert split.train_rows(1)[:3].tolist() == [1, 4, 7]
    for own, says in (
        (lambda y, k, rng: [[0]], "rows for 1 clients"),
        (lambda y, k, rng: [[0], []], "client 1 without a row"),
        (lambda y, k, rng: [[0], [9999]], "outside 0..1441"),
    ):
        with pytest.raises(ValueError, match=says):
            digits.split(own, 2)


def test_prepare_casts_and_normalises_under_vmap():
    x = torch.randint(0, 256, (4, 5, 3, 6, 6), dtype=torch.uint8)
    prepare = Prepare((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    mean, std = (torch.tensor(v).reshape(3, 1, 1) for v in (prepare.mean, prepare.std))
    expected = (x.float() / 255 - mean) / std
    torch.testing.assert_close(torch.vmap(prepare)(x), expected)
    torch.testing.assert_close(prepare(x[0, 0]), expected[0, 0])
    torch.testing.assert_close(prepare(x.float() / 255), expected)
    assert Prepare()(x).dtype == torch.float32
    tokens = torch.arange(4)
    assert Prepare()(tokens) is tokens


def test_scale_gives_original_units_back_and_survives_constant_columns():
    values = torch.tensor([[1.0, 0.975], [3.0, 0.975], [8.0, 0.975]])
    scale = Scale.of(values)
    z = scale.apply(values)
    assert z[:, 0].std(correction=0) == pytest.approx(1)
    assert z[:, 1].abs().max() < 1e-6
    torch.testing.assert_close(scale.undo(z), values)


def test_natural_clients_keep_their_rows_and_their_own_tests():
    pairs = [(np.full((n, 2), n, np.float32), np.zeros(n, np.int64)) for n in (3, 1, 2)]
    clients = from_clients(pairs, test=[(np.full((1, 2), -n, np.float32), [0]) for n in (3, 1, 2)])
    assert clients.sizes.tolist() == [3, 1, 2]
    assert [float(clients.data.test_x[clients.test_rows(k)][0, 0]) for k in range(3)] == [-3, -1, -2]
    shared = from_clients(pairs, test=(np.zeros((5, 2), np.float32), [0] * 5), classes=2)
    assert shared.test.sizes.tolist() == [5, 5, 5]
    assert shared.data.classes == 2


ROW = (np.zeros((2, 3), np.float32), np.array([0, 1]))


@pytest.mark.parametrize(
    ("clients", "options", "says"),
    [
        ([], {}, "at least one"),
        ([ROW, (np.zeros((0, 3), np.float32), np.array([], np.int64))], {}, "client 1 has no rows: leave it out"),
        ([([], []), ROW], {}, "client 0 has no rows"),
        ([ROW, (np.array([[0, np.nan, 0]], np.float32), [0])], {}, r"client 1: x is not finite in 1 of 1 rows .*drop"),
        ([ROW, (np.zeros((1, 3), np.float32), [7])], {"classes": 5}, r"client 1: label 7 at row 0 is outside 0\.\.4"),
        ([ROW, (np.zeros((1, 3), np.float32), [-1])], {}, "client 1: label -1"),
        ([ROW, (np.zeros((1, 4), np.float32), [0])], {}, "client 1: x is .* make them equal"),
        ([ROW, (np.zeros((2, 3), np.float32), [0])], {}, "client 1: 2 inputs but 1 targets"),
        ([ROW], {"test": [ROW, ROW]}, "test has 2 entries"),
        ([(np.zeros((1, 3), np.float32), np.array([np.inf], np.float32))], {}, "client 0: y is not finite"),
        ([ROW], {"kind": "words"}, "kind is"),
        ([(np.zeros((1, 3), np.float32), [0.5])], {"kind": "classes"}, "kind='real'"),
    ],
)
def test_bad_clients_are_named(clients, options, says):
    with pytest.raises(ValueError, match=says):
        from_clients(clients, **options)
