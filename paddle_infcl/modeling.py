# SPDX-License-Identifier: Apache-2.0
"""Encoders: any PaddleNLP backbone with hidden states, a pooling, a normalisation."""

from __future__ import annotations

import copy
import inspect
from pathlib import Path
from types import SimpleNamespace

import paddle
from paddle import nn

from paddle_infcl import checkpoints
from paddle_infcl.checkpoints import SentenceConfig
from paddle_infcl.data.templates import required_vocabulary
from paddle_infcl.functional.vectors import l2_normalize
from paddle_infcl.log import logger
from paddle_infcl.pooling import POOLINGS, pad_right, pool

# Model types whose attention is causal: a token never sees the padding on its right, so they need no padding mask.
CAUSAL_TYPES = frozenset({"bloom", "gemma", "gpt", "llama", "mistral", "opt", "qwen2", "qwen2_moe"})

# Names in a checkpoint that are no weights: buffers that the model computes itself.
_BUFFERS = ("position_ids", "token_type_ids", "rotary_emb.inv_freq")


class SentenceEncoder(nn.Layer):
    """A backbone with pooling and normalisation: texts in, one vector per text out.

    Args:
        backbone: a PaddleNLP base model (BertModel, ErnieModel, XLMRobertaModel, Qwen2Model, ...).
        pooling: "cls", "mean" or "last"; None takes "last" for causal decoders, whose last token is the only one
            that has seen the whole text, and "mean" for encoders, which is what sentence-transformers makes of a
            checkpoint that says nothing.
        normalize: embeddings have length 1.
        max_seq_length: how many tokens a text may have; None: as many as the model has positions for.
        prompts: named prompts of the checkpoint, see `template`.

    Attributes:
        positions: how many tokens fit into learned position embeddings; None where there are none (rotary positions).
        embedding_dim: D.

    Raises:
        ValueError: an unknown pooling, or a backbone whose hidden states are split over devices.
    """

    def __init__(self, backbone, pooling=None, normalize=True, max_seq_length=None, prompts=None):
        super().__init__()
        config = backbone.config
        self.is_causal = config.model_type in CAUSAL_TYPES
        if pooling is None:
            pooling = "last" if self.is_causal else "mean"
        if pooling not in POOLINGS:
            raise ValueError(f"pooling '{pooling}' is unknown; there are {', '.join(POOLINGS)}")
        if getattr(config, "sequence_parallel", False):
            raise ValueError("sequence_parallel splits the hidden states that the pooling needs: turn it off")
        self.backbone = backbone
        self.config = config
        self.pooling = pooling
        self.normalize = bool(normalize)
        self.embedding_dim = config.hidden_size
        self.prompts = dict(prompts or {})
        self.positions = _positions(backbone)
        limits = [limit for limit in (max_seq_length, self.positions) if limit]
        self.max_seq_length = min(limits) if limits else None
        self._accepted = set(inspect.signature(backbone.forward).parameters)
        # The pooler takes part in no embedding: without a gradient of its own, data parallelism needs no search for
        # unused parameters, which recompute could not do with.
        for parameter in getattr(getattr(backbone, "pooler", None), "parameters", list)():
            parameter.stop_gradient = True
        _repair_recompute(backbone)

    def template(self, kind: str) -> str:
        """The checkpoint's template for a kind of text: its prompt, then {text}.

        Args:
            kind: "query" or "passage" (a prompt named "document" or "corpus" counts as the passage's).
        """
        names = {"passage": ("passage", "document", "corpus")}.get(kind, (kind,))
        prompt = next((self.prompts[name] for name in names if self.prompts.get(name)), "")
        return prompt + "{text}"

    def encode(self, input_ids, attention_mask=None, embedding_indices=None, **unused):
        """Embeds a batch of token ids, padded on either side.

        Args:
            input_ids: [B, L] int64, tensor or array.
            attention_mask: [B, L], 1 = token, 0 = padding; None: no padding.
            embedding_indices: [B, 2] (row, index of the last token), as PaddleNLP's embedding collator gives them;
                tokens are then those up to the index, and `attention_mask`, there a mask over pairs, is not read.
            **unused: what else that collator gives (position_ids, attn_mask_startend_row_indices).

        Returns:
            [B, D] in the dtype of the hidden states; of length 1 (computed in fp32) if the encoder normalises.

        Raises:
            ValueError: a text longer than the model has positions for, or a mask of another shape.
        """
        ids = _int64(input_ids)
        if embedding_indices is not None:
            mask = _int64(paddle.arange(ids.shape[1]).unsqueeze(0) <= _int64(embedding_indices)[:, 1:2])
        elif attention_mask is None:
            mask = paddle.ones_like(ids)
        else:
            mask = _int64(attention_mask)
        if mask.shape != ids.shape:
            raise ValueError(f"attention_mask is {list(mask.shape)}, input_ids {list(ids.shape)}: one entry per token")
        if self.positions and ids.shape[1] > self.positions:
            raise ValueError(f"{ids.shape[1]} tokens in a row, and the model has positions for {self.positions}")
        ids, mask = pad_right(ids, mask)
        options = {"attention_mask": None if self.is_causal else mask, "use_cache": False, "return_dict": False}
        output = self.backbone(ids, **{name: v for name, v in options.items() if name in self._accepted})
        hidden = output if isinstance(output, paddle.Tensor) else output[0]
        vectors = pool(hidden, mask, self.pooling)
        return l2_normalize(vectors) if self.normalize else vectors

    def forward(self, query, passages, return_encode=True, **unused):
        """The trainer's protocol: embeddings of queries [B, D] and of passages [N, D].

        Args:
            query: keyword arguments of `encode`.
            passages: the same.
            return_encode: PaddleNLP's models compute their loss unless it is set; here only True is possible.

        Raises:
            ValueError: return_encode is False, or as `encode`.
        """
        if not return_encode:
            raise ValueError("SentenceEncoder has no loss of its own (return_encode=False): see paddle_infcl.losses")
        return self.encode(**query), self.encode(**passages)

    def set_state_dict(self, state_dict, *args, **kwargs):
        """Loads parameters by this layer's names or, as `save_pretrained` writes them, by the backbone's.

        Raises:
            ValueError: the parameters are those of another model; Paddle would pass over what does not fit.
        """
        own = self.state_dict()
        if not any(name in own for name in state_dict):
            state_dict = {f"backbone.{name}": value for name, value in state_dict.items()}
        given = {name: value for name, value in state_dict.items() if hasattr(value, "shape")}
        wrong = {
            "missing": [name for name in own if name not in given and not name.endswith(_BUFFERS)],
            "unknown": [name for name in given if name not in own and not name.endswith(_BUFFERS)],
            "of another shape": [n for n in given if n in own and list(given[n].shape) != list(own[n].shape)],
        }
        if any(wrong.values()):
            found = "; ".join(f"{len(names)} {what}: {_some(names, 3)}" for what, names in wrong.items() if names)
            raise ValueError(f"these are not the weights of this {type(self.backbone).__name__}: {found}")
        return super().set_state_dict(state_dict, *args, **kwargs)

    set_dict = load_dict = set_state_dict

    def save_pretrained(self, folder, **kwargs) -> None:
        """Writes weights and config as PaddleNLP does, and sentence-transformers' files for pooling and the rest.

        Args:
            folder: created if missing.
            **kwargs: for PaddleNLP's save_pretrained (max_shard_size, merge_tensor_parallel, ...). A `state_dict`
                may have this layer's names.

        Raises:
            ValueError: the folder holds other weights, which later loads would prefer to these.
        """
        folder = Path(folder)
        suffix = "safetensors" if kwargs.get("safe_serialization") else "pdparams"
        for name in ("model.safetensors", "model.safetensors.index.json"):
            if suffix == "pdparams" and (folder / name).is_file():
                raise ValueError(
                    f"{folder} holds {name}, which later loads would take for the weights: save elsewhere"
                )
        if kwargs.get("state_dict") is not None:
            kwargs["state_dict"] = {k.removeprefix("backbone."): v for k, v in kwargs["state_dict"].items()}
        self.backbone.save_pretrained(str(folder), **kwargs)
        said = SentenceConfig(self.pooling, self.normalize, self.max_seq_length, self.prompts)
        checkpoints.write_sentence_config(folder, said, dim=self.embedding_dim)

    @classmethod
    def from_pretrained(cls, path, *, pooling=None, normalize=None, max_seq_length=None, dtype="float32", **overrides):
        """Loads a local folder (Hugging Face's, PaddleNLP's, or our own), or a model that PaddleNLP knows by name.

        Nothing is written into the folder. Pooling, normalisation, prompts and length limit come from the folder's
        sentence-transformers files unless given here; a folder without them normalises.

        Args:
            path: a local folder, or a name for PaddleNLP's AutoModel, which downloads it.
            pooling: "cls", "mean" or "last"; None: the checkpoint's, else see the class.
            normalize: None: the checkpoint's, else True.
            max_seq_length: None: the checkpoint's, else the model's.
            dtype: of the parameters.
            **overrides: fields of the model's config, such as hidden_dropout_prob=0.0.

        Raises:
            FileNotFoundError: a path that isn't there.
            ValueError: weights that are missing or of another shape, a config field or a model type that PaddleNLP
                doesn't have, or files that ask for something that is not supported.
        """
        folder = Path(path)
        if not folder.is_dir():
            if folder.is_absolute() or str(path).startswith((".", "~")) or folder.exists():
                raise FileNotFoundError(f"{path} is no folder, and not the name of a model either")
            from paddlenlp.transformers import AutoModel

            backbone = AutoModel.from_pretrained(str(path), dtype=dtype, **overrides)
            return cls(backbone, pooling, normalize is not False, max_seq_length)
        said = checkpoints.read_sentence_config(folder, pooling=pooling)
        if normalize is None:
            normalize = said.normalize is not False
            if not normalize:
                logger.info("%s: modules.json has no Normalize, so embeddings keep their length", folder)
        backbone = _load_backbone(folder / said.subfolder, dtype, overrides)
        return cls(backbone, said.pooling, normalize, max_seq_length or said.max_seq_length, said.prompts)

    @classmethod
    def from_config(cls, config, *, pooling=None, normalize=True, max_seq_length=None, dtype="float32", **overrides):
        """An encoder with random weights, to train from scratch.

        Args:
            config: a PaddleNLP config, or a folder or name to read one from.
            pooling, normalize, max_seq_length, dtype, **overrides: as in `from_pretrained`.
        """
        if isinstance(config, (str, Path)):
            from paddlenlp.transformers import AutoConfig

            config = AutoConfig.from_pretrained(str(config))
        config = _override(copy.deepcopy(config), dtype, overrides)
        return cls(_backbone_class(config)._from_config(config, dtype=dtype), pooling, normalize, max_seq_length)

    @classmethod
    def wrap(cls, model):
        """An encoder that shares the parameters of PaddleNLP's Qwen2SentenceEmbedding (last token, normalised).

        Raises:
            TypeError: the model is neither that nor a SentenceEncoder.
        """
        model = getattr(model, "_layers", model)  # a data-parallel wrapper
        if isinstance(model, cls):
            return model
        backbone = getattr(model, getattr(model, "base_model_prefix", ""), None)
        if not isinstance(backbone, nn.Layer):
            raise TypeError(f"{type(model).__name__} is neither a SentenceEncoder nor a PaddleNLP sentence embedding")
        return cls(backbone, pooling="last")


