# SPDX-License-Identifier: Apache-2.0
"""`paddle-infcl train`: from a configuration to a trained model."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Sequence
from pathlib import Path

import yaml

from paddle_infcl import kernels
from paddle_infcl.arguments import Config, ConfigError, EmbeddingArgument, Problem, parse_config
from paddle_infcl.commands import estimate
from paddle_infcl.commands.common import quieten, use_device
from paddle_infcl.commands.evaluate import make_evaluator
from paddle_infcl.device import world_size
from paddle_infcl.log import logger

USAGE = """usage: paddle-infcl train [CONFIG] [--dry_run] [--option value ...]

Trains from a YAML or JSON file, options on the command line, or both; the command line wins. Several processes:
    python -m paddle.distributed.launch scripts/run_embedding.py CONFIG [--option value ...]

  --dry_run        print the configuration as it will be used, the backend and why, an estimate of the memory; stop
  --processes N    with --dry_run: estimate for N processes

All options of PaddleNLP's ModelConfig, DataConfig and SFTConfig are options, and these:
"""


def usage() -> str:
    """The help text; it takes no import of PaddleNLP."""
    lines = [USAGE]
    for field in dataclasses.fields(EmbeddingArgument):
        lines.append(f"  --{field.name} (default: {json.dumps(field.default)})\n        {field.metadata['help']}")
    return "\n".join(lines)


def train(argv: Sequence[str]) -> int:
    """Runs the command.

    Args:
        argv: a configuration file first, if any, then options.
    """
    argv = list(argv)
    if not argv or {"-h", "--help"} & set(argv):
        print(usage())
        return 0 if argv else 2
    dry_run = _take_flag(argv, "dry_run")
    processes = _take_value(argv, "processes")
    if processes is not None and not dry_run:
        raise ConfigError(
            [Problem("processes", processes, "goes with --dry_run; training uses those that launched it")]
        )
    quieten()
    config = parse_config(argv, check_files=not dry_run)
    if dry_run:
        print(describe(config, processes or world_size()))
        return 0
    run(config)
    return 0


def _take_flag(argv: list[str], name: str) -> bool:
    found = [word for word in argv if word.replace("-", "_") in (f"__{name}", f"__{name}=true")]
    for word in found:
        argv.remove(word)
        if word in argv:
            argv.remove(word)
    return bool(found)


def _take_value(argv: list[str], name: str) -> int | None:
    for index, word in enumerate(argv):
        key, equals, value = word.partition("=")
        if key == f"--{name}":
            taken = argv[index : index + (1 if equals else 2)]
            del argv[index : index + len(taken)]
            value = value if equals else (taken[1] if len(taken) == 2 else "")
            if not value.isdigit() or int(value) < 1:
                raise ConfigError([Problem(name, value, "must be a number of processes")])
            return int(value)
    return None


def describe(config: Config, processes: int) -> str:
    """The dry run's report: configuration, backend, memory, files that are not there."""
    use_device(config.training.device)
    ours = dataclasses.asdict(config.embedding)
    theirs = {}
    for group in (config.model, config.data, config.training):
        for field in dataclasses.fields(group):
            # PaddleNLP deletes its deprecated options from the object.
            if field.name in config.given and hasattr(group, field.name):
                theirs[field.name] = _plain(getattr(group, field.name))
    theirs["device"] = config.training.device
    backend, reason = estimate.backend_and_reason(config)
    parts = [
        "# PaddleNLP's options that are set",
        yaml.safe_dump(theirs, sort_keys=False, allow_unicode=True).rstrip(),
        "# paddle_infcl's options",
        yaml.safe_dump(ours, sort_keys=False, allow_unicode=True).rstrip(),
        "",
        f"backend: {backend} ({reason})",
        "",
        f"memory of one process, an estimate for {processes} processes" if processes > 1 else "memory, an estimate",
        *(f"  {line}" for line in estimate.memory_lines(config, backend, processes)),
        "",
        *(f"note: {note}" for note in config.notes),
        *(f"not on this machine: {problem}" for problem in config.missing),
    ]
    return "\n".join(parts).rstrip()


def _plain(value):
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return getattr(value, "value", value) if not isinstance(value, dict) else value


