"""Adapters in files: merged programs, ensembles with one body, and PEFT's format, written and read."""

import importlib.util
import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_export import images
from torch import Tensor, nn
from typer.testing import CliRunner

import fedbayes as fb
from fedbayes.cli import app
from fedbayes.errors import InputError
from fedbayes.export.program import export, export_adapters, predictor_of


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 20, 3, padding=1, stride=2), nn.BatchNorm2d(20)
        self.body, self.head = nn.Linear(20, 40), nn.Linear(40, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(torch.relu(self.norm(self.conv(x))).mean((-2, -1))).tanh())


def network() -> nn.Module:
    torch.manual_seed(0)
    return Small()


def trained(**table: object) -> fb.Run:
    clients = images().split(fb.partition.iid(), clients=4)
    method = fb.methods.feduab(test_draws=5, lr=0.3, epochs=2)
    return fb.fit(network(), clients, method=method, rounds=2, adapters={"rank": 2, **table})


def test_an_exported_mean_is_merged_and_members_share_the_body(tmp_path):
    run = trained()
    x = run.task.clients.data.test_x
    mean = predictor_of(run, "mean")
    assert not any("lora" in name for name, _ in mean.named_parameters())
    logits = run.module()(run.task.clients.data.prepare(x)).detach()
    torch.testing.assert_close(mean(x)["probs"].detach(), logits.softmax(-1), rtol=1e-4, atol=1e-5)
    export(run, tmp_path, draws=2)
    sizes = {name: len(t) for name, t in load_file(tmp_path / "model.safetensors").items()}
    assert sizes["conv.weight"] == 1
    assert sizes["conv.lora_B"] == 2
    spec = importlib.util.spec_from_file_location("model", tmp_path / "model.py")
    model = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(model)
    torch.testing.assert_close(model.load(tmp_path)(x)["probs"], run.predict(x, draws=2).probs, rtol=1e-4, atol=1e-5)


def test_files_in_pefts_format_hold_the_mean_and_are_read_again(tmp_path):
    run = trained(full=["head.*", "norm.*"])
    export_adapters(run, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 2)
    assert config["target_modules"] == ["body", "conv"]
    assert config["modules_to_save"] == ["head", "norm"]
    tensors = load_file(tmp_path / "a" / "adapter_model.safetensors")
    at, merged = "base_model.model.", run.module()
    b, a = tensors[at + "body.lora_B.weight"], tensors[at + "body.lora_A.weight"]
    torch.testing.assert_close(merged.body.weight.detach(), network().body.weight + b @ a)
    assert torch.equal(tensors[at + "norm.running_mean"], merged.norm.running_mean)
    scales = load_file(tmp_path / "a" / "adapter_scales.safetensors")
    assert torch.equal(scales["body.lora_B"], dict(run.posterior.named())["body.lora_B"].scale)
    # As others write it: lora_alpha is not r, and a layer has a rank of its own.
    config |= {"lora_alpha": 6, "alpha_pattern": {"conv": 1}}
    tensors[at + "conv.lora_A.weight"] *= 2
    tensors[at + "body.lora_A.weight"] /= 3
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, tmp_path / "a" / "adapter_model.safetensors")
    clients = run.task.clients
    again = fb.fit(network(), clients, method="fedavg", rounds=0, adapters={"path": str(tmp_path / "a")})
    for (name, ours), theirs in zip(again.module().state_dict().items(), merged.state_dict().values()):
        torch.testing.assert_close(ours, theirs, msg=name)
    assert {*again.parts["model"].layout.names} == {*run.posterior.layout.names, "norm.weight", "norm.bias"}


@pytest.mark.parametrize(
    ("config", "name", "says"),
    [
        ({"peft_type": "IA3"}, "body.lora_A.weight", "is of no LoRA adapters"),
        ({"peft_type": "LORA", "use_dora": True}, "body.lora_A.weight", "has use_dora, which is not W"),
        ({"peft_type": "LORA"}, "body.lora_A.weight", "lacks a factor of some layer"),
        ({"peft_type": "LORA"}, "body.lora_magnitude_vector", "which is no factor of W"),
        ({"peft_type": "LORA"}, "other.weight", "lacks a factor"),
        ([1], "other.weight", "is no table of options"),
        ({"peft_type": "LORA", "alpha_pattern": [2]}, "other.weight", "is no table of options"),
    ],
)
def test_files_of_something_else_are_refused(tmp_path, config, name, says):
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    save_file({f"base_model.model.{name}": torch.zeros(2, 20)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(InputError, match=says):
        trained(path=str(tmp_path))


def test_adapters_of_another_network_are_refused(tmp_path):
    at = "base_model.model.body.lora_"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 2}))
    save_file(
        {f"{at}A.weight": torch.zeros(2, 9), f"{at}B.weight": torch.zeros(40, 2)},
        tmp_path / "adapter_model.safetensors",
    )
    with pytest.raises(InputError, match="has adapters of body for another network"):
        trained(path=str(tmp_path))
    with pytest.raises(InputError, match=r"can't be read .*; give a folder that PEFT's save_pretrained wrote"):
        trained(path=str(tmp_path / "nowhere"))


def test_the_command_line_writes_them(tmp_path):
    text = 'data = "digits"\nnetwork = "mlp"\nclients = 3\nrounds = 1\nmethod = "fedavg"\nadapters = {rank = 2}\n'
    (tmp_path / "x.toml").write_text(text)
    run = CliRunner().invoke(app, ["run", str(tmp_path / "x.toml"), "--output", str(tmp_path / "run")])
    assert run.exit_code == 0, run.output
    out = CliRunner().invoke(
        app, ["export", str(tmp_path / "run"), "--what", "peft", "--output", str(tmp_path / "peft")]
    )
    assert out.exit_code == 0, out.output
    assert {p.name for p in (tmp_path / "peft").iterdir()} == {"adapter_config.json", "adapter_model.safetensors"}
    with pytest.raises(InputError, match="trained no adapters"):
        export_adapters(fb.fit("linear", images().split(fb.partition.iid(), clients=2), rounds=0), tmp_path)


def test_peft_reads_what_is_written_here(tmp_path):
    peft = pytest.importorskip("peft", reason="peft is not installed: its format is read by the test above alone")
    run = trained(full=["head.*", "norm.*"])
    export_adapters(run, tmp_path)
    theirs = peft.PeftModel.from_pretrained(network(), str(tmp_path)).eval()
    x = run.task.clients.data.prepare(run.task.clients.data.test_x)
    torch.testing.assert_close(theirs(x), run.module()(x), rtol=1e-4, atol=1e-5)
    model = peft.get_peft_model(network(), peft.LoraConfig(target_modules=["conv", "body"], r=3, lora_alpha=7))
    for name, weight in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(weight)
    model.save_pretrained(tmp_path / "b")
    read = fb.fit(network(), run.task.clients, method="fedavg", rounds=0, adapters={"path": str(tmp_path / "b")})
    torch.testing.assert_close(read.module()(x), model.eval()(x), rtol=1e-4, atol=1e-5)
