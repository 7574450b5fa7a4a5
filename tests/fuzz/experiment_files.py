"""Experiment files, damaged in one or more places; what is still valid is trained for a round or two."""

import random
from collections.abc import Callable
from dataclasses import MISSING
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from harness import Verdict, command, judge

from fedbayes.experiments.keys import Keys
from fedbayes.options import options_of

PATIENCE = 25.0  # seconds until Ctrl-C
MUCH = 20  # a whole number above it may ask for long work

OPTIONS: dict[str, dict[str, Any]] = {
    "fedavg": {"lr": 0.1, "epochs": 1, "batch": 4},
    "fedprox": {"lr": 0.1, "epochs": 1, "batch": 8},
    "fedag": {"epochs": 1},
    "feduab": {"epochs": 1, "test_draws": 3, "kl_weight": 1e-3},
    "fedvi": {"epochs": 1, "test_draws": 3, "rule": "conflation", "prior": "fixed"},
    "pvi": {"epochs": 1, "test_draws": 3},
    "pfedbayes": {"epochs": 1, "test_draws": 3},
    "bpfed": {"epochs": 1, "test_draws": 3},
    "fedper": {"epochs": 1},
    "lg_fedavg": {"epochs": 1},
    "fedavg_pf": {"epochs": 1},
    "fedppd": {"epochs": 1},
    "fedswag": {"epochs": 1},
    "fedpa": {"epochs": 2},
}
PARTITIONS: list[tuple[str, dict[str, Any]]] = [
    ("iid", {}),
    ("iid", {"volume": 3}),
    ("dirichlet", {"alpha": 1.0}),
    ("dirichlet_equal", {"alpha": 0.5}),
    ("dirichlet_own", {}),
    ("labels_per_client", {"k": 2}),
    ("shards", {"per_client": 2}),
    ("main_classes", {"main": 1, "p": 0.5}),
    ("natural", {}),
]
DATA = ("fuzz_code:blobs", "fuzz_code:blobs", "fuzz_code:slope", "fuzz_code:pixels", "fuzz_code:homes", "cubic")
NETWORKS = ("mlp", "linear", "fuzz_code:net", "fuzz_code:norm_net", "lenet", "resnet", "cnn", "text_cnn")
WORDS = (
    *("sgd", "adam", "local", "constant", "1/B", "blundell", "broadcast", "fixed", "conflation", "dwc", "ws", "wc"),
    *("log_pool", "linear_pool", "fedavg", "size", "uniform", "distance", "flow", "laplace", "nll", "accuracy"),
    *("classes", "labels", "real", "loop", "stacked", "off", "bf16", "tf32", "float32", "falling", "crop_flip"),
    *("cuda", "cuda:99", "meta", "cpu", "mps", "gaussian", "heteroscedastic", "digits", "diabetes", "yacht"),
)
PATHS = (
    *("os:path", "math:pi", "sys:exit", "json:loads", "nowhere:nothing", ":", "a:", ":b", "..x:y", "fuzz_code:failing"),
    *("fuzz_code:Odd", "fuzz_code:", "fuzz_code:net.forward", "torch:load", "builtins:print", "fuzz_code:nothing"),
    *("fuzz_code:in_turn", "fuzz_code:halving", "fuzz_code:lazy"),
    *("numpy:zeros", "torch.nn:Linear", "os:getcwd", "collections:OrderedDict", "__main__:x", "a\0b:c", "é:ü"),
)
NUMBERS = (0, -1, 1, 2, 3, 7, 100, 10**4, 2**31, 2**63, 2**64, 10**30, 0.5, 1.5, -0.5, 1e-300, 1e300, 1e-8)
ODD = ("", "x", "nan", "ü€𝔘", "a\nb", True, False, [], [[]], [1, 2], ["a"], ["*"], [0], [-3], [10**9], {}, {"a": 1})
ODD += (["fuzz_code:halving"], ["fuzz_code:nothing"], [{"stage": "fuzz_code:halving"}], [{"stage": "a:b", "c": 1}])
LITERALS = ("nan", "inf", "-inf", "1979-05-27", "07:32:00", "0x" + "f" * 400, "0x" + "f" * 9000, "1e999", "-0.0")
KEYS = (*options_of(Keys), "round", "lr", "Data", "", "a.b")
NETWORK_OPTIONS = ("hidden", "start", "channels", "width", "words", "spans", "blocks", "depth", "dropout", "undropped")
TABLES = (
    "data_options",
    "network_options",
    "partition_options",
    "likelihood_options",
    "pretrain",
    "options",
    "adapters",
)


