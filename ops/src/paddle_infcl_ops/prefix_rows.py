# SPDX-License-Identifier: Apache-2.0
"""Row-wise kernels of the Matryoshka loss: lengths of prefixes, references, losses, and the ends of the gradients.

DIMS are the widths of the M prefixes, ascending; segment s are the numbers from DIMS[s - 1] to DIMS[s]. What there is
per prefix and row (column) is a flat [M * B] ([M * N]) array, prefix by prefix. See prefixes.py for the formulas and
rows.py for the same kernels of one width.
"""

import triton
import triton.language as tl

from .rows import LARGEST_LEAD, LARGEST_SUM, SMALLEST_SUM, changing, sigmoid_, softplus_
from .tiles import LN2, LOG2E, scalar


@changing
def length_kernel(
    x, inverse, stride, vector_stride, DIMS: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr
):  # fmt: skip
    """inverse[s, i] = 1 / |x_i[:DIMS[s]]|; -1 for a prefix of zeros, NaN where fp32 can't hold the square. A row each.

    Products with zeros are 0 times anything, so similarities take the absolute value; gradients take 0, see `share`.
    """
    i = tl.program_id(0)
    row = x + tl.cast(i, tl.int64) * stride
    squares = prefix_sums(row, row, DIMS, M, BLOCKS, BD)
    for s in tl.static_range(M):
        length = tl.sqrt(squares[s])
        r = tl.where(squares[s] == 0, -1.0, 1.0 / tl.where(squares[s] == 0, 1.0, length))
        tl.store(inverse + s * vector_stride + i, tl.where(length == float("inf"), float("nan"), r))


@triton.jit
def prefix_sums(x, y, DIMS: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr):
    """The inner products of two rows at every prefix; both are read once, in BLOCKS blocks of BD numbers."""
    sums = ()
    for _ in tl.static_range(M):
        sums += (0.0,)
    for b in tl.static_range(BLOCKS):
        c = b * BD + tl.arange(0, BD)
        a = tl.load(x + c, mask=c < DIMS[M - 1], other=0.0).to(tl.float32)
        product = a * tl.load(y + c, mask=c < DIMS[M - 1], other=0.0).to(tl.float32)
        more = ()
        for s in tl.static_range(M):
            if b * BD < DIMS[s]:
                more += (sums[s] + tl.sum(tl.where(c < DIMS[s], product, 0.0), axis=0),)
            else:
                more += (sums[s],)
        sums = more
    return sums


@triton.jit
def share(inverse):
    """1 / length as gradients take it: 0 for zeros. NaN stays NaN."""
    return tl.where(inverse < 0, 0.0, inverse)


