# SPDX-License-Identifier: Apache-2.0
"""Where Triton and Paddle meet: launching, scratch memory, and whether kernels can run at all.

Triton asks *torch* for the device and the stream. Paddle 3.3 can stand in for torch (``paddle.enable_compat``), but
its stand-in must not stay in ``sys.modules``, where the next ``import torch`` of the user's program would find it, and
a process that holds both frameworks must not launch torch's kernels on Paddle's stream or the reverse. So here

* Triton's own CUDA driver is built once while ``torch`` means Paddle, and keeps Paddle's functions from then on;
* it is the active driver during our launches only; whatever was active before comes back, also after an error.

On a CUDA-like custom device (a name added to `device_types`) the driver that Triton has chosen stays in place.

Under ``TRITON_INTERPRET=1`` kernels run on Paddle's CPU tensors, in place and without copies.

This module imports without Triton, so that it can say why Triton is not there.
"""

from __future__ import annotations

import copy
import functools
import re
import threading

import paddle

OLDEST_TRITON = (3, 3)
OLDEST_CAPABILITY = (8, 0)

#: Device types whose tensors kernels may read: "gpu" and names of CUDA-like custom devices.
device_types: set[str] = {"gpu"}

# One launch at a time: which driver is active is a global of Triton's.
_lock = threading.RLock()

#: Per thread: the tape that takes down allocations and launches (replay.py), if any.
writing = threading.local()


# --- launching -------------------------------------------------------------------------------------------------------


def launch(kernel, grid, *args, **meta):
    """Runs a kernel on the device and stream of its tensors.

    Args:
        kernel: a ``@triton.jit`` function.
        grid: tuple of at most three ints, or a function of the meta parameters that gives one.
        *args: the kernel's arguments: Paddle tensors, numbers, tensor descriptors. The first tensor says the device.
        **meta: constants of the kernel and launch options (``num_warps``, ``num_stages``).

    Raises:
        RuntimeError: the tensors live where no kernel can run.
    """
    tape = getattr(writing, "tape", None)
    if tape is not None:
        tape.abandon()  # it knows launches by their shortcuts only
    if is_interpreting():
        kernel[grid](*[_for_interpreter(arg) for arg in args], **{k: _for_interpreter(v) for k, v in meta.items()})
        return
    place = _first_tensor(args, meta).place
    if place.is_gpu_place():
        driver, index = _paddle_driver(), place.gpu_device_id()
        if driver.get_current_device() == index:
            _launch(driver, kernel, grid, args, meta)
            return
        before = paddle.device.get_device()
        paddle.device.set_device(f"gpu:{index}")
        try:
            _launch(driver, kernel, grid, args, meta)
        finally:
            paddle.device.set_device(before)
    elif place.is_custom_place() and place.custom_device_type() in device_types:
        _launch(None, kernel, grid, args, meta)
    else:
        raise RuntimeError(f"a Triton kernel cannot read a tensor on {place}")


def _launch(driver, kernel, grid, args, meta) -> None:
    with activated(driver):
        kernel[grid](*args, **meta)


class activated:
    """While entered, Triton launches through `driver` (None: through the one it has chosen) with our scratch."""

    def __init__(self, driver):
        self._driver = driver

    def __enter__(self):
        from triton.runtime import driver as config

        _lock.acquire()
        try:
            # `_active` is None until the first use (Triton 3.4 and later); reading `active` would then ask torch.
            state = config.__dict__
            self._before = state["_active"] if "_active" in state else state["active"]
            self._config = None if self._driver is None or self._before is self._driver else config
            if self._config is not None:
                self._config.set_active(self._driver)
            self._release = _use_allocator()
        except BaseException:
            _lock.release()
            raise

    def __exit__(self, *error):
        try:
            self._release()
            if self._config is not None:
                self._config.set_active(self._before)
        finally:
            _lock.release()


def _first_tensor(args, meta):
    for arg in (*args, *meta.values()):
        if isinstance(arg, paddle.Tensor):
            return arg
        base = getattr(arg, "base", None)
        if isinstance(base, paddle.Tensor):
            return base
    raise RuntimeError("a launch needs at least one tensor among its arguments")


def _allocate(size: int, alignment: int, stream):
    """Scratch that a kernel asks for at its launch (descriptors made on the device). Paddle aligns to 256 bytes.

    It is released when the launch returns, before the kernel has run: Paddle's allocator hands memory out again in
    the order of the stream.
    """
    return paddle.empty([size], dtype="int8")


def _use_allocator():
    """Makes `_allocate` the current allocator of scratch; returns the function that restores the one before."""
    from triton.runtime import _allocation

    variable = _allocation._allocator
    if hasattr(variable, "reset"):  # a ContextVar
        token = variable.set(_allocate)
        return lambda: variable.reset(token)
    _allocation.set_allocator(_allocate)  # Triton 3.3: a plain global
    return lambda: _allocation.set_allocator(variable)


