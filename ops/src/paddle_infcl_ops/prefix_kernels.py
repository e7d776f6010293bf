# SPDX-License-Identifier: Apache-2.0
"""The three matrix-sized kernels of the Matryoshka loss: every prefix's exponentials, their blend, and its products.

A tile of similarities is ended once per prefix, while its sums go on. DIMS, segments and flat arrays are as in
prefix_rows.py; see prefixes.py for the formulas.
"""

import triton
import triton.language as tl

from .prefix_rows import share
from .rows import changing
from .tiles import (
    LOG2E,
    OWNER_EXCLUDE,
    OWNER_NONE,
    OWNER_ONLY,
    SLACK,
    dot_tile,
    drop_same_id,
    load_tile,
    scalar,
    tile_at,
    write_tile,
)

SMALLEST = tl.constexpr(2.0**-126)
_NONE = tl.constexpr(OWNER_NONE)
_ONLY = tl.constexpr(OWNER_ONLY)
_EXCLUDE = tl.constexpr(OWNER_EXCLUDE)
_CHANGING = ["rows", "row_offset", "part_stride", "part_tiles", "margin"]
_VECTORS = [
    "reference", "own", "self_column", "row_ids", "column_ids", "owner", "inverse_left", "cosine", "threshold",
    "flags",
]  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_VECTORS)
def sweep_kernel(
    left, right, out, scale, inverse_left, inverse_right, reference, cosine, own, self_column, row_ids, column_ids,
    hits, owner, margin, guide_left, guide_right, threshold, flags, part_sum, part_max,
    rows, N, DG, row_offset, left_stride, right_stride, out_stride, out_rows, guide_left_stride, guide_right_stride,
    vector_stride, part_stride, part_tiles,
    DIMS: tl.constexpr, M: tl.constexpr, TMA: tl.constexpr, OUT_TMA: tl.constexpr, IDS: tl.constexpr,
    OWNER_RULE: tl.constexpr, KEEP_OWN: tl.constexpr, MARGIN: tl.constexpr, EVEN_N: tl.constexpr,
    FLAG_ROWS: tl.constexpr, FLAG_BLOCK: tl.constexpr, PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, GROUP: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """E_s,ij = exp(z_s,ij - reference_s,i), 0 at own and dropped entries, with row sums and largest z.

    Args:
        left: [rows, >= DIMS[-1]]; right: [N, >= DIMS[-1]]: pointers or descriptors.
        out: [M * out_rows, N], prefix s in the rows from s * out_rows on (a multiple of BM), the last one times
            r_s,j; None: sums only.
        scale: number or pointer, 1/T.
        inverse_left, reference, cosine: [M, vector_stride] fp32 from the chunk's first row on; inverse_right: [M, N].
        own, self_column, row_ids, column_ids, hits, owner, row_offset, guide_left, guide_right, threshold: as in
            `similarity_kernel`; all may be None.
        margin: drops entries whose cosine is above the own pair's plus this, if MARGIN.
        flags: [M, ceil(rows / FLAG_ROWS)] int32: only tiles with a row that is flagged at any prefix are computed.
        part_sum, part_max: [M, part_tiles, part_stride] fp32, from this block's tiles on.
    """
    num_m = tl.cdiv(rows, BM)
    num_n = tl.cdiv(N, BN)
    num_flags = tl.cdiv(rows, FLAG_ROWS)
    total = num_m * num_n
    if flags is not None:
        any_flag = tl.zeros((FLAG_BLOCK,), dtype=tl.int32)
        for f0 in range(0, M * num_flags, FLAG_BLOCK):
            each = f0 + tl.arange(0, FLAG_BLOCK)
            any_flag = any_flag | tl.load(flags + each, mask=each < M * num_flags, other=0)
        total = tl.where(tl.max(any_flag, axis=0) > 0, total, 0)
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0)):
        pid_m, pid_n = tile_at(t, num_m, num_n, GROUP)
        m0 = pid_m * BM
        n0 = pid_n * BN
        wanted = True
        if flags is not None:
            mine = pid_m * (BM // FLAG_ROWS) + tl.arange(0, BM // FLAG_ROWS)
            flagged = tl.zeros((BM // FLAG_ROWS,), dtype=tl.int32)
            for s in tl.static_range(M):
                flagged = flagged | tl.load(flags + s * num_flags + mine, mask=mine < num_flags, other=0)
            wanted = tl.max(flagged, axis=0) > 0
        if wanted:
            i = m0 + tl.arange(0, BM)
            j = n0 + tl.arange(0, BN)
            # Entries that don't count start at -inf, which no product changes: the ends need no masks, for which they
            # have no registers. Few tiles have own or self columns, equal ids or the right edge.
            column = tl.arange(0, BN)
            edge = False
            own_here = tl.full((BM,), -1, dtype=tl.int32)
            self_here = own_here
            if own is not None:
                own_at = tl.load(own + i, mask=i < rows, other=-1) - n0
                own_here = tl.where((own_at >= 0) & (own_at < BN), own_at, -1).to(tl.int32)
                edge = edge | (tl.max(own_here, axis=0) >= 0)
            if self_column is not None:
                self_at = tl.load(self_column + i, mask=i < rows, other=-1) - n0
                self_here = tl.where((self_at >= 0) & (self_at < BN), self_at, -1).to(tl.int32)
                edge = edge | (tl.max(self_here, axis=0) >= 0)
            if not EVEN_N:
                edge = edge | (n0 + BN > N)
            acc = tl.zeros((BM, BN), dtype=tl.float32)
            if OWNER_RULE != _NONE or KEEP_OWN:
                belongs = tl.load(owner + j, mask=j < N, other=-1).to(tl.int32)
            if guide_left is not None:  # the same at every prefix
                seen = dot_tile(
                    guide_left, guide_right, m0, n0, rows, N, DG, guide_left_stride, guide_right_stride,
                    BM, BN, BK, TMA, UPCAST, PRECISION,
                )  # fmt: skip
                theta = tl.load(threshold + i, mask=i < rows, other=0.0)
                false_negative = seen > (theta + SLACK)[:, None]
                if KEEP_OWN:
                    false_negative = false_negative & (belongs[None, :] != (row_offset + i)[:, None])
                acc = tl.where(false_negative, float("-inf"), acc)
            if OWNER_RULE == _ONLY:
                theirs = (belongs[None, :] != (row_offset + i)[:, None]) & (belongs >= 0)[None, :]
                acc = tl.where(theirs, float("-inf"), acc)
            elif OWNER_RULE == _EXCLUDE:
                acc = tl.where(belongs[None, :] == (row_offset + i)[:, None], float("-inf"), acc)
            if edge:
                out_of_sum = (column[None, :] == own_here[:, None]) | (column[None, :] == self_here[:, None])
                acc = tl.where(out_of_sum | (j >= N)[None, :], float("-inf"), acc)
            if IDS > 0:
                if tl.load(hits + pid_m * num_n + pid_n) > 0:
                    acc = drop_same_id(acc, row_ids, column_ids, m0, n0, rows, N, IDS, BM, BN)
            factor = scalar(scale) * LOG2E
            for s in tl.static_range(M):
                for k in range(DIMS[s - 1] if s > 0 else 0, DIMS[s], BK):
                    a = load_tile(left, m0, k, rows, DIMS[s], left_stride, BM, BK, TMA, UPCAST)
                    b = load_tile(right, n0, k, N, DIMS[s], right_stride, BN, BK, TMA, UPCAST)
                    acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
                f = tl.abs(tl.load(inverse_left + s * vector_stride + i, mask=i < rows, other=1.0))
                r = tl.load(inverse_right + s * N + j, mask=j < N, other=1.0)
                g = tl.abs(r)
                ref = tl.load(reference + s * vector_stride + i, mask=i < rows, other=float("inf"))
                # The exponent itself, and its largest: the logits are not needed, and registers are scarce here.
                y = acc * (f * factor)[:, None] * g[None, :] - ref[:, None]
                if MARGIN:
                    limit = tl.load(cosine + s * vector_stride + i, mask=i < rows, other=0.0) + margin
                    y = tl.where(acc * f[:, None] * g[None, :] > (limit + SLACK)[:, None], float("-inf"), y)
                part = (s * part_tiles + pid_n).to(tl.int64) * part_stride + i
                tl.store(part_max + part, tl.max(y, axis=1) + ref, mask=i < rows)
                e = tl.exp2(y)  # inf where the reference is far too low: such rows are repaired
                tl.store(part_sum + part, tl.sum(e, axis=1), mask=i < rows)
                if out is not None:
                    if s == M - 1:
                        e = e * share(r)[None, :]
                    # Zeros behind the last row too: products through descriptors see them.
                    last = (s + 1) * out_rows
                    write_tile(out, e, s * out_rows + m0, n0, last, N, out_stride, BM, BN, PARTS, OUT_TMA, False)


@triton.jit
def log2_(x, FAST: tl.constexpr):
    """log2(x) of normal numbers. FAST is the GPU's one instruction for it, right to 2^-22, where exact takes many."""
    if FAST:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        return tl.log2(x)


@triton.jit
def read_row(E, i, j, N, E_stride, E_rows, M: tl.constexpr):
    """Row i of every E, the widest prefix first."""
    read = ()
    for t in tl.static_range(M):
        at = E + tl.cast((M - 1 - t) * E_rows + i, tl.int64) * E_stride + j
        read = read + (tl.load(at, mask=j < N, other=0.0),)
    return read


@changing
def blend_kernel(
    E, per_row, inverse_right, row_parts, column_parts, rows, N, E_stride, E_rows, part_stride,
    M: tl.constexpr, MP: tl.constexpr, BR: tl.constexpr, BN: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """E becomes C, in place, and the sums of G z that the lengths' gradients need are made on the way.

    C_s = sum over d >= s of scale r_d,i G_d,ij r_d,j; G_d = coefficient_d,i E_d, and z comes out of E again. The last
    E, which has its r_d,j already, lacks a factor per row only, and stays as it is.

    Args:
        per_row: [rows, M, 3] fp32, see `state_prefix_kernel`.
        row_parts: [ceil(N / BN), part_stride, MP >= M] fp32: sum_j G z.
        column_parts: [ceil(rows / BR), M, N] fp32: sum_i G z; may be None.

    A program, meant to be one warp, walks down BR rows: sums over columns stay inside it, those over rows inside a
    thread. A row is read while the one above is worked on, and all of it before any is written: as far as the compiler
    knows these are the same memory, and it would wait for each in turn.
    """
    num_n = tl.cdiv(N, BN)
    pid_n = tl.program_id(0) % num_n
    pid_m = tl.program_id(0) // num_n
    j = pid_n * BN + tl.arange(0, BN)
    shares = ()  # widest prefix first, as everything here
    columns = ()
    for t in tl.static_range(M):
        shares = shares + (share(tl.load(inverse_right + (M - 1 - t) * N + j, mask=j < N, other=0.0)),)
        columns = columns + (tl.zeros((BN,), dtype=tl.float32),)
    undone = tl.where(shares[0] > 0, 1.0 / tl.where(shares[0] > 0, shares[0], 1.0), 0.0)
    end = tl.minimum(rows, pid_m * BR + BR)
    following = read_row(E, pid_m * BR, j, N, E_stride, E_rows, M)
    for i in range(pid_m * BR, end):
        read = following
        following = read_row(E, tl.minimum(i + 1, end - 1), j, N, E_stride, E_rows, M)
        factors = ()
        for t in tl.static_range(M):
            at = per_row + tl.cast(i, tl.int64) * (3 * M) + 3 * (M - 1 - t)
            factors = factors + ((tl.load(at), tl.load(at + 1), tl.load(at + 2)),)
        blended = tl.zeros((BN,), dtype=tl.float32)
        summed = ()
        for t in tl.static_range(M):
            of_sums, of_blend, ref = factors[t]
            e = read[t].to(tl.float32)
            if t == 0:
                blended += e * of_blend
                e = e * undone
            else:
                blended += e * of_blend * shares[t]
                at = E + tl.cast((M - 1 - t) * E_rows + i, tl.int64) * E_stride + j
                tl.store(at, blended.to(E.dtype.element_ty), mask=j < N)
            # Zeros add nothing, whatever their logarithm, as long as it is a number.
            product = e * (log2_(tl.maximum(e, SMALLEST), FAST) + ref)
            part = (tl.cast(pid_n, tl.int64) * part_stride + i) * MP + M - 1 - t
            tl.store(row_parts + part, tl.sum(product, axis=0) * of_sums)
            summed = summed + (columns[t] + product * of_sums,)
        columns = summed
    if column_parts is not None:
        for t in tl.static_range(M):
            at = column_parts + tl.cast(pid_m * M + M - 1 - t, tl.int64) * N + j
            tl.store(at, columns[t], mask=j < N)


@triton.jit(do_not_specialize=["K", "k_per_split", "split_rows"])
def segments_kernel(
    a, b, out, rows, K, a_rows, k_per_split, a_stride, b_stride, out_stride, split_rows,
    STARTS: tl.constexpr, ENDS: tl.constexpr, FIRSTS: tl.constexpr, S: tl.constexpr, MATRIX: tl.constexpr,
    NUM_N: tl.constexpr, TRANS_A: tl.constexpr, TMA: tl.constexpr, ACCUMULATE: tl.constexpr,
    PARTS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """out[:, segment s] (+)= A_s @ b[:, segment s] for S segments: they are too narrow to fill a GPU one by one.

    Args:
        a: A_s [rows, K] in the rows from (MATRIX + s) * a_rows on; with TRANS_A A_s^T [K, rows].
        b: [K, >= ENDS[-1]]; a and b are pointers or descriptors.
        out: [ceil(K / k_per_split) * split_rows, >= ENDS[-1]] fp32, split k in the rows from k * split_rows on.
        STARTS, ENDS: columns of the segments; FIRSTS: the first of a segment's tiles of BN columns, of NUM_N.
    """
    num_m = tl.cdiv(rows, BM)
    per_split = num_m * NUM_N
    split = tl.program_id(0) // per_split
    pid_m, pid_n = tile_at(tl.program_id(0) - split * per_split, num_m, NUM_N, GROUP)
    m0 = pid_m * BM
    matrix = pid_n * 0 + MATRIX
    n0 = pid_n * BN + STARTS[0]
    end = pid_n * 0 + ENDS[0]
    for s in tl.static_range(1, S):
        matrix = tl.where(pid_n >= FIRSTS[s], MATRIX + s, matrix)
        n0 = tl.where(pid_n >= FIRSTS[s], STARTS[s] + (pid_n - FIRSTS[s]) * BN, n0)
        end = tl.where(pid_n >= FIRSTS[s], ENDS[s], end)
    a0 = matrix * a_rows
    k0 = split * k_per_split
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(k0, tl.minimum(K, k0 + k_per_split), BK):
        if TRANS_A:
            x = tl.trans(load_tile(a, a0 + k, m0, a0 + K, rows, a_stride, BK, BM, TMA, UPCAST))
        else:
            x = load_tile(a, a0 + m0, k, a0 + rows, K, a_stride, BM, BK, TMA, UPCAST)
        y = load_tile(b, k, n0, K, end, b_stride, BK, BN, TMA, UPCAST)
        acc = tl.dot(x, y, acc, input_precision=PRECISION)
    row = split * split_rows + m0
    write_tile(out, acc, row, n0, split * split_rows + rows, end, out_stride, BM, BN, PARTS, False, ACCUMULATE)
