# SPDX-License-Identifier: Apache-2.0
"""`SentenceEncoder` inside paddle.DataParallel: two processes average to the gradient of one."""

import subprocess
import sys

import numpy as np
import pytest

from tests.distributed.launcher import environment, free_ports, launch

WORKER = """
import sys
from contextlib import nullcontext
import numpy as np, paddle
from paddle.distributed.fleet.utils.hybrid_parallel_util import fused_allreduce_gradients
from paddle_infcl.distributed.watch import end_process
from paddle_infcl.modeling import SentenceEncoder
from tests.test_modeling import enable_recompute
from tests.tiny_models import backbone, batch

out, world = sys.argv[1], int(sys.argv[2])
if world > 1:
    paddle.distributed.init_parallel_env()
rank = paddle.distributed.get_rank()
for kind, recompute in (("bert", False), ("bert", True), ("xlm-roberta", True), ("qwen2", True)):
    encoder = SentenceEncoder(backbone(kind))
    for layer in encoder.sublayers():
        if isinstance(layer, paddle.nn.Dropout):
            layer.p = 0.0
        if hasattr(layer, "dropout") and isinstance(layer.dropout, float):  # Paddle's attention
            layer.dropout = 0.0
    if recompute:
        encoder.apply(enable_recompute)
    encoder.train()
    # No search for unused parameters: there are none, since the pooler is frozen.
    model = paddle.DataParallel(encoder, find_unused_parameters=False) if world > 1 else encoder
    # As in PaddleNLP's Trainer: recomputed segments report their parameters more than once, so gradients are
    # averaged after the backward pass.
    with model.no_sync() if world > 1 and recompute else nullcontext():
        for shard in [0, 1] if world == 1 else [rank]:
            (q, qm), (p, pm) = batch(3, 6, seed=shard), batch(3, 9, seed=10 + shard)
            queries, passages = ({"input_ids": i, "attention_mask": m} for i, m in ((q, qm), (p, pm)))
            a, b = model(query=queries, passages=passages, return_encode=True)
            ((a * b).sum() / (2 if world == 1 else 1)).backward()
    if world > 1 and recompute:
        fused_allreduce_gradients(list(model.parameters()), None)
    gradients = {n: p.grad.numpy() for n, p in encoder.named_parameters() if p.grad is not None}
    np.savez(f"{out}-{kind}-{recompute}-{world}-{rank}.npz", **gradients)
end_process(0)
"""


@pytest.mark.slow
def test_two_processes_average_to_the_gradient_of_one(tmp_path):
    out = str(tmp_path / "gradients")
    launch(2, ["-c", WORKER, out, "2"])
    subprocess.run([sys.executable, "-c", WORKER, out, "1"], env=environment(0, 1, free_ports(2)), check=True)
    for case in ("bert-False", "bert-True", "xlm-roberta-True", "qwen2-True"):
        whole, first, second = (np.load(f"{out}-{case}-{name}.npz") for name in ("1-0", "2-0", "2-1"))
        assert set(whole) == set(first) == set(second) and len(whole) > 10
        for name in whole:
            np.testing.assert_array_equal(first[name], second[name])
            tolerance = 2e-6 * np.abs(whole[name]).max() + 1e-7
            np.testing.assert_allclose(first[name], whole[name], atol=tolerance, err_msg=f"{case} {name}")
