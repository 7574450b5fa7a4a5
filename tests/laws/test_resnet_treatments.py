"""A residual network in the three treatments: engines agree, in plain, masked, augmented and compiled steps."""

import pytest
import torch

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.networks.dropout import with_dropout
from fedbayes.networks.papers import network_named

SHAPE = (2, 6, 6)
UNEQUAL, EQUAL = [3, 8, 6], [4, 4, 4]
COMMON = {"epochs": 1, "batch": 4, "optimiser": "adam", "lr": 1e-3, "test_draws": 2}
VI = {**COMMON, "estimator": "flipout", "prior": "fixed", "prior_scale": 10.0, "kl": "1/n", "kl_weight": 1.0}
TREATMENTS = {
    "deterministic": lambda: fb.methods.fedavg(**COMMON),
    "mc dropout": lambda: fb.methods.fedavg(mc_dropout=True, **COMMON),
    "flipout, ws": lambda: fb.methods.fedvi(rule="ws", initial=0.05, **VI),
    "flipout, dwc, distance": lambda: fb.methods.fedvi(rule="dwc", weighting="distance", **VI),
    "flipout, wc, discrepancy": lambda: fb.methods.fedvi(rule="wc", weighting="discrepancy", **VI),
}


def sites(sizes):
    random = torch.Generator().manual_seed(0)
    pairs = [
        (
            torch.rand(n, *SHAPE, generator=random, dtype=torch.float64),
            torch.randint(3, (n,), generator=random),
        )
        for n in sizes
    ]
    return from_clients(pairs, test=pairs[0], kind="classes", classes=3)


def trained(treatment, engine, sizes, norm="batch", **options):
    network = network_named("resnet", SHAPE, 3, depth=8, width=2, norm=norm)
    if treatment == "mc dropout":
        network = with_dropout(network, 0.2)
    method = TREATMENTS[treatment]()
    return fb.fit(network.double(), sites(sizes), method=method, rounds=2, seed=4, engine=engine, **options)


def same(a, b, tolerance):
    assert a.parts.keys() == b.parts.keys()
    for part in a.parts:
        for field in ("mean", "scale"):
            if hasattr(a.parts[part], field):
                torch.testing.assert_close(
                    getattr(a.parts[part], field), getattr(b.parts[part], field), rtol=tolerance, atol=tolerance
                )


@pytest.mark.parametrize("sizes", [UNEQUAL, EQUAL], ids=["unequal", "equal"])
@pytest.mark.parametrize("treatment", TREATMENTS)
def test_loop_and_stacked_agree(treatment, sizes):
    loop, stacked = (trained(treatment, engine, sizes, compile="off") for engine in ("loop", "stacked"))
    assert all("notes" not in record for record in stacked.journal), "the stacked engine fell back"
    same(loop, stacked, 1e-8)
    assert "buffers" in stacked.parts


def test_group_norm_and_augmentation_agree_too():
    options = {"norm": "group", "augment": "crop_flip", "compile": "off"}
    loop, stacked = (trained("flipout, ws", engine, UNEQUAL, **options) for engine in ("loop", "stacked"))
    plain = trained("flipout, ws", "loop", UNEQUAL, norm="group", compile="off")
    same(loop, stacked, 1e-8)
    assert "buffers" not in loop.parts
    assert not torch.equal(loop.posterior.mean, plain.posterior.mean)


@pytest.mark.parametrize(("method", "sizes"), [("mc dropout", EQUAL), ("flipout, ws", UNEQUAL)])
def test_a_step_is_one_graph_for_the_compiler(monkeypatch, method, sizes):
    """Traced as compilation does it, two rounds of it; machine code of it would take a minute."""
    monkeypatch.setattr(torch._inductor, "compile", lambda traced, inputs, **options: traced)
    traced, eager = (trained(method, "stacked", sizes, compile=m) for m in ("on", "off"))
    assert all("notes" not in record for record in traced.journal), traced.journal
    same(traced, eager, 1e-8)


def test_bfloat16_trains_stacked_with_batch_norm():
    network = network_named("resnet", SHAPE, 3, depth=8, width=2)
    method = TREATMENTS["flipout, ws"]()
    run = fb.fit(network, sites(UNEQUAL), method=method, rounds=1, engine="stacked", compile="off", precision="bf16")
    assert "notes" not in run.journal[0]
    assert torch.isfinite(run.posterior.mean).all()
    assert run.posterior.mean.dtype == run.parts["buffers"].mean.dtype == torch.float32


WAYS = {
    "loop": {"engine": "loop"},
    "stacked": {"engine": "stacked", "compile": "off"},
    "on a GPU": {"engine": "stacked", "compile": "off", "device": "cuda"},
    "as a graph": {"engine": "stacked", "compile": "graph", "device": "cuda"},
}


ON_A_GPU = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize(
    "way", [pytest.param(name, marks=ON_A_GPU if "device" in of else []) for name, of in WAYS.items()]
)
def test_bfloat16_goes_where_float32_goes(way):
    """Eight bits of every product: the round's way differs by some percent, BatchNorm's statistics by less."""
    method = fb.methods.fedavg(lr=0.01, epochs=1, batch=8)
    coarse, plain = (
        fb.fit(
            network_named("resnet", SHAPE, 3, depth=8, width=2), sites(EQUAL), method=method, rounds=1, seed=4,
            **options,
        )
        for options in ({"precision": "bf16", **WAYS[way]}, WAYS["loop"])
    )  # fmt: skip
    assert "notes" not in coarse.journal[0]
    start = plain.task.begin().state.broadcast
    for part, most in (("model", 0.15), ("buffers", 0.02)):
        there, here = plain.parts[part].mean, coarse.parts[part].mean.cpu()
        far = (here - there).norm() / (there - start[part].mean).norm()
        assert 0 < far < most, (part, float(far))


def test_statistics_of_batch_norm_travel_as_means_by_size():
    """One step a client from the same start: the pooled running mean is the mean over clients, weighted by rows."""
    sizes = [4, 12]
    network = network_named("resnet", SHAPE, 3, depth=8, width=2).double()
    data = sites(sizes)
    method = fb.methods.fedavg(lr=1e-12, epochs=1, batch=12)
    run = fb.fit(network, data, method=method, rounds=1, engine="stacked")
    # By torch.nn alone: the stem's batch norm after one batch of each client.
    means = [network.conv(data.data.x[data.train_rows(k)].double()).mean((0, 2, 3)) for k in range(2)]
    want = 0.1 * (4 * means[0] + 12 * means[1]) / 16
    got = run.parts["buffers"].layout.split(run.parts["buffers"].mean)["norm.running_mean"]
    torch.testing.assert_close(got, want.detach())
