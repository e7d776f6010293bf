# SPDX-License-Identifier: Apache-2.0
"""A loss that is computed again from a tape must start what the launchers would start.

The notes of a recorded loss and of a played one are compared: kernels, grids and numbers are equal, addresses of
inputs are the new inputs', and all others fall together where they did (same tensor, same offset), apart elsewhere.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

ROOT = Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "ops" / "src")]

import paddle  # noqa: E402
import paddle_infcl_ops as ops  # noqa: E402
from paddle_infcl_ops import replay, tuning  # noqa: E402

from tests.ops.note_taker import install, started  # noqa: E402

B, N, D = 1200, 1300, 128
NAMES = ("self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "guide", "hardness")
played: list = []


def loss(dtype: str = "bfloat16", ids: bool = False, learnable: bool = False, offset: int = 0, groups: int = 1,
         budget: int = 700 * 4 * N):  # fmt: skip
    """Computes one and returns (its inputs, what was started)."""
    q, p = (paddle.zeros([n, D]).astype(dtype) for n in (B, N))
    q.stop_gradient = p.stop_gradient = False
    fields = dict.fromkeys(NAMES)
    inputs = [q, p, paddle.arange(B)]
    if ids:
        fields["row_ids"], fields["column_ids"] = paddle.arange(B), paddle.arange(N)
        inputs += [fields["row_ids"], fields["column_ids"]]
    scale = 50.0
    if learnable:
        scale = paddle.full([1], 50.0)
        scale.stop_gradient = False
        inputs.append(scale)
    started.clear()
    value = ops.info_nce(
        [[SimpleNamespace(left=q, right=p, own=inputs[2], row_offset=offset, **fields)] for _ in range(groups)],
        scale=scale, row_weights=1 / B, memory_budget=budget,
    )  # fmt: skip
    notes = [list(note) for note in started]
    value.backward()  # which allocates, and may get memory that a forward gave back
    assert q.grad.shape == q.shape and p.grad.shape == p.shape and (not learnable or scale.grad is not None)
    return inputs, notes


def skeleton(inputs, notes):
    """The notes with addresses as (input, offset) or the order in which they appear; the others stay as they are."""
    spans = [(t.data_ptr(), t.data_ptr() + t.size * t.element_size(), k) for k, t in enumerate(inputs)]
    seen: dict = {}

    def named(x):
        if isinstance(x, tuple) and x:
            return (named(x[0]), *x[1:])
        if not isinstance(x, int) or x < 2**20:  # sizes are smaller here, and addresses never are
            return x
        for start, end, k in spans:
            if start <= x < end:
                return ("input", k, x - start)
        return ("scratch", seen.setdefault(x, len(seen)))

    return [[named(x) for x in note] for note in notes]


def check(**case) -> list:
    """The three losses of a case; returns the launches of one."""
    before = len(replay._tapes)
    loss(**case)  # compiles
    assert len(replay._tapes) == before, "a tape of launches that took the ordinary way"
    recorded = skeleton(*loss(**case))
    assert len(replay._tapes) == before + 1 and not played, "nothing was recorded"
    again = loss(**case)
    assert len(played) == 1 and len(replay._tapes) == before + 1, "the tape was not played"
    assert len(recorded) > 8
    for a, b in zip(recorded, skeleton(*again), strict=True):
        assert a == b, (a, b)
    played.clear()
    return recorded


def main() -> None:
    install()
    play = replay.Tape.play
    replay.Tape.play = lambda self, inputs: (played.append(1), play(self, inputs))[1]
    replay.MOST_BYTES = 1 << 40
    for tuning.HOPPER in (False, True):  # each has tapes of its own
        taken = {note[4] for note in check()}
        assert tuning.HOPPER == ("exp_kernel" in taken) == ("matmul_kernel" in taken)
        check(learnable=True)
    check(ids=True)
    # As many launches as four directions make in half a dozen chunks: the host would take as long as the GPU.
    assert len(check(groups=16, budget=1 << 30)) > 100
    # The same shapes with something else that the launches follow from: not the same tape.
    loss(offset=7)
    loss(dtype="float32")
    assert not played
    # What groups give back before the next one starts, a tape would hold for all of them.
    known = len(replay._tapes)
    for _ in range(3):
        loss(groups=2)
    assert len(replay._tapes) == known and not played, "a tape beyond the budget"
    for _ in range(3):
        loss(groups=2, budget=64 << 20)
    assert len(replay._tapes) == known + 1 and played
    print("the same")


if __name__ == "__main__":
    main()
