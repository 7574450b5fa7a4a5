"""What travels between machines: what was written is what is read, and what is not as it must be is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower.settings import settings_of
from fedbayes.flower.wire import Coding, Refused, check_head, fingerprint, head_of, layouts_of, read, write
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import Draws, FullGaussian, Gaussian, LowRank, Parts, Point

LAYOUT = Layout(("w",), ((200,),))
TYPES = {"held": 0.0, "float32": 0.0, "float16": 2**-10, "bfloat16": 2**-7}  # the largest relative error


def parts(seed: int = 0) -> Parts:
    random = torch.Generator().manual_seed(seed)
    return {
        "model": Gaussian(torch.randn(200, generator=random), torch.rand(200, generator=random) * 0.1 + 0.01, LAYOUT),
        "buffers": Point(torch.randn(3, generator=random)),
        "counters": Point(torch.tensor([seed, 70_000])),
    }


@pytest.mark.parametrize("dtype", TYPES)
def test_numbers_come_back_as_exactly_as_their_type_allows(dtype: str) -> None:
    sent = parts()
    got = read(write(sent, Coding(dtype)), sent, Coding(dtype))
    for name in ("mean", "scale"):
        torch.testing.assert_close(
            getattr(got["model"], name), getattr(sent["model"], name), rtol=TYPES[dtype], atol=1e-7 * bool(TYPES[dtype])
        )
    assert torch.equal(got["counters"].mean, sent["counters"].mean)
    assert got["model"].layout == LAYOUT


def test_half_precision_halves_the_bytes() -> None:
    sizes = {
        dtype: sum(a.nbytes for a in write({"model": parts()["model"]}, Coding(dtype)).values()) for dtype in TYPES
    }
    assert sizes == {"held": 1600, "float32": 1600, "float16": 800, "bfloat16": 800}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_differences_lose_less_in_half_precision(dtype: str) -> None:
    before, now = parts(0), parts(0)
    now["model"] = Gaussian(before["model"].mean + 1e-3, before["model"].scale * 0.99, LAYOUT)

    def error(delta: bool, name: str) -> float:
        got = read(write(now, Coding(dtype, delta), before), now, Coding(dtype, delta), before)
        return float((getattr(got["model"], name) - getattr(now["model"], name)).abs().max())

    assert error(True, "mean") < error(False, "mean") / 50
    assert error(True, "scale") < error(False, "scale") / 20


def test_differences_in_full_precision_are_the_upload_again() -> None:
    before, now = ({n: _double(q) for n, q in parts(seed).items()} for seed in (0, 1))
    got = read(write(now, Coding(delta=True), before), now, Coding(delta=True), before)
    torch.testing.assert_close(got["model"].mean, now["model"].mean, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(got["model"].scale, now["model"].scale, rtol=1e-14, atol=0)


def test_points_and_draws_travel_as_differences_from_a_gaussian() -> None:
    before = parts()["model"]
    for q in (Point(before.mean + 0.5, LAYOUT), Draws(torch.stack([before.mean, before.mean + 1]), LAYOUT)):
        got = read(
            write({"model": q}, Coding(delta=True), {"model": before}),
            {"model": q},
            Coding(delta=True),
            {"model": before},
        )["model"]
        assert type(got) is type(q)
        torch.testing.assert_close(got.mean, q.mean)


@pytest.mark.parametrize("dtype", TYPES)
def test_what_has_a_covariance_loses_no_more_by_differences(dtype: str) -> None:
    """Its mean is near the broadcast's; its scales and factors are near nothing that the server knows."""
    random = torch.Generator().manual_seed(1)
    before = {"model": Gaussian(3 + torch.randn(200, generator=random), torch.full((200,), 0.1), LAYOUT)}
    mean = before["model"].mean + 1e-3 * torch.randn(200, generator=random)
    factors = 1e-3 * torch.randn(3, 200, generator=random)
    root = 1e-3 * torch.randn(200, 200, generator=random).tril() + 0.1 * torch.eye(200)
    for q in (LowRank(mean, factors[0].abs(), factors, LAYOUT), FullGaussian(mean, root, LAYOUT)):
        coding = Coding(dtype, delta=True)
        got = read(write({"model": q}, coding, before), {"model": q}, coding, before)["model"]
        torch.testing.assert_close(got.mean, q.mean, rtol=1e-6, atol=1e-5)
        for name in ("scale", "factors", "tril"):
            if hasattr(q, name):
                atol = 1e-7 * bool(TYPES[dtype])  # below the normal numbers of float16
                torch.testing.assert_close(getattr(got, name), getattr(q, name), rtol=TYPES[dtype], atol=atol)


