"""Flows against autograd's Jacobian, their own inverse, and a target that no Gaussian fits."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad, vmap

from fedbayes.clients.optimisers import adam
from fedbayes.model.gradient import gradients
from fedbayes.posterior.flow import Flowed, Planar, Radial, reverse_kl, spread
from fedbayes.posterior.full import FullGaussian
from fedbayes.posterior.layout import Layout
from fedbayes.posterior.values import Gaussian, Grafted, Point, load, map_tensors, save

P, L = 4, 3


def _random(seed: int, dtype: torch.dtype = torch.float64):
    g = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)


def _radial(seed: int = 0, dtype: torch.dtype = torch.float64) -> Radial:
    draw = _random(seed, dtype)
    return Radial(draw(L, P), 2 * draw(L), 2 * draw(L))


def _planar(seed: int = 0, dtype: torch.dtype = torch.float64) -> Planar:
    draw = _random(seed, dtype)
    return Planar(2 * draw(L, P), draw(L, P), draw(L))


FLOWS = {"radial": _radial, "planar": _planar}


@pytest.mark.parametrize("kind", FLOWS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_the_log_determinant_is_that_of_autograds_jacobian(kind, seed):
    flow, x = FLOWS[kind](seed), 3 * _random(seed + 1)(P)
    jacobian = torch.autograd.functional.jacobian(lambda v: flow.forward(v)[0], x)
    sign, log_det = torch.linalg.slogdet(jacobian)
    assert float(sign) == 1
    torch.testing.assert_close(flow.forward(x)[1], log_det, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("kind", FLOWS)
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000))
def test_the_inverse_gives_back_what_went_forward(kind, dtype, seed):
    flow, x = FLOWS[kind](seed, dtype), 3 * _random(seed + 1, dtype)(7, P)
    y, log_det = flow.forward(x)
    back, same = flow.inverse(y)
    tolerance = 1e-5 if dtype == torch.float64 else 2e-3
    torch.testing.assert_close(flow.forward(back)[0], y, rtol=tolerance, atol=tolerance)
    if kind == "planar" and dtype == torch.float32:
        return  # such steps may flatten space so far that seven digits do not tell two points apart
    torch.testing.assert_close(back, x, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(same, log_det, rtol=100 * tolerance, atol=100 * tolerance)


def test_a_radial_step_inverts_near_and_at_its_centre_and_far_away():
    flow = Radial(torch.zeros(1, P), torch.tensor([1.0]), torch.tensor([-3.0]))
    for size in (0.0, 1e-6, 1e-2, 1.0, 1e3):
        x = torch.full((P,), size)
        torch.testing.assert_close(flow.inverse(flow.forward(x)[0])[0], x, rtol=1e-5, atol=1e-9)
    assert torch.isfinite(grad(lambda v: flow.forward(v)[0].sum() + flow.forward(v)[1])(torch.zeros(P))).all()


def test_equal_alpha_and_beta_are_the_identity():
    centre = spread(torch.zeros(P), L, torch.randn(L * P))
    x = torch.randn(5, P)
    y, log_det = Radial.identity(centre).forward(x)
    torch.testing.assert_close(y, x)
    assert not log_det.any()


@pytest.mark.parametrize("kind", FLOWS)
def test_a_flowed_density_integrates_to_one(kind):
    draw = _random(3)
    flow = {"radial": Radial(draw(2, 2), draw(2), draw(2)), "planar": Planar(draw(2, 2), draw(2, 2), draw(2))}[kind]
    q = Flowed(Gaussian(torch.zeros(2, dtype=torch.float64), torch.ones(2, dtype=torch.float64)), flow)
    line = torch.linspace(-12, 12, 500, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line)
    mass = q.log_prob(grid).exp().sum() * float(line[1] - line[0]) ** 2
    assert float(mass) == pytest.approx(1, abs=2e-3)


def test_the_density_at_a_draw_is_the_bases_over_the_determinant():
    base = FullGaussian(torch.randn(P).double(), torch.eye(P).double() + 0.2 * torch.ones(P, P).tril(-1).double())
    q = Flowed(Flowed(base, _radial()), _planar())  # a chain of both kinds
    noise = _random(5)(6, P)
    x, y = base.at(noise), q.at(noise)
    _, first = _radial().forward(x)
    _, second = _planar().forward(_radial().forward(x)[0])
    torch.testing.assert_close(q.log_prob(y), base.log_prob(x) - first - second, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kind", FLOWS)
def test_gradients_through_the_inverse_equal_finite_differences(kind):
    flow, y = FLOWS[kind](2), _random(9)(P)

    def value(*tensors):
        x, log_det = type(flow)(*tensors).inverse(y)
        return x.square().sum() + log_det

    tensors = tuple(getattr(flow, name).clone().requires_grad_() for name in flow.__dataclass_fields__)
    assert torch.autograd.gradcheck(value, tensors, eps=1e-6, atol=1e-5)


def test_flows_pass_vmap_grad_and_compile_as_values():
    many = Flowed(
        Gaussian(torch.zeros(5, P), torch.ones(5, P)),
        Radial(torch.randn(5, L, P), torch.randn(5, L), torch.randn(5, L)),
    )
    noise = torch.randn(5, 2, P)
    together = vmap(lambda q, z: q.log_prob(q.at(z)))(many, noise)
    for k in range(5):
        one = map_tensors(many, lambda t, k=k: t[k])
        torch.testing.assert_close(together[k], one.log_prob(one.at(noise[k])), rtol=1e-4, atol=1e-4)
    slope = grad(lambda q: q.at(noise[0]).square().sum())(map_tensors(many, lambda t: t[0]))
    assert isinstance(slope, Flowed)
    assert slope.flow.centre.abs().sum() > 0
    compiled = torch.compile(lambda q, z: q.at(z), backend="aot_eager", fullgraph=True)
    one = map_tensors(many, lambda t: t[0])
    torch.testing.assert_close(compiled(one, noise[0]), one.at(noise[0]))


def _banana(w):
    """log density of x1 ~ N(0, 2^2), x2 | x1 ~ N(x1^2 / 4, .5^2)."""
    two = Gaussian(torch.zeros(1), torch.tensor([2.0]))
    return two.log_prob(w[..., :1]) + Gaussian(torch.zeros(1), torch.tensor([0.5])).log_prob(
        w[..., 1:] - w[..., :1].square() / 4
    )


def _fit(vectors, build, steps=200, lr=0.1):
    """Minimise the reverse KL to the banana; gives the fitted value."""
    update = adam()
    state, g = update.init(vectors), torch.Generator().manual_seed(0)
    for step in range(steps):
        noise = torch.randn(64, 2, generator=g)
        slopes, _ = gradients(lambda v, noise: (reverse_kl(build(v), _banana, noise), ()), vectors, noise)
        state, vectors = update.update(state, vectors, slopes, torch.tensor(lr * (1 - step / steps)))
    return build(vectors)


def test_a_fitted_chain_comes_closer_to_a_banana_than_the_best_gaussian():
    identity = Radial.identity(torch.zeros(1, 2))
    start = {"mean": torch.tensor([0.0, 1.0]), "raw": torch.zeros(2, 2)}
    best = _fit(
        start,
        lambda v: Flowed(FullGaussian(v["mean"], v["raw"].tril(-1) + v["raw"].diag().exp().diag()), identity),
    )
    noise = torch.randn(20_000, 2, generator=torch.Generator().manual_seed(1))
    gaussian = float(reverse_kl(best, _banana, noise))
    centres = best.base.at(torch.randn(6, 2, generator=torch.Generator().manual_seed(2)))
    first = {"centre": centres, "alpha": torch.zeros(6), "beta": torch.zeros(6)}
    flowed = _fit(first, lambda v: Flowed(best.base, Radial(v["centre"], v["alpha"], v["beta"])))
    chain = float(reverse_kl(flowed, _banana, noise))
    assert 0 < chain < gaussian - 0.15


def test_a_graft_draws_some_places_from_another_value():
    stock = Point(torch.arange(5.0))
    graft = Flowed(Gaussian(torch.tensor([10.0, 20.0]), torch.full((2,), 0.1)), Radial.identity(torch.zeros(1, 2)))
    q = Grafted(stock, graft, torch.tensor([3, 1]))
    assert q.mean.tolist() == [0, 20, 2, 10, 4]
    draws = q.sample(200, torch.Generator().manual_seed(0))
    assert draws[:, [0, 2, 4]].std(0).tolist() == [0, 0, 0]
    assert draws[:, 3].mean() == pytest.approx(10, abs=0.05)
    assert draws[:, 1].std() == pytest.approx(0.1, abs=0.03)
    with pytest.raises(TypeError, match="draws"):
        q.moments()
    plain = Grafted(stock, graft.base, torch.tensor([3, 1]))
    assert plain.moments()[1].tolist() == pytest.approx([0, 0.01, 0, 0.01, 0])


@pytest.mark.parametrize("ask", ["moments", "naturals", "named"])
def test_what_a_flow_has_no_closed_form_for_raises_type_error(ask):
    q = Flowed(Gaussian(torch.zeros(P), torch.ones(P)), _radial())
    with pytest.raises(TypeError):
        getattr(q, ask)()
    with pytest.raises(TypeError):
        q.kl(q.base)


def test_values_within_values_come_back_from_a_file(tmp_path):
    layout = Layout(("weight", "bias"), ((2, 1), (2,)))
    base = FullGaussian(torch.randn(P), torch.eye(P) + torch.ones(P, P).tril(-1), layout)
    parts = {
        "model": Grafted(Point(torch.randn(6)), Flowed(base, _radial(dtype=torch.float32)), torch.arange(P)),
        "head": Flowed(Flowed(base, _radial(dtype=torch.float32)), _planar(dtype=torch.float32), layout),
    }
    save(tmp_path / "q.safetensors", parts)
    again = load(tmp_path / "q.safetensors")
    assert again["head"].layout == layout
    assert again["model"].graft.base.layout == layout
    noise = torch.randn(3, 6)
    assert parts["model"].normals == P  # its stock is a point
    assert torch.equal(again["model"].at(noise[:, :P]), parts["model"].at(noise[:, :P]))
    assert torch.equal(again["head"].at(noise[:, :P]), parts["head"].at(noise[:, :P]))
