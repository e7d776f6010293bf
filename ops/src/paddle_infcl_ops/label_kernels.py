# SPDX-License-Identifier: Apache-2.0
"""Log-probabilities of labels: one read of the logits forward; one read and one write backward. A program per row.

With s = 1/T, y the row's label and top = max_j z_j (all logits, so exact in fp32):

    l        = sum_{j != y} exp(s (z_j - m))                  m the largest of the others, running
    logprob  = -softplus(s m + log l - s z_y)                 the label's own entry stays out of the sum
    entropy  = log_sum - sum_j exp(s (z_j - top)) s (z_j - top) / exp(log_sum)
    p_j      = exp(s (z_j - top) - log_sum)                   log_sum = log sum_j exp(s (z_j - top))
    dz_j     = -s p_j (g + h (log p_j + entropy))             g, h: gradients of logprob and entropy
    dz_y     =  s (g (1 - p_y) - h p_y (log p_y + entropy))   1 - p_y = -expm1(logprob)

Saved for the backward pass: logprob, top, log_sum, and entropy if asked for. `top` and `log_sum` apart, not their sum:
at logits of 1e4 the sum would be off by 5e-4.
"""

import triton
import triton.language as tl

from .rows import softplus_
from .tiles import LOG2E

# Stands for -inf where that would meet a factor of 0; its exponential is 0.
LOWEST = tl.constexpr(-1e4)


@triton.jit
def minus_expm1_(x):
    """1 - exp(x) for x <= 0, with full relative precision near 0."""
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))))
    return tl.where(x > -0.03, series, 1.0 - tl.exp(x))


@triton.jit
def offset_(column, stride, WIDE: tl.constexpr):
    if WIDE:
        return column.to(tl.int64) * stride
    return column * stride


