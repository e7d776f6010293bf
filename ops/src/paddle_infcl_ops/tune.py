# SPDX-License-Identifier: Apache-2.0
"""Measures the tiles of tuning.py again on this GPU and prints the table's entries.

    python -m paddle_infcl_ops.tune                       a minute or two; most of it is compiling
    python -m paddle_infcl_ops.tune --device gpu:1 --kinds exp,right

Nothing is written: look at the lines, and put what is better into the table.
"""

from __future__ import annotations

import argparse
import time
from types import SimpleNamespace

import paddle

from . import driver, tuning
from .launch import EXP, LSE, Similarity, product
from .tiles import PROB
from .tuning import Tile
from .views import vectors

_SIMILARITY = [
    Tile(128, 256, 64, 8, 3, 1, True, True, 2),
    Tile(128, 256, 64, 8, 3, 1, True, True, 1),
    Tile(128, 256, 64, 8, 3, 0, False, True, 1),
    Tile(128, 256, 64, 8, 4, 1, True, True, 4),
    Tile(128, 128, 64, 4, 3, 2, True, True, 4),
    Tile(128, 128, 64, 4, 3, 2, True, False, 2),
    Tile(128, 128, 64, 4, 3, 0, False, True, 4),
    Tile(64, 256, 32, 4, 4, 2, True, True, 1),
]
_PRODUCT = [
    Tile(128, 256, 64, 8, 3, 0, False, True, 4, 8),
    Tile(128, 256, 64, 8, 3, 1, True, True, 2, 8),
    Tile(128, 256, 64, 8, 4, 0, False, False, 4, 8),
    Tile(256, 128, 64, 8, 3, 0, False, True, 4, 8),
    Tile(128, 128, 64, 8, 4, 0, False, True, 2, 8),
    Tile(128, 128, 64, 4, 3, 0, False, True, 4, 8),
    Tile(128, 128, 64, 4, 3, 2, True, True, 4, 8),
    Tile(128, 128, 64, 4, 3, 2, True, False, 2, 8),
]
_WIDTHS = {"": 1024, "_short": 384, "_narrow": 384}


def _block(rows: int, columns: int, width: int, guided: bool):
    left, right = (paddle.randn([n, width]).astype("bfloat16") * width**-0.5 for n in (rows, columns))
    names = ("own", "self_column", "row_ids", "column_ids", "owner", "owner_rule", "limit", "hardness")
    guide = None
    if guided:
        guide = SimpleNamespace(left=left, right=right, threshold=paddle.full([rows], 0.1), keep_own=False)
    return SimpleNamespace(left=left, right=right, row_offset=0, guide=guide, **dict.fromkeys(names))


def milliseconds(run) -> float:
    """Median time of a launch."""
    run()
    paddle.device.synchronize()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        for _ in range(5):
            run()
        paddle.device.synchronize()
        times.append((time.perf_counter() - start) / 5)
    return sorted(times)[3] * 1e3


def measure(kind: str, rows: int = 1920, columns: int = 65536) -> list[tuple[float, Tile]]:
    """(ms, tile) of every candidate for an entry of the table, fastest first."""
    width = next(w for suffix, w in _WIDTHS.items() if kind.endswith(suffix) and suffix) if "_" in kind else 1024
    width = 1024 if kind == "right_once" else width
    base = kind.removesuffix("_short").removesuffix("_narrow")
    s = Similarity(_block(rows, columns, width, kind == "guide"))
    E = paddle.rand([rows, columns]).astype("bfloat16")
    reference, factor, part_sum, part_max = vectors([rows, rows, rows * columns // 32, rows * columns // 32], E)
    found, before = [], tuning._SM90[kind]
    for tile in _PRODUCT if base in tuning._PRODUCTS else _SIMILARITY:
        tuning._SM90[kind] = tile
        if base == "left":
            out = paddle.empty([2 * rows + 256, width])
            run = _product(s, base, E, s.right, out, M=rows, N=width, K=columns, splits=2)
        elif base in tuning._PRODUCTS:
            out = paddle.zeros([columns, width], dtype="float32" if base == "right" else "bfloat16")
            run = _product(s, base, E, s.left, out, M=columns, N=width, K=rows, transposed=True,
                           accumulate=base == "right")  # fmt: skip
        else:
            mode = {"lse": LSE, "prob": PROB}.get(base, EXP)
            ends = {"reference": reference, "factor": factor, "part_sum": part_sum, "part_max": part_max}
            run = _tiles(s, mode, base, rows, columns, None if mode == LSE else E, ends)
        try:
            found.append((milliseconds(run), tile))
        except Exception as error:  # too much shared memory, say
            print(f"# {kind}: {tile}: {type(error).__name__}", flush=True)
    tuning._SM90[kind] = before
    return sorted(found, key=lambda x: x[0])


def _product(s, kind, a, b, out, **shape):
    return lambda: product(kind, s, a, b, out, 1.0, **shape)


def _tiles(s, mode, kind, rows, columns, out, ends):
    return lambda: s.launch(mode, 50.0, (0, rows), (0, columns), kind=kind, out=out, part_stride=rows, **ends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="gpu:0", help="a GPU, or a CUDA-like custom device")
    parser.add_argument("--kinds", default=",".join(tuning._SM90), help="entries of the table, separated by commas")
    arguments = parser.parse_args()
    driver.device_types.add(arguments.device.partition(":")[0])
    paddle.set_device(arguments.device)
    tuning.HOPPER = False  # whose tiles are not of these tables
    for kind in arguments.kinds.split(","):
        found = measure(kind)
        for ms, tile in found[:3]:
            print(f"# {ms:.3f} ms  {tile}")
        print(f'    "{kind}": {found[0][1]},', flush=True)


if __name__ == "__main__":
    main()
