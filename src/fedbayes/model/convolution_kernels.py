"""The kernels of stacked_convolution.py. Importing this needs Triton.

Convolutions as products of matrices whose patches are never stored: a program gathers the part of them that its tile
needs. Of G networks: `x` is [G, N, H, W, C], `w` is [G, O, R, S, C], outputs `d` are [G, N, HO, WO, O]; K = R S C.
"""
# mypy: disable-error-code="no-untyped-def"

import triton
import triton.language as tl


@triton.jit
def forward(x, w, out, M, H, W, HO, WO, C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
            DOWN: tl.constexpr, RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
            BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Outputs [positions, O]: patches [positions, K] times filters [K, O]."""
    K: tl.constexpr = R * S * C
    g = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    image, place = rows // (HO * WO), rows % (HO * WO)
    top, left = place // WO * DOWN - TOP, place % WO * RIGHT - LEFT
    x += g * (M // (HO * WO)) * H * W * C
    w += g * O * K
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        i = top[:, None] + (k // (S * C))[None, :]
        j = left[:, None] + (k // C % S)[None, :]
        ok = (rows < M)[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        a = tl.load(x + ((image[:, None] * H + i) * W + j) * C + (k % C)[None, :], mask=ok, other=0.0)
        b = tl.load(w + cols[None, :] * K + k[:, None], mask=(cols < O)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    ok = (rows < M)[:, None] & (cols < O)[None, :]
    tl.store(out + g * M * O + rows[:, None] * O + cols[None, :], total, mask=ok)


@triton.jit
def to_input(d, w, out, M, H, W, HO, WO, C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
             DOWN: tl.constexpr, RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
             BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients [pixels, C] of the inputs: of the outputs that saw a pixel, times the weights they saw it with."""
    K: tl.constexpr = R * S * O
    g = tl.program_id(2).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    cols = tl.program_id(1) * BN + tl.arange(0, BN)
    image, place = rows // (H * W), rows % (H * W)
    top, left = place // W + TOP, place % W + LEFT
    d += g * (M // (H * W)) * HO * WO * O
    w += g * R * S * O * C
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(0, K, BK):
        k = first + tl.arange(0, BK)
        o, r, s = k % O, k // (S * O), k // O % S
        i, j = top[:, None] - r[None, :], left[:, None] - s[None, :]
        ok = (rows < M)[:, None] & (k < K)[None, :] & (i >= 0) & (j >= 0)
        if DOWN > 1:
            ok = ok & (i % DOWN == 0)
            i = i // DOWN
        if RIGHT > 1:
            ok = ok & (j % RIGHT == 0)
            j = j // RIGHT
        ok = ok & (i < HO) & (j < WO)
        a = tl.load(d + ((image[:, None] * HO + i) * WO + j) * O + o[None, :], mask=ok, other=0.0)
        at = ((o * R + r) * S + s) * C
        b = tl.load(w + at[:, None] + cols[None, :], mask=(cols < C)[None, :] & (k < K)[:, None], other=0.0)
        total = tl.dot(a, b, total, input_precision=PRECISION)
    ok = (rows < M)[:, None] & (cols < C)[None, :]
    tl.store(out + g * M * C + rows[:, None] * C + cols[None, :], total, mask=ok)


@triton.jit
def to_weight(d, x, out, G, M, H, W, HO, WO, SHARE, C: tl.constexpr, O: tl.constexpr, R: tl.constexpr, S: tl.constexpr,
              DOWN: tl.constexpr, RIGHT: tl.constexpr, TOP: tl.constexpr, LEFT: tl.constexpr,
              BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr):  # fmt: skip
    """Gradients [O, K] of the filters, by shares of SHARE positions: outputs' [positions, O] times patches."""
    K: tl.constexpr = R * S * C
    g = (tl.program_id(2) % G).to(tl.int64)
    share = tl.program_id(2) // G
    outs = tl.program_id(0) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * BN + tl.arange(0, BN)
    r, s, c = k // (S * C), k // C % S, k % C
    d += g * M * O
    x += g * (M // (HO * WO)) * H * W * C
    total = tl.zeros((BM, BN), tl.float32)
    for first in range(share * SHARE, tl.minimum((share + 1) * SHARE, M), BK):
        rows = first + tl.arange(0, BK)
        live = (rows < M) & (rows < (share + 1) * SHARE)
        image, place = rows // (HO * WO), rows % (HO * WO)
        i = (place // WO * DOWN - TOP)[:, None] + r[None, :]
        j = (place % WO * RIGHT - LEFT)[:, None] + s[None, :]
        ok = live[:, None] & (k < K)[None, :] & (i >= 0) & (i < H) & (j >= 0) & (j < W)
        b = tl.load(x + ((image[:, None] * H + i) * W + j) * C + c[None, :], mask=ok, other=0.0)
        a = tl.load(d + rows[:, None] * O + outs[None, :], mask=live[:, None] & (outs < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(a), b, total, input_precision=PRECISION)
    ok = (outs < O)[:, None] & (k < K)[None, :]
    tl.store(out + (share * G + g) * O * K + outs[:, None] * K + k[None, :], total, mask=ok)
