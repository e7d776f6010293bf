# SPDX-License-Identifier: Apache-2.0
"""Kernels that work row by row: own similarities, references, sums of tiles, losses, and the ends of the gradients.

With l_i the sum of exp(z_ij - c_i) over the others (c_i the row's reference), lse_i = c_i + log l_i their log-sum-exp
and own_i = scale * <left_i, right_own(i)>:

    loss_i  = softplus(lse_i - own_i)
    sigma_i = sigmoid(lse_i - own_i) = 1 - P_own, which keeps its relative precision where P_own rounds to 1
    dleft_i = w_i * scale * sigma_i * (sum_j E_ij right_j / l_i - right_own(i))

The own terms of both gradients are added in fp32: in a trained model they are most of the gradient, and a rounded
matrix entry would cost digits.

Nothing is divided by exp(own_i - c_i) or taken from 1, so any range of logits will do as long as l_i is a number.
`reference`, part maxima and everything called `...2` are in units of log 2.
"""

import inspect

import triton
import triton.language as tl

from .tiles import LN2, LOG2E, scalar

# Counts of rows and tiles change from chunk to chunk, and with an uneven last batch; they must not compile anew.
_COUNTS = {"rows", "tiles", "part_stride", "splits", "split_rows"}


def changing(function):
    """`triton.jit` that doesn't look at the values of counts."""
    names = inspect.signature(function).parameters
    return triton.jit(do_not_specialize=[name for name in names if name in _COUNTS])(function)


# A row whose sum lies outside is computed again with its true largest logit as the reference. Inside, sums and
# inverses stay far from the ends of fp32 and bf16.
SMALLEST_SUM = tl.constexpr(2.0**-40)
LARGEST_SUM = tl.constexpr(2.0**80)
# The own logit leads the reference by at most 2^32: the sum of the others then stays above 2^-40.
LARGEST_LEAD = tl.constexpr(32.0)


@triton.jit
def log1p_(x):
    """log(1 + x) for x >= 0, with full relative precision near 0 (Kahan)."""
    u = 1.0 + x
    return tl.where(u == 1.0, x, tl.log(u) * (x / tl.where(u == 1.0, 1.0, u - 1.0)))


@triton.jit
def softplus_(x):
    """log(1 + exp(x)); NaN stays NaN."""
    return tl.where(x > 0, x, 0.0) + log1p_(tl.exp(-tl.abs(x)))


@triton.jit
def sigmoid_(x):
    """1 / (1 + exp(-x)) without overflow; NaN stays NaN."""
    e = tl.exp(-tl.abs(x))
    return tl.where(x > 0, 1.0, e) / (1.0 + e)


@triton.jit
def logaddexp_(a, b):
    """log(exp(a) + exp(b)); -inf is "nothing"."""
    top = tl.maximum(a, b)
    gap = tl.where(top == float("-inf"), 0.0, tl.abs(a - b))
    return tl.where(top == float("-inf"), top, top + log1p_(tl.exp(-gap)))


