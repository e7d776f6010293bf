# SPDX-License-Identifier: Apache-2.0
"""Pooling, normalisation, padding, recompute and dropout of `SentenceEncoder`, over tiny random backbones."""

import numpy as np
import paddle
import pytest

from paddle_infcl.functional.vectors import l2_normalize
from paddle_infcl.modeling import SentenceEncoder
from paddle_infcl.pooling import pad_right, pool
from tests.tiny_models import KINDS, VOCAB, backbone, batch, seed_all

ALL_KINDS = (*KINDS, "gemma", "gpt", "llama", "mistral", "opt")


def vectors(encoder, ids, mask):
    encoder.eval()
    with paddle.no_grad():
        return encoder.encode(ids, mask).numpy()


# pooling and normalisation, alone


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_pool_against_numpy_with_nan_in_the_padding(pooling):
    hidden = np.random.default_rng(0).standard_normal((3, 5, 4)).astype("float32")
    lengths = [5, 2, 1]
    mask = np.array([[1] * n + [0] * (5 - n) for n in lengths])
    expected = [
        {"cls": hidden[i, 0], "mean": hidden[i, :n].mean(0), "last": hidden[i, n - 1]}[pooling]
        for i, n in enumerate(lengths)
    ]
    hidden[mask == 0] = np.nan
    x = paddle.to_tensor(hidden, stop_gradient=False)
    out = pool(x, paddle.to_tensor(mask), pooling)
    np.testing.assert_allclose(out.numpy(), expected, rtol=1e-6)
    out.sum().backward()
    gradient = x.grad.numpy()
    assert np.isfinite(gradient).all()
    assert (gradient[mask == 0] == 0).all()
    np.testing.assert_allclose(gradient.sum(1), np.ones((3, 4)), rtol=1e-6)


@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_a_row_without_tokens_is_zero(pooling):
    out = pool(paddle.ones([2, 3, 4]), paddle.to_tensor([[0, 0, 0], [1, 1, 0]]), pooling)
    np.testing.assert_array_equal(out.numpy(), [[0] * 4, [1] * 4])


def test_unknown_pooling_names_the_known_ones():
    with pytest.raises(ValueError, match=r"'max' is unknown; there are cls, mean, last"):
        pool(paddle.ones([1, 2, 3]), paddle.ones([1, 2], dtype="int64"), "max")
    with pytest.raises(ValueError, match="'max' is unknown"):
        SentenceEncoder(backbone("bert"), pooling="max")


def test_pad_right_keeps_the_order_of_tokens_and_closes_gaps():
    ids = paddle.to_tensor([[9, 9, 1, 2, 3], [1, 9, 2, 9, 3], [4, 5, 9, 9, 9]])
    mask = paddle.to_tensor([[0, 0, 1, 1, 1], [1, 0, 1, 0, 1], [1, 1, 0, 0, 0]])
    ids, mask = pad_right(ids, mask)
    assert mask.tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 0, 0], [1, 1, 0, 0, 0]]
    assert [row[:n] for row, n in zip(ids.tolist(), (3, 3, 2), strict=True)] == [[1, 2, 3], [1, 2, 3], [4, 5]]
    long = np.arange(3000).reshape(1, -1)
    keep = np.random.default_rng(0).random((1, 3000)) < 0.5
    moved, _ = pad_right(paddle.to_tensor(long), paddle.to_tensor(keep.astype("int64")))
    np.testing.assert_array_equal(moved.numpy()[0, : keep.sum()], long[keep])


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30])
def test_normalised_rows_have_length_one_whatever_their_scale(scale):
    x = np.random.default_rng(1).standard_normal((4, 7))
    out = l2_normalize(paddle.to_tensor((x * scale).astype("float32"))).numpy()
    np.testing.assert_allclose(out, x / np.linalg.norm(x, axis=1, keepdims=True), rtol=3e-6, atol=1e-7)


def test_a_zero_vector_stays_zero_and_gets_gradient_zero():
    data = np.array([[0.0, 0.0, 0.0], [3.0, 0.0, 4.0]], "float32")
    x = paddle.to_tensor(data, stop_gradient=False)
    out = l2_normalize(x)
    (out * paddle.to_tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])).sum().backward()
    np.testing.assert_allclose(out.numpy(), [[0, 0, 0], [0.6, 0, 0.8]], rtol=1e-6)
    assert (x.grad.numpy()[0] == 0).all()
    unit, g = np.array([0.6, 0, 0.8]), np.array([1.0, 2.0, 3.0])
    np.testing.assert_allclose(x.grad.numpy()[1], (g - unit * (unit @ g)) / 5, rtol=1e-5)


