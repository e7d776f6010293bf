# SPDX-License-Identifier: Apache-2.0
"""Launching the same kernels thousands of times: `driver.launch` with a shortcut for what was launched before.

Triton's own launch sorts out every argument anew, which takes longer than a short kernel runs. Here the signature of a
launch (types, alignments, constants) looks up the compiled kernel, which is then started with plain addresses. The
first launch of a signature, the interpreter, profilers' launch hooks, and versions of Triton on which the shortcut was
not tested, take the ordinary way.
"""

from __future__ import annotations

import functools

from . import driver

_compiled: dict = {}


def launch(kernel, grid: tuple[int, ...], *args, **meta) -> None:
    """Like `driver.launch`; `grid` is a tuple of ints."""
    if not can_shorten():
        driver.launch(kernel, grid, *args, **meta)
        return
    place = None
    key, values = [kernel, *meta.values()], []
    for arg in args:
        kind = type(arg)
        if arg is None or kind is float:
            key.append(kind)
        elif isinstance(arg, int):
            key.append(-1 if arg == 1 else ((arg & 15) == 0) + 2 * (-(2**31) <= arg < 2**31))
        elif hasattr(arg, "block_shape"):
            key.append((arg.base.dtype, getattr(arg, "layout", None), *arg.block_shape))
            if place is None:
                place = getattr(arg.base, "base", arg.base).place
        else:
            address = arg.data_ptr()
            key.append((arg.dtype, address & 15 == 0))
            if place is None:
                place = getattr(arg, "base", arg).place
            values.append(address)
            continue
        values.append(arg)
    active, index = active_driver(place)
    key = (index, *key)
    found = _compiled.get(key)
    if found is None or active.get_current_device() != index:
        compiled, constants = _first(kernel, grid, args, meta)
        if compiled is not None and active.get_current_device() == index:
            stream = functools.partial(active.get_current_stream, index)
            _compiled[key] = _Shortcut(compiled, constants, stream)
        return
    tape = getattr(driver.writing, "tape", None)
    if tape is not None:
        tape.launched(found, grid, args)
    driver._launch(active if place.is_gpu_place() else None, found, grid, values, {})


class _Shortcut:
    """A compiled kernel that is started as a kernel is: shortcut[grid](*addresses and numbers)."""

    def __init__(self, compiled, constants: tuple, stream):
        self.compiled, self.constants, self.stream = compiled, constants, stream
        self.grid = (1, 1, 1)

    def __getitem__(self, grid):
        self.grid = (*grid, 1, 1)[:3]
        return self

    def __call__(self, *values):
        compiled = self.compiled
        compiled.run(
            *self.grid, self.stream(), compiled.function, compiled.packed_metadata, None, None, None, *values,
            *self.constants,
        )  # fmt: skip


def _first(kernel, grid, args, meta):
    """The ordinary way; returns (compiled kernel or None, values of the constants, which come last)."""
    result = []

    class Keeping:
        def __getitem__(self, grid):
            return lambda *args, **meta: result.append(kernel[grid](*args, **meta))

    driver.launch(Keeping(), grid, *args, **meta)
    return result[0], tuple(meta.get(p.name, p.default) for p in kernel.params[len(args) :])


def active_driver(place):
    """(Triton's driver for a place, index of the device)."""
    if place.is_gpu_place():
        return driver._paddle_driver(), place.gpu_device_id()
    return _config().active, place.custom_device_id()


@functools.cache
def _config():
    from triton.runtime import driver as config

    return config


def can_shorten() -> bool:
    """Whether launches may take the shortcut now."""
    return _tested_version() and not driver.is_interpreting() and not _hooked()


@functools.cache
def _tested_version() -> bool:
    import triton

    return triton.__version__.startswith("3.6.")


def _hooked() -> bool:
    runtime = _runtime()
    return _is_set(runtime.launch_enter_hook) or _is_set(runtime.launch_exit_hook)


@functools.cache
def _runtime():
    from triton import knobs

    return knobs.runtime


def _is_set(hook) -> bool:
    return bool(getattr(hook, "calls", hook))
