"""Engines only carry: on the same seed every method gives the same answer in each of them."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from io import BytesIO

import pytest
import torch
from few_rows import fallbacks
from torch import Tensor, nn

import fedbayes as fb
from fedbayes.data import from_clients
from fedbayes.engine.beside import read, written
from fedbayes.engine.stacked import Stacked, run_all
from fedbayes.engine.steps import Steps
from fedbayes.networks.papers import network_named
from fedbayes.posterior.values import check
from fedbayes.training.fit import fit
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds, rounds_together
from fedbayes.training.run import Memory, evaluate


def sites(sizes: list[int], *, features: int = 6, classes: int = 3) -> fb.data.Clients:
    random = torch.Generator().manual_seed(0)
    pairs = []
    for n in sizes:
        x = torch.randn(n, features, generator=random, dtype=torch.float64)
        pairs.append((x, torch.randint(classes, (n,), generator=random)))
    return from_clients(pairs, test=pairs[0], kind="classes", classes=classes)


def images(sizes: list[int]) -> fb.data.Clients:
    made = sites(sizes, features=192)
    data = replace(made.data, x=made.data.x.unflatten(1, (3, 8, 8)), test_x=made.data.test_x.unflatten(1, (3, 8, 8)))
    return replace(made, data=data)


UNEQUAL = [2, 20, 6, 11]  # sizes differ tenfold


class BatchNormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=False)  # BatchNorm removes a bias: Adam would step on its rounding errors
        self.norm = nn.BatchNorm1d(8)
        self.drop = nn.Dropout(0.3)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.drop(torch.relu(self.norm(self.first(x)))))


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 4, 3)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.conv(x[:, None])).flatten(1))


NETWORKS = {
    "mlp": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)),
    "batchnorm, dropout": BatchNormed,
    "convolution": Convolved,
}
METHODS = {
    "fedavg": {},
    "fedavg, momentum, decay, server": {"momentum": 0.9, "weight_decay": 0.01, "server": "adam", "server_lr": 0.1},
    "fedavg, discrepancy": {"weighting": "discrepancy"},
    "fedprox": {"proximal": 0.1},
    "feddyn": {"rho": 0.1, "momentum": 0.5},
    "fedlap": {"rho": 2.0},
    "scaffold": {"server": "sgd", "server_lr": 0.5},
    "fedavg, adversarial": {"adversarial": 0.05, "clip": 0.5, "lr_within": "falling"},
    "fedag": {"test_draws": 2, "lr": 0.05},
    "feduab": {"test_draws": 2},
    "pvi": {"damping": 0.3},
    "pvi, ivon": {"damping": 0.3, "optimiser": "ivon"},
    "bayes_admm": {"rho": 2.0, "gamma": 0.3, "temperature": 0.5},
    "bayes_admm, adam": {"optimiser": "adam", "lr": 0.01, "alpha": 0.5, "gamma": 0.3},
    "fedlap_cov": {"rho": 2.0, "gamma": 0.3, "probe": 3},
    "fedivon": {},
    "fedivon, as published": {
        **{"train_draws": 2, "beta2": 0.999, "curvature": "price", "clip_step": 0.5, "least_curvature": 0.0},
        **{"lr": 0.01, "lr_within": "cosine", "prior": "broadcast", "kl": "1/n", "rule": "nwa"},
    },
    "feduab, ivon": {"optimiser": "ivon", "curvature": "squared", "beta2": 0.999, "lr_within": "falling"},
    "feduab, 3 draws": {"train_draws": 3},
    "pfedbayes": {"lr": 0.01, "draws": 2},
    "bpfed": {"draws": 2},
    "fedper": {},
    "lg_fedavg": {"momentum": 0.5},
    "fedavg, laplace every round": {"refine": "laplace", "laplace": "every", "hessian": "full"},
    "lg_fedavg, laplace every round": {"refine": "laplace", "laplace": "every", "hessian": "diag"},
    "fedvi, weight": {"estimator": "weight", "kl": "blundell", "optimiser": "sgd", "lr": 0.05},
    "fedvi, flipout, adam": {"estimator": "flipout", "optimiser": "adam", "lr": 0.01, "kl": "1/n"},
    "fedvi, wc, distance": {"rule": "wc", "weighting": "distance", "prior": "fixed", "kl": "1/B"},
    "fedvi, dwc": {"rule": "dwc", "prior": "broadcast", "lr_decay": 0.5},
    "fedavg, steps": {"lr_within": "steps", "lr_drop": 0.5},
    "fedppd": {},
    "fedswag": {"test_draws": 2},
    "fedswag, low rank": {"covariance": "low_rank", "rank": 3, "swag_every": 2, "swag_start": 0.0, "test_draws": 2},
    "fedbe": {"server_batch": 5, "server_epochs": 3, "swa_start": 3, "swa_every": 2},
    "fedbe, dirichlet": {"server_batch": 5, "server_epochs": 1, "fit": "dirichlet", "spread": 0.5},
    "fedppd_distill": {"server_batch": 5, "server_epochs": 2, "swa_start": 2, "swa_every": 1},
    "fedpa": {"samples": 3, "shrinkage": 0.5},
    "fedppd, as published": {
        "temperature": 4.0,
        "cooling": "1/n",
        "schedule": "epochs",
        "upload": "last",
        "teacher_dropout": True,
    },
    "fedppd, sghmc": {"sampler": "sghmc", "burn_in": 1, "lr_within": "steps", "student_lr_within": "falling"},
    "fedppd, psgld": {"sampler": "psgld", "thin": 2, "lr": 0.001, "lr_within": "polynomial", "momentum": 0.5},
}


def one_round(network: str, method: str, engine: str, sizes: list[int], **options: object) -> fb.Run:
    torch.manual_seed(3)
    made = fb.methods.method_named(method.split(",")[0], {"batch": 5, "epochs": 2, **METHODS[method]})
    server = torch.linspace(-2, 2, 13 * 6, dtype=torch.float64).sin().reshape(13, 6)
    run = fit(
        NETWORKS[network]().double(), sites(sizes), method=made, seed=4, engine=engine, server_data=server,
        **{"rounds": 1, **options},
    )  # fmt: skip
    return run


def same(a: fb.Run, b: fb.Run, tolerance: float) -> None:
    for part in a.parts:
        for field in ("mean", "scale"):
            if hasattr(a.parts[part], field):
                torch.testing.assert_close(
                    getattr(a.parts[part], field), getattr(b.parts[part], field), rtol=tolerance, atol=tolerance
                )


# One method of each kind of client. The code of a layer is the same in all of a kind: tables of methods by layers, and
# of traces, which take their time by the operation, are gone through in whole by `make test-slow`.
KINDS = (
    "fedavg",
    "feduab, 3 draws",
    "fedivon",
    "fedvi, flipout, adam",
    "fedvi, weight",
    "fedppd",
    "bpfed",
    "lg_fedavg",
)
# Options of the server, or of the end of a round: their steps are those of another row.
SAME_STEPS = (
    *("fedavg, discrepancy", "fedavg, laplace every round", "lg_fedavg, laplace every round", "fedavg, steps"),
    *("fedvi, wc, distance", "fedvi, dwc", "fedswag, low rank", "fedbe, dirichlet"),
)
EVERY = [  # clients of one size need no mask: the network with all that a mask changes will do
    pytest.param(method, network, sizes, marks=[] if daily or method in KINDS else pytest.mark.slow)
    for method in METHODS
    for network, sizes, daily in (
        *(("mlp", UNEQUAL, True), ("batchnorm, dropout", UNEQUAL, True), ("convolution", UNEQUAL, False)),
        ("batchnorm, dropout", [10, 10, 10], True),
    )
]


@pytest.mark.parametrize(("method", "network", "sizes"), EVERY)
def test_loop_and_stacked_agree_to_rounding(network: str, method: str, sizes: list[int]) -> None:
    loop, stacked = one_round(network, method, "loop", sizes), one_round(network, method, "stacked", sizes)
    assert not fallbacks(*stacked.journal), "the stacked engine fell back"
    same(loop, stacked, 1e-9)
    assert loop.journal[0]["train"] == pytest.approx(stacked.journal[0]["train"], rel=1e-6)


@pytest.fixture
def without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps are traced as compilation does it, and the graph of their operations is run as it is."""
    monkeypatch.setattr(torch._inductor, "compile", lambda graph, inputs, **options: graph)