def test_normalisation_keeps_the_dtype():
    assert l2_normalize(paddle.ones([2, 3], dtype="float64")).dtype == paddle.float64
    x = paddle.to_tensor(np.full((2, 3), 300.0), dtype="float16")  # 300^2 is out of fp16's range
    out = l2_normalize(x)
    assert out.dtype == paddle.float16
    np.testing.assert_allclose(out.astype("float32").numpy(), np.full((2, 3), 3**-0.5), rtol=1e-3)


# the encoder


@pytest.mark.parametrize("kind", ALL_KINDS)
@pytest.mark.parametrize("pooling", ["cls", "mean", "last"])
def test_left_and_right_padding_and_no_padding_agree(kind, pooling):
    encoder = SentenceEncoder(backbone(kind), pooling=pooling)
    pad = encoder.config.pad_token_id or 0
    right, left = (batch(side=side, pad=pad) for side in ("right", "left"))
    expected = np.concatenate(
        [vectors(encoder, ids[None, : m.sum()], m[None, : m.sum()]) for ids, m in zip(*right, strict=True)]
    )
    np.testing.assert_allclose(vectors(encoder, *right), expected, atol=2e-6)
    np.testing.assert_array_equal(vectors(encoder, *left), vectors(encoder, *right))
    np.testing.assert_allclose(np.linalg.norm(expected, axis=1), 1, atol=1e-6)
    # What fills the padding, and how much of it there is, changes nothing.
    ids, mask = right
    wide = np.concatenate([np.where(mask == 1, ids, 7), np.full((4, 3), 8)], 1)
    if kind not in ("roberta", "xlm-roberta"):  # their positions are counted by the padding's id
        np.testing.assert_allclose(
            vectors(encoder, wide, np.concatenate([mask, np.zeros((4, 3), "int64")], 1)), expected, atol=2e-6
        )


def test_default_pooling_follows_the_architecture():
    assert SentenceEncoder(backbone("bert")).pooling == "mean"
    assert SentenceEncoder(backbone("ernie")).pooling == "mean"
    for kind in ("qwen2", "gpt", "gemma"):
        assert SentenceEncoder(backbone(kind)).pooling == "last"


def test_protocol_gives_both_sides_and_refuses_a_loss():
    encoder = SentenceEncoder(backbone("bert"))
    encoder.eval()
    (q_ids, q_mask), (p_ids, p_mask) = batch(2, 5, seed=1), batch(6, 9, seed=2)
    inputs = {
        "query": {"input_ids": paddle.to_tensor(q_ids), "attention_mask": paddle.to_tensor(q_mask)},
        "passages": {"input_ids": paddle.to_tensor(p_ids), "attention_mask": paddle.to_tensor(p_mask)},
    }
    q, p = encoder(**inputs, return_encode=True)
    assert q.shape == [2, 32] and p.shape == [6, 32] and encoder.embedding_dim == 32
    np.testing.assert_array_equal(p.numpy(), vectors(encoder, p_ids, p_mask))
    # The same batch twice, not changed in between.
    again = encoder(**inputs, return_encode=True)
    np.testing.assert_array_equal(again[0].numpy(), q.numpy())
    np.testing.assert_array_equal(inputs["passages"]["input_ids"].numpy(), p_ids)
    with pytest.raises(ValueError, match="no loss of its own"):
        encoder(**inputs, return_encode=False)


class Spy(paddle.nn.Layer):
    """A backbone that remembers what it was called with."""

    def __init__(self, inner):
        super().__init__()
        self.inner, self.config = inner, inner.config

    def forward(self, input_ids, attention_mask=None, use_cache=None, return_dict=None):
        self.seen = {"attention_mask": attention_mask, "use_cache": use_cache, "return_dict": return_dict}
        return self.inner(input_ids, **self.seen)


