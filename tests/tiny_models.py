# SPDX-License-Identifier: Apache-2.0
"""Tiny random models and tokenizers for the tests, and Hugging Face folders written from them."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import paddle
from safetensors.numpy import save_file

VOCAB = 90
KINDS = ("bert", "ernie", "roberta", "xlm-roberta", "qwen2")

_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
_ENCODER = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1, "max_position_embeddings": 40}


def backbone(kind: str, seed: int = 0, **overrides):
    """A base model with random weights, biases and norms too: a swapped or forgotten one shows."""
    import paddlenlp.transformers as zoo

    if kind == "bert":
        model = zoo.BertModel(zoo.BertConfig(**_SIZES, **_ENCODER, **overrides))
    elif kind == "ernie":
        model = zoo.ErnieModel(
            zoo.ErnieConfig(**_SIZES, **_ENCODER, use_task_id=True, task_type_vocab_size=3, **overrides)
        )
    elif kind == "roberta":
        config = {**_SIZES, **_ENCODER, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5, **overrides}
        model = zoo.RobertaModel(zoo.RobertaConfig(**config))
    elif kind == "xlm-roberta":
        config = {**_SIZES, **_ENCODER, "pad_token_id": 1, "type_vocab_size": 1, "layer_norm_eps": 1e-5, **overrides}
        model = zoo.XLMRobertaModel(zoo.XLMRobertaConfig(**config, architectures=["XLMRobertaModel"]))
    else:
        config = {**_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 64, "rope_theta": 1e4, **overrides}
        config |= {"gemma": {"head_dim": 8}, "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48}}.get(kind, {})
        name = kind.upper() if kind in ("gpt", "opt") else kind.capitalize()
        model = getattr(zoo, f"{name}Model")(getattr(zoo, f"{name}Config")(**config))
    generator = np.random.default_rng(seed)
    for parameter in model.parameters():
        centre = 1.0 if len(parameter.shape) == 1 and float(parameter.mean()) == 1.0 else 0.0
        values = centre + 0.25 * generator.standard_normal(parameter.shape)
        parameter.set_value(values.astype("float32"))
    return model


def huggingface_tensors(model) -> dict[str, np.ndarray]:
    """The model's weights by the names, and in the layout, that PyTorch's transformers gives them."""
    from paddle_infcl.modeling import _name_mappings

    state = {name: value.numpy() for name, value in model.state_dict().items()}
    tensors = {}
    for mapping in _name_mappings(type(model), model.config):
        if mapping.target_name in state:
            value = state[mapping.target_name]
            tensors[mapping.source_name] = np.ascontiguousarray(value.T if mapping.action == "transpose" else value)
    assert len(tensors) == len(state), "a weight is left out"
    return tensors


def write_huggingface(model, folder, *, prefix="", shards=1, metadata=True, extra=None, **config) -> Path:
    """Writes a Hugging Face folder: config.json and (sharded) safetensors."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    name = {"xlm-roberta": "XLMRobertaModel"}.get(model.config.model_type, type(model).__name__)
    fields = {key: getattr(model.config, key) for key in (*_SIZES, "max_position_embeddings", "pad_token_id")}
    optional = (
        "num_key_value_heads",
        "rope_theta",
        "rms_norm_eps",
        "layer_norm_eps",
        "type_vocab_size",
        "use_task_id",
    )
    optional += ("task_type_vocab_size", "hidden_dropout_prob", "attention_probs_dropout_prob", "hidden_act")
    fields |= {key: getattr(model.config, key) for key in optional if hasattr(model.config, key)}
    fields |= {"model_type": model.config.model_type, "architectures": [name], "torch_dtype": "bfloat16", **config}
    (folder / "config.json").write_text(json.dumps(fields))
    tensors = {prefix + key: value for key, value in huggingface_tensors(model).items()} | (extra or {})
    declared = {"format": "pt"} if metadata else None
    if shards == 1:
        save_file(tensors, folder / "model.safetensors", metadata=declared)
        return folder
    names, weight_map = sorted(tensors), {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: tensors[key] for key in names[i::shards]}
        save_file(part, folder / file, metadata=declared)
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def write_bert_vocabulary(folder, words=()) -> Path:
    """vocab.txt and tokenizer_config.json of a BERT tokenizer: special tokens, letters, digits, the words."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    letters = list(string.ascii_lowercase + string.digits)
    tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *letters, *("##" + c for c in letters[:36]), *words]
    (folder / "vocab.txt").write_text("\n".join(tokens) + "\n")
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "BertTokenizer", "do_lower_case": True})
    )
    return folder


def batch(rows: int = 4, length: int = 9, seed: int = 0, side: str = "right", pad: int = 1):
    """Random token ids [rows, length] and their mask, rows of different lengths (the first is full)."""
    generator = np.random.default_rng(seed)
    ids, mask = np.full((rows, length), pad, "int64"), np.zeros((rows, length), "int64")
    for i in range(rows):
        count = length - (i * 2) % (length - 1)
        where = slice(0, count) if side == "right" else slice(length - count, length)
        ids[i, where] = generator.integers(5, VOCAB, count)
        mask[i, where] = 1
    return ids, mask


def seed_all(seed: int = 0) -> None:
    paddle.seed(seed)
    np.random.seed(seed)
