# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose ends are ours: fp32 sums that are split, scaled, accumulated or cast on the way out.

    out = alpha * gain / 2^15 * A @ B  (+ out)        A: [M, K], B: [K, N], or stored transposed [K, M], [N, K]

They are the second and the third product of a loss: dleft = E @ right and dright = E^T @ left.
"""

import triton
import triton.language as tl

from .tiles import load_tile, scalar, tile_at, write_tile


@triton.jit
def product_kernel(
    a, b, out, alpha, gain, M, N, K, k_per_split, a_stride, b_stride, out_stride, split_rows,
    TRANS_A: tl.constexpr, TMA: tl.constexpr, OUT_TMA: tl.constexpr, ACCUMULATE: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr, TRANS_B: tl.constexpr = False,
):  # fmt: skip
    """See the module.

    Args:
        a: [M, K] ([K, M] if TRANS_A); b: [K, N] ([N, K] if TRANS_B): pointers or descriptors.
        out: [ceil(K / k_per_split) * split_rows, N], split s in the rows from s * split_rows on.
        alpha: number or pointer; gain: pointer or None.
        k_per_split: multiple of BK.
        split_rows: multiple of BM, at least M; ACCUMULATE adds to `out`.
    """
    num_m = tl.cdiv(M, BM)
    num_n = tl.cdiv(N, BN)
    per_split = num_m * num_n
    total = per_split * tl.cdiv(K, k_per_split)
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        split = t // per_split
        pid_m, pid_n = tile_at(t - split * per_split, num_m, num_n, GROUP)
        m0 = pid_m * BM
        n0 = pid_n * BN
        k0 = split * k_per_split
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(k0, tl.minimum(K, k0 + k_per_split), BK):
            if TRANS_A:
                x = tl.trans(load_tile(a, k, m0, K, M, a_stride, BK, BM, TMA, UPCAST))
            else:
                x = load_tile(a, m0, k, M, K, a_stride, BM, BK, TMA, UPCAST)
            if TRANS_B:
                y = tl.trans(load_tile(b, n0, k, N, K, b_stride, BN, BK, TMA, UPCAST))
            else:
                y = load_tile(b, k, n0, K, N, b_stride, BK, BN, TMA, UPCAST)
            acc = tl.dot(x, y, acc, input_precision=PRECISION)
        factor = scalar(alpha)
        if gain is not None:
            factor = factor * (tl.load(gain) * (1.0 / 32768))
        acc = acc * factor
        row = split * split_rows + m0
        write_tile(out, acc, row, n0, split * split_rows + M, N, out_stride, BM, BN, PARTS, OUT_TMA, ACCUMULATE)
