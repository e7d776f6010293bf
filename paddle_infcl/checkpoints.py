# SPDX-License-Identifier: Apache-2.0
"""Reading checkpoint folders without writing into them, and without PaddleNLP.

A folder may come from Hugging Face (PyTorch names, linear weights stored [out, in]), from PaddleNLP (Paddle names,
linear weights [in, out]) or from `SentenceEncoder.save_pretrained`. The files of sentence-transformers, where there
are any, say how the hidden states become one vector.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_lasttoken": "last",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_POOLING_NAMES = {"cls": "cls", "mean": "mean", "last": "last", "lasttoken": "last"}

# Safetensors' names of dtypes. NumPy has no bf16: Paddle's convention is its bits in uint16.
_SAFETENSORS_DTYPES = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": np.uint16,
    "I64": np.int64,
    "I32": np.int32,
    "I16": np.int16,
    "I8": np.int8,
    "U8": np.uint8,
    "BOOL": np.bool_,
}


@dataclass
class SentenceConfig:
    """What the files of sentence-transformers in a checkpoint say.

    `pooling`, `normalize` and `max_seq_length` are None where no file says anything. `prompts` maps a name ("query",
    "document", ...) to the text put before the input. `subfolder` is where the transformer's own files are.
    """

    pooling: str | None = None
    normalize: bool | None = None
    max_seq_length: int | None = None
    prompts: dict[str, str] = field(default_factory=dict)
    default_prompt_name: str | None = None
    subfolder: str = ""


def read_json(path: Path, kind: type = dict):
    """The content of a JSON file; ValueError names a file that is not JSON, or holds something else than a `kind`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: not valid JSON: {error}") from error
    if not isinstance(content, kind):
        raise ValueError(f"{path}: must hold a JSON {'object' if kind is dict else 'array'}")
    return content


def _pooling_of(path: Path) -> str:
    config = read_json(path)
    if isinstance(config.get("pooling_mode"), str):
        modes = [config["pooling_mode"]]
    else:
        modes = [name for key, name in _POOLING_KEYS.items() if config.get(key)]
    if len(modes) != 1 or modes[0] not in _POOLING_NAMES:
        raise ValueError(
            f"{path}: pooling {' + '.join(modes) or '(none)'} is not supported; cls, mean or last are. "
            "Pass `pooling` to use another one than the checkpoint's"
        )
    if config.get("include_prompt") is False:
        raise ValueError(
            f"{path}: include_prompt is false (the prompt's tokens are left out of the pooling), "
            "which is not supported. Pass `pooling` to pool over all tokens"
        )
    return _POOLING_NAMES[modes[0]]


def read_sentence_config(folder: str | Path, *, pooling: str | None = None) -> SentenceConfig:
    """Reads modules.json, the pooling config, prompts and the length limit of a checkpoint folder.

    Args:
        folder: a local checkpoint folder; it need not have any of these files.
        pooling: the caller's choice; the folder's own pooling is then not looked at.

    Raises:
        ValueError: a file that is not JSON, a pooling or a module that is not supported.
    """
    folder = Path(folder)
    found = SentenceConfig(pooling=pooling)
    if (folder / "modules.json").is_file():
        found.normalize = False
        for module in read_json(folder / "modules.json", list):
            kind, path = module["type"].rsplit(".", 1)[-1], module.get("path", "")
            if kind == "Transformer":
                found.subfolder = path
            elif kind == "Pooling" and pooling is None:
                found.pooling = _pooling_of(folder / path / "config.json")
            elif kind == "Normalize":
                found.normalize = True
            elif kind not in ("Pooling", "Dropout"):
                raise ValueError(
                    f"{folder / 'modules.json'}: the module '{module['type']}' is not supported; without it the "
                    "embeddings would not be the checkpoint's. Transformer, Pooling and Normalize are supported"
                )
    elif pooling is None and (folder / "1_Pooling" / "config.json").is_file():
        found.pooling = _pooling_of(folder / "1_Pooling" / "config.json")
    # sentence_bert_config.json, sentence_roberta_config.json, ...: the name varies with the model's type.
    for path in sorted((folder / found.subfolder).glob("sentence_*_config.json")):
        length = read_json(path).get("max_seq_length")
        if length is not None and not (isinstance(length, int) and length > 0):
            raise ValueError(f"{path}: max_seq_length is {length!r}; a whole number of tokens from 1 on, or null")
        found.max_seq_length = length
    if (folder / "config_sentence_transformers.json").is_file():
        config = read_json(folder / "config_sentence_transformers.json")
        prompts = config.get("prompts") or {}
        if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
            raise ValueError(f"{folder / 'config_sentence_transformers.json'}: prompts must be texts by their names")
        found.prompts = prompts
        found.default_prompt_name = config.get("default_prompt_name")
    return found