class Raw(str):
    """TOML as it stands."""


class Deep(NamedTuple):
    """A value inside so many lists."""

    depth: int
    inner: Any


def valid(rng: random.Random) -> dict[str, Any]:
    """An experiment that can be trained, or nearly."""
    method = rng.choice(list(OPTIONS))
    partition, partition_options = rng.choice(PARTITIONS)
    data = rng.choice(DATA)
    if data in ("fuzz_code:slope", "cubic"):
        partition, partition_options = rng.choice(PARTITIONS[:2])
    table: dict[str, Any] = {
        "data": data,
        "network": rng.choice(NETWORKS[:3] if rng.random() < 0.8 else NETWORKS),
        "partition": partition if rng.random() < 0.5 else "iid",
        "clients": rng.choice((2, 3, 4)),
        "rounds": rng.choice((0, 1, 1, 2)),
        "method": method,
        "engine": rng.choice(("auto", "loop", "stacked")),
        "options": dict(OPTIONS[method]),
    }
    if table["partition"] == partition and partition_options:
        table["partition_options"] = dict(partition_options)
    if rng.random() < 0.3:
        table |= {"validation": 0.2, "patience": 1}
    if rng.random() < 0.2:
        table["methods"] = [method, rng.choice(list(OPTIONS))]
    if rng.random() < 0.2:
        table["personal_every"] = 1
    if rng.random() < 0.1:
        table["adapters"] = {"pattern": rng.choice(("*", ["1"], "fc*")), "rank": rng.choice((0, 1, 3))}
    return table


def value(rng: random.Random) -> Any:
    """Some value, more often a plausible one than nonsense."""
    pool: Any = rng.choice((NUMBERS, NUMBERS, WORDS, WORDS, PATHS, ODD, tuple(map(Raw, LITERALS))))
    chosen = rng.choice(pool)
    return Deep(rng.choice((2, 20, 3000)), chosen) if rng.random() < 0.03 else chosen


def neighbour(record: Any, rng: random.Random) -> Any:
    """Another value of the same kind as an option's default."""
    default, check = record.default, record.metadata["check"]
    if check is not None and check.choices is not None:
        return rng.choice(list(check.choices))
    if isinstance(default, bool):
        return not default
    if isinstance(default, int):
        return max(0, default + rng.choice((-1, 0, 1)))
    if isinstance(default, float):
        return default * rng.choice((0.1, 0.5, 2, 10))
    return value(rng) if default is None or default is MISSING else default


def vary(table: dict[str, Any], rng: random.Random) -> None:
    """Give an option of the method another likely value."""
    from fedbayes.methods import METHODS
    from fedbayes.methods.refined import OPTIONS as REFINING

    method = table.get("method")
    known = options_of(METHODS[method]) if isinstance(method, str) and method in METHODS else {}
    refining = [] if "refine" in table.get("options", {}) else [name for name in REFINING if name != "refine"]
    plain = [n for n in known if n not in ("epochs", "flow_epochs", "server_epochs", "test_draws", *refining)]
    if plain:
        name = rng.choice(plain)
        _inside(table, "options")[name] = neighbour(known[name], rng)


def change(table: dict[str, Any], rng: random.Random) -> None:
    """Damage one place of the table."""
    from fedbayes.methods import METHODS
    from fedbayes.methods.refined import OPTIONS as REFINING

    way = rng.random()
    if way < 0.35:
        table[rng.choice(KEYS)] = value(rng)
    elif way < 0.45 and table:
        table.pop(rng.choice(list(table)))
    elif way < 0.75:
        method = table.get("method")
        known = list(options_of(METHODS[method])) if isinstance(method, str) and method in METHODS else ["lr"]
        _inside(table, "options")[rng.choice([*known, *known, *REFINING, "nothing"])] = value(rng)
    elif way < 0.85:
        _inside(table, "network_options")[rng.choice(NETWORK_OPTIONS)] = value(rng)
    elif way < 0.93:
        names = ("volume", "alpha", "least", "k", "per_client", "main", "p", "low", "high", "server", "owners_each")
        _inside(table, "partition_options")[rng.choice(names)] = value(rng)
    else:
        names = ("rows", "test", "points", "fold", "seed", "standardise", "rounds", "epochs", "lr", "scale", "a")
        _inside(table, rng.choice(TABLES))[rng.choice(names)] = value(rng)


def _inside(table: dict[str, Any], key: str) -> dict[str, Any]:
    if not isinstance(table.get(key), dict):
        table[key] = {}
    inner: dict[str, Any] = table[key]
    return inner


