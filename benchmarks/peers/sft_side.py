"""Full supervised fine-tuning of the same model on the same rows: the yardstick for PPO's memory."""

from __future__ import annotations

from pathlib import Path

import torch

from kedge.core.batches import Batch
from kedge.core.optimiser import OptimiserSettings
from kedge.models.forward.heads import language_model
from kedge.models.loading.load import dtype_for
from kedge.models.loading.start import start_causal
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import imitation
from kedge.models.training.train_step import trained_weights
from peers.case import SHAPES, Measured, Stopwatch, case_from_arguments, peak_gib, print_result


def main() -> None:
    """As many optimiser steps as the case has updates, each over all rows."""
    case = case_from_arguments()
    model = start_causal(str(Path(case.home) / "policy"), lora=None, device=case.device, seed=0)
    trained = trained_weights(model, dtype=dtype_for("auto", case.device))
    policy = language_model(model)
    learner = Learner(trained, policy.backbone, imitation(policy), OptimiserSettings(), total_steps=case.updates)
    width = case.prompt_tokens + case.new_tokens
    shape = (case.micro_batch, width)
    batches = [
        Batch(
            tokens_BT=torch.randint(0, SHAPES[case.shape]["vocab_size"], shape),
            attention_mask_BT=torch.ones(shape, dtype=torch.bool),
            counted_BT=torch.arange(width).expand(shape) >= case.prompt_tokens,
        )
        for _ in range(case.rows // case.micro_batch)
    ]
    stopwatch = Stopwatch(case.device)
    for _ in range(case.updates):
        learner.update(lambda _: batches)
        stopwatch.close("update")
        stopwatch.end()
    tokens = [case.rows * width] * (case.updates - 1)
    print_result(Measured(laps=stopwatch.laps[1:], tokens=tokens, peak_gib=peak_gib(case.device)))


if __name__ == "__main__":
    main()
