# SPDX-License-Identifier: Apache-2.0
"""What a configuration will need, told before it runs: the backend and the memory."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

from paddle_infcl import checks, kernels
from paddle_infcl.arguments import Config
from paddle_infcl.functional.budget import CPU_BUDGET, DEVICE_BUDGET


def backend_and_reason(config: Config) -> tuple[str, str]:
    """The backend that would compute the loss on the configuration's device, and why it."""
    import paddle

    embedding = config.embedding
    if not embedding.inf_cl_loss:
        return "dense", "inf_cl_loss is false: the textbook loss stores its similarities"
    if embedding.inf_cl_backend in ("paddle", "dense"):
        return embedding.inf_cl_backend, f"inf_cl_backend: {embedding.inf_cl_backend}"
    runs, reason, _ = kernels.triton_status(paddle.ones([1]))
    if runs:
        return "triton", "the kernels are installed and the device can run them"
    if embedding.inf_cl_backend == "triton":
        return "triton", f"inf_cl_backend: triton, and it can't run here: {reason}"
    return "paddle", reason


def parameter_count(path: str | None) -> int | None:
    """Parameters of a local model: from the headers of its safetensors, else from its config; None where unknown."""
    folder = Path(os.path.expanduser(path or ""))
    files = sorted(folder.glob("*.safetensors")) if path and folder.is_dir() else []
    if files:
        return sum(_count_in_header(file) for file in files)
    config = checks.model_config(path)
    needed = ("hidden_size", "num_hidden_layers", "intermediate_size", "vocab_size", "num_attention_heads")
    if any(not config.get(name) for name in needed):
        return None
    hidden, layers, inner, vocabulary, heads = (int(config[name]) for name in needed)
    if "num_key_value_heads" in config:  # a gated decoder with grouped queries
        shared = hidden * config["num_key_value_heads"] // heads
        layer = 2 * hidden * hidden + 2 * hidden * shared + 3 * hidden * inner
    else:
        layer = 4 * hidden * hidden + 2 * hidden * inner + 9 * hidden + inner
    return (
        vocabulary * hidden
        + int(config.get("max_position_embeddings", 0)) * hidden * ("num_key_value_heads" not in config)
        + layers * layer
    )


def _count_in_header(file: Path) -> int:
    with open(file, "rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header = json.loads(stream.read(length))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__":
            size = 1
            for n in tensor["shape"]:
                size *= n
            total += size
    return total


def memory_lines(config: Config, backend: str, processes: int) -> list[str]:
    """The parts of a process's memory that the configuration decides, with their sizes.

    Args:
        config: the configuration.
        backend: who computes the loss.
        processes: W, that share the batch.
    """
    training, embedding = config.training, config.embedding
    rows = training.per_device_train_batch_size * training.gradient_accumulation_steps
    passages = rows * embedding.group_size
    shared = (
        embedding.negatives_strategy != "local"
        if embedding.inf_cl_loss
        else embedding.embedding_negatives_cross_device
    )
    gathered = passages * processes if shared and embedding.negatives_strategy != "ring" else passages
    lines = [
        f"pairs per step: {training.per_device_train_batch_size} per micro-batch x "
        f"{training.gradient_accumulation_steps} micro-batches x {processes} processes = {rows * processes:,}",
        f"up to {embedding.group_size} passages per query: {rows:,} queries against up to {gathered:,} passages on "
        "every process",
    ]
    half = training.bf16 or training.fp16
    model = checks.model_config(config.model.model_name_or_path)
    width = model.get("hidden_size")
    if width:
        itemsize = 2 if half else 4
        lines.append(_line("representations", (rows + gathered) * width * itemsize, f"width {width}"))
        lines.append(_line("their gradients", (rows + gathered) * width * (4 if backend != "dense" else itemsize), ""))
    if embedding.objective == "guided" and embedding.guide_model_name_or_path:
        lines += _guide_lines(embedding, rows + gathered)
    if backend == "dense":
        lines.append(_line("similarities", rows * gathered * 4, "B x N, the dense backend"))
    else:
        inputs = (rows + gathered) * (width or 0) * (2 if half else 4)
        default = CPU_BUDGET if training.device == "cpu" else max(DEVICE_BUDGET, inputs)
        budget = embedding.inf_cl_memory_budget or default
        lines.append(_line("logits at once", budget, "the memory budget"))
    count = parameter_count(config.model.model_name_or_path)
    if count is None:
        lines.append("model and optimizer: unknown before the model is there")
    else:
        note = "weights, gradients, two moments" + (
            ", fp32 copies" if half and training.fp16_opt_level == "O2" else ""
        )
        lines.append(_line("model and optimizer", 16 * count, f"{count / 1e6:.1f}M parameters: {note}"))
    lines.append("activations: those of one micro-batch, whatever the number of micro-batches")
    return lines


def _guide_lines(embedding, texts: int) -> list[str]:
    path = embedding.guide_model_name_or_path
    itemsize = 4 if embedding.guide_dtype == "float32" else 2
    width, count = checks.model_config(path).get("hidden_size"), parameter_count(path)
    if not width or count is None:
        return ["guide: unknown before the model is there"]
    return [
        _line("guide", count * itemsize, f"{count / 1e6:.1f}M parameters, {embedding.guide_dtype}"),
        _line("its vectors", texts * width * itemsize, f"width {width}, while the loss is computed"),
    ]


def _line(name: str, size: float, note: str) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    return f"{name + ':':<21}{size:8.1f} {unit}" + (f"   ({note})" if note else "")
