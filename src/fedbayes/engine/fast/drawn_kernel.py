"""The kernel of drawn.py. Importing this needs Triton.

Of K clients with P weights each, `mean`, `precision` and `first` (the running mean of gradients) are [K, P]; `weights`
and `slope`, of one piece of SIZE weights from BEGIN on, are [K, SIZE]. `numbers` [K, 9] are, for each client: the
weight of the KL, the rate, the share of a step in the curvature, what the running mean is multiplied by after this
step, beta1, the least curvature, what the running mean is multiplied by before this step, what a sample said of the
first curvature, and whether the client moves.
`begun` [K] is what the first precision has beyond the prior's; below 0 where it is known already.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

ROUNDS = tl.constexpr(7)  # of Philox: the fewest that pass all tests of randomness (Salmon et al., 2011)


@triton.jit
def _pair(a, b):
    """Two normals of two random integers, by Box and Muller: a radius, and an angle 2 h in [-pi, pi).

    Sine and cosine of h by Abramowitz and Stegun, 4.3.97 and 4.3.99: those of any angle take four times as long.
    """
    radius = tl.sqrt(-2.0 * tl.log(tl.maximum(tl.uint_to_uniform_float(a), 1e-7)))
    h = b.to(tl.int32, bitcast=True).to(tl.float32) * 7.3145906e-10  # pi / 2 * 2^-31
    q = h * h
    sine = -1.984090e-4 + q * (2.7526e-6 - 2.39e-8 * q)
    sine = h * (1.0 + q * (-0.1666666664 + q * (0.0083333315 + q * sine)))
    cosine = -0.0013888397 + q * (2.47609e-5 - 2.605e-7 * q)
    cosine = 1.0 + q * (-0.4999999963 + q * (0.0416666418 + q * cosine))
    return radius * (1.0 - 2.0 * sine * sine), radius * (2.0 * sine * cosine)


@triton.jit
def _normals(seeds, step, BEGIN: tl.constexpr, COUNTS: tl.constexpr):
    """Two blocks of a client's normals in a step, by a counter that gives four; each thread has pairs of neighbours."""
    counter = tl.program_id(0) * COUNTS + tl.arange(0, COUNTS)
    zero = counter * 0
    a, b, c, d = tl.philox(tl.load(seeds + step), counter, zero + tl.program_id(1), zero + BEGIN, zero, ROUNDS)
    a, b = _pair(a, b)
    c, d = _pair(c, d)
    return tl.reshape(tl.join(a, b), (2 * COUNTS,)), tl.reshape(tl.join(c, d), (2 * COUNTS,))


@triton.jit
def _block(mean, precision, first, weights, slope, prior_mean, prior_scale, noise, prior_stride, step, z, fresh, k, i,
           size, weight, rate, share, whole, before, beta, least, said, new, K: tl.constexpr, P: tl.constexpr,
           BEGIN: tl.constexpr, SIZE: tl.constexpr, FIXED: tl.constexpr, REMEMBERS: tl.constexpr,
           AVERAGE: tl.constexpr, IMPLICIT: tl.constexpr, FARTHEST: tl.constexpr, GIVEN: tl.constexpr,
           MOVES: tl.constexpr, DRAWS: tl.constexpr):  # fmt: skip
    """A block of a client's weights moves by noise z, as `IvonStep` has it, and is drawn by fresh noise."""
    ok = i < size
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
        p = tl.where(new >= 0, held + new, p)
    if MOVES:
        if GIVEN:
            z = tl.load(noise + (step * K + k) * P + BEGIN + i, mask=ok, other=0.0)
        g = tl.load(slope + k * SIZE + i, mask=ok, other=0.0)
        f = tl.load(first + at, mask=ok, other=0.0)
        told = g
        if not REMEMBERS:
            told = g - f * before
        seen = z * told * tl.sqrt(p)
        x = share * ((held + seen * (1.0 / weight)) / p - 1.0)
        x = tl.minimum(tl.maximum(x, -FARTHEST), FARTHEST)
        if AVERAGE:
            after = p * (1.0 + tl.maximum(x, -0.5 * FARTHEST))
        else:
            after = p * (1.0 + x + 0.5 * x * x)
        if not REMEMBERS:
            after = tl.where(new >= 0, tl.maximum(after, held + tl.maximum(seen, said) * (1.0 / weight)), after)
        f = beta * f + (1.0 - beta) * g
        if IMPLICIT:
            bend = tl.maximum(weight * (after - held), least) + rate * weight * held
        else:
            bend = tl.maximum(weight * after, least)
        m = m - rate * (f * whole + weight * held * (m - m0)) / bend
        p = after
        tl.store(mean + at, m, mask=ok)
        tl.store(precision + at, p, mask=ok)
        tl.store(first + at, f, mask=ok)
    if DRAWS:
        if GIVEN:
            fresh = tl.load(noise + ((step + 1) * K + k) * P + BEGIN + i, mask=ok, other=0.0)
        tl.store(weights + k * SIZE + i, m + fresh / tl.sqrt(p), mask=ok)


