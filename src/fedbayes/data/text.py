"""Text sets: tokens, a vocabulary of the training part, and padded numbers."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedbayes.data.dataset import Dataset
from fedbayes.data.embedded import fifth_of_each_class
from fedbayes.data.fetch import find
from fedbayes.data.formats import fetched, unpacked
from fedbayes.data.own import from_arrays
from fedbayes.data.sources import FILES

PAD, UNKNOWN = "<pad>", "<unknown>"
_CNEWS = ("体育", "财经", "房产", "家居", "教育", "科技", "时尚", "时政", "游戏", "娱乐")
_RUN = re.compile(r"[\u4e00-\u9fff]+|[^\W_]+")

Tokens = Callable[[str], list[str]]


def characters(text: str) -> list[str]:
    return [c for c in text if not c.isspace()]


def words(text: str) -> list[str]:
    """Runs of letters and digits; Chinese runs as overlapping pairs of characters, which need no dictionary."""
    out: list[str] = []
    for run in _RUN.findall(text.lower()):
        chinese = "\u4e00" <= run[0] <= "\u9fff" and len(run) > 1
        out += [run[i : i + 2] for i in range(len(run) - 1)] if chinese else [run]
    return out


TOKENS: dict[str, Tokens] = {"character": characters, "word": words}


def vocabulary_of(texts: Iterable[list[str]], size: int) -> tuple[str, ...]:
    """The most frequent tokens behind padding (0) and unknown (1), `size` in all; ties in the order of the tokens."""
    count = Counter(token for text in texts for token in text)
    ranked = sorted(count, key=lambda token: (-count[token], token))
    return (PAD, UNKNOWN, *ranked[: size - 2])


def encode(texts: Sequence[list[str]], vocabulary: Sequence[str], length: int) -> np.ndarray:
    """Token numbers int64 [n, length]: cut at the end, padded with 0."""
    number = {token: i for i, token in enumerate(vocabulary)}
    out = np.zeros((len(texts), length), np.int64)
    for row, text in zip(out, texts, strict=True):
        tokens = [number.get(token, 1) for token in text[:length]]
        row[: len(tokens)] = tokens
    return out


def thucnews(
    *, tokens: str | Tokens = "character", size: int = 50_000, length: int = 32, test: str = "test"
) -> Dataset:
    """Chinese headlines of ten sections (THUCNews, Sun et al., 2016); `test` is "test" or "dev"."""
    if test not in ("test", "dev"):
        raise ValueError(f"test is 'test' or 'dev', not {test!r}")
    sources = find(FILES["thucnews"])
    path = {Path(name).name.split(".")[0]: where for name, where in sources.paths.items()}
    with fetched(path["class"]):
        names = tuple(unpacked(path["class"]).decode().split())
    parts = [_lines(path[part], names, label_first=False) for part in ("train", test)]
    return replace(_dataset("thucnews", parts, names, tokens, size, length), note=sources.missing)


def cnews(*, tokens: str | Tokens = "character", size: int = 50_000, length: int = 600) -> Dataset:
    """Chinese articles of ten sections (CNews, a part of THUCNews)."""
    sources = find(FILES["cnews"])
    parts = [_lines(path, _CNEWS, label_first=True) for path in sources.paths.values()]
    if len(parts) == 1:
        texts, y = parts[0]
        test = fifth_of_each_class(y)
        parts = [([texts[i] for i in np.flatnonzero(rows)], y[rows]) for rows in (~test, test)]
    return replace(_dataset("cnews", parts, _CNEWS, tokens, size, length), note=sources.missing)


def _lines(path: Path, names: tuple[str, ...], *, label_first: bool) -> tuple[list[str], np.ndarray]:
    """Lines `label<TAB>text` with the label's name, or `text<TAB>label` with its number."""
    number = {name: i for i, name in enumerate(names)} if label_first else {str(i): i for i in range(len(names))}
    texts, labels = [], []
    try:
        lines = unpacked(path).decode().split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 ({error}): convert it, or fetch it again") from error
    for i, line in enumerate(lines, 1):
        if not line.strip():
            continue
        label, tab, text = line.partition("\t") if label_first else reversed(line.rpartition("\t"))
        if not tab or label.strip() not in number:
            raise ValueError(
                f"{path}, line {i}: no tab, or the label {label.strip()[:20]!r} is none of {len(names)} known"
            )
        texts.append(text)
        labels.append(number[label.strip()])
    return texts, np.array(labels, np.int64)


def _dataset(
    name: str,
    parts: list[tuple[list[str], np.ndarray]],
    names: tuple[str, ...],
    tokens: str | Tokens,
    size: int,
    length: int,
) -> Dataset:
    if isinstance(tokens, str) and tokens not in TOKENS:
        raise ValueError(f"tokens is one of {', '.join(TOKENS)} or a function of a text, not {tokens!r}")
    if size < 3 or length < 1:
        raise ValueError(f"size must be at least 3 and length at least 1, not {size} and {length}")
    cut = TOKENS[tokens] if isinstance(tokens, str) else tokens
    (train, y), (test, test_y) = [([cut(text) for text in texts], labels) for texts, labels in parts]
    vocabulary = vocabulary_of(train, size)
    x, test_x = encode(train, vocabulary, length), encode(test, vocabulary, length)
    data = from_arrays(x, y, test_x, test_y, kind="classes", classes=len(names), name=name, class_names=names)
    return replace(data, vocabulary=vocabulary)
