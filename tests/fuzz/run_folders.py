"""Run folders, damaged in one or more files: a command refuses, or gives the posterior that was trained."""

import contextlib
import io
import json
import os
import random
import shutil
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from damage import ANY, replace
from harness import Verdict, called, command, judge, prepared

HERE = Path(__file__).parent
PATIENCE = 25.0
LARGEST = 2**26  # bytes of a file that is still worth damaging
# What the damage of a file may meet that has been damaged before.
ALREADY = (ValueError, LookupError, TypeError, EOFError, StopIteration, zipfile.BadZipFile)
SMALL = {"network": "fuzz_code:net", "engine": "loop", "checkpoint_every": 1, "clients": 4, "cohort": 2, "rounds": 4}
BASES: dict[str, dict[str, Any]] = {
    "point": {"data": "fuzz_code:blobs", "method": "fedavg", "options": {"epochs": 1}},
    "own": {"data": "fuzz_code:blobs", "method": "pvi", "options": {"epochs": 1, "test_draws": 3}},
    "best": {"data": "fuzz_code:blobs", "method": "feduab", "validation": 0.3, "options": {"epochs": 1}},
    "images": {"data": "fuzz_code:pixels", "network": "mlp", "methods": ["fedavg", "feduab"], "options": {"epochs": 1}},
    "real": {"data": "fuzz_code:slope", "method": "fedag", "options": {"epochs": 1}},
}
ACTIVE = "active"  # two stages of active learning, of which the second is looked at
HALF = "half"  # the run `own`, ended by a crash in its third round
FREE = ("rounds", "device", "engine", "compile", "at_once", "recompute", "checkpoint_every", "flower", "method")
# How often each is tried; a report with figures and an export take seconds.
ACTIONS = {"load": 30, "resume": 40, "report": 30, "figures": 1, "predict": 12, "evaluate": 8, "export": 2}

Posterior = dict[str, Any]


class Crash(BaseException):
    pass


def home() -> Path:
    """The folders before any damage, trained once."""
    return prepared("runs", _train)


def _train(place: Path) -> None:
    from fedbayes.experiments.experiment import experiment_of
    from fedbayes.runs.active import Active, run_active
    from fedbayes.runs.folder import Watch, run

    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    for name, table in BASES.items():
        run(experiment_of({**SMALL, **table}), place / name)
    for name in ("images", "real"):
        command("evaluate", place / name, "--repeats", 2, *(["--ood", "uniform-noise"] if name == "images" else []))

    chosen = experiment_of({**SMALL, **BASES["point"], "rounds": 2})
    run_active(chosen, Active("entropy", 4, 4, stages=2), place / ACTIVE)

    def crash(record: dict[str, Any]) -> None:
        if record["round"] == 3:
            raise Crash

    try:
        run(experiment_of({**SMALL, **BASES["own"]}), place / HALF, Watch(round=crash))
    except Crash:
        (sorted((place / HALF / "checkpoints").iterdir())[-1]).unlink()  # as if killed before it was written


def posterior_in(folder: Path) -> Posterior:
    """All that a run's posterior is made of, the clients' own state included, as bytes."""
    import fedbayes as fb

    run = fb.load(folder)
    own = {k: _plain(run.own.get(k)) for k in range(len(run.task.clients))}
    return {"parts": _plain(run.parts), "round": run.progress.state.round, "own": own}


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if hasattr(value, "__dataclass_fields__"):
        return {k: _plain(getattr(value, k)) for k in value.__dataclass_fields__ if k != "layout"}
    return value.numpy().tobytes() if hasattr(value, "numpy") else value


@cache
def expected(name: str) -> Posterior:
    return posterior_in(_looked_at(home() / name, name))


def _looked_at(folder: Path, base: str) -> Path:
    return folder / "stage-01" if base == ACTIVE else folder


def lines(data: bytes, rng: random.Random) -> bytes:
    """A journal with lines dropped, doubled, in another order, or of another kind."""
    rows = data.split(b"\n")[:-1]
    at, to = rng.randrange(len(rows)), rng.randrange(len(rows))
    way = rng.random()
    if way < 0.15:
        del rows[at]
    elif way < 0.3:
        rows.insert(to, rows[at])
    elif way < 0.45:
        rows[at], rows[to] = rows[to], rows[at]
    elif way < 0.55:
        rows[at] = rng.choice((b"", b"{}", b"[]", b"null", b"3", b'"x"', b"[" * 50_000, b"\xff\xfe", b'{"round": NaN}'))
    else:
        record = json.loads(rows[at])
        _damage_value(record, rng)
        rows[at] = json.dumps(record).encode()
    return b"\n".join(rows) + rng.choice((b"\n", b"\n", b"", b'\n{"round'))


