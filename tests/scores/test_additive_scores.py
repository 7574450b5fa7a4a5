"""Laws of the additive road, for every kind of target: parts add up, padding is free, stacked equals looped."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedbayes import scores


def _classes(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return (4 * torch.randn(rows, 5, generator=generator)).softmax(1), torch.randint(5, (rows,), generator=generator)


def _labels(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    return torch.rand(rows, 3, generator=generator), torch.randint(2, (rows, 3), generator=generator).float()


def _real(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    mean, noise = torch.randn(rows, 2, generator=generator), torch.randn(rows, 2, generator=generator)
    return mean, noise.exp(), mean + 2 * noise.flip(0)


def _survival(rows: int, generator: torch.Generator) -> tuple[Tensor, ...]:
    curves = torch.rand(rows, 4, generator=generator).cumprod(1)
    times = (5 * torch.rand(rows, generator=generator)).round(decimals=1)
    return curves, torch.stack([times, torch.randint(2, (rows,), generator=generator).float()], 1)


MAKE: dict[str, Callable[[int, torch.Generator], tuple[Tensor, ...]]] = {
    "classes": _classes,
    "labels": _labels,
    "real": _real,
    "survival": _survival,
}
kinds = pytest.mark.parametrize("kind", scores.SUMS)


def _case(kind: str, rows: int, seed: int = 0) -> tuple[Tensor, ...]:
    return MAKE[kind](rows, torch.Generator().manual_seed(seed))


def _added(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: sum(part[name] for part in parts) for name in parts[0]}


def _same(one: dict[str, float], other: dict[str, float]) -> None:
    assert one.keys() == other.keys()
    for name in one:
        assert one[name] == pytest.approx(other[name], rel=1e-11, abs=1e-13), name


# Patients of different sites are not compared, and each site knows its own censoring: survival is left out.
@pytest.mark.parametrize("kind", [kind for kind in scores.SUMS if kind != "survival"])
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), cuts=st.lists(st.integers(0, 80), max_size=5))
def test_parts_decode_to_the_whole(kind, seed, cuts):
    sums, decode = scores.SUMS[kind]
    case = _case(kind, 80, seed)
    parts = zip(*(t.tensor_split(sorted(cuts)) for t in case))
    _same(decode(_added([sums(*part) for part in parts])), decode(sums(*case)))


@kinds
def test_sums_are_float64_and_counts_are_exact(kind):
    sums, _ = scores.SUMS[kind]
    total = sums(*_case(kind, 50))
    assert all(value.dtype == torch.float64 for value in total.values())
    assert total["count"] == 50
    if "bin_count" in total:
        assert total["bin_count"].shape == (15,)
        assert total["bin_count"].sum() == (150 if kind == "labels" else 50)


@kinds
@pytest.mark.parametrize("as_mask", [torch.Tensor.bool, torch.Tensor.float, torch.Tensor.long])
def test_padding_is_free_whatever_it_holds(kind, as_mask):
    sums, _ = scores.SUMS[kind]
    case = _case(kind, 30)
    rubbish = [torch.full_like(t[:7], torch.nan if t.is_floating_point() else -1) for t in case]
    mask = as_mask(torch.tensor([1] * 30 + [0] * 7))
    padded = sums(*(torch.cat(pair) for pair in zip(case, rubbish)), mask)
    for name, value in sums(*case).items():
        torch.testing.assert_close(padded[name], value, rtol=1e-12, atol=1e-12)


@kinds
def test_stacked_equals_looped(kind):
    sums, _ = scores.SUMS[kind]
    cases = [_case(kind, 25, seed) for seed in range(4)]
    masks = torch.rand(4, 25, generator=torch.Generator().manual_seed(9)) < 0.7
    stacked = torch.func.vmap(sums)(*(torch.stack(ts) for ts in zip(*cases)), masks)
    for k, case in enumerate(cases):
        for name, value in sums(*case, masks[k]).items():
            torch.testing.assert_close(stacked[name][k], value, rtol=1e-12, atol=1e-12)


class NoNumbersOfTheHost(TorchDispatchMode):
    """Refuses a tensor made of Python's numbers: a GPU would be waited for while they are copied."""

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        assert op is not torch.ops.aten.lift_fresh.default, "a tensor of Python's numbers is made"
        return op(*args, **(kwargs or {}))


@kinds
def test_sums_never_look_at_a_value(kind):
    # A meta tensor has none: whatever would wait for a GPU raises here.
    sums, _ = scores.SUMS[kind]
    case = _case(kind, 10)
    assert sums(*(t.to("meta") for t in case), torch.ones(10, device="meta"))["count"].is_meta
    with NoNumbersOfTheHost():
        sums(*case, torch.ones(10))


@kinds
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_sums_do_not_wait_for_the_gpu(kind):
    sums, decode = scores.SUMS[kind]
    case = _case(kind, 64)
    there, mask = [t.cuda() for t in case], torch.ones(64, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        total = sums(*there, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    _same(decode({name: value.cpu() for name, value in total.items()}), decode(sums(*case)))


def test_class_sums_decode_to_the_direct_scores():
    probs, labels = _case("classes", 400)
    found = scores.classification_scores(scores.classification_sums(probs, labels))
    direct = {name: getattr(scores, name)(probs, labels) for name in ("accuracy", "nll", "brier", "ece", "mce")}
    _same(found, {"count": 400, **direct})


def test_label_sums_decode_to_the_direct_scores():
    probs, targets = _case("labels", 400)
    found = scores.multilabel_scores(scores.multilabel_sums(probs, targets))
    direct = {
        name: getattr(scores, f"multilabel_{name}")(probs, targets) for name in ("accuracy", "nll", "brier", "ece")
    }
    _same(found, {"count": 400, "exact_match": scores.exact_match(probs, targets), **direct})


@pytest.mark.parametrize("shape", [(400,), (200, 2)])
def test_regression_sums_decode_to_the_direct_scores(shape):
    mean, variance, target = (t.reshape(shape).double() for t in _case("real", 200))
    normal = mean, variance.sqrt(), target
    found = scores.regression_scores(scores.regression_sums(mean, variance, target))
    direct = {
        "count": shape[0],
        "rmse": scores.rmse(*normal),
        "nll": scores.normal_nll(*normal),
        "crps": scores.crps(*normal),
        "coverage50": scores.coverage(*normal, 0.5),
        "coverage90": scores.coverage(*normal, 0.9),
    }
    _same(found, direct)


def test_extreme_predictions_stay_finite_in_float32():
    sure = scores.classification_sums(torch.tensor([[1.0, 0.0]]), torch.tensor([1]))
    assert scores.classification_scores(sure)["nll"] == pytest.approx(27.631, abs=1e-3)
    flat = scores.multilabel_sums(torch.tensor([[1.0, 0.0]]), torch.tensor([[0, 1]]))
    assert scores.multilabel_scores(flat)["nll"] == pytest.approx(2 * 27.631, abs=1e-3)
    point = scores.regression_sums(torch.zeros(1), torch.zeros(1), torch.ones(1))
    assert scores.regression_scores(point)["nll"] == pytest.approx(0.5e12, rel=1e-6)


@kinds
def test_an_empty_or_broken_sum_is_refused(kind):
    sums, decode = scores.SUMS[kind]
    case = _case(kind, 10)
    with pytest.raises(ValueError, match="count is 0"):
        decode(sums(*case, torch.zeros(10)))
    with pytest.raises(ValueError, match="nll is not finite"):
        decode(sums(*case) | {"nll": torch.tensor(torch.nan)})