@triton.jit(do_not_specialize=["step"])
def moved(mean, precision, first, weights, slope, prior_mean, prior_scale, noise, seeds, numbers, begun, prior_stride,
          step, K: tl.constexpr, P: tl.constexpr, BEGIN: tl.constexpr, SIZE: tl.constexpr, COUNTS: tl.constexpr,
          FIXED: tl.constexpr, REMEMBERS: tl.constexpr, AVERAGE: tl.constexpr, IMPLICIT: tl.constexpr,
          FARTHEST: tl.constexpr, GIVEN: tl.constexpr, MOVES: tl.constexpr, DRAWS: tl.constexpr):  # fmt: skip
    """Clients' weights move by the gradients of a step (MOVES), and those of the next step are drawn (DRAWS).

    Noise is given, [steps, K, P], or made by a counter from the step's seed.
    """
    k = tl.program_id(1).to(tl.int64)
    z0, z1, fresh0, fresh1 = 0.0, 0.0, 0.0, 0.0
    size, weight, rate, share, whole, before, beta, least, said, new = SIZE, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0
    if MOVES:
        own = numbers + k * 9
        weight = tl.load(own)
        rate = tl.load(own + 1)
        share = tl.load(own + 2)
        whole = tl.load(own + 3)
        beta = tl.load(own + 4)
        least = tl.load(own + 5)
        before = tl.load(own + 6)
        said = tl.load(own + 7)
        size = tl.load(own + 8).to(tl.int32) * SIZE  # 0 for a client that waits
        if not GIVEN:
            z0, z1 = _normals(seeds, step, BEGIN, COUNTS)
    if not REMEMBERS:
        new = tl.load(begun + k)
    if DRAWS:  # noqa: SIM102  (the compiler knows this one)
        if not GIVEN:
            fresh0, fresh1 = _normals(seeds, step + 1, BEGIN, COUNTS)
    i = tl.program_id(0) * (4 * COUNTS) + tl.arange(0, 2 * COUNTS)
    _block(mean, precision, first, weights, slope, prior_mean, prior_scale, noise, prior_stride, step, z0, fresh0, k, i,
           size, weight, rate, share, whole, before, beta, least, said, new, K, P, BEGIN, SIZE, FIXED, REMEMBERS,
           AVERAGE, IMPLICIT, FARTHEST, GIVEN, MOVES, DRAWS)  # fmt: skip
    i += 2 * COUNTS
    _block(mean, precision, first, weights, slope, prior_mean, prior_scale, noise, prior_stride, step, z1, fresh1, k, i,
           size, weight, rate, share, whole, before, beta, least, said, new, K, P, BEGIN, SIZE, FIXED, REMEMBERS,
           AVERAGE, IMPLICIT, FARTHEST, GIVEN, MOVES, DRAWS)  # fmt: skip


@triton.jit
def said(mean, weights, slope, prior_scale, numbers, begun, prior_stride, P: tl.constexpr, EACH: tl.constexpr,
         COUNT: tl.constexpr, PLACES: tl.constexpr, FIXED: tl.constexpr):  # fmt: skip
    """What COUNT weights of a client, each EACH-th, say of its first curvature goes into `numbers`."""
    k = tl.program_id(0).to(tl.int64)
    new = tl.load(begun + k)
    if new >= 0:
        n = tl.arange(0, PLACES)
        ok = n < COUNT
        i = n * EACH
        if FIXED:
            s0 = tl.load(prior_scale + k * prior_stride)
        else:
            s0 = tl.load(prior_scale + k * prior_stride + i, mask=ok, other=1.0)
        m = tl.load(mean + k * P + i, mask=ok, other=0.0)
        w = tl.load(weights + k * P + i, mask=ok, other=0.0)
        g = tl.load(slope + k * P + i, mask=ok, other=0.0)
        seen = tl.abs(g * (w - m) * (1.0 / (s0 * s0) + new))
        tl.store(numbers + k * 9 + 7, tl.sum(seen) / COUNT)
