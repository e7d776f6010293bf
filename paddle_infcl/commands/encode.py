# SPDX-License-Identifier: Apache-2.0
"""`paddle-infcl encode`: a file of texts to a .npy file of vectors."""

from __future__ import annotations

import sys


def encode(options) -> int:
    """Runs the command; prints the shape."""
    from paddle_infcl.commands.common import load_for_inference
    from paddle_infcl.commands.options import check_options
    from paddle_infcl.encode import encode_file

    check_options(options, inputs=["input"], limits=["max_length"], templates=["template"], names=["model", "field"])
    if options.template is not None and options.kind is not None:
        raise ValueError("--kind takes the checkpoint's template, --template gives another: use one of the two")
    model, tokenizer = load_for_inference(options)
    template = options.template
    if template is None:
        template = model.template(options.kind) if options.kind else "{text}"
    rows, width = encode_file(
        model,
        tokenizer,
        options.input,
        options.output,
        field=options.field,
        max_length=options.max_length,
        template=template,
        batch_size=options.batch_size,
        show_progress=sys.stderr.isatty(),
    )
    print(f"{options.output}: {rows} x {width} float32")
    return 0
