# SPDX-License-Identifier: Apache-2.0
"""Small tokenizers of every kind, made from nothing, and rows to feed them with."""

from __future__ import annotations

import json
from pathlib import Path

WORDS = "the cat sat on a mat query passage hello world answer other red blue find this".split()


def bert_vocabulary(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ":", ".", *letters, *("##" + c for c in letters), *WORDS]
    (folder / "vocab.txt").write_text("\n".join(dict.fromkeys(tokens)) + "\n")
    return str(folder / "vocab.txt")


def bert(folder: Path):
    from paddlenlp.transformers import BertTokenizer

    return BertTokenizer(bert_vocabulary(folder))


def bert_fast(folder: Path):
    from paddlenlp.transformers.bert.tokenizer_fast import BertTokenizerFast

    return BertTokenizerFast(bert_vocabulary(folder))


def ernie(folder: Path):
    from paddlenlp.transformers import ErnieTokenizer

    return ErnieTokenizer(bert_vocabulary(folder))


def xlm_roberta(folder: Path):
    import sentencepiece
    from paddlenlp.transformers import XLMRobertaTokenizer

    folder.mkdir(parents=True, exist_ok=True)
    text = folder / "text.txt"
    text.write_text("\n".join([" ".join(WORDS), "abcdefghijklmnopqrstuvwxyz : . ,"] * 20))
    sentencepiece.SentencePieceTrainer.train(
        input=str(text),
        model_prefix=str(folder / "spm"),
        vocab_size=70,
        model_type="bpe",
        minloglevel=2,
        num_threads=1,
    )
    return XLMRobertaTokenizer(str(folder / "spm.model"))


def byte_level(folder: Path) -> tuple[str, str]:
    """A byte-level vocabulary without merges: every byte is a token."""
    folder.mkdir(parents=True, exist_ok=True)
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    odd = [b for b in range(256) if b not in plain]
    symbols = [chr(b) for b in plain] + [chr(256 + n) for n in range(len(odd))]
    (folder / "vocab.json").write_text(json.dumps({symbol: n for n, symbol in enumerate(symbols)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return str(folder / "vocab.json"), str(folder / "merges.txt")


def qwen2(folder: Path):
    from paddlenlp.transformers import Qwen2Tokenizer

    return Qwen2Tokenizer(*byte_level(folder))


def qwen2_fast(folder: Path):
    from paddlenlp.transformers.qwen2.tokenizer_fast import Qwen2TokenizerFast

    return Qwen2TokenizerFast(*byte_level(folder))


KINDS = {
    "bert": bert,
    "bert_fast": bert_fast,
    "ernie": ernie,
    "xlm_roberta": xlm_roberta,
    "qwen2": qwen2,
    "qwen2_fast": qwen2_fast,
}


def write_rows(path: Path, rows) -> str:
    """Writes JSON lines; a string is written as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return str(path)
