"""Natural federations from tiny files, and by the real ones' counts; leaving out one site."""

import io

import numpy as np
import pytest
import torch

from fedbayes.data import CATALOGUE, from_arrays, from_clients, load
from fedbayes.data.survival import cut_times
from fedbayes.errors import InputError
from fedbayes.experiments.build import clients_of
from fedbayes.experiments.experiment import Experiment

SITES = ("cleveland", "hungarian", "switzerland", "va")


def write_patients(home, rows=12):
    (home / "heart-disease").mkdir()
    random = np.random.default_rng(0)
    for k, site in enumerate(SITES):
        lines = []
        for i in range(rows):
            numbers = [50 + i, i % 2, 1 + i % 4, 120 + i, 200 + 10 * k + i, 0, i % 3, 150, 0, random.random()]
            lines.append(",".join(map(str, [*numbers, "?", "?", "?", i % 3])))
        lines.append(lines[0].replace("120", "?"))
        (home / f"heart-disease/processed.{site}.data").write_text("\n".join(lines) + "\n")


def test_hospitals_keep_their_own_rows_and_tests(home):
    write_patients(home)
    data = load("heart-disease")
    clients = data.sites()
    assert clients.names == SITES
    assert (clients.sizes.tolist(), clients.test.sizes.tolist()) == ([7] * 4, [5] * 4)
    assert data.shape == (13,) == (len(data.columns),)
    for k in range(4):
        own = data.x[clients.train[k]]
        torch.testing.assert_close(own.mean(0), torch.zeros(13), atol=1e-6, rtol=0)
        assert set(own.std(0).round(decimals=4).tolist()) == {0.0, 1.0}  # those that are constant there are zero
    raw = load("heart-disease", standardise="none")
    assert raw.x[clients.train[1], 3].min() >= 210
    assert torch.equal(raw.y, data.y)
    other = load("heart-disease", split=1, standardise="pooled")
    assert not torch.equal(other.y, data.y) or not torch.equal(other.test_y, data.test_y)
    torch.testing.assert_close(other.x.mean(0), torch.zeros(13), atol=1e-5, rtol=0)
    with pytest.raises(ValueError, match="standardise is one of site, pooled, none"):
        load("heart-disease", standardise="own")


def test_a_damaged_table_is_one_line(home):
    write_patients(home)
    (home / "heart-disease/processed.va.data").write_text("1,2,3\n")
    with pytest.raises(InputError, match="14 columns"):
        load("heart-disease")


def test_regions_and_their_survival(home):
    (home / "tcga-brca").mkdir()
    table, folds = io.StringIO(), io.StringIO()
    table.write("pid,age,E,T\n")
    folds.write("pid,fold,fold2\n")
    for i in range(61):
        table.write(f"p{i},{40 + i},{i % 3 == 0:d},{100 + i}\n")
        part = "test" if i % 5 == 4 else "train"
        if i < 60:  # the last has no region
            folds.write(f"p{i},{part},{part}_{i // 10}\n")
    (home / "tcga-brca/brca.csv").write_text(table.getvalue())
    (home / "tcga-brca/train_test_split.csv").write_text(folds.getvalue())
    data = load("tcga-brca", intervals=4)
    clients = data.sites()
    assert (clients.sizes.tolist(), clients.test.sizes.tolist()) == ([8] * 6, [2] * 6)
    assert (data.kind, data.classes, data.columns, len(data.times)) == ("survival", 1, ("age",), 4)
    assert data.y[0].tolist() == [100, 1]
    other = load("tcga-brca", split=3)
    assert other.sites().sizes.tolist() == [8] * 6
    assert sorted(torch.cat([other.y, other.test_y])[:, 0].tolist()) == list(range(100, 160))


def test_mine_fields_from_both_kinds_of_files(home):
    from scipy.io import savemat

    random = np.random.default_rng(1)
    y = np.tile(np.repeat([0, 1], [16, 4]), 3)
    x, field = random.normal(size=(60, 9)).astype(np.float32), np.repeat(np.arange(3), 20)
    (home / "landmine").mkdir()
    np.savez(home / "landmine/landmine.npz", x=x, y=y, field=field)
    data = load("landmine")
    clients = data.sites()
    assert clients.label_counts().tolist() == clients.test_label_counts().tolist() == [[8, 2]] * 3
    (home / "landmine/landmine.npz").unlink()
    cells = [np.empty(3, object) for _ in range(2)]
    for k in range(3):
        cells[0][k], cells[1][k] = x[field == k].astype(float), y[field == k, None]
    savemat(home / "landmine/LandmineData.mat", {"feature": cells[0], "label": cells[1]})
    again = load("landmine")
    assert torch.equal(again.x, data.x)
    assert torch.equal(again.test_y, data.test_y)


