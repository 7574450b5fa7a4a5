"""The kernels of stacked_convolution.py. Importing this needs Triton.

Convolutions as products of matrices whose patches are never stored: a program gathers the part of them that its tile
needs. Of G networks: `x` is [G, N, H, W, C], `w` is [G, O, R, S, C], outputs `d` are [G, N, HO, WO, O]; K = R S C.

A second convolution of the same inputs may go with the first (PAIR), filters being [G, 2, ...]: of their squares, which
are variances of normal outputs about the first's (LOCAL); or of inputs with signs `p` [G, N, C], whose outputs take
signs `q` [G, N, O] and are added to the first's (FLIPPED). WITHIN: a tile lies within one image, and has its signs.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl

ONE = tl.constexpr(0)
LOCAL = tl.constexpr(1)
FLIPPED = tl.constexpr(2)


@triton.jit
def _signed(a, b, total, signs, only, image, channel, ok, WIDTH, WITHIN: tl.constexpr, PRECISION: tl.constexpr):
    """total + (a, with its signs) b; `only` is the image where all of a lies within one."""
    if WITHIN:
        b = b * tl.load(signs + only * WIDTH + channel)[:, None].to(b.dtype)
    else:
        a = a * tl.load(signs + image[:, None] * WIDTH + channel[None, :], mask=ok, other=0.0).to(a.dtype)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _bits(at, live, WAY: tl.constexpr, R: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    """A bit for each place r of a filter's R: whether at + WAY r is one of 0, STEP, 2 STEP, ... below N STEP.

    0 of what is not live. Of filters with more places than there are bits it says no more than that.
    """
    if R < 32:
        bits = tl.zeros_like(at)
        for r in tl.static_range(R):
            bits |= (live & _there(at + WAY * r, N, STEP)).to(tl.int32) << r
        return bits
    else:
        return live.to(tl.int32)


@triton.jit
def _there(i, N: tl.constexpr, STEP: tl.constexpr):
    return (i >= 0) & (i < N * STEP) & (i % STEP == 0)


@triton.jit
def _meets(bits, at, r, WAY: tl.constexpr, R: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    """Whether place r meets an input, by the bit of it where there is one."""
    if R < 32:
        return (bits & (1 << r)) != 0
    else:
        return (bits != 0) & _there(at + WAY * r, N, STEP)


@triton.jit
def _places(first, C: tl.constexpr, R: tl.constexpr, S: tl.constexpr, BK: tl.constexpr):
    """Of BK numbers from `first` on, in an order [R, S, C]: row and column of the filter, and channel.

    Where BK divides C they share row and column, which then are numbers; and the channel is one plus 0, 1, ....
    """
    lane = tl.arange(0, BK)
    if C % BK == 0:
        place = first // C
        return place // S, place % S, tl.multiple_of(first % C, BK), lane
    else:
        k = first + lane
        r = tl.minimum(k // (S * C), 31) if R < 32 else k // (S * C)  # beyond the last place no bit is set
        return r[None, :], (k // C % S)[None, :], (k % C)[None, :], lane * 0


@triton.jit
def _filled(n, N: tl.constexpr, B: tl.constexpr):
    """Which numbers of blocks of B are below N."""
    if N % B == 0:
        return tl.full(n.shape, True, tl.int1)
    else:
        return n < N


@triton.jit
def forward(x, w, bias, p, q, out, slope, M, STRIDE, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr,
            WO: tl.constexpr, C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
            DOWN: tl.constexpr, RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
            PAIR: tl.constexpr, WITHIN: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
            PRECISION: tl.constexpr):  # fmt: skip
    """Outputs [positions, O]: patches [positions, K] times filters [K, O]. `q` has STRIDE numbers from group to group.

    LOCAL: `bias` is [G, 2, O] or nothing, `q` the normals [G, N, O, HO, WO], `slope` the outputs' in their variances.
    """
    K: tl.constexpr = R * S * C
    COPIES: tl.constexpr = 1 if PAIR == ONE else 2
    g = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    image, place = rows // (HO * WO), rows % (HO * WO)
    top, left = place // WO * DOWN - TOP, place % WO * RIGHT - LEFT
    images, only = M // (HO * WO), tl.program_id(0) * BM // (HO * WO)
    high, wide = _bits(top, rows < M, 1, R, H, 1), _bits(left, rows < M, 1, S, W, 1)
    x += g * images * H * W * C
    w += g * COPIES * O * K
    start = ((image * H + top) * W + left) * C
    total = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        r, s, c, lane = _places(first, C, R, S, BK)
        ok = _meets(high[:, None], top[:, None], r, 1, R, H, 1) & _meets(wide[:, None], left[:, None], s, 1, S, W, 1)
        ok = ok & _filled(k, K, BK)[None, :]
        a = tl.load(x + (start[:, None] + lane[None, :]) + ((r * W + s) * C + c), mask=ok, other=0.0)
        at, held = cols[None, :] * K + k[:, None], _filled(cols, O, BN)[None, :] & _filled(k, K, BK)[:, None]
        total = tl.dot(a, tl.load(w + at, mask=held, other=0.0), total, input_precision=PRECISION)
        if PAIR != ONE:
            b = tl.load(w + O * K + at, mask=held, other=0.0)
        if PAIR == LOCAL:
            second = tl.dot(a * a, b, second, input_precision=PRECISION)
        if PAIR == FLIPPED:
            second = _signed(a, b, second, p + g * images * C, only, image, k % C, ok, C, WITHIN, PRECISION)
    ok = (rows < M)[:, None] & (cols < O)[None, :]
    at = g * M * O + rows[:, None] * O + cols[None, :]
    if PAIR == LOCAL:
        if bias is not None:
            total += tl.load(bias + g * 2 * O + cols, mask=cols < O, other=0.0)[None, :]
            second += tl.load(bias + g * 2 * O + O + cols, mask=cols < O, other=0.0)[None, :]
        normal = (image[:, None] * O + cols[None, :]) * (HO * WO) + place[:, None]
        drawn = tl.load(q + g * STRIDE + normal, mask=ok, other=0.0)
        root = tl.sqrt(second + 1e-16)
        total += root * drawn
        tl.store(slope + at, drawn / (2.0 * root), mask=ok)
    if PAIR == FLIPPED:
        sign = tl.load(q + g * STRIDE + image[:, None] * O + cols[None, :], mask=ok, other=0.0)
        total += sign.to(tl.float32) * second
    tl.store(out + at, total, mask=ok)


@triton.jit
def to_input(d, x, w, p, q, out, M, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr, WO: tl.constexpr,
             C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr, DOWN: tl.constexpr,
             RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr, PAIR: tl.constexpr,
             WITHIN: tl.constexpr, TURNED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             PRECISION: tl.constexpr):  # fmt: skip
    """Gradients [pixels, C] of the inputs: of the outputs that saw a pixel, times the weights they saw it with.

    LOCAL: `q` are the slopes of outputs in their variances. TURNED: `w` is [G, C, R, S, O].
    """
    K: tl.constexpr = R * S * O
    COPIES: tl.constexpr = 1 if PAIR == ONE else 2
    g = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    image, place = rows // (H * W), rows % (H * W)
    top, left = place // W + TOP, place % W + LEFT
    images, only = M // (H * W), tl.program_id(0) * BM // (H * W)
    high, wide = _bits(top, rows < M, -1, R, HO, DOWN), _bits(left, rows < M, -1, S, WO, RIGHT)
    d += g * images * HO * WO * O
    w += g * COPIES * K * C
    start = ((image * HO + top // DOWN) * WO + left // RIGHT) * O
    total = tl.zeros((BM, BN), tl.float32)
    second = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        r, s, o, lane = _places(first, O, R, S, BK)
        ok = _meets(high[:, None], top[:, None], r, -1, R, HO, DOWN)
        ok = ok & _meets(wide[:, None], left[:, None], s, -1, S, WO, RIGHT) & _filled(k, K, BK)[None, :]
        seen, shift = start[:, None] + lane[None, :], o - (r // DOWN * WO + s // RIGHT) * O
        a = tl.load(d + seen + shift, mask=ok, other=0.0)
        if TURNED:
            at = cols[None, :] * K + k[:, None]
        else:
            at = ((k % O * (R * S) + k // O) * C)[:, None] + cols[None, :]
        held = _filled(cols, C, BN)[None, :] & _filled(k, K, BK)[:, None]
        total = tl.dot(a, tl.load(w + at, mask=held, other=0.0), total, input_precision=PRECISION)
        if PAIR != ONE:
            b = tl.load(w + K * C + at, mask=held, other=0.0)
        if PAIR == LOCAL:
            a *= tl.load(q + g * images * HO * WO * O + seen + shift, mask=ok, other=0.0)
            second = tl.dot(a, b, second, input_precision=PRECISION)
        if PAIR == FLIPPED:
            second = _signed(a, b, second, q + g * images * O, only, image, k % O, ok, O, WITHIN, PRECISION)
    ok = (rows < M)[:, None] & (cols < C)[None, :]
    at = g * M * C + rows[:, None] * C + cols[None, :]
    if PAIR == LOCAL:
        total += 2.0 * tl.load(x + at, mask=ok, other=0.0).to(tl.float32) * second
    if PAIR == FLIPPED:
        sign = tl.load(p + g * images * C + image[:, None] * C + cols[None, :], mask=ok, other=0.0)
        total += sign.to(tl.float32) * second
    tl.store(out + at, total, mask=ok)


@triton.jit
def _over_positions(a, b, total, SWAP: tl.constexpr, DIRECT: tl.constexpr, PRECISION: tl.constexpr):
    """total + a' b, or b' a where they are swapped; DIRECT: the first of the two has positions last as it is."""
    if SWAP:
        first, second = b, a
    else:
        first, second = a, b
    if not DIRECT:
        first = tl.trans(first)
    return tl.dot(first, second, total, input_precision=PRECISION)


@triton.jit
def to_weight(d, x, p, q, out, G, M, SHARE, SHARES, H: tl.constexpr, W: tl.constexpr, HO: tl.constexpr,
              WO: tl.constexpr, C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
              DOWN: tl.constexpr, RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
              PAIR: tl.constexpr, WITHIN: tl.constexpr, SWAP: tl.constexpr, DIRECT: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients [O, K] of the filters, by shares of SHARE positions: outputs' [positions, O] times patches.

    `out` is [G, SHARES, O K], of a pair [G, SHARES, 2, O K]; LOCAL: and after it O gradients of the bias, as of weights
    of an input that is always 1; `q` are the slopes of outputs in their variances. SWAP: tiles are [K, O]. DIRECT: the
    first factor of a product is read as it goes in, and not turned.
    """
    K: tl.constexpr = R * S * C
    ALIGNED: tl.constexpr = HO * WO % BK == 0 and (BK % WO == 0 or WO % BK == 0)
    g = (tl.program_id(2) % G).to(tl.int64)
    share = tl.program_id(2) // G
    outs = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    images = M // (HO * WO)
    d += g * M * O
    x += g * images * H * W * C
    if SWAP:
        total = tl.zeros((BN, BM), tl.float32)
        second = tl.zeros((BN, BM), tl.float32)
        to, of = outs[None, :], k[:, None]
    else:
        total = tl.zeros((BM, BN), tl.float32)
        second = tl.zeros((BM, BN), tl.float32)
        to, of = outs[:, None], k[None, :]
    ends = tl.minimum((share + 1) * SHARE, M)
    for first in range(share * SHARE, ends, BK):
        lane = tl.arange(0, BK)
        if SWAP and DIRECT:  # patches [BN, BK]
            row, at = lane[None, :], k[:, None]
        else:
            row, at = lane[:, None], k[None, :]
        r, s = at // (S * C), at // C % S
        if ALIGNED:  # whole rows of one image, or a part of one: only where they begin changes
            image, line = first // (HO * WO), first % (HO * WO) // WO * DOWN
            along = 0 if BK % WO == 0 else first % WO * RIGHT
            top, left = row // WO * DOWN - TOP, row % WO * RIGHT - LEFT
            ok = _there(top + r + line, H, 1) & _there(left + s + along, W, 1) & _filled(at, K, BN)
            begin = ((image * H + line) * W + along) * C
        else:
            image, place = (first + row) // (HO * WO), (first + row) % (HO * WO)
            top, left = place // WO * DOWN - TOP, place % WO * RIGHT - LEFT
            ok = (first + row < ends) & _there(top + r, H, 1) & _there(left + s, W, 1) & _filled(at, K, BN)
            begin = image * (H * W * C)
        b = tl.load(x + (((top + r) * W + left + s) * C + at % C) + begin, mask=ok, other=0.0)
        if PAIR == LOCAL:
            b = tl.where(at == K, 1.0, b).to(b.dtype)
        if PAIR == FLIPPED and not WITHIN:
            flipped = b * tl.load(p + (g * images + image) * C + at % C, mask=ok, other=0.0).to(b.dtype)
        if DIRECT and not SWAP:  # outputs' gradients [BM, BK]
            row, at = lane[None, :], outs[:, None]
        else:
            row, at = lane[:, None], outs[None, :]
        held = _filled(at, O, BM)
        if not ALIGNED:
            held = held & (row < ends - first)
        a = tl.load(d + (row * O + at) + first * O, mask=held, other=0.0)
        if PAIR == FLIPPED and WITHIN:  # signs of an image stand before the product of its positions
            product = _over_positions(a, b, None, SWAP, DIRECT, PRECISION)
            one = first // (HO * WO) + g * images
            left = tl.load(q + one * O + to, mask=to < O, other=0.0).to(tl.float32)
            right = tl.load(p + one * C + of % C).to(tl.float32)
            total += product
            second += left * product * right
        else:
            total = _over_positions(a, b, total, SWAP, DIRECT, PRECISION)
        if PAIR == LOCAL:
            a *= tl.load(q + g * M * O + (row * O + at) + first * O, mask=held, other=0.0)
            second = _over_positions(a, b * b, second, SWAP, DIRECT, PRECISION)
        if PAIR == FLIPPED and not WITHIN:
            signs = tl.load(q + (g * images + (first + row) // (HO * WO)) * O + at, mask=held, other=0.0)
            second = _over_positions(a * signs.to(a.dtype), flipped, second, SWAP, DIRECT, PRECISION)
    LENGTH: tl.constexpr = O * K + (O if PAIR == LOCAL else 0)
    ok = (to < O) & (of < K + (1 if PAIR == LOCAL else 0))
    into = to * K + of
    if PAIR == LOCAL:
        into = tl.where(of == K, O * K + to, into)
    out += (g * SHARES + share) * (1 if PAIR == ONE else 2) * LENGTH
    tl.store(out + into, total, mask=ok)
    if PAIR != ONE:
        tl.store(out + LENGTH + into, second, mask=ok)
