# SPDX-License-Identifier: Apache-2.0
"""Launching, and the guard. Fakes play GPUs, torch and broken installations; tests/gpu runs the real thing."""

from __future__ import annotations

import os
import subprocess
import sys
import types

import numpy as np
import paddle
import pytest

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from paddle_infcl_ops import driver  # noqa: E402
from triton.runtime import driver as triton_config  # noqa: E402


@triton.jit
def double_kernel(x, out, n, stride, BLOCK: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + offsets * stride, mask=offsets < n, other=0.0).to(tl.float32)
    tl.store(out + offsets, 2 * values, mask=offsets < n)


class Place:
    """A place as Paddle describes it."""

    def __init__(self, kind: str, index: int = 0):
        self.kind, self.index = kind, index

    def is_cpu_place(self):
        return self.kind == "cpu"

    def is_gpu_place(self):
        return self.kind == "gpu"

    def is_custom_place(self):
        return self.kind not in ("cpu", "gpu", "xpu")

    def custom_device_type(self):
        return self.kind

    def gpu_device_id(self):
        return self.index

    custom_device_id = gpu_device_id

    def __str__(self):
        return f"Place({self.kind}:{self.index})"


def tensor_on(kind: str, index: int = 0):
    return types.SimpleNamespace(place=Place(kind, index))


class Recorder:
    """Stands for a kernel: keeps what was active while it was launched."""

    def __init__(self, error: Exception | None = None):
        self.error, self.seen = error, []

    def __getitem__(self, grid):
        def run(*args, **meta):
            self.seen.append((triton_config.active, paddle.device.get_device(), args, meta))
            if self.error is not None:
                raise self.error

        return run


@pytest.fixture(autouse=True)
def _fresh():
    driver.forget()
    yield
    driver.forget()


@pytest.fixture
def compiled(monkeypatch):
    """As in a process without TRITON_INTERPRET."""
    monkeypatch.setattr(driver, "is_interpreting", lambda: False)


def _nvidia() -> dict:
    """The globals of the module of Triton's CUDA driver (Triton 3.3 loads it under a name of its own)."""
    from triton.backends import backends

    return backends["nvidia"].driver.__init__.__globals__


@pytest.fixture
def fake_cuda(monkeypatch, compiled):
    """Paddle's CUDA build with one GPU of capability 9.0, and Triton's CUDA driver without libcuda."""
    monkeypatch.setitem(_nvidia(), "CudaUtils", object)
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: True)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda index=None: (9, 0))


@pytest.fixture
def active(monkeypatch):
    """What another framework left active."""
    name = "_active" if "_active" in triton_config.__dict__ else "active"
    other = types.SimpleNamespace(name="the driver of torch")
    monkeypatch.setitem(triton_config.__dict__, name, other)
    return other


# --- under the interpreter -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_the_interpreter_reads_and_writes_paddle_tensors_in_place(dtype):
    base = paddle.arange(20, dtype="float32").astype(dtype).reshape([4, 5])
    out = paddle.full([6], -1.0)
    driver.launch(double_kernel, (2,), base[:, 3], out, 4, base.strides[0], BLOCK=2)
    np.testing.assert_array_equal(out.numpy(), [6, 16, 26, 36, -1, -1])


def test_the_grid_may_be_a_function_of_the_constants():
    out = paddle.zeros([5])
    driver.launch(double_kernel, lambda meta: (triton.cdiv(5, meta["BLOCK"]),), paddle.ones([5]), out, 5, 1, BLOCK=4)
    np.testing.assert_array_equal(out.numpy(), [2] * 5)


def test_the_interpreter_is_reported_and_probed():
    assert driver.is_interpreting()
    available, reason, cause = driver.availability()
    assert available and "interpreter" in reason and cause is None
    assert driver.can_run(paddle.zeros([1])) == (True, "cpu:0")
    runs, reason = driver.can_run(tensor_on("gpu"))
    assert not runs and "TRITON_INTERPRET" in reason


def test_a_kernel_that_writes_nonsense_is_not_trusted(monkeypatch):
    monkeypatch.setattr(driver, "launch", lambda *args, **meta: None)
    runs, reason = driver.can_run(paddle.zeros([1]))
    assert not runs and "[0, 0, 0, 0, 0]" in reason


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_memory_under_the_interpreter_is_filled_with_nan(dtype):
    out = driver.empty([2, 3], dtype, paddle.zeros([1]))
    assert out.dtype == getattr(paddle, dtype) and out.shape == [2, 3]
    assert np.isnan(out.astype("float32").numpy()).all()
    assert (driver.empty([2], paddle.int32, out).numpy() == -(2**31)).all()


