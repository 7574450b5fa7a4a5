"""Exported programs and plain files: the same predictions in a process that can't import fedbayes."""

import importlib.util
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.export.program import export, predictor_of
from fedbayes.model.likelihood import normal

# Reads both forms of every export below a folder, and writes what they say of the inputs beside them.
READER = """import sys
sys.modules["fedbayes"] = None
import importlib.util, pathlib, numpy as np, torch
for folder in pathlib.Path(sys.argv[1]).iterdir():
    x = torch.from_numpy(np.load(folder / "x.npy"))
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    with torch.no_grad():
        program = torch.export.load(folder / "model.pt2").module()
        forms = {"program": program(x), "plain": model.load()(x), "one": program(x[:1])}
    said = {f"{form}/{k}": v for form, made in forms.items() for k, v in made.items()}
    np.savez(folder / "said.npz", **said)
"""


def fitted(network: nn.Module, data, method="feduab", **options):
    clients = data.split(fb.partition.iid(), clients=4)
    return fb.fit(network, clients, method=method, rounds=1, **options)


def images(kind=torch.uint8):
    """Twelve pictures of three classes, normalised by channel for the network."""
    random = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (48, 3, 8, 8), generator=random).to(kind)
    prepare = fb.data.Prepare((0.5, 0.4, 0.3), (0.2, 0.3, 0.4))
    y = torch.arange(48) % 3
    return fb.data.from_arrays(x[:36], y[:36], x[36:], y[36:], prepare=prepare, class_names=("a", "b", "c"))


def tokens():
    x = torch.randint(0, 20, (40, 12), generator=torch.Generator().manual_seed(0))
    return fb.data.from_arrays(x[:30], x[:30, 0] % 2, x[30:], x[30:, 0] % 2)


class Norms(nn.Module):
    """A convolution with BatchNorm and dropout, and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout(0.5))
        self.head = nn.Linear(4, 3)
        self.register_buffer("gain", torch.tensor([1.0, 2.0, 3.0, 4.0]))

    def forward(self, x):
        return self.head(self.features(x).mean((2, 3)) * self.gain)


def text_network():
    return nn.Sequential(nn.Embedding(20, 4), nn.Flatten(), nn.Linear(48, 2))


def table_network():
    return nn.Sequential(nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1))


class Centred(nn.Module):
    """Inputs less their mean in training, which is no part of the network's state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(192, 3)
        self.register_buffer("centre", torch.zeros(192), persistent=False)

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.centre.mul_(0.5).add_(x.mean(0).detach())
        return self.head(x - self.centre)


class Namesakes(nn.Module):
    """Weights with names by which an export might call what is not the network's."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.units, self.noise = nn.Linear(10, 1), nn.Module(), nn.Parameter(torch.full((2, 1), 0.5))
        self.units.shift, self.units.scale = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.body(x) * self.units.scale + self.units.shift + self.noise.sum()


CASES = {
    "bytes, BatchNorm, a buffer": lambda: fitted(Norms(), images()),
    "tokens": lambda: fitted(text_network(), tokens()),
    "units of inputs and targets": lambda: fitted(table_network(), fb.data.load("diabetes")),
    "weights named units and noise": lambda: fitted(Namesakes(), fb.data.load("diabetes")),
    "a buffer outside the state dict": lambda: fitted(Centred(), images(), "fedavg"),
    "a learned noise": lambda: fitted(table_network(), fb.data.load("diabetes"), likelihood=normal(learn=True)),
    "a point": lambda: fitted(Norms(), images(), "fedavg"),
    "a full covariance": lambda: fitted(
        nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), images(torch.float32), "laplace"
    ),
    "networks and their noise": lambda: fitted(table_network(), fb.data.load("diabetes"), "fedag"),
}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The run of each case with the folder of its export, read by a process that can't import fedbayes."""
    home = tmp_path_factory.mktemp("export")
    runs = {case: (make(), home / str(i)) for i, (case, make) in enumerate(CASES.items())}
    for run, folder in runs.values():
        export(run, folder, draws=3)
        np.save(folder / "x.npy", run.task.clients.data.test_x.numpy())
    subprocess.run([sys.executable, "-c", READER, str(home)], check=True, cwd=home)
    return runs


@pytest.mark.parametrize("case", CASES)
def test_an_export_predicts_the_same_without_fedbayes(exported, case):
    run, folder = exported[case]
    p = run.predict(run.task.clients.data.test_x, draws=3)
    expected = {"mean" if p.kind == "real" else "probs": p.mean, "aleatoric": p.aleatoric, "epistemic": p.epistemic}
    if p.kind != "real":
        expected |= {"entropy": p.entropy, "mutual_information": p.mutual_information}
    assert json.loads((folder / "model.json").read_text())["outputs"] == list(expected)
    scale = 1.0 if p.kind != "real" else float(p.total.max())
    with np.load(folder / "said.npz") as said:
        for name, value in expected.items():
            for form in ("program", "plain"):
                np.testing.assert_allclose(said[f"{form}/{name}"], value.numpy(), rtol=0, atol=1e-6 * scale)
            np.testing.assert_allclose(said[f"one/{name}"], value[:1].numpy(), rtol=0, atol=1e-6 * scale)


