# SPDX-License-Identifier: Apache-2.0
"""`sweep_kernel` of the Matryoshka loss for sm_90 with its warps scheduled by hand, as hopper_kernels.py does it.

One warp loads; two warpgroups own a tile each and take turns prefix by prefix: while one ends a prefix of its tile,
the other one multiplies the next segment of its own. Otherwise the tensor cores would wait as many times per tile as
there are prefixes. Plain blocks only: no rule but the own column.
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

from .hopper_kernels import LOG2E, barriers, halves, scalar, tile_at


@gluon.jit
def load_segments(
    a_desc, b_desc, a_bufs, b_bufs, ready, empty, num_m, num_n, FROM: gl.constexpr, TO: gl.constexpr, M: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The warp that loads: a segment for one warpgroup, the same segment for the other, then the next segment."""
    total = num_m * num_n
    step = gl.num_programs(0)
    g = 0
    for t in range(gl.program_id(0), total, 2 * step):
        m_0, n_0 = tile_at(t, num_m, num_n, GROUP)
        m_1, n_1 = tile_at(gl.minimum(t + step, total - 1), num_m, num_n, GROUP)
        for s in gl.static_range(M):
            for group in gl.static_range(2):
                pid_m = m_0 if group == 0 else m_1
                pid_n = n_0 if group == 0 else n_1
                for k in range(FROM[s], TO[s]):
                    slot = g % S
                    mbarrier.wait(empty.index(slot), ((g // S) & 1) ^ 1)
                    bar = ready.index(slot)
                    mbarrier.expect(bar, (BM + BN) * BK * 2)  # zeros outside of the operands count
                    tma.async_copy_global_to_shared(a_desc, [pid_m * BM, k * BK], bar, a_bufs.index(slot))
                    tma.async_copy_global_to_shared(b_desc, [pid_n * BN, k * BK], bar, b_bufs.index(slot))
                    g += 1


@gluon.jit
def multiply_segment(
    acc, a_bufs, b_bufs, ready, empty, turn, g, steps, n_turn, WG: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """The sums of one tile with one more segment. g: steps of the ring before it; n_turn: turns before it."""
    mbarrier.wait(turn.index(WG), (n_turn & 1) ^ (1 - WG))  # the first turn is warpgroup 0's
    for k in range(steps):
        slot = g % S
        mbarrier.wait(ready.index(slot), (g // S) & 1)
        acc = warpgroup_mma(a_bufs.index(slot), b_bufs.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=(acc,))  # the step before is done with its slot
        mbarrier.arrive(empty.index((g + S - 1) % S), count=1, pred=k > 0)
        g += 1
    mbarrier.arrive(turn.index(1 - WG), count=1)
    acc = warpgroup_mma_wait(0, deps=(acc,))
    mbarrier.arrive(empty.index((g + S - 1) % S), count=1)
    return acc


@gluon.jit
def end_prefix(
    acc, e_desc, stage, inverse_right, factor, reference, row, n0, N, sums, tops, LAST: gl.constexpr,
    PIECES: gl.constexpr,
):  # fmt: skip
    """Ends the columns from n0 on of a prefix; returns `sums` and `tops` (less the reference) with theirs.

    In PIECES, since the sums that go on take most of the registers.
    """
    C: gl.constexpr = acc.shape[1]
    if PIECES > 1:
        x, y = halves(acc)
        sums, tops = end_prefix(
            x, e_desc, stage, inverse_right, factor, reference, row, n0, N, sums, tops, LAST, PIECES // 2
        )  # fmt: skip
        sums, tops = end_prefix(
            y, e_desc, stage, inverse_right, factor, reference, row, n0 + C // 2, N, sums, tops, LAST, PIECES // 2
        )  # fmt: skip
    else:
        layout: gl.constexpr = acc.type.layout
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        column = n0 + gl.arange(0, C, gl.SliceLayout(0, layout))
        inverse = gl.load(inverse_right + column, mask=column < N, other=1.0)
        z = acc * gl.convert_layout(factor, rows)[:, None] * gl.abs(inverse)[None, :]
        z = z - gl.convert_layout(reference, rows)[:, None]
        tops = gl.maximum(tops, gl.convert_layout(gl.max(z, axis=1), tops.type.layout))
        e = gl.exp2(z)
        sums += gl.convert_layout(gl.sum(e, axis=1), sums.type.layout)
        if LAST:
            e = e * gl.where(inverse < 0, 0.0, inverse)[None, :]
        tma.store_wait(0)
        stage.store(e.to(gl.bfloat16))
        fence_async_shared()
        tma.async_copy_shared_to_global(e_desc, [row, n0], stage)
    return sums, tops


@gluon.jit
def sweep_tiles(
    e_desc, factor, inverse_left, inverse_right, reference, own, part_sum, part_max, stage, a_bufs, b_bufs, ready,
    empty, turn, rows, N, num_m, num_n, out_rows, vector_stride, part_stride, FROM: gl.constexpr, TO: gl.constexpr,
    M: gl.constexpr, WG: gl.constexpr, PIECES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, S: gl.constexpr,
    GROUP: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One warpgroup. The last tile is computed twice when their number is odd: turns need two warpgroups."""
    total = num_m * num_n
    step = gl.num_programs(0)
    g = 0
    n_turn = 0
    for t in range(gl.program_id(0), total, 2 * step):
        pid_m, pid_n = tile_at(gl.minimum(t + WG * step, total - 1), num_m, num_n, GROUP)
        m0 = pid_m * BM
        n0 = pid_n * BN
        i = m0 + gl.arange(0, BM, gl.SliceLayout(1, layout))
        at = gl.load(own + i, mask=i < rows, other=-1).to(gl.int32)
        # Entries that don't count start at -inf, which no product changes. Few tiles have any.
        acc = gl.zeros((BM, BN), gl.float32, layout)
        edge = (gl.max(((at >= n0) & (at < n0 + BN)).to(gl.int32), axis=0) > 0) | (n0 + BN > N)
        if edge:
            column = n0 + gl.arange(0, BN, gl.SliceLayout(0, layout))
            acc = gl.where((column[None, :] == at[:, None]) | (column >= N)[None, :], float("-inf"), acc)
        for s in gl.static_range(M):
            # Loaded before the sums are there, used after.
            inverse = gl.load(inverse_left + s * vector_stride + i, mask=i < rows, other=1.0)
            ref = gl.load(reference + s * vector_stride + i, mask=i < rows, other=float("inf"))
            first = g + 2 * FROM[s] + WG * (TO[s] - FROM[s])
            acc = multiply_segment(acc, a_bufs, b_bufs, ready, empty, turn, first, TO[s] - FROM[s], n_turn, WG, S)
            n_turn += 1
            f = gl.abs(inverse) * factor
            sums = gl.zeros((BM,), gl.float32, gl.SliceLayout(1, layout))
            tops = gl.full((BM,), float("-inf"), gl.float32, gl.SliceLayout(1, layout))
            row = s * out_rows + m0
            right = inverse_right + s * N
            sums, tops = end_prefix(acc, e_desc, stage, right, f, ref, row, n0, N, sums, tops, s == M - 1, PIECES)
            part = (s * num_n + pid_n).to(gl.int64) * part_stride + i
            gl.store(part_sum + part, sums, mask=i < rows)
            gl.store(part_max + part, tops + ref, mask=i < rows)
        g += 2 * TO[M - 1]
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["rows", "N", "out_rows", "vector_stride", "part_stride"],
    do_not_specialize_on_alignment=["inverse_left", "reference", "own"],
)
def hopper_sweep_kernel(
    a_desc, b_desc, e_desc, scale, inverse_left, inverse_right, reference, own, part_sum, part_max, rows, N, out_rows,
    vector_stride, part_stride,
    FROM: gl.constexpr, TO: gl.constexpr, M: gl.constexpr, PIECES: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    BK: gl.constexpr, S: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """See the module, and `sweep_kernel` for the arguments.

    Args:
        a_desc: [rows, D]; b_desc: [N, D]; e_desc: [M * out_rows, N].
        FROM, TO: steps of BK between which the segments lie.
        PIECES: in how many parts a tile leaves.
        S: stages of the ring.
    """
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    a_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BM, BK], a_desc.layout)
    b_bufs = gl.allocate_shared_memory(gl.bfloat16, [S, BN, BK], b_desc.layout)
    stages = gl.allocate_shared_memory(gl.bfloat16, [2, BM, BN // PIECES], e_desc.layout)
    ready = barriers(S, 1)
    empty = barriers(S, 1)
    turn = barriers(2, 1)
    num_m = gl.cdiv(rows, BM)
    num_n = gl.cdiv(N, BN)
    factor = scalar(scale) * LOG2E
    gl.warp_specialize([
        (sweep_tiles, (e_desc, factor, inverse_left, inverse_right, reference, own, part_sum, part_max,
                       stages.index(0), a_bufs, b_bufs, ready, empty, turn, rows, N, num_m, num_n, out_rows,
                       vector_stride, part_stride, FROM, TO, M, 0, PIECES, BM, BN, S, GROUP, layout)),
        (sweep_tiles, (e_desc, factor, inverse_left, inverse_right, reference, own, part_sum, part_max,
                       stages.index(1), a_bufs, b_bufs, ready, empty, turn, rows, N, num_m, num_n, out_rows,
                       vector_stride, part_stride, FROM, TO, M, 1, PIECES, BM, BN, S, GROUP, layout)),
        (load_segments, (a_desc, b_desc, a_bufs, b_bufs, ready, empty, num_m, num_n, FROM, TO, M, BM, BN, BK, S,
                         GROUP)),
    ], [4, 1], [240, 24])  # fmt: skip
