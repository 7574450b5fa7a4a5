"""Text and regression tables from tiny files, and the made sets."""

import lzma
import zipfile

import numpy as np
import pytest
import torch

from fedbayes.data import load, partition, scaled
from fedbayes.data.text import characters, encode, vocabulary_of, words


def write_titles(home, train="体育 新闻\t1\n财经a\t0\n新闻\t1\n", test="新球\t0\n"):
    folder = home / "thucnews"
    folder.mkdir(exist_ok=True)
    (folder / "class.txt").write_text("money\nsport\n")
    for part, text in (("train", train), ("test", test), ("dev", test)):
        (folder / f"{part}.txt.xz").write_bytes(lzma.compress(text.encode()))


def test_headlines_become_padded_numbers(home):
    write_titles(home)
    data = load("thucnews", length=5)
    assert data.x.dtype == torch.int64
    assert data.x.shape == (3, 5)
    assert data.y.tolist() == [1, 0, 1]
    assert data.class_names == ("money", "sport")
    assert data.vocabulary[:4] == ("<pad>", "<unknown>", "新", "闻")
    spelled = "".join(data.vocabulary[i] for i in data.x[0] if i)
    assert spelled == "体育新闻"
    assert data.x[2].tolist()[2:] == [0, 0, 0]
    assert data.test_x[0].tolist() == [data.vocabulary.index("新"), 1, 0, 0, 0]  # The second was never trained on.
    assert data.prepare(data.x) is data.x


def test_the_vocabulary_is_cut_by_frequency(home):
    write_titles(home)
    assert load("thucnews", size=4).vocabulary == ("<pad>", "<unknown>", "新", "闻")
    assert "体育" in load("thucnews", tokens="word").vocabulary
    assert load("thucnews", tokens=lambda text: [text]).vocabulary[2:] == ("体育 新闻", "新闻", "财经a")


def test_tokens():
    assert characters("a 体\u3000b") == ["a", "体", "b"]
    assert words("Hello, 2 体育新 x_y 国") == ["hello", "2", "体育", "育新", "x", "y", "国"]
    assert vocabulary_of([["b", "a", "b"], ["a", "c"]], 4) == ("<pad>", "<unknown>", "a", "b")
    assert encode([["a", "z", "a", "a"], []], ("<pad>", "<unknown>", "a"), 3).tolist() == [[2, 1, 2], [0, 0, 0]]


def test_cnews_whole_and_in_part(home):
    names = ("体育", "财经", "房产", "家居", "教育", "科技", "时尚", "时政", "游戏", "娱乐")
    lines = "".join(f"{name}\t文章{i}\n" for i in range(5) for name in names)
    (home / "cnews-part").mkdir()
    (home / "cnews-part/cnews.sample1000.txt.xz").write_bytes(lzma.compress(lines.encode()))
    with pytest.warns(UserWarning, match="1000 articles"):
        data = load("cnews", length=4)
    assert (len(data), len(data.test_x)) == (40, 10)
    assert data.test_y.tolist() == list(range(10))
    (home / "cnews").mkdir()
    for part in ("train", "test"):
        (home / f"cnews/cnews.{part}.txt").write_text(lines, encoding="utf-8")
    data = load("cnews", length=4)
    assert (len(data), len(data.test_x), data.note) == (50, 50, "")


@pytest.mark.parametrize(
    ("train", "options", "says"),
    [
        ("没有\n", {}, "line 1: no tab"),
        ("好\t1\n坏\t7\n", {}, "line 2: .*'7' is none of 2"),
        ("好\t1\n", {"tokens": "syllable"}, "tokens is one of character, word"),
        ("好\t1\n", {"length": 0}, "length at least 1"),
        ("好\t1\n", {"test": "train"}, "'test' or 'dev'"),
        ("好\t1\n", {"pages": 3}, "no option 'pages': it takes tokens, size, length, test"),
    ],
)
def test_bad_text(home, train, options, says):
    write_titles(home, train)
    with pytest.raises(ValueError, match=says):
        load("thucnews", **options)


def test_text_that_is_not_utf8(home):
    write_titles(home)
    (home / "thucnews/train.txt.xz").write_bytes(lzma.compress("财经\t0\n".encode("gbk")))
    with pytest.raises(ValueError, match="is not UTF-8"):
        load("thucnews")


