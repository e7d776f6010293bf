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

Both kernels should wait for memory only:

* forward every lane has a running m, l of its own, and they meet at the end of the row: in the loop nothing crosses
  lanes, so there are neither shuffles nor barriers;
* the label is looked for only in the step that holds it, a branch that the whole program takes;
* rows that start anywhere (an odd vocabulary, a slice) are read in whole vectors of VEC entries from the first one on
  that is aligned in memory; the up to VEC - 1 entries on either end are taken apart (ALIGN).
"""

import triton
import triton.language as tl

from .rows import softplus_
from .tiles import LOG2E

# Stands for -inf where that would meet a factor of 0; its exponential is 0.
LOWEST = tl.constexpr(-1e4)
# Counts and the labels' strides change with the batch; nothing is gained from a kernel for each.
_CHANGING = ["n1", "n2", "T", "l0", "l1", "l2", "shift", "dshift", "ignore_index"]


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
def head_(offset, V, VEC: tl.constexpr):
    """Entries before the first aligned one of a row that starts `offset` entries behind one."""
    return tl.minimum((VEC - (offset % VEC).to(tl.int32)) % VEC, V)


@triton.jit
def take_in_(m, l, dot, z, factor, U: tl.constexpr, LANES: tl.constexpr, VEC: tl.constexpr, ENTROPY: tl.constexpr):
    """m, l and dot [LANES] after another U x VEC entries for each lane; dot = sum exp2(x) x, x = (z - m) factor."""
    z = tl.reshape(z, (U, LANES, VEC))
    new = tl.maximum(m, tl.max(tl.max(z, axis=2), axis=0))
    safe = tl.where(new == float("-inf"), 0.0, new)
    x = (z - safe[None, :, None]) * factor
    e = tl.exp2(x)
    shift = tl.where(m == float("-inf"), LOWEST, tl.maximum((m - safe) * factor, LOWEST))
    decay = tl.exp2(shift)
    if ENTROPY:
        dot = decay * (dot + l * shift) + tl.sum(tl.sum(e * tl.maximum(x, LOWEST), axis=2), axis=0)
    l = l * decay + tl.sum(tl.sum(e, axis=2), axis=0)
    return new, l, dot


@triton.jit(do_not_specialize=[name for name in _CHANGING if name not in ("T", "dshift")])
def label_forward_kernel(
    logits, labels, logprobs, tops, log_sums, entropies, n1, n2, shift, s0, s1, s2, sv, l0, l1, l2, V, scale,
    ignore_index, HAS_IGNORE: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr, U: tl.constexpr,
    LANES: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One row's log-probability.

    Args:
        logits: any dtype; entry (a, b, t, v) at a s0 + b s1 + t s2 + v sv, with ALIGN `shift` further.
        labels: integers; (a, b, t) at a l0 + b l1 + t l2.
        logprobs, tops, log_sums, entropies: [rows] fp32, rows counted (a, b, t) with n1 of b and n2 of t; all but the
            first may be None.
        ignore_index: rows with this label get 0 and are not read (HAS_IGNORE).
        WIDE: whether offsets within a row need 64 bits.
        ALIGN: whether to look for each row's first aligned entry; `logits` is aligned, and sv = 1.
        U, LANES, VEC: vectors per lane and step, lanes (at least 2 VEC), entries per vector.
    """
    ENTROPY: tl.constexpr = entropies is not None
    TILE: tl.constexpr = U * LANES * VEC
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
            if ENTROPY:
                tl.store(entropies + row, 0.0)
            return
    offset = a * s0 + b * s1 + t * s2
    if ALIGN:
        offset += shift
    base = logits + offset
    # A label out of range costs its own row only: NaN.
    inside = (label >= 0) & (label < V)
    own = tl.load(base + label * sv, mask=inside, other=float("nan")).to(tl.float32)
    own = tl.where(own == float("inf"), float("nan"), own)
    factor = scale * LOG2E
    label = label.to(tl.int32)
    m = tl.full((LANES,), float("-inf"), tl.float32)
    l = tl.full((LANES,), 0.0, tl.float32)
    dot = tl.full((LANES,), 0.0, tl.float32)
    end = V
    if ALIGN:
        head = head_(offset, V, VEC)
        end = (V - head) // VEC * VEC
        i = tl.arange(0, LANES)
        i = tl.where(i < head, i, i + end)
        m = tl.load(base + i, mask=i < V, other=float("-inf")).to(tl.float32)
        m = tl.where(i == label, float("-inf"), m)
        # 1, but NaN for inf and NaN.
        l = tl.where(m == float("-inf"), 0.0, 1.0 + (m - m))
        base = logits + tl.multiple_of(offset + head, VEC)
        label -= head
        end = tl.multiple_of(end, VEC)
    columns = (tl.arange(0, U) * (LANES * VEC))[:, None] + tl.arange(0, LANES * VEC)[None, :]
    for start in range(0, end, TILE):
        at = start + columns
        z = tl.load(
            base + offset_(at, sv, WIDE), mask=at < end, other=float("-inf"), eviction_policy="evict_first"
        ).to(tl.float32)  # fmt: skip
        if (label >= start) & (label < start + TILE):
            z = tl.where(at == label, float("-inf"), z)
        m, l, dot = take_in_(m, l, dot, z, factor, U, LANES, VEC, ENTROPY)
    lane_m = m
    m = tl.max(lane_m, axis=0)
    safe = tl.where(m == float("-inf"), 0.0, m)
    lane_down = tl.where(lane_m == float("-inf"), LOWEST, tl.maximum((lane_m - safe) * factor, LOWEST))
    if ENTROPY:
        dot = tl.sum((dot + l * lane_down) * tl.exp2(lane_down), axis=0)
    l = tl.sum(l * tl.exp2(lane_down), axis=0)
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
        if ENTROPY:
            dots = dot * (1.0 / LOG2E) * tl.exp(down) + l * down + own_exp * own_down
            tl.store(entropies + row, log_sum - dots / total)


