"""The kernels of fused.py. Importing this needs Triton.

Of K clients with P weights each: `mean` and `rho` are [K, P]; rows R are B rows of a batch, once for each draw; `sums`
are [2, splits, K, R, outputs], a layer's means and variances before its bias, by who added them. KIND says what stands
in the place of `rho`: "scales" as they are; "precisions", where steps are IVON's, and then `numbers` [K, 8] are, for
each client: the weight of the KL, the rate, the share of a step in the curvature, the debiasing of the running mean,
beta1, the least curvature, the prior's precision, and the precision to begin with, 0 where something is known already;
or nothing, of "points", which have no variances and no noise. Points that are draws of the weights (MOVES False) have
their gradient stored and are moved by drawn_kernel.py.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def _softplus(rho):
    """log(1 + e^rho) and its derivative, exact to rounding: max(rho, 0) + log(1 + t), t = e^-|rho|.

    log(1 + t) = 2 artanh(z), z = t / (2 + t) <= 1/3: a series of seven terms. A logarithm takes three times as long.
    """
    t = tl.exp(-tl.abs(rho))
    z = t / (2.0 + t)
    q = z * z
    series = 1 / 9 + q * (1 / 11 + q * (1 / 13))
    series = 1.0 + q * (1 / 3 + q * (1 / 5 + q * (1 / 7 + q * series)))
    inverse = 1.0 / (1.0 + t)
    return tl.maximum(rho, 0.0) + 2.0 * z * series, tl.where(rho < 0, t * inverse, inverse)


@triton.jit
def _scale(value, numbers, k, KIND: tl.constexpr):
    """The scale that a number stands for, and the slope of it; for a precision, the one that it counts as."""
    if KIND == "precisions":
        begun = tl.load(numbers + k * 8 + 7)
        precision = tl.where(begun > 0, begun, value)
        return 1.0 / tl.sqrt(precision), precision
    else:
        return _softplus(value)


@triton.jit
def numbers(table, begins, weights, rates, beta1, memories, leasts, prior_scales, rounds, batches, steps, at, live,
            weight_stride, rate_stride, beta_stride, memory_stride, least_stride, prior_stride, round_stride,
            batch_stride, count, K: tl.constexpr, EPOCHS: tl.constexpr, FALLING: tl.constexpr,
            REMEMBERS: tl.constexpr, BEGINNING: tl.constexpr, SINGLE: tl.constexpr, STEADY: tl.constexpr,
            MASKED: tl.constexpr, DRAWN: tl.constexpr):  # fmt: skip
    """What `count` steps of IVON are made with; of draws of the weights (DRAWN) as drawn_kernel.py has it."""
    k = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + k * weight_stride).to(tl.float32)
    first_rate = tl.load(rates + k * rate_stride).to(tl.float32)
    beta = tl.load(beta1 + k * beta_stride).to(tl.float32)
    memory = tl.load(memories + k * memory_stride).to(tl.float32)
    least = tl.load(leasts + k * least_stride).to(tl.float32)
    prior = tl.load(prior_scales + k * prior_stride).to(tl.float32)
    number = tl.load(rounds + k * round_stride).to(tl.float32)
    per = EPOCHS * tl.load(batches + k * batch_stride).to(tl.float32)
    done = tl.load(steps + k)
    held = 1.0 / (prior * prior)
    decay = tl.log(beta)
    for s in range(count):
        here = tl.load(at + s).to(tl.float32)
        rate = first_rate
        if FALLING:
            rate = rate * (1.0 - here / per)
        if REMEMBERS:
            share = 1.0 - memory
        else:
            so_far = tl.minimum(BEGINNING * per, SINGLE * 1.0) + number * per + here
            so_far = tl.minimum(tl.maximum(so_far, STEADY * per), 2.0 * memory * per)
            share = 2.0 / (so_far + 2.0)
        begin = (number == 0.0) & (done == 0.0)
        whole = 1.0 - tl.exp((done + 1.0) * decay)
        own = table + (s * K + k) * (9 if DRAWN else 8)
        tl.store(own, weight)
        tl.store(own + 1, rate)
        tl.store(own + 2, share)
        tl.store(own + 4, beta)
        tl.store(own + 5, least)
        moves = 1.0
        if DRAWN:
            if MASKED:
                moves = tl.where(tl.load(live + s * K + k) != 0, 1.0, 0.0)
            tl.store(own + 3, 1.0 / whole)
            tl.store(own + 6, 1.0 / (1.0 - tl.exp(tl.maximum(done, 1.0) * decay)))
            tl.store(own + 7, 0.0)  # what a sample says: `said` writes it
            tl.store(own + 8, moves)
            if not REMEMBERS:
                tl.store(begins + s * K + k, tl.where(begin, least / weight, -1.0))
        else:
            tl.store(own + 3, whole)
            tl.store(own + 6, held)
            tl.store(own + 7, 0.0 if REMEMBERS else tl.where(begin, held + least / weight, 0.0))
        done += moves


@triton.jit
def _output(mean, rho, numbers, sums, noise, k, rows, cols, ok, bias_at, noise_at, stride,
            K, P, NORMALS, R, B, OUT, BELOW: tl.constexpr, BIAS: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """Outputs [rows, cols] of a layer, and their slopes in the variance."""
    centre = tl.zeros(ok.shape, tl.float32)
    variance = tl.zeros(ok.shape, tl.float32)
    for t in tl.static_range(BELOW):
        at = ((t * K + k) * R + rows) * OUT + cols
        centre += tl.load(sums + at, mask=ok, other=0.0)
        if KIND != "points":
            variance += tl.load(sums + BELOW * K * R * OUT + at, mask=ok, other=0.0)
    if BIAS:
        own = k * P + bias_at + cols
        centre += tl.load(mean + own, mask=cols < OUT, other=0.0)
        if KIND != "points":
            scale, _ = _scale(tl.load(rho + own, mask=cols < OUT, other=1.0), numbers, k, KIND)
            variance += scale * scale
    if KIND == "points":
        return centre, variance
    else:
        at = k * stride + (rows // B) * NORMALS + noise_at + (rows % B) * OUT + cols
        drawn = tl.load(noise + at, mask=ok, other=0.0)
        root = tl.sqrt(variance + 1e-16)
        return centre + root * drawn, drawn / (2.0 * root)


@triton.jit
def forward(mean, rho, numbers, x, below, noise, seen, slope, sums, weight_at, bias_at, noise_at, stride,
            IN: tl.constexpr, OUT: tl.constexpr, OUTS: tl.constexpr, TILE: tl.constexpr, CHUNKS: tl.constexpr,
            SPLITS: tl.constexpr, BELOW: tl.constexpr, FIRST: tl.constexpr, BIAS: tl.constexpr, ACT: tl.constexpr,
            K: tl.constexpr, P: tl.constexpr, NORMALS: tl.constexpr, R: tl.constexpr, B: tl.constexpr,
            ROWS: tl.constexpr, PRECISION: tl.constexpr, KIND: tl.constexpr):  # fmt: skip
    """A split of a layer's inputs: what the layer below gave, through its function, and its share of the sums."""
    k = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    rows = tl.arange(0, ROWS)[:, None]
    outs = tl.arange(0, OUTS)[None, :]
    centre = tl.zeros((ROWS, OUTS), tl.float32)
    variance = tl.zeros((ROWS, OUTS), tl.float32)
    for chunk in range(CHUNKS):
        first = (split * CHUNKS + chunk) * TILE
        cols = first + tl.arange(0, TILE)[None, :]
        ok = (rows < R) & (cols < IN)
        if FIRST:
            h = tl.load(x + (k * B + rows % B) * IN + cols, mask=ok, other=0.0)
        else:
            o, c = _output(mean, rho, numbers, below, noise, k, rows, cols, ok, bias_at, noise_at, stride,
                           K, P, NORMALS, R, B, IN, BELOW, BIAS, KIND)  # fmt: skip
            if ACT == "relu":
                h = tl.maximum(o, 0.0)
            elif ACT == "tanh":
                h = 2.0 / (1.0 + tl.exp(-2.0 * o)) - 1.0
            else:
                h = 1.0 / (1.0 + tl.exp(-o))
            h = tl.where(ok, h, 0.0)
            tl.store(seen + (k * R + rows) * IN + cols, h, mask=ok)
            if KIND != "points":
                tl.store(slope + (k * R + rows) * IN + cols, c, mask=ok)
        down = first + tl.arange(0, TILE)[:, None]
        held = (down < IN) & (outs < OUT)
        at = k * P + weight_at + outs * IN + down
        m = tl.load(mean + at, mask=held, other=0.0)
        centre = tl.dot(h, m, centre, input_precision=PRECISION)
        if KIND != "points":
            s, _ = _scale(tl.load(rho + at, mask=held, other=1.0), numbers, k, KIND)
            variance = tl.dot(h * h, s * s, variance, input_precision=PRECISION)
    ok = (rows < R) & (outs < OUT)
    at = ((split * K + k) * R + rows) * OUT + outs
    tl.store(sums + at, centre, mask=ok)
    if KIND != "points":
        tl.store(sums + SPLITS * K * R * OUT + at, variance, mask=ok)