@pytest.mark.parametrize("kind", ["qwen2", "bert"])
def test_backbones_keep_no_cache_and_causal_ones_need_no_mask(kind):
    spy = Spy(backbone(kind))
    SentenceEncoder(spy).encode(*batch())
    assert spy.seen["use_cache"] is False and spy.seen["return_dict"] is False
    assert (spy.seen["attention_mask"] is None) == (kind == "qwen2")


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_batches_of_paddlenlps_collator(pooling):
    encoder = SentenceEncoder(backbone("qwen2"), pooling=pooling)
    ids, mask = batch(3, 8)
    lengths = mask.sum(1)
    upstream = {
        "input_ids": paddle.to_tensor(ids),
        "position_ids": paddle.to_tensor(np.tile(np.arange(8), (3, 1)) * mask),
        "attention_mask": paddle.to_tensor(np.tril(np.ones((3, 1, 8, 8), "float32")) * mask[:, None, None, :]),
        "embedding_indices": paddle.to_tensor(np.stack([np.arange(3), lengths - 1], 1).astype("int32")),
    }
    encoder.eval()
    with paddle.no_grad():
        np.testing.assert_allclose(encoder.encode(**upstream).numpy(), vectors(encoder, ids, mask), atol=1e-6)


def test_wrapping_paddlenlps_sentence_embedding_gives_its_embeddings():
    from paddlenlp.transformers import Qwen2SentenceEmbedding

    config = backbone("qwen2").config
    config.embedding_negatives_cross_device = False
    model = Qwen2SentenceEmbedding(config)
    model.eval()
    ids, mask = batch(3, 8)
    indices = paddle.to_tensor(np.stack([np.arange(3), mask.sum(1) - 1], 1).astype("int32"))
    with paddle.no_grad():
        theirs = paddle.nn.functional.normalize(
            model.encode(paddle.to_tensor(ids), embedding_indices=indices, attention_mask=paddle.to_tensor(mask)),
            axis=-1,
        )
    encoder = SentenceEncoder.wrap(model)
    np.testing.assert_allclose(vectors(encoder, ids, mask), theirs.numpy(), atol=1e-6)
    assert encoder.backbone.embed_tokens.weight is model.qwen2.embed_tokens.weight
    assert SentenceEncoder.wrap(encoder) is encoder
    assert SentenceEncoder.wrap(paddle.DataParallel(encoder)) is encoder
    with pytest.raises(TypeError, match="Linear is neither"):
        SentenceEncoder.wrap(paddle.nn.Linear(2, 2))


def enable_recompute(layer):
    if getattr(layer, "enable_recompute", None) in (False, 0):  # as PaddleNLP's Trainer does
        layer.enable_recompute = True


