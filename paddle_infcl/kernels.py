# SPDX-License-Identifier: Apache-2.0
"""Which backend computes a loss, and the only door to the Triton package `paddle_infcl_ops`.

The package is imported here, once, under a guard: where it is missing or broken, `auto` falls back to plain Paddle
with one warning that says why, and `backend="triton"` raises with the original error as its cause.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import ModuleType

import paddle
from paddle import Tensor

from paddle_infcl.log import warn_once

BACKENDS = ("auto", "triton", "paddle", "dense")


class BackendError(RuntimeError):
    """A backend that was asked for by name can't run here."""


@functools.lru_cache(maxsize=1)
def load_ops() -> tuple[ModuleType | None, str, BaseException | None]:
    """The ops package, or why there is none."""
    try:
        import paddle_infcl_ops as ops

        usable, reason, error = ops.availability()
    except Exception as error:  # a broken installation may raise anything, and must not stop a training run
        return None, f"the package paddle_infcl_ops can't be used ({type(error).__name__}: {error})", error
    return (ops, "", None) if usable else (None, reason, error)


def triton_status(tensor: Tensor | None = None) -> tuple[bool, str, BaseException | None]:
    """Whether the Triton kernels can run (on this tensor), the reason when not, and the error behind it.

    Args:
        tensor: asks for the device that holds it; None asks for the installation alone.
    """
    ops, reason, error = load_ops()
    if ops is None or tensor is None:
        return ops is not None, reason, error
    if tensor.dtype == paddle.float64:
        return False, "the kernels take float32, bfloat16 and float16, the tensors are float64", None
    runs, reason = ops.can_run(tensor)
    return runs, reason, None


def choose_backend(backend: str, tensor: Tensor) -> str:
    """The backend that computes a loss of `tensor`: "triton", "paddle" or "dense".

    Args:
        backend: one of `BACKENDS`. "auto" is Triton where it runs; elsewhere the streaming loss in plain Paddle:
            the same value, gradients and negatives, and one warning that says why.
        tensor: one of the loss's inputs; what counts is where it lives.

    Raises:
        ValueError: backend is none of `BACKENDS`.
        BackendError: backend is "triton" and can't run on the tensor's device.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is none of {', '.join(BACKENDS)}")
    if backend in ("paddle", "dense"):
        return backend
    runs, reason, error = triton_status(tensor)
    if runs:
        return "triton"
    if backend == "triton":
        raise BackendError(f"backend 'triton' can't run: {reason}") from error
    warn_once(
        "triton-fallback",
        f"the Triton kernels are not used: {reason}. Training goes on with the standard contrastive loss in plain "
        "Paddle: same value, same gradients, same negatives.",
    )
    return "paddle"


def triton_info_nce(groups, scale: Tensor, row_weights: float | Tensor, memory_budget: int | None) -> Tensor:
    """`paddle_infcl_ops.info_nce`; call it only when `choose_backend` says "triton"."""
    ops, _, _ = load_ops()
    return ops.info_nce(groups, scale=scale, row_weights=row_weights, memory_budget=memory_budget)


def triton_prefix_info_nce(
    groups,
    prefixes: Sequence[tuple[int, float]],
    margin: float | None,
    scale: Tensor,
    row_weights: float | Tensor,
    memory_budget: int | None,
) -> Tensor | None:
    """The losses of all (width, weight) prefixes from one sweep; call it only when `choose_backend` says "triton".

    Returns:
        0-d float32; None for groups or budgets that the kernels don't take.
    """
    load_ops()
    from paddle_infcl_ops import prefixes as ops

    if not ops.sweeps(groups):
        return None
    dims, weights = zip(*prefixes, strict=True)
    options = {"scale": scale, "row_weights": row_weights, "margin": margin, "memory_budget": memory_budget}
    return ops.prefix_info_nce(groups, dims, weights, **options)


def triton_block_functions() -> tuple:
    """`block_lse` and `block_grads` of `paddle_infcl_ops`; call it only when `choose_backend` says "triton"."""
    ops, _, _ = load_ops()
    return ops.block_lse, ops.block_grads