def encoder_from_pretrained(path, **options):
    """The encoder and the tokenizer of a checkpoint, checked against each other.

    Args:
        path: a local folder or a name that PaddleNLP knows.
        **options: for `SentenceEncoder.from_pretrained`.

    Returns:
        (SentenceEncoder, tokenizer)

    Raises:
        ValueError: as `SentenceEncoder.from_pretrained`, `load_tokenizer` and `check_vocabulary` do.
    """
    model = SentenceEncoder.from_pretrained(path, **options)
    tokenizer = load_tokenizer(path)
    check_vocabulary(tokenizer, model)
    return model, tokenizer


def load_tokenizer(path):
    """The tokenizer of a local folder (Hugging Face's or PaddleNLP's), or of a name that PaddleNLP knows.

    PaddleNLP's own class for the folder's tokenizer is preferred; where its vocabulary files are missing, or where it
    has none, tokenizer.json is used.

    Raises:
        ValueError: the folder has the files of none of them.
    """
    from paddlenlp.transformers import AutoTokenizer, PretrainedTokenizerFast
    from paddlenlp.transformers.auto.tokenizer import TOKENIZER_MAPPING_NAMES, tokenizer_class_from_name

    folder = Path(path)
    if not folder.is_dir():
        return AutoTokenizer.from_pretrained(str(path))
    said, config = {}, {}
    if (folder / "tokenizer_config.json").is_file():
        said = checkpoints.read_json(folder / "tokenizer_config.json")
    if (folder / "config.json").is_file():
        config = checkpoints.read_json(folder / "config.json")
    name = (said.get("init_class") or said.get("tokenizer_class") or "").removesuffix("Fast")
    by_type = TOKENIZER_MAPPING_NAMES.get(config.get("model_type", "").replace("-", "_"), ())
    by_type = (by_type,) if isinstance(by_type, str) else by_type
    names = [name, f"{name}Fast"] if name else [n for n in by_type if isinstance(n, str)]
    classes = [tokenizer_class_from_name(n) for n in names] + [PretrainedTokenizerFast]
    classes += [tokenizer_class_from_name(n) for n in by_type if isinstance(n, str) and n not in names]
    wanted = []
    for tokenizer_class in filter(None, classes):
        files = tokenizer_class.resource_files_names
        needed = [files["tokenizer_file"]] if "tokenizer_file" in files else list(files.values())
        if all((folder / file).is_file() for file in needed):
            try:
                return tokenizer_class.from_pretrained(str(folder))
            except (AssertionError, LookupError, TypeError) as error:
                said = f"{tokenizer_class.__name__} can't read {', '.join(needed)}: {error}"
                raise ValueError(f"{folder}: {said}") from error
        wanted.append(f"{tokenizer_class.__name__} needs {', '.join(needed)}")
    raise ValueError(f"{folder}: no tokenizer ({name or 'no class is named'}): {'; '.join(wanted)}")


