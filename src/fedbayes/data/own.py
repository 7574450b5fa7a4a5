"""A user's own arrays as a `Dataset` or `Clients`."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedbayes.data.dataset import Clients, Dataset, check_arrays
from fedbayes.data.fields import Fields, has_fields
from fedbayes.data.given import Columns, names_of_classes, numbered, pair_of, stacked, tensor_of
from fedbayes.data.partition import natural
from fedbayes.data.preparation import AS_STORED, Preparation, Scale, Standardise
from fedbayes.data.survival import check_times, cut_times

MOST_CLASSES = 1_000_000


def from_arrays(
    x: Any,
    y: Any,
    test_x: Any = None,
    test_y: Any = None,
    *,
    kind: str | None = None,
    classes: int | None = None,
    name: str = "own",
    standardise: bool = False,
    prepare: Preparation | None = None,
    class_names: Sequence[str] = (),
    times: Sequence[float] = (),
) -> Dataset:
    """Arrays or tensors as a data set.

    Without `kind`: whole numbers or words y [n] are classes (words in the order of `class_names`, else sorted),
    whole-number y [n, C] labels, others real targets; floating numbers that look like class numbers (0.0 and 1.0) are
    refused, as they could be either.
    `x` is one array [n, ...], or several: a mapping from the names by which the network takes them, or a tuple.
    `standardise` scales float inputs [n, F] and real targets by the statistics of the training part. Inputs are kept
    in their own units: the scaling is part of the model, so that predictions take rows as they come.
    `kind="survival"`: y [n, 2] is a time and an event (1 seen, 0 not until then); predicted curves are cut at `times`,
    by default ten that have equally many of the training part's events between them.
    """
    (y, *rest), class_names = numbered([y] if test_y is None else [y, test_y], class_names)
    test_y = rest[0] if rest else None
    targets = tensor_of(y, "y")
    if has_fields(x, len(targets)):
        prepare = _fields(x, prepare, standardise)
        x, test_x = prepare.pack(x), None if test_x is None else prepare.pack(test_x, "test_x")
    inputs = _inputs(x, double=standardise)
    kind = kind or kind_of([targets])
    targets = _targets(targets, kind)
    if (test_x is None) != (test_y is None):
        raise ValueError("give test_x and test_y together, or neither")
    test_inputs = _inputs(test_x, double=standardise) if test_x is not None else inputs[:0]
    test_targets = _targets(tensor_of(test_y, "test_y"), kind) if test_y is not None else targets[:0]
    if test_inputs.shape[1:] != inputs.shape[1:] or test_inputs.dtype != inputs.dtype:
        raise ValueError(
            f"test_x is {test_inputs.dtype} {list(test_inputs.shape)}, x is {inputs.dtype} {list(inputs.shape)}: "
            "give both the same shape and type"
        )
    if classes is None and kind == "classes":
        largest = max((int(part.max()) for part in (targets, test_targets) if len(part)), default=-1)
        classes = max(largest + 1, len(class_names))
        if classes > MOST_CLASSES:
            raise ValueError(f"{name}: label {largest} would make {classes} classes: number the classes from 0")
    classes = 1 if kind == "survival" else targets.shape[1] if classes is None else classes
    check_arrays(inputs, targets, kind, classes, f"{name}, training part")
    check_arrays(test_inputs, test_targets, kind, classes, f"{name}, test part")
    if kind == "real" and not standardise:
        targets, test_targets = targets.float(), test_targets.float()
    data = Dataset(
        name, inputs, targets, test_inputs, test_targets, kind, classes, prepare or AS_STORED, tuple(class_names)
    )
    if kind == "survival":
        data = replace(data, times=check_times(times) if len(times) else cut_times(targets))
    return standardised(data) if standardise else data


def standardised(data: Dataset) -> Dataset:
    """Scale float inputs [n, F] and real targets to mean 0 and deviation 1, by the training part's statistics.

    Targets are stored scaled, and given back in their own units; inputs are stored as they are and scaled by the model.
    """
    if data.x.is_floating_point() and data.x.ndim == 2:
        if data.prepare != AS_STORED:
            raise ValueError(f"{data.name}: inputs are prepared by {data.prepare} already: don't standardise them too")
        data = replace(data, x=data.x.double(), test_x=data.test_x.double(), prepare=Standardise.of(data.x))
    if data.kind == "real":
        scale = Scale.of(data.y)
        data = replace(data, y=scale.apply(data.y), test_y=scale.apply(data.test_y), target_scale=scale)
    return data


def from_datasets(
    train: Any, test: Any = None, *, name: str = "own", columns: Columns | None = None, **options: Any
) -> Dataset:
    """`torch.utils.data.Dataset`s of (x, y) items, read once into tensors; options as in `from_arrays`.

    Rows may also be mappings, as those of Hugging Face's `datasets` are: `columns` names that of x and that of y.
    """
    x, y = stacked(train, "train", columns)
    test_x, test_y = stacked(test, "test", columns) if test is not None else (None, None)
    named = {"class_names": names} if (names := names_of_classes(train, columns)) else {}
    return from_arrays(x, y, test_x, test_y, name=name, **{**named, **options})


def from_clients(
    clients: Sequence[Any] | Mapping[str, Any],
    test: Any = None,
    *,
    kind: str | None = None,
    classes: int | None = None,
    name: str = "own",
    standardise: bool = False,
    prepare: Preparation | None = None,
    times: Sequence[float] = (),
    class_names: Sequence[str] = (),
    columns: Columns | None = None,
) -> Clients:
    """A natural partition: one (x, y) or data set (torch's, `datasets`') per client, in a list or mapping from names.

    `test` is one (x, y) for all, or a list (a mapping) with one per client. Labels may be words.
    """
    if not len(clients):
        raise ValueError("from_clients needs at least one (x, y)")
    names = tuple(map(str, clients)) if isinstance(clients, Mapping) else ()
    if isinstance(test, Mapping):
        if [*map(str, test)] != [*names]:
            raise ValueError(f"test names {', '.join(map(str, test))}: give one (x, y) for each client, in their order")
        test = list(test.values())
    sites = list(clients.values()) if isinstance(clients, Mapping) else list(clients)
    given = [pair_of(site, f"client {names[k] if names else k}", columns) for k, site in enumerate(sites)]
    tests = [
        pair_of(one, "test", columns) for one in (test if isinstance(test, list) else [] if test is None else [test])
    ]
    class_names = class_names or names_of_classes(sites[0], columns)
    targets, class_names = numbered([y for _, y in (*given, *tests)], class_names)
    tests = [(x, y) for (x, _), y in zip(tests, targets[len(given) :])]
    if has_fields(given[0][0], len(given[0][1])):
        prepare = fields = _fields(given[0][0], prepare, standardise)
        given = [(fields.pack(x, f"client {k}"), y) for k, (x, y) in enumerate(given)]
        tests = [(fields.pack(x, "test"), y) for x, y in tests]
    pairs = [(_inputs(x, double=standardise), tensor_of(y, "y")) for (x, _), y in zip(given, targets)]
    for k, (x, y) in enumerate(pairs):
        if len(x) == 0 or len(y) == 0:
            raise ValueError(f"client {k} has no rows: leave it out, or give it at least one")
    kind = kind or kind_of([y for _, y in pairs])
    pairs = [(x, _targets(y, kind)) for x, y in pairs]
    if classes is None:
        largest = max(int(y.max()) + 1 for _, y in pairs) if kind == "classes" else pairs[0][1].shape[1]
        classes = max(largest, len(class_names))
    for k, (x, y) in enumerate(pairs):
        if x.shape[1:] != pairs[0][0].shape[1:] or x.dtype != pairs[0][0].dtype:
            raise ValueError(
                f"client {k}: x is {x.dtype} {list(x.shape[1:])} per row, client 0's is another: make them equal"
            )
        check_arrays(x, y, kind, classes, f"client {k}")
    if isinstance(test, list) and len(test) != len(clients):
        raise ValueError(
            f"test has {len(test)} entries for {len(clients)} clients: give one (x, y) per client, or one for all"
        )
    joined = from_arrays(
        torch.cat([x for x, _ in pairs]),
        torch.cat([y for _, y in pairs]),
        torch.cat([_inputs(x, double=standardise) for x, _ in tests]) if tests else None,
        torch.cat([_targets(tensor_of(y, "test"), kind) for _, y in tests]) if tests else None,
        kind=kind,
        classes=classes,
        name=name,
        standardise=standardise,
        prepare=prepare,
        times=times,
        class_names=class_names,
    )
    joined = replace(joined, owner=_owners([len(x) for x, _ in pairs]), owner_names=names)
    if isinstance(test, list):
        joined = replace(joined, test_owner=_owners([len(x) for x, _ in tests]))
    return joined.split(natural(), len(pairs))


def _fields(x: Any, prepare: Preparation | None, standardise: bool) -> Fields:
    if prepare is not None or standardise:
        raise ValueError(
            "rows of several tensors are prepared by the network itself: leave prepare and standardise out"
        )
    return Fields.of(x)


def _owners(sizes: Sequence[int]) -> Tensor:
    return torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))


def _inputs(values: Any, *, double: bool) -> Tensor:
    """uint8 stays, other whole numbers become int64, everything else float32, or float64 for a table [n, F]."""
    x = tensor_of(values)
    if x.is_floating_point() or x.dtype == torch.bool:
        return x.to(torch.float64 if double and x.ndim == 2 else torch.float32).contiguous()
    return x.contiguous() if x.dtype == torch.uint8 else x.long()


FEW_VALUES = 20  # floating targets with more values than this are taken for a regression


def kind_of(targets: Sequence[Tensor]) -> str:
    """The kind that targets have by their type; floating ones that look like class numbers could be either."""
    first = targets[0]
    if first.ndim > 2:
        raise ValueError(
            f"y has shape {list(first.shape)}, a target for each place of an input: targets here are one class [n], "
            "yes or no [n, C], or numbers [n, D] per row; make a row of each place"
        )
    if not any(y.is_floating_point() for y in targets):
        return "classes" if first.ndim == 1 else "labels"
    values = torch.cat([y.double().flatten() for y in targets]).unique()
    count = len(values)
    numbered = 2 <= count <= FEW_VALUES and torch.equal(values, torch.arange(count, dtype=torch.float64))
    if numbered and sum(y.numel() for y in targets) > 2 * count:
        raise ValueError(
            f"y holds the floating numbers 0 to {count - 1}, which may be classes or measurements: say kind='classes' "
            f"(or pass whole numbers), {'kind=' + repr('labels') + ' for yes or no, ' if count == 2 else ''}"
            "or kind='real' for a regression, to fb.data.from_clients or from_arrays"
        )
    return "real"


def _targets(y: Tensor, kind: str) -> Tensor:
    if kind == "classes":
        if y.ndim != 1 or (y.is_floating_point() and not torch.equal(y, y.round())):
            raise ValueError(
                f"classes need whole-number y of shape [n], not {y.dtype} {list(y.shape)}: is it kind='real'?"
            )
        return y.long()
    if kind not in ("labels", "real", "survival"):
        raise ValueError(f"kind is 'classes', 'labels', 'real' or 'survival', not {kind!r}")
    dtype = torch.float64 if kind == "real" and y.dtype == torch.float64 else torch.float32
    return (y[:, None] if y.ndim == 1 else y).to(dtype).contiguous()