@pytest.mark.parametrize("kind", KINDS)
def test_recompute_changes_no_number(kind):
    ids, mask = batch()
    results = []
    for recompute in (False, True):
        encoder = SentenceEncoder(backbone(kind))
        if recompute:
            encoder.apply(enable_recompute)
            assert any(getattr(layer, "enable_recompute", False) for layer in encoder.sublayers())
        encoder.train()
        seed_all(3)
        out = encoder.encode(ids, mask)
        (out * paddle.to_tensor(np.random.default_rng(4).standard_normal((4, 32)).astype("float32"))).sum().backward()
        gradients = {n: p.grad.numpy() for n, p in encoder.named_parameters() if p.grad is not None}
        results.append((out.numpy(), gradients))
    (plain, plain_gradients), (again, again_gradients) = results
    np.testing.assert_array_equal(plain, again)
    assert plain_gradients.keys() == again_gradients.keys()
    for name, gradient in plain_gradients.items():
        np.testing.assert_allclose(again_gradients[name], gradient, atol=1e-6 * np.abs(gradient).max() + 1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_every_trainable_parameter_gets_a_gradient(kind):
    # Data parallelism without a search for unused parameters depends on it.
    encoder = SentenceEncoder(backbone(kind))
    encoder.encode(*batch()).sum().backward()
    without = [n for n, p in encoder.named_parameters() if not p.stop_gradient and p.grad is None]
    assert without == []


def test_dropout_follows_the_config_and_the_mode():
    ids, mask = batch()
    config = backbone("bert").config
    for probability in (0.0, 0.5):
        encoder = SentenceEncoder.from_config(
            config, hidden_dropout_prob=probability, attention_probs_dropout_prob=probability
        )
        encoder.train()
        same = np.array_equal(encoder.encode(ids, mask).numpy(), encoder.encode(ids, mask).numpy())
        assert same == (probability == 0.0)
        np.testing.assert_array_equal(vectors(encoder, ids, mask), vectors(encoder, ids, mask))


def test_from_config_is_random_and_leaves_the_config_alone():
    config = backbone("qwen2").config
    seed_all(1)
    first = SentenceEncoder.from_config(config, num_hidden_layers=1, pooling="mean", normalize=False)
    second = SentenceEncoder.from_config(config)
    assert config.num_hidden_layers == 2 and first.config.num_hidden_layers == 1
    assert (first.pooling, first.normalize, second.pooling) == ("mean", False, "last")
    ids, mask = batch()
    assert not np.allclose(vectors(first, ids, mask), vectors(second, ids, mask))
    with pytest.raises(ValueError, match="Qwen2Config has no field hidden_dropout"):
        SentenceEncoder.from_config(config, hidden_dropout=0.0)


def test_texts_longer_than_the_positions_are_refused():
    for kind, positions in (("bert", 40), ("xlm-roberta", 38), ("roberta", 38), ("gpt", 64), ("opt", 64)):
        encoder = SentenceEncoder(backbone(kind))
        assert encoder.max_seq_length == positions
        ids = np.full((1, positions), 5)
        assert np.isfinite(vectors(encoder, ids, np.ones_like(ids))).all()
        with pytest.raises(
            ValueError, match=f"{positions + 1} tokens in a row, and the model has positions for {positions}"
        ):
            encoder.encode(np.full((1, positions + 1), 5))
    assert SentenceEncoder(backbone("bert"), max_seq_length=16).max_seq_length == 16
    assert SentenceEncoder(backbone("bert"), max_seq_length=99).max_seq_length == 40
    assert SentenceEncoder(backbone("qwen2")).max_seq_length is None


def test_wrong_masks_are_refused_and_none_means_all_tokens():
    encoder = SentenceEncoder(backbone("bert"))
    ids = np.array([[5, 6, 7]])
    with pytest.raises(ValueError, match=r"attention_mask is \[1, 2\], input_ids \[1, 3\]"):
        encoder.encode(ids, np.ones((1, 2)))
    encoder.eval()
    np.testing.assert_array_equal(encoder.encode(ids).numpy(), vectors(encoder, ids, np.ones_like(ids)))


def test_sequence_parallel_is_refused():
    model = backbone("qwen2")
    model.config.sequence_parallel = True
    with pytest.raises(ValueError, match="sequence_parallel"):
        SentenceEncoder(model)


def test_from_config_reads_a_folder(tmp_path):
    backbone("xlm-roberta").config.save_pretrained(str(tmp_path))
    encoder = SentenceEncoder.from_config(tmp_path, pooling="cls", max_seq_length=20)
    assert (type(encoder.backbone).__name__, encoder.pooling, encoder.max_seq_length) == ("XLMRobertaModel", "cls", 20)


def test_a_name_goes_to_paddlenlp(monkeypatch):
    from paddlenlp.transformers import AutoModel, AutoTokenizer

    from paddle_infcl.modeling import load_tokenizer

    asked = {}

    def from_pretrained(name, **options):
        asked.update(options, name=name)
        return backbone("bert")

    monkeypatch.setattr(AutoModel, "from_pretrained", from_pretrained)
    monkeypatch.setattr(AutoTokenizer, "from_pretrained", lambda name: f"tokenizer of {name}")
    encoder = SentenceEncoder.from_pretrained("some/model", pooling="cls", normalize=False, hidden_dropout_prob=0.0)
    assert asked == {"name": "some/model", "dtype": "float32", "hidden_dropout_prob": 0.0}
    assert (encoder.pooling, encoder.normalize) == ("cls", False)
    assert load_tokenizer("some/model") == "tokenizer of some/model"


def test_templates_come_from_the_prompts():
    encoder = SentenceEncoder(backbone("bert"), prompts={"query": "query: ", "document": "doc {x}: "})
    assert encoder.template("query") == "query: {text}"
    assert encoder.template("passage") == "doc {x}: {text}"
    assert SentenceEncoder(backbone("bert")).template("query") == "{text}"


def test_vocabulary_of_the_tiny_models():
    assert SentenceEncoder(backbone("bert")).config.vocab_size == VOCAB