@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=[pytest.mark.slow] if name in SAME_STEPS else []) for name in METHODS]
)
def test_a_traced_step_is_the_step(method: str, without_kernels: None) -> None:
    network = "batchnorm, dropout" if method in KINDS else "mlp"
    eager, traced = (one_round(network, method, "stacked", UNEQUAL, compile=how) for how in ("off", "on"))
    assert not fallbacks(*traced.journal), "compilation fell back"
    same(eager, traced, 1e-9)


@pytest.mark.parametrize("method", KINDS)
def test_steps_compiled_beside_a_run_are_the_steps(
    method: str, without_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    class AtOnce:
        """The other process's end, in this one."""

        done, fault, mark = True, None, staticmethod(list)

        def __init__(self, *program: object) -> None:
            parts, options = read(BytesIO(written(*program)))
            assert options == program[1]
            for (graph, shapes), (ours, own) in zip(parts, program[0], strict=True):
                assert (graph.code, shapes) == (ours.code, own)

    monkeypatch.setattr("fedbayes.engine.compiled.Beside", AtOnce)
    runs = [one_round("mlp", method, "stacked", UNEQUAL, compile=how, rounds=3) for how in ("off", "soon")]
    switch = "steps run compiled from round 3 on, eagerly before: the same to rounding only"
    assert not fallbacks(runs[1].journal[0])
    assert not fallbacks(runs[1].journal[1])
    assert set(runs[1].journal[2]["notes"]) == {switch}
    same(*runs, 1e-9)


class WithConstants(nn.Module):
    """A frozen layer, a tensor that is no buffer, and one that is made anew at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.last = nn.Linear(6, 3)
        self.scale = torch.linspace(0.5, 1, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.frozen(x).tanh() * self.scale + torch.tensor(2.0, dtype=x.dtype))


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_what_is_no_input_of_a_step_is_a_constant_of_the_program(method: str, without_kernels: None) -> None:
    runs = []
    for how in ("off", "on"):
        torch.manual_seed(3)
        network = WithConstants().double()
        runs.append(fit(network, sites(UNEQUAL), method=method, rounds=2, seed=4, engine="stacked", compile=how))
    assert not notes_of(runs[1])
    same(*runs, 1e-9)


def test_the_choice_of_chunks_changes_nothing() -> None:
    torch.manual_seed(3)
    network = NETWORKS["mlp"]().double()
    answers = []
    for chunk in (1, 2, 5):
        task = prepare(network, sites(UNEQUAL), method="feduab", rounds=1, seed=4)
        task.engine.chunk = chunk
        (progress, _), *_ = rounds(task, task.begin(), Memory())
        answers.append(progress.state.broadcast["model"].mean)
    torch.testing.assert_close(answers[0], answers[1], rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(answers[0], answers[2], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("method", ["fedavg", "feduab"])
def test_a_sweep_equals_its_members_run_alone(method: str) -> None:
    data = sites(UNEQUAL)
    torch.manual_seed(3)
    network = NETWORKS["mlp"]().double()
    tasks = [
        prepare(network, data, method=fb.methods.method_named(method, {"lr": lr}), rounds=1, cohort=3, seed=seed)
        for lr, seed in ((0.05, 0), (0.1, 0), (0.05, 1))
    ]
    orders = [task.orders(task.begin())[-1] for task in tasks]
    owns = [Memory().get for _ in tasks]
    together = run_all([task.engine for task in tasks], [task.program for task in tasks], orders, owns)
    for task, order, own, outcome in zip(tasks, orders, owns, together):
        alone = task.engine.run(task.program, order, own)
        assert outcome.terms is not None
        for part, statistics in alone.terms.items():
            for key, value in statistics.items():
                torch.testing.assert_close(outcome.terms[part][key], value, rtol=1e-9, atol=1e-9)


def test_a_diverging_client_is_left_out_of_a_stack_as_of_a_loop() -> None:
    data = sites([10, 10, 10])
    data.data.x[data.train_rows(1)] = 1e30
    runs = []
    for engine in ("loop", "stacked"):
        torch.manual_seed(3)
        runs.append(fit(NETWORKS["mlp"]().double(), data, method="fedavg", rounds=2, engine=engine))
    assert list(runs[0].journal[0]["left_out"]) == list(runs[1].journal[0]["left_out"])
    same(*runs, 1e-9)


class Stubborn(nn.Module):
    """A network that vmap can't take: it looks at a value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out = self.linear(x)
        return out * 2 if out.sum().item() > 1e9 else out


def test_a_network_that_vmap_cannot_take_runs_in_the_loop_and_says_so() -> None:
    torch.manual_seed(3)
    network = Stubborn().double()
    stacked = fit(network, sites(UNEQUAL), method="fedavg", rounds=2, engine="stacked")
    loop = fit(network, sites(UNEQUAL), method="fedavg", rounds=2, engine="loop")
    assert "loop instead of stacked" in stacked.journal[0]["notes"][0]
    assert "notes" not in stacked.journal[1]
    same(stacked, loop, 0.0)


def test_a_compilation_that_fails_falls_back_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("no C++ compiler")

    monkeypatch.setattr(torch._inductor, "compile", broken)
    torch.manual_seed(3)
    network = NETWORKS["mlp"]().double()
    compiled = fit(network, sites(UNEQUAL), method="feduab", rounds=1, engine="stacked", compile="on")
    plain = fit(network, sites(UNEQUAL), method="feduab", rounds=1, engine="stacked", compile="off")
    assert compiled.journal[0]["notes"] == ["steps run eager instead of compiled: no C++ compiler"]
    same(compiled, plain, 1e-12)


def test_out_of_memory_means_smaller_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Steps.run

    def small_memory(self: Steps, work: object, state: object) -> object:
        if work.together.size > 2:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, work, state)

    torch.manual_seed(3)
    network = NETWORKS["mlp"]().double()
    plain = fit(network, sites([10] * 5), method="fedavg", rounds=1, engine="stacked")
    monkeypatch.setattr(Steps, "run", small_memory)
    cramped = fit(network, sites([10] * 5), method="fedavg", rounds=1, engine="stacked")
    assert "2 clients at once" in cramped.journal[0]["notes"][0]
    same(cramped, plain, 1e-10)