@changing
def own_prefix_kernel(
    left, right, own, inverse_left, inverse_right, cosine, N, left_stride, right_stride, vector_stride,
    DIMS: tl.constexpr, M: tl.constexpr, BLOCKS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """cosine[s, i] = the cosine of left_i and right_own(i) at prefix s. A row each."""
    i = tl.program_id(0)
    o = tl.load(own + i)
    x = left + tl.cast(i, tl.int64) * left_stride
    dots = prefix_sums(x, right + o * right_stride, DIMS, M, BLOCKS, BD)
    for s in tl.static_range(M):
        f = share(tl.load(inverse_left + s * vector_stride + i))
        tl.store(cosine + s * vector_stride + i, dots[s] * f * share(tl.load(inverse_right + s * N + o)))


@changing
def reference_prefix_kernel(
    left, right, inverse_left, inverse_right, cosine, own, self_column, scale, reference, rows, N, left_stride,
    right_stride, vector_stride,
    MERGE: tl.constexpr, DIMS: tl.constexpr, M: tl.constexpr, BM: tl.constexpr, SAMPLES: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """A guess at every row's largest logit at every prefix, as `reference_kernel` of rows.py makes it.

    own and self_column may be None.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.arange(0, SAMPLES).to(tl.int64) * N // SAMPLES
    factor = scalar(scale) * LOG2E
    left_out = tl.zeros((BM, SAMPLES), dtype=tl.int1)
    if own is not None:
        left_out = left_out | (j[None, :] == tl.load(own + i, mask=i < rows, other=-1)[:, None])
    if self_column is not None:
        left_out = left_out | (j[None, :] == tl.load(self_column + i, mask=i < rows, other=-1)[:, None])
    acc = tl.zeros((BM, SAMPLES), dtype=tl.float32)
    for s in tl.static_range(M):
        for k in range(DIMS[s - 1] if s > 0 else 0, DIMS[s], BK):
            c = k + tl.arange(0, BK)
            both = (i < rows)[:, None] & (c < DIMS[s])[None, :]
            a = tl.load(left + i.to(tl.int64)[:, None] * left_stride + c[None, :], mask=both, other=0.0)
            b = tl.load(right + j[:, None] * right_stride + c[None, :], mask=(c < DIMS[s])[None, :], other=0.0)
            if UPCAST:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
        f = share(tl.load(inverse_left + s * vector_stride + i, mask=i < rows, other=0.0)) * factor
        z = acc * f[:, None] * share(tl.load(inverse_right + s * N + j))[None, :]
        top = tl.max(tl.where(left_out, float("-inf"), z), axis=1)
        own2 = tl.load(cosine + s * vector_stride + i, mask=i < rows, other=0.0) * factor
        ref = tl.where(top == float("-inf"), own2, tl.maximum(top, tl.minimum(own2, top + LARGEST_LEAD)))
        if MERGE:
            there = tl.load(reference + s * vector_stride + i, mask=i < rows, other=0.0)
            ref = tl.where(top == float("-inf"), there, tl.maximum(there, ref))
        tl.store(reference + s * vector_stride + i, ref, mask=i < rows)


@changing
def check_prefix_kernel(
    part_sum, part_max, total, reference, flags, rows, tiles, part_stride, vector_stride, ROWS: tl.constexpr,
    BT: tl.constexpr,
):  # fmt: skip
    """`check_kernel` of rows.py for prefix program_id(1): total [M, part_stride], flags [M, ceil(rows / ROWS)].

    part_stride is a multiple of ROWS: with that said, and without masks for rows, reads are wide. Only where a sum is
    out of range the maxima are read.
    """
    s = tl.program_id(1)
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    stride = part_stride // ROWS * ROWS
    parts = tl.cast(s, tl.int64) * tiles * stride + i[None, :]
    acc = tl.zeros((BT, ROWS), dtype=tl.float32)
    for t0 in range(0, tiles, BT):
        t = (t0 + tl.arange(0, BT))[:, None]
        acc += tl.load(part_sum + parts + t.to(tl.int64) * stride, mask=t < tiles, other=0.0)
    row_sum = tl.sum(acc, axis=0)
    tl.store(total + s * stride + i, row_sum, mask=i < rows)
    fine = (row_sum > SMALLEST_SUM) & (row_sum < LARGEST_SUM)
    again = (fine == 0) & (i < rows)
    flag = tl.max(again.to(tl.int32), axis=0)
    if flag > 0:
        top = tl.full((BT, ROWS), float("-inf"), dtype=tl.float32)
        for t0 in range(0, tiles, BT):
            t = (t0 + tl.arange(0, BT))[:, None]
            here = part_max + parts + t.to(tl.int64) * stride
            top = tl.maximum(top, tl.load(here, mask=t < tiles, other=float("-inf")))
        row_top = tl.max(top, axis=0)
        again = again & (row_top > float("-inf"))
        tl.store(reference + s * vector_stride + i, row_top, mask=again)
        flag = tl.max(again.to(tl.int32), axis=0)
    tl.store(flags + s * tl.num_programs(0) + tl.program_id(0), flag)


@changing
def state_prefix_kernel(
    part_sum, total, reference, flags, cosine, scale, weight, loss, coefficient, own_coefficient, per_row,
    inverse_left, left, scaled, tiles, part_stride, vector_stride, left_stride, scaled_stride,
    WEIGHTS: tl.constexpr, START: tl.constexpr, END: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    FLAG_ROWS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """From sums to losses and coefficients, a row per program.

    Args:
        weight: [rows] fp32 pointer, or a number; times WEIGHTS, one per prefix.
        loss: [rows] fp32, weighted, summed over the prefixes.
        coefficient: [M, part_stride] fp32: w_s,i sigma_s,i / l_s,i, so that G = coefficient * E.
        own_coefficient: [M, part_stride] fp32: -w_s,i sigma_s,i, G of the own entry.
        per_row: [rows, M, 3] fp32, for `blend_kernel`: G / E in units of log 2, scale r G / E, and the reference; or
            None.
        scaled: [rows, END] in the dtype of left, or None: left_i, the last segment (from START) times scale r G / E.
        MP: a power of two, at least M.
    """
    i = tl.program_id(0)
    s = tl.arange(0, MP)
    real = s < M
    w = weight
    if weight.dtype.is_ptr():
        w = tl.load(weight + i)
    # The repair made all prefixes of a flagged row anew.
    flagged = tl.load(flags + s * tl.cdiv(tl.num_programs(0), FLAG_ROWS) + i // FLAG_ROWS, mask=real, other=0)
    row_sum = tl.load(total + s * part_stride + i, mask=real, other=1.0)
    ref = tl.load(reference + s * vector_stride + i, mask=real, other=0.0)
    own = tl.load(cosine + s * vector_stride + i, mask=real, other=0.0)
    if tl.max(flagged, axis=0) > 0:
        for d in tl.static_range(M):
            acc = tl.zeros((BT,), dtype=tl.float32)
            for t0 in range(0, tiles, BT):
                t = t0 + tl.arange(0, BT)
                at = (d * tiles + t).to(tl.int64) * part_stride + i
                acc += tl.load(part_sum + at, mask=t < tiles, other=0.0)
            row_sum = tl.where(s == d, tl.sum(acc, axis=0), row_sum)
    of_prefix = tl.zeros((MP,), dtype=tl.float32)
    for d in tl.static_range(M):
        of_prefix = tl.where(s == d, w * WEIGHTS[d], of_prefix)
    lead = ref * LN2 + tl.log(row_sum) - own * scalar(scale)
    tl.store(loss + i, tl.sum(tl.where(real, of_prefix * softplus_(lead), 0.0), axis=0))
    own_part = of_prefix * sigmoid_(lead)
    part = tl.where(row_sum == 0, 0.0, own_part / tl.where(row_sum == 0, 1.0, row_sum))
    tl.store(coefficient + s * part_stride + i, part, mask=real)
    tl.store(own_coefficient + s * part_stride + i, -own_part, mask=real)
    if per_row is not None:
        f = share(tl.load(inverse_left + s * vector_stride + i, mask=real, other=0.0))
        outer = part * f * scalar(scale)
        factors = per_row + (tl.cast(i, tl.int64) * M + s) * 3
        tl.store(factors, part * LN2, mask=real)
        tl.store(factors + 1, outer, mask=real)
        tl.store(factors + 2, ref, mask=real)
        if scaled is not None:
            last = tl.sum(tl.where(s == M - 1, outer, 0.0), axis=0)
            for d0 in range(0, END, BD):
                c = d0 + tl.arange(0, BD)
                x = tl.load(left + tl.cast(i, tl.int64) * left_stride + c, mask=c < END, other=0.0)
                y = (x.to(tl.float32) * tl.where(c >= START, last, 1.0)).to(scaled.dtype.element_ty)
                tl.store(scaled + tl.cast(i, tl.int64) * scaled_stride + c, y, mask=c < END)


@changing
def column_sum_kernel(parts, out, tiles, n, ACCUMULATE: tl.constexpr, BT: tl.constexpr, BLOCK: tl.constexpr):
    """out[n] (+)= sum over tiles of parts [tiles, n]; BT tiles are on their way at a time."""
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BT, BLOCK), dtype=tl.float32)
    for t0 in range(0, tiles, BT):
        t = t0 + tl.arange(0, BT)
        both = (t < tiles)[:, None] & (k < n)[None, :]
        acc += tl.load(parts + t.to(tl.int64)[:, None] * n + k[None, :], mask=both, other=0.0)
    total = tl.sum(acc, axis=0)
    if ACCUMULATE:
        total += tl.load(out + k, mask=k < n, other=0.0)
    tl.store(out + k, total, mask=k < n)


@triton.jit
def of_segment(values, c, DIMS: tl.constexpr, M: tl.constexpr, BD: tl.constexpr):
    """[BD]: of M values, one per segment, those of the segments of columns c."""
    picked = tl.zeros((BD,), dtype=tl.float32) + values[M - 1]
    for s in tl.static_range(M - 2, -1, -1):
        picked = tl.where(c < DIMS[s], values[s], picked)
    return picked


@changing
def finish_prefix_kernel(
    parts, splits, split_rows, parts_stride, row_parts, tiles, coefficient, own_coefficient, cosine, inverse_left,
    inverse_right, own, right, left, out, right_out, right_radial, terms, scale, N, D, right_stride, left_stride,
    out_stride, right_out_stride, part_stride, vector_stride,
    ACCUMULATE: tl.constexpr, ADD_TERMS: tl.constexpr, DIMS: tl.constexpr, M: tl.constexpr, MP: tl.constexpr,
    BD: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """The ends of the gradients, a row per program: own entries, and the lengths of the row's prefixes.

    With R_s,i = sum_j G_s,ij z_s,ij, the own entry included:

    out_i[segment s] = sum of the splits (in the last one times scale r G / E)
                       + sum over d >= s of (scale r r' G_own right_own - r^2 R left_i)    (+ out_i)
    right_out_own(i)[segment s] += sum over d >= s of scale r r' G_own left_i             fp32, rows may share a column
    right_radial[s, own(i)] += (G z)_own;      terms_i (+)= sum_s R_s,i / scale, the row's part of dL/dscale

    parts (with out), right_out (with right_radial), terms and own (the row's own entry is elsewhere) may be None.
    row_parts are as `blend_kernel` leaves them, with MP >= M, a power of two, numbers per row.
    """
    i = tl.program_id(0)
    row = tl.cast(i, tl.int64)
    factor = scalar(scale)
    s = tl.arange(0, MP)
    sums = tl.zeros((BT, MP), dtype=tl.float32)
    for t0 in range(0, tiles, BT):
        t = (t0 + tl.arange(0, BT))[:, None]
        at = (t.to(tl.int64) * part_stride + i) * MP + s[None, :]
        sums += tl.load(row_parts + at, mask=t < tiles, other=0.0)
    f = share(tl.load(inverse_left + s * vector_stride + i, mask=s < M, other=0.0))
    whole = tl.where(s < M, tl.sum(sums, axis=0), 0.0)
    if own is not None:
        o = tl.load(own + i)
        g_own = tl.load(own_coefficient + s * part_stride + i, mask=s < M, other=0.0)
        g_z_own = g_own * tl.load(cosine + s * vector_stride + i, mask=s < M, other=0.0) * factor
        whole += g_z_own
        g_own *= f * share(tl.load(inverse_right + s * N + o, mask=s < M, other=0.0)) * factor
        if right_out is not None:
            tl.atomic_add(right_radial + s * N + o, g_z_own, mask=s < M, sem="relaxed")
    if terms is not None:
        term = tl.sum(whole, axis=0) / factor
        if ADD_TERMS:
            term += tl.load(terms + i)
        tl.store(terms + i, term)
    last = tl.sum(tl.where(s == M - 1, f, 0.0), axis=0)
    last *= tl.load(coefficient + (M - 1) * part_stride + i) * factor
    own_parts = ()
    radials = ()
    for d in tl.static_range(M):
        if own is not None:
            own_parts += (tl.sum(tl.where(s >= d, g_own, 0.0), axis=0),)
        radials += (tl.sum(tl.where(s >= d, whole * f * f, 0.0), axis=0),)
    for d0 in range(0, D, BD):
        c = d0 + tl.arange(0, BD)
        x = tl.load(left + row * left_stride + c, mask=c < DIMS[M - 1], other=0.0)
        if own is not None:
            own_part = of_segment(own_parts, c, DIMS, M, BD)
        if out is not None:
            acc = tl.zeros((BD,), dtype=tl.float32)
            for k in range(0, splits, 2):  # two at a time, so that they don't wait for each other
                one = parts + (k * split_rows + row) * parts_stride + c
                two = parts + ((k + 1) * split_rows + row) * parts_stride + c
                acc += tl.load(one, mask=c < DIMS[M - 1], other=0.0)
                acc += tl.load(two, mask=(c < DIMS[M - 1]) & (k + 1 < splits), other=0.0)
            acc *= tl.where(c < (DIMS[M - 2] if M > 1 else 0), 1.0, last)
            if own is not None:
                y = tl.load(right + o * right_stride + c, mask=c < DIMS[M - 1], other=0.0)
                acc += y.to(tl.float32) * own_part
            acc -= x.to(tl.float32) * of_segment(radials, c, DIMS, M, BD)
            if ACCUMULATE:
                acc += tl.load(out + row * out_stride + c, mask=c < DIMS[M - 1], other=0.0)
            acc = tl.where(c < DIMS[M - 1], acc, 0.0)
            tl.store(out + row * out_stride + c, acc.to(out.dtype.element_ty), mask=c < D)
        if right_out is not None:
            there = right_out + o * right_out_stride + c
            tl.atomic_add(there, x.to(tl.float32) * own_part, mask=c < DIMS[M - 1], sem="relaxed")


@changing
def radial_kernel(
    x, inverse, radial, out, D, x_stride, out_stride, vector_stride,
    DIMS: tl.constexpr, M: tl.constexpr, MP: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """out_j[segment s] -= sum over d >= s of r_d,j^2 radial_d,j x_j; zeros behind the widest prefix. A row each."""
    i = tl.program_id(0)
    row = tl.cast(i, tl.int64)
    s = tl.arange(0, MP)
    r = share(tl.load(inverse + s * vector_stride + i, mask=s < M, other=0.0))
    part = r * r * tl.load(radial + s * vector_stride + i, mask=s < M, other=0.0)
    parts = ()
    for d in tl.static_range(M):
        parts += (tl.sum(tl.where(s >= d, part, 0.0), axis=0),)
    for d0 in range(0, D, BD):
        c = d0 + tl.arange(0, BD)
        v = tl.load(x + row * x_stride + c, mask=c < DIMS[M - 1], other=0.0)
        at = out + row * out_stride + c
        value = tl.load(at, mask=c < DIMS[M - 1], other=0.0) - v.to(tl.float32) * of_segment(parts, c, DIMS, M, BD)
        tl.store(at, tl.where(c < DIMS[M - 1], value, 0.0), mask=c < D)
