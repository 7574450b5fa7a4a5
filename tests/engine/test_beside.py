"""Steps are compiled in a process beside the run, which takes them from the disk, and which ends with it."""

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import fedbayes as fb
from fedbayes.engine import beside, compiled
from fedbayes.engine.compiled import Compiled
from fedbayes.training.prepare import prepare
from fedbayes.training.rounds import rounds
from fedbayes.training.run import Memory

NETWORK = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))


def clients():
    x = torch.linspace(-1, 1, 80).sin().reshape(20, 4)
    pairs = [(x[:12], torch.arange(12) % 2), (x[12:], torch.arange(8) % 2)]
    return fb.data.from_clients(pairs, test=pairs[0], kind="classes", classes=2)


def task(**options):
    return prepare(NETWORK, clients(), method="feduab", engine="stacked", compile="soon", **options)


def until(condition, seconds=120):
    limit = time.monotonic() + seconds
    while not condition() and time.monotonic() < limit:
        time.sleep(0.02)
    assert condition()


def test_the_program_is_made_in_the_other_process_and_only_loaded_in_this_one(monkeypatch):
    from torch._inductor import compile_fx

    torch.set_float32_matmul_precision("highest")  # as within rounds
    step, x = Compiled(lambda t, u: {"a": (t * u + torch.arange(7.0)).cos().sum(0), "b": t - 1}), torch.rand(5, 7)
    assert not step.there(x, x, ask=False)
    assert not step.beside
    assert not step.there(x, x, ask=True)
    assert not step.there(x, x, ask=True)
    ((_, process),) = step.beside.values()
    until(lambda: process.done)
    if process.fault:
        pytest.skip(f"nothing can be compiled here: {process.fault}")

    def forbidden(*args, **options):
        raise AssertionError("compiled in this process")

    monkeypatch.setattr(compile_fx, "fx_codegen_and_compile", forbidden)
    step.take()
    assert step.there(x, x, ask=False)
    torch.testing.assert_close(step(x, x)["a"], (x * x + torch.arange(7.0)).cos().sum(0))
    # The next run finds it without another process; other constants are another program.
    monkeypatch.setattr(beside.subprocess, "Popen", forbidden)
    again = Compiled(lambda t, u: {"a": (t * u + torch.arange(7.0)).cos().sum(0), "b": t - 1})
    assert not again.there(x, x, ask=True)
    again.take()
    torch.testing.assert_close(again(x, x), step(x, x), rtol=0, atol=0)
    with pytest.raises(AssertionError, match="compiled in this process"):
        Compiled(lambda t, u: {"a": (t * u + torch.arange(1, 8.0)).cos().sum(0), "b": t - 1}).there(x, x, ask=True)


@pytest.fixture
def slow(monkeypatch):
    """Compiles nothing, and is done when a test says so."""
    processes = []

    class Slow:
        def __init__(self, *program):
            self.done, self.fault, self.ended = False, None, False
            processes.append(self)

        def mark(self):
            pass

        def end(self):
            self.ended = True

    monkeypatch.setattr(compiled, "Beside", Slow)
    monkeypatch.setattr(compiled, "kernels", lambda graph, shapes, options: graph)
    return processes


def test_the_switch_is_between_rounds_and_in_the_journal(slow):
    made = task(rounds=9)
    trained = rounds(made, made.begin(), Memory())
    assert "eagerly until" in made.choice
    assert "notes" not in next(trained)[1]
    assert not slow  # the first round does not wait for the trace
    assert all("notes" not in next(trained)[1] for _ in range(2))
    assert len(slow) == 1
    slow[0].done = True
    assert next(trained)[1]["notes"] == [
        "steps run compiled from round 4 on, eagerly before: the same to rounding only"
    ]
    assert "notes" not in next(trained)[1]


def test_what_cannot_be_compiled_stays_eager_and_says_why(slow):
    trained = rounds(task(rounds=9), task(rounds=9).begin(), Memory())
    for _ in range(2):
        next(trained)
    slow[0].done, slow[0].fault = True, "no C++ compiler"
    (note,) = next(trained)[1]["notes"]
    assert note == "steps stay eager, they can't be compiled beside the run: no C++ compiler"
    assert "notes" not in next(trained)[1]
    assert len(slow) == 1


@pytest.mark.parametrize("how", ["done", "left"])
def test_it_ends_with_the_run(slow, how):
    trained = rounds(task(rounds=3), task(rounds=3).begin(), Memory())
    for _ in range(2):
        next(trained)
    assert not slow[0].ended
    _ = list(trained) if how == "done" else trained.close()
    assert slow[0].ended


def test_a_fault_of_the_other_process_has_its_reason():
    graph, shapes = torch.fx.symbolic_trace(lambda t: t.cos()), [((-3,), (1,), torch.float32, torch.device("cpu"), 0)]
    one = beside.Beside([(graph, shapes)], {})
    until(lambda: one.done)
    assert "negative dimension" in one.fault


@pytest.mark.skipif(not os.path.isdir("/proc"), reason="looks for a process in /proc")
def test_a_killed_run_leaves_no_compiler_behind(tmp_path):
    script = """
        import os, signal, torch
        from fedbayes.engine.compiled import Compiled
        step = Compiled(lambda t: (t + 1.2345).cos())
        step.there(torch.ones(3), ask=True)
        print(next(iter(step.beside.values()))[1]._process.pid, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FEDBAYES_CACHE": str(tmp_path)}
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, env=env)
    command = Path(f"/proc/{int(run.stdout)}/cmdline")
    until(lambda: not command.exists() or not command.read_bytes())  # of a process that has ended it is empty
