"""Compiled code is kept where nobody else can write, and the kept program is the fresh one."""

import os
import warnings
from pathlib import Path

import pytest
import torch

from fedbayes.engine import kept
from fedbayes.engine.compiled import Compiled

posix = pytest.mark.skipif(not hasattr(os, "getuid"), reason="owners of folders are POSIX's")


def steps(constant):
    def step(x, scale):
        return {"out": (x * scale + constant).tanh().sum(-1), "same": x - constant}

    return step


@pytest.mark.parametrize("width", [3, 40])  # constants that are written into the code, and such as are not
def test_a_kept_program_gives_the_same_bits_and_another_constant_is_another_program(width):
    from torch._dynamo.utils import counters

    x, scale = torch.randn(5, width), torch.tensor(1.7)
    constant = torch.arange(float(width))
    fresh = Compiled(steps(constant))(x, scale)
    before = counters["inductor"]["fxgraph_cache_hit"]
    again = Compiled(steps(constant.clone()))(x, scale)
    assert counters["inductor"]["fxgraph_cache_hit"] == before + 1
    for name in fresh:
        torch.testing.assert_close(again[name], fresh[name], rtol=0, atol=0)
    other = Compiled(steps(constant + 1))(x, scale)
    torch.testing.assert_close(other["same"], x - constant - 1)
    torch.testing.assert_close(other["out"], (x * scale + constant + 1).tanh().sum(-1))


def test_shapes_are_numbers_in_what_is_compiled(monkeypatch):
    from torch._inductor import compile_fx

    lowered = []
    inner = compile_fx.fx_codegen_and_compile

    def seen(traced, inputs, *rest, **options):
        lowered.extend(size for t in inputs for size in t.shape)
        return inner(traced, inputs, *rest, **options)

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", seen)
    with torch._inductor.config.patch(force_disable_caches=True):
        x = torch.rand(6, 9, 9)
        torch.testing.assert_close(Compiled(lambda t: t.flatten(1).cos())(x), x.flatten(1).cos())
    assert lowered == [6, 9, 9]
    assert all(type(size) is int for size in lowered)


@pytest.fixture
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDBAYES_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv(kept.INDUCTOR, raising=False)
    return tmp_path / "cache"


@posix
def test_inductor_keeps_its_programs_in_a_folder_of_the_user_alone(home, monkeypatch):
    kept.keep_programs()
    folder = Path(os.environ[kept.INDUCTOR])
    assert folder.is_relative_to(home)
    assert folder.parent.stat().st_mode & 0o777 == 0o700
    monkeypatch.setenv(kept.INDUCTOR, f"{kept.default_folder()}somebody")
    kept.keep_programs()
    assert Path(os.environ[kept.INDUCTOR]) == folder
    monkeypatch.setenv(kept.INDUCTOR, "/of/my/own")
    kept.keep_programs()
    assert os.environ[kept.INDUCTOR] == "/of/my/own"


@posix
@pytest.mark.parametrize("open_to_others", ["cache", "."], ids=["the folder", "one above it"])
def test_code_is_not_taken_from_where_others_can_write(home, open_to_others):
    folder = kept.code_folder()
    assert folder.is_relative_to(home)
    (folder if open_to_others == "." else home).chmod(0o777)
    with pytest.warns(UserWarning, match=r"not kept .* other users may write to .* FEDBAYES_CACHE"):
        private = kept.code_folder()
    assert not private.is_relative_to(home)
    assert private.stat().st_mode & 0o777 == 0o700


@posix
def test_a_folder_of_another_user_is_refused(home, monkeypatch):
    kept.code_folder()
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    monkeypatch.setattr(kept, "_private", lambda group: False)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert not kept.code_folder().is_relative_to(home)


def test_a_folder_that_cannot_be_made_costs_time_and_not_the_run(home):
    home.write_text("a file in its place")
    with pytest.warns(UserWarning, match="not kept for the next run"):
        assert kept.code_folder().is_dir()


def test_a_folder_of_the_user_is_used_without_a_word(home):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert kept.code_folder() == kept.code_folder()