def text_of(v: Any) -> str:
    """A value as TOML, written here so that what the product's own writer refuses can be written too."""
    if isinstance(v, Raw):
        return str(v)
    if isinstance(v, bool):
        return "true" if v else "false"
    if isinstance(v, str):
        return '"' + "".join(c if c.isprintable() and c not in '"\\' else f"\\U{ord(c):08x}" for c in v) + '"'
    if isinstance(v, int | float):
        return repr(v) if isinstance(v, int) or isfinite(v) else str(v)
    if isinstance(v, Deep):
        return "[" * v.depth + text_of(v.inner) + "]" * v.depth
    if isinstance(v, list | tuple):
        return f"[{', '.join(map(text_of, v))}]"
    return "{" + ", ".join(f"{text_of(str(k))} = {text_of(x)}" for k, x in v.items()) + "}"


def toml_of(table: dict[str, Any]) -> str:
    plain = [f"{text_of(k)} = {text_of(v)}" for k, v in table.items() if not (isinstance(v, dict) and k in TABLES)]
    for name, inner in table.items():
        if isinstance(inner, dict) and name in TABLES:
            plain += [f"[{name}]", *(f"{text_of(str(k))} = {text_of(v)}" for k, v in inner.items())]
    return "\n".join(plain) + "\n"


def _flip(data: bytes, rng: random.Random) -> bytes:
    place = rng.randrange(max(1, len(data)))
    return data[:place] + bytes([rng.randrange(256)]) + data[place + 1 :]


TEXTS: tuple[Callable[[bytes, random.Random], bytes], ...] = (
    lambda d, r: d[: r.randrange(len(d) + 1)],
    _flip,
    _flip,
    lambda d, r: d.decode().encode("utf-16"),
    lambda d, r: b"\xef\xbb\xbf" + d,
    lambda d, r: d + b"\0",
    lambda d, r: d + d,
    lambda d, r: d.decode().replace("a", "ä").encode("latin-1", "replace"),
    lambda d, r: d + b"\na = " + b"[" * r.choice((50, 5000, 200_000)),
    lambda d, r: d + b"\n" + b"a." * r.choice((50, 20_000)) + b"b = 1",
    lambda d, r: d + b"\nseed = 0x" + b"f" * r.choice((16, 300, 5000)),
    lambda d, r: d + b"\nseed = " + b"9" * r.choice((19, 400, 5000)),
    lambda d, r: d.replace(b"\n", b"\r"),
    lambda d, r: d.replace(b'"', b"'"),
    lambda d, r: d + b"\n#" + b"x" * (3 << 20),
    lambda d, r: b"",
)


def content(seed: int) -> bytes:
    """The bytes of a damaged experiment file."""
    rng = random.Random(f"experiment {seed}")
    table = valid(rng)
    for _ in range(rng.choice((0, 1, 2, 3))):
        vary(table, rng)
    for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 1, 2))):
        change(table, rng)
    if isinstance(table.get("rounds"), int) and table["rounds"] > 3 and rng.random() < 0.95:
        table["rounds"] = 1  # so many rounds are what was asked for, and no fault
    data = toml_of(table).encode()
    return rng.choice(TEXTS)(data, rng) if rng.random() < 0.15 else data


def case(seed: int, folder: Path) -> Verdict:
    """Write the file and `fedbayes run` it."""
    import os
    import sys

    import fuzz_code

    home = str(Path(fuzz_code.__file__).parent)
    if home not in sys.path:
        sys.path.insert(0, home)
    os.chdir(folder)
    path = folder / "experiment.toml"
    path.write_bytes(content(seed))
    verdict = judge(command("run", path, "--output", folder / "run", patience=PATIENCE, enough=lambda: _long(folder)))
    if verdict.kind == "stopped" and not _long(folder):
        return Verdict("hang", f"no end after {PATIENCE} s")
    if verdict.kind == "done" and not list((folder / "run").rglob("round-*.safetensors")):
        return Verdict("nothing", "exit code 0, and nothing was trained")
    return verdict


def _long(folder: Path) -> bool:
    """Whether training has begun, and the experiment asks for long work by some large number or large data."""
    import tomllib

    def largest(v: Any) -> float:
        if isinstance(v, dict | list):
            return max(map(largest, v.values() if isinstance(v, dict) else v), default=0)
        return abs(v) if isinstance(v, int | float) and not isinstance(v, bool) else 0

    config = folder / "run" / "config.toml"
    if not config.is_file():
        return False
    table = tomllib.loads(config.read_text(encoding="utf-8"))
    return largest(table) > MUCH or not table["data"].startswith("fuzz_code:")
