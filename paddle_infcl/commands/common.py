# SPDX-License-Identifier: Apache-2.0
"""What several commands need."""

from __future__ import annotations

import os


def quieten() -> None:
    """PaddleNLP without its lists of every option: progress from the first process, warnings from all."""
    from paddlenlp.utils.log import logger as upstream

    from paddle_infcl.log import logger

    first = os.environ.get("PADDLE_TRAINER_ID", "0") == "0"
    upstream.set_level("INFO" if first else "WARNING")
    logger.setLevel("INFO" if first else "WARNING")


def use_device(name: str) -> str:
    """Makes a device the current one; "auto" is the best there is."""
    import paddle

    from paddle_infcl.device import available_device

    device = available_device()[0] if name == "auto" else name
    paddle.set_device(device)
    return device


def load_for_inference(options):
    """The model and tokenizer that --model, --pooling and --device name."""
    from paddle_infcl.modeling import encoder_from_pretrained

    quieten()
    use_device(options.device)
    return encoder_from_pretrained(options.model, pooling=options.pooling)