@triton.jit
def head(mean, rho, numbers, sums, noise, y, counts, live, down, spread, loss, steps, more, bias_at, noise_at,
         stride, sigma,
         OUT: tl.constexpr, OUTS: tl.constexpr, BELOW: tl.constexpr, BIAS: tl.constexpr, CLASSES: tl.constexpr,
         MASKED: tl.constexpr, MORE: tl.constexpr, K: tl.constexpr, P: tl.constexpr, NORMALS: tl.constexpr,
         R: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
         KIND: tl.constexpr):  # fmt: skip
    """The loss of each row, its slopes in the last layer's means and variances, and the loss of the client."""
    k = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS)[:, None]
    outs = tl.arange(0, OUTS)[None, :]
    ok = (rows < R) & (outs < OUT)
    o, c = _output(mean, rho, numbers, sums, noise, k, rows, outs, ok, bias_at, noise_at, stride,
                   K, P, NORMALS, R, B, OUT, BELOW, BIAS, KIND)  # fmt: skip
    count = B * 1.0
    counted = rows < R
    if MASKED:
        count = tl.load(counts + k).to(tl.float32)
        counted = counted & (tl.load(live + k * B + rows % B, mask=rows < R, other=0) != 0)
    if CLASSES:
        target = tl.load(y + k * B + rows % B, mask=rows < R, other=0)
        o = tl.where(outs < OUT, o, float("-inf"))
        most = tl.max(o, 1)[:, None]
        e = tl.exp(o - most)
        total = tl.sum(e, 1)[:, None]
        mine = outs == target
        nll = tl.log(total) + most - tl.sum(tl.where(mine, o, 0.0), 1)[:, None]
        d = e / total - tl.where(mine, 1.0, 0.0)
    else:
        wanted = tl.load(y + (k * B + rows % B) * OUT + outs, mask=ok, other=0.0).to(tl.float32)
        error = tl.where(ok, (o - wanted) / sigma, 0.0)
        each = tl.where(ok, 0.5 * error * error + tl.log(sigma) + 0.9189385332046727, 0.0)
        nll = tl.sum(each, 1)[:, None]
        d = error / sigma
    each = 1.0 / (tl.maximum(count, 1.0) * (R // B))
    d = tl.where(counted & ok, d * each, 0.0)
    at = (k * R + rows) * OUT + outs
    tl.store(down + at, d, mask=ok)
    if KIND != "points":
        tl.store(spread + at, tl.where(counted & ok, d * c, 0.0), mask=ok)
    if count > 0:
        tl.store(loss + k, tl.load(loss + k) + tl.sum(tl.where(counted, nll, 0.0)) * each)
        tl.store(steps + k, tl.load(steps + k) + 1.0)
        if MORE:
            tl.store(more + k, tl.load(more + k) + 1.0)


@triton.jit
def _moved(value, velocity, slope, at, ok, rate, MOMENTUM: tl.constexpr):
    """A step of gradient descent, its velocity kept."""
    if MOMENTUM > 0:
        slope += MOMENTUM * tl.load(velocity + at, mask=ok, other=0.0)
        tl.store(velocity + at, slope, mask=ok)
    return value - rate * slope


@triton.jit
def _followed(mean, precision, first, numbers, m, p, s, gm, gv, at, ok, k, rate, AVERAGE: tl.constexpr,
              IMPLICIT: tl.constexpr, FARTHEST: tl.constexpr, SAID: tl.constexpr):  # fmt: skip
    """Means and precisions after a step of IVON, and its running mean of gradients."""
    own = numbers + k * 8
    weight = tl.load(own)
    share = tl.load(own + 2)
    whole = tl.load(own + 3)
    beta = tl.load(own + 4)
    least = tl.load(own + 5)
    held = tl.load(own + 6)
    begun = tl.load(own + 7)
    seen = 2.0 * gv
    x = share * ((held + seen / weight) / p - 1.0)
    x = tl.minimum(tl.maximum(x, -FARTHEST), FARTHEST)
    if AVERAGE:
        after = p * (1.0 + tl.maximum(x, -0.5 * FARTHEST))
    else:
        after = p * (1.0 + x + 0.5 * x * x)
    said = held + tl.maximum(tl.abs(seen), SAID * tl.abs(gm) / s) / weight
    after = tl.where(begun > 0, tl.maximum(after, said), after)
    average = beta * tl.load(first + at, mask=ok, other=0.0) + (1.0 - beta) * gm
    if IMPLICIT:
        bend = tl.maximum(weight * (after - held), least) + rate * weight * held
    else:
        bend = tl.maximum(weight * after, least)
    tl.store(mean + at, m - rate * (average / whole + weight * held * m) / bend, mask=ok)
    tl.store(precision + at, after, mask=ok)
    tl.store(first + at, average, mask=ok)


@triton.jit
def _update(mean, rho, velocity_mean, velocity_rho, prior_mean, prior_scale, numbers, m, r, s, bend, gm, gv, at,
            prior_at, ok, held, k, weight, rate, prior_stride, FIXED: tl.constexpr, MOMENTUM: tl.constexpr,
            KIND: tl.constexpr, MOVES: tl.constexpr, AVERAGE: tl.constexpr, IMPLICIT: tl.constexpr,
            FARTHEST: tl.constexpr, SAID: tl.constexpr):  # fmt: skip
    """Means and rhos after a step: the gradients of the loss, and those of the KL by hand. Of draws the gradient."""
    if not MOVES:
        tl.store(velocity_mean + at, gm, mask=ok)
    elif KIND == "points":
        tl.store(mean + at, _moved(m, velocity_mean, gm, at, ok, rate, MOMENTUM), mask=ok)
    elif KIND == "precisions":
        _followed(mean, rho, velocity_mean, numbers, m, bend, s, gm, gv, at, ok, k, rate, AVERAGE, IMPLICIT,
                  FARTHEST, SAID)  # fmt: skip
    else:
        if FIXED:
            m0 = 0.0
            s0 = tl.load(prior_scale + k * prior_stride) + tl.zeros(m.shape, tl.float32)
        else:
            m0 = tl.load(prior_mean + prior_at, mask=held, other=0.0)
            s0 = tl.load(prior_scale + prior_at, mask=held, other=1.0)
        precision = 1.0 / (s0 * s0)
        slope_mean = gm + weight * precision * (m - m0)
        slope_rho = (2.0 * s * gv + weight * (s * precision - 1.0 / s)) * bend
        tl.store(mean + at, _moved(m, velocity_mean, slope_mean, at, ok, rate, MOMENTUM), mask=ok)
        tl.store(rho + at, _moved(r, velocity_rho, slope_rho, at, ok, rate, MOMENTUM), mask=ok)


@triton.jit
def backward(mean, rho, velocity_mean, velocity_rho, prior_mean, prior_scale, seen, slope, down, spread, lower_down,
             lower_spread, counts, weights, rates, numbers, weight_at, bias_at, weight_stride, rate_stride,
             prior_stride, scale_stride,
             IN: tl.constexpr, OUT: tl.constexpr, OUTS: tl.constexpr, TILE: tl.constexpr, FIRST: tl.constexpr,
             BIAS: tl.constexpr, ACT: tl.constexpr, FIXED: tl.constexpr, MOMENTUM: tl.constexpr,
             MOVES: tl.constexpr, AVERAGE: tl.constexpr, IMPLICIT: tl.constexpr, FARTHEST: tl.constexpr,
             SAID: tl.constexpr, MASKED: tl.constexpr, K: tl.constexpr, P: tl.constexpr, NORMALS: tl.constexpr,
             R: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, PRECISION: tl.constexpr,
             KIND: tl.constexpr):  # fmt: skip
    """A tile of a layer's weights moves a step, or its gradient is stored; the slopes of its inputs go to the layer
    below."""
    k = tl.program_id(0).to(tl.int64)
    rows = tl.arange(0, ROWS)[:, None]
    outs = tl.arange(0, OUTS)
    cols = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    weight = tl.load(weights + k * weight_stride)
    rate = tl.load(rates + k * rate_stride)
    ok = (rows < R) & (cols < IN)
    if FIRST:
        h = tl.load(seen + (k * B + rows % B) * IN + cols, mask=ok, other=0.0)
    else:
        h = tl.load(seen + (k * R + rows) * IN + cols, mask=ok, other=0.0)
    fine = (rows < R) & (outs[None, :] < OUT)
    given = (k * R + rows) * OUT + outs[None, :]
    dm = tl.load(down + given, mask=fine, other=0.0)
    held = (outs[:, None] < OUT) & (cols < IN)
    inside = weight_at + outs[:, None] * IN + cols
    at = k * P + inside
    m = tl.load(mean + at, mask=held, other=0.0)
    gm = tl.dot(tl.trans(dm), h, input_precision=PRECISION)
    if KIND == "points":  # of which the update reads none
        dv, r, s, bend, gv = dm, m, m, m, gm
    else:
        dv = tl.load(spread + given, mask=fine, other=0.0)
        r = tl.load(rho + at, mask=held, other=1.0)
        s, bend = _scale(r, numbers, k, KIND)
        gv = tl.dot(tl.trans(dv), h * h, input_precision=PRECISION)
    if not FIRST:
        d = tl.dot(dm, m, input_precision=PRECISION)
        if KIND != "points":
            d += 2.0 * h * tl.dot(dv, tl.where(held, s * s, 0.0), input_precision=PRECISION)
        if ACT == "relu":
            d = tl.where(h > 0, d, 0.0)
        elif ACT == "tanh":
            d = d * (1.0 - h * h)
        else:
            d = d * h * (1.0 - h)
        below = (k * R + rows) * IN + cols
        tl.store(lower_down + below, d, mask=ok)
        if KIND != "points":
            tl.store(lower_spread + below, d * tl.load(slope + below, mask=ok, other=0.0), mask=ok)
    moves = held
    if MASKED:
        moves = held & (tl.load(counts + k + tl.zeros(held.shape, tl.int32)) > 0)
    _update(mean, rho, velocity_mean, velocity_rho, prior_mean, prior_scale, numbers, m, r, s, bend, gm, gv, at,
            k * prior_stride + inside, moves, held, k, weight, rate, scale_stride, FIXED, MOMENTUM, KIND,
            MOVES, AVERAGE, IMPLICIT, FARTHEST, SAID)  # fmt: skip
    if BIAS:  # noqa: SIM102  (the compiler knows this one)
        if tl.program_id(1) == 0:
            own = bias_at + outs
            there = outs < OUT
            b = tl.load(mean + k * P + own, mask=there, other=0.0)
            if KIND == "points":
                q, t, turn = b, b, b
            else:
                q = tl.load(rho + k * P + own, mask=there, other=1.0)
                t, turn = _scale(q, numbers, k, KIND)
            shifts = there
            if MASKED:
                shifts = there & (tl.load(counts + k + tl.zeros(there.shape, tl.int32)) > 0)
            _update(mean, rho, velocity_mean, velocity_rho, prior_mean, prior_scale, numbers, b, q, t, turn,
                    tl.sum(dm, 0), tl.sum(dv, 0), k * P + own, k * prior_stride + own, shifts, there, k, weight,
                    rate, scale_stride, FIXED, MOMENTUM, KIND, MOVES, AVERAGE, IMPLICIT, FARTHEST, SAID)  # fmt: skip
