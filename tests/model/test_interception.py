"""Dropout that reads the tape, and BatchNorm that does not see padded rows."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import vmap

import fedbayes as fb
from fedbayes.model import interception
from fedbayes.model.interception import Interception, batch_norm, training_handlers
from fedbayes.model.tracing import takes_own_functions
from fedbayes.noise import Tape, normals

DROPOUTS = {
    "dropout": (nn.Dropout(0.3), (4000, 8), (4000, 8)),
    "dropout1d": (nn.Dropout1d(0.3), (200, 40, 5), (200, 40, 1)),
    "dropout2d": (nn.Dropout2d(0.3), (200, 40, 3, 3), (200, 40, 1, 1)),
    "dropout3d": (nn.Dropout3d(0.3), (200, 40, 2, 2, 2), (200, 40, 1, 1, 1)),
}


def _drop(layer, x, address=0):
    with Interception(training_handlers(Tape(normals(x.numel(), address)), None)):
        return layer(x)


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_drops_at_its_rate_and_scales_what_is_left(name):
    layer, shape, unit = DROPOUTS[name]
    out = _drop(layer, torch.ones(shape))
    kept = out != 0
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / 0.7))
    units = torch.Size(unit).numel()
    assert abs(float(kept.float().mean()) - 0.7) < 5 * (0.3 * 0.7 / units) ** 0.5
    if unit != shape:  # whole channels go together
        flat = kept.flatten(2)
        assert (flat.all(-1) | ~flat.any(-1)).all()


@pytest.mark.parametrize("name", DROPOUTS)
def test_dropout_is_a_function_of_the_tape_alone(name):
    layer, shape, _ = DROPOUTS[name]
    x = torch.ones(shape)
    torch.manual_seed(0)
    first = _drop(layer, x)
    state = torch.get_rng_state()
    assert torch.equal(_drop(layer, x), first)
    assert not torch.equal(_drop(layer, x, address=1), first)
    assert torch.equal(torch.get_rng_state(), state)


def test_dropout_is_off_in_evaluation_mode_and_at_rate_zero():
    x, tape = torch.randn(5, 4), Tape(torch.zeros(100))
    with Interception(training_handlers(tape, None)):
        assert torch.equal(nn.Dropout(0.5).eval()(x), x)
        assert torch.equal(nn.Dropout(0.0)(x), x)
        assert torch.equal(F.dropout(x, 0.5, False), x)
    assert tape.used == 0


def test_dropout_at_rate_one_gives_zeros():
    assert torch.equal(_drop(nn.Dropout(1.0), torch.randn(5, 4)), torch.zeros(5, 4))


def test_dropout_passes_gradients_only_where_it_kept():
    x = torch.ones(50, requires_grad=True)
    out = _drop(nn.Dropout(0.5), x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_dropout_under_vmap_reads_each_clients_own_tape():
    x, noise = torch.ones(3, 20), torch.stack([normals(20, k) for k in range(3)])

    def one(row, own):
        with Interception(training_handlers(Tape(own), None)):
            return F.dropout(row, 0.5)

    together = vmap(one)(x, noise)
    torch.testing.assert_close(together, torch.stack([_drop(nn.Dropout(0.5), x[k], k) for k in range(3)]))


NORMS = {
    "linear": (nn.BatchNorm1d, (9, 4)),
    "conv1d": (nn.BatchNorm1d, (9, 4, 5)),
    "conv2d": (nn.BatchNorm2d, (9, 4, 3, 2)),
}


@pytest.fixture(params=["plain", "few passes"])
def way(request, monkeypatch):
    """BatchNorm by plain operations, and as it is on a GPU."""
    monkeypatch.setattr(interception, "few_passes", lambda x: request.param == "few passes")


def _pair(kind, **options):
    torch.manual_seed(3)
    one, two = (kind(4, **options).double() for _ in range(2))
    if one.affine:
        nn.init.normal_(one.weight)
        nn.init.normal_(one.bias)
    two.load_state_dict(one.state_dict())
    return one, two


@pytest.mark.parametrize("options", [{}, {"affine": False}, {"momentum": 0.3, "eps": 1e-2}], ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_masked_batch_norm_equals_batch_norm_of_the_live_rows_alone(way, name, options):
    kind, shape = NORMS[name]
    ours, theirs = _pair(kind, **options)
    mask = torch.tensor([1, 1, 0, 1, 0, 1, 1, 0, 1], dtype=torch.bool)
    x = torch.randn(shape, dtype=torch.float64)
    padded, alone = x.clone().requires_grad_(), x[mask].clone().requires_grad_()
    padded.data[~mask] = 1e3  # padding must not leak
    with Interception(training_handlers(Tape(), mask)):
        out = ours(padded)
    want = theirs(alone)
    torch.testing.assert_close(out[mask], want)
    torch.testing.assert_close(ours.running_mean, theirs.running_mean)
    torch.testing.assert_close(ours.running_var, theirs.running_var)
    factors = torch.randn_like(want)
    (out[mask] * factors).sum().backward()
    (want * factors).sum().backward()
    torch.testing.assert_close(padded.grad[mask], alone.grad)
    assert (padded.grad[~mask] == 0).all()
    if ours.affine:
        torch.testing.assert_close(ours.weight.grad, theirs.weight.grad)
        torch.testing.assert_close(ours.bias.grad, theirs.bias.grad)


def test_a_full_mask_equals_no_mask(way):
    ours, theirs = _pair(nn.BatchNorm1d)
    x = torch.randn(6, 4, dtype=torch.float64)
    with Interception(training_handlers(Tape(), torch.ones(6, dtype=torch.bool))):
        torch.testing.assert_close(ours(x), theirs(x))
    torch.testing.assert_close(ours.running_var, theirs.running_var)


def test_rows_that_a_network_folds_into_the_batch_are_masked_by_their_row(way):
    ours, theirs = _pair(nn.BatchNorm1d)
    mask = torch.tensor([True, False, True])
    x = torch.randn(3, 5, 4, dtype=torch.float64)  # the network applies the norm to [3 * 5, 4]
    with Interception(training_handlers(Tape(), mask)):
        out = ours(x.reshape(15, 4)).reshape(3, 5, 4)
    torch.testing.assert_close(out[mask], theirs(x[mask].reshape(10, 4)).reshape(2, 5, 4))


def test_a_fully_padded_batch_leaves_the_statistics_as_they_were(way):
    ours, _ = _pair(nn.BatchNorm1d)
    ours.running_mean.normal_()
    mean, variance = ours.running_mean.clone(), ours.running_var.clone()
    with Interception(training_handlers(Tape(), torch.zeros(6, dtype=torch.bool))):
        out = ours(torch.randn(6, 4, dtype=torch.float64))
    assert torch.isfinite(out).all()
    assert torch.equal(ours.running_mean, mean)
    assert torch.equal(ours.running_var, variance)


def test_one_live_value_moves_the_running_mean_and_not_the_variance(way):
    ours, _ = _pair(nn.BatchNorm1d)
    x = torch.randn(6, 4, dtype=torch.float64)
    with Interception(training_handlers(Tape(), torch.tensor([False, True, False, False, False, False]))):
        assert torch.isfinite(ours(x)).all()
    torch.testing.assert_close(ours.running_mean, 0.1 * x[1])
    assert torch.equal(ours.running_var, torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("engine", ["loop", "stacked"])
def test_a_last_batch_of_one_row_does_not_shrink_the_running_variance(engine):
    """33 rows in batches of 32: the running variance was .48 of the rows' own."""
    x = 3 * torch.randn(33, 4, generator=torch.Generator().manual_seed(0))
    network = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    clients = fb.data.from_clients([(x, torch.arange(33) % 2)] * 2)
    run = fb.fit(network, clients, method=fb.methods.fedavg(epochs=40, batch=32), rounds=1, engine=engine)
    variance = run.parts["buffers"].mean[4:]
    torch.testing.assert_close(variance, x.var(0), rtol=0.15, atol=0)


