# SPDX-License-Identifier: Apache-2.0
"""The sweep of the Matryoshka loss for sm_90, scheduled by hand: every prefix's exponentials from one product.

It is `sweep_kernel` of prefix_kernels.py (with one column per row left out, and no other rule) for operands that come
through tensor descriptors; hopper.py says when it is taken. As in hopper_kernels.py each of two warpgroups owns a tile
and multiplies while the other one ends its own. But here a tile ends once per prefix, after products of different
lengths, so the two take no turns: each has a ring of operands of its own, filled by a warp of its own, and whichever
is at its products has the tensor cores.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .hopper_kernels import LOG2E, barriers, halves, load_tiles, scalar, tile_at


@gluon.jit
def ring(a_desc, b_desc, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr):
    """Buffers for S steps of both operands, and their barriers."""
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], b_desc.layout)
    return a_bufs, b_bufs, barriers(S, 1), barriers(S, 1)


@gluon.jit
def multiply_on(acc, a_bufs, b_bufs, ready, empty, g, steps, S: gl.constexpr):
    """Adds the next `steps` steps of the ring to a tile's sums; g: steps of the ring before."""
    for k in range(steps):
        slot = g % S
        mbarrier.wait(ready.index(slot), (g // S) & 1)
        acc = warpgroup_mma(a_bufs.index(slot), b_bufs.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before is done with its slot
        mbarrier.arrive(empty.index((g + S - 1) % S), count=1, pred=k > 0)
        g += 1
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((g + S - 1) % S), count=1)
    return acc, g


@gluon.jit
def within_threads(x, MAXIMUM: gl.constexpr):
    """Sums or maxima over the columns of x [BM, C] that a thread holds: [BM, 4], one per thread of a row."""
    BM: gl.constexpr = x.shape[0]
    C: gl.constexpr = x.shape[1]
    x = gl.reshape(x, (BM, C // 8, 4, 2))
    if MAXIMUM:
        x = gl.max(gl.max(x, axis=3), axis=1)
    else:
        x = gl.sum(gl.sum(x, axis=3), axis=1)
    return x


@gluon.jit
def end_prefix(acc, columns, stages, factor, ref, last, PIECES: gl.constexpr, PIECE: gl.constexpr):
    """Ends a tile at one prefix, in PIECES, and leaves E in shared memory; returns sums and maxima (less ref).

    Args:
        columns: [C] fp32 in shared memory, inverse lengths.
        stages: one per piece.
        factor, ref: of the rows.
        last: whether it is the widest prefix, whose E takes the columns' share of G.
    """
    C: gl.constexpr = acc.shape[1]
    if PIECES > 1:
        x, y = halves(acc)
        left, right = columns.slice(0, C // 2), columns.slice(C // 2, C // 2)
        sums, tops = end_prefix(x, left, stages, factor, ref, last, PIECES // 2, PIECE * 2)
        sums_y, tops_y = end_prefix(y, right, stages, factor, ref, last, PIECES // 2, PIECE * 2 + 1)
        sums += sums_y
        tops = gl.maximum(tops, tops_y)
    else:
        rows: gl.constexpr = gl.SliceLayout(1, acc.type.layout)
        r = columns.load(gl.SliceLayout(0, acc.type.layout))
        z = acc * gl.abs(r)[None, :]
        z = z * gl.convert_layout(factor, rows)[:, None] - gl.convert_layout(ref, rows)[:, None]
        tops = within_threads(z, True)
        e = gl.exp2(z)  # inf where the reference is far too low: such rows are repaired
        sums = within_threads(e, False)
        if last:
            e = e * gl.where(r < 0, 0.0, r)[None, :]
        stages.index(PIECE).store(e.to(gl.bfloat16))
    return sums, tops


@gluon.jit
def prefix_tiles(
    e_desc, scale, inverse_left, inverse_right, reference, own, part_sum, part_max, stages, columns, a_bufs, b_bufs,
    ready, empty, rows, N, out_rows, vector_stride, part_stride, part_tiles, num_m, num_n, start, step,
    DIMS: gl.constexpr, M: gl.constexpr, PIECES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr,
    S: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One warpgroup: every `step`-th tile from `start` on."""
    g = 0
    for t in range(start, num_m * num_n, step):
        pid_m, pid_n = tile_at(t, num_m, num_n, GROUP)
        m0 = pid_m * BM
        n0 = pid_n * BN
        i = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
        j = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
        jb = n0 + gl.arange(0, BN, gl.BlockedLayout([BN // 128], [32], [4], [0]))
        at = gl.full((BM,), -1, gl.int32, gl.SliceLayout(1, layout))
        edge = n0 + BN > N
        if own is not None:
            at = gl.load(own + i, mask=i < rows, other=-1).to(gl.int32)
            edge = edge | (gl.max(((at >= n0) & (at < n0 + BN)).to(gl.int32), axis=0) > 0)
        acc = gl.zeros((BM, BN), gl.float32, layout)
        # Entries that don't count start at -inf, which no product changes. Few tiles have any.
        if edge:
            acc = gl.where((j[None, :] == at[:, None]) | (j >= N)[None, :], float("-inf"), acc)
        r = gl.load(inverse_right + jb, mask=jb < N, other=1.0)
        # Not unrolled: the instructions of all ends together don't fit their cache.
        for s in range(M):
            # Loaded before the sums are there, used after; `r` a prefix ahead.
            f = gl.abs(gl.load(inverse_left + s * vector_stride + i, mask=i < rows, other=1.0)) * scale
            ref = gl.load(reference + s * vector_stride + i, mask=i < rows, other=float("inf"))
            columns.store(r)
            r = gl.load(inverse_right + gl.minimum(s + 1, M - 1) * N + jb, mask=jb < N, other=1.0)
            # Not carried from one prefix to the next: Triton 3.6 takes such a variable for a constant.
            first = pid_m * 0
            end = first + gl.cdiv(DIMS[0], BK)
            for n in gl.static_range(1, M):
                first = gl.where(s == n, DIMS[n - 1] // BK, first)
                end = gl.where(s == n, gl.cdiv(DIMS[n], BK), end)
            acc, g = multiply_on(acc, a_bufs, b_bufs, ready, empty, g, end - first, S)
            tma.store_wait(0)  # the prefix before has left
            sums, tops = end_prefix(acc, columns, stages, f, ref, s == M - 1, PIECES, 0)
            fence_async_shared()
            for piece in gl.static_range(PIECES):
                at_e = [s * out_rows + m0, n0 + piece * (BN // PIECES)]
                tma.async_copy_shared_to_global(e_desc, at_e, stages.index(piece))
            sums = gl.convert_layout(gl.sum(sums, axis=1), gl.SliceLayout(1, layout))
            tops = gl.convert_layout(gl.max(tops, axis=1), gl.SliceLayout(1, layout))
            part = (s * part_tiles + pid_n).to(gl.int64) * part_stride + i
            gl.store(part_sum + part, sums, mask=i < rows)
            gl.store(part_max + part, tops + ref, mask=i < rows)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["rows", "N", "out_rows", "vector_stride", "part_stride", "part_tiles"],
    do_not_specialize_on_alignment=["inverse_left", "reference", "own", "part_sum", "part_max"],
)
def prefix_kernel(
    a_desc, b_desc, e_desc, scale, inverse_left, inverse_right, reference, own, part_sum, part_max, rows, N, out_rows,
    vector_stride, part_stride, part_tiles, DIMS: gl.constexpr, M: gl.constexpr, PIECES: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """See the module, and `sweep_kernel` for the arguments.

    Args:
        a_desc: [rows, DIMS[-1]]; b_desc: [N, DIMS[-1]]; e_desc: [M * out_rows, N].
        own: the column that a row leaves out, or None.
        PIECES: in how many parts a tile leaves.
        S: stages of a ring.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    num_m = gl.cdiv(rows, BM)
    num_n = gl.cdiv(N, BN)
    nk = gl.cdiv(DIMS[M - 1], BK)
    factor = scalar(scale) * LOG2E
    start, step = gl.program_id(0), gl.num_programs(0)
    a0, b0, ready0, empty0 = ring(a_desc, b_desc, BM, BN, BK, S)
    a1, b1, ready1, empty1 = ring(a_desc, b_desc, BM, BN, BK, S)
    stages0 = gl.allocate_shared_memory(gl.bfloat16, [PIECES, BM, BN // PIECES], e_desc.layout)
    stages1 = gl.allocate_shared_memory(gl.bfloat16, [PIECES, BM, BN // PIECES], e_desc.layout)
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    columns0 = gl.allocate_shared_memory(gl.float32, [BN], flat)
    columns1 = gl.allocate_shared_memory(gl.float32, [BN], flat)
    gl.warp_specialize([
        (prefix_tiles, (e_desc, factor, inverse_left, inverse_right, reference, own, part_sum, part_max, stages0,
                        columns0, a0, b0, ready0, empty0, rows, N, out_rows, vector_stride, part_stride,
                        part_tiles, num_m, num_n, start, 2 * step, DIMS, M, PIECES, BM, BN, BK, S, GROUP,
                        layout)),
        (prefix_tiles, (e_desc, factor, inverse_left, inverse_right, reference, own, part_sum, part_max, stages1,
                        columns1, a1, b1, ready1, empty1, rows, N, out_rows, vector_stride, part_stride,
                        part_tiles, num_m, num_n, start + step, 2 * step, DIMS, M, PIECES, BM, BN, BK, S, GROUP,
                        layout)),
        (load_tiles, (a_desc, b_desc, a0, b0, ready0, empty0, num_m, num_n, nk, start, 2 * step, BM, BN, BK, S,
                      GROUP)),
        (load_tiles, (a_desc, b_desc, a1, b1, ready1, empty1, num_m, num_n, nk, start + step, 2 * step, BM, BN, BK, S,
                      GROUP)),
    ], [4, 1, 1], [240, 24, 24])  # fmt: skip