def test_memory_lies_beside_a_tensor(compiled):
    out = driver.empty([2, 3], paddle.float16, paddle.zeros([1]))
    assert out.shape == [2, 3] and out.dtype == paddle.float16 and out.place.is_cpu_place()


# --- launches on a GPU -----------------------------------------------------------------------------------------------


def _on_gpu(monkeypatch, index=0, current=0):
    ours = types.SimpleNamespace(get_current_device=lambda: current)
    monkeypatch.setattr(driver, "_paddle_driver", lambda: ours)
    monkeypatch.setattr(driver, "_first_tensor", lambda args, meta: tensor_on("gpu", index))
    return ours


def test_paddles_driver_is_active_during_a_launch_only(monkeypatch, compiled, active):
    ours, kernel = _on_gpu(monkeypatch), Recorder()
    driver.launch(kernel, (1,), 1, 2.5, BLOCK=4)
    ((seen, _, args, meta),) = kernel.seen
    assert seen is ours and args == (1, 2.5) and meta == {"BLOCK": 4}
    assert triton_config.active is active


def test_the_driver_before_comes_back_when_a_launch_raises(monkeypatch, compiled, active):
    from triton.runtime import _allocation

    allocator = _allocation._allocator.get() if hasattr(_allocation._allocator, "get") else _allocation._allocator
    _on_gpu(monkeypatch, index=1)
    devices = []
    monkeypatch.setattr(paddle.device, "set_device", devices.append)
    kernel = Recorder(ValueError("out of resources"))
    with pytest.raises(ValueError, match="out of resources"):
        driver.launch(kernel, (1,), 1)
    assert triton_config.active is active and devices == ["gpu:1", "cpu"]
    after = _allocation._allocator.get() if hasattr(_allocation._allocator, "get") else _allocation._allocator
    assert after is allocator


def test_a_launch_does_not_ask_torch_for_its_driver(monkeypatch, compiled):
    if "_active" not in triton_config.__dict__:
        pytest.skip("this Triton makes its default driver at the first look by itself")
    monkeypatch.setitem(triton_config.__dict__, "_active", None)
    monkeypatch.setattr(type(triton_config), "default", property(lambda self: pytest.fail("asked for the default")))
    _on_gpu(monkeypatch)
    driver.launch(Recorder(), (1,), 1)
    assert triton_config.__dict__["_active"] is None


def test_scratch_of_a_kernel_comes_from_paddle(monkeypatch, compiled, active):
    from triton.runtime import _allocation

    _on_gpu(monkeypatch)

    class Kernel:
        def __getitem__(self, grid):
            variable = _allocation._allocator
            return lambda: sizes.append((variable.get() if hasattr(variable, "get") else variable)(64, 128, 0).shape)

    sizes = []
    driver.launch(Kernel(), (1,))
    assert sizes == [[64]]


def test_a_custom_device_keeps_the_driver_that_is_active(monkeypatch, compiled, active):
    monkeypatch.setattr(driver, "_first_tensor", lambda args, meta: tensor_on("accelerator"))
    with pytest.raises(RuntimeError, match="cannot read a tensor on"):
        driver.launch(Recorder(), (1,), 1)
    monkeypatch.setattr(driver, "device_types", {"gpu", "accelerator"})
    kernel = Recorder()
    driver.launch(kernel, (1,), 1)
    assert kernel.seen[0][0] is active is triton_config.active


def test_tensors_that_no_kernel_can_read(compiled):
    with pytest.raises(RuntimeError, match="cannot read a tensor on"):
        driver.launch(Recorder(), (1,), paddle.zeros([1]))
    with pytest.raises(RuntimeError, match="at least one tensor"):
        driver.launch(Recorder(), (1,), 1)
    descriptor = types.SimpleNamespace(base=paddle.zeros([1]))
    assert driver._first_tensor((1, descriptor), {}) is descriptor.base


def test_a_descriptors_base_is_wrapped_for_the_interpreter():
    base = paddle.ones([4])
    descriptor = types.SimpleNamespace(base=base, shape=[4])
    wrapped = driver._for_interpreter(descriptor)
    assert wrapped.base.data_ptr() == base.data_ptr() and wrapped.base.size() == [4] and wrapped.base.stride() == [1]
    assert wrapped.base.element_size() == 4 and descriptor.base is base


# --- torch beside Paddle ---------------------------------------------------------------------------------------------


