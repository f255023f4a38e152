"""TRL 1.12.0's side of the case: its PPOTrainer, timed from outside at the borders of its phases.

It takes as many optimiser steps as its settings promise, which needs a correction: PPOTrainer hands the number of all
micro-batches of a batch to accelerate as gradient accumulation, and so takes one step a pass whatever
`num_mini_batches` says.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    TrainerCallback,
)

from peers.case import PAD, TRUNK, Case, Measured, OutOfMemory, Stopwatch, case_from_arguments, peak_gib, print_result

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
try:
    from trl.experimental.ppo import PPOConfig, PPOTrainer, ppo_trainer  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise SystemExit(f"TRL's side needs TRL 1.12.0 ({error}): pip install 'trl==1.12.0', or --who kedge") from error


def main() -> None:
    case = case_from_arguments()
    trainer = trainer_of(case)
    phases = Phases(case.device, trainer)
    try:
        trainer.train()
    except torch.OutOfMemoryError:
        print_result(OutOfMemory(phase=phases.phase))
        return
    print_result(
        Measured(
            laps=phases.stopwatch.laps[1:],
            tokens=phases.tokens[1:],
            peak_gib=peak_gib(case.device),
            new_lengths=phases.new_lengths,
        )
    )


class Phases(TrainerCallback):
    """Times TRL's phases: generation is one function, and judging ends with the first forward pass of the policy."""

    def __init__(self, device: str, trainer: Any) -> None:
        self._trainer = trainer
        self._generate, self._forward = ppo_trainer.batch_generation, ppo_trainer.forward
        ppo_trainer.batch_generation, ppo_trainer.forward = self.generate, self.forward
        trainer.add_callback(self)
        self.tokens: list[int] = []
        self.new_lengths: list[int] = []
        self.phase = "generate"
        self.stopwatch = Stopwatch(device)

    def generate(self, model: Any, queries: Any, *rest: Any) -> Any:
        self.phase = "generate"
        self.stopwatch.mark()
        result = self._generate(model, queries, *rest)
        self.stopwatch.close("generate")
        self.phase = "judge"
        is_real_BT = result[0] != PAD
        self.tokens.append(int(is_real_BT.sum()))
        self.new_lengths = is_real_BT[:, queries.shape[1] :].sum(1).tolist()
        return result

    def forward(self, model: Any, *rest: Any) -> Any:
        if model is self._trainer.model and self.phase == "judge":
            self.stopwatch.close("judge")
            self.phase = "update"
        return self._forward(model, *rest)

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.stopwatch.close("update")
        self.stopwatch.end()


def trainer_of(case: Case) -> Any:
    policy, reference = (_load(AutoModelForCausalLM, case, "policy") for _ in range(2))
    value, reward = (_load(AutoModelForSequenceClassification, case, TRUNK, num_labels=1) for _ in range(2))
    tokenizer = AutoTokenizer.from_pretrained(Path(case.home) / "policy", padding_side="left")
    trainer = PPOTrainer(
        args=settings_of(case),
        processing_class=tokenizer,
        model=policy,
        ref_model=reference,
        reward_model=reward,
        value_model=value,
        # One batch more than is used: at the end of a loader accelerate takes a step for every micro-batch.
        train_dataset=[{"input_ids": row} for row in [*case.prompts(), *case.prompts()[: case.rows]]],
    )
    trainer.accelerator.gradient_accumulation_steps = case.rows // case.minibatches // case.micro_batch
    trainer.remove_callback(PrinterCallback)
    # The trainer's own generation settings name no end, so that of the model counts.
    policy.generation_config.eos_token_id = case.stop_ids() or None
    policy.generation_config.pad_token_id = PAD
    return trainer


def settings_of(case: Case) -> Any:
    return PPOConfig(
        output_dir=str(Path(case.home) / "trl"),
        per_device_train_batch_size=case.micro_batch,
        gradient_accumulation_steps=case.rows // case.micro_batch,
        num_mini_batches=case.minibatches,
        num_ppo_epochs=case.epochs,
        total_episodes=case.rows * case.updates,
        local_rollout_forward_batch_size=min(case.rows, case.trl_rollout or case.rows),
        response_length=case.new_tokens,
        temperature=1.0,
        kl_coef=0.05,
        learning_rate=1e-6,
        lr_scheduler_type="constant",
        bf16=False,  # the weights are bfloat16; autocast on top of them only costs
        gradient_checkpointing=False,
        use_cpu=case.device == "cpu",
        num_sample_generations=0,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        seed=0,
    )


def _load(kind: Any, case: Case, folder: str, **how: Any) -> Any:
    return kind.from_pretrained(Path(case.home) / folder, dtype=getattr(torch, case.dtype), **how).to(case.device)


if __name__ == "__main__":
    main()
