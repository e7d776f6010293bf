# SPDX-License-Identifier: Apache-2.0
"""DPO with PaddleNLP's trainer, its own log-probabilities and ours: equal losses, no copies of the logits.

    python scripts/example_dpo_logprobs.py --steps 5

Trains a tiny random Qwen2 three times from the same weights on the same preferences, on the CPU:

    upstream  DPOCriterion as it is: the logits are cast to float32 and go through a cross-entropy
    logits    `sequence_logprobs` on the logits: read once, nothing of their size but their gradient is stored
    hidden    `sequence_logprobs` on the hidden states and the output layer's weight: no logits at all

and prints the losses side by side. For a model of your own, take `LabelLogprobsCriterion` (it is all there is to it)
and hand it to DPOTrainer as ``dpo_criterion``.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from types import SimpleNamespace

import numpy as np
import paddle
from paddlenlp.trainer import TrainerCallback, TrainingArguments
from paddlenlp.transformers import Qwen2Config, Qwen2ForCausalLM
from paddlenlp.trl import DPOCriterion, DPOTrainer
from paddlenlp.trl.trl_data import preference_collate_fn

from paddle_infcl.functional.sequence_logprobs import sequence_logprobs

VOCABULARY, LONGEST = 211, 40


class LabelLogprobsCriterion(DPOCriterion):
    """DPOCriterion whose log-probabilities come from `sequence_logprobs`; every loss type works as before.

    The model may return its logits, or a tuple (hidden states, weight, bias, whether the weight is [V, D]), which is
    what PaddleNLP's fused heads return.
    """

    def dpo_logps(self, logits, chosen_labels, rejected_labels, response_indexs, average_log_prob=False):
        """The log-probabilities of the chosen and the rejected answers, and the chosen ones' share of the loss."""
        head = {}
        if isinstance(logits, tuple) and len(logits) == 4:
            output, weight, bias, is_vocabulary_first = logits
            head = {"weight": weight, "bias": bias, "transposed_weight": not is_vocabulary_first}
        else:
            output = logits[0] if isinstance(logits, tuple) else getattr(logits, "logits", logits)
        if response_indexs.ndim == 3:
            response_indexs = response_indexs[0]
        # (row, chosen from, rejected from, end): one call for both kinds reads the logits once.
        row, first, middle, end = (response_indexs[:, k] for k in range(4))
        offset = 1 if self.ignore_eos_token else 0
        chosen = paddle.stack([row, first, middle], axis=1)
        rejected = paddle.stack([row, middle + offset, end], axis=1)
        both = sequence_logprobs(
            output, chosen_labels + rejected_labels, ranges=paddle.concat([chosen, rejected]), **head
        )
        chosen_logps, rejected_logps = both.chunk(2)
        sft_loss = -chosen_logps.sum() / (chosen_labels != 0).sum()
        if average_log_prob:
            # As upstream divides, which subtracts the offset from the other answer's length.
            chosen_logps = chosen_logps / (middle - first - offset).astype("float32")
            rejected_logps = rejected_logps / (end - middle).astype("float32")
        return chosen_logps, rejected_logps, sft_loss * self.dpo_config.sft_loss_ratio


class HiddenQwen2(Qwen2ForCausalLM):
    """Qwen2 that leaves the output layer to the criterion."""

    def forward(self, input_ids, position_ids=None, attention_mask=None):
        """The last hidden states [B, T, D], and the output layer: weight, bias, whether the weight is [V, D]."""
        hidden = self.qwen2(input_ids, position_ids=position_ids, attention_mask=attention_mask)
        hidden = hidden if isinstance(hidden, paddle.Tensor) else hidden[0]
        return hidden, self.lm_head.weight, None, self.lm_head.transpose_y


class CpuDPOTrainer(DPOTrainer):
    """Upstream wraps the reference model for bf16 and fleet, which a CPU has not."""

    def _wrap_ref_model(self, model):
        return model


