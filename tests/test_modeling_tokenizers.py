# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of local folders, and whether they belong to the model."""

import json

import pytest

from paddle_infcl.modeling import check_vocabulary, encoder_from_pretrained, load_tokenizer
from tests.tiny_models import VOCAB, backbone, write_bert_vocabulary, write_huggingface


def write_json(path, content):
    path.write_text(json.dumps(content))


def test_a_bert_folder_with_or_without_tokenizer_config(tmp_path):
    write_huggingface(backbone("bert"), tmp_path)
    write_bert_vocabulary(tmp_path, words=["hello"])
    before = sorted(p.name for p in tmp_path.iterdir())
    expected = [2, 77, 9, 3]  # [CLS] hello e [SEP]
    for _ in range(2):
        tokenizer = load_tokenizer(tmp_path)
        assert type(tokenizer).__name__ == "BertTokenizer"
        assert tokenizer("Hello E")["input_ids"] == expected
        (tmp_path / "tokenizer_config.json").unlink(missing_ok=True)
    before.remove("tokenizer_config.json")
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def write_tokenizer_json(folder):
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    tokens = (folder / "vocab.txt").read_text().splitlines()
    tokenizer = Tokenizer(models.WordPiece({token: i for i, token in enumerate(tokens)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "vocab.txt").unlink()


@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast", "PreTrainedTokenizerFast", "NoSuchTokenizer"])
def test_tokenizer_json_serves_where_the_vocabulary_file_is_missing(tmp_path, name):
    write_tokenizer_json(write_bert_vocabulary(tmp_path, words=["hello"]))
    write_json(
        tmp_path / "tokenizer_config.json", {"tokenizer_class": name, "pad_token": "[PAD]", "cls_token": "[CLS]"}
    )
    tokenizer = load_tokenizer(tmp_path)
    assert type(tokenizer).__name__.lower().endswith("fast")
    assert tokenizer("Hello E")["input_ids"] == [2, 77, 9, 3]
    assert tokenizer.pad_token_id == 0


def test_a_sentencepiece_folder_of_xlm_r(tmp_path):
    import sentencepiece

    lines = [f"hello world the quick brown fox jumps over the lazy dog {i}" for i in range(200)]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "sentencepiece.bpe"), vocab_size=60, minloglevel=3
    )
    for name in ("XLMRobertaTokenizer", "XLMRobertaTokenizerFast"):
        write_json(tmp_path / "tokenizer_config.json", {"tokenizer_class": name})
        tokenizer = load_tokenizer(tmp_path)
        assert type(tokenizer).__name__ == "XLMRobertaTokenizer"
        ids = tokenizer("hello world")["input_ids"]
        assert (ids[0], ids[-1], tokenizer.pad_token_id) == (0, 2, 1)


def write_qwen2(folder, added=()):
    from paddlenlp.transformers.qwen2.tokenizer import bytes_to_unicode

    vocabulary = {token: i for i, token in enumerate(bytes_to_unicode().values())}
    vocabulary |= {"he": 256, "llo": 257, "ll": 258}
    write_json(folder / "vocab.json", vocabulary)
    (folder / "merges.txt").write_text("#version: 0.2\nh e\nl l\nll o\n")
    entries = {
        str(259 + i): {"content": token, "special": True, "normalized": False, "lstrip": False, "rstrip": False}
        for i, token in enumerate(("<|endoftext|>", *added))
    }
    config = {"tokenizer_class": "Qwen2Tokenizer", "added_tokens_decoder": entries, "pad_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", config | {"eos_token": "<|endoftext|>"})


def test_a_qwen2_folder_and_an_id_out_of_range(tmp_path):
    write_qwen2(tmp_path, added=["<|query|>"])
    write_huggingface(backbone("qwen2", vocab_size=261), tmp_path)
    model, tokenizer = encoder_from_pretrained(tmp_path)
    assert tokenizer("hello")["input_ids"] == [256, 257]
    assert model.config.vocab_size == 261 and tokenizer.pad_token_id == 259
    # The padding id itself, then an added token that len() may leave out, beyond the embeddings.
    for vocab_size, highest in ((260, 260), (259, 260)):
        write_huggingface(backbone("qwen2", vocab_size=vocab_size), tmp_path)
        with pytest.raises(
            ValueError, match=rf"highest id is {highest} \('<\|query\|>'\).*embeddings for {vocab_size} ids"
        ):
            encoder_from_pretrained(tmp_path)


def test_a_padding_id_equal_to_the_vocabulary_is_refused(tmp_path):
    write_qwen2(tmp_path)
    write_huggingface(backbone("qwen2", vocab_size=259), tmp_path)
    with pytest.raises(ValueError, match=r"highest id is 259 \('<\|endoftext\|>'\)"):
        encoder_from_pretrained(tmp_path)


def test_a_vocabulary_that_fits_passes(tmp_path):
    write_bert_vocabulary(tmp_path, words=[f"w{i}" for i in range(VOCAB - 77)])
    write_huggingface(backbone("bert"), tmp_path)
    model, tokenizer = encoder_from_pretrained(tmp_path, pooling="cls")
    assert model.pooling == "cls" and len(tokenizer) == VOCAB
    check_vocabulary(tokenizer, model)


def test_no_tokenizer_files(tmp_path):
    write_huggingface(backbone("bert"), tmp_path)
    with pytest.raises(ValueError, match=r"no tokenizer .*BertTokenizer needs vocab\.txt; .*tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_that_cannot_be_read(tmp_path):
    write_bert_vocabulary(tmp_path)
    (tmp_path / "vocab.txt").write_text("")
    with pytest.raises(ValueError, match=r"BertTokenizer can't read vocab\.txt"):
        load_tokenizer(tmp_path)
