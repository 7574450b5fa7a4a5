"""Posterior values against torch.distributions, and their way to disk and back."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import distributions as D
from torch import nn
from torch.func import grad, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import (
    Draws,
    Gaussian,
    Point,
    check,
    load,
    map_tensors,
    save,
    softplus_and_slope,
    softplus_inverse,
)


def _gaussian(seed: int, *shape: int) -> Gaussian:
    g = torch.Generator().manual_seed(seed)
    mean = 3 * torch.randn(shape, generator=g, dtype=torch.float64)
    return Gaussian(mean, torch.randn(shape, generator=g, dtype=torch.float64).exp())


def _torch(q: Gaussian) -> D.Independent:
    return D.Independent(D.Normal(q.mean, q.scale), 1)


def test_samples_have_the_moments_of_the_gaussian():
    q = _gaussian(0, 4)
    draws = q.sample(200_000, torch.Generator().manual_seed(1))
    error = q.scale / math.sqrt(200_000)
    assert draws.shape == (200_000, 4)
    assert ((draws.mean(0) - q.mean).abs() < 5 * error).all()
    assert ((draws.std(0) / q.scale - 1).abs() < 5 / math.sqrt(400_000)).all()


def test_samples_follow_the_generator():
    q = _gaussian(0, 4)
    a, b, c = (q.sample(3, torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)


def test_standard_normals_stand_for_mean_plus_scale_times_noise():
    q = Gaussian(torch.tensor([1.0, -2.0]), torch.tensor([0.5, 3.0]))
    assert q.at(torch.tensor([2.0, -1.0])).tolist() == [2.0, -5.0]
    assert Point(q.mean).at(torch.ones(3, 2)).tolist() == [[1.0, -2.0]] * 3


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)], ids=str)
def test_log_prob_equals_torch_distributions(shape):
    q, x = _gaussian(0, *shape), _gaussian(1, *shape).mean
    torch.testing.assert_close(q.log_prob(x), _torch(q).log_prob(x), rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [(6,), (3, 6), (2, 3, 6)], ids=str)
def test_kl_equals_torch_distributions(shape):
    q, p = _gaussian(0, *shape), _gaussian(1, *shape)
    torch.testing.assert_close(q.kl(p), D.kl_divergence(_torch(q), _torch(p)), rtol=1e-12, atol=0)


def test_kl_is_zero_only_for_equal_gaussians():
    q, p = _gaussian(0, 6), _gaussian(1, 6)
    assert float(q.kl(q)) == 0
    assert float(q.kl(p)) > 0
    assert float(q.kl(p)) != pytest.approx(float(p.kl(q)))


@settings(max_examples=50)
@given(st.floats(-1e3, 1e3), st.floats(1e-6, 1e2))
def test_moments_and_naturals_give_the_gaussian_back(mean, scale):
    q = Gaussian(torch.tensor([mean], dtype=torch.float64), torch.tensor([scale], dtype=torch.float64))
    for again in (Gaussian.from_moments(*q.moments()), Gaussian.from_naturals(*q.naturals())):
        torch.testing.assert_close(again.mean, q.mean, rtol=1e-14, atol=1e-300)
        torch.testing.assert_close(again.scale, q.scale, rtol=1e-14, atol=0)
    shift, precision = q.naturals()
    assert float(precision) == pytest.approx(scale**-2)
    assert float(shift) == pytest.approx(mean / scale**2)


def traced(rho: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """As compiled steps have it."""
    graph = make_fx(softplus_and_slope, tracing_mode="fake")(torch.empty_like(rho))
    assert ("log1p" in graph.code) == (rho.dtype == torch.float64)
    return graph(rho)


@pytest.mark.parametrize("way", [softplus_and_slope, traced])
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float64, 1e-13), (torch.float32, 3e-6)])
def test_softplus_and_its_slope_from_tiny_to_huge(dtype, rtol, way):
    rho = torch.tensor([-85.0, -30.0, -1.5, -0.0, 0.0, 0.1, 2.0, 17.0, 29.9, 30.1, 700.0], dtype=dtype)
    kept = rho.clone()
    scale, slope = way(rho)
    exact = [max(r, 0.0) + math.log1p(math.exp(-abs(r))) for r in rho.tolist()]
    bent = [1 / (1 + math.exp(-r)) for r in rho.tolist()]
    torch.testing.assert_close(scale, torch.tensor(exact, dtype=dtype), rtol=rtol, atol=0)
    torch.testing.assert_close(slope, torch.tensor(bent, dtype=dtype), rtol=rtol, atol=0)
    assert torch.equal(rho, kept)
    assert way(torch.tensor([-torch.inf]))[0].item() == 0.0
    assert way(torch.tensor([torch.nan]))[0].isnan().all()


def test_softplus_of_compiled_steps_is_exact_to_rounding():
    rho = torch.linspace(-20, 20, 40001)
    scale, slope = traced(rho)
    exact, bent = softplus_and_slope(rho.double())
    torch.testing.assert_close(scale.double(), exact, rtol=4e-7, atol=0)
    torch.testing.assert_close(slope.double(), bent, rtol=4e-7, atol=0)


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)], ids=str)
def test_softplus_of_its_inverse_gives_small_and_large_scales_back(dtype, rtol):
    scale = torch.logspace(-12, 2, 60, dtype=dtype)
    torch.testing.assert_close(nn.functional.softplus(softplus_inverse(scale)), scale, rtol=rtol, atol=0)


def test_named_splits_a_value_by_the_tensors_of_the_network():
    layout = Layout.of(nn.Linear(3, 2))
    q = Gaussian(torch.arange(8.0), torch.arange(1.0, 9.0), layout)
    assert q.named()["weight"].mean.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert q.named()["bias"].scale.tolist() == [7, 8]
    assert Point(q.mean, layout).named()["bias"].mean.tolist() == [6, 7]
    assert Draws(torch.stack([q.mean, q.scale]), layout).named()["weight"].values.shape == (2, 2, 3)


@pytest.mark.parametrize(
    "q", [Point(torch.zeros(2)), Gaussian(torch.zeros(2), torch.ones(2)), Draws(torch.zeros(3, 2))]
)
def test_named_without_a_layout_says_what_is_missing(q):
    with pytest.raises(ValueError, match="layout"):
        q.named()


def test_draws_have_the_moments_of_their_members_and_sample_only_members():
    values = torch.randn(5, 3, dtype=torch.float64)
    q = Draws(values)
    mean, variance = q.moments()
    torch.testing.assert_close(mean, values.mean(0))
    torch.testing.assert_close(variance, values.var(0, unbiased=False))
    picked = q.sample(2000, torch.Generator().manual_seed(0))
    member = (picked[:, None] == values).all(-1)
    assert member.any(1).all()
    counts = member.sum(0)
    assert ((counts - 400).abs() < 100).all()  # 5.6 standard deviations of a fair pick


@pytest.mark.parametrize("q", [Point(torch.zeros(2)), Draws(torch.zeros(3, 2))], ids=["point", "draws"])
@pytest.mark.parametrize("ask", ["log_prob", "kl", "naturals"])
def test_what_a_value_has_no_closed_form_for_raises_type_error(q, ask):
    arguments = {"log_prob": [torch.zeros(2)], "kl": [Gaussian(torch.zeros(2), torch.ones(2))], "naturals": []}
    with pytest.raises(TypeError, match="Gaussian"):
        getattr(q, ask)(*arguments[ask])


def test_a_point_has_no_variance_and_every_draw_is_the_point():
    q = Point(torch.tensor([1.0, 2.0]))
    assert q.moments()[1].tolist() == [0, 0]
    assert q.sample(3).tolist() == [[1, 2]] * 3


def test_values_can_not_be_changed():
    with pytest.raises(AttributeError):
        _gaussian(0, 2).mean = torch.zeros(2)


def test_values_pass_through_vmap_with_their_layout():
    layout = Layout.of(nn.Linear(3, 2))
    q = Gaussian(_gaussian(0, 5, 8).mean, _gaussian(0, 5, 8).scale, layout)
    prior = _gaussian(1, 8)

    def widen(one: Gaussian) -> tuple[Gaussian, torch.Tensor]:
        assert one.layout == layout
        assert one.mean.shape == (8,)
        return map_tensors(one, lambda t: 2 * t), one.kl(prior)

    wide, kl = vmap(widen)(q)
    assert isinstance(wide, Gaussian)
    assert wide.layout == layout
    torch.testing.assert_close(wide.scale, 2 * q.scale)
    torch.testing.assert_close(kl, q.kl(prior))


def test_values_pass_through_grad_as_values():
    q, p = _gaussian(0, 4), _gaussian(1, 4)
    slope = grad(lambda value: value.kl(p))(q)
    assert isinstance(slope, Gaussian)
    torch.testing.assert_close(slope.mean, (q.mean - p.mean) / p.scale**2)
    torch.testing.assert_close(slope.scale, q.scale / p.scale**2 - 1 / q.scale)


def test_check_names_the_quantity_that_is_not_a_distribution():
    fine = torch.ones(3)
    with pytest.raises(ValueError, match="client 4: 1 of 3 entries of mean not finite"):
        check(Gaussian(torch.tensor([0, torch.nan, 1]), fine), "client 4")
    with pytest.raises(ValueError, match=r"scale must be positive: 2 of 3.*rho"):
        check(Gaussian(fine, torch.tensor([-1.0, 0.0, 1.0])))
    with pytest.raises(ValueError, match="shape"):
        check(Gaussian(fine, torch.ones(2)))
    check(Gaussian(fine, fine))
    check(Draws(torch.zeros(2, 3)))


def test_parts_survive_a_file_bit_for_bit(tmp_path):
    layout = Layout.of(nn.Linear(3, 2))
    parts = {
        "model": Gaussian(torch.randn(8), torch.rand(8) + 0.1, layout),
        "points": Point(torch.randn(4, dtype=torch.float64)),
        "counters": Point(torch.tensor([7])),
        "ensemble": Draws(torch.randn(3, 8), layout),
    }
    save(tmp_path / "deep" / "q.safetensors", parts)
    again = load(tmp_path / "deep" / "q.safetensors")
    assert list(again) == list(parts)
    for name, q in parts.items():
        assert type(again[name]) is type(q)
        assert again[name].layout == q.layout
        for field in ("mean", "scale", "values"):
            if hasattr(q, field):
                assert torch.equal(getattr(again[name], field), getattr(q, field))
                assert getattr(again[name], field).dtype == getattr(q, field).dtype


def test_a_single_posterior_is_saved_as_the_part_model(tmp_path):
    save(tmp_path / "q", Point(torch.ones(3)))
    assert load(tmp_path / "q")["model"].mean.tolist() == [1, 1, 1]


def test_an_expanded_or_transposed_tensor_is_saved_by_value(tmp_path):
    save(tmp_path / "q", Gaussian(torch.ones(1).expand(4), torch.rand(4, 2).T[0]))
    assert load(tmp_path / "q")["model"].mean.tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_file_that_was_cut_short_is_refused_by_name(tmp_path, kept):
    path = tmp_path / "q.safetensors"
    save(path, _gaussian(0, 50))
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=r"q\.safetensors.*cut short"):
        load(path)


def test_a_foreign_safetensors_file_is_refused(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.zeros(2)}, tmp_path / "other.safetensors")
    with pytest.raises(ValueError, match="not one of fedbayes"):
        load(tmp_path / "other.safetensors")


def test_a_failed_save_leaves_the_old_file_and_no_litter(tmp_path, monkeypatch):
    save(tmp_path / "q", Point(torch.ones(3)))
    monkeypatch.setattr("os.fsync", lambda handle: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        save(tmp_path / "q", Point(torch.zeros(3)))
    assert [p.name for p in tmp_path.iterdir()] == ["q"]
    assert load(tmp_path / "q")["model"].mean.tolist() == [1, 1, 1]
