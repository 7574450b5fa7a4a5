"""Every option of every method is a record: checked by name and value, told in words, and of a known kind."""

import inspect
from dataclasses import replace

import pytest

import fedbayes as fb
from fedbayes.errors import InputError
from fedbayes.methods import METHODS, Method, method_named
from fedbayes.options import KINDS, described, option, options_of, positive, record

CASES = [(method, name) for method in METHODS for name in options_of(METHODS[method])]


@pytest.mark.parametrize(("method", "name"), CASES)
def test_no_value_escapes_its_check(method: str, name: str) -> None:
    metadata = options_of(METHODS[method])[name].metadata
    assert metadata["about"]
    assert metadata["kind"] in KINDS
    wrong = float("nan") if metadata["kind"] in ("scalar", "switch") else -1.5
    wrong = "no such name" if metadata["check"].choices is not None else wrong
    with pytest.raises(InputError, match=name) as caught:
        METHODS[method](**{name: wrong})
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("method", METHODS)
def test_a_method_shows_its_options_in_its_signature(method: str) -> None:
    parameters = inspect.signature(getattr(fb.methods, method)).parameters
    assert set(parameters) == set(options_of(METHODS[method]))
    assert all(p.kind is p.KEYWORD_ONLY for p in parameters.values())
    assert [row[0] for row in described(METHODS[method])]
    last = list(parameters)[-1]
    assert options_of(METHODS[method])[last].metadata["rare"] or "refine" not in parameters


@pytest.mark.parametrize("method", METHODS)
def test_options_give_the_same_method_again(method: str) -> None:
    made = METHODS[method]()
    assert method_named(method, made.options) == made
    assert replace(made) == made


def test_a_mistyped_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(InputError, match=r"unknown option of feduab 'kl_wieght': did you mean 'kl_weight'"):
        fb.methods.feduab(kl_wieght=1e-3)


@pytest.mark.parametrize(("method", "name"), [(m, n) for m in METHODS for n in METHODS[m].fixed])
def test_what_a_method_fixes_is_refused_with_its_reason(method: str, name: str) -> None:
    with pytest.raises(InputError, match=f"{name} is fixed in {method}: {METHODS[method].fixed[name][:20]}"):
        METHODS[method](**{name: "anything"})


WITH_SERVER = [m for m in METHODS if {"server", "server_lr"} <= {*options_of(METHODS[m])} - {*METHODS[m].fixed}]
IVONS = [m for m in METHODS if getattr(METHODS[m](), "optimiser", "") == "ivon"]
BY_IVON = [m for m in IVONS if "momentum" not in METHODS[m].fixed]


@pytest.mark.parametrize("method", WITH_SERVER)
@pytest.mark.parametrize("name", ["server_lr", "server_momentum"])
def test_a_step_that_the_server_does_not_take_has_no_options(method: str, name: str) -> None:
    with pytest.raises(InputError, match=rf"^{name}: the server takes no step of its own; leave it out"):
        METHODS[method](**{"server": None, name: 0.123})
    METHODS[method](**{"server": None, name: options_of(METHODS[method])[name].default})


@pytest.mark.parametrize("method", BY_IVON)
def test_ivon_has_no_momentum_of_sgd(method: str) -> None:
    with pytest.raises(InputError, match=r"^momentum: it is of sgd, ivon has beta1"):
        METHODS[method](momentum=0.9)
    METHODS[method](momentum=0.9, optimiser="sgd")


FALLING = [m for m in METHODS if "lr_drop" in options_of(METHODS[m]) and "lr_drop" not in METHODS[m].fixed]


@pytest.mark.parametrize("method", FALLING)
@pytest.mark.parametrize("name", ["lr_drop", "lr_drop_every"])
def test_step_sizes_that_do_not_drop_have_no_drops(method: str, name: str) -> None:
    value = {"lr_drop": 0.5, "lr_drop_every": 3}[name]
    if "lr_within" not in METHODS[method].fixed:
        METHODS[method](**{"lr_within": "steps", name: value})
    with pytest.raises(InputError, match=rf'^{name}: no step size falls by steps; set lr_within = "steps"'):
        METHODS[method](**{name: value})
    METHODS[method](**{name: options_of(METHODS[method])[name].default})


def test_low_rank_and_rules_that_have_no_form_for_it() -> None:
    with pytest.raises(InputError, match=r"^pooled: a normal of low rank has no rho; use "):
        fb.methods.fedswag(covariance="low_rank", pooled="mean_rho")


def test_a_users_method_is_checked_like_the_librarys() -> None:
    @record
    class Own(Method):
        name = "own"
        lr: float = option("step size", positive, default=0.1, kind="scalar")

    assert Own(lr=0.5).scalars() == {"lr": 0.5}
    with pytest.raises(InputError, match="lr must be positive"):
        Own(lr=0)


def test_draws_set_both_numbers_unless_they_are_given() -> None:
    assert fb.methods.feduab(draws=5).train_draws == fb.methods.feduab(draws=5).test_draws == 5
    method = fb.methods.bpfed(draws=5, test_draws=50)
    assert (method.train_draws, method.test_draws) == (5, 50)
    assert "draws" not in method.options