@triton.jit
def slope_(z, top, log_sum, factor, down, bend, entropy, ENTROPY: tl.constexpr):
    """Gradients of logits other than the label's; `down` is -s g, log_sum to base 2."""
    logp = (z - top) * factor - log_sum
    if ENTROPY:
        down = down - bend * (tl.maximum(logp * (1.0 / LOG2E), LOWEST) + entropy)
    return tl.exp2(logp) * down


@triton.jit(do_not_specialize=_CHANGING)
def label_backward_kernel(
    logits, labels, dlogits, logprobs, tops, log_sums, entropies, g, h, n1, n2, T, shift, s0, s1, s2, sv, l0, l1, l2,
    dshift, d0, d1, d2, dv, V, scale, ignore_index, HAS_IGNORE: tl.constexpr, WIDE: tl.constexpr, ALIGN: tl.constexpr,
    SAME: tl.constexpr, BLOCK: tl.constexpr, VEC: tl.constexpr,
):  # fmt: skip
    """One row's gradient; `dlogits` may be `logits`.

    Args: as `label_forward_kernel`, and
        dlogits: as logits, at a d0 + b d1 + t d2 + v dv, with ALIGN `dshift` further.
        g, h: [rows] fp32; h and entropies may be None.
        T: positions that the logits have; t from n2 on belongs to no label and gets 0.
        SAME: whether rows of `dlogits` lie as rows of `logits` do to the aligned addresses (with ALIGN).
    """
    ENTROPY: tl.constexpr = h is not None
    row = tl.program_id(0).to(tl.int64)
    t = row % T
    b = row // T % n1
    a = row // T // n1
    # Rows that get 0 go the same way, without a look at their logits.
    live = t < n2
    label = tl.load(labels + (a * l0 + b * l1 + t * l2), mask=live, other=0).to(tl.int64)
    if HAS_IGNORE:
        live = live & (label != ignore_index)
    label = label.to(tl.int32)
    row = (row // T) * n2 + t
    top = tl.load(tops + row, mask=live, other=0.0)
    log_sum = tl.load(log_sums + row, mask=live, other=0.0) * LOG2E
    logprob = tl.load(logprobs + row, mask=live, other=0.0)
    weight = tl.load(g + row, mask=live, other=0.0) * scale
    own = weight * minus_expm1_(logprob)
    bend = 0.0
    entropy = 0.0
    if ENTROPY:
        bend = tl.load(h + row, mask=live, other=0.0) * scale
        entropy = tl.load(entropies + row, mask=live, other=0.0)
        own -= bend * tl.exp(logprob) * (tl.maximum(logprob, LOWEST) + entropy)
    down = 0.0 - weight
    factor = scale * LOG2E
    offset = a * s0 + b * s1 + t * s2
    out_offset = a * d0 + b * d1 + t * d2
    if ALIGN:
        offset += shift
        out_offset += dshift
    base = logits + offset
    out = dlogits + out_offset
    end = V
    if ALIGN:
        head = head_(offset, V, VEC)
        end = (V - head) // VEC * VEC
        i = tl.arange(0, 2 * VEC)
        i = tl.where(i < head, i, i + end)
        z = tl.load(base + i, mask=i < tl.where(live, V, 0), other=0.0).to(tl.float32)
        dz = slope_(z, top, log_sum, factor, down, bend, entropy, ENTROPY)
        dz = tl.where(i == label, own, dz)
        tl.store(out + i, dz.to(dlogits.dtype.element_ty), mask=i < V)
        base = logits + tl.multiple_of(offset + head, VEC)
        out_offset += head
        if SAME:
            out_offset = tl.multiple_of(out_offset, VEC)
        out = dlogits + out_offset
        label -= head
        end = tl.multiple_of(end, VEC)
    # Of rows that get 0 nothing is read. (A mask with "& live" has the wrong type in the interpreter of Triton 3.9.)
    seen = tl.where(live, end, 0)
    if ALIGN:
        seen = tl.multiple_of(seen, VEC)
    columns = tl.arange(0, BLOCK)
    # Loads run ahead of the stores, also in place: every entry is read once, before it is written.
    for start in tl.range(0, end, BLOCK, num_stages=3):
        at = start + columns
        w = tl.load(
            base + offset_(at, sv, WIDE), mask=at < seen, other=0.0, eviction_policy="evict_first"
        ).to(tl.float32)  # fmt: skip
        dw = slope_(w, top, log_sum, factor, down, bend, entropy, ENTROPY)
        if (label >= start) & (label < start + BLOCK):
            dw = tl.where(at == label, own, dw)
        tl.store(out + offset_(at, dv, WIDE), dw.to(dlogits.dtype.element_ty), mask=at < end)
