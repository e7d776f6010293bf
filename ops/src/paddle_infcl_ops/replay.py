# SPDX-License-Identifier: Apache-2.0
"""Losses of shapes that were seen before: their launches are started again with new addresses.

What the host decides for a loss (cuts, tiles, grids, kernels, numbers) follows from shapes, types, alignments and
options. For a small loss (8192 x 8192 x 1024, say) deciding takes it longer than the kernels take the GPU, and for one
of several blocks in many chunks (four directions of 16384 pairs) about as long. So the launches are written down with
every address as (tensor, offset), and a later loss of the same key allocates, fills the addresses in and starts them.

A tape is written on the second loss of a key, when all its kernels are compiled, and only where launches take the
shortcut of dispatch.py.
"""

from __future__ import annotations

from collections import OrderedDict
from contextlib import contextmanager, suppress

from . import dispatch, driver
from .views import Rows

#: Beyond these the launches are long enough that the host keeps ahead of the GPU.
MOST_LAUNCHES, MOST_BYTES = 256, 1 << 30
_MOST_TAPES = 32
_ALIGNMENT = 256

_tapes: OrderedDict = OrderedDict()


class Tape:
    """The launches of one loss, and what they allocate.

    Args:
        inputs: tensors that exist before; others that a launch reads must come from `driver.empty` meanwhile.
        scratch: most bytes of allocations that don't outlive the launches: a tape holds all of them at once, where
            the launches had given back some before they took others.
        results: at most so many bytes of the others.
    """

    def __init__(self, inputs, scratch: int, results: int):
        self._slots = {id(t): k for k, t in enumerate(inputs)}
        self._kept = list(inputs)  # while recording, so that an id stays that of its tensor
        self._inputs = len(inputs)
        self._steps: list | None = []
        self._results: list[tuple] = []  # slot, shape, dtype
        self._starts: list[int] = []
        self._size = 0
        self._most, self._room = scratch, scratch + results

    # --- writing

    def allocated(self, tensor) -> None:
        """Called by `driver.empty`."""
        if self._steps is None:
            return
        self._room -= _padded(tensor)
        if self._room < 0:  # now, since what is recorded is kept until the end
            self.abandon()
            return
        self._slots[id(tensor)] = len(self._kept)
        self._kept.append(tensor)

    def abandon(self) -> None:
        """Something happened that the tape can't repeat."""
        self._steps, self._kept = None, []

    def launched(self, shortcut, grid, args) -> None:
        """Called by `dispatch.launch`."""
        if self._steps is None:
            return
        if len(self._steps) == MOST_LAUNCHES:
            self.abandon()
            return
        try:
            self._steps.append((shortcut, grid, [self._taken_down(arg) for arg in args]))
        except KeyError:  # a tensor from elsewhere
            self.abandon()

    def _taken_down(self, arg):
        if hasattr(arg, "block_shape"):
            return _Descriptor(*self._place(arg.base), arg)
        return _Address(*self._place(arg)) if hasattr(arg, "data_ptr") else arg

    def _place(self, x) -> tuple[int, int]:
        if isinstance(x, Rows):
            return self._slots[id(x.base)], x.data_ptr() - x.base.data_ptr()
        return self._slots[id(x)], 0

    def close(self, results) -> bool:
        """Ends the writing. `results` are those allocated tensors that outlive the launches; whether it is of use."""
        steps, kept, self._kept = self._steps, self._kept, []
        if not steps:
            return False
        lasting = {self._slots.get(id(t)) for t in results}
        if None in lasting:
            return False
        self._results = [(self._slots[id(t)], t.shape, t.dtype) for t in results]
        for slot, t in enumerate(kept[self._inputs :], self._inputs):
            self._starts.append(self._size)
            if slot not in lasting:
                self._size += _padded(t)
        self._slots = {}
        return self._size <= self._most

    # --- playing

    def play(self, inputs) -> list:
        """Allocates, starts the launches with the addresses of `inputs`, and returns the results."""
        like = inputs[0]
        results = [driver.empty(shape, dtype, like) for _, shape, dtype in self._results]
        scratch = driver.empty([max(self._size, 1)], "uint8", like)
        first = scratch.data_ptr()
        addresses = [t.data_ptr() for t in inputs]
        addresses += [first + start for start in self._starts]
        for (slot, _, _), t in zip(self._results, results, strict=True):
            addresses[slot] = t.data_ptr()
        active, _ = dispatch.active_driver(like.place)
        with driver.activated(active if like.place.is_gpu_place() else None):
            for shortcut, grid, values in self._steps:
                shortcut[grid](*[v.under(addresses) if isinstance(v, _Address) else v for v in values])
        return results


def _padded(tensor) -> int:
    return -(-tensor.size * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


class _Address:
    """A place in a tensor of the tape."""

    def __init__(self, slot: int, offset: int):
        self.slot, self.offset = slot, offset

    def under(self, addresses):
        return addresses[self.slot] + self.offset


class _Descriptor(_Address):
    """A tensor descriptor whose base is such a place."""

    def __init__(self, slot: int, offset: int, descriptor):
        super().__init__(slot, offset)
        self._fields = {**descriptor.__dict__, "base": None}
        self._kind = type(descriptor)

    def under(self, addresses):
        descriptor = self._kind.__new__(self._kind)
        descriptor.__dict__.update(self._fields)
        descriptor.base = _Base(super().under(addresses))
        return descriptor


class _Base:
    """As much of a tensor as a descriptor needs of its base."""

    def __init__(self, address: int):
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def find(key, like):
    """The tape of a key that can be played on the device of `like` now, or None."""
    tape = _tapes.get(key)
    if tape is None or not dispatch.can_shorten():
        return None
    active, index = dispatch.active_driver(like.place)
    if active.get_current_device() != index:
        return None
    with suppress(KeyError):  # another thread may have thrown it out meanwhile
        _tapes.move_to_end(key)
    return tape


@contextmanager
def recording(key, inputs, budget: int, results: int):
    """Writes a tape of the launches inside.

    Args:
        key: hashable; everything that the launches follow from besides addresses.
        inputs: the tensors that the launches may read, in an order that is the same for every loss of the key.
        budget: bytes of scratch that the loss may take; plans keep to it but for small vectors and padding.
        results: see `Tape`.

    Yields:
        A function that takes the results (see `Tape.close`) and files the tape.
    """
    tape = Tape(inputs, min(MOST_BYTES, budget + budget // 4), results)

    def file(results) -> None:
        if tape.close(results):
            _tapes[key] = tape
            if len(_tapes) > _MOST_TAPES:
                _tapes.popitem(last=False)

    before = getattr(driver.writing, "tape", None)
    driver.writing.tape = tape
    try:
        yield file
    finally:
        driver.writing.tape = before


def layout(tensor) -> tuple | None:
    """What of a tensor a launch depends on, besides its address; None stays None."""
    if tensor is None:
        return None
    return (*tensor.shape, *tensor.strides, tensor.dtype, tensor.data_ptr() % 16)
