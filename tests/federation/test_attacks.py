"""Attacks against answers by hand: what each makes of the uploads of a round, and that honest ones stay as they are."""

from statistics import NormalDist

import numpy as np
import pytest
import torch

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.federation.attacks import ATTACKS, Attack, attackers_of, lies, quantile
from fedbayes.federation.program import Contribution, Order
from fedbayes.noise import normals
from fedbayes.posterior.values import Gaussian, Point
from fedbayes.training.settings import ATTACKS as NAMES

CLIENTS, LIARS, WEIGHTS, SEED, ROUND = 9, (2, 5), 4, 7, 3
RANDOM = np.random.default_rng(0)
MEANS = RANDOM.normal(size=(CLIENTS, WEIGHTS))
SCALES = RANDOM.uniform(0.1, 0.4, size=(CLIENTS, WEIGHTS))
SENT, SENT_SCALE = RANDOM.normal(size=WEIGHTS), RANDOM.uniform(0.2, 0.3, size=WEIGHTS)
HONEST = [k for k in range(CLIENTS) if k not in LIARS]
SIZE = np.sqrt(((MEANS[HONEST] - SENT) ** 2).mean())  # of an honest change


def gaussians() -> list[Contribution]:
    pairs = zip(torch.tensor(MEANS), torch.tensor(SCALES))
    return [Contribution(k, {"model": Gaussian(m, s)}, torch.tensor(10 + k)) for k, (m, s) in enumerate(pairs)]


def points() -> list[Contribution]:
    return [Contribution(k, {"model": Point(m)}, torch.tensor(10 + k)) for k, m in enumerate(torch.tensor(MEANS))]


def told(attack: Attack | str, uploads: list[Contribution]) -> list[Contribution]:
    attack = ATTACKS[attack] if isinstance(attack, str) else attack
    scaled = isinstance(uploads[0].parts["model"], Gaussian)
    sent = Gaussian(torch.tensor(SENT), torch.tensor(SENT_SCALE)) if scaled else Point(torch.tensor(SENT))
    order = Order(ROUND, tuple(range(CLIENTS)), (), {"model": sent}, {})
    return lies(attack, ["model"], frozenset(LIARS), SEED, order, uploads)


def honest_mean(values: np.ndarray) -> np.ndarray:
    return np.stack([values[HONEST].mean(0)] * len(LIARS))


def below(values: np.ndarray) -> np.ndarray:
    z = NormalDist().inv_cdf((7 - (4 + 1 - 2)) / 7)  # 9 clients, 2 attackers: 7 honest, 3 of whom must be farther away
    return np.stack([values[HONEST].mean(0) - z * values[HONEST].std(0)] * len(LIARS))


def drawn() -> np.ndarray:
    return np.stack([normals(WEIGHTS, SEED, ROUND, k, "attack", "model").double().numpy() for k in LIARS])


TRUE = MEANS[list(LIARS)]
MEAN_OF = {
    "sign_flip": SENT - 4 * (TRUE - SENT),
    "noise": SENT + 10 * SIZE * drawn(),
    "alie": below(MEANS),
    "ipm": SENT - 0.5 * (honest_mean(MEANS) - SENT),
    "overconfident": np.stack([SENT + 10 * SENT_SCALE] * 2),
    "certain": TRUE,
    "underconfident": TRUE,
    "inflated_counts": TRUE,
    "label_flip": TRUE,
    "ipm_apart": SENT - 0.5 * (honest_mean(MEANS) - SENT) + 0.1 * MEANS[HONEST].std(0) * drawn(),
}
SCALE_OF = {
    "alie": np.exp(below(np.log(SCALES))),
    "overconfident": np.stack([1e-4 * SENT_SCALE] * 2),
    "certain": np.stack([1e-4 * SENT_SCALE] * 2),
    "underconfident": np.stack([1e4 * SENT_SCALE] * 2),
}
TRUTHS = {u.client: u for u in gaussians()}


@pytest.mark.parametrize("name", sorted(MEAN_OF))
def test_what_attackers_upload_is_the_formula_of_the_attack(name: str) -> None:
    lied = [u for u in told(name, gaussians()) if u.client in LIARS]
    for row, u in enumerate(lied):
        q = u.parts["model"]
        assert isinstance(q, Gaussian)
        np.testing.assert_allclose(q.mean.numpy(), MEAN_OF[name][row], rtol=1e-10)
        np.testing.assert_allclose(q.scale.numpy(), SCALE_OF.get(name, SCALES[list(LIARS)])[row], rtol=1e-10)
        assert int(u.n) == (10 + u.client) * (10 if name == "inflated_counts" else 1)