@changing
def own_kernel(
    left, right, own, out, rows, D, left_stride, right_stride, KEEP: tl.constexpr, ROWS: tl.constexpr,
    BD: tl.constexpr,
):  # fmt: skip
    """out_i = <left_i, right_own(i)> in fp32; where own_i is negative -inf, or what is there if KEEP."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    o = tl.load(own + i, mask=i < rows, other=-1)
    acc = tl.zeros((ROWS, BD), dtype=tl.float32)
    for d in range(0, D, BD):
        c = d + tl.arange(0, BD)
        x = tl.load(
            left + i.to(tl.int64)[:, None] * left_stride + c[None, :], (i < rows)[:, None] & (c < D)[None, :], 0.0
        )
        y = tl.load(
            right + o[:, None] * right_stride + c[None, :], mask=(o >= 0)[:, None] & (c < D)[None, :], other=0.0
        )
        acc += x.to(tl.float32) * y.to(tl.float32)
    wanted = i < rows
    if KEEP:
        wanted = wanted & (o >= 0)
    tl.store(out + i, tl.where(o >= 0, tl.sum(acc, axis=1), float("-inf")), mask=wanted)


@changing
def reference_kernel(
    left, right, own_similarity, own, self_column, scale, reference, rows, N, D, left_stride, right_stride,
    MERGE: tl.constexpr, BM: tl.constexpr, SAMPLES: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    """A guess at every row's largest logit: SAMPLES columns, evenly spread, and the own entry.

    With MERGE the larger one of this and what is there, from another block.
    """
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    j = tl.arange(0, SAMPLES).to(tl.int64) * N // SAMPLES
    acc = tl.zeros((BM, SAMPLES), dtype=tl.float32)
    for k in range(0, D, BK):
        c = k + tl.arange(0, BK)
        a = tl.load(
            left + i.to(tl.int64)[:, None] * left_stride + c[None, :], (i < rows)[:, None] & (c < D)[None, :], 0.0
        )
        b = tl.load(right + j[:, None] * right_stride + c[None, :], mask=(c < D)[None, :], other=0.0)
        if UPCAST:
            a = a.to(tl.float32)
            b = b.to(tl.float32)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    factor = scalar(scale) * LOG2E
    acc = acc * factor
    if own is not None:
        acc = tl.where(j[None, :] == tl.load(own + i, mask=i < rows, other=-1)[:, None], float("-inf"), acc)
    if self_column is not None:
        acc = tl.where(j[None, :] == tl.load(self_column + i, mask=i < rows, other=-1)[:, None], float("-inf"), acc)
    top = tl.max(acc, axis=1)
    own2 = tl.load(own_similarity + i, mask=i < rows, other=0.0) * factor
    ref = tl.where(top == float("-inf"), own2, tl.maximum(top, tl.minimum(own2, top + LARGEST_LEAD)))
    ref = tl.where(ref == float("-inf"), 0.0, ref)
    if MERGE:
        there = tl.load(reference + i, mask=i < rows, other=0.0)
        ref = tl.where(top == float("-inf"), there, tl.maximum(there, ref))
    tl.store(reference + i, ref, mask=i < rows)


@triton.jit
def checked_(part_sum, part_max, i, rows, tiles, part_stride, ROWS: tl.constexpr, BT: tl.constexpr):
    """(sum, largest, whether the reference was too bad a guess) over the tiles of rows i [ROWS]."""
    acc = tl.zeros((BT, ROWS), dtype=tl.float32)
    top = tl.full((BT, ROWS), float("-inf"), dtype=tl.float32)
    for t in range(0, tiles, BT):
        k = t + tl.arange(0, BT)
        at = k.to(tl.int64)[:, None] * part_stride + i[None, :]
        inside = (k < tiles)[:, None] & (i < rows)[None, :]
        acc += tl.load(part_sum + at, mask=inside, other=0.0)
        top = tl.maximum(top, tl.load(part_max + at, mask=inside, other=float("-inf")))
    row_sum = tl.sum(acc, axis=0)
    row_top = tl.max(top, axis=0)
    fine = (row_sum > SMALLEST_SUM) & (row_sum < LARGEST_SUM)
    return row_sum, row_top, (row_top > float("-inf")) & (fine == 0) & (i < rows)


@changing
def check_kernel(
    part_sum, part_max, total, reference, flags, rows, tiles, part_stride, ROWS: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """total_i = the sum of a row's tiles. Rows out of range get their true reference, and their ROWS rows a flag."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row_sum, row_top, again = checked_(part_sum, part_max, i, rows, tiles, part_stride, ROWS, BT)
    tl.store(total + i, row_sum, mask=i < rows)
    tl.store(reference + i, row_top, mask=again)
    tl.store(flags + tl.program_id(0), tl.max(again.to(tl.int32), axis=0))