def check_vocabulary(tokenizer, model) -> None:
    """Every id that the tokenizer can give must have an embedding.

    Raises:
        ValueError: an id is out of range; names the largest one, its token and the model's vocabulary.
    """
    needed, there = required_vocabulary(tokenizer), model.config.vocab_size
    if needed > there:
        raise ValueError(
            f"the tokenizer's highest id is {needed - 1} ('{tokenizer.convert_ids_to_tokens(needed - 1)}'), and the "
            f"model has embeddings for {there} ids, 0 to {there - 1}: the two do not belong together, or tokens were "
            "added without resizing the model"
        )


def _int64(values):
    tensor = values if isinstance(values, paddle.Tensor) else paddle.to_tensor(values)
    return tensor.astype("int64")


def _override(config, dtype, overrides):
    unknown = sorted(name for name in overrides if not hasattr(config, name))
    if unknown:
        raise ValueError(f"{type(config).__name__} has no field {', '.join(unknown)}")
    for name, value in overrides.items():
        setattr(config, name, value)
    config.dtype = dtype
    return config


def _backbone_class(config):
    import paddlenlp.transformers as zoo

    name = type(config).__name__.removesuffix("Config") + "Model"
    if not hasattr(zoo, name):
        raise ValueError(f"PaddleNLP has no {name} for model type '{config.model_type}'")
    return getattr(zoo, name)