@pytest.mark.parametrize("name", sorted(ATTACKS))
@pytest.mark.parametrize("kind", [gaussians, points])
def test_honest_uploads_stay_as_they_are_and_all_keep_their_places(name: str, kind: object) -> None:
    uploads = kind()  # type: ignore[operator]
    lied = told(name, uploads)
    assert [u.client for u in lied] == list(range(CLIENTS))
    assert all(lied[k] is uploads[k] for k in HONEST)
    for u in lied:
        assert torch.isfinite(u.parts["model"].mean).all()
        assert type(u.parts["model"]) is type(uploads[0].parts["model"])


def test_points_are_sent_far_by_the_size_of_an_honest_change() -> None:
    lied = told("overconfident", points())[LIARS[0]].parts["model"]
    size = np.sqrt(((MEANS[HONEST] - SENT) ** 2).mean())
    np.testing.assert_allclose(lied.mean.numpy(), SENT + 10 * size, rtol=1e-10)


def test_mimics_all_copy_one_honest_client() -> None:
    lied = told("mimic", gaussians())
    copies = {lied[k].parts["model"].mean.numpy().tobytes() for k in LIARS}
    assert len(copies) == 1
    (one,) = [k for k in HONEST if MEANS[k].tobytes() in copies]
    assert [int(lied[k].n) for k in LIARS] == [10 + one] * 2


def test_mimics_who_know_that_copies_count_once_stay_apart_by_a_tenth_of_a_deviation() -> None:
    mimic, apart = (told(name, gaussians())[LIARS[0]].parts["model"].mean.numpy() for name in ("mimic", "mimic_apart"))
    np.testing.assert_allclose(apart - mimic, 0.1 * MEANS[HONEST].std(0) * drawn()[0], rtol=1e-7, atol=1e-12)
    assert told("mimic_apart", gaussians())[LIARS[0]].n == told("mimic", gaussians())[LIARS[0]].n


def test_a_strength_of_its_own() -> None:
    lied = told(ATTACKS["sign_flip"]._replace(strength=1.0), gaussians())[LIARS[1]].parts["model"]
    np.testing.assert_allclose(lied.mean.numpy(), 2 * SENT - MEANS[LIARS[1]], rtol=1e-10)


def test_the_quantile_of_baruch() -> None:
    assert quantile(50, 12) == pytest.approx(NormalDist().inv_cdf((38 - 14) / 38))
    assert quantile(10, 2) == 0.0  # half of the honest must be farther away
    assert quantile(3, 2) > 0  # more attackers than needed: bounded


def test_without_an_honest_client_in_the_cohort_attackers_know_one_another() -> None:
    some = [u for u in gaussians() if u.client in LIARS]
    lied = told("ipm", some)
    np.testing.assert_allclose(lied[0].parts["model"].mean.numpy(), SENT - 0.5 * (TRUE.mean(0) - SENT), rtol=1e-10)


def test_who_attacks_is_drawn_by_address_or_named() -> None:
    drawn = attackers_of(0.2, (), 20, 0)
    assert drawn == attackers_of(4, (), 20, 0) == attackers_of(0.2, (), 20, 0)
    assert len(drawn) == 4
    assert drawn != attackers_of(0.2, (), 20, 1)
    assert attackers_of([3, "b"], ("a", "b", "c", "d"), 4, 0) == (1, 3)
    assert attackers_of(0.01, (), 20, 0) != ()
    assert attackers_of(0, (), 20, 0) == attackers_of([], (), 20, 0) == ()


@pytest.mark.parametrize("attackers", [21, [20], ["nobody"], list(range(20)), 20])
def test_attackers_that_are_not_there_are_refused(attackers: object) -> None:
    with pytest.raises(InputError, match="attackers"):
        attackers_of(attackers, (), 20, 0)


def test_settings_name_every_attack() -> None:
    assert list(NAMES) == list(ATTACKS)
    assert fb.attacks.ATTACKS is ATTACKS
