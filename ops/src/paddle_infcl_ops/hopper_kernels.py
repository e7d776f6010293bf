# SPDX-License-Identifier: Apache-2.0
"""Two kernels for sm_90 whose warps are scheduled by hand: one loads, two warpgroups multiply and end their tiles.

    exp_kernel      E = exp2(scale * A @ B^T - reference), row sums and maxima        A [M, K], B [N, K]
    matmul_kernel   out (+)= alpha * A @ B or A^T @ B in fp32                         A [M, K] or [K, M], B [K, N]

They are `similarity_kernel` (EXP, own column only) and `product_kernel` for operands that come through tensor
descriptors; hopper.py says when they are taken. Triton schedules those two by itself: all warps multiply, then
all end the tile, and meanwhile the tensor cores wait. Here each warpgroup owns a tile of its own and multiplies while
the other one ends its tile; `turn` passes the tensor cores on.

Written in Gluon, with names as in CUDA: `ready` and `empty` are barriers per stage of the ring of operands.
"""

import triton.language as tl
from triton._C.libtriton import gluon_ir, ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .tiles import LARGEST_EXPONENT as _LARGEST
from .tiles import LOG2E as _LOG2E

LARGEST_EXPONENT = gl.constexpr(_LARGEST.value)
LOG2E = gl.constexpr(_LOG2E.value)
NAN_STAYS = gl.constexpr(tl.PropagateNan.ALL)

if not hasattr(gluon_ir.GluonOpBuilder, "create_async_tma_reduce"):
    raise ImportError("this Triton cannot add to memory in the copy engine")


@builtin
def add_to_global(descriptor, coordinates, source, _semantic=None):
    """Adds a tile in shared memory to global memory, in the copy engine.

    Triton 3.6 can build the instruction (cp.reduce.async.bulk.tensor), but Gluon has no name for it. So this is the
    body of Gluon's `tma.async_copy_shared_to_global` around another call of the builder.
    """
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    kind = ir.DESCRIPTOR_REDUCE_KIND.ADD
    _semantic.builder.create_async_tma_reduce(kind, descriptor.handle, coordinates, source.handle)


@gluon.jit
def scalar(x):
    """A number, or the number that a pointer points to."""
    if x.dtype.is_ptr():
        value = gl.load(x).to(gl.float32)
    else:
        value = x
    return value


@gluon.jit
def tile_at(t, num_m, num_n, GROUP: gl.constexpr):
    """The t-th tile of a num_m x num_n grid: GROUP rows of tiles at a time, so that operands stay in the L2 cache."""
    group = t // (GROUP * num_n)
    first = group * GROUP
    size = gl.minimum(num_m - first, GROUP)
    rest = t - group * GROUP * num_n
    return first + rest % size, rest // size


