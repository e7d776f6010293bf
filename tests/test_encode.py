# SPDX-License-Identifier: Apache-2.0
"""Texts to vectors: order, batches, modes, files."""

import json
from pathlib import Path

import numpy as np
import paddle
import pytest

from paddle_infcl import encode
from paddle_infcl.data.templates import TextTokenizer
from paddle_infcl.encode import encode_file, encode_texts
from paddle_infcl.modeling import SentenceEncoder, load_tokenizer
from tests.tiny_models import backbone, write_bert_vocabulary

TEXTS = [("abc " * (1 + i * 7 % 11)).strip() + f" {i}" for i in range(23)]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return load_tokenizer(write_bert_vocabulary(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def model():
    return SentenceEncoder(backbone("bert"))


def one_by_one(model, tokenizer, texts, max_length=40, template="{text}"):
    model.eval()
    tokenize = TextTokenizer(tokenizer, max_length, template)
    with paddle.no_grad():
        return np.concatenate([model.encode(**tokenize([text])).numpy() for text in texts])


@pytest.mark.parametrize("batch_size", [1, 4, 100])
@pytest.mark.parametrize("block", [5, 16384])
def test_order_is_kept_whatever_the_batches(model, tokenizer, batch_size, block, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK", block)
    out = encode_texts(model, tokenizer, TEXTS, batch_size=batch_size)
    assert out.dtype == np.float32 and out.shape == (23, 32)
    np.testing.assert_allclose(out, one_by_one(model, tokenizer, TEXTS), atol=2e-6)


def test_batches_have_texts_of_one_length_together(model, tokenizer, monkeypatch):
    sizes = []
    original = SentenceEncoder.encode
    monkeypatch.setattr(
        SentenceEncoder, "encode", lambda self, **b: sizes.append(b["input_ids"].shape) or original(self, **b)
    )
    encode_texts(model, tokenizer, ["a"] * 4 + ["a b c d e f"] * 4 + ["a"] * 4, batch_size=4)
    assert sizes == [(4, 8), (4, 3), (4, 3)]


def test_template_and_limit(model, tokenizer):
    out = encode_texts(model, tokenizer, TEXTS, template="q: {text} !", max_length=12)
    np.testing.assert_allclose(out, one_by_one(model, tokenizer, TEXTS, 12, "q: {text} !"), atol=2e-6)
    assert not np.allclose(out, encode_texts(model, tokenizer, TEXTS, max_length=12), atol=1e-3)
    with pytest.raises(ValueError, match="max_length is 41, and the model has positions for 40"):
        encode_texts(model, tokenizer, TEXTS, max_length=41)
    with pytest.raises(ValueError, match="no token of the text would fit"):
        encode_texts(model, tokenizer, TEXTS, max_length=2)
    with pytest.raises(ValueError, match="max_length: neither given nor known"):
        encode_texts(SentenceEncoder(backbone("qwen2")), tokenizer, TEXTS)
    for limit in (0, -3):
        with pytest.raises(ValueError, match=f"max_length is {limit}; at least 1 token, or None"):
            encode_texts(model, tokenizer, TEXTS, max_length=limit)
    for template in ("", "query: ", "{text}{text}"):
        with pytest.raises(ValueError, match=f"^template is {template!r}; it must contain {{text}} exactly once"):
            encode_texts(model, tokenizer, TEXTS, template=template)


def test_no_texts_and_wrong_texts(model, tokenizer):
    assert encode_texts(model, tokenizer, []).shape == (0, 32)
    with pytest.raises(TypeError, match="text 1 is NoneType, not a string"):
        encode_texts(model, tokenizer, ["a", None])
    with pytest.raises(ValueError, match="batch_size is 0"):
        encode_texts(model, tokenizer, ["a"], batch_size=0)
    with pytest.raises(TypeError, match="texts is one string"):
        encode_texts(model, tokenizer, "abc")


def test_every_layer_gets_its_mode_back_also_after_an_error(model, tokenizer):
    model.train()
    model.backbone.pooler.eval()
    modes = [layer.training for layer in model.sublayers(include_self=True)]
    assert True in modes and False in modes
    first = encode_texts(model, tokenizer, TEXTS)
    np.testing.assert_array_equal(first, encode_texts(model, tokenizer, TEXTS))  # no dropout
    with pytest.raises(TypeError):
        encode_texts(model, tokenizer, [1])
    assert [layer.training for layer in model.sublayers(include_self=True)] == modes
    assert all(p.grad is None for p in model.parameters())


def test_nan_is_named(tokenizer):
    model = SentenceEncoder(backbone("bert"))
    weight = model.backbone.embeddings.word_embeddings.weight
    broken = weight.numpy()
    broken[tokenizer.convert_tokens_to_ids("z")] = np.nan
    weight.set_value(broken)
    with pytest.raises(ValueError, match="embedding of text 2 is NaN or infinite: 'b z'"):
        encode_texts(model, tokenizer, ["a", "b c d", "b z", "a a a z"][:3])


def test_other_models_that_are_taken(model, tokenizer):
    from paddlenlp.transformers import Qwen2SentenceEmbedding

    expected = encode_texts(model, tokenizer, TEXTS)
    np.testing.assert_array_equal(encode_texts(paddle.DataParallel(model), tokenizer, TEXTS), expected)
    config = backbone("qwen2").config
    config.embedding_negatives_cross_device = False
    upstream = Qwen2SentenceEmbedding(config)
    out = encode_texts(upstream, tokenizer, TEXTS, max_length=20)
    np.testing.assert_allclose(out, one_by_one(SentenceEncoder.wrap(upstream), tokenizer, TEXTS, 20), atol=2e-6)


def test_the_bar_counts_texts(model, tokenizer, capsys):
    encode_texts(model, tokenizer, TEXTS, batch_size=4, show_progress=True)
    assert "23/23" in capsys.readouterr().err
    encode_texts(model, tokenizer, TEXTS, batch_size=4)
    assert capsys.readouterr().err == ""


# files


def test_text_and_jsonl_files(model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(encode, "BLOCK", 10)
    expected = encode_texts(model, tokenizer, TEXTS)
    text, rows, out = tmp_path / "a.txt", tmp_path / "a.jsonl", tmp_path / "deep" / "out.npy"
    text.write_bytes(b"\xef\xbb\xbf" + "\r\n".join(TEXTS).encode())
    rows.write_text("".join(json.dumps({"id": i, "code": t}) + "\n" for i, t in enumerate(TEXTS)))
    assert encode_file(model, tokenizer, text, out) == (23, 32)
    np.testing.assert_allclose(np.load(out), expected, atol=2e-6)
    assert encode_file(model, tokenizer, rows, out, field="code", template="{text}") == (23, 32)
    np.testing.assert_allclose(np.load(out, mmap_mode="r"), expected, atol=2e-6)
    assert np.load(out).dtype == np.float32
    assert sorted(p.name for p in out.parent.iterdir()) == ["out.npy"]


def test_bad_lines_are_all_counted_before_anything_is_encoded(model, tokenizer, tmp_path, monkeypatch):
    monkeypatch.setattr(SentenceEncoder, "encode", None)
    rows = ['{"text": "a"}', "{", "[]", '{"body": "a"}', '{"text": 1}', '{"text": " "}', "", '{"text": "b"}']
    source, out = tmp_path / "a.jsonl", tmp_path / "out.npy"
    source.write_text("\n".join(rows + ["{"] * 10))
    with pytest.raises(ValueError) as info:
        encode_file(model, tokenizer, source, out)
    lines = str(info.value).splitlines()
    assert lines[0].startswith(f"16 lines of {source} cannot be encoded")
    reasons = [
        "not JSON",
        "not a JSON object",
        "no field `text`; there are 'body'",
        "`text` is int",
        "`text` is blank",
    ]
    for number, (line, reason) in enumerate(zip(lines[1:], reasons, strict=False), 2):
        assert line.startswith(f"  {source}:{number}: {reason}")
    assert lines[-1] == "  ... and 6 more"
    text = tmp_path / "a.txt"
    text.write_bytes(b"fine\n\n\xff\n")
    with pytest.raises(ValueError, match=r"(?s)2 lines.*a\.txt:2: no text.*a\.txt:3: 'utf-8' codec"):
        encode_file(model, tokenizer, text, out)
    text.write_bytes(b"")
    with pytest.raises(ValueError, match=r"a\.txt: no texts in it"):
        encode_file(model, tokenizer, text, out)
    assert not out.exists()


def test_an_error_while_encoding_leaves_the_old_result(model, tokenizer, tmp_path, monkeypatch):
    source, out = tmp_path / "a.txt", tmp_path / "out.npy"
    source.write_text("a\nb\n")
    encode_file(model, tokenizer, source, out)
    before = out.read_bytes()
    monkeypatch.setattr(SentenceEncoder, "encode", lambda self, **batch: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        encode_file(model, tokenizer, source, out)
    assert out.read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "out.npy"]


def test_the_source_is_not_replaced(model, tokenizer, tmp_path):
    source = tmp_path / "a.txt"
    source.write_text("a\n")
    (tmp_path / "link.npy").symlink_to(source)
    for target in (source, tmp_path / "link.npy"):
        with pytest.raises(ValueError, match=f"{target}: is the source {source} itself.*name another file"):
            encode_file(model, tokenizer, source, target)
    assert source.read_text() == "a\n"


def test_devices_and_folders_are_not_replaced(model, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("a\n")
    (tmp_path / "folder").mkdir()
    for target in (tmp_path / "folder", Path("/dev/null")):
        with pytest.raises(ValueError, match=f"{target}: is there and no file"):
            encode_file(model, tokenizer, tmp_path / "a.txt", target)
