# SPDX-License-Identifier: Apache-2.0
"""Tensors as kernels take them: rows from some row on, and tensor descriptors. No view here moves data."""

from __future__ import annotations

import paddle

from . import driver


class Rows:
    """A tensor from row `start` on, without asking the framework for a slice (which may copy).

    It has the few methods that Triton asks of an argument, compiled and interpreted.
    """

    def __init__(self, tensor, start: int):
        self.base = tensor.base if isinstance(tensor, Rows) else tensor
        self.dtype, self.shape, self.strides, self.ndim = tensor.dtype, tensor.shape, tensor.strides, tensor.ndim
        self._bytes = tensor.data_ptr() - self.base.data_ptr() + start * row_stride(tensor) * tensor.element_size()

    def data_ptr(self) -> int:
        return self.base.data_ptr() + self._bytes

    def element_size(self) -> int:
        return self.base.element_size()

    def size(self):
        return self.shape

    def stride(self):
        return self.strides

    def storage_offset(self) -> int:
        return 0

    def _self(self, *args, **kwargs):
        return self

    untyped_storage = cpu = copy_ = set_ = new_empty = _self


def rows_from(tensor, start: int):
    """`tensor` from row `start` on; None stays None."""
    return tensor if tensor is None or start == 0 else Rows(tensor, start)


def vectors(sizes: list[int], like):
    """fp32 scratch of these lengths, cut from one allocation: an allocation costs as much host time as a launch."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // 64) * 64)  # 256 bytes, as Paddle aligns
    flat = driver.empty([max(starts[-1], 1)], paddle.float32, like)
    return [rows_from(flat, start) for start in starts[:-1]]


def row_stride(tensor) -> int:
    """Elements from one row to the next."""
    return tensor.strides[0] if tensor.ndim > 0 else 1


def contiguous_rows(tensor):
    """The tensor itself when the entries of each row lie side by side, else a copy."""
    if tensor.shape[-1] <= 1 or tensor.strides[-1] == 1:
        return tensor
    return tensor.contiguous()


def dense(tensor):
    """The tensor itself when it is contiguous, else a contiguous copy; None stays None."""
    return tensor if tensor is None or tensor.is_contiguous() else tensor.contiguous()


def can_describe(arch: int, *tensors) -> bool:
    """Whether the tensors can be read through descriptors: sm_90, 16-byte aligned rows, a Triton that has them."""
    if arch < 90 or _descriptor_class() is None:
        return False
    return all(t is None or (t.data_ptr() % 16 == 0 and row_stride(t) * t.element_size() % 16 == 0) for t in tensors)


def _descriptor_class():
    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:
        return None
    return TensorDescriptor


def describe(source, rows: int, cols: int, stride: int, block: list[int], kind=None):
    """A tensor descriptor of [rows, cols]; entries outside read as zeros and are not written. kind: its class."""
    kind = kind or _descriptor_class()
    # Its constructor asks the dtype for torch's attributes, which Paddle's lacks; what it checks `can_describe` has.
    descriptor = kind.__new__(kind)
    descriptor.base = source
    descriptor.shape = [rows, cols]
    descriptor.strides = [stride, 1]
    descriptor.block_shape = block
    descriptor.padding = "zero"
    return descriptor


def empty_rows(rows: int, cols: int, dtype, like):
    """Scratch [rows, at least cols] whose rows are 16-byte aligned; its row stride is its width."""
    size = like.element_size() if dtype == like.dtype else 4
    step = 16 // size
    return driver.empty([rows, -(-cols // step) * step], dtype, like)


def number(x):
    """A float as a kernel takes it where a pointer may stand as well: the interpreter hands over bare floats."""
    if isinstance(x, float) and driver.is_interpreting():
        return paddle.to_tensor([x], dtype="float32")
    return x