def test_in_evaluation_mode_the_mask_plays_no_role():
    ours, _ = _pair(nn.BatchNorm1d)
    ours.eval()
    x = torch.randn(6, 4, dtype=torch.float64)
    with Interception(training_handlers(Tape(), torch.zeros(6, dtype=torch.bool))):
        torch.testing.assert_close(ours(x), ours.weight * x / (1 + ours.eps) ** 0.5 + ours.bias)


def test_masked_batch_norm_under_vmap_equals_one_client_at_a_time(way):
    x = torch.randn(3, 6, 4)
    mask = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0]], dtype=torch.bool)

    def one(rows, live):
        mean, variance = torch.zeros(4) + 0 * rows[0], torch.ones(4) + 0 * rows[0]
        with Interception(training_handlers(Tape(), live)):
            out = F.batch_norm(rows, mean, variance, training=True)
        return out, mean, variance

    together = vmap(one)(x, mask)
    for k in range(3):
        for got, want in zip(together, one(x[k], mask[k]), strict=True):
            torch.testing.assert_close(got[k], want)


@pytest.mark.parametrize("training", [True, False])
def test_batch_norm_of_bfloat16_inputs_is_done_in_the_precision_of_its_statistics(way, training):
    torch.manual_seed(0)
    x = torch.randn(3, 8, 4, 2, 2).bfloat16()
    mean, variance, weight, bias = torch.randn(3, 4), torch.rand(3, 4) + 0.5, torch.rand(3, 4), torch.randn(3, 4)
    ours = [t.clone() for t in (mean, variance)]

    def one(x, mean, variance, weight, bias):
        return batch_norm()(x, mean, variance, weight, bias, training), mean, variance

    got, *moved = torch.func.vmap(one)(x, *ours, weight, bias)
    assert got.dtype == torch.bfloat16
    for k in range(3):
        running = mean[k].clone(), variance[k].clone()
        want = torch.nn.functional.batch_norm(x[k].float(), *running, weight[k], bias[k], training)
        torch.testing.assert_close(got[k].float(), want, rtol=1e-2, atol=1e-2)
        torch.testing.assert_close(moved[0][k], running[0])
        torch.testing.assert_close(moved[1][k], running[1])


def test_stacked_clients_learn_the_same_by_batch_norm_in_few_passes(monkeypatch):
    """Gradients of several clients with padded rows, traced and not."""
    network = nn.Sequential(nn.Conv2d(1, 3, 2), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(12, 2)).double()
    random = torch.Generator().manual_seed(0)
    sites = [(torch.randn(n, 1, 3, 3, generator=random, dtype=torch.float64), torch.arange(n) % 2) for n in (7, 4, 9)]
    method, ends = fb.methods.fedavg(epochs=2, batch=4), []
    for few, recompute in ((False, False), (True, False), (True, ["1"])):
        monkeypatch.setattr(interception, "few_passes", lambda x, few=few: few and takes_own_functions())
        clients = fb.data.from_clients(sites)
        run = fb.fit(network, clients, method=method, rounds=2, engine="stacked", compile="off", recompute=recompute)
        assert run.journal[0].get("notes") is None
        ends.append(torch.cat([part.mean for part in run.parts.values()]))
    torch.testing.assert_close(ends[1], ends[0], rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(ends[2], ends[0], rtol=1e-9, atol=1e-9)