def test_out_of_memory_means_smaller_chunks_of_a_sweep_too(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Steps.run

    def small_memory(self: Steps, work: object, state: object) -> object:
        if work.together.size > 4:
            raise torch.OutOfMemoryError("out of memory")
        return whole(self, work, state)

    torch.manual_seed(3)
    network = BatchNormed().double()
    answers = []
    for cramped in (False, True):
        if cramped:
            monkeypatch.setattr(Steps, "run", small_memory)
        options = {"rounds": 2, "engine": "stacked", "compile": "off"}
        tasks = [prepare(network, sites([10] * 5), method="fedavg", seed=seed, **options) for seed in (0, 1)]
        *_, last = rounds_together(tasks, [task.begin() for task in tasks], [Memory() for _ in tasks])
        answers.append([entry[0].state.broadcast["model"].mean for entry in last])
        assert tasks[0].engine.widths["train"].chunk == (2 if cramped else tasks[1].engine.chunk)
    for plain, cramped in zip(*answers):
        torch.testing.assert_close(cramped, plain, rtol=1e-10, atol=1e-10)


def test_compiled_steps_agree_with_eager_ones() -> None:
    torch.manual_seed(3)
    network, data = NETWORKS["mlp"]().double(), sites([10] * 3)
    compiled = fit(network, data, method="feduab", rounds=1, engine="stacked", compile="on")
    eager = fit(network, data, method="feduab", rounds=1, engine="stacked", compile="off")
    if "notes" in compiled.journal[0]:
        pytest.skip(f"nothing can be compiled here: {compiled.journal[0]['notes'][0]}")
    same(compiled, eager, 1e-10)


def test_ghosts_fill_a_compiled_chunk_without_changing_the_sum() -> None:
    torch.manual_seed(3)
    network, data = NETWORKS["mlp"]().double(), sites([10] * 5)
    task = prepare(network, data, method="fedavg", rounds=1, engine="stacked")
    order = task.orders(task.begin())[-1]
    plain = task.engine.run(task.program, order, Memory().get)
    task.engine.steps.mode = "as if compiled"
    task.engine.bound(task.program, order).chunk = 3
    monkey = Steps("eager")
    task.engine.steps._run, task.engine.steps._step = monkey._run, monkey._step
    ghosts = task.engine.run(task.program, order, Memory().get)
    assert isinstance(task.engine, Stacked)
    torch.testing.assert_close(ghosts.terms["model"]["mean"], plain.terms["model"]["mean"], rtol=1e-12, atol=1e-12)
    assert ghosts.counted == plain.counted == 5


def test_schedules_made_ahead_are_those_made_in_time() -> None:
    torch.manual_seed(3)
    task = prepare(NETWORKS["mlp"]().double(), sites(UNEQUAL), method="fedavg", rounds=2, cohort=3, engine="stacked")
    bound = task.engine.bound(task.program, task.orders(task.begin())[-1])
    in_time = {k: bound.schedule(1, k, 0) for k in range(len(UNEQUAL))}
    bound.look_ahead(1)
    ahead = dict(bound._ahead)
    assert sorted(k for _, k, _ in ahead) == list(task.scheduler.cohort(1))
    for (_, k, _), one in ahead.items():
        assert torch.equal(one.rows, in_time[k].rows)


def test_an_evaluation_that_cannot_be_captured_runs_all_the_same_and_says_so_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def broken(*args: object) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr("fedbayes.engine.steps.Captured", broken)
    torch.manual_seed(3)
    task = prepare(NETWORKS["mlp"]().double(), sites(UNEQUAL), method="feduab", rounds=1, engine="stacked")
    state = task.begin().state
    plain = evaluate(task, state)
    task.engine.steps.mode = "graph"
    assert evaluate(task, state) == evaluate(task, state) == plain
    assert task.engine.take_notes() == [
        "evaluation runs without a graph: operation not permitted when stream is capturing"
    ]


def test_a_graph_is_made_once_for_each_thing_that_is_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []

    class Recorded:
        def __init__(self, f: object, inputs: object) -> None:
            made.append(inputs)
            self.f = f

        def __call__(self, inputs: object) -> object:
            return self.f(inputs)

    monkeypatch.setattr("fedbayes.engine.steps.Captured", Recorded)
    torch.manual_seed(3)
    task = prepare(
        NETWORKS["mlp"]().double(), sites([20, 20]), method="feduab", rounds=3, engine="stacked", validation=0.2
    )
    task = replace(task, carry=partial(_as_graph, task.engine.steps, task.carry))
    records = [record for _, record in rounds(task, task.begin(), Memory())]
    assert len(made) == 2, "one for the test set, one for the validation rows"
    assert len({record["test"]["nll"] for record in records}) == 3
    for progress, record in rounds(task, task.begin(), Memory()):
        assert evaluate(task, progress.state) == record["test"]
    assert len(made) == 2


def _as_graph(steps: Steps, carry: Callable[..., object], *args: object) -> object:
    before, steps.mode = steps.mode, "graph"
    try:
        return carry(*args)
    finally:
        steps.mode = before


def notes_of(run: fb.Run) -> list[str]:
    return fallbacks(*run.journal)


COLD = {"temperature": 0.0, "input_noise": 0.0}
SERVER = {"server_batch": 5, "server_epochs": 3, "swa_start": 3, "swa_every": 2}
QUIET = {
    "fedppd": COLD,
    "fedppd_distill": {**COLD, **SERVER, "schedule": "epochs", "upload": "last"},
    "fedbe": SERVER,
    "fedswag": {"covariance": "low_rank", "rank": 3},
    "fedpa": {"samples": 3},
}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is seen here")
class TestOnACudaDevice:
    """What has no noise must agree with the CPU to rounding; what has, must repeat with its seed."""

    def run(self, method: str, device: str, compile: str, **options: object) -> fb.Run:
        torch.manual_seed(3)
        made = fb.methods.method_named(method, {"batch": 5, "epochs": 2})
        network = NETWORKS["mlp"]().double()
        return fit(network, sites(UNEQUAL), method=made, seed=4, device=device, compile=compile, **options)

    @pytest.mark.parametrize("compile", ["off", "captured", "on", "graph"])
    @pytest.mark.parametrize("options", [{}, {"dropout": 0.4}], ids=["all", "drop-outs"])
    def test_fedavg_agrees_with_the_cpu(self, compile: str, options: dict[str, float]) -> None:
        there = self.run("fedavg", "cuda", compile, rounds=3, engine="stacked", **options)
        here = self.run("fedavg", "cpu", "off", rounds=3, engine="loop", **options)
        assert not notes_of(there)
        torch.testing.assert_close(there.posterior.mean.cpu(), here.posterior.mean, rtol=1e-9, atol=1e-9)

    @pytest.mark.parametrize("compile", ["off", "captured", "graph"])
    @pytest.mark.parametrize("method", QUIET)
    def test_distilled_methods_without_noise_agree_with_the_cpu(self, method: str, compile: str) -> None:
        """Three rounds: a graph that went on with the first round's pseudo-labels would be found out."""
        server = torch.linspace(-2, 2, 13 * 6, dtype=torch.float64).sin().reshape(13, 6)
        runs = []
        for device, how, engine in (("cuda", compile, "stacked"), ("cpu", "off", "loop")):
            torch.manual_seed(3)
            made = fb.methods.method_named(method, {"batch": 5, "epochs": 2, **QUIET[method]})
            network, options = NETWORKS["mlp"]().double(), {"device": device, "compile": how, "engine": engine}
            runs.append(fit(network, sites(UNEQUAL), method=made, rounds=3, seed=4, server_data=server, **options))
        assert not notes_of(runs[0])
        for part, q in runs[1].parts.items():
            torch.testing.assert_close(runs[0].parts[part].mean.cpu(), q.mean, rtol=1e-8, atol=1e-8)

    @pytest.mark.parametrize("method", ["fedavg", "feduab", "fedag"])
    def test_a_captured_evaluation_is_the_one_that_is_not(self, method: str) -> None:
        """Of two posteriors in turn: a graph that kept its first inputs would be found out."""
        runs = [self.run(method, "cuda", "graph", rounds=number, engine="stacked") for number in (1, 3)]
        assert not [note for run in runs for note in notes_of(run)]
        task = runs[0].task
        for run in (*runs, *runs):
            state = run.progress.state
            captured = evaluate(task, state)
            task.engine.steps.mode = "eager"
            plain = evaluate(task, state)
            task.engine.steps.mode = "graph"
            assert captured == pytest.approx(plain, rel=1e-6)
            assert captured == pytest.approx(run.journal[-1]["test"], rel=1e-6)

    @pytest.mark.parametrize("compile", ["off", "captured", "on", "graph"])
    @pytest.mark.parametrize("method", ["fedavg", "fedvi"])
    def test_convolutions_and_batch_norm_agree_with_the_cpu(self, method: str, compile: str) -> None:
        """FedVI's scales are so small that its noise is; its step hands the parts on in an order of its own."""
        options = {"fedvi": {"initial": 1e-12, "kl_weight": 0.0, "optimiser": "adam"}}.get(method, {})
        made = fb.methods.method_named(method, {"batch": 4, "epochs": 2, "lr": 0.01, **options})
        runs = []
        for device, how, engine in (("cuda", compile, "stacked"), ("cpu", "off", "loop")):
            network = network_named("resnet", (3, 8, 8), 3, depth=8, width=2).double()
            there = {"device": device, "compile": how, "engine": engine}
            runs.append(fit(network, images(UNEQUAL), method=made, rounds=2, seed=4, **there))
        assert not notes_of(runs[0])
        for part, q in runs[1].parts.items():
            torch.testing.assert_close(runs[0].parts[part].mean.cpu(), q.mean, rtol=1e-6, atol=1e-6)

    def test_flows_at_home_are_captured_and_agree_in_law(self) -> None:
        """Steps that are too few to be compiled: other noise moves a prediction by .04, the lack of a flow by .12."""
        flow = {"refine": "flow", "flow_epochs": 150, "flow_lr": 0.02, "flow_batch": 8, "flow_draws": 8}
        made = fb.methods.method_named("fedavg", {**flow, "batch": 5, "epochs": 2, "test_draws": 2000})
        runs = []
        for device, compile, engine in (("cuda", "graph", "stacked"), ("cpu", "off", "loop")):
            torch.manual_seed(3)
            options = {"device": device, "compile": compile, "engine": engine}
            runs.append(fit(NETWORKS["mlp"]().double(), sites(UNEQUAL), method=made, rounds=2, seed=4, **options))
        x = runs[0].task.clients.data.x[:40]
        there, here = (run.personal(1).as_run.predict(x).probs.cpu() for run in runs)
        assert not runs[0].task.engine.take_notes()
        without = runs[1].refined("laplace").personal(1).as_run.predict(x).probs
        assert (there - here).abs().max() < 0.07 < (without - here).abs().max()

    @pytest.mark.parametrize("recompute", [False, ["0"]], ids=["plain", "recomputed"])
    def test_steps_that_are_captured_and_not_compiled_are_those_of_the_cpu(self, recompute: bool | list[str]) -> None:
        """Nothing is compiled for them: no program of Inductor is made."""
        from torch._inductor.utils import fresh_inductor_cache

        with fresh_inductor_cache() as files:
            there = self.run("fedavg", "cuda", "captured", rounds=2, engine="stacked", recompute=recompute)
            assert not files
        here = self.run("fedavg", "cpu", "off", rounds=2, engine="loop")
        assert not notes_of(there)
        assert there.task.engine.steps.mode == "captured"
        torch.testing.assert_close(there.posterior.mean.cpu(), here.posterior.mean, rtol=1e-9, atol=1e-9)

    def test_steps_of_unequal_clients_with_a_state_of_their_own_are_captured(self) -> None:
        made = self.run("bpfed", "cuda", "graph", rounds=2, engine="stacked")
        assert not notes_of(made)
        check(made.progress.state.broadcast[made.task.program.prediction.part])

    @pytest.mark.parametrize("compile", ["off", "captured", "graph"])
    def test_a_seed_repeats_a_run_and_its_resumption(self, compile: str) -> None:
        whole = self.run("feduab", "cuda", compile, rounds=3, engine="stacked")
        again = self.run("feduab", "cuda", compile, rounds=3, engine="stacked")
        assert torch.equal(whole.posterior.mean, again.posterior.mean)
        first = self.run("feduab", "cuda", compile, rounds=1, engine="stacked")
        torch.manual_seed(3)
        made = fb.methods.method_named("feduab", {"batch": 5, "epochs": 2})
        rest = prepare(
            NETWORKS["mlp"]().double(), sites(UNEQUAL), method=made, rounds=3, seed=4, device="cuda",
            compile=compile, engine="stacked",
        )  # fmt: skip
        *_, (progress, _) = rounds(rest, first.progress, Memory())
        assert torch.equal(progress.state.broadcast["model"].mean, whole.posterior.mean)
