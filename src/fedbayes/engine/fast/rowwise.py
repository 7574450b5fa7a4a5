"""The point client's steps on single rows as compiled C, for networks so small that calling PyTorch is all the cost.

A step on one row of a network with one hidden layer is a few thousand operations. Chosen on a CPU where a C compiler
is at hand; equal to the point client's own step up to rounding.
"""

from __future__ import annotations

import ctypes
import hashlib
import platform
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedbayes.engine.fast.forms import Rowwise
from fedbayes.engine.kept import code_folder

SOURCE = Path(__file__).with_name("rowwise.c")
# Sums in any order, but what is not finite stays so: a client that diverges must be seen. Not -ffast-math: its start-up
# code would flush subnormal numbers to zero for the whole process that loads the library.
FLAGS = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-fno-signed-zeros", "-fassociative-math", "-shared", "-fPIC")


def compiler() -> str | None:
    """A C compiler, where there is one."""
    return next((path for name in ("gcc", "cc", "clang") if (path := shutil.which(name))), None)


@cache
def library() -> ctypes.CDLL:
    """The compiled code: made once for a processor, then kept in the user's cache."""
    source, made_by = SOURCE.read_text(encoding="utf-8"), compiler()
    if made_by is None:
        raise OSError("there is no C compiler (gcc, cc or clang)")
    tuned = "-mcpu=native" if platform.machine() in ("aarch64", "arm64") else "-march=native"
    key = hashlib.blake2b("\n".join([source, made_by, tuned, *FLAGS]).encode(), digest_size=8)
    home = code_folder()
    target = home / f"rowwise-{key.hexdigest()}.so"
    if not target.exists():
        with tempfile.TemporaryDirectory(dir=home) as folder:
            fresh = Path(folder) / "rowwise.so"
            done = subprocess.run(
                [made_by, *FLAGS, tuned, str(SOURCE), "-o", str(fresh), "-lm"], capture_output=True, text=True
            )
            if done.returncode:
                raise OSError(f"{made_by} can't compile rowwise.c: {done.stderr.strip()[:160]}")
            fresh.replace(target)
    return ctypes.CDLL(str(target))


def run(form: Rowwise, rows: Tensor, live: Tensor | None, x: Tensor, y: Tensor, info: Any, state: Any) -> Any:
    """The state after the steps of a table [steps, clients, 1, 1] of rows."""
    clients = rows.shape[1]
    table = rows.reshape(len(rows), clients).contiguous()
    lengths = torch.full((clients,), len(rows)) if live is None else live.reshape(len(rows), clients).sum(0)
    part, weights = next(iter(state.vectors.items()))
    weights = weights.clone().contiguous()
    lr = info.options["lr"].float().expand(clients).contiguous()
    clip = info.options["clip"].float().expand(clients).contiguous() if form.clip else torch.zeros(clients)
    loss = torch.zeros(clients)
    x, y = form.inputs(x).reshape(len(x), -1).contiguous(), y.float().contiguous()
    arrays = [_pointer(t) for t in (weights, x, y, table, lengths, lr, clip)]
    work = library().rowwise

    def piece(first: int, last: int) -> None:
        shape = [ctypes.c_int64(n) for n in (clients, first, last - first, x.shape[1], form.hidden)]
        work(*arrays, ctypes.c_float(form.sharpness), ctypes.c_int(form.falling), *shape, _pointer(loss))

    threads = min(torch.get_num_threads(), clients)
    cuts = [clients * t // threads for t in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(piece, cuts[:-1], cuts[1:]))
    constant = lengths * form.constant
    return state._replace(
        vectors={part: weights}, loss=state.loss + loss + constant, steps=state.steps + lengths.to(state.steps)
    )


def _pointer(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())
