# SPDX-License-Identifier: Apache-2.0
"""Folders of all kinds: loaded right, left alone, and refused by name when something is wrong with them."""

import hashlib
import json
import pickle
import shutil
import sys
import types
import zipfile

import numpy as np
import paddle
import pytest
from safetensors.numpy import load_file, save_file

from paddle_infcl import checkpoints
from paddle_infcl.modeling import SentenceEncoder
from tests import numpy_encoders
from tests.tiny_models import KINDS, backbone, batch, huggingface_tensors, write_huggingface


def vectors(encoder, ids, mask):
    encoder.eval()
    with paddle.no_grad():
        return encoder.encode(ids, mask).numpy()


def contents(folder):
    return {p: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(folder.rglob("*")) if p.is_file()}


def expected_vectors(kind, tensors, ids, mask, pooling, eps=None):
    """By the forward pass in NumPy, from the tensors as they are in the file."""
    rows = []
    for row, m in zip(ids, mask, strict=True):
        tokens = row[m == 1]
        if kind == "qwen2":
            hidden = numpy_encoders.qwen2_hidden(tensors, tokens, layers=2, heads=4, kv_heads=2, eps=1e-6, theta=1e4)
        else:
            start, usual = (2, 1e-5) if "roberta" in kind else (0, 1e-12)
            task = 0 if kind == "ernie" else None
            hidden = numpy_encoders.bert_hidden(
                tensors, tokens, layers=2, heads=4, eps=eps or usual, first_position=start, task_id=task
            )
        rows.append(numpy_encoders.embedding(hidden, pooling))
    return np.stack(rows)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("shards", "prefixed", "metadata"), [(1, False, True), (3, True, True), (1, True, False)])
def test_a_hugging_face_folder_gives_what_its_weights_mean(tmp_path, kind, shards, prefixed, metadata):
    model = backbone(kind, seed=3)
    prefix = {"qwen2": "model.", "xlm-roberta": "roberta."}.get(kind, f"{kind}.") if prefixed else ""
    extra = {"lm_head.weight": np.zeros((4, 4), "float32")} if prefixed else None
    write_huggingface(model, tmp_path, prefix=prefix, shards=shards, metadata=metadata, extra=extra)
    before = contents(tmp_path)
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert encoder.pooling == ("last" if kind == "qwen2" else "mean") and encoder.normalize
    ids, mask = batch()
    expected = expected_vectors(kind, huggingface_tensors(model), ids, mask, encoder.pooling)
    np.testing.assert_allclose(vectors(encoder, ids, mask), expected, atol=3e-6)
    assert contents(tmp_path) == before


def test_the_checkpoints_epsilon_is_used_also_where_paddlenlp_fixes_its_own(tmp_path):
    model = backbone("ernie", seed=3)
    write_huggingface(model, tmp_path / "in", layer_norm_eps=1e-3)
    encoder = SentenceEncoder.from_pretrained(tmp_path / "in")
    ids, mask = batch()
    expected = expected_vectors("ernie", huggingface_tensors(model), ids, mask, "mean", eps=1e-3)
    np.testing.assert_allclose(vectors(encoder, ids, mask), expected, atol=3e-6)
    encoder.save_pretrained(tmp_path / "out")
    again = SentenceEncoder.from_pretrained(tmp_path / "out")
    np.testing.assert_allclose(vectors(again, ids, mask), expected, atol=3e-6)


def test_bf16_weights_are_read(tmp_path):
    model = backbone("bert", seed=4)
    for parameter in model.parameters():  # values that bf16 holds exactly
        bits = parameter.numpy().view(np.uint32) & np.uint32(0xFFFF0000)
        parameter.set_value(bits.view(np.float32))
    write_huggingface(model, tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {name: (value.view(np.uint32) >> 16).astype(np.uint16) for name, value in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    raw = file.read_bytes()
    data = 8 + int.from_bytes(raw[:8], "little")
    header = raw[8:data].replace(b'"U16"', b'"BF16"')
    file.write_bytes(len(header).to_bytes(8, "little") + header + raw[data:])
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert encoder.backbone.pooler.dense.weight.dtype == paddle.float32
    ids, mask = batch()
    np.testing.assert_array_equal(vectors(encoder, ids, mask), vectors(SentenceEncoder(model), ids, mask))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"safe_serialization": True}, {"max_shard_size": "20KB"}])
