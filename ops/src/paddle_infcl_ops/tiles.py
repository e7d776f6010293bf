# SPDX-License-Identifier: Apache-2.0
"""The tile kernel: similarities of rows x columns, masked in registers, and what is made of them.

    s_ij = <left_i, right_j>          z_ij = scale * s_ij (+ hardness bonus),   -inf where own or dropped

`similarity_kernel` computes one tile [BM, BN] of s at a time and ends it in one of three ways (`MODE`):

* LSE: the largest z and the sum of exp(z - largest) of every row of the tile. Nothing of size rows x N is stored.
* EXP: E_ij = exp(min(z_ij - reference_i, 60)) in the inputs' dtype, 0 at own and dropped entries, and each row's sum
  and largest z. The reference is a guess, so a row can come out too large or too small; see rows.py.
* PROB: P_ij = factor_i * exp(z_ij - reference_i), 0 at own and dropped entries.

Exponents are to base 2 inside: z here is log2(e) times the z above, and so are `reference` and the stored maxima.
Every dimension is masked; addresses are 64 bits wide. With `TMA` the operands are tensor descriptors, which fill with
zeros outside; without, pointers with row strides.
"""

import triton
import triton.language as tl

LSE = 0
EXP = 1
PROB = 2

_LSE = tl.constexpr(LSE)
_EXP = tl.constexpr(EXP)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# exp(60) is 1e26: sums of a million of them stay far inside fp32, and so do products with rows of long vectors.
LARGEST_EXPONENT = tl.constexpr(60 * 1.4426950408889634)
# Thresholds are compared with 8 eps of fp32 of slack: without it exact duplicates are dropped at random, by rounding.
SLACK = tl.constexpr(8 * 2.0**-23)
# Stands for "no id" on the rows' side when ids are compared by their low words; a hit by chance costs time only.
NO_ID = tl.constexpr(-1640531527)

OWNER_NONE, OWNER_ONLY, OWNER_EXCLUDE = 0, 1, 2
HARDNESS_NONE, HARDNESS_OWN, HARDNESS_OTHERS, HARDNESS_ALL = 0, 1, 2, 3
_NONE = tl.constexpr(OWNER_NONE)
_ONLY = tl.constexpr(OWNER_ONLY)
_EXCLUDE = tl.constexpr(OWNER_EXCLUDE)
_OWN = tl.constexpr(HARDNESS_OWN)
_OTHERS = tl.constexpr(HARDNESS_OTHERS)
_ALL = tl.constexpr(HARDNESS_ALL)


@triton.jit
def scalar(x):
    """A number, or the number that a pointer points to."""
    if x.dtype.is_ptr():
        value = tl.load(x).to(tl.float32)
    else:
        value = x
    return value


@triton.jit
def load_tile(
    source, row, col, rows, cols, stride, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr
):
    """source[row : row + R, col : col + C], zeros outside of rows x cols."""
    if TMA:
        tile = source.load([row, col])
    else:
        i = row + tl.arange(0, R)
        j = col + tl.arange(0, C)
        inside = (i < rows)[:, None] & (j < cols)[None, :]
        tile = tl.load(source + i.to(tl.int64)[:, None] * stride + j[None, :], mask=inside, other=0.0)
    if UPCAST:  # the interpreter computes bf16 wrongly
        tile = tile.to(tl.float32)
    return tile


@triton.jit
def tile_at(t, num_m, num_n, GROUP: tl.constexpr):
    """The t-th tile of a num_m x num_n grid: GROUP rows of tiles at a time, so that operands stay in the L2 cache."""
    group = t // (GROUP * num_n)
    first = group * GROUP
    size = tl.minimum(num_m - first, GROUP)
    rest = t - group * GROUP * num_n
    return first + rest % size, rest // size