@triton.jit
def label_forward_kernel(
    logits, bias, labels, logprobs, tops, log_sums, entropies, n1, n2, s0, s1, s2, sv, l0, l1, l2, V, scale,
    ignore_index, HAS_IGNORE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's log-probability.

    Args:
        logits: any dtype; entry (a, b, t, v) at a s0 + b s1 + t s2 + v sv.
        bias: [V], added to the logits, or None.
        labels: integers; (a, b, t) at a l0 + b l1 + t l2.
        logprobs, tops, log_sums, entropies: [rows] fp32, rows counted (a, b, t) with n1 of b and n2 of t; all but the
            first may be None.
        ignore_index: rows with this label get 0 and are not read (HAS_IGNORE).
        WIDE: whether offsets within a row need 64 bits.
    """
    row = tl.program_id(0).to(tl.int64)
    t = row % n2
    b = row // n2 % n1
    a = row // n2 // n1
    label = tl.load(labels + (a * l0 + b * l1 + t * l2)).to(tl.int64)
    if HAS_IGNORE:
        if label == ignore_index:
            tl.store(logprobs + row, 0.0)
            if tops is not None:
                tl.store(tops + row, 0.0)
                tl.store(log_sums + row, 0.0)
            if entropies is not None:
                tl.store(entropies + row, 0.0)
            return
    base = logits + (a * s0 + b * s1 + t * s2)
    # A label out of range costs its own row only: NaN.
    inside = (label >= 0) & (label < V)
    own = tl.load(base + label * sv, mask=inside, other=float("nan")).to(tl.float32)
    if bias is not None:
        own += tl.load(bias + label, mask=inside, other=0.0).to(tl.float32)
    own = tl.where(own == float("inf"), float("nan"), own)
    factor = scale * LOG2E
    m = tl.full([], float("-inf"), tl.float32)
    l = tl.full([], 0.0, tl.float32)
    dot = tl.full([], 0.0, tl.float32)
    label = label.to(tl.int32)
    columns = tl.arange(0, BLOCK)
    for start in range(0, V, BLOCK):
        at = start + columns
        z = tl.load(base + offset_(at, sv, WIDE), mask=at < V, other=float("-inf")).to(tl.float32)
        if bias is not None:
            z += tl.load(bias + at, mask=at < V, other=0.0).to(tl.float32)
        z = tl.where(at == label, float("-inf"), z)
        new = tl.maximum(m, tl.max(z, axis=0))
        safe = tl.where(new == float("-inf"), 0.0, new)
        x = (z - safe) * factor
        e = tl.exp2(x)
        shift = tl.where(m == float("-inf"), LOWEST, tl.maximum((m - safe) * factor, LOWEST))
        decay = tl.exp2(shift)
        if entropies is not None:
            dot = decay * (dot + l * shift) + tl.sum(e * tl.maximum(x, LOWEST), axis=0)
        l = l * decay + tl.sum(e, axis=0)
        m = new
    safe = tl.where(m == float("-inf"), 0.0, m)
    others = tl.log(l)
    # In units of the others' own maximum: the difference of two large numbers is taken first.
    lead = others - (own - safe) * scale
    logprob = -softplus_(lead)
    tl.store(logprobs + row, logprob)
    if tops is not None:
        top = tl.maximum(m, own, propagate_nan=tl.PropagateNan.ALL)
        top = tl.where(top == float("-inf"), 0.0, top)
        down = tl.where(m == float("-inf"), LOWEST, tl.maximum((m - top) * scale, LOWEST))
        own_down = tl.where(own == float("-inf"), LOWEST, tl.maximum((own - top) * scale, LOWEST))
        l = l * tl.exp(down)
        own_exp = tl.exp(own_down)
        total = l + own_exp
        log_sum = tl.log(total)
        tl.store(tops + row, top)
        tl.store(log_sums + row, log_sum)
        if entropies is not None:
            dots = dot * (1.0 / LOG2E) * tl.exp(down) + l * down + own_exp * own_down
            tl.store(entropies + row, log_sum - dots / total)


@triton.jit
def label_backward_kernel(
    logits, bias, labels, dlogits, logprobs, tops, log_sums, entropies, g, h, n1, n2, T, s0, s1, s2, sv, l0, l1, l2,
    d0, d1, d2, dv, V, scale, ignore_index, HAS_IGNORE: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's gradient; `dlogits` may be `logits`.

    Args: as `label_forward_kernel`, and
        dlogits: as logits, at a d0 + b d1 + t d2 + v dv.
        g, h: [rows] fp32; h and entropies may be None.
        T: positions that the logits have; t from n2 on belongs to no label and gets 0.
    """
    row = tl.program_id(0).to(tl.int64)
    t = row % T
    b = row // T % n1
    a = row // T // n1
    out = dlogits + (a * d0 + b * d1 + t * d2)
    columns = tl.arange(0, BLOCK)
    label = tl.load(labels + (a * l0 + b * l1 + t * l2), mask=t < n2, other=0).to(tl.int64)
    nothing = t >= n2
    if HAS_IGNORE:
        nothing = nothing | (label == ignore_index)
    if nothing:
        for start in range(0, V, BLOCK):
            at = start + columns
            zeros = tl.zeros((BLOCK,), dtype=tl.float32).to(dlogits.dtype.element_ty)
            tl.store(out + offset_(at, dv, WIDE), zeros, mask=at < V)
        return
    label = label.to(tl.int32)
    row = (row // T) * n2 + t
    base = logits + (a * s0 + b * s1 + t * s2)
    top = tl.load(tops + row)
    log_sum = tl.load(log_sums + row)
    logprob = tl.load(logprobs + row)
    weight = tl.load(g + row) * scale
    own = weight * minus_expm1_(logprob)
    if h is not None:
        bend = tl.load(h + row) * scale
        entropy = tl.load(entropies + row)
        own -= bend * tl.exp(logprob) * (tl.maximum(logprob, LOWEST) + entropy)
    for start in range(0, V, BLOCK):
        at = start + columns
        z = tl.load(base + offset_(at, sv, WIDE), mask=at < V, other=0.0).to(tl.float32)
        if bias is not None:
            z += tl.load(bias + at, mask=at < V, other=0.0).to(tl.float32)
        logp = (z - top) * scale - log_sum
        p = tl.exp2(logp * LOG2E)
        if h is not None:
            dz = -p * (weight + bend * (tl.maximum(logp, LOWEST) + entropy))
        else:
            dz = -p * weight
        dz = tl.where(at == label, own, dz)
        tl.store(out + offset_(at, dv, WIDE), dz.to(dlogits.dtype.element_ty), mask=at < V)