def write_uci(home, folder="yacht", rows=10):
    rng = np.random.default_rng(0)
    table = np.round(rng.normal(5, 3, (rows, 4)), 4)
    table[:, 1] = 7.5
    where = home / "uci" / folder
    where.mkdir(parents=True)
    np.savetxt(where / "data.txt", table)
    np.savetxt(where / "index_features.txt", [0, 1, 2], fmt="%d")
    np.savetxt(where / "index_target.txt", [3], fmt="%d")
    for fold in (0, 1):
        order = np.random.default_rng(fold).permutation(rows)
        np.savetxt(where / f"index_train_{fold}.txt", order[2:], fmt="%d")
        np.savetxt(where / f"index_test_{fold}.txt", order[:2], fmt="%d")
    return where, table


def test_uci_folds_are_standardised_by_their_training_rows(home):
    where, table = write_uci(home)
    data = load("yacht", fold=1)
    rows = {part: np.loadtxt(where / f"index_{part}_1.txt").astype(int) for part in ("train", "test")}
    target = table[rows["train"], 3]
    assert data.y.shape == (8, 1)
    np.testing.assert_allclose(data.y[:, 0], (target - target.mean()) / target.std(), atol=1e-5)
    np.testing.assert_allclose(data.target_scale.undo(data.test_y)[:, 0], table[rows["test"], 3], atol=1e-5)
    np.testing.assert_array_equal(data.test_x, table[rows["test"], :3])
    x = table[rows["train"], :3]
    expected = (x - x.mean(0)) / np.where(x.std(0) > 0, x.std(0), 1)
    np.testing.assert_allclose(data.prepare(data.x), expected, atol=1e-12)
    np.testing.assert_allclose(data.as_seen().x, expected, atol=1e-6)
    assert (expected[:, 1] == 0).all()  # The constant column.
    raw = load("yacht", fold=1, standardise=False)
    np.testing.assert_allclose(raw.y[:, 0], target, rtol=1e-6)
    assert raw.target_scale is None
    assert data.split(partition.iid(), 4).sizes.tolist() == [2] * 4


def test_bad_tables(home):
    where, _ = write_uci(home)
    with pytest.raises(ValueError, match="folds 0 to 19, not 20"):
        load("yacht", fold=20)
    np.savetxt(where / "index_test_0.txt", [0, 1], fmt="%d")
    with pytest.raises(ValueError, match="do not make up the 10 rows"):
        load("yacht")
    (where / "data.txt").write_text("1 2 3 4\n1 2 x 4\n")
    with pytest.raises(ValueError, match=r"data\.txt is not a whole table"):
        load("yacht")


def test_year_reads_its_archive(home):
    (home / "uci/year").mkdir(parents=True)
    with zipfile.ZipFile(home / "uci/year/YearPredictionMSD.txt.zip", "w") as archive:
        archive.writestr("YearPredictionMSD.txt", "2001,1.0,2.0\n1999,3.0,5.0\n")
    data = load("year", standardise=False)
    assert data.y.tolist() == [[2001], [1999]]
    assert data.x.tolist() == [[1, 2], [3, 5]]


def test_cubic_is_a_noisy_cube():
    data = load("cubic", points=4000, standardise=False)
    assert float(data.x.abs().max()) <= 4
    assert (float(data.test_x.min()), float(data.test_x.max())) == (-6, 6)
    residual = data.y - data.x**3
    assert float(residual.mean()) == pytest.approx(0, abs=0.2)
    assert float(residual.std()) == pytest.approx(3, rel=0.05)
    assert load("cubic", seed=1).x.equal(load("cubic", seed=1).x)


def test_noise_and_scaled_inputs():
    noise = load("uniform-noise", shape=(3, 4, 4), points=500)
    assert noise.test_x.shape == (500, 3, 4, 4)
    assert 0 <= float(noise.test_x.min()) <= float(noise.test_x.max()) <= 1
    assert float(load("gaussian-noise").test_x.std()) == pytest.approx(1, rel=0.01)
    digits = load("digits")
    far = scaled(digits, 100.0, points=50)
    torch.testing.assert_close(far.test_x, 100 * digits.x[:50])
    assert far.prepare(far.test_x).equal(far.test_x)
    assert len(far) == 0
