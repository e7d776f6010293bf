# SPDX-License-Identifier: Apache-2.0
"""The command `paddle-infcl`: train, evaluate, encode, doctor."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from paddle_infcl import __version__
from paddle_infcl.log import logger


def _model_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", required=True, help="folder of a trained model, or a name that PaddleNLP knows")
    parser.add_argument("--pooling", choices=("cls", "mean", "last"), help="default: what the checkpoint says")
    parser.add_argument("--batch_size", type=int, default=32, help="texts per forward pass (default: 32)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, gpu, gpu:1, ...")


def make_parser() -> argparse.ArgumentParser:
    """The command line, but for `train`, whose options are those of a configuration."""
    parser = argparse.ArgumentParser(prog="paddle-infcl", description="Contrastive training of embedding models.")
    parser.add_argument("--version", action="version", version=f"paddle_infcl {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="train | evaluate | encode | doctor")
    commands.add_parser("train", add_help=False, help="train from a configuration; `paddle-infcl train --help`")

    evaluate = commands.add_parser("evaluate", help="score retrieval")
    _model_options(evaluate)
    evaluate.add_argument("--pairs", help="JSONL of held-out pairs; every query must find its passage among all")
    evaluate.add_argument("--queries", help="JSONL with _id and text; together with --corpus and --qrels")
    evaluate.add_argument("--corpus", help="JSONL with _id and text; beside --pairs: more passages")
    evaluate.add_argument("--qrels", help="TSV: query-id, corpus-id, score; or TREC's format")
    evaluate.add_argument(
        "--group_field", help="a field of the queries to show metrics by; default: package, if there"
    )
    evaluate.add_argument("--max_query_len", type=int, help="default: the model's limit")
    evaluate.add_argument("--max_passage_len", type=int, help="default: the model's limit")
    evaluate.add_argument("--query_template", help="default: the checkpoint's prompt, then {text}")
    evaluate.add_argument("--passage_template", help="default: the checkpoint's prompt, then {text}")
    evaluate.add_argument("--output", help="write the metrics to this JSON file")

    encode = commands.add_parser("encode", help="texts to vectors")
    _model_options(encode)
    encode.add_argument("--input", required=True, help="a text per line, or .jsonl with one object per line")
    encode.add_argument("--output", required=True, help="the .npy file: row i is line i, float32")
    encode.add_argument("--field", default="text", help="where a JSON object has its text (default: text)")
    encode.add_argument("--kind", choices=("query", "passage"), help="whose prompt to use; default: none")
    encode.add_argument("--template", help="text around every text; {text} stands for it")
    encode.add_argument("--max_length", type=int, help="default: the model's limit")

    commands.add_parser("doctor", help="versions, devices, and which backend would run")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
        argv: words of the command line; None: the process's own.

    Returns:
        The exit code: 0, 1 for an error that is the user's to mend (its message goes to stderr), 130 after Ctrl-C.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv[:1] == ["train"]:
            from paddle_infcl.commands.train import train

            return train(argv[1:])
        options = make_parser().parse_args(argv)
        if options.command == "evaluate":
            from paddle_infcl.commands.evaluate import evaluate

            return evaluate(options)
        if options.command == "encode":
            from paddle_infcl.commands.encode import encode

            return encode(options)
        from paddle_infcl.commands.doctor import doctor

        return doctor()
    except KeyboardInterrupt:
        goes_on = "; without overwrite_output_dir the same command goes on from the last checkpoint"
        logger.error("stopped by Ctrl-C%s", goes_on if argv[:1] == ["train"] else "")
        return 130
    except (ValueError, OSError) as error:
        if os.environ.get("PADDLE_INFCL_TRACEBACK"):
            raise
        logger.error("%s", error)
        logger.info("PADDLE_INFCL_TRACEBACK=1 shows where")
        return 1


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` as a whole process, ended with its exit code; one of several processes ends at once (`end_process`)."""
    code = main(argv)
    if "paddle" in sys.modules:
        from paddle_infcl.distributed.watch import end_process

        end_process(code)
    sys.exit(code)


if __name__ == "__main__":
    program()