def test_a_paddlenlp_folder_loads_exactly(tmp_path, kind, options):
    model = backbone(kind, seed=5)
    model.save_pretrained(str(tmp_path), **options)
    if "max_shard_size" in options:
        assert (tmp_path / "model_state.pdparams.index.json").is_file()
    before = contents(tmp_path)
    encoder = SentenceEncoder.from_pretrained(tmp_path, pooling="cls", normalize=False)
    for name, value in model.state_dict().items():
        np.testing.assert_array_equal(encoder.backbone.state_dict()[name].numpy(), value.numpy(), err_msg=name)
    assert (encoder.pooling, encoder.normalize) == ("cls", False)
    ids, mask = batch()
    expected = SentenceEncoder(model, pooling="cls", normalize=False)
    np.testing.assert_array_equal(vectors(encoder, ids, mask), vectors(expected, ids, mask))
    assert contents(tmp_path) == before


def test_a_sentence_embedding_as_paddlenlps_script_saves_it(tmp_path):
    from paddlenlp.transformers import Qwen2SentenceEmbedding

    config = backbone("qwen2").config
    config.embedding_negatives_cross_device = False
    model = Qwen2SentenceEmbedding(config)
    model.save_pretrained(str(tmp_path))
    assert all(name.startswith("qwen2.") for name in paddle.load(str(tmp_path / "model_state.pdparams")))
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert (encoder.pooling, encoder.normalize) == ("last", True)
    ids, mask = batch()
    np.testing.assert_array_equal(vectors(encoder, ids, mask), vectors(SentenceEncoder.wrap(model), ids, mask))


FUSED = {"fuse_attention_qkv": True, "fuse_attention_ffn": True}


@pytest.mark.parametrize("made_by", ["huggingface", "paddlenlp", "safetensors", "fused"])
@pytest.mark.parametrize("wanted", [FUSED, dict.fromkeys(FUSED, False)])
def test_fused_weights(tmp_path, made_by, wanted):
    model = backbone("qwen2", seed=8)
    ids, mask = batch()
    expected = vectors(SentenceEncoder(model), ids, mask)
    write_huggingface(model, tmp_path / "hf")
    if made_by == "fused":
        SentenceEncoder.from_pretrained(tmp_path / "hf", **FUSED).save_pretrained(tmp_path / "model")
    elif made_by != "huggingface":
        model.save_pretrained(str(tmp_path / "model"), safe_serialization=made_by == "safetensors")
    folder = tmp_path / ("hf" if made_by == "huggingface" else "model")
    encoder = SentenceEncoder.from_pretrained(folder, **wanted)
    assert any("qkv_proj" in name for name in encoder.state_dict()) == wanted["fuse_attention_qkv"]
    np.testing.assert_allclose(vectors(encoder, ids, mask), expected, atol=1e-6)


def test_our_own_folder_round_trips_and_paddlenlp_reads_it(tmp_path):
    from paddlenlp.transformers import AutoModel

    encoder = SentenceEncoder(backbone("ernie"), "cls", False, 24, {"query": "suche: ", "passage": ""})
    encoder.save_pretrained(tmp_path / "out")
    again = SentenceEncoder.from_pretrained(tmp_path / "out", hidden_dropout_prob=0.3)
    assert (again.pooling, again.normalize, again.max_seq_length) == ("cls", False, 24)
    assert again.prompts == {"query": "suche: ", "passage": ""} and again.template("query") == "suche: {text}"
    assert again.config.hidden_dropout_prob == 0.3
    ids, mask = batch()
    np.testing.assert_array_equal(vectors(again, ids, mask), vectors(encoder, ids, mask))
    over = SentenceEncoder.from_pretrained(tmp_path / "out", pooling="mean", normalize=True, max_seq_length=7)
    assert (over.pooling, over.normalize, over.max_seq_length) == ("mean", True, 7)
    plain = AutoModel.from_pretrained(str(tmp_path / "out"))
    np.testing.assert_array_equal(
        plain.embeddings.word_embeddings.weight.numpy(), encoder.backbone.embeddings.word_embeddings.weight.numpy()
    )


def test_saving_beside_other_weights_is_refused(tmp_path):
    write_huggingface(backbone("bert"), tmp_path)
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"holds model\.safetensors, which later loads would take"):
        encoder.save_pretrained(tmp_path)


