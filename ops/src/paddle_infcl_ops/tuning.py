# SPDX-License-Identifier: Apache-2.0
"""Which tile a kernel uses: tables per architecture and kind of work, chosen by rule. Nothing is tuned at run time.

The sm_90 table was measured on an H200, the sm_80 one is a conservative choice that was compiled, not timed.
`python -m paddle_infcl_ops.tune` measures again and prints the entries.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from . import driver


@dataclass(frozen=True)
class Tile:
    """One launch configuration.

    Attributes:
        BM, BN, BK: the tile and the step along the summed dimension.
        warps, stages: as Triton means them.
        per_sm: programs per multiprocessor that walk over the tiles, 0: one program per tile.
        flatten: whether tile and step loops become one, so that the next tile's loads start before the last one ends.
        tma_out: whether the result leaves through a tensor descriptor.
        parts: in how many pieces it leaves; more pieces take less shared memory.
        group: rows of tiles that are walked together.
    """

    BM: int
    BN: int
    BK: int
    warps: int
    stages: int
    per_sm: int = 0
    flatten: bool = False
    tma_out: bool = False
    parts: int = 1
    group: int = 16


@dataclass(frozen=True)
class HopperTile:
    """One launch configuration of the kernels in hopper_kernels.py: one program per multiprocessor, two warpgroups.

    Attributes:
        BM, BN, BK, group: as for `Tile`.
        stages: of the ring of operands.
    """

    BM: int
    BN: int
    BK: int
    stages: int
    group: int


#: Whether plain bf16 losses on sm_90 take the hand-scheduled kernels of hopper.py.
HOPPER = True
HOPPER_TILES = {
    "exp": HopperTile(128, 128, 64, 6, 16),
    "left": HopperTile(128, 128, 64, 6, 16),
    "right": HopperTile(128, 128, 64, 6, 8),
    # Matryoshka: stages per warpgroup; the products read as many matrices as there are prefixes.
    "sweep": HopperTile(128, 128, 32, 5, 16),
    "left_segments": HopperTile(128, 128, 64, 6, 4),
    "right_segments": HopperTile(128, 128, 64, 6, 4),
}

# Kinds of work: "exp" and "prob" write a matrix, "lse" does not; "guide" is any of them with a second similarity;
# "left" is E @ right, "right" is E^T @ left added up in fp32, "right_once" the same stored in the inputs' dtype.
_SM90 = {
    "exp": Tile(128, 256, 64, 8, 3, 1, True, True, 2),
    "exp_short": Tile(128, 128, 64, 4, 3, 2, True, True, 4),
    "prob": Tile(128, 256, 64, 8, 3, 1, True, True, 2),
    "prob_short": Tile(128, 128, 64, 4, 3, 2, True, True, 4),
    "lse": Tile(128, 256, 64, 8, 3, 1, True),
    "lse_short": Tile(128, 128, 64, 4, 3, 2, True),
    "guide": Tile(128, 128, 64, 4, 3, 0, False, True, 4),
    "left": Tile(128, 256, 64, 8, 3, 0, False, True, 4, 8),
    "left_narrow": Tile(128, 128, 64, 8, 4, 0, False, True, 2, 8),
    "right": Tile(128, 256, 64, 8, 4, 0, False, False, 4, 8),
    "right_narrow": Tile(128, 128, 64, 4, 3, 2, True, True, 4, 8),
    "right_once": Tile(128, 256, 64, 8, 3, 1, True, True, 2, 8),
    "right_once_narrow": Tile(128, 128, 64, 4, 3, 0, False, True, 4, 8),
}
_SM90_FP32 = {
    "similarity": Tile(128, 128, 32, 8, 3, 0, False, True, 2),
    "product": Tile(128, 128, 32, 8, 3, 0, False, False, 2, 8),
}
# Without tensor descriptors: unaligned rows on sm_90, and everything on sm_80.
_POINTERS = {
    "similarity": Tile(128, 128, 32, 8, 3),
    "product": Tile(128, 128, 32, 8, 3, parts=2, group=8),
}
_POINTERS_FP32 = {
    "similarity": Tile(64, 64, 32, 4, 3),
    "product": Tile(64, 64, 32, 4, 3, parts=2, group=8),
}
# The interpreter: several tiles even in a tiny problem.
_INTERPRETER = {
    "similarity": Tile(32, 32, 32, 4, 1, group=2),
    "product": Tile(32, 32, 32, 4, 1, parts=2, group=2),
}
# Rows up to this width end their tiles so soon that the end of one must overlap the next.
SHORT = 512
# Widths that 256 columns at a time would pad by more than an eighth.
_PRODUCTS = ("left", "right", "right_once")


def choose(kind: str, arch: int, width: int, fp32: bool, descriptors: bool) -> Tile:
    """The tile for one launch.

    Args:
        kind: "exp", "prob", "lse", "guide", "left", "right" or "right_once".
        arch: compute capability as 80, 90; 0 is the interpreter.
        width: D, the width of the vectors.
        fp32: whether the operands are fp32.
        descriptors: whether they are tensor descriptors.
    """
    general = "product" if kind in _PRODUCTS else "similarity"
    if arch == 0:
        return _INTERPRETER[general]
    if not descriptors:
        return (_POINTERS_FP32 if fp32 else _POINTERS)[general]
    if fp32:
        return _SM90_FP32[general]
    if kind in _PRODUCTS:
        padded = -(-width // 256) * 256
        return _SM90[f"{kind}_narrow" if padded * 8 > width * 9 else kind]
    return _SM90[f"{kind}_short" if width <= SHORT and kind != "guide" else kind]


def beside_hopper() -> Tile:
    """The general kernel's tile where the hand-scheduled one writes E: the repair puts its sums in the same places."""
    return next(t for t in (_SM90["exp"], _SM90["exp_short"]) if t.BN == HOPPER_TILES["exp"].BN)


@functools.cache
def _properties(device_type: str, index: int) -> tuple[int, int]:
    from triton.runtime import driver as config

    active = driver._paddle_driver() if device_type == "gpu" else config.active
    return active.get_current_target().arch, active.utils.get_device_properties(index)["multiprocessor_count"]


def device(tensor) -> tuple[int, int]:
    """(architecture as 80, 90; multiprocessors) of the device that holds a tensor; (0, 1) for the interpreter."""
    place = tensor.place
    if driver.is_interpreting():
        return 0, 1
    if place.is_gpu_place():
        return _properties("gpu", place.gpu_device_id())
    return _properties(place.custom_device_type(), place.custom_device_id())