def _name_mappings(model_class, config) -> list:
    """PaddleNLP's PyTorch-to-Paddle mapping, for the base model without any prefix; [] when it has none."""
    from paddlenlp.transformers import BertModel
    from paddlenlp.transformers.conversion_utils import StateDictNameMapping

    # With its own class as the architecture a model expects base names on both sides.
    config = copy.copy(config)
    config.architectures = [model_class.__name__]
    if model_class.__name__ == "ErnieModel":
        # PaddleNLP has none for ERNIE, whose weights are BERT's and the task's embedding, on both sides.
        base = SimpleNamespace(num_hidden_layers=config.num_hidden_layers, architectures=["BertModel"])
        task = "embeddings.task_type_embeddings.weight"
        return [*BertModel._get_name_mappings(base), StateDictNameMapping(task)]
    try:
        mappings = model_class._get_name_mappings(config)
    except NotImplementedError:
        return []
    for mapping in mappings:
        # RoBERTa's pooler has one all the same.
        mapping.target_name = mapping.target_name.removeprefix(model_class.base_model_prefix + ".")
    return mappings


def _load_backbone(folder: Path, dtype: str, overrides: dict):
    """The base model of a checkpoint folder, with its weights. See `SentenceEncoder.from_pretrained`."""
    from paddlenlp.transformers import AutoConfig
    from paddlenlp.utils.serialization import load_torch

    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder}: no config.json")
    raw = checkpoints.read_json(folder / "config.json")
    if raw.get("position_embedding_type", "absolute") != "absolute":
        raise ValueError(f"{folder}: position_embedding_type '{raw['position_embedding_type']}' is not in PaddleNLP")
    if not isinstance(raw.get("model_type"), str):
        raise ValueError(f"{folder / 'config.json'}: no model_type, such as bert: PaddleNLP cannot tell what it is")
    config = _override(AutoConfig.from_pretrained(str(folder)), dtype, overrides)
    model_class = _backbone_class(config)
    files = checkpoints.find_weights(folder)
    tensors, declared = checkpoints.read_weights(files, load_torch)
    try:
        model = model_class._from_config(config, dtype=dtype)
    except (AssertionError, TypeError, ValueError) as error:
        raise ValueError(
            f"{folder / 'config.json'}: PaddleNLP can't make a {model_class.__name__}: {error}"
        ) from error
    if "layer_norm_eps" in raw:
        # ErnieModel fixes its own; the checkpoint was trained with this one.
        for layer in model.sublayers():
            if isinstance(layer, nn.LayerNorm):
                layer._epsilon = float(raw["layer_norm_eps"])
    shapes = {name: list(value.shape) for name, value in model.state_dict().items()}
    try:
        renamed, unused = checkpoints.to_paddle_names(tensors, _name_mappings(model_class, config), shapes, declared)
    except ValueError as error:
        raise ValueError(f"{folder} ({model_class.__name__}): {error}") from error
    place = paddle.CPUPlace()
    state = {name: paddle.to_tensor(value, place=place) for name, value in renamed.items()}
    try:
        # Fuses and splits where the config asks for it; `missing` is what is left after that.
        _, missing, unexpected, _ = model_class._load_pretrained_model(
            model, state, list(state), pretrained_model_name_or_path=str(folder), config=config, dtype=dtype
        )
    except RuntimeError as error:
        raise ValueError(f"{folder} ({model_class.__name__}): weights do not fit config.json: {error}") from error
    missing = sorted(name for name in missing if not name.startswith("pooler."))
    unused = [name for name in [*unused, *sorted(unexpected)] if not name.endswith(_BUFFERS)]
    if missing:
        text = f"{folder}: {len(missing)} weights of {model_class.__name__} are missing: {_some(missing)}"
        raise ValueError(text + (f"; not used: {_some(unused)}" if unused else ""))
    if unused:
        logger.warning("%s: weights that %s does not use: %s", folder, model_class.__name__, _some(unused))
    return model


def _positions(backbone) -> int | None:
    """Rows of the position embeddings that tokens can have: RoBERTa's and OPT's first ones belong to none."""
    config = backbone.config
    for name, parameter in backbone.named_parameters():
        if "position_embeddings" in name or "embed_positions" in name:
            if config.model_type in ("roberta", "xlm-roberta"):
                return parameter.shape[0] - config.pad_token_id - 1
            return parameter.shape[0] - 2 * (config.model_type == "opt")
    return None


def _some(names: list[str], most: int = 10) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def _recompute(function, *args):
    from paddle.distributed.fleet.utils import recompute

    return recompute(function, *args)


def _repair_recompute(backbone) -> None:
    """XLM-R's encoder recomputes through a method that PaddleNLP 3.0.0b4 does not have (AttributeError)."""
    for layer in backbone.sublayers():
        if type(layer).__name__ == "XLMRobertaEncoder" and not hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = _recompute
