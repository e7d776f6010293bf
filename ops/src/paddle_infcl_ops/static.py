# SPDX-License-Identifier: Apache-2.0
"""`info_nce` in a static graph (paddle.jit.to_static, full_graph too): one registered operator.

Kernels need addresses, which a graph that is being traced has not. `paddle.static.register_op` (Paddle 3.3) puts a
Python function into the graph as an operator that runs on real tensors. It has no gradient of its own, so the operator
returns loss and gradients together, and the graph gets them as the gradient of a term that is always 0:

    loss = value + sum over tensors of (<gradient_t, t> - stop_gradient(<gradient_t, t>))
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace

import paddle

_TENSORS = ("left", "right", "own", "self_column", "row_ids", "column_ids", "owner", "limit")
_PLAIN = ("row_offset", "owner_rule")


def info_nce(run, groups, scale, row_weights, memory_budget):
    """The operator of a traced `info_nce`.

    Args:
        run: `info_nce` on real tensors.
        groups, scale, row_weights, memory_budget: as there, with the graph's values as tensors.

    Returns:
        The graph's value of the loss.

    Raises:
        RuntimeError: Paddle is older than 3.3.
    """
    if not hasattr(paddle.static, "register_op"):
        raise RuntimeError(
            f"Triton kernels in a static graph need Paddle >= 3.3; this is {paddle.__version__}. Use "
            "to_static(full_graph=False), which runs the loss outside of the graph"
        )
    call = _Call(run, groups, scale, row_weights, memory_budget)
    operator = _operator(len(call.inputs), 1 + len(call.wanted))
    outputs = operator(*(_constant(t) for t in call.inputs), call)
    value, *gradients = outputs if call.wanted else [outputs]
    for k, gradient in zip(call.wanted, gradients, strict=True):
        term = (gradient.astype("float32") * call.inputs[k].astype("float32")).sum()
        value = value + (term - _constant(term))
    return value


def _constant(t):
    """A copy without gradient: the graph must not look for the operator's own one.

    A copy because `detach` shares memory in a way that the executor doesn't see: it hands the memory out again while
    the operator still reads it.
    """
    copy = paddle.assign(t)
    copy.stop_gradient = True
    return copy


def keep_out(*modules) -> None:
    """Keeps to_static from looking into modules: addresses and grids mean nothing in a graph.

    `ignore_module` is heeded in full graphs only. What runs outside of a graph (full_graph=False) is looked into frame
    by frame all the same, and Paddle 3.3 fails on some of ours, so their folders go on its own list as well.
    """
    paddle.jit.ignore_module(list(modules))
    try:
        from paddle.jit.sot.opcode_translator import skip_files

        skip_files.skip_file_names.update(os.path.dirname(module.__file__) + os.sep for module in modules)
        skip_files.setup_skip_files()
    except (ImportError, AttributeError):  # not a public interface: other versions do without
        pass


class Untraced:
    """While it is entered, to_static(full_graph=False) doesn't look into the frames that run."""

    def __enter__(self):
        self.set = getattr(paddle.framework.core, "set_eval_frame", None)
        self.before = self.set(None) if self.set else None

    def __exit__(self, *error):
        if self.set:
            self.set(self.before)


class _Call:
    """What the operator does on real tensors, and what it tells the graph about its outputs."""

    def __init__(self, run, groups, scale, row_weights, memory_budget):
        self.run, self.memory_budget = run, memory_budget
        self.inputs = []
        self.places = {}
        self.groups = [[self._describe(block) for block in group] for group in groups]
        self.scale, self.row_weights = self._place(scale), self._place(row_weights)
        learn = {t for group in self.groups for block in group for t in (block["left"], block["right"])}
        learn = [k.index for k in (*learn, self.scale) if isinstance(k, _Input)]
        self.wanted = sorted(k for k in set(learn) if not self.inputs[k].stop_gradient)

    def _place(self, x):
        if not isinstance(x, paddle.pir.Value):  # numbers, and tensors that are constants of the graph
            return x
        if id(x) not in self.places:
            self.places[id(x)] = _Input(len(self.inputs))
            self.inputs.append(x)
        return self.places[id(x)]

    def _describe(self, block):
        fields = {name: self._place(getattr(block, name)) for name in _TENSORS}
        fields |= {name: getattr(block, name) for name in _PLAIN}
        fields["hardness"], fields["guide"] = block.hardness, None
        if block.guide is not None:
            guide = {name: self._place(getattr(block.guide, name)) for name in ("left", "right", "threshold")}
            fields["guide"] = {**guide, "keep_own": block.guide.keep_own}
        return fields

    def __call__(self, *tensors):
        tensors = [t.detach() for t in tensors]
        for k, t in enumerate(tensors):
            t.stop_gradient = k not in self.wanted

        def real(x):
            if isinstance(x, _Input):
                return tensors[x.index]
            return SimpleNamespace(**{k: real(v) for k, v in x.items()}) if isinstance(x, dict) else x

        with paddle.enable_grad():
            loss = self.run(
                [[real(block) for block in group] for group in self.groups], scale=real(self.scale),
                row_weights=real(self.row_weights), memory_budget=self.memory_budget,
            )  # fmt: skip
            gradients = paddle.grad(loss, [tensors[k] for k in self.wanted]) if self.wanted else []
        return (loss.detach(), *gradients)

    def shapes(self, *metas):
        """Shapes and dtypes of the outputs, from those of the inputs."""
        meta = paddle.static.MetaTensor
        outputs = [meta(shape=[], dtype=paddle.float32)]
        return (*outputs, *(meta(shape=metas[k].shape, dtype=metas[k].dtype) for k in self.wanted))


class _Input:
    """Stands for the operator's k-th tensor."""

    def __init__(self, index: int):
        self.index = index


@functools.cache
def _operator(inputs: int, outputs: int):
    """The registered operator with so many inputs and outputs. Paddle wants every input as a named parameter."""
    names = ", ".join(f"t{k}" for k in range(inputs))
    scope: dict = {}
    exec(  # the only way to a function with a given number of named parameters
        f"def run({names}, call):\n    out = call({names})\n    return out if len(out) > 1 else out[0]\n"
        f"def shapes({names}, call):\n    out = call.shapes({names})\n    return out if len(out) > 1 else out[0]\n",
        scope,
    )
    return paddle.static.register_op(
        scope["run"], name=f"paddle_infcl_info_nce_{inputs}_{outputs}", infer_meta=scope["shapes"],
        input_names=[f"t{k}" for k in range(inputs)], output_names=[f"o{k}" for k in range(outputs)],
    )  # fmt: skip
