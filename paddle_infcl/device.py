# SPDX-License-Identifier: Apache-2.0
"""What this machine has, and what a configuration for a GPU becomes where there is none."""

from __future__ import annotations

import os
import typing


def world_size() -> int:
    """Processes of this launch, known before any process group is there."""
    return int(os.environ.get("PADDLE_TRAINERS_NUM", "1"))


def available_device() -> tuple[str, str]:
    """The best device of this machine, and why it is not a GPU where it is none."""
    import paddle

    if paddle.is_compiled_with_cuda():
        if paddle.device.cuda.device_count() > 0:
            return "gpu", ""
        reason = "no GPU is visible"
    else:
        reason = "Paddle is a build without CUDA"
    if paddle.is_compiled_with_xpu():
        return "xpu", reason
    custom = paddle.device.get_all_custom_device_type()
    return (custom[0] if custom else "cpu"), reason


# What only a GPU can do, and what it becomes on a CPU.
_GPU_ONLY = {
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "fp16_opt_level": "O1",
    "amp_master_grad": False,
    "use_flash_attention": False,
    "use_fused_rms_norm": False,
    "use_fused_rope": False,
    "use_fused_linear": False,
    "use_fused_dropout_add": False,
    "offload_optim": False,
    "guide_dtype": "float32",
}


def resolve_device(v) -> tuple[dict[str, typing.Any], list[str], str | None]:
    """`auto`, and a GPU where there is none: fp32 on the CPU.

    Args:
        v: options as attributes; `given(name)` tells which somebody set.

    Returns:
        Options that change, the reasons in words, and what is wrong with `fp16`, if anything.
    """
    wanted = v.device or "auto"
    best, reason = available_device()
    if v.no_cuda:
        device = "cpu"
    elif wanted == "auto":
        device = best
    elif wanted.split(":")[0] == "gpu" and best != "gpu":
        device = best
    else:
        device = wanted
    changes = {"device": device} if device != v.device else {}
    if device.split(":")[0] != "cpu":
        return changes, [], None
    asked_for_cpu = v.no_cuda or wanted.split(":")[0] == "cpu"
    if asked_for_cpu and v.fp16:
        return changes, [], "needs a GPU; leave it out, or device: cpu"
    ignored = []
    for option, value in _GPU_ONLY.items():
        current = getattr(v, option)
        if current != value and current is not None:
            changes[option] = value
            ignored.append(f"{option}={current}")
    if world_size() == 1:
        leftovers = ("sharding_parallel_degree", "tensor_parallel_degree")
        ignored += [f"sharding={v.sharding}"] if v.sharding else []
        ignored += [f"{option}={getattr(v, option)}" for option in leftovers if getattr(v, option) > 1]
    why = "device: cpu" if asked_for_cpu else reason
    notes = []
    if ignored or (v.given("device") and not asked_for_cpu and wanted != "auto"):
        note = f"{why}: training runs on the CPU in fp32"
        notes.append(note + (f"; without effect here: {', '.join(ignored)}" if ignored else ""))
    return changes, notes, None
