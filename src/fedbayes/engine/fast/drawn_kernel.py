"""The kernel of drawn.py. Importing this needs Triton.

Of K clients with P weights each, `mean`, `precision` and `first` (the running mean of gradients) are [K, P]; `weights`
and `slope`, of one piece of SIZE weights from BEGIN on, are [K, SIZE]. `numbers` [K, 9] are, for each client: the
weight of the KL, the rate, the share of a step in the curvature, what the running mean is multiplied by after this step
and before it, beta1, the least curvature, what a sample said of the first curvature, and whether the client moves.
`begun` [K] is what the first precision has beyond the prior's; below 0 where it is known already.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass all tests of randomness (Salmon et al., 2011)


@triton.jit
def _normals(noise, seeds, step, k, K: tl.constexpr, P: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr,
             BLOCK: tl.constexpr, GIVEN: tl.constexpr):  # fmt: skip
    """A client's normals of a step for four blocks of weights: by a counter, or given ones [steps, K, P]."""
    lanes = tl.arange(0, BLOCK)
    if GIVEN:
        i = tl.program_id(0) * (4 * BLOCK) + lanes
        at = noise + (step * K + k) * P + BEGIN + i
        a = tl.load(at, mask=i < SIZE, other=0.0)
        b = tl.load(at + BLOCK, mask=i + BLOCK < SIZE, other=0.0)
        c = tl.load(at + 2 * BLOCK, mask=i + 2 * BLOCK < SIZE, other=0.0)
        d = tl.load(at + 3 * BLOCK, mask=i + 3 * BLOCK < SIZE, other=0.0)
    else:
        counter = tl.program_id(0) * BLOCK + lanes
        zero = counter * 0
        seed = tl.load(seeds + step)
        a, b, c, d = tl.philox(seed, counter, zero + tl.program_id(1), zero + BEGIN, zero, ROUNDS)
        a, b = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(a), tl.uint_to_uniform_float(b))
        c, d = tl.pair_uniform_to_normal(tl.uint_to_uniform_float(c), tl.uint_to_uniform_float(d))
    return a, b, c, d


@triton.jit
def _block(mean, precision, first, weights, slope, prior_mean, prior_scale, numbers, begun, prior_stride, z, fresh, k,
           i, P: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr, FIXED: tl.constexpr, REMEMBERS: tl.constexpr,
           AVERAGE: tl.constexpr, IMPLICIT: tl.constexpr, FARTHEST: tl.constexpr, MOVES: tl.constexpr,
           DRAWS: tl.constexpr):  # fmt: skip
    """A block of a client's weights moves by noise z, as `IvonStep` has it, and is drawn by fresh noise."""
    ok = i < SIZE
    if MOVES:
        ok = i < tl.load(numbers + k * 9 + 8).to(tl.int32) * SIZE  # none of a client that waits
    at = k * P + BEGIN + i
    m = tl.load(mean + at, mask=ok, other=0.0)
    p = tl.load(precision + at, mask=ok, other=1.0)
    if FIXED:
        m0 = 0.0
        s0 = tl.load(prior_scale + k * prior_stride)
    else:
        m0 = tl.load(prior_mean + k * prior_stride + BEGIN + i, mask=ok, other=0.0)
        s0 = tl.load(prior_scale + k * prior_stride + BEGIN + i, mask=ok, other=1.0)
    held = 1.0 / (s0 * s0)
    if not REMEMBERS:
        new = tl.load(begun + k)
        p = tl.where(new >= 0, held + new, p)
    if MOVES:
        weight = tl.load(numbers + k * 9)
        rate = tl.load(numbers + k * 9 + 1)
        share = tl.load(numbers + k * 9 + 2)
        beta = tl.load(numbers + k * 9 + 5)
        least = tl.load(numbers + k * 9 + 6)
        g = tl.load(slope + k * SIZE + i, mask=ok, other=0.0)
        f = tl.load(first + at, mask=ok, other=0.0)
        told = g
        if not REMEMBERS:
            told = g - f * tl.load(numbers + k * 9 + 4)
        seen = z * told * tl.sqrt(p)
        x = share * ((held + seen * (1.0 / weight)) / p - 1.0)
        x = tl.minimum(tl.maximum(x, -FARTHEST), FARTHEST)
        if AVERAGE:
            after = p * (1.0 + tl.maximum(x, -0.5 * FARTHEST))
        else:
            after = p * (1.0 + x + 0.5 * x * x)
        if not REMEMBERS:
            said = held + tl.maximum(seen, tl.load(numbers + k * 9 + 7)) * (1.0 / weight)
            after = tl.where(new >= 0, tl.maximum(after, said), after)
        f = beta * f + (1.0 - beta) * g
        if IMPLICIT:
            bend = tl.maximum(weight * (after - held), least) + rate * weight * held
        else:
            bend = tl.maximum(weight * after, least)
        m = m - rate * (f * tl.load(numbers + k * 9 + 3) + weight * held * (m - m0)) / bend
        p = after
        tl.store(mean + at, m, mask=ok)
        tl.store(precision + at, p, mask=ok)
        tl.store(first + at, f, mask=ok)
    if DRAWS:
        tl.store(weights + k * SIZE + i, m + fresh / tl.sqrt(p), mask=ok)


