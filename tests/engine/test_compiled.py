import sys

import torch
import torch._inductor.config

from fedbayes.engine.compiled import SMALL, Compiled, launches, traced


def test_words_of_the_command_line_stay_out_of_what_is_compiled(monkeypatch):
    arguments = ["fedbayes", "table", "fedppd-1", "--only", "FedAvg with the student's network"]
    monkeypatch.setattr(sys, "argv", list(arguments))
    x = torch.arange(7.0)
    # Compiled code has a cosine of its own.
    torch.testing.assert_close(Compiled(lambda t: {"twice": (t + t).cos()})(x)["twice"], (x + x).cos())
    assert sys.argv == arguments


def test_launches_are_joined_on_a_gpu_where_tensors_are_small():
    small, large = (traced(lambda t: [t.sin()], [torch.empty(n)], again=False) for n in (SMALL, SMALL + 1))
    assert launches(small, "cuda") == {"combo_kernels": True}
    assert launches(large, "cuda") == launches(small, "cpu") == {}


def test_the_compiler_knows_the_options():
    small = traced(lambda t: [t.sin()], [torch.empty(3)], again=False)
    assert set(launches(small, "cuda")) <= set(torch._inductor.config.get_config_copy())