def empty(shape, dtype, like):
    """Memory with undefined contents.

    Args:
        shape: list of ints.
        dtype: Paddle dtype, or its name.
        like: the tensor beside which it is to lie.

    Returns:
        Tensor on the device of `like`. Under the interpreter it is filled with NaN (integers: the smallest value), so
        that a kernel which leaves out an entry is found out.
    """
    if is_interpreting():
        kind = str(dtype).split(".")[-1]
        return paddle.full(shape, float("nan") if "float" in kind else _SMALLEST.get(kind, 0), dtype=dtype)
    if like.place._equals(paddle.framework._current_expected_place_()):
        out = paddle.empty(shape, dtype=dtype)
    else:
        out = paddle.empty(shape, dtype=dtype, device=like.place)
    tape = getattr(writing, "tape", None)
    if tape is not None:
        tape.allocated(out)
    return out


_SMALLEST = {"int8": -(2**7), "int16": -(2**15), "int32": -(2**31), "int64": -(2**63)}


class _Wrapped:
    """A Paddle CPU tensor with those methods of torch that Triton's interpreter calls. Kernels write to it."""

    def __init__(self, tensor):
        self.tensor = tensor
        self.dtype = tensor.dtype

    def data_ptr(self):
        return self.tensor.data_ptr()

    def element_size(self):
        return self.tensor.element_size()

    def size(self):
        return self.tensor.shape

    def stride(self):
        return self.tensor.strides

    def storage_offset(self):
        return 0

    def _self(self, *args, **kwargs):
        return self

    untyped_storage = cpu = copy_ = set_ = new_empty = _self


def _for_interpreter(arg):
    if isinstance(arg, paddle.Tensor):
        if not arg.place.is_cpu_place():
            raise RuntimeError(f"TRITON_INTERPRET=1 runs kernels on CPU tensors; this one is on {arg.place}")
        return _Wrapped(arg)
    if isinstance(getattr(arg, "base", None), paddle.Tensor):  # a tensor descriptor
        arg = copy.copy(arg)
        arg.base = _Wrapped(arg.base)
    return arg


@functools.cache
def is_interpreting() -> bool:
    """Whether kernels run in Triton's interpreter: whether TRITON_INTERPRET=1 was set when they were defined."""
    try:
        from triton.runtime.jit import JITFunction

        from .probe import probe_kernel
    except Exception:
        return False
    return not isinstance(probe_kernel, JITFunction)


@functools.cache
def _paddle_driver():
    """Triton's CUDA driver, bound to Paddle's current device and stream.

    Raises:
        RuntimeError: Paddle is too old, or the driver turned out to be bound to torch.
        Exception: whatever Triton raises when it finds no compiler or no libcuda.
    """
    if not hasattr(paddle, "enable_compat"):
        raise RuntimeError(f"Triton kernels need Paddle >= 3.3 on a GPU; this is Paddle {paddle.__version__}")
    from paddle.compat import use_torch_proxy_guard
    from triton.backends import backends

    with _lock:
        # The whole process, not only scope={"triton"}: that marks Triton's modules while they are imported, and
        # Triton may have been imported long ago. It is over when the block ends.
        with use_torch_proxy_guard(silent=True):
            # Triton 3.9 goes round Paddle's stream when no torch is loaded.
            import torch  # noqa: F401  (this is Paddle)

            driver = backends["nvidia"].driver()
        bound = driver.get_current_device.__module__
        if bound.partition(".")[0] != "paddle":
            raise RuntimeError(f"Triton's driver asks {bound}, not Paddle, for the device and the stream")
    return driver


# --- what can run ----------------------------------------------------------------------------------------------------


def availability() -> tuple[bool, str, BaseException | None]:
    """Whether kernels run in this process at all.

    Returns:
        (whether they do, the reason in words, the exception behind a "no" or None). A "no" names what is wrong and
        what would be right.
    """
    available, reason, cause = _triton()
    if not available or is_interpreting():
        return available, reason, cause
    index = _gpu_index()
    if index is None:
        if any(name in device_types for name in paddle.device.get_all_custom_device_type()):
            return True, reason, None
        return False, _why_no_gpu(), None
    available, why, cause = _gpu(index)
    return available, why if not available else f"{reason}, {why}", cause


def can_run(tensor) -> tuple[bool, str]:
    """Whether kernels can read this tensor: asks where it lives, not what the installation could do elsewhere.

    Returns:
        (whether they can, the reason in words).
    """
    return run_check(tensor)[:2]