def _damage_value(table: Any, rng: random.Random) -> None:
    """Change one entry somewhere in a nest of dicts and lists."""
    keys = list(table) if isinstance(table, dict) else list(range(len(table)))
    if not keys:
        return
    key = rng.choice(keys)
    if isinstance(table[key], dict | list) and table[key] and rng.random() < 0.6:
        _damage_value(table[key], rng)
    elif rng.random() < 0.3:
        del table[key]
    else:
        odd = (None, "x", -1, 0, 1e308, float("nan"), [], {}, [[1]], {"a": 1}, True, 10**30, "\0", "<b>")
        table[key] = rng.choice(odd)


def as_json(data: bytes, rng: random.Random) -> bytes:
    table = json.loads(data)
    _damage_value(table, rng)
    return json.dumps(table).encode()


def npz(data: bytes, rng: random.Random) -> bytes:
    """Arrays that are missing, or of another shape, kind or value."""
    with np.load(io.BytesIO(data)) as file:
        arrays = {name: file[name] for name in file.files}
    for _ in range(rng.choice((1, 1, 2))):
        name = rng.choice(list(arrays))
        old = arrays[name]
        numbers = old.astype(float) if old.dtype.kind in "fiub" else np.zeros(max(1, old.size))
        changes: tuple[Callable[[], Any], ...] = (
            lambda numbers=numbers: numbers * np.nan,
            lambda numbers=numbers: numbers * 1e30,
            lambda numbers=numbers: -numbers - 1,
            lambda old=old: old.reshape(-1)[: old.size // 2],
            lambda old=old: old[None],
            lambda old=old: old.astype(str),
            lambda: np.zeros((0,)),
            lambda: np.zeros((0, 3)),
            lambda: np.array("x"),
            lambda: np.array(["a", "b"]),
            lambda: np.zeros((2, 2, 2), complex),
        )
        arrays[name] = rng.choice(changes)()
        if rng.random() < 0.2:
            del arrays[name]
        if not arrays:
            break
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def header(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with another header: sizes, offsets, kinds, names, our own record in it."""
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    way = rng.random()
    if way < 0.2:
        return rng.choice((0, 1, 2**40, 2**63, length + 8)).to_bytes(8, "little") + data[8:]
    if way < 0.6:
        key = next(iter(table["__metadata__"]))
        about = json.loads(table["__metadata__"][key])
        _damage_value(about, rng)
        table["__metadata__"][key] = json.dumps(about)
    else:
        _damage_value(table, rng)
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + length :]


def settings(data: bytes, rng: random.Random) -> bytes:
    """A config with a line of another value, without one, or with one more."""
    rows = data.decode("utf-8", "replace").splitlines() or [""]
    at = rng.randrange(len(rows))
    way = rng.random()
    key, sign, value = rows[at].partition(" = ")
    if way < 0.3:
        del rows[at]
    elif way < 0.7 and sign:
        other = ("0", "1", "2", "3", "5", "-1", '"x"', "true", "[]", "0.5", "nan", "{}", '"fedavg"', '"stacked"')
        rows[at] = f"{key} = {rng.choice((*other, value, value + '0'))}"
    elif way < 0.85:
        rows.insert(at, rng.choice(("seed = 1", "dropout = 0.5", "lr = 3", "[x]", "validation = 0.5", "rounds = 6")))
    else:
        return rng.choice(ANY)(data, rng)
    return ("\n".join(rows) + "\n").encode()


BY_NAME: dict[str, Callable[[bytes, random.Random], bytes]] = {
    "rounds.jsonl": lines,
    ".npz": npz,
    ".safetensors": header,
    ".toml": settings,
    ".json": as_json,
}


def damage(folder: Path, rng: random.Random) -> str:
    """Damage one file of a folder; gives its name."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in (".lock", "report.html")]
    likely = [p for p in files if p.suffix == ".safetensors" or p.name in ("config.toml", "rounds.jsonl")]
    path = rng.choice(likely if rng.random() < 0.6 else files)
    way = rng.random()
    others = [p for p in files if p.suffix == path.suffix and p != path]
    if path.stat().st_size > LARGEST:  # damaged before
        return str(path.relative_to(folder))
    if way < 0.05:
        path.unlink()
    elif way < 0.08:
        replace(path, rng)
    elif way < 0.25 and others:
        _exchange(path, rng.choice(others), rng)
    elif way < 0.65:
        kinds = {**BY_NAME, ".safetensors": swap_rows} if way < 0.3 and path.parent.name == "own" else BY_NAME
        own = next((d for name, d in kinds.items() if path.name.endswith(name)), rng.choice(ANY))
        with contextlib.suppress(*ALREADY):
            path.write_bytes(own(path.read_bytes(), rng))
    else:
        path.write_bytes(rng.choice(ANY)(path.read_bytes(), rng))
    return str(path.relative_to(folder))


def _exchange(path: Path, other: Path, rng: random.Random) -> None:
    """Another file of the same kind in its place, or each in the other's."""
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    if rng.random() < 0.5:
        other.write_bytes(ours)


def swap_rows(content: bytes, rng: random.Random) -> bytes:
    """The first two rows of a file of own state, each in the other's place."""
    data = bytearray(content)
    length = int.from_bytes(data[:8], "little")
    table = json.loads(data[8 : 8 + length])
    for name, entry in table.items():
        if name != "__metadata__" and entry["shape"][0] > 1:
            start, end = (8 + length + at for at in entry["data_offsets"])
            size = (end - start) // entry["shape"][0]
            first, second = data[start : start + size], data[start + size : start + 2 * size]
            data[start : start + 2 * size] = second + first
    return bytes(data)


def act(action: str, folder: Path, base: str, out: Path) -> Verdict:
    """Run a command on the folder; where it ends well, load what is there."""
    x = out / "x.npy"
    shape = {"images": (3, 1, 8, 8), "real": (3, 1)}.get(base, (3, 2))
    np.save(x, np.ones(shape, np.uint8 if base == "images" else np.float32))
    words: dict[str, list[object]] = {
        "report": ["report", folder, "--output", out / "page.html", "--no-figures"],
        "figures": ["report", folder, "--output", out / "page.html"],
        "resume": ["resume", folder],
        "predict": ["predict", folder, "--input", x],
        "evaluate": ["evaluate", folder, "--repeats", 2],
        "export": ["export", folder, "--output", out / "export", "--what", "mean"],
    }
    if action == "load":
        return called(lambda: posterior_in(folder))[1] or Verdict("done")
    return judge(command(*words[action], patience=PATIENCE))


def case(seed: int, folder: Path) -> Verdict:
    """Copy a folder, damage it, use it, and compare its posterior with the one that was trained."""
    if str(HERE) not in sys.path:
        sys.path.insert(0, str(HERE))
    rng = random.Random(f"folder {seed}")
    base = rng.choice([*BASES, HALF, "own", ACTIVE])
    place = folder / "run"
    before = home()
    os.chdir(folder)
    shutil.copytree(before / base, place)
    if rng.random() < 0.95:
        for _ in range(rng.choice((1, 1, 2))):
            damage(place, rng)
    action = rng.choices(list(ACTIONS), list(ACTIONS.values()))[0]
    if base == ACTIVE and action not in ("report", "resume"):
        action = "resume"
    verdict = act(action, place, base, folder)
    if verdict.kind == "stopped":
        return Verdict("hang", f"{action}: no end after {PATIENCE} s")
    if verdict.kind != "done" or action in ("report", "figures"):
        return verdict._replace(about=f"{action}: {verdict.about}")
    return _compare(action, base, _looked_at(place, base))


def _compare(action: str, base: str, place: Path) -> Verdict:
    from fedbayes.experiments.experiment import read, table_of

    state, refusal = called(lambda: posterior_in(place))
    if refusal is not None:
        # Own state is read when a client takes part, or makes its model; what a command did not need it may not see.
        return refusal if not refusal.fine else Verdict("done", f"{action}, then {refusal.about}")
    now, then = (table_of(read(path / "config.toml")) for path in (place, _looked_at(home() / base, base)))
    if any(now.get(key) != then.get(key) for key in FREE):
        return Verdict("done", "another place, length or method was asked for")
    wanted = expected("own") if base == HALF and action == "resume" else expected(base)
    if state == wanted:
        return Verdict("done")
    if action != "resume" and state["round"] < wanted["round"] and _earlier(base, state, place):
        return Verdict("done", "an earlier checkpoint, and said so")
    parts = [part for part in wanted if state[part] != wanted[part]]
    return Verdict("changed", f"{action} of {base}: {', '.join(parts)} differ")


def _earlier(base: str, state: Posterior, place: Path) -> bool:
    """Whether loading the folder warns that its run is not finished."""
    import warnings

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        posterior_in(place)
    return any("not finished" in str(warning.message) for warning in said)
