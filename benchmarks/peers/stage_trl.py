"""TRL 1.12.0's side of a stage: its trainer with the settings that are fastest without flash-attn, timed a step."""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import torch
from datasets import Dataset, load_dataset
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PrinterCallback,
    ProgressCallback,
    TrainerCallback,
)

from peers.case import peak_gib
from peers.stage_case import ALPHA, GROUP, RANK, RESULT, StageCase, StageMeasured, median

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"


def main() -> None:
    for fields in json.loads(sys.argv[1]):
        print(f"{RESULT}{json.dumps(asdict(measure(StageCase(**fields))))}", flush=True)


def measure(case: StageCase) -> StageMeasured:
    """With the micro-batch of the case, or with half of it as often as memory runs out."""
    while True:
        gc.collect()
        if case.device == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        try:
            return train(case)
        except torch.OutOfMemoryError:
            pass  # left first: the error keeps the tensors alive
        case = replace(case, micro_batch=case.micro_batch // 2)


def train(case: StageCase) -> StageMeasured:
    timer = StepTimer(case)
    trainer = TRAINERS[case.stage](case)
    trainer.remove_callback(PrinterCallback)
    trainer.remove_callback(ProgressCallback)
    trainer.add_callback(timer)
    trainer.train()
    return StageMeasured(
        step_s=median(timer.steps[case.skipped :]),
        first_step_s=timer.first_step_s,
        peak_gib=peak_gib(case.device),
        tokens_a_step=0,
    )


class StepTimer(TrainerCallback):
    """Seconds from the end of one step to the end of the next: data, generation and learning together."""

    def __init__(self, case: StageCase) -> None:
        self._on_gpu = case.device == "cuda"
        self._started, self._since = time.perf_counter(), 0.0
        self.steps: list[float] = []
        self.first_step_s = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._since = self._since or self._now()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        now = self._now()
        if not self.steps:
            self.first_step_s = now - self._started
        self.steps.append(now - self._since)
        self._since = now

    def _now(self) -> float:
        if self._on_gpu:
            torch.cuda.synchronize()
        return time.perf_counter()


def common(case: StageCase, rows: int) -> dict[str, Any]:
    """bfloat16 autocast over float32 weights, the precision that Kedge has with its float32 masters."""
    return {
        "output_dir": case.file("trl"),
        "per_device_train_batch_size": min(case.micro_batch, rows),
        "gradient_accumulation_steps": max(1, rows // case.micro_batch),
        "max_steps": case.steps,
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "bf16": case.device == "cuda",
        "gradient_checkpointing": False,
        "optim": "adamw_torch_fused" if case.device == "cuda" else "adamw_torch",
        "use_cpu": case.device == "cpu",
        "save_strategy": "no",
        "logging_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 0,
    }


def peft_of(case: StageCase, task: str = "CAUSAL_LM") -> Any:
    from peft import LoraConfig

    return (
        LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type=task)
        if case.way == "lora"
        else None
    )


def weights_of(case: StageCase, kind: Any = AutoModelForCausalLM, folder: str = "policy", **how: Any) -> Any:
    """For LoRA the frozen base is bfloat16, as Kedge's is."""
    dtype = torch.bfloat16 if case.way == "lora" and case.device == "cuda" else torch.float32
    return kind.from_pretrained(case.file(folder), dtype=dtype, attn_implementation="sdpa", **how).to(case.device)


def data_of(case: StageCase, name: str) -> Dataset:
    data = load_dataset("json", data_files=case.file(name), split="train")
    assert isinstance(data, Dataset)
    return data


def tokenizer_of(case: StageCase, **how: Any) -> Any:
    return AutoTokenizer.from_pretrained(case.file("policy"), **how)


def sft(case: StageCase) -> Any:
    from trl import SFTConfig, SFTTrainer

    return SFTTrainer(
        model=weights_of(case),
        args=SFTConfig(**common(case, case.batch), max_length=case.max_length),
        train_dataset=data_of(case, "completions.jsonl"),
        processing_class=tokenizer_of(case),
        peft_config=peft_of(case),
    )


def reward(case: StageCase) -> Any:
    from trl import RewardConfig, RewardTrainer

    return RewardTrainer(
        model=weights_of(case, AutoModelForSequenceClassification, num_labels=1),
        args=RewardConfig(**common(case, case.batch), max_length=case.max_length),
        train_dataset=data_of(case, "pairs.jsonl"),
        processing_class=tokenizer_of(case),
        peft_config=peft_of(case, "SEQ_CLS"),
    )


def dpo(case: StageCase) -> Any:
    from trl import DPOConfig, DPOTrainer

    return DPOTrainer(
        model=weights_of(case),
        ref_model=None if case.way == "lora" else weights_of(case),
        args=DPOConfig(**common(case, case.batch), max_length=case.max_length, precompute_ref_log_probs=True),
        train_dataset=data_of(case, "pairs.jsonl"),
        processing_class=tokenizer_of(case),
        peft_config=peft_of(case),
    )


def grpo(case: StageCase) -> Any:
    from trl import GRPOConfig, GRPOTrainer

    def length(completion_ids: list[list[int]], **_: Any) -> list[float]:
        return [float(len(ids)) for ids in completion_ids]

    return GRPOTrainer(
        model=weights_of(case),
        reward_funcs=length,
        args=GRPOConfig(
            **common(case, case.batch),
            num_generations=GROUP,
            max_completion_length=case.new_tokens,
            beta=0.04,
            temperature=1.0,
        ),
        train_dataset=data_of(case, "prompts.jsonl"),
        processing_class=tokenizer_of(case, padding_side="left"),
        peft_config=peft_of(case),
    )


def ppo(case: StageCase) -> Any:
    from trl.experimental.ppo import PPOConfig, PPOTrainer  # pyright: ignore[reportMissingImports]

    tokenizer = tokenizer_of(case, padding_side="left")
    prompts = [
        {
            "input_ids": tokenizer.apply_chat_template(
                record["prompt"], add_generation_prompt=True, tokenize=True, return_dict=False
            )
        }
        for record in data_of(case, "prompts.jsonl")
    ]
    prompts = [record for record in prompts if len(record["input_ids"]) <= case.max_length]
    rows = case.batch
    settings = common(case, rows)
    settings.pop("max_steps")
    trainer = PPOTrainer(
        args=PPOConfig(
            **settings,
            num_mini_batches=4,
            num_ppo_epochs=2,
            total_episodes=rows * case.steps,
            local_rollout_forward_batch_size=rows,
            response_length=case.new_tokens,
            temperature=1.0,
            num_sample_generations=0,
        ),
        processing_class=tokenizer,
        model=weights_of(case),
        ref_model=None if case.way == "lora" else weights_of(case),
        reward_model=weights_of(case, AutoModelForSequenceClassification, "reward", num_labels=1),
        value_model=weights_of(case, AutoModelForSequenceClassification, "reward", num_labels=1),
        train_dataset=Dataset.from_list(prompts),
        peft_config=peft_of(case),
    )
    # PPOTrainer hands the number of all micro-batches of a batch to accelerate as gradient accumulation.
    trainer.accelerator.gradient_accumulation_steps = max(1, rows // 4 // case.micro_batch)
    return trainer


TRAINERS: dict[str, Callable[[StageCase], Any]] = {"sft": sft, "reward": reward, "dpo": dpo, "grpo": grpo, "ppo": ppo}

if __name__ == "__main__":
    main()
