"""Addressed randomness: stable, sensitive to every part, and read in order."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedbayes.noise import Tape, address, generator, normals, seeded


def test_addresses_keep_the_values_they_had_when_runs_were_first_written():
    # Fixed values: the same in every process, on every machine, in every later version.
    assert address(0) == 6711488920161924273
    assert address(0, 3, 7, "noise", 2) == 1949314679578036559
    assert address(1, "cohort") == 6703802308787232124


@pytest.mark.parametrize(
    "other",
    [
        (1, 2, 3, "noise"),
        (0, 1, 3, "noise"),
        (0, 2, 4, "noise"),
        (0, 2, 3, "batch"),
        (0, 2, 3),
        (2, 0, 3, "noise"),
        (0, 2, 3, "noise", 0),
        (0, 23, "noise"),
        ("0", 2, 3, "noise"),
    ],
    ids=str,
)
def test_every_part_of_an_address_matters(other):
    assert address(*other) != address(0, 2, 3, "noise")
    assert not torch.equal(normals(8, *other), normals(8, 0, 2, 3, "noise"))


def test_whole_numbers_of_numpy_stand_for_the_same_address():
    assert address(np.int64(3), "noise", np.uint8(2)) == address(3, "noise", 2)


@pytest.mark.parametrize("part", [1.5, None, ("a",)], ids=str)
def test_what_is_neither_whole_number_nor_text_is_no_address(part):
    with pytest.raises(TypeError, match="address"):
        address(0, part)


def test_an_address_fits_a_seed():
    assert all(0 <= address(i) < 2**63 for i in range(1000))
    assert len({address(i) for i in range(1000)}) == 1000


def test_normals_are_standard_normal_and_do_not_touch_the_global_generator():
    before = torch.get_rng_state()
    drawn = normals(20_000, 0, "moments")
    assert torch.equal(before, torch.get_rng_state())
    assert drawn.dtype == torch.float32
    assert stats.kstest(drawn.numpy(), "norm").pvalue > 1e-3


def test_neighbouring_addresses_are_uncorrelated():
    rows = torch.stack([normals(4000, 0, step) for step in range(20)]).double()
    off = torch.corrcoef(rows) - torch.eye(20)
    assert off.abs().max() < 5 / 4000**0.5


def test_a_generator_starts_at_its_address():
    assert torch.equal(torch.rand(3, generator=generator(1, "a")), torch.rand(3, generator=generator(1, "a")))


def test_the_global_generator_is_seeded_for_a_while_and_then_as_before():
    before = torch.get_rng_state()
    drawn = []
    for place in (("a", 1), ("a", 1), ("a", 2)):
        with seeded(*place):
            drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    with pytest.raises(KeyError), seeded(0):
        raise KeyError
    assert torch.equal(torch.get_rng_state(), before)


def test_a_tape_is_read_in_order_and_counts_what_was_read():
    tape = Tape(torch.arange(12.0))
    assert tape(torch.zeros(2, 2)).tolist() == [[0, 1], [2, 3]]
    assert tape(torch.zeros(()), (3,)).tolist() == [4, 5, 6]
    assert tape(torch.zeros(2, dtype=torch.float64)).dtype == torch.float64
    assert tape.used == 9


def test_a_tape_that_is_too_short_fails_instead_of_repeating():
    with pytest.raises(RuntimeError):
        Tape(torch.zeros(3))(torch.zeros(4))


def test_an_empty_tape_counts_and_hands_out_zeros():
    tape = Tape()
    assert tape(torch.ones(2, 3)).tolist() == [[0] * 3] * 2
    assert tape.uniform(torch.ones(4)).tolist() == [0.5] * 4
    assert tape.used == 10


def test_uniforms_of_a_tape_are_uniform():
    drawn = Tape(normals(20_000, 3)).uniform(torch.zeros(20_000, dtype=torch.float64))
    assert stats.kstest(drawn.numpy(), "uniform").pvalue > 1e-3