def write_sentence_config(folder: str | Path, config: SentenceConfig, *, dim: int) -> None:
    """Writes the files that `read_sentence_config` reads. `dim` is the width of an embedding."""
    folder = Path(folder)
    modules = [("", "Transformer"), ("1_Pooling", "Pooling")] + [("2_Normalize", "Normalize")] * bool(config.normalize)
    pooling = {key: name == config.pooling for key, name in _POOLING_KEYS.items()}
    files = {
        "modules.json": [
            {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (path, kind) in enumerate(modules)
        ],
        "1_Pooling/config.json": {"word_embedding_dimension": dim, **pooling, "include_prompt": True},
        "sentence_bert_config.json": {"max_seq_length": config.max_seq_length, "do_lower_case": False},
        "config_sentence_transformers.json": {
            "prompts": config.prompts,
            "default_prompt_name": config.default_prompt_name,
        },
    }
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


# Weights ------------------------------------------------------------------------------------------------------------


def read_safetensors(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """The tensors of one safetensors file, mapped and not read, and its metadata.

    The format: 8 bytes of header length (little endian), a JSON header, the data. Parsed here because safetensors'
    own NumPy reader has no bf16; those tensors come as uint16 bits, as Paddle takes them.

    Raises:
        ValueError: a file that is cut short or no safetensors file, or a dtype that is not supported.
    """
    path = Path(path)
    data = np.memmap(path, dtype=np.uint8, mode="r") if path.stat().st_size else np.empty(0, np.uint8)
    length = int.from_bytes(data[:8].tobytes(), "little")
    try:
        header = json.loads(data[8 : 8 + length].tobytes())
    except ValueError as error:
        hint = ""
        if data[:40].tobytes().startswith(b"version https://git-lfs"):
            hint = " It is a Git LFS pointer: the weights themselves were not downloaded"
        raise ValueError(f"{path}: not a safetensors file.{hint}") from error
    metadata = header.pop("__metadata__", None) or {}
    tensors = {}
    for name, entry in header.items():
        if entry["dtype"] not in _SAFETENSORS_DTYPES:
            raise ValueError(f"{path}: tensor '{name}' has dtype {entry['dtype']}, which is not supported")
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        if end > data.size:
            raise ValueError(f"{path}: cut short: '{name}' ends at byte {end}, the file has {data.size}")
        tensors[name] = data[begin:end].view(_SAFETENSORS_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors, metadata


def _shards(index: Path) -> list[Path]:
    files = sorted(set(read_json(index)["weight_map"].values()))
    missing = [name for name in files if not (index.parent / name).is_file()]
    if missing:
        raise ValueError(f"{index}: {len(missing)} of {len(files)} files are missing: {', '.join(missing)}")
    return [index.parent / name for name in files]


def find_weights(folder: str | Path) -> list[Path]:
    """The weight files of a folder, in PaddleNLP's order of preference: safetensors, Paddle's, PyTorch's.

    Raises:
        ValueError: there are none, a shard is missing, or they are split for tensor parallelism.
    """
    folder = Path(folder)
    for name in ("model.safetensors", "model_state.pdparams", "pytorch_model.bin"):
        if (folder / f"{name}.index.json").is_file():
            return _shards(folder / f"{name}.index.json")
        if (folder / name).is_file():
            return [folder / name]
    split = sorted(path.name for path in folder.glob("*.tp[0-9]*.*"))
    if split:
        raise ValueError(
            f"{folder}: the weights are split for tensor parallelism ({', '.join(split[:3])}, ...): merge them, "
            "or save with merge_tensor_parallel"
        )
    raise ValueError(
        f"{folder}: no weights; expected model.safetensors, model_state.pdparams or pytorch_model.bin, or one of "
        "them with .index.json and its shards"
    )


def read_weights(files: Iterable[Path], read_pytorch: Callable[[str], dict]) -> tuple[dict, str | None]:
    """All tensors of the files.

    Args:
        files: what `find_weights` returned.
        read_pytorch: reads one pytorch_model*.bin into a dict of arrays.

    Returns:
        (tensors by name, whose layout they have: "paddle" or "pytorch" by the kind of file, and for safetensors what
        they declare, "pt" or "np" (Paddle's), or None).
    """
    import paddle

    tensors, declared = {}, None
    for path in files:
        if path.suffix == ".safetensors":
            part, metadata = read_safetensors(path)
            declared = metadata.get("format", declared)
        elif path.suffix == ".pdparams":
            if path.stat().st_size == 0:  # Paddle's error does not name it
                raise ValueError(f"{path}: is empty")
            part = paddle.load(str(path), return_numpy=True)
            part.pop("StructuredToParameterName@@", None)
            declared = "paddle"
        else:
            part, declared = read_pytorch(str(path)), "pytorch"
        tensors.update(part)
    return tensors, declared


def common_prefix(available: Iterable[str], wanted: Iterable[str]) -> tuple[str, int]:
    """The prefix ("", "bert.", "model.", ...) under which most of the wanted names are available, and how many."""
    available, wanted = set(available), list(dict.fromkeys(wanted))
    # A few names are enough to find the candidates; all of them decide.
    prefixes = {""} | {name[: -len(want)] for want in wanted[:4] for name in available if name.endswith("." + want)}
    counts = {prefix: sum(prefix + want in available for want in wanted) for prefix in prefixes}
    best = min(counts, key=lambda prefix: (-counts[prefix], len(prefix)))
    return best, counts[best]


def to_paddle_names(tensors: Mapping, mappings: list, shapes: Mapping[str, list[int]], declared: str | None):
    """Renames and transposes a checkpoint's tensors for the base model.

    Whether a safetensors file is in PyTorch's or in Paddle's layout is decided by the names, by the shapes of weights
    that are not square where the names are the same, and last by what the file declares.

    Args:
        tensors: arrays by the file's names.
        mappings: PaddleNLP's StateDictNameMapping list of the base model (source_name, target_name, action, run);
            empty when it has none.
        shapes: shape by name of the base model's parameters. With fused weights they are not the mappings' targets.
        declared: as `read_weights` says.

    Returns:
        (arrays by the base model's names, names of the file that were not used).

    Raises:
        ValueError: a PyTorch checkpoint, and no mapping for this model.
    """
    if not mappings and declared in ("pt", "pytorch"):
        raise ValueError("the weights are PyTorch's, and PaddleNLP has no mapping of names for this model")
    rest = dict(tensors)
    own_prefix, own_count = common_prefix(tensors, [*shapes, *(m.target_name for m in mappings)])
    torch_prefix, torch_count = common_prefix(tensors, [m.source_name for m in mappings])
    if declared in ("paddle", "pytorch"):
        is_torch = declared == "pytorch"
    elif torch_count != own_count:
        is_torch = torch_count > own_count
    else:
        votes = [
            list(rest[torch_prefix + m.source_name].shape) != shapes[m.target_name]
            for m in mappings
            if m.action == "transpose"
            and torch_prefix + m.source_name in rest
            and len(set(shapes.get(m.target_name, ()))) == 2
        ]
        is_torch = 2 * sum(votes) > len(votes) if votes else declared == "pt"
    if is_torch:
        named = {}
        for mapping in mappings:
            source = torch_prefix + mapping.source_name
            if source in rest:
                named[mapping.target_name] = mapping.run(rest, source)
    else:
        # All under the prefix: what is not the model's may be parts of what it holds fused, or the reverse.
        sources = [name for name in tensors if name.startswith(own_prefix)]
        named = {name.removeprefix(own_prefix): rest.pop(name) for name in sources}
    return named, sorted(rest)