def test_roles_and_the_next_character(home):
    (home / "shakespeare").mkdir()
    (home / "shakespeare/input.txt").write_text("A:\nab\n\nB:\nb\n\nA:\nba\n\nB:\na\n\nC:\nab\n")
    data = load("shakespeare", length=3, every=1, speeches=2, train=0.5)
    clients = data.sites()
    assert clients.names == ("A", "B")
    spelled = ["".join(data.vocabulary[i] for i in row if i) for row in data.x[clients.train[0]]]
    assert spelled == ["", "a", "ab"]
    assert [data.vocabulary[1 + c] for c in data.y[clients.train[0]]] == ["a", "b", "\n"]
    assert [data.vocabulary[1 + c] for c in data.test_y[clients.test[1]]] == ["a", "\n"]
    with pytest.raises(InputError, match="no role has 9 speeches"):
        load("shakespeare", speeches=9)


def test_survival_targets_are_checked():
    x, y = np.zeros((3, 2), np.float32), np.array([[1.0, 0], [2, 1], [3, 1]])
    data = from_arrays(x, y, kind="survival")
    assert (data.classes, data.times) == (1, (2.0, 3.0))
    assert from_arrays(x, y, kind="survival", times=[1, 5]).times == (1.0, 5.0)
    assert from_clients([(x, y), (x, y)], kind="survival").data.times == (2.0, 3.0)
    with pytest.raises(ValueError, match="are time and event swapped"):
        from_arrays(x, y[:, ::-1].copy(), kind="survival")
    with pytest.raises(ValueError, match="time -1 at row 0"):
        from_arrays(x, y - [2, 0], kind="survival")
    with pytest.raises(ValueError, match="times must rise"):
        from_arrays(x, y, kind="survival", times=[2, 1])
    with pytest.raises(ValueError, match=r"expected \[n, 2\]"):
        from_arrays(x, y[:, 0], kind="survival")


def test_cuts_have_equally_many_events_between_them():
    y = torch.stack([torch.arange(1.0, 41), (torch.arange(40) % 2).float()], 1)
    cuts = cut_times(y, 5)
    events = y[y[:, 1] > 0, 0]
    assert torch.bucketize(events, torch.tensor(cuts, dtype=torch.float32)).bincount().tolist() == [4] * 5
    assert cut_times(y * torch.tensor([1.0, 0.0]), 5) == (40.0,)


def test_a_site_that_is_left_out_is_the_test_set():
    pairs = [(np.full((n, 2), k, np.float32), np.arange(n) % 2) for k, n in enumerate((4, 6, 5))]
    clients = from_clients(pairs, [(x[:2], y[:2]) for x, y in pairs])
    rest = clients.without(1)
    assert rest.sizes.tolist() == [4, 5]
    assert set(rest.data.x[rest.train.flat].flatten().tolist()) == {0.0, 2.0}
    assert rest.data.test_x.unique().tolist() == [1.0]
    assert (len(rest.data.test_x), rest.test.sizes.tolist()) == (8, [0, 0])
    with pytest.raises(ValueError, match="no client 3 to leave out: give a number from 0 to 2"):
        clients.without(3)
    with pytest.raises(ValueError, match="leaves nobody to train"):
        from_clients(pairs[:1]).without(0)


def test_an_experiment_leaves_a_site_out(home):
    write_patients(home)
    x = Experiment(data="heart-disease", partition="natural", clients=4, leave_out="va")
    assert clients_of(x).names == SITES[:3]
    with pytest.raises(InputError, match="no client 'vaa' to leave out: give a number from 0 to 3"):
        clients_of(Experiment(data="heart-disease", partition="natural", clients=4, leave_out="vaa"))


@pytest.mark.data
@pytest.mark.usefixtures("real")
@pytest.mark.parametrize("name", ["heart-disease", "tcga-brca", "landmine", "shakespeare"])
def test_the_real_federations(name):
    data, entry = load(name), CATALOGUE[name]
    assert (len(data), len(data.test_x), data.kind, data.classes) == (
        entry.train,
        entry.test,
        entry.kind,
        entry.classes,
    )
    sizes = data.sites().sizes.tolist()
    published = {"heart-disease": [199, 172, 30, 85], "tcga-brca": [248, 156, 164, 129, 129, 40]}
    assert sizes == published.get(name, sizes)
