# SPDX-License-Identifier: Apache-2.0
"""A guide that breaks is named: its NaN would be above no threshold, and it would drop nothing without a word."""

from __future__ import annotations

import numpy as np
import paddle
import pytest

from paddle_infcl.objectives import GuidedObjective, ObjectiveLoss
from paddle_infcl.trainer.guide import Guide, window_extras


class Encoder(paddle.nn.Layer):
    """A text's vector is its numbers; `broken` in place of those of the texts that begin with 0."""

    def __init__(self, broken=None, dtype="float32"):
        super().__init__()
        self.broken, self.dtype = broken, dtype

    def encode(self, input_ids, attention_mask):
        vectors = input_ids.astype("float32")
        if self.broken is not None:
            vectors[:, 1] = paddle.where(
                input_ids[:, 0] == 0, paddle.full_like(vectors[:, 1], self.broken), vectors[:, 1]
            )
        return vectors.astype(self.dtype)


def texts(first):
    ids = np.array([[number, 2, 3] for number in first])
    return {"input_ids": paddle.to_tensor(ids), "attention_mask": paddle.ones(ids.shape, dtype="int64")}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_live_guide_that_breaks_is_named(broken, dtype):
    guide = Guide(Encoder(broken, dtype), None, batch_size=2, name="guide_model_name_or_path /models/gist")
    window = [{"guide": {"query": texts([1, 4]), "passages": texts([1, 5, 0, 6, 0])}}]
    with pytest.raises(ValueError, match=r"/models/gist: 2 of 5 vectors of the guide are not finite.* number 2: "):
        window_extras(window, ["guide"], guide)
    window = [{"guide": {"query": texts([1, 4]), "passages": texts([1, 5])}}]
    extras = window_extras(window, ["guide"], guide)
    assert extras["guide_q"].shape == [2, 3] and extras["guide_p"].shape == [2, 3]


@pytest.mark.parametrize(
    ("side", "fields"), [("query_vectors", "query_guide"), ("passage_vectors", "pos_guide or neg_guide")]
)
def test_vectors_of_the_data_that_are_broken_are_named(side, fields):
    vectors = {"query_vectors": np.eye(2, dtype="float32"), "passage_vectors": np.eye(2, dtype="float32")}
    good = {"guide": {name: array.copy() for name, array in vectors.items()}}
    assert window_extras([good], ["guide"], None)["guide_p"].shape == [2, 2]
    vectors[side][1, 0] = np.nan
    with pytest.raises(ValueError, match=f"{fields} of the data: 1 of 2 vectors .* the first is number 1"):
        window_extras([good, {"guide": vectors}], ["guide"], None)


@pytest.mark.parametrize("side", ["guide_q", "guide_p"])
def test_the_layer_names_the_side_that_is_broken(side):
    guides = {"guide_q": paddle.eye(2), "guide_p": paddle.eye(2)}
    layer = ObjectiveLoss(GuidedObjective(), backend="paddle")
    assert np.isfinite(float(layer(paddle.eye(2), paddle.eye(2), **guides)))
    guides[side][0, 1] = np.inf
    with pytest.raises(ValueError, match=f"{side}: 1 of 2 vectors of the guide are not finite, the first is number 0"):
        layer(paddle.eye(2), paddle.eye(2), **guides)