@changing
def state_kernel(
    part_sum, total, reference, flags, own_similarity, scale, weight, weight_factor, loss, coefficient,
    own_coefficient, left, scaled, rows, tiles, D, part_stride, left_stride, scaled_stride,
    FLAG_ROWS: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """From sums to losses and coefficients; scaled_i = left_i * coefficient_i, what the third product needs.

    Args:
        weight: [rows] fp32 pointer, or a number; times weight_factor.
        loss: [rows] fp32, weighted.
        coefficient: [rows] fp32: w_i * scale * sigma_i / l_i; own_coefficient: -w_i * scale * sigma_i.
        scaled: [rows, D] in the dtype of left, or None.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < rows
    row_sum = tl.load(total + i, mask=inside, other=0.0)
    if tl.load(flags + tl.program_id(0) * ROWS // FLAG_ROWS) > 0:
        acc = tl.zeros((BT, ROWS), dtype=tl.float32)
        for t in range(0, tiles, BT):
            k = t + tl.arange(0, BT)
            at = k.to(tl.int64)[:, None] * part_stride + i[None, :]
            acc += tl.load(part_sum + at, mask=(k < tiles)[:, None] & inside[None, :], other=0.0)
        row_sum = tl.sum(acc, axis=0)
        tl.store(total + i, row_sum, mask=inside)
    factor = scalar(scale)
    lse = tl.load(reference + i, mask=inside, other=0.0) * LN2 + tl.log(row_sum)
    lead = lse - tl.load(own_similarity + i, mask=inside, other=0.0) * factor
    if weight.dtype.is_ptr():
        w = tl.load(weight + i, mask=inside, other=0.0) * weight_factor
    else:
        w = tl.zeros((ROWS,), dtype=tl.float32) + weight * weight_factor
    tl.store(loss + i, w * softplus_(lead), mask=inside)
    own_part = w * factor * sigmoid_(lead)
    part = tl.where(row_sum == 0, 0.0, own_part / row_sum)
    tl.store(coefficient + i, part, mask=inside)
    tl.store(own_coefficient + i, -own_part, mask=inside)
    if scaled is not None:
        for d in range(0, D, BD):
            c = d + tl.arange(0, BD)
            both = inside[:, None] & (c < D)[None, :]
            x = tl.load(left + i.to(tl.int64)[:, None] * left_stride + c[None, :], mask=both, other=0.0)
            y = (x.to(tl.float32) * part[:, None]).to(scaled.dtype.element_ty)
            tl.store(scaled + i.to(tl.int64)[:, None] * scaled_stride + c[None, :], y, mask=both)


@changing
def finish_kernel(
    parts, splits, split_rows, parts_stride, coefficient, own_coefficient, own, right, right_stride, left, left_stride,
    out, out_stride, right_out, terms, scale, rows, D,
    ACCUMULATE: tl.constexpr, ADD_TERMS: tl.constexpr, ROWS: tl.constexpr, BD: tl.constexpr,
):  # fmt: skip
    """The end of the gradients, own terms included.

    out_i = coefficient_i * sum of the splits + own_coefficient_i * right_own(i)  (+ out_i)
    right_out_own(i) += own_coefficient_i * left_i         fp32, rows may share a column
    terms_i (+)= <left_i, dleft_i> / scale                 the row's part of dL/dscale

    All of parts (with out and terms), right_out, coefficient and own_coefficient may be None.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < rows
    row = i.to(tl.int64)[:, None]
    part = tl.full((ROWS,), 1.0, dtype=tl.float32)
    if coefficient is not None:
        part = tl.load(coefficient + i, mask=inside, other=0.0)
    if own_coefficient is not None:
        o = tl.load(own + i, mask=inside, other=-1)
        own_part = tl.load(own_coefficient + i, mask=inside, other=0.0)
    term = tl.zeros((ROWS, BD), dtype=tl.float32)
    for d in range(0, D, BD):
        c = d + tl.arange(0, BD)
        both = inside[:, None] & (c < D)[None, :]
        if (terms is not None) or (right_out is not None):
            x = tl.load(left + row * left_stride + c[None, :], mask=both, other=0.0).to(tl.float32)
        if parts is not None:
            acc = tl.zeros((ROWS, BD), dtype=tl.float32)
            for s in range(0, splits):
                acc += tl.load(parts + (s * split_rows + row) * parts_stride + c[None, :], mask=both, other=0.0)
            acc = acc * part[:, None]
            if own_coefficient is not None:
                y = tl.load(right + o[:, None] * right_stride + c[None, :], mask=both & (o >= 0)[:, None], other=0.0)
                acc += y.to(tl.float32) * own_part[:, None]
            if terms is not None:
                term += x * acc
            if out is not None:
                at = out + row * out_stride + c[None, :]
                if ACCUMULATE:
                    acc += tl.load(at, mask=both, other=0.0)
                tl.store(at, acc.to(out.dtype.element_ty), mask=both)
        if right_out is not None:
            at = right_out + o[:, None] * out_stride + c[None, :]
            tl.atomic_add(at, x * own_part[:, None], mask=both & (o >= 0)[:, None], sem="relaxed")
    if terms is not None:
        value = tl.sum(term, axis=1) / scalar(scale)
        if ADD_TERMS:
            value += tl.load(terms + i, mask=inside, other=0.0)
        tl.store(terms + i, value, mask=inside)


@changing
def merge_kernel(
    part_sum, part_max, out, rows, tiles, part_stride, MERGE: tl.constexpr, ROWS: tl.constexpr, BT: tl.constexpr
):  # fmt: skip
    """out_i = log-sum-exp (natural) over the row's tiles, merged into out_i if MERGE."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    top = tl.full((BT, ROWS), float("-inf"), dtype=tl.float32)
    acc = tl.zeros((BT, ROWS), dtype=tl.float32)
    for t in range(0, tiles, BT):
        k = t + tl.arange(0, BT)
        at = k.to(tl.int64)[:, None] * part_stride + i[None, :]
        inside = (k < tiles)[:, None] & (i < rows)[None, :]
        m = tl.load(part_max + at, mask=inside, other=float("-inf"))
        s = tl.load(part_sum + at, mask=inside, other=0.0)
        new = tl.maximum(top, m)
        safe = tl.where(new == float("-inf"), 0.0, new)
        acc = acc * tl.exp2(top - safe) + s * tl.exp2(m - safe)
        top = new
    row_top = tl.max(top, axis=0)
    safe = tl.where(row_top == float("-inf"), 0.0, row_top)
    row_sum = tl.sum(acc * tl.exp2(top - safe[None, :]), axis=0)
    lse = safe * LN2 + tl.log(row_sum)
    if MERGE:
        lse = logaddexp_(lse, tl.load(out + i, mask=i < rows, other=float("-inf")))
    tl.store(out + i, lse, mask=i < rows)


@changing
def loss_kernel(lse, own_similarity, scale, weight, weight_factor, loss, rows, ROWS: tl.constexpr):
    """loss_i = w_i * softplus(lse_i - own_i)."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < rows
    own = tl.load(own_similarity + i, mask=inside, other=0.0) * scalar(scale)
    if weight.dtype.is_ptr():
        w = tl.load(weight + i, mask=inside, other=0.0) * weight_factor
    else:
        w = tl.zeros((ROWS,), dtype=tl.float32) + weight * weight_factor
    tl.store(loss + i, w * softplus_(tl.load(lse + i, mask=inside, other=0.0) - own), mask=inside)


@changing
def factor_kernel(
    lse, own_similarity, scale, weight, weight_factor, incoming, largest, reference, factor, own_coefficient, gain,
    rows,    ROWS: tl.constexpr,
):  # fmt: skip
    """What is needed to recompute P: its reference, the factor of every row, the coefficient of the own entry.

    Args:
        lse: [rows] natural; with own_similarity the one over the others, without it the whole row's.
        incoming: pointer to dL/dloss, or None.
        largest: the largest |weight|, number or pointer, or None. With it (fp16) factors are scaled to 2^15 and
            `gain` is what was taken out.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = i < rows
    if weight.dtype.is_ptr():
        w = tl.load(weight + i, mask=inside, other=0.0) * weight_factor
    else:
        w = tl.zeros((ROWS,), dtype=tl.float32) + weight * weight_factor
    outer = 1.0
    if incoming is not None:
        outer = tl.load(incoming).to(tl.float32)
    whole = tl.load(lse + i, mask=inside, other=0.0)
    if own_similarity is not None:
        own = tl.load(own_similarity + i, mask=inside, other=0.0) * scalar(scale)
        tl.store(own_coefficient + i, -w * outer * scalar(scale) * sigmoid_(whole - own), mask=inside)
        whole = logaddexp_(whole, own)
    if largest is not None:
        big = scalar(largest) * tl.abs(weight_factor)
        w = w * (32768.0 / tl.where(big == 0, 1.0, big))
        tl.store(gain, big * outer)
    else:
        w = w * outer
    # A row with no candidates has nothing but dropped entries, and -inf - inf is what makes them 0.
    tl.store(reference + i, tl.where(whole == float("-inf"), float("inf"), whole * LOG2E), mask=inside)
    tl.store(factor + i, w, mask=inside)


@triton.jit
def sum_kernel(x, out, n, factor, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    """out[0] = factor * sum of x, in a fixed order; with LARGEST the largest |x| instead. One program."""
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(0, n, BLOCK):
        c = k + tl.arange(0, BLOCK)
        value = tl.load(x + c, mask=c < n, other=0.0)
        if LARGEST:
            acc = tl.maximum(acc, tl.abs(value))
        else:
            acc += value
    if LARGEST:
        tl.store(out, tl.max(acc, axis=0))
    else:
        tl.store(out, (tl.sum(acc, axis=0) * factor).to(out.dtype.element_ty))


@triton.jit
def _scale_block(x, out, factor, n, block, BLOCK: tl.constexpr):
    k = block.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if x is not None:
        value = tl.load(x + k, mask=k < n, other=0.0).to(tl.float32) * scalar(factor)
    else:
        value = tl.zeros((BLOCK,), dtype=tl.float32)
    tl.store(out + k, value.to(out.dtype.element_ty), mask=k < n)


@triton.jit
def scale_kernel(x, out, factor, n, BLOCK: tl.constexpr):
    """out = x * factor, cast; factor is a number or a pointer, x None for zeros."""
    _scale_block(x, out, factor, n, tl.program_id(0), BLOCK)


@triton.jit
def scale_pair_kernel(x, x_out, x_n, y, y_out, y_n, factor, BLOCK: tl.constexpr):
    """Two of them in one launch."""
    block = tl.program_id(0)
    of_x = tl.cdiv(x_n, BLOCK)
    if block < of_x:
        _scale_block(x, x_out, factor, x_n, block, BLOCK)
    else:
        _scale_block(y, y_out, factor, y_n, block - of_x, BLOCK)