@triton.jit(do_not_specialize=["step"])
def moved(mean, precision, first, weights, slope, prior_mean, prior_scale, noise, seeds, numbers, begun, prior_stride,
          step, K: tl.constexpr, P: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr,
          FIXED: tl.constexpr, REMEMBERS: tl.constexpr, AVERAGE: tl.constexpr, IMPLICIT: tl.constexpr,
          FARTHEST: tl.constexpr, GIVEN: tl.constexpr, MOVES: tl.constexpr, DRAWS: tl.constexpr):  # fmt: skip
    """Clients' weights move by the gradients of a step (MOVES), and those of the next step are drawn (DRAWS)."""
    k = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * (4 * BLOCK) + tl.arange(0, BLOCK)
    if MOVES:
        z0, z1, z2, z3 = _normals(noise, seeds, step, k, K, P, BEGIN, SIZE, BLOCK, GIVEN)
    if DRAWS:
        f0, f1, f2, f3 = _normals(noise, seeds, step + 1, k, K, P, BEGIN, SIZE, BLOCK, GIVEN)
    if not MOVES:
        z0, z1, z2, z3 = f0, f1, f2, f3  # not read
    if not DRAWS:
        f0, f1, f2, f3 = z0, z1, z2, z3  # not read
    _block(mean, precision, first, weights, slope, prior_mean, prior_scale, numbers, begun, prior_stride, z0, f0, k, i,
           P, BEGIN, SIZE, FIXED, REMEMBERS, AVERAGE, IMPLICIT, FARTHEST, MOVES, DRAWS)  # fmt: skip
    _block(mean, precision, first, weights, slope, prior_mean, prior_scale, numbers, begun, prior_stride, z1, f1, k,
           i + BLOCK, P, BEGIN, SIZE, FIXED, REMEMBERS, AVERAGE, IMPLICIT, FARTHEST, MOVES, DRAWS)  # fmt: skip
    _block(mean, precision, first, weights, slope, prior_mean, prior_scale, numbers, begun, prior_stride, z2, f2, k,
           i + 2 * BLOCK, P, BEGIN, SIZE, FIXED, REMEMBERS, AVERAGE, IMPLICIT, FARTHEST, MOVES, DRAWS)  # fmt: skip
    _block(mean, precision, first, weights, slope, prior_mean, prior_scale, numbers, begun, prior_stride, z3, f3, k,
           i + 3 * BLOCK, P, BEGIN, SIZE, FIXED, REMEMBERS, AVERAGE, IMPLICIT, FARTHEST, MOVES, DRAWS)  # fmt: skip