@triton.jit
def dot_tile(
    left, right, m0, n0, rows, N, D, left_stride, right_stride,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr, UPCAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """[BM, BN] fp32: left[m0:] @ right[n0:]^T."""
    acc = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(0, D, BK):
        a = load_tile(left, m0, k, rows, D, left_stride, BM, BK, TMA, UPCAST)
        b = load_tile(right, n0, k, N, D, right_stride, BN, BK, TMA, UPCAST)
        acc = tl.dot(a, tl.trans(b), acc, input_precision=PRECISION)
    return acc


@triton.jit
def halves(x, R: tl.constexpr, C: tl.constexpr):
    """The left and the right half of the columns of x [R, C]."""
    return tl.split(tl.permute(tl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@triton.jit
def pack(mask, R: tl.constexpr, C: tl.constexpr):
    """[R, C // 32] int32: a mask [R, C], one bit per entry."""
    bits = tl.reshape(mask.to(tl.int32), (R, C // 32, 32)) << tl.arange(0, 32)[None, None, :]
    return tl.sum(bits, axis=2)


@triton.jit
def drop_packed(z, words, R: tl.constexpr, C: tl.constexpr):
    """z with -inf where a bit is set."""
    column = tl.arange(0, C)
    for w in tl.static_range(C // 32):
        word = tl.sum(tl.where((tl.arange(0, C // 32) == w)[None, :], words, 0), axis=1)
        bit = (word[:, None] >> (column & 31)[None, :]) & 1
        z = tl.where(((column >> 5) == w)[None, :] & (bit != 0), float("-inf"), z)
    return z


@triton.jit
def drop_same_id(z, row_ids, column_ids, m0, n0, rows, N, IDS: tl.constexpr, R: tl.constexpr, C: tl.constexpr):
    """z with -inf where any of the IDS ids of row and column agree; negative ids match nothing.

    Seldom needed, so it must not cost others registers: 32 columns at a time become one bit each.
    """
    column = tl.arange(0, C)
    i = m0 + tl.arange(0, R)
    for w in tl.range(0, C // 32, num_stages=1):
        j = n0 + w * 32 + tl.arange(0, 32)
        same = tl.zeros((R, 32), dtype=tl.int32)  # the interpreter of Triton 3.3 has no int1
        for k in tl.static_range(IDS):
            r = tl.load(row_ids + i.to(tl.int64) * IDS + k, mask=i < rows, other=-1)
            c = tl.load(column_ids + j.to(tl.int64) * IDS + k, mask=j < N, other=-1)
            same = same | ((tl.where(r < 0, -2, r)[:, None] == c[None, :]) & (c >= 0)[None, :]).to(tl.int32)
        word = tl.sum(same << tl.arange(0, 32)[None, :], axis=1)
        bit = (word[:, None] >> (column & 31)[None, :]) & 1
        z = tl.where(((column >> 5) == w)[None, :] & (bit != 0), float("-inf"), z)
    return z


@triton.jit
def _write(out, x, row, col, rows, cols, stride, R: tl.constexpr, C: tl.constexpr, TMA: tl.constexpr,
           ADD: tl.constexpr):  # fmt: skip
    if TMA:
        if ADD:
            out.atomic_add([row, col], x.to(out.dtype))
        else:
            out.store([row, col], x.to(out.dtype))
    else:
        i = row + tl.arange(0, R)
        j = col + tl.arange(0, C)
        inside = (i < rows)[:, None] & (j < cols)[None, :]
        at = out + i.to(tl.int64)[:, None] * stride + j[None, :]
        if ADD:
            x = tl.load(at, mask=inside, other=0.0) + x
        tl.store(at, x.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _write_parts(out, x, row, col, rows, cols, stride, R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
                 TMA: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    if PARTS == 1:
        _write(out, x, row, col, rows, cols, stride, R, C, TMA, ADD)
    else:
        a, b = halves(x, R, C)
        _write(out, a, row, col, rows, cols, stride, R, C // 2, TMA, ADD)
        _write(out, b, row, col + C // 2, rows, cols, stride, R, C // 2, TMA, ADD)


@triton.jit
def write_tile(out, x, row, col, rows, cols, stride, R: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr,
               TMA: tl.constexpr, ADD: tl.constexpr):  # fmt: skip
    """out[row : row + R, col : col + C] = x, cast, or += x with ADD.

    Every entry belongs to one program, so the order of additions is fixed. PARTS (1, 2, 4) bounds the shared memory
    that this takes; Triton 3.3 and 3.4 can't compile a function that calls itself.
    """
    if PARTS < 4:
        _write_parts(out, x, row, col, rows, cols, stride, R, C, PARTS, TMA, ADD)
    else:
        a, b = halves(x, R, C)
        _write_parts(out, a, row, col, rows, cols, stride, R, C // 2, 2, TMA, ADD)
        _write_parts(out, b, row, col + C // 2, rows, cols, stride, R, C // 2, 2, TMA, ADD)


@triton.jit
def match_kernel(
    row_ids, column_ids, hits, rows, N, IDS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr
):  # fmt: skip
    """hits[m, n] = whether tile (m, n) may hold a row and a column with an id in common, by the ids' low words.

    Almost always no. In a kernel of its own, since the tile kernel has no registers left for it.
    """
    num_n = tl.cdiv(N, BN)
    pid_m = tl.program_id(0) // num_n
    pid_n = tl.program_id(0) % num_n
    i = pid_m * BM + tl.arange(0, BM)
    j = pid_n * BN + tl.arange(0, BN)
    hit = tl.zeros((BM, BN), dtype=tl.int32)
    for k in tl.static_range(IDS):
        r = tl.load(row_ids + i.to(tl.int64) * IDS + k, mask=i < rows, other=-1)
        c = tl.load(column_ids + j.to(tl.int64) * IDS + k, mask=j < N, other=-1).to(tl.int32)
        r32 = tl.where(r < 0, NO_ID, r.to(tl.int32))
        hit = hit | (r32[:, None] == c[None, :]).to(tl.int32)
    tl.store(hits + tl.program_id(0), tl.max(tl.max(hit, axis=1), axis=0))


# Numbers and pointers that change from chunk to chunk, or with an uneven last batch, must not compile anew.
_CHANGING = ["rows", "row_offset", "column_offset", "part_stride", "strength"]
_VECTORS = [
    "reference", "factor", "own", "self_column", "row_ids", "column_ids", "owner", "limit", "threshold", "flags",
]  # fmt: skip


@triton.jit(do_not_specialize=_CHANGING, do_not_specialize_on_alignment=_VECTORS)
def similarity_kernel(
    left, right, out, scale, reference, factor, own, self_column, row_ids, column_ids, hits, owner, limit,
    guide_left, guide_right, threshold, strength, flags, part_sum, part_max,
    rows, N, column_offset, D, DG, row_offset, left_stride, right_stride, out_stride, guide_left_stride,
    guide_right_stride, part_stride,
    MODE: tl.constexpr, TMA: tl.constexpr, OUT_TMA: tl.constexpr, GUIDE_TMA: tl.constexpr,
    IDS: tl.constexpr, OWNER_RULE: tl.constexpr, KEEP_OWN: tl.constexpr, HARDNESS: tl.constexpr,
    EVEN_N: tl.constexpr, FLAG_ROWS: tl.constexpr, FLAG_BLOCK: tl.constexpr, PARTS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, FLATTEN: tl.constexpr,
    PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    """See the module. All arguments from `own` to `part_max` may be None.

    Args:
        left: [rows, D]; right: [N, D]; out: [rows, N]: pointers or descriptors.
        scale: number or pointer, 1/T.
        reference, factor: [rows] fp32, see above.
        own, self_column: [rows] int64; columns count from column_offset.
        row_ids: [rows, IDS], column_ids: [N, IDS] int64; hits: from `match_kernel` for the same tiles.
        owner: [N] int64, compared with row_offset + i.
        limit: [rows] fp32, against s.
        guide_left: [rows, DG], guide_right: [N, DG], threshold: [rows] fp32.
        flags: [ceil(rows / FLAG_ROWS)] int32: only tiles with a flagged row are computed.
        part_sum, part_max: [ceil(N / BN), part_stride] fp32.
    """
    num_m = tl.cdiv(rows, BM)
    num_n = tl.cdiv(N, BN)
    total = num_m * num_n
    if flags is not None:  # almost always none is set: look at all of them once, not at some for every tile
        any_flag = tl.zeros((FLAG_BLOCK,), dtype=tl.int32)
        for f0 in range(0, tl.cdiv(rows, FLAG_ROWS), FLAG_BLOCK):
            f = f0 + tl.arange(0, FLAG_BLOCK)
            any_flag = any_flag | tl.load(flags + f, mask=f * FLAG_ROWS < rows, other=0)
        total = tl.where(tl.max(any_flag, axis=0) > 0, total, 0)
    for t in tl.range(tl.program_id(0), total, tl.num_programs(0), flatten=FLATTEN):
        pid_m, pid_n = tile_at(t, num_m, num_n, GROUP)
        m0 = pid_m * BM
        n0 = pid_n * BN
        wanted = True
        if flags is not None:
            f = pid_m * (BM // FLAG_ROWS) + tl.arange(0, BM // FLAG_ROWS)
            wanted = tl.max(tl.load(flags + f, mask=f * FLAG_ROWS < rows, other=0), axis=0) > 0
        if wanted:
            i = m0 + tl.arange(0, BM)
            j = n0 + tl.arange(0, BN)

            # Own and self columns, equal ids, the right edge: few tiles have any, so the others skip the comparison.
            column = tl.arange(0, BN)
            edge = False
            own_here = tl.full((BM,), -1, dtype=tl.int32)
            self_here = own_here
            if own is not None:
                at = tl.load(own + i, mask=i < rows, other=-1) - column_offset - n0
                own_here = tl.where((at >= 0) & (at < BN), at, -1).to(tl.int32)
                edge = edge | (tl.max(own_here, axis=0) >= 0)
            if self_column is not None:
                at = tl.load(self_column + i, mask=i < rows, other=-1) - column_offset - n0
                self_here = tl.where((at >= 0) & (at < BN), at, -1).to(tl.int32)
                edge = edge | (tl.max(self_here, axis=0) >= 0)
            if not EVEN_N:
                edge = edge | (n0 + BN > N)
            # The guide first: its verdict is kept as one bit per entry and takes few registers from what follows.
            if guide_left is not None:
                seen = dot_tile(
                    guide_left, guide_right, m0, n0, rows, N, DG, guide_left_stride, guide_right_stride,
                    BM, BN, BK, GUIDE_TMA, UPCAST, PRECISION,
                )  # fmt: skip
                theta = tl.load(threshold + i, mask=i < rows, other=0.0)
                false_negative = seen > (theta + SLACK)[:, None]
                if KEEP_OWN:
                    belongs = tl.load(owner + j, mask=j < N, other=-1).to(tl.int32)
                    false_negative = false_negative & (belongs[None, :] != (row_offset + i)[:, None])
                false_negatives = pack(false_negative, BM, BN)

            s = dot_tile(
                left, right, m0, n0, rows, N, D, left_stride, right_stride, BM, BN, BK, TMA, UPCAST, PRECISION
            )
            z = s * (scalar(scale) * LOG2E)

            BY_OWNER: tl.constexpr = HARDNESS == _OWN or HARDNESS == _OTHERS
            if OWNER_RULE != _NONE or BY_OWNER:
                belongs = tl.load(owner + j, mask=j < N, other=-1).to(tl.int32)
            if OWNER_RULE == _ONLY or BY_OWNER:
                mine = belongs[None, :] == (row_offset + i)[:, None]
            if HARDNESS == _ALL:
                z += s * (strength * LOG2E)
            elif HARDNESS == _OWN:
                z += tl.where(mine, s * (strength * LOG2E), 0.0)
            elif HARDNESS == _OTHERS:
                z += tl.where(mine, 0.0, s * (strength * LOG2E))
            if limit is not None:
                largest = tl.load(limit + i, mask=i < rows, other=0.0)
                z = tl.where(s > (largest + SLACK)[:, None], float("-inf"), z)
            if OWNER_RULE == _ONLY:
                z = tl.where(mine | (belongs < 0)[None, :], z, float("-inf"))
            elif OWNER_RULE == _EXCLUDE:
                # Few tiles have columns that belong to one of their rows; the others skip the comparison.
                first = row_offset + m0
                if tl.max(((belongs >= first) & (belongs < first + BM)).to(tl.int32), axis=0) > 0:
                    z = tl.where(belongs[None, :] == (row_offset + i)[:, None], float("-inf"), z)
            if guide_left is not None:
                z = drop_packed(z, false_negatives, BM, BN)
            if IDS > 0:
                if tl.load(hits + pid_m * num_n + pid_n) > 0:
                    z = drop_same_id(z, row_ids, column_ids, m0, n0, rows, N, IDS, BM, BN)

            if edge:
                out_of_sum = (column[None, :] == own_here[:, None]) | (column[None, :] == self_here[:, None])
                z = tl.where(out_of_sum | (j >= N)[None, :], float("-inf"), z)

            part = pid_n.to(tl.int64) * part_stride + i
            if MODE == _LSE:
                top = tl.max(z, axis=1)
                row_sum = tl.sum(tl.exp2(z - tl.where(top == float("-inf"), 0.0, top)[:, None]), axis=1)
                tl.store(part_max + part, top, mask=i < rows)
                tl.store(part_sum + part, row_sum, mask=i < rows)
            else:
                ref = tl.load(reference + i, mask=i < rows, other=float("inf"))
                if MODE == _EXP:
                    tl.store(part_max + part, tl.max(z, axis=1), mask=i < rows)
                    e = tl.exp2(tl.minimum(z - ref[:, None], LARGEST_EXPONENT, propagate_nan=tl.PropagateNan.ALL))
                    tl.store(part_sum + part, tl.sum(e, axis=1), mask=i < rows)
                else:
                    e = tl.exp2(z - ref[:, None]) * tl.load(factor + i, mask=i < rows, other=0.0)[:, None]
                write_tile(out, e, m0, n0, rows, N, out_stride, BM, BN, PARTS, OUT_TMA, False)