@pytest.fixture
def torch_beside(monkeypatch):
    """A torch with a GPU of its own, imported before us."""
    torch = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(
        get_device_capability=lambda i=None: (7, 0), current_device=lambda: 7, set_device=lambda i: None
    )
    torch._C = types.ModuleType("torch._C")
    torch._C._cuda_getCurrentRawStream = lambda i: 0x70
    monkeypatch.setitem(sys.modules, "torch", torch)
    monkeypatch.setitem(sys.modules, "torch._C", torch._C)
    yield torch
    # Paddle keeps the modules that it has put aside, and would put them back after a later test.
    from paddle.compat.proxy import TORCH_MODULES_CACHE

    TORCH_MODULES_CACHE.clear()


def _asks_paddle(made) -> None:
    from paddle.base.libpaddle import _get_current_raw_stream

    assert made.get_current_device() == 0 and made.get_current_device.__module__.startswith("paddle")
    assert made.get_current_stream is _get_current_raw_stream
    assert made.get_device_capability.__module__.startswith("paddle")


def test_the_driver_asks_paddle_and_torch_does_not_leak(fake_cuda):
    before = {name for name in sys.modules if name.partition(".")[0] == "torch"}
    _asks_paddle(driver._paddle_driver())
    assert {name for name in sys.modules if name.partition(".")[0] == "torch"} == before
    assert driver._paddle_driver() is driver._paddle_driver()


def test_the_driver_asks_paddle_with_torch_beside_it(fake_cuda, torch_beside):
    _asks_paddle(driver._paddle_driver())
    assert sys.modules["torch"] is torch_beside and sys.modules["torch._C"] is torch_beside._C
    assert torch_beside.cuda.current_device() == 7


@pytest.mark.parametrize("scope", [{"triton"}, None], ids=["triton", "everywhere"])
def test_the_users_own_compat_mode_stays_as_it_was(fake_cuda, torch_beside, scope):
    from paddle.compat.proxy import TORCH_PROXY_FINDER as finder

    paddle.enable_compat(scope=scope, silent=True)
    try:
        state = (finder._globally_enabled, set(finder._local_enabled_scope), sys.meta_path.count(finder))
        _asks_paddle(driver._paddle_driver())
        assert state == (finder._globally_enabled, finder._local_enabled_scope, sys.meta_path.count(finder))
    finally:
        paddle.disable_compat()
    assert sys.modules["torch"] is torch_beside


def test_a_driver_bound_to_torch_is_refused(fake_cuda, monkeypatch):
    from triton.backends import backends

    made = types.SimpleNamespace(get_current_device=os.getpid)
    monkeypatch.setitem(backends, "nvidia", types.SimpleNamespace(driver=lambda: made))
    with pytest.raises(RuntimeError, match="asks posix, not Paddle"):
        driver._paddle_driver()


def test_importing_leaves_no_trace():
    code = (
        "import sys; from paddle_infcl_ops import driver; driver.availability(); import paddle;"
        "assert driver.can_run(paddle.zeros([1])) == (False, 'the tensors are on the CPU');"
        "assert not any(m.partition('.')[0] == 'torch' for m in sys.modules)"
    )
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=120)


# --- the guard -------------------------------------------------------------------------------------------------------


def test_the_tensor_is_asked_not_the_build(fake_cuda, monkeypatch):
    monkeypatch.setattr(driver, "_paddle_driver", lambda: pytest.fail("nothing to launch"))
    assert driver.can_run(paddle.zeros([1])) == (False, "the tensors are on the CPU")


def test_a_gpu_that_answers(fake_cuda, monkeypatch):
    monkeypatch.setattr(driver, "_probe", lambda kind, index: (True, f"{kind}:{index}", None))
    assert driver.can_run(tensor_on("gpu")) == (True, "sm_90")
    available, reason, cause = driver.availability()
    assert available and reason == f"Triton {triton.__version__}, sm_90" and cause is None
    monkeypatch.setattr(driver, "device_types", set())
    assert not driver.can_run(tensor_on("gpu"))[0]


def test_other_devices(compiled, monkeypatch):
    runs, reason = driver.can_run(tensor_on("xpu"))
    assert not runs and "xpu" in reason and "gpu" in reason
    monkeypatch.setattr(driver, "device_types", {"gpu", "accelerator"})
    monkeypatch.setattr(driver, "_probe", lambda kind, index: (True, f"{kind}:{index}", None))
    assert driver.can_run(tensor_on("accelerator", 1)) == (True, "accelerator:1")
    monkeypatch.setattr(paddle.device, "get_all_custom_device_type", lambda: ["accelerator"])
    assert driver.availability()[0]


def test_triton_missing(monkeypatch, compiled):
    monkeypatch.setitem(sys.modules, "triton", None)
    available, reason, cause = driver.availability()
    assert not available and "not installed" in reason and isinstance(cause, ModuleNotFoundError)
    assert not driver.can_run(tensor_on("gpu"))[0]


