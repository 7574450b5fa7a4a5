"""Many parts of a step are compiled by several processes, and found by this one."""

import pickle

import pytest
import torch

from fedbayes.engine import beside, several
from fedbayes.engine.beside import plain
from fedbayes.engine.compiled import traced
from fedbayes.engine.kept import INDUCTOR
from fedbayes.engine.repeats import Part


def test_parts_are_shared_out_by_size_where_there_are_cores():
    sizes = [900, 100, 500, 400, 300]
    assert several.shared_out(sizes, 3) == [[0, 2, 3, 4, 1]]
    assert several.shared_out(sizes, 4) == [[0, 4], [2, 3, 1]]
    assert several.shared_out(sizes, 8) == [[0], [2], [3], [4, 1]]
    assert len(several.shared_out([100] * 20, 64)) == several.MOST
    assert several.shared_out([100, 90], 64) == [[0, 1]]  # too little for another process


def test_processes_and_their_helpers_are_no_more_than_there_are_cores():
    for cores in range(1, 130):
        assert several.processes_on(cores) * several.helpers_on(cores) <= max(cores, several.processes_on(cores))
    assert [several.helpers_on(cores) for cores in (1, 2, 4, 16, 64)] == [1, 2, 2, 2, 8]


def first(t):
    return [(t.cos() + torch.arange(3.0)).sin()]


def second(t):
    return [t * 2 + torch.arange(3.0), t - 1]


def parts():
    x = torch.empty(3)
    shapes = [(x.shape, x.stride(), x.dtype, x.device, 0)]
    return [Part(plain(traced(f, [x], again=False)), shapes) for f in (first, second)]


@pytest.fixture
def _two(monkeypatch, tmp_path):
    """Another process compiles the first part; nothing is kept yet."""
    monkeypatch.setenv(INDUCTOR, str(tmp_path))
    monkeypatch.setattr(several, "shared_out", lambda sizes, cores: [[1], [0]])


def checked(made):
    x = torch.rand(3)
    for ours, theirs in zip(made, (first, second), strict=True):
        torch.testing.assert_close(list(ours(x)), theirs(x))


@pytest.mark.usefixtures("_two")
def test_what_another_process_compiled_is_only_loaded_and_the_next_time_without_one(monkeypatch):
    from torch._inductor import compile_fx

    torch.set_float32_matmul_precision("highest")
    compiled, own = [], compile_fx.fx_codegen_and_compile
    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", lambda *a, **k: compiled.append(a) or own(*a, **k))
    checked(several.made(parts(), {"cpp.threads": 1}))
    assert len(compiled) == 1
    monkeypatch.setattr(beside.subprocess, "Popen", lambda *a, **k: pytest.fail("another process was begun"))
    checked(several.made(parts(), {"cpp.threads": 1}))
    assert len(compiled) == 1


def test_a_part_that_takes_views_alone_is_not_compiled(monkeypatch):
    x = torch.rand(6)
    shapes = [(x.shape, x.stride(), x.dtype, x.device, 0)]
    graphs = [plain(traced(f, [x], again=False)) for f in (lambda t: [t[:3]], lambda t: [t[:3] + 1])]
    compiled = []
    monkeypatch.setattr(several, "kernels", lambda graph, shapes, options: compiled.append(graph) or graph)
    views, sums = several.made([Part(graph, shapes) for graph in graphs], {})
    assert compiled == [sums]
    assert views is graphs[0]
    torch.testing.assert_close(views(x)[0], x[:3])


@pytest.mark.usefixtures("_two")
def test_what_another_process_could_not_compile_is_compiled_here(monkeypatch):
    monkeypatch.setattr(beside, "written", lambda parts, options: b"nothing that can be read")
    checked(several.made(parts(), {"cpp.threads": 1}))


@pytest.mark.usefixtures("_two")
def test_what_cannot_be_sent_to_another_process_is_compiled_here(monkeypatch):
    def unwritable(parts, options):
        raise pickle.PicklingError("an operation without a name")

    monkeypatch.setattr(beside, "written", unwritable)
    assert "an operation without a name" in str(beside.Beside(parts(), {}).fault)
    checked(several.made(parts(), {"cpp.threads": 1}))


@pytest.mark.usefixtures("_two")
def test_where_no_process_can_be_begun_all_is_compiled_here(monkeypatch):
    def full(*args, **options):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(beside.subprocess, "Popen", full)
    monkeypatch.setattr(several, "cores", lambda: 6)
    assert beside.Beside(parts(), {}).fault == "no process can be begun: Resource temporarily unavailable"
    with several.begun("cuda") as waiting:
        assert not waiting
        checked(several.made(parts(), {"cpp.threads": 1}, waiting))


@pytest.mark.usefixtures("_two")
def test_no_process_outlives_a_fault(monkeypatch):
    ended, own = [], beside.Beside.end
    monkeypatch.setattr(beside.Beside, "end", lambda self: ended.append(self) or own(self))

    def fails(*part):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(several, "kernels", fails)
    with pytest.raises(RuntimeError, match="no compiler"):
        several.made(parts(), {"cpp.threads": 2})
    assert [one.done for one in ended] == [True]


@pytest.mark.usefixtures("_two")
def test_a_process_that_waits_compiles_the_first_part_and_the_others_are_ended(monkeypatch):
    begun, own = [], several.Waiting
    monkeypatch.setattr(several, "Waiting", lambda helpers: begun.append(own(helpers)) or begun[-1])
    monkeypatch.setattr(several, "cores", lambda: 6)
    with several.begun("cuda") as waiting:
        assert waiting == begun
        assert len(begun) == 2
        checked(several.made(parts(), {"cpp.threads": 1}, waiting))
        assert len(waiting) == 1
    assert len(begun) == 2
    assert sorted(one.process.returncode for one in begun) == [-9, 0]


def test_where_nothing_is_shared_nobody_waits():
    with several.begun("cpu") as waiting:
        assert not waiting