class Losses(TrainerCallback):
    """Keeps what the trainer logs."""

    def __init__(self):
        self.rows = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Paddle's trainer calls this at every log."""
        if "loss" in logs:
            self.rows.append({k: float(v) for k, v in logs.items() if k in ("loss", "logps/chosen", "logps/rejected")})


def preferences(rows: int, seed: int) -> list[dict]:
    """Random prompts with two random answers each, packed as PaddleNLP's preference data: prompt, chosen, rejected."""
    rng = np.random.default_rng(seed)
    data = []
    for _ in range(rows):
        prompt, chosen, rejected = (rng.integers(3, VOCABULARY, n).tolist() for n in rng.integers(4, 12, 3))
        p, a, b = len(prompt), len(chosen), len(rejected)
        sees = np.tri(p + a + b, dtype=bool)
        sees[p + a :, p : p + a] = False
        data.append(
            {
                "input_ids": prompt + chosen + rejected,
                "position_ids": [*range(p), *range(p, p + a), *range(p, p + b)],
                "response_0_labels": [0] * p + chosen[1:] + [2] + [0] * b,
                "response_1_labels": [0] * (p + a) + rejected[1:] + [2],
                "response_indexs": [[p, p + a, p + a + b, 1]],
                "attention_mask": sees[None],
            }
        )
    return data


def collate(batch: list[dict]) -> dict:
    """PaddleNLP's collator, as tensors."""
    return {k: paddle.to_tensor(v) for k, v in preference_collate_fn(batch, max_seq_len=LONGEST).items()}


def train(way: str, steps: int, loss_type: str = "sigmoid") -> list[dict]:
    """Trains one way; returns a row of losses per step."""
    kind = HiddenQwen2 if way == "hidden" else Qwen2ForCausalLM

    def model(seed):
        paddle.seed(seed)
        return kind(
            Qwen2Config(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2,
                tensor_parallel_output=False,
            )
        )  # fmt: skip

    policy, reference_free = model(1), loss_type in ("or", "simpo")
    reference = None if reference_free else model(2)
    settings = SimpleNamespace(
        beta=0.1, simpo_gamma=0.5, label_smoothing=0.0, loss_type=loss_type, pref_loss_ratio=1.0, sft_loss_ratio=0.1,
        dpop_lambda=50.0, ref_model_update_steps=-1, reference_free=reference_free, lora=False,
    )  # fmt: skip
    criterion = (DPOCriterion if way == "upstream" else LabelLogprobsCriterion)(policy.config, dpo_config=settings)
    losses = Losses()
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder, per_device_train_batch_size=4, max_steps=steps, learning_rate=1e-3, logging_steps=1,
            save_strategy="no", device="cpu", seed=0, disable_tqdm=True, report_to=[],
        )  # fmt: skip
        trainer = CpuDPOTrainer(
            model=policy, ref_model=reference, args=arguments, train_dataset=preferences(16, seed=3),
            data_collator=collate, dpo_criterion=criterion, dpo_config=settings, callbacks=[losses],
        )  # fmt: skip
        trainer.train()
    return losses.rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--loss_type", default="sigmoid", help="any of PaddleNLP's DPO losses")
    parser.add_argument("--json", help="also write the losses to this file")
    options = parser.parse_args()
    ways = {way: train(way, options.steps, options.loss_type) for way in ("upstream", "logits", "hidden")}
    for step, rows in enumerate(zip(*ways.values(), strict=True)):
        print(f"step {step + 1}  " + "  ".join(f"{w} {r['loss']:.6f}" for w, r in zip(ways, rows, strict=True)))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(ways, file, indent=1)
    gaps = [
        abs(r["loss"] - u["loss"])
        for w in ("logits", "hidden")
        for r, u in zip(ways[w], ways["upstream"], strict=True)
    ]
    print(f"largest gap to upstream: {max(gaps):.2e}")


if __name__ == "__main__":
    main()
