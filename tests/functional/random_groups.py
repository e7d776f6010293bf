# SPDX-License-Identifier: Apache-2.0
"""Random lists of blocks, once for the package and once for the oracle."""

from __future__ import annotations

import numpy as np
import paddle

from paddle_infcl.functional import Block, Guide, Hardness

FIELDS = ("own_rows", "self_column", "ids", "owner", "limit", "guide", "hardness")


def unit(rng, n, d):
    x = rng.standard_normal((n, d))
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def _block(rng, arrays, left, right, own, fields, row_offset) -> dict:
    """An oracle block: numbers by name."""
    B, N = arrays[left].shape[0], arrays[right].shape[0]
    similarity = arrays[left] @ arrays[right].T
    block = {"left": left, "right": right, "own": own, "row_offset": row_offset}
    if "self_column" in fields:
        block["self_column"] = rng.integers(-1, N, B)
        if own is not None:
            block["self_column"][block["self_column"] == own] = -1
    if "ids" in fields:
        K, flat = int(rng.integers(1, 4)), rng.random() < 0.3
        for name, n in (("row_ids", B), ("column_ids", N)):
            block[name] = rng.integers(-1, 8, n if flat else (n, K))
    needs_owner = "owner" in fields or "guide" in fields or "hardness" in fields
    if needs_owner:
        block["owner"] = rng.integers(-1, B, N) + row_offset * (rng.random() < 0.9)
    if "owner" in fields:
        block["owner_rule"] = str(rng.choice(["only", "exclude"]))
    if "limit" in fields:
        block["limit"] = np.quantile(similarity, 0.8) + 0.1 * rng.standard_normal(B)
    if "guide" in fields:
        gl, gr = unit(rng, B, 3), unit(rng, N, 3)
        block["guide"] = {
            "left": gl, "right": gr, "threshold": rng.uniform(-0.2, 0.9, B), "keep_own": bool(rng.random() < 0.5)
        }  # fmt: skip
    if "hardness" in fields:
        block["hardness"] = {
            "strength": float(rng.uniform(-1, 5)),
            "columns": str(rng.choice(["own", "others", "all"])),
        }
    return block


def random_groups(rng, *, B, N, D, groups, blocks, fields, dtype="float64", size=1.0):
    """Arrays by name and a list of groups of oracle blocks over them, with the rules in `fields`.

    The first two blocks of a group share the row's positives when "own_rows" is among the fields: every row's own
    entry is in one of them, and -1 in the other.
    """
    arrays = {
        "q": unit(rng, B, D), "x": unit(rng, B, D), "p": unit(rng, N, D) * size, "n": unit(rng, N + 2, D) * size
    }  # fmt: skip
    arrays = {k: v.astype(dtype).astype("float64") for k, v in arrays.items()}
    result = []
    for _ in range(groups):
        group = []
        count = int(rng.integers(1, blocks + 1))
        split = "own_rows" in fields and count > 1
        in_first = rng.random(B) < 0.5 if split else np.ones(B, bool)
        for b in range(count):
            left, right = str(rng.choice(["q", "x"])), str(rng.choice(["p", "n", "q", "x"]))
            own = None
            if b == 0 or (b == 1 and split):
                right = str(rng.choice(["p", "n"]))
                here = in_first if b == 0 else ~in_first
                own = np.where(here, rng.integers(0, arrays[right].shape[0], B), -1)
            chosen = [f for f in fields if rng.random() < 0.6]
            group.append(_block(rng, arrays, left, right, own, chosen, int(rng.choice([0, 3]))))
        result.append(group)
    return arrays, result


def to_paddle(arrays: dict, groups: list, dtype: str):
    """The same as tensors that want gradients, and `Block`s."""
    tensors = {k: paddle.to_tensor(v.astype(dtype), stop_gradient=False) for k, v in arrays.items()}

    def tensor(x, kind=None):
        return None if x is None else paddle.to_tensor(np.asarray(x, kind))

    out = []
    for group in groups:
        blocks = []
        for b in group:
            guide, hardness = b.get("guide"), b.get("hardness")
            blocks.append(
                Block(
                    tensors[b["left"]],
                    tensors[b["right"]],
                    own=tensor(b.get("own"), "int64"),
                    self_column=tensor(b.get("self_column"), "int64"),
                    row_ids=tensor(b.get("row_ids"), "int64"),
                    column_ids=tensor(b.get("column_ids"), "int64"),
                    owner=tensor(b.get("owner"), "int64"),
                    row_offset=b.get("row_offset", 0),
                    owner_rule=b.get("owner_rule"),
                    limit=tensor(b.get("limit"), dtype),
                    guide=guide
                    and Guide(
                        tensor(guide["left"], dtype),
                        tensor(guide["right"], dtype),
                        tensor(guide["threshold"], dtype),
                        guide["keep_own"],
                    ),
                    hardness=hardness and Hardness(hardness["strength"], hardness["columns"]),
                )
            )
        out.append(blocks)
    return tensors, out