def test_a_scale_too_small_for_the_type_does_not_become_zero() -> None:
    q = {"model": Gaussian(torch.zeros(200), torch.full((200,), 1e-12), LAYOUT)}
    assert bool((read(write(q, Coding("float16")), q, Coding("float16"))["model"].scale > 0).all())


def _double(q: Point | Gaussian) -> Point | Gaussian:
    tensors = {name: getattr(q, name).double() for name in ("mean", "scale") if hasattr(q, name)}
    return replace(q, **tensors) if q.mean.is_floating_point() else q


def _spoilt(name: str, change: object) -> dict[str, np.ndarray]:
    arrays = {key: a.copy() for key, a in write(parts(), Coding()).items()}
    arrays[name] = change(arrays[name])
    return arrays


def _at(place: int, value: float) -> object:
    def change(a: np.ndarray) -> np.ndarray:
        a[place] = value
        return a

    return change


BAD = {
    "nan": (_spoilt("model.mean", _at(3, np.nan)), "1 of 200 entries of mean not finite"),
    "infinite": (_spoilt("model.scale", _at(3, np.inf)), "not finite"),
    "negative scale": (_spoilt("model.scale", _at(3, -0.1)), "scale must be positive: 1 of 200"),
    "scale of zero": (_spoilt("model.scale", _at(3, 0.0)), "scale must be positive"),
    "too short": (_spoilt("model.mean", lambda a: a[:-1]), r"shape \[199\], not \[200\]"),
    "too many axes": (_spoilt("model.mean", lambda a: a[None]), r"shape \[1, 200\]"),
    "another type": (_spoilt("model.mean", lambda a: a.astype(np.float64)), "float64, not float32"),
    "objects": (_spoilt("model.mean", lambda a: a.astype(object)), "object, not float32"),
    "missing": ({k: a for k, a in write(parts(), Coding()).items() if k != "model.scale"}, "'model.scale' is missing"),
    "too much": (write({**parts(), "more": parts()["model"]}, Coding()), "was not expected"),
}


@pytest.mark.parametrize("what", BAD)
def test_an_upload_that_is_no_posterior_of_this_network_is_refused(what: str) -> None:
    arrays, words = BAD[what]
    with pytest.raises(Refused, match=words):
        read(arrays, parts(), Coding())


HEAD = {**head_of(Experiment(), "abc"), "round": 3, "run": "r", "client": 1}


@pytest.mark.parametrize("key", HEAD)
@pytest.mark.parametrize("other", ["other", 7, None, True])
def test_a_head_that_differs_is_refused_by_name(key: str, other: object) -> None:
    check_head(dict(HEAD), HEAD)
    with pytest.raises(Refused, match=f"^{key} is "):
        check_head({**HEAD, key: other}, HEAD)


def test_true_is_no_number_in_a_head() -> None:
    with pytest.raises(Refused, match="client is True, not 1"):
        check_head({**HEAD, "client": True}, HEAD)


def test_the_fingerprint_is_of_what_is_trained_and_not_of_where() -> None:
    x = Experiment()
    same = replace(x, device="cuda", engine="flower", rounds=99, checkpoint_every=1, flower={"min_clients": 2})
    assert fingerprint(x) == fingerprint(same)
    for other in (replace(x, seed=1), replace(x, method="fedavg"), replace(x, options={"lr": 0.1})):
        assert fingerprint(x) != fingerprint(other)


def test_layouts_differ_where_names_shapes_or_kinds_do() -> None:
    one = {"model": Point(torch.zeros(200), LAYOUT)}
    others = [
        {"model": Point(torch.zeros(200), Layout(("v",), ((200,),)))},
        {"model": Point(torch.zeros(200), Layout(("w",), ((2, 100),)))},
        {"model": parts()["model"]},
        {"other": one["model"]},
        {"model": Point(torch.zeros(201))},
    ]
    assert layouts_of(one) == layouts_of({"model": Point(torch.ones(200), LAYOUT)})
    assert len({layouts_of(q) for q in [one, *others]}) == 6


BAD_SETTINGS = {
    "min_client": ({"min_client": 1}, "did you mean 'min_clients'"),
    "min_clients": ({"min_clients": 0}, "whole number of at least 1"),
    "too many": ({"min_clients": 6}, "a cohort has 5 clients"),
    "timeout": ({"timeout": 0}, "positive number of seconds"),
    "dtype": ({"dtype": "int8"}, "float16"),
    "delta": ({"delta": 1}, "true or false"),
}


@pytest.mark.parametrize("what", BAD_SETTINGS)
def test_the_table_of_settings_is_checked(what: str) -> None:
    table, words = BAD_SETTINGS[what]
    with pytest.raises(InputError, match=words):
        settings_of(table, cohort=5)