@gluon.jit
def halves(x):
    """The left and the right half of the columns of x."""
    R: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    return gl.split(gl.permute(gl.reshape(x, (R, 2, C // 2)), (0, 2, 1)))


@gluon.jit
def barriers(N: gl.constexpr, COUNT: gl.constexpr):
    """N barriers, each of which completes after COUNT arrivals."""
    bars = gl.allocate_shared_memory(gl.int64, [N, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(N):
        mbarrier.init(bars.index(i), count=COUNT)
    return bars


@gluon.jit
def load_step(a_desc, b_desc, a_bufs, b_bufs, ready, empty, g, at_a, at_b, S: gl.constexpr):
    """Fills slot g % S of the ring once it is free; g: steps before."""
    slot = g % S
    mbarrier.wait(empty.index(slot), ((g // S) & 1) ^ 1)
    bar = ready.index(slot)
    A: gl.constexpr = a_desc.block_type.nbytes
    B: gl.constexpr = b_desc.block_type.nbytes
    mbarrier.expect(bar, A + B)  # zeros outside of the operands count
    tma.async_copy_global_to_shared(a_desc, at_a, bar, a_bufs.index(slot))
    tma.async_copy_global_to_shared(b_desc, at_b, bar, b_bufs.index(slot))


@gluon.jit
def load_tiles(
    a_desc, b_desc, a_bufs, b_bufs, ready, empty, num_m, num_n, nk, start, step,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A warp that loads: the operands of every `step`-th tile from `start` on, step by step."""
    g = 0
    for t in range(start, num_m * num_n, step):
        pid_m, pid_n = tile_at(t, num_m, num_n, GROUP)
        for k in range(nk):
            load_step(
                a_desc, b_desc, a_bufs, b_bufs, ready, empty, g, [pid_m * BM, k * BK], [pid_n * BN, k * BK], S
            )  # fmt: skip
            g += 1


@gluon.jit
def multiply(
    a_bufs, b_bufs, ready, empty, turn, g, nk, n_turn, WG: gl.constexpr, TRANS_A: gl.constexpr, TRANS_B: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, S: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """The sums of one tile.

    Args:
        g: steps of the ring before this tile.
        n_turn: tiles of this warpgroup before this one.
    """
    acc = gl.zeros((BM, BN), gl.float32, layout)
    mbarrier.wait(turn.index(WG), (n_turn & 1) ^ (1 - WG))  # the first turn is warpgroup 0's
    for k in range(nk):
        slot = g % S
        mbarrier.wait(ready.index(slot), (g // S) & 1)
        a = a_bufs.index(slot)
        b = b_bufs.index(slot)
        if TRANS_A:
            a = a.permute((1, 0))
        if TRANS_B:
            b = b.permute((1, 0))
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before is done with its slot
        mbarrier.arrive(empty.index((g + S - 1) % S), count=1, pred=k > 0)
        g += 1
    mbarrier.arrive(turn.index(1 - WG), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((g + S - 1) % S), count=1)
    return acc


@gluon.jit
def end_exp(acc, e_desc, stage, scale, reference, own, edge, m0, n0, N, sums, tops):
    """Ends the columns from n0 on of a tile; returns `sums` and `tops` (less the reference) with theirs."""
    layout: gl.constexpr = acc.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    C: gl.constexpr = acc.shape[1]
    z = acc * scale - gl.convert_layout(reference, rows)[:, None]
    if edge:
        column = n0 + gl.arange(0, C, gl.SliceLayout(0, layout))
        outside = (column[None, :] == gl.convert_layout(own, rows)[:, None]) | (column >= N)[None, :]
        z = gl.where(outside, float("-inf"), z)
    tops = gl.maximum(tops, gl.convert_layout(gl.max(z, axis=1), tops.type.layout))
    e = gl.exp2(gl.minimum(z, LARGEST_EXPONENT, propagate_nan=NAN_STAYS))
    sums += gl.convert_layout(gl.sum(e, axis=1), sums.type.layout)
    tma.store_wait(0)
    stage.store(e.to(gl.bfloat16))
    fence_async_shared()
    tma.async_copy_shared_to_global(e_desc, [m0, n0], stage)
    return sums, tops


@gluon.jit
def exp_tiles(
    e_desc, scale, reference, own, part_sum, part_max, part_stride, stage, a_bufs, b_bufs, ready, empty, turn,
    M, N, num_m, num_n, nk, WG: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, S: gl.constexpr,
    GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One warpgroup of `exp_kernel`: every other tile of the program."""
    start = gl.program_id(0) + WG * gl.num_programs(0)
    step = 2 * gl.num_programs(0)
    g = WG * nk
    n_turn = 0
    for t in range(start, num_m * num_n, step):
        pid_m, pid_n = tile_at(t, num_m, num_n, GROUP)
        m0 = pid_m * BM
        n0 = pid_n * BN
        # Loaded before the sums are there, used after.
        i = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
        ref = gl.load(reference + i, mask=i < M, other=float("inf"))
        at = gl.full((BM,), -1, gl.int32, gl.SliceLayout(1, layout))
        if own is not None:
            at = gl.load(own + i, mask=i < M, other=-1).to(gl.int32)
        acc = multiply(a_bufs, b_bufs, ready, empty, turn, g, nk, n_turn, WG, False, True, BM, BN, S, layout)
        g += 2 * nk
        n_turn += 1
        # Few tiles have an own column or the right edge, so the others skip the comparison.
        edge = n0 + BN > N
        if own is not None:
            edge = edge | (gl.max(((at >= n0) & (at < n0 + BN)).to(gl.int32), axis=0) > 0)
        x, y = halves(acc)
        sums = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, layout))
        tops = gl.full((BM,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
        sums, tops = end_exp(x, e_desc, stage, scale, ref, at, edge, m0, n0, N, sums, tops)
        sums, tops = end_exp(y, e_desc, stage, scale, ref, at, edge, m0, n0 + BN // 2, N, sums, tops)
        part = pid_n.to(gl.int64) * part_stride + i
        gl.store(part_sum + part, sums, mask=i < M)
        gl.store(part_max + part, tops + ref, mask=i < M)
    tma.store_wait(0)


# Counts differ from loss to loss and from chunk to chunk, and rows may start anywhere: neither must compile anew.
@gluon.jit(
    do_not_specialize=["M", "N", "K", "part_stride"],
    do_not_specialize_on_alignment=["reference", "own", "part_sum", "part_max"],
)
def exp_kernel(
    a_desc, b_desc, e_desc, scale, reference, own, part_sum, part_max, M, N, K, part_stride,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """See the module, and `similarity_kernel` for the numbers.

    Args:
        a_desc: [M, K]; b_desc: [N, K]; e_desc: [M, N].
        scale: number or pointer, 1/T.
        reference: [M] fp32; own: [M] int64, or None where every entry counts.
        part_sum, part_max: [ceil(N / BN), part_stride] fp32.
        S: stages of the ring.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], b_desc.layout)
    stages = gl.allocate_shared_memory(gl.bfloat16, [2, BM, BN // 2], e_desc.layout)
    ready = barriers(S, 1)
    empty = barriers(S, 1)
    turn = barriers(2, 1)
    num_m = gl.cdiv(M, BM)
    num_n = gl.cdiv(N, BN)
    nk = gl.cdiv(K, BK)
    factor = scalar(scale) * LOG2E
    gl.warp_specialize([
        (exp_tiles, (e_desc, factor, reference, own, part_sum, part_max, part_stride, stages.index(0), a_bufs, b_bufs,
                     ready, empty, turn, M, N, num_m, num_n, nk, 0, BM, BN, S, GROUP, layout)),
        (exp_tiles, (e_desc, factor, reference, own, part_sum, part_max, part_stride, stages.index(1), a_bufs, b_bufs,
                     ready, empty, turn, M, N, num_m, num_n, nk, 1, BM, BN, S, GROUP, layout)),
        (load_tiles, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, num_m, num_n, nk, gl.program_id(0),
                      gl.num_programs(0), BM, BN, BK, S, GROUP)),
    ], [4, 1], [240, 24])  # fmt: skip


@gluon.jit
def end_sum(acc, out_desc, stage, m0, n0, ACCUMULATE: gl.constexpr, PIECES: gl.constexpr):
    """Stores or adds the columns from n0 on of a tile, in PIECES."""
    if PIECES > 1:
        C: gl.constexpr = acc.shape[1]
        x, y = halves(acc)
        end_sum(x, out_desc, stage, m0, n0, ACCUMULATE, PIECES // 2)
        end_sum(y, out_desc, stage, m0, n0 + C // 2, ACCUMULATE, PIECES // 2)
    else:
        tma.store_wait(0)
        stage.store(acc)
        fence_async_shared()
        if ACCUMULATE:
            add_to_global(out_desc, [m0, n0], stage)
        else:
            tma.async_copy_shared_to_global(out_desc, [m0, n0], stage)


@gluon.jit
def range_of(t, tiles, steps, split_steps):
    """(first step, number of steps) along K of tile t; every split has as many `tiles`."""
    first = t // tiles * split_steps
    return first, gl.minimum(split_steps, steps - first)


@gluon.jit
def load_operands(
    a_desc, b_desc, a_bufs, b_bufs, ready, empty, a_rows, num_m, num_n, splits, steps, split_steps,
    TRANS_A: gl.constexpr, ENDS: gl.constexpr, MATRICES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The warp that loads for `matmul_kernel`."""
    g = 0
    tiles = num_m * num_n
    for t in range(gl.program_id(0), tiles * splits, gl.num_programs(0)):
        pid_m, pid_n = tile_at(t % tiles, num_m, num_n, GROUP)
        a0 = pid_n * 0
        for s in gl.static_range(MATRICES - 1):
            a0 += gl.where(pid_n * BN >= ENDS[s], a_rows, 0)
        first, nk = range_of(t, tiles, steps, split_steps)
        for k in range(first, first + nk):
            if TRANS_A:
                at_a = [a0 + k * BK, pid_m * BM]
            else:
                at_a = [a0 + pid_m * BM, k * BK]
            load_step(a_desc, b_desc, a_bufs, b_bufs, ready, empty, g, at_a, [k * BK, pid_n * BN], S)
            g += 1


@gluon.jit
def matmul_tiles(
    out_desc, factor, stage, a_bufs, b_bufs, ready, empty, turn, num_m, num_n, splits, steps, split_steps, split_rows,
    WG: gl.constexpr, TRANS_A: gl.constexpr, SCALED: gl.constexpr, ACCUMULATE: gl.constexpr, PIECES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One warpgroup of `matmul_kernel`."""
    step = gl.num_programs(0)
    start = gl.program_id(0)
    tiles = num_m * num_n
    g = WG * range_of(start, tiles, steps, split_steps)[1]  # the ring holds the tiles of both warpgroups in turn
    n_turn = 0
    for t in range(start + WG * step, tiles * splits, 2 * step):
        pid_m, pid_n = tile_at(t % tiles, num_m, num_n, GROUP)
        nk = range_of(t, tiles, steps, split_steps)[1]
        acc = multiply(a_bufs, b_bufs, ready, empty, turn, g, nk, n_turn, WG, TRANS_A, False, BM, BN, S, layout)
        g += nk + range_of(t + step, tiles, steps, split_steps)[1]
        n_turn += 1
        if SCALED:
            acc = acc * factor
        end_sum(acc, out_desc, stage, t // tiles * split_rows + pid_m * BM, pid_n * BN, ACCUMULATE, PIECES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["M", "N", "K", "a_rows", "splits", "split_steps", "split_rows"])
def matmul_kernel(
    a_desc, b_desc, out_desc, alpha, M, N, K, a_rows, splits, split_steps, split_rows, TRANS_A: gl.constexpr,
    ENDS: gl.constexpr, MATRICES: gl.constexpr, SCALED: gl.constexpr, ACCUMULATE: gl.constexpr, PIECES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """See the module. A program adds once to every entry of its tiles, so the order of a launch's sums is fixed.

    Args:
        a_desc: MATRICES matrices A, each [K, M] or [M, K] in the rows from a multiple of a_rows on; the n-th is the
            one for the columns from ENDS[n - 1] to ENDS[n] of B and out, multiples of BN.
        b_desc: [K, N]; out_desc: [splits * split_rows, N] fp32.
        alpha: number or pointer, of interest if SCALED.
        splits: ranges of split_steps steps along K, each of which has sums of its own.
        PIECES: in how many parts a tile leaves.
        S: stages of the ring.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    if TRANS_A:
        a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BK, BM], a_desc.layout)
    else:
        a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BK, BN], b_desc.layout)
    stages = gl.allocate_shared_memory(gl.float32, [2, BM, BN // PIECES], out_desc.layout)
    ready = barriers(S, 1)
    empty = barriers(S, 1)
    turn = barriers(2, 1)
    num_m = gl.cdiv(M, BM)
    num_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    factor = scalar(alpha)
    gl.warp_specialize([
        (matmul_tiles, (out_desc, factor, stages.index(0), a_bufs, b_bufs, ready, empty, turn, num_m, num_n, splits,
                        steps, split_steps, split_rows, 0, TRANS_A, SCALED, ACCUMULATE, PIECES, BM, BN, S,
                        GROUP, layout)),
        (matmul_tiles, (out_desc, factor, stages.index(1), a_bufs, b_bufs, ready, empty, turn, num_m, num_n, splits,
                        steps, split_steps, split_rows, 1, TRANS_A, SCALED, ACCUMULATE, PIECES, BM, BN, S,
                        GROUP, layout)),
        (load_operands, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, a_rows, num_m, num_n, splits, steps,
                         split_steps, TRANS_A, ENDS, MATRICES, BM, BN, BK, S, GROUP)),
    ], [4, 1], [240, 24])  # fmt: skip
