# SPDX-License-Identifier: Apache-2.0
"""`paddle-infcl doctor`: what is installed, what runs, and why not the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform

PACKAGES = (
    ("paddle_infcl",),
    ("paddle_infcl_ops",),
    ("paddlepaddle", "paddlepaddle-gpu"),
    ("paddlenlp",),
    ("triton",),
    ("torch",),
    ("numpy",),
    ("faiss-cpu", "faiss-gpu"),
)


def _version(names: tuple[str, ...]) -> str:
    for name in names:
        try:
            shown = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return shown if name == names[0] else f"{shown} ({name})"
    importable = importlib.util.find_spec(names[0]) is not None
    return "importable, not installed as a package" if importable else "not installed"


def _paddle_lines() -> tuple[list[str], bool]:
    try:
        import paddle

        from paddle_infcl.device import available_device

        device, reason = available_device()
        lines = [f"{'build':<18}{'with' if paddle.is_compiled_with_cuda() else 'without'} CUDA"]
        if paddle.is_compiled_with_cuda():
            for index in range(paddle.device.cuda.device_count()):
                properties = paddle.device.cuda.get_device_properties(index)
                memory = properties.total_memory / 2**30
                capability = f"sm_{properties.major}{properties.minor}"
                lines.append(f"{f'gpu:{index}':<18}{properties.name}, {capability}, {memory:.0f} GiB")
        for custom in paddle.device.get_all_custom_device_type() or []:
            lines.append(f"{'custom device':<18}{custom}")
        lines.append(f"{'device: auto':<18}{device}" + (f" ({reason})" if reason else ""))
        threads = os.environ.get("OMP_NUM_THREADS")
        cores = os.cpu_count() or 1
        if device == "cpu":
            advice = "" if threads or cores == 1 else "; matrix products use one: set it before Python starts"
            lines.append(f"{'OMP_NUM_THREADS':<18}{threads or 'not set'}, {cores} cores{advice}")
        paddle.matmul(paddle.ones([2, 2]), paddle.ones([2, 2])).numpy()
        return lines, True
    except Exception as error:  # whatever is broken is what the user wants to read
        return [f"{'paddle':<18}does not work: {type(error).__name__}: {error}"], False


def _paddlenlp_line() -> tuple[str, bool]:
    try:
        import paddlenlp.trl  # noqa: F401

        return "imports", True
    except Exception as error:
        return f"does not import: {type(error).__name__}: {error}", False


def _backend_lines() -> list[str]:
    import paddle

    from paddle_infcl import kernels
    from paddle_infcl.device import available_device

    device = available_device()[0]
    runs, reason, error = kernels.triton_status()
    if runs:
        paddle.set_device(device)
        runs, reason, error = kernels.triton_status(paddle.ones([1]))
    why = "runs" if runs else f"does not run: {reason}" + (f" [{type(error).__name__}]" if error else "")
    return [
        f"{'triton':<18}{why}",
        f"{'paddle':<18}runs",
        f"{'dense':<18}runs",
        f"{'auto would take':<18}{'triton' if runs else 'paddle'}",
    ]


def doctor() -> int:
    """Prints what was found.

    Returns:
        0 when training can run here, 1 when not.
    """
    print(f"{'python':<18}{platform.python_version()} on {platform.system()} {platform.machine()}")
    for names in PACKAGES:
        print(f"{names[0]:<18}{_version(names)}")
    print("\nPaddle")
    lines, paddle_works = _paddle_lines()
    print("\n".join(f"  {line}" for line in lines))
    line, paddlenlp_works = _paddlenlp_line()
    print(f"  {'paddlenlp':<18}{line}")
    if paddle_works:
        print("\ninf_cl_backend")
        print("\n".join(f"  {line}" for line in _backend_lines()))
    works = paddle_works and paddlenlp_works
    print("\nTraining can run." if works else "\nTraining can't run here: see above.")
    return 0 if works else 1
