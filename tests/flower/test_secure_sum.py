"""The secure sum: the server's posterior is that of the plain sum, and what it saw of a client is noise."""

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("flwr", reason='Flower is not installed: pip install "fedbayes[flower]"')

from hypothesis import given, settings
from hypothesis import strategies as st
from in_process import InProcess, Spoil

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.experiments.experiment import Experiment
from fedbayes.flower import masks
from fedbayes.flower.federated import carried, run
from fedbayes.flower.fixed import RANGE, dequantise, flat, levels, quantise
from fedbayes.flower.node import SECURE, Node
from fedbayes.flower.post import Answer
from fedbayes.flower.wire import Letter, Refused
from fedbayes.posterior.values import FullGaussian, Gaussian, Point
from fedbayes.runs.folder import run as run_here

pytestmark = pytest.mark.flower

METHODS: dict[str, dict[str, object]] = {
    "feduab, nwa": {"options": {"rule": "nwa"}},
    "feduab, log_pool": {"options": {"rule": "log_pool"}},
    "feduab, conflation": {"options": {"rule": "conflation"}},
    "feduab, lp": {"options": {"rule": "lp"}},
    "feduab, wc": {"options": {"rule": "wc"}},  # its maximum travels in the clear
    "fedvi, dwc": {"options": {"rule": "dwc", "weighting": "equal"}},
    "fedavg, batch norm": {"network": "flower_code:norm_net"},
    "fedavg, server adam": {"options": {"server": "adam", "server_lr": 0.1}},
    "pvi": {"options": {"damping": 0.3}},
    "pfedbayes": {"personal_every": 1},
    "fedper": {},
    "laplace": {"rounds": 3, "options": {"epochs": None}},
}


def secure(x: Experiment, **settings: object) -> Experiment:
    return replace(x, clients=5, flower={**x.flower, "secure": True, "timeout": 5.0, **settings})


def federate(x: Experiment, folder: Path, spoil: Spoil | None = None) -> tuple[fb.Run, InProcess]:
    post = InProcess(carried(x), spoil=spoil)
    return run(x, folder, post)[x.method], post


def errors(a: fb.Run, b: fb.Run) -> tuple[float, float]:
    """The largest error of a mean, relative to its scale (to 1 without), and of a scale, relative to itself."""
    means, scales = [0.0], [0.0]
    for part, q in a.progress.state.broadcast.items():
        other = b.progress.state.broadcast[part]
        unit = torch.ones_like(other.mean) if isinstance(other, Point) else other.moments()[1].sqrt()
        means.append(float(((q.mean - other.mean).abs() / unit).max()))
        if not isinstance(other, Point):
            scales.append(float((q.moments()[1].sqrt() / unit - 1).abs().max()))
        if isinstance(other, FullGaussian):  # the rest of the covariance, as correlations
            apart = (q.covariance - other.covariance).abs() / unit / unit[:, None]
            scales.append(float(apart.max()))
    return max(means), max(scales)


@pytest.mark.parametrize("row", METHODS)
def test_the_secure_sum_gives_the_posterior_of_the_plain_sum(tiny: Experiment, tmp_path: Path, row: str) -> None:
    extra = dict(METHODS[row])
    given = {**tiny.options, **extra.pop("options", {})}
    options = {key: v for key, v in given.items() if v is not None}  # None: the method takes no such option
    x = secure(replace(tiny, method=row.split(",")[0], options=options, **extra))
    hidden, _ = federate(x, tmp_path / "hidden")
    plain, _ = federate(replace(x, flower={**x.flower, "secure": False}), tmp_path / "plain")
    mean, scale = errors(hidden, plain)
    print(f"{row}: largest error of a mean {mean:.2e}, of a scale {scale:.2e}")
    assert mean < 1e-6
    assert scale < 1e-6
    for ours, theirs in zip(hidden.journal, plain.journal, strict=True):
        assert ours["train"] == pytest.approx(theirs["train"], rel=1e-6)
        assert ours["left_out"] == {}


@pytest.mark.parametrize("stage", SECURE[:3])
@pytest.mark.parametrize("rule", ["nwa", "conflation"])
def test_one_who_drops_out_leaves_the_sum_of_the_others(tiny, tmp_path, stage, rule) -> None:
    x = secure(replace(tiny, rounds=1, options={**tiny.options, "rule": rule}), timeout=0.3)

    def gone(kind: str, k: int, letter: Letter, answer: Answer) -> Answer | None:
        return None if k == 1 and kind in (stage, "train") else answer

    hidden, _ = federate(x, tmp_path / "hidden", gone)
    plain, _ = federate(replace(x, flower={**x.flower, "secure": False}), tmp_path / "plain", gone)
    assert hidden.journal[0]["left_out"] == {"1": "no reply within 0.3 s"}
    assert hidden.journal[0]["took_part"] == [k for k in range(hidden.journal[0]["cohort"]) if k != 1]
    assert max(errors(hidden, plain)) < 1e-6