@pytest.fixture
def other_triton(monkeypatch, tmp_path, compiled):
    """Puts a package of another content before Triton."""

    def put(text: str) -> None:
        for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.delitem(sys.modules, "paddle_infcl_ops.probe", raising=False)
        package = tmp_path / "triton"
        for folder in (package, package / "language", package / "runtime", package / "runtime" / "jit"):
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").write_text("")
        (package / "__init__.py").write_text(text)
        monkeypatch.syspath_prepend(str(tmp_path))

    yield put
    sys.modules.pop("paddle_infcl_ops.probe", None)
    for name in [n for n in sys.modules if n.partition(".")[0] == "triton"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "text, told",
    [
        ("import a_part_that_is_not_there", "broken: No module named 'a_part_that_is_not_there'"),
        ("raise OSError('libtriton.so: undefined symbol')", "broken: OSError: libtriton.so: undefined symbol"),
        ("", "broken: its version is 'unknown'"),
        ("__version__ = '3.2.0'", "Triton 3.2.0 is too old: kernels need Triton >= 3.3"),
        ("__version__ = '3.6.0'", "Triton 3.6.0 cannot define a kernel: AttributeError"),
    ],
)
def test_triton_broken_or_too_old(other_triton, text, told):
    other_triton(text)
    available, reason, _ = driver.availability()
    assert not available and told in reason
    assert driver.can_run(tensor_on("gpu"))[1] == reason


@pytest.mark.parametrize(
    "cuda, rocm, count, told",
    [
        (False, False, 0, "built without CUDA"),
        (False, True, 1, "built for ROCm"),
        (True, False, 0, "Paddle sees no GPU"),
    ],
)
def test_no_gpu(monkeypatch, compiled, cuda, rocm, count, told):
    monkeypatch.setattr(paddle, "is_compiled_with_cuda", lambda: cuda)
    monkeypatch.setattr(paddle, "is_compiled_with_rocm", lambda: rocm)
    monkeypatch.setattr(paddle.device.cuda, "device_count", lambda: count)
    available, reason, cause = driver.availability()
    assert not available and told in reason and cause is None


def test_rocm_tensors(fake_cuda, monkeypatch):
    monkeypatch.setattr(paddle, "is_compiled_with_rocm", lambda: True)
    assert driver.can_run(tensor_on("gpu")) == (False, "this Paddle is built for ROCm; kernels run on NVIDIA GPUs")


def test_a_gpu_that_is_too_old(fake_cuda, monkeypatch):
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda index=None: (7, 5))
    runs, reason = driver.can_run(tensor_on("gpu", 1))
    assert not runs and "GPU 1" in reason and "sm_75" in reason and "sm_80 is needed" in reason
    assert driver.availability()[1] == reason.replace("GPU 1", "GPU 0")


def test_a_gpu_that_does_not_answer(fake_cuda, monkeypatch):
    def fail(index=None):
        raise OSError("CUDA error 999")

    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", fail)
    available, reason, cause = driver.availability()
    assert not available and "does not answer: OSError: CUDA error 999" in reason and isinstance(cause, OSError)


def test_paddle_too_old(fake_cuda, monkeypatch):
    monkeypatch.delattr(paddle, "enable_compat")
    runs, reason = driver.can_run(tensor_on("gpu"))
    assert not runs and paddle.__version__ in reason and "Paddle >= 3.3" in reason
    with pytest.raises(RuntimeError, match=r"Paddle >= 3\.3"):
        driver._paddle_driver()


def test_no_compiler(compiled, monkeypatch, tmp_path):
    """Triton's own constructor, with no compiler to be found."""
    nvidia = _nvidia()
    monkeypatch.setitem(nvidia, "library_dirs", lambda: [])
    monkeypatch.setattr(paddle.device.cuda, "get_device_capability", lambda index=None: (9, 0))
    utils = nvidia["CudaUtils"]
    monkeypatch.setattr(utils, "instance", object.__new__(utils), raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    available, reason, cause = driver.run_check(tensor_on("gpu"))
    assert not available and "no C compiler" in reason and isinstance(cause, RuntimeError)


@pytest.mark.parametrize(
    "text, told",
    [
        ("libcuda.so cannot found!", "CUDA driver's library"),
        ("`ptxas` failed with error code 255", "ptxas fails"),
        ("0 active drivers ([]). There should only be one.", "no driver"),
        ("something else", "cannot run a kernel here: RuntimeError: something else"),
    ],
)
def test_other_causes(fake_cuda, monkeypatch, text, told):
    error = RuntimeError(text)

    def fail():
        raise error

    monkeypatch.setattr(driver, "_paddle_driver", fail)
    available, reason, cause = driver.run_check(tensor_on("gpu"))
    assert not available and told in reason and text in reason and cause is error
