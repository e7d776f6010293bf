# SPDX-License-Identifier: Apache-2.0
"""Tiles of logits from hidden states and the output matrix, and what is made of them. Formulas: linear_logprobs.py.

`vocabulary_kernel` computes one tile [BM, BN] of x = hidden @ weight^T + bias in fp32, z = scale * x, and ends it in
one of two ways:

* forward: the largest z and the sum of exp(z - largest) of every row of the tile, without the label's own entry, which
  is stored by itself. Nothing of size rows x N is stored.
* backward (PROB): P_ij = b_i exp(z_ij - others_i), and a_i at the label, a and b being the gradients of the label's
  logit and of the log-sum-exp of the others; cast to the inputs' dtype. The sums over the tile's rows, for the bias.

Exponents are to base 2 inside. Operands are tensor descriptors (TMA) or pointers with row strides; all sizes may be
uneven.
"""

import triton
import triton.language as tl

from .rows import sigmoid_
from .tiles import LOG2E, load_tile, scalar, tile_at, write_tile

# Numbers and pointers that change from chunk to chunk must not compile anew.
_CHANGING = ["rows", "first", "last", "part_stride"]
_VECTORS = ["own", "own_logit", "others", "own_gradient", "others_gradient"]


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_VECTORS)
def vocabulary_kernel(
    hidden, weight, bias, out, scale, own, own_logit, others, own_gradient, others_gradient, gain, part_sum, part_max,
    part_bias, rows, first, last, D, hidden_stride, weight_stride, out_stride, part_stride,
    PROB: tl.constexpr, TRANSPOSED: tl.constexpr, TMA: tl.constexpr, OUT_TMA: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See the module. Columns `first` to `last` (not included) of the vocabulary.

    Args:
        hidden: [rows, D]; weight: [V, D], or [D, V] if TRANSPOSED: pointers or descriptors; bias: [V] or None.
        out: [rows, last - first], with PROB: pointer or descriptor.
        scale: number or pointer, 1/T.
        own: [rows] int64, the labels; -1 for none.
        own_logit: [rows] fp32, gets scale * x at the label, -inf for none (not with PROB).
        others: [rows] fp32, the natural log-sum-exp over the entries that are not the label's (PROB).
        own_gradient, others_gradient: [rows] fp32 (PROB).
        gain: None, or pointer: P is multiplied with 2^15 / gain.
        part_sum, part_max: [tiles of columns, part_stride] fp32 (not with PROB).
        part_bias: [tiles of rows, part_stride] fp32, or None: each tile's sums over its rows (PROB).
    """
    num_m = tl.cdiv(rows, BM)
    num_n = tl.cdiv(last - first, BN)
    for t in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_at(t, num_m, num_n, GROUP)
        m0 = pid_m * BM
        n0 = first + pid_n * BN
        i = m0 + tl.arange(0, BM)
        j = n0 + tl.arange(0, BN)
        column = tl.arange(0, BN)
        label = tl.load(own + i, mask=i < rows, other=-1)
        here = tl.where((label >= n0) & (label < n0 + BN), label - n0, -1).to(tl.int32)
        if not PROB:
            if pid_n == 0:
                tl.store(own_logit + i, tl.full((BM,), float("-inf"), tl.float32), mask=(i < rows) & (label < 0))
        acc = tl.zeros((BM, BN), dtype=tl.float32)
        for k in range(0, D, BK):
            a = load_tile(hidden, m0, k, rows, D, hidden_stride, BM, BK, TMA, UPCAST)
            if TRANSPOSED:
                b = load_tile(weight, k, n0, D, last, weight_stride, BK, BN, TMA, UPCAST)
            else:
                b = tl.trans(load_tile(weight, n0, k, last, D, weight_stride, BN, BK, TMA, UPCAST))
            acc = tl.dot(a, b, acc, input_precision=PRECISION)
        if bias is not None:
            acc += tl.load(bias + j, mask=j < last, other=0.0).to(tl.float32)[None, :]
        # Few tiles hold a label or the right edge, so the others skip the comparison.
        holds_label = tl.max(here, axis=0) >= 0
        if PROB:
            lse = tl.load(others + i, mask=i < rows, other=float("inf"))
            # Without other entries there is nothing but masked ones, and -inf - inf is what makes them 0.
            lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
            factor = tl.load(others_gradient + i, mask=i < rows, other=0.0)
            at_label = tl.load(own_gradient + i, mask=i < rows, other=0.0)
            if gain is not None:
                up = tl.load(gain)
                up = 32768.0 / tl.where(up == 0, 1.0, up)
                factor = factor * up
                at_label = at_label * up
            p = tl.exp2(acc * (scalar(scale) * LOG2E) - lse[:, None]) * factor[:, None]
            if holds_label:
                p = tl.where(column[None, :] == here[:, None], at_label[:, None], p)
            if part_bias is not None:
                sums = tl.sum(tl.where((i < rows)[:, None], p, 0.0), axis=0)
                tl.store(part_bias + pid_m.to(tl.int64) * part_stride + (j - first), sums, mask=j < last)
            write_tile(out, p, m0, n0 - first, rows, last - first, out_stride, BM, BN, PARTS, OUT_TMA, False)
        else:
            if holds_label | (n0 + BN > last):
                is_own = column[None, :] == here[:, None]
                value = tl.sum(tl.where(is_own, acc, 0.0), axis=1) * scalar(scale)
                tl.store(own_logit + i, value, mask=(i < rows) & (here >= 0))
                acc = tl.where(is_own | (j >= last)[None, :], float("-inf"), acc)
            z = acc * (scalar(scale) * LOG2E)
            top = tl.max(z, axis=1)
            row_sum = tl.sum(tl.exp2(z - tl.where(top == float("-inf"), 0.0, top)[:, None]), axis=1)
            part = pid_n.to(tl.int64) * part_stride + i
            tl.store(part_max + part, top, mask=i < rows)
            tl.store(part_sum + part, row_sum, mask=i < rows)


@triton.jit(do_not_specialize=["n"])
def label_gradient_kernel(own_logit, others, g, own_gradient, others_gradient, n, BLOCK: tl.constexpr):
    """Gradients of the label's logit and of the others' log-sum-exp, for -softplus(others - own) and g.

    Its sigmoid is 1 - p of the label, and keeps its digits where p is near 1.
    """
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lead = tl.load(others + i, mask=i < n, other=0.0) - tl.load(own_logit + i, mask=i < n, other=0.0)
    value = tl.load(g + i, mask=i < n, other=0.0) * sigmoid_(lead)
    tl.store(own_gradient + i, value, mask=i < n)
    tl.store(others_gradient + i, -value, mask=i < n)


@triton.jit(do_not_specialize=["n"])
def largest_kernel(a, b, out, n, BLOCK: tl.constexpr):
    """out[0] = the largest of |a| and |b|. One program."""
    top = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, n, BLOCK):
        i = start + tl.arange(0, BLOCK)
        x = tl.abs(tl.load(a + i, mask=i < n, other=0.0))
        y = tl.abs(tl.load(b + i, mask=i < n, other=0.0))
        top = tl.maximum(top, tl.maximum(x, y))
    tl.store(out, tl.max(top, axis=0))


@triton.jit(do_not_specialize=["parts", "part_stride"])
def add_up_kernel(
    source, out, factor, gain, parts, part_stride, n, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out = factor * gain / 2^15 * the sum of `parts` stretches of n numbers in fp32 (+ out); gain may be None."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    at = i
    for _ in range(0, parts):
        acc += tl.load(source + at, mask=i < n, other=0.0)
        at += part_stride
    acc = acc * scalar(factor)
    if gain is not None:
        acc = acc * (tl.load(gain) * (1.0 / 32768))
    if ADD:
        acc += tl.load(out + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(out + i, acc.to(out.dtype.element_ty), mask=i < n)