def run(config: Config) -> dict[str, float]:
    """Trains, evaluates and saves.

    Returns:
        The last evaluation's metrics; empty without evaluation.

    Raises:
        ConfigError: a backend that can't run, or text limits that the model has no room for.
        DataError: rows that can't be used, or fewer of them than one batch.
    """
    import paddle
    from paddlenlp.trainer import set_seed

    from paddle_infcl.data.jsonl import load_pairs
    from paddle_infcl.data.sampler import WindowSampler
    from paddle_infcl.trainer import EmbeddingTrainer
    from paddle_infcl.trainer.guide import Guide
    from paddle_infcl.trainer.inputs import pair_collator
    from paddle_infcl.trainer.resume import last_checkpoint

    training, embedding = config.training, config.embedding
    use_device(training.device)
    set_seed(training.seed)
    if embedding.inf_cl_loss:
        _check_backend(embedding, paddle.ones([1]))
    # The data before the model: its errors are the cheaper ones. The sampler refuses fewer rows than a batch.
    pairs = load_pairs(config.train_files, weights=embedding.train_weights, needs=embedding.row_needs())
    WindowSampler(
        pairs,
        micro_batch_size=training.per_device_train_batch_size,
        accumulation=training.gradient_accumulation_steps,
        seed=training.seed,
        world=training.dataset_world_size,
    )
    evaluator = make_evaluator(
        embedding.eval_pairs, embedding.eval_queries, embedding.eval_corpus, embedding.eval_qrels
    )
    model, tokenizer = load_model(config)
    set_templates(model, config)
    guide = Guide.from_arguments(embedding)
    trainer = EmbeddingTrainer(
        model=model,
        model_args=embedding,
        args=training,
        train_dataset=pairs,
        tokenizer=tokenizer,
        data_collator=pair_collator(tokenizer, embedding, config.data.pad_to_multiple_of, guide),
        evaluator=evaluator,
        guide=guide,
    )
    if "do_train" in config.given and not training.do_train:
        return _evaluate_only(trainer)
    checkpoint = training.resume_from_checkpoint
    if checkpoint is None and not training.overwrite_output_dir:
        checkpoint = last_checkpoint(training.output_dir)
        if checkpoint is not None:
            logger.warning("going on from %s; overwrite_output_dir: true starts again", checkpoint)
    result = trainer.train(resume_from_checkpoint=checkpoint)
    metrics: dict[str, float] = {}
    if evaluator is not None:
        done = [e for e in trainer.state.log_history if e["step"] == trainer.state.global_step and "eval_mrr@10" in e]
        # With load_best_model_at_end the weights are those of another step.
        metrics = done[-1] if done and not training.load_best_model_at_end else trainer.evaluate()
    trainer.save_model(merge_tensor_parallel=training.tensor_parallel_degree > 1)
    trainer.save_state()
    if trainer.is_world_process_zero():
        summary = {**result.metrics, **{k: v for k, v in metrics.items() if k.startswith("eval_")}}
        Path(training.output_dir, "all_results.json").write_text(
            json.dumps(summary, indent=2) + "\n", encoding="utf-8"
        )
    logger.info("the model is in %s", training.output_dir)
    return metrics


def _evaluate_only(trainer) -> dict[str, float]:
    if trainer.evaluator is None:
        raise ConfigError([Problem("do_train", False, "leaves nothing to do without eval_pairs or eval_queries")])
    metrics = trainer.evaluate()
    logger.info("do_train is false: %s", ", ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return metrics


def _check_backend(embedding: EmbeddingArgument, tensor) -> None:
    """The fallback's one warning now rather than at the first step; and no start without the backend asked for."""
    try:
        kernels.choose_backend(embedding.inf_cl_backend, tensor)
    except kernels.BackendError as error:
        message = f"{error}. auto takes what can run"
        raise ConfigError([Problem("inf_cl_backend", embedding.inf_cl_backend, message)]) from error


def load_model(config: Config):
    """The encoder and tokenizer of a configuration."""
    from paddle_infcl import modeling

    training, options = config.training, config.model
    dtype = "float32"
    if training.fp16_opt_level == "O2":
        dtype = "bfloat16" if training.bf16 else "float16" if training.fp16 else dtype
    overrides = {
        name: getattr(options, name)
        for name in ("hidden_dropout_prob", "attention_probs_dropout_prob", "fuse_attention_qkv", "fuse_attention_ffn")
        if name in config.given
    }
    for name in ("use_flash_attention", "use_fused_rms_norm", "use_fused_rope", "use_fused_linear"):
        if getattr(training, name, False):
            overrides[name] = True
    if training.tensor_parallel_degree > 1:
        overrides |= {n: getattr(training, n) for n in ("tensor_parallel_degree", "tensor_parallel_rank")}
    how = {
        "pooling": config.embedding.pooling,
        "normalize": config.embedding.normalize_embeddings,
        "dtype": dtype,
        **overrides,
    }
    path = os.path.expanduser(options.model_name_or_path)
    if options.continue_training:
        model = modeling.SentenceEncoder.from_pretrained(path, **how)
    else:
        how["normalize"] = how["normalize"] is not False
        model = modeling.SentenceEncoder.from_config(path, **how)
    tokenizer = modeling.load_tokenizer(os.path.expanduser(options.tokenizer_name_or_path or path))
    modeling.check_vocabulary(tokenizer, model)
    return model, tokenizer


def set_templates(model, config: Config) -> None:
    """Templates and limits, so that training, evaluation and the saved model agree.

    A template that was not given is the checkpoint's prompt. The saved model keeps templates that are prompts (nothing
    after the text) and the length that it was trained with.

    Raises:
        ConfigError: a limit above the model's positions.
    """
    embedding, problems = config.embedding, []
    for kind in ("query", "passage"):
        name, limit = f"{kind}_template", f"max_{kind}_len"
        if name not in config.given:
            setattr(embedding, name, model.template(kind))
        before, _, after = getattr(embedding, name).partition("{text}")
        if after:
            logger.warning(
                "%s has text after {text}, which the saved model can't keep: give it to evaluate and encode again",
                name,
            )
        elif before or model.prompts.get(kind):
            model.prompts[kind] = before
        positions = model.positions
        if positions and getattr(embedding, limit) > positions:
            message = f"the model has {positions} positions: take {positions} or less"
            problems.append(Problem(limit, getattr(embedding, limit), message))
    if problems:
        raise ConfigError(problems)
    model.max_seq_length = max(embedding.max_query_len, embedding.max_passage_len)