@pytest.mark.parametrize("case", CASES)
def test_no_file_of_an_export_holds_a_row_of_a_client(exported, case):
    run, folder = exported[case]
    program = torch.export.load(folder / "model.pt2")
    (example,), _ = program.example_inputs
    assert not example.any()
    data = run.task.clients.data
    rows = [row.contiguous().numpy().tobytes() for row in data.x if row.any()]
    for name in ("model.pt2", "model.safetensors", "model.py", "model.json"):
        content = (folder / name).read_bytes() if (folder / name).exists() else b""
        assert not any(row in content for row in rows)


def test_the_mean_is_the_network_at_the_posterior_mean(tmp_path):
    run = fitted(text_network(), tokens())
    x = run.task.clients.data.test_x
    made = predictor_of(run, "mean")(x)
    network = text_network()
    network.load_state_dict({name: q.mean for name, q in run.posterior.named().items()})
    torch.testing.assert_close(made["probs"], network(x).softmax(-1))
    assert not made["epistemic"].any()


class HalfHead(nn.Module):
    """A head in half precision over a layer of float32."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 8), nn.Linear(8, 3).to(torch.bfloat16)

    def forward(self, x):
        return self.head(self.body(x.flatten(1)).to(torch.bfloat16))


def test_probabilities_of_half_precision_are_rounded_no_more_than_the_network():
    run = fitted(HalfHead(), images(), "fedavg", frozen=("head.*",))
    x = run.task.clients.data.test_x
    torch.testing.assert_close(predictor_of(run, "mean")(x)["probs"], run.predict(x).probs)


def test_a_module_has_buffers_that_are_outside_the_state_dict():
    run = fitted(Centred(), images(), "fedavg")
    data = run.task.clients.data
    probs = run.module()(data.prepare(data.test_x)).softmax(-1)
    torch.testing.assert_close(probs, run.predict(data.test_x).probs)


def test_tensors_have_the_networks_own_names(tmp_path):
    from safetensors.torch import load_file

    run = fitted(text_network(), tokens())
    export(run, tmp_path, draws=3)
    found = {name: tuple(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert found == {name: (3, *t.shape) for name, t in text_network().state_dict().items()}


def test_an_export_into_the_folder_of_another_leaves_nothing_of_it(tmp_path):
    for name in ("sets.json", "sets.py", "model.onnx", "model.py", "notes.txt"):
        (tmp_path / name).write_text("of an export before")
    written = export(fitted(text_network(), tokens()), tmp_path, draws=2)
    assert {*tmp_path.iterdir()} == {*written, tmp_path / "notes.txt"}


def test_what_can_not_be_exported_is_named(tmp_path):
    run = fitted(text_network(), tokens())
    with pytest.raises(InputError, match=r"student.*ensemble, mean"):
        export(run, tmp_path, "student")
    dropping = fitted(Norms(), images(), fb.methods.fedavg(mc_dropout=True))
    with pytest.raises(InputError, match="export the mean"):
        export(dropping, tmp_path)


class Packed(nn.Module):
    """Texts of their own lengths, which torch.export can't express."""

    def __init__(self, kind: type[nn.RNNBase] = nn.GRU) -> None:
        super().__init__()
        self.words, self.layer, self.head = nn.Embedding(20, 6), kind(6, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        lengths = (x > 9).sum(1).clamp(min=1).cpu()
        packed = nn.utils.rnn.pack_padded_sequence(self.words(x), lengths, batch_first=True, enforce_sorted=False)
        last = self.layer(packed)[1]
        return {"logits": self.head((last[0] if isinstance(last, tuple) else last)[-1])}


class Branching(nn.Module):
    """What it does depends on what it sees; two inputs, a buffer, a mask."""

    def __init__(self, inputs: int = 10, outputs: int = 1, names: bool = False) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(inputs), nn.Linear(inputs, outputs)
        self.register_buffer("mask", torch.tensor([0.0, -torch.inf]))

    def forward(self, x, flag=None):
        x = x if flag is None else torch.cat([x, flag.to(x)], 1)
        return self.head(self.norm(x) if x.sum() > -1e9 else -x) + self.mask.exp()[1]


def fields():
    rows = {"x": torch.randn(30, 9), "flag": torch.arange(30)[:, None] % 2 > 0}
    clients = fb.data.from_clients([(rows, torch.arange(30) % 2)] * 2, test=(rows, torch.arange(30) % 2))
    return fb.fit(Branching(10, 2), clients, method="feduab", rounds=1, engine="loop")


UNTRACED = {
    "packed": (Packed, lambda: fitted(Packed(), tokens())),
    "packed, lstm": (lambda: Packed(nn.LSTM), lambda: fitted(Packed(nn.LSTM), tokens(), "fedavg")),
    "units, a learned noise": (
        Branching,
        lambda: fitted(Branching(), fb.data.load("diabetes"), likelihood=normal(learn=True), engine="loop"),
    ),
    "several inputs": (lambda: Branching(10, 2), fields),
    "adapters": (
        lambda: nn.Sequential(nn.Linear(10, 10), Branching()),
        lambda: fitted(
            nn.Sequential(nn.Linear(10, 10), Branching()),
            fb.data.load("diabetes"),
            engine="loop",
            adapters={"rank": 2, "pattern": "0"},
        ),
    ),
}


def load_of(folder):
    """The function `load` of an export's plain file."""
    text = (folder / "model.py").read_text()
    assert not re.search(r"^\s*(import|from) fedbayes", text, re.M)
    spec = importlib.util.spec_from_file_location("model", folder / "model.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.load


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("case", UNTRACED)
def test_a_network_that_can_not_be_traced_is_given_to_a_plain_file(case, tmp_path, capfd):
    network, run = UNTRACED[case][0](), UNTRACED[case][1]()
    capfd.readouterr()
    with pytest.warns(
        UserWarning, match=r"has no model.pt2: torch\.export can't trace this network .*model.py"
    ) as told:
        written = export(run, tmp_path, draws=3)
    assert [p.name for p in written] == ["model.safetensors", "model.py", "model.json"]
    assert all("\n" not in str(warning.message) for warning in told)
    assert capfd.readouterr() == ("", "")
    x = run.task.clients.data.test_x
    p = run.predict(x, draws=3)
    said = load_of(tmp_path)(network)(x)
    scale = 1.0 if p.kind != "real" else float(p.total.max())
    torch.testing.assert_close(said["mean" if p.kind == "real" else "probs"], p.mean, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(said["epistemic"], p.epistemic, rtol=0, atol=1e-5 * scale)
    with pytest.raises(ValueError, match="give the network that was trained"):
        load_of(tmp_path)(nn.Linear(3, 2))


def test_without_a_program_there_is_no_onnx_file(tmp_path, monkeypatch):
    for name in ("onnx", "onnxscript"):
        monkeypatch.setitem(sys.modules, name, sys)
    with pytest.raises(InputError, match=r"torch\.export can't trace this network"):
        export(fitted(Packed(), tokens(), "fedavg"), tmp_path, onnx=True)


def test_a_program_holds_no_row_of_the_data(tmp_path):
    run = fitted(table_network(), fb.data.load("diabetes"))
    export(run, tmp_path)
    (example,), _ = torch.export.load(tmp_path / "model.pt2").example_inputs
    assert not example.any()


def test_onnx_is_an_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnx", None)
    with pytest.raises(InputError, match=r"pip install 'fedbayes\[onnx\]'"):
        export(fitted(text_network(), tokens(), "fedavg"), tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()


def test_an_onnx_file_is_written(tmp_path):
    onnx = pytest.importorskip("onnx", reason="needs fedbayes[onnx]")
    pytest.importorskip("onnxscript", reason="needs fedbayes[onnx]")
    export(fitted(text_network(), tokens()), tmp_path, draws=2, onnx=True)
    outputs = [value.name for value in onnx.load(tmp_path / "model.onnx").graph.output]
    assert outputs == ["probs", "aleatoric", "epistemic", "entropy", "mutual_information"]


class Two(nn.Module):
    """A network of tokens and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.numbers, self.head = nn.Embedding(9, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, ids, age):
        return self.head(self.words(ids).mean(1) + self.numbers(age))


def test_the_card_says_how_several_tensors_lie_in_a_row(tmp_path):
    rows = {"ids": torch.arange(24).reshape(6, 4) % 9, "age": torch.randn(6, 2)}
    run = fb.fit(Two(), [(rows, torch.arange(6) % 2)] * 2, method="fedavg", rounds=1)
    export(run, tmp_path)
    fields = json.loads((tmp_path / "model.json").read_text())["input"]["fields"]
    assert [(f["name"], f["shape"], f["type"]) for f in fields] == [("ids", [4], "int64"), ("age", [2], "float32")]
    x = torch.cat([rows[f["name"]].flatten(1).float() for f in fields], 1)
    said = torch.export.load(tmp_path / "model.pt2").module()(x)
    torch.testing.assert_close(said["probs"], run.predict(rows).probs)