def test_a_state_dict_may_have_the_backbones_names(tmp_path):
    encoder, other = SentenceEncoder(backbone("bert", seed=1)), SentenceEncoder(backbone("bert", seed=2))
    ids, mask = batch()
    expected = vectors(encoder, ids, mask)
    encoder.save_pretrained(tmp_path, state_dict=encoder.state_dict())
    other.set_state_dict(paddle.load(str(tmp_path / "model_state.pdparams")))
    np.testing.assert_array_equal(vectors(other, ids, mask), expected)
    third = SentenceEncoder(backbone("bert", seed=3))
    third.set_state_dict(encoder.state_dict())
    np.testing.assert_array_equal(vectors(third, ids, mask), expected)
    np.testing.assert_array_equal(vectors(SentenceEncoder.from_pretrained(tmp_path), ids, mask), expected)


def write_pytorch_bin(path, tensors):
    """What torch.save writes: a zip with a pickle, whose tensors refer to raw storages beside it."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    storage = type("FloatStorage", (), {"__module__": "torch"})

    def _rebuild_tensor_v2(*args):
        raise AssertionError("only named in the file")

    _rebuild_tensor_v2.__module__ = "torch._utils"
    _rebuild_tensor_v2.__qualname__ = "_rebuild_tensor_v2"
    torch.FloatStorage, torch._utils, utils._rebuild_tensor_v2 = storage, utils, _rebuild_tensor_v2

    class Reference:
        def __init__(self, key, value):
            self.key, self.value = key, value

    class Tensor:
        def __init__(self, key, value):
            self.reference, self.value = Reference(key, value), value

        def __reduce__(self):
            strides = tuple(s // 4 for s in self.value.strides)
            return _rebuild_tensor_v2, (self.reference, 0, self.value.shape, strides, False, {})

    class Pickler(pickle.Pickler):
        def persistent_id(self, obj):
            if isinstance(obj, Reference):
                return ("storage", storage, obj.key, "cpu", obj.value.size)
            return None

    sys.modules |= {"torch": torch, "torch._utils": utils}
    try:
        with zipfile.ZipFile(path, "w") as archive:
            with archive.open("archive/data.pkl", "w") as stream:
                Pickler(stream, 2).dump({n: Tensor(str(i), v) for i, (n, v) in enumerate(tensors.items())})
            for i, value in enumerate(tensors.values()):
                archive.writestr(f"archive/data/{i}", value.tobytes())
    finally:
        del sys.modules["torch"], sys.modules["torch._utils"]


def test_pytorch_bin_files(tmp_path):
    model = backbone("xlm-roberta", seed=6)
    write_huggingface(model, tmp_path)
    write_pytorch_bin(tmp_path / "pytorch_model.bin", load_file(tmp_path / "model.safetensors"))
    (tmp_path / "model.safetensors").unlink()
    before = contents(tmp_path)
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    ids, mask = batch()
    np.testing.assert_array_equal(vectors(encoder, ids, mask), vectors(SentenceEncoder(model), ids, mask))
    assert contents(tmp_path) == before


# the files of sentence-transformers


def write_sentence_files(folder, modules=("Transformer", "Pooling", "Normalize"), pooling=None, **files):
    paths = ["", "1_Pooling", "2_Normalize"]
    entries = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(modules, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(entries))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling or {"pooling_mode_cls_token": True}))
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_mean_tokens": True, "word_embedding_dimension": 32}, "mean"),
        ({"pooling_mode_lasttoken": True, "include_prompt": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
    ],
)
def test_pooling_prompts_and_length_come_from_the_files(tmp_path, config, pooling):
    write_huggingface(backbone("bert"), tmp_path)
    write_sentence_files(
        tmp_path,
        pooling=config,
        sentence_bert_config={"max_seq_length": 17, "do_lower_case": False},
        config_sentence_transformers={"prompts": {"query": "q: ", "document": "d: "}, "default_prompt_name": None},
    )
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert (encoder.pooling, encoder.normalize, encoder.max_seq_length) == (pooling, True, 17)
    assert (encoder.template("query"), encoder.template("passage")) == ("q: {text}", "d: {text}")
    write_sentence_files(tmp_path, modules=("Transformer", "Pooling"), pooling=config)
    assert SentenceEncoder.from_pretrained(tmp_path).normalize is False
    assert SentenceEncoder.from_pretrained(tmp_path, normalize=True).normalize is True


def test_a_transformer_in_a_subfolder(tmp_path):
    model = backbone("bert")
    write_huggingface(model, tmp_path / "0_Transformer")
    write_sentence_files(tmp_path)
    modules = json.loads((tmp_path / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "0_Transformer" / "sentence_bert_config.json").write_text('{"max_seq_length": 12}')
    encoder = SentenceEncoder.from_pretrained(tmp_path)
    assert (encoder.pooling, encoder.max_seq_length) == ("cls", 12)


@pytest.mark.parametrize(
    ("pooling", "modules", "text"),
    [
        ({"pooling_mode_max_tokens": True}, ("Transformer", "Pooling"), r"1_Pooling/config\.json: pooling max is not"),
        (
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            ("Transformer", "Pooling"),
            r"cls \+ mean",
        ),
        ({"pooling_mode": "max"}, ("Transformer", "Pooling"), "pooling max is not supported"),
        ({"word_embedding_dimension": 3}, ("Transformer", "Pooling"), r"pooling \(none\)"),
        ({"pooling_mode_mean_tokens": True, "include_prompt": False}, ("Transformer", "Pooling"), "include_prompt"),
        (None, ("Transformer", "Pooling", "Dense"), r"modules\.json: the module '.*Dense' is not supported"),
    ],
)
def test_what_the_files_ask_for_and_is_not_supported_is_refused(tmp_path, pooling, modules, text):
    write_huggingface(backbone("bert"), tmp_path)
    write_sentence_files(tmp_path, modules=modules, pooling=pooling)
    with pytest.raises(ValueError, match=text):
        SentenceEncoder.from_pretrained(tmp_path)
    if "Dense" not in modules:
        assert SentenceEncoder.from_pretrained(tmp_path, pooling="mean").pooling == "mean"


def test_a_pooling_config_without_modules_json(tmp_path):
    write_sentence_files(tmp_path, pooling={"pooling_mode_cls_token": True})
    (tmp_path / "modules.json").unlink()
    found = checkpoints.read_sentence_config(tmp_path)
    assert (found.pooling, found.normalize) == ("cls", None)


# what is wrong is named


@pytest.fixture
def folder(tmp_path):
    return write_huggingface(backbone("bert"), tmp_path / "model", shards=2)


def edit_weights(folder, change):
    for file in sorted(folder.glob("*.safetensors")):
        tensors = load_file(file)
        change(tensors)
        save_file(tensors, file, metadata={"format": "pt"})


def test_missing_weights_are_an_error_that_names_them(folder):
    def drop(tensors):
        for name in [n for n in tensors if n.startswith("encoder.layer.1.output")]:
            tensors[f"other.{name}"] = tensors.pop(name)

    edit_weights(folder, drop)
    with pytest.raises(
        ValueError, match=r"4 weights of BertModel are missing: .*layers\.1\.linear2\.weight.*not used"
    ) as info:
        SentenceEncoder.from_pretrained(folder)
    assert str(folder) in str(info.value)


@pytest.mark.parametrize(("weights", "config"), [("bert", "qwen2"), ("qwen2", "bert"), ("bert", "llama")])
def test_a_checkpoint_of_another_model_never_passes(tmp_path, weights, config):
    write_huggingface(backbone(weights), tmp_path)
    if config == "llama":
        backbone(config).config.save_pretrained(str(tmp_path))
    else:
        write_huggingface(backbone(config), tmp_path / "other")
        shutil.copy(tmp_path / "other" / "config.json", tmp_path)
    with pytest.raises(ValueError, match=r"weights of \w+Model are missing: .*; not used: "):
        SentenceEncoder.from_pretrained(tmp_path)


def test_a_missing_pooler_is_fine_and_unused_weights_are_warned_of(folder, caplog, monkeypatch):
    from paddle_infcl.log import logger

    monkeypatch.setattr(logger, "propagate", True)

    def change(tensors):
        for name in [n for n in tensors if n.startswith("pooler.")]:
            del tensors[name]
        tensors["cls.predictions.bias"] = np.zeros(3, "float32")
        tensors["embeddings.position_ids"] = np.zeros((1, 3), "int64")

    edit_weights(folder, change)
    SentenceEncoder.from_pretrained(folder)
    warnings = [record.getMessage() for record in caplog.records if record.name == "paddle_infcl"]
    assert [w.rsplit(": ", 1)[1] for w in warnings] == ["cls.predictions.bias"]
    assert warnings[0].startswith(f"{folder}: weights that BertModel does not use")


def test_weights_that_do_not_fit_the_config(folder):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "vocab_size": 91}))
    with pytest.raises(ValueError, match=r"(?s)do not fit config\.json.*\[90, 32\].*\[91, 32\]"):
        SentenceEncoder.from_pretrained(folder)


def replace(folder, name, content):
    (folder / name).write_bytes(content)


FILE = "model-00001-of-00002.safetensors"


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda f: (f / FILE).unlink(), rf"index\.json: 1 of 2 files are missing: {FILE}"),
        (lambda f: replace(f, FILE, (f / FILE).read_bytes()[:-64]), rf"{FILE}: cut short: '.*' ends at byte"),
        (lambda f: replace(f, FILE, b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "Git LFS pointer"),
        (lambda f: replace(f, FILE, b""), rf"{FILE}: not a safetensors file"),
        (lambda f: (f / "config.json").unlink(), r"no config\.json"),
        (lambda f: replace(f, "config.json", b"{"), r"config\.json: not valid JSON"),
        (lambda f: replace(f, "config.json", b"[]"), r"config\.json: must hold a JSON object"),
        (lambda f: replace(f, "modules.json", b"{}"), r"modules\.json: must hold a JSON array"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "no weights; expected model.safetensors, "),
        (
            lambda f: [replace(f, "model_state.pdparams", b""), (f / "model.safetensors.index.json").unlink()],
            r"model_state\.pdparams: is empty",
        ),
        (
            lambda f: replace(f, "sentence_bert_config.json", b'{"max_seq_length": "x"}'),
            r"sentence_bert_config\.json: max_seq_length is 'x'; a whole number",
        ),
        (
            lambda f: replace(f, "config_sentence_transformers.json", b'{"prompts": ["x"]}'),
            r"config_sentence_transformers\.json: prompts must be texts by their names",
        ),
    ],
)
def test_damaged_folders(folder, damage, text):
    damage(folder)
    with pytest.raises(ValueError, match=text):
        SentenceEncoder.from_pretrained(folder)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "modernbert"}, "modernbert"),
        ({"model_type": None}, r"config\.json: no model_type"),
        ({"num_attention_heads": 5}, r"config\.json: PaddleNLP can't make a BertModel: embed_dim must be divisible"),
        ({"hidden_size": "32"}, r"config\.json: PaddleNLP can't make a BertModel"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type 'relative_key' is not in PaddleNLP"),
    ],
)
def test_configs_that_paddlenlp_cannot_serve(folder, change, text):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ValueError, match=text):
        SentenceEncoder.from_pretrained(folder)


def test_weights_split_for_tensor_parallelism(folder):
    for file in folder.glob("model*"):
        file.unlink()
    for rank in (0, 1):
        (folder / f"model_state.tp0{rank}.pdparams").write_bytes(b"")
    with pytest.raises(ValueError, match=r"split for tensor parallelism \(model_state\.tp00\.pdparams"):
        SentenceEncoder.from_pretrained(folder)


def test_unknown_config_fields_and_paths(folder, tmp_path):
    with pytest.raises(ValueError, match="BertConfig has no field hidden_drop"):
        SentenceEncoder.from_pretrained(folder, hidden_drop=0.1)
    for path in (tmp_path / "nowhere", "./nowhere", folder / "config.json"):
        with pytest.raises(FileNotFoundError, match="is no folder"):
            SentenceEncoder.from_pretrained(path)


def test_a_folder_that_paddlenlp_has_written_its_weights_into(folder):
    # PaddleNLP's own conversion leaves model_state.pdparams in a Hugging Face folder.
    encoder = SentenceEncoder.from_pretrained(folder)
    shutil.copy(folder / "config.json", folder.parent)
    encoder.backbone.save_pretrained(str(folder.parent / "other"))
    shutil.copy(folder.parent / "other" / "model_state.pdparams", folder)
    ids, mask = batch()
    np.testing.assert_array_equal(
        vectors(SentenceEncoder.from_pretrained(folder), ids, mask), vectors(encoder, ids, mask)
    )
    for file in folder.glob("model*safetensors*"):
        file.unlink()
    np.testing.assert_array_equal(
        vectors(SentenceEncoder.from_pretrained(folder), ids, mask), vectors(encoder, ids, mask)
    )


def test_pytorch_weights_of_a_model_without_mapping_are_refused():
    with pytest.raises(ValueError, match="PyTorch's, and PaddleNLP has no mapping"):
        checkpoints.to_paddle_names({"a.weight": np.zeros((2, 3))}, [], {"a.weight": [3, 2]}, "pt")
    with pytest.raises(ValueError, match="PyTorch's, and PaddleNLP has no mapping"):
        checkpoints.to_paddle_names({"a.weight": np.zeros((3, 2))}, [], {"a.weight": [3, 2]}, "pytorch")