def test_one_who_drops_out_after_its_upload_is_still_counted(tiny: Experiment, tmp_path: Path) -> None:
    x = secure(replace(tiny, rounds=1), timeout=0.3)
    hidden, _ = federate(
        x, tmp_path / "hidden", lambda kind, k, letter, answer: None if k == 1 and kind == SECURE[3] else answer
    )
    plain, _ = federate(replace(x, flower={**x.flower, "secure": False}), tmp_path / "plain")
    assert max(errors(hidden, plain)) < 1e-6


def test_an_outlier_that_would_clip_is_refused_at_home(tiny, tmp_path, monkeypatch) -> None:
    x = secure(replace(tiny, rounds=1, cap_precision=0.0, options={**tiny.options, "rule": "conflation"}), timeout=0.3)
    real = Node.trained

    def narrow(self: Node, letter: Letter, kept):
        made = real(self, letter, kept)
        if self.client != 1:
            return made
        q = made.upload.parts["model"]
        parts = {**made.upload.parts, "model": Gaussian(q.mean, q.scale * 1e-5, q.layout)}
        return made._replace(upload=made.upload._replace(parts=parts))

    monkeypatch.setattr(Node, "trained", narrow)
    hidden, post = federate(x, tmp_path / "hidden")
    why = hidden.journal[0]["left_out"]["1"]
    assert re.match(r"its (precision|shift) of part 'model' is .*, a secure sum holds up to 1.68e\+07 a client", why)
    assert all(k != 1 for kind, k, _ in post.asked if kind == SECURE[3])
    gone, _ = federate(
        replace(x, flower={**x.flower, "secure": False}),
        tmp_path / "plain",
        lambda kind, k, letter, answer: None if k == 1 and kind == "train" else answer,
    )
    assert max(errors(hidden, gone)) < 1e-6


def test_too_many_who_drop_out_end_the_run_and_not_the_secret(tiny: Experiment, tmp_path: Path) -> None:
    x = secure(tiny, timeout=0.1, attempts=2)
    with pytest.raises(InputError, match=r"no secure sum came about .*needs 3"):
        federate(x, tmp_path, lambda kind, k, letter, answer: None if k > 1 and kind == SECURE[2] else answer)


@pytest.mark.parametrize(
    ("method", "options"), [("fedavg", {"weighting": "discrepancy"}), ("fedag", {"noise": "heldout"})]
)
def test_methods_that_need_posteriors_are_refused_by_name(tiny, tmp_path, method, options) -> None:
    data = {"data": "flower_code:line"} if method == "fedag" else {}
    x = secure(replace(tiny, method=method, options={**tiny.options, **options}, **data))
    with pytest.raises(InputError, match=f"{method} needs every client's posterior"):
        federate(x, tmp_path)
    assert not (tmp_path / "rounds.jsonl").exists()


def test_two_clients_cant_hide_one_another(tiny: Experiment, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="at least 3 clients"):
        federate(replace(secure(tiny), cohort=2), tmp_path)


def test_what_the_server_sees_of_a_client_is_noise(tiny: Experiment, tmp_path: Path) -> None:
    """No entry of a masked vector comes again, and its bits are even, whatever the statistics are."""
    seen: list[np.ndarray] = []

    def look(kind: str, k: int, letter: Letter, answer: Answer) -> Answer:
        if kind == SECURE[2] and isinstance(answer, Letter):
            assert set(answer.arrays) == {"sum"}
            assert not {"rows", "metric.loss"} & set(answer.head)
            seen.append(answer.arrays["sum"])
        return answer

    federate(secure(tiny), tmp_path, look)
    words = np.concatenate(seen)
    assert len(np.unique(words)) == len(words)
    bits = np.unpackbits(words.view(np.uint8))
    assert abs(bits.mean() - 0.5) < 5 * 0.5 / len(bits) ** 0.5