def run_check(tensor) -> tuple[bool, str, BaseException | None]:
    """`can_run`, with the exception behind a "no" as the third entry."""
    place = tensor.place
    interpreting = is_interpreting()
    if place.is_cpu_place() and not interpreting:
        return False, "the tensors are on the CPU", None
    available, reason, cause = _triton()
    if not available:
        return available, reason, cause
    if interpreting:
        if place.is_cpu_place():
            return _probe("cpu", 0)
        return False, f"TRITON_INTERPRET=1 runs kernels on CPU tensors; these are on {place}", None
    if place.is_gpu_place():
        return _gpu(place.gpu_device_id()) if "gpu" in device_types else (False, "GPUs are switched off", None)
    if place.is_custom_place() and place.custom_device_type() in device_types:
        return _probe(place.custom_device_type(), place.custom_device_id())
    return False, f"the tensors are on {place}; kernels run on {', '.join(sorted(device_types))}", None


@functools.cache
def _triton() -> tuple[bool, str, BaseException | None]:
    try:
        import triton
        import triton.language
        import triton.runtime.jit
    except ModuleNotFoundError as error:
        if error.name == "triton":
            return False, "Triton is not installed (pip install 'triton>=3.3')", error
        return False, f"the Triton installation is broken: {error}", error
    except Exception as error:
        return False, f"the Triton installation is broken: {type(error).__name__}: {error}", error
    version = getattr(triton, "__version__", "unknown")
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        return False, f"the Triton installation is broken: its version is {version!r}", None
    if tuple(int(n) for n in numbers.groups()) < OLDEST_TRITON:
        return False, f"Triton {version} is too old: kernels need Triton >= 3.3", None
    try:
        from .probe import probe_kernel  # noqa: F401
    except Exception as error:
        return False, f"Triton {version} cannot define a kernel: {type(error).__name__}: {error}", error
    return True, f"Triton {version}" + (" (interpreter)" if is_interpreting() else ""), None


def _gpu_index() -> int | None:
    """The GPU that Paddle would use, or None when it has none."""
    if not paddle.is_compiled_with_cuda() or paddle.is_compiled_with_rocm() or paddle.device.cuda.device_count() < 1:
        return None
    name, _, index = paddle.device.get_device().partition(":")
    return int(index) if name == "gpu" and index else 0


def _why_no_gpu() -> str:
    if paddle.is_compiled_with_rocm():
        return "this Paddle is built for ROCm; kernels run on NVIDIA GPUs"
    if not paddle.is_compiled_with_cuda():
        return "this Paddle is built without CUDA; kernels run on NVIDIA GPUs"
    return "Paddle sees no GPU (driver missing, or CUDA_VISIBLE_DEVICES empty)"


@functools.cache
def _gpu(index: int) -> tuple[bool, str, BaseException | None]:
    """Whether kernels run on GPU `index`: version of Paddle, capability, then a real launch."""
    if paddle.is_compiled_with_rocm():
        return False, _why_no_gpu(), None
    if not hasattr(paddle, "enable_compat"):
        return False, f"Paddle {paddle.__version__} is too old for Triton on a GPU: Paddle >= 3.3 is needed", None
    try:
        major, minor = paddle.device.cuda.get_device_capability(index)
    except Exception as error:
        return False, f"GPU {index} does not answer: {type(error).__name__}: {error}", error
    if (major, minor) < OLDEST_CAPABILITY:
        return False, f"GPU {index} has compute capability {major}.{minor} (sm_{major}{minor}): sm_80 is needed", None
    available, reason, cause = _probe("gpu", index)
    return available, f"sm_{major}{minor}" if available else reason, cause


@functools.cache
def _probe(device_type: str, index: int) -> tuple[bool, str, BaseException | None]:
    """Compiles and launches a kernel: a compiler, ptxas or libcuda that is missing shows here and nowhere else."""
    n = 5
    try:
        if device_type == "gpu":
            _paddle_driver()
        place = paddle.CPUPlace() if device_type == "cpu" else f"{device_type}:{index}"
        out = paddle.to_tensor([0] * n, dtype="int32", place=place)
        from .probe import probe_kernel

        launch(probe_kernel, (1,), out, n, BLOCK=8)
        found = out.numpy().tolist()
    except Exception as error:
        return False, _explain(error), error
    if found != [1, 2, 3, 4, 5]:
        return False, f"a kernel of Triton's gave {found} for [1, 2, 3, 4, 5] on {device_type}:{index}", None
    return True, f"{device_type}:{index}", None


def _explain(error: BaseException) -> str:
    text = f"{type(error).__name__}: {error}".strip()
    if "C compiler" in text:
        return f"Triton finds no C compiler (gcc or clang, or the variable CC), which it needs to launch: {text}"
    if "libcuda" in text:
        return f"Triton does not find the CUDA driver's library: {text}"
    if "ptxas" in text:
        return f"Triton's assembler ptxas fails: {text}"
    if "active drivers" in text:
        return f"Triton finds no driver for the device: {text}"
    return f"Triton cannot run a kernel here: {text}"


def forget() -> None:
    """Lets every check be made again. For tests, and for a notebook in which Triton was installed meanwhile."""
    for cached in (is_interpreting, _paddle_driver, _triton, _gpu, _probe):
        cached.cache_clear()