def test_flowers_own_grid_carries_it(tiny: Experiment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On virtual nodes in processes of their own, whose secrets lie in Flower's context between letters."""
    pytest.importorskip("ray", reason='Ray is not installed: pip install "fedbayes[flower]"')
    from fedbayes.flower.simulation import simulate

    monkeypatch.chdir(Path(__file__).parent)
    x = secure(replace(tiny, method="pvi"), timeout=60.0, wait=60.0)
    x = replace(x, clients=4)
    (hidden,) = simulate(x, tmp_path / "far").values()
    (near,) = run_here(replace(x, engine="loop", flower={}), tmp_path / "near").values()
    assert max(errors(hidden, near)) < 1e-6
    assert [record["left_out"] for record in hidden.journal] == [{}, {}]


ASKED = {  # what a curious server might ask of client 0, and how it is answered
    "another sum": (lambda h: {**h, "alive": h["alive"][:4], "gone": h["alive"][4:]}, "in turn"),
    "both of one": (lambda h: {**h, "gone": [*h["gone"], h["alive"][1]]}, "together would show"),
    "all gone": (lambda h: {**h, "alive": h["alive"][:1], "gone": h["alive"][1:]}, "too few"),
    "another round": (lambda h: {**h, "round": 7}, "in turn"),
}


@pytest.mark.parametrize("what", ASKED)
def test_a_node_gives_no_shares_that_show_an_upload(tiny: Experiment, tmp_path: Path, what: str) -> None:
    change, words = ASKED[what]
    said: list[Answer] = []

    class Curious(InProcess):
        def _answer(self, kind: str, node: int, letter: Letter) -> Answer:
            if kind == SECURE[3] and node == 100 and not said:
                if what == "another sum":  # asked in the same words again it answers the same
                    first = super()._answer(kind, node, letter)
                    assert first == super()._answer(kind, node, letter)
                said.append(super()._answer(kind, node, Letter(change(letter.head), {})))
            return super()._answer(kind, node, letter)

    x = secure(replace(tiny, rounds=1))
    run(x, tmp_path, Curious(carried(x)))
    assert isinstance(said[0], Letter)
    assert words in said[0].head["refused"]


@settings(max_examples=25)
@given(k=st.integers(1, 6), exponent=st.integers(-8, 7), seed=st.integers(0, 99))
def test_whole_numbers_add_as_their_statistics_do(k: int, exponent: int, seed: int) -> None:
    g = torch.Generator().manual_seed(seed)
    terms = [{"a": {"x": 10.0**exponent * torch.rand(4, generator=g).sub(0.5), "n": torch.ones(())}} for _ in range(k)]
    with np.errstate(over="ignore"):
        total = np.sum([quantise(t, k) for t in terms], 0, dtype=np.uint64)
    shapes = {name: tuple(t.shape) for name, t in flat(terms[0]).items()}
    made = dequantise(total, shapes, k)
    expected = torch.stack([t["a"]["x"].double() for t in terms]).sum(0)
    assert float((made["a"]["x"] - expected).abs().max()) <= 0.5 * k / levels(k)
    assert float(made["a"]["n"]) == k


def test_the_largest_sum_does_not_wrap() -> None:
    for k in (3, 4, 1000, 1024):
        total = sum(int(v) for v in quantise({"a": {"x": torch.tensor([RANGE])}}, k).view(np.int64)) * k
        assert total < 2**63
    with pytest.raises(Refused, match="x of part 'a'"):
        quantise({"a": {"x": torch.tensor([1.01 * RANGE])}}, 3)
    with pytest.raises(Refused, match="nan"):
        quantise({"a": {"x": torch.tensor([torch.nan])}}, 3)


@pytest.mark.parametrize("n", [3, 4, 10, 65, 66, 200])
def test_neighbours_are_mutual_and_enough(n: int) -> None:
    near = masks.neighbours(list(range(0, 3 * n, 3)), 7)
    assert all(k in near[j] for k, others in near.items() for j in others)
    assert all(k not in others for k, others in near.items())
    assert {len(others) for others in near.values()} == {min(n - 1, 2 * masks.NEIGHBOURS)}


def test_boxes_masks_and_shares_come_back() -> None:
    (a, public_a), (b, public_b) = masks.key_pair(), masks.key_pair()
    key = masks.agreed(a, public_b)
    assert key == masks.agreed(b, public_a)
    assert masks.opened(key, masks.box(key, b"one", b"", b"three")) == [b"one", b"", b"three"]
    assert np.array_equal(masks.mask(key, "pair", 9), masks.mask(key, "pair", 12)[:9])
    assert not np.array_equal(masks.mask(key, "own", 9), masks.mask(key, "pair", 9))
    shares = masks.create_shares(a, 3, 5)
    assert masks.combine_shares(shares[1:4]) == a
    # Seeds that Flower's own generator could not tell apart, since it folds them into 32 bits.
    seeds = bytes(32), bytes([1, 0, 0, 0, 1, 0, 0, 0]) + bytes(24)
    assert not np.array_equal(masks.mask(seeds[0], "own", 4), masks.mask(seeds[1], "own", 4))
