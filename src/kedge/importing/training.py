"""Fields of `transformers.TrainingArguments`, which TRL and LLaMA-Factory have in common, and Axolotl in part."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final, cast

from kedge.core.optimiser import eight_bit_package
from kedge.core.quoting import quoted
from kedge.importing import places
from kedge.importing.rules import (
    Outcome,
    Rule,
    Source,
    changed,
    flag,
    folder_name,
    names,
    number,
    part_of,
    refuse,
    refused,
    skip,
    table,
    take,
    taken,
    told,
    unneeded,
    whole,
)

SCHEDULES: Final = {
    "linear": "linear",
    "cosine": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}
NEAR_SCHEDULES: Final = {
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "cosine_with_restarts": "cosine",
    "polynomial": "linear",
    "warmup_stable_decay": "constant",
    "inverse_sqrt": "constant",
    "rex": "cosine",
    "one_cycle": "cosine",
}
ADAMS: Final = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw", "adamw_apex_fused", "adamw_anyprecision")
TRACKERS: Final = ("wandb", "tensorboard", "mlflow")
FILES: Final = "the run folder has them, by its own rules"
EVERY_STEP: Final = "every step is written"
SHARDED: Final = (
    "of several processes: `placement: {processes: auto}` uses all GPUs, `weights: shard` gives each a part"
)
SHARD: Final = {"placement.processes": "auto", "placement.weights": "shard"}
_PARTS: Final = re.compile(r"z(ero)?[-_]?(stage)?[-_]?3|stage[-_]?3|full_shard|'stage': 3", re.IGNORECASE)
"""How files, words and settings say that each process holds a part of the weights."""


def batch(value: Any, source: Source) -> Outcome:
    """What one optimiser step sees, of a stage that learns from data."""
    rows, accumulated = whole(value), whole(source.get("gradient_accumulation_steps", 1))
    words = f"{rows} × {accumulated} accumulated × {source.processes} process(es); more processes: --processes"
    return changed("stage.batch", rows * accumulated * source.processes, source, words)


def epochs(value: Any, source: Source) -> Outcome:
    """Passes over the data. Where a number of steps is set it alone counts, so that there must be data for them."""
    steps = whole(source.get("max_steps", -1))
    if steps <= 0:
        return taken("stage.epochs", number(value), source)
    per_step = whole(source.get("per_device_train_batch_size", source.get("micro_batch_size", 1)))
    per_step *= whole(source.get("gradient_accumulation_steps", 1)) * source.processes
    # One pass more than the rows need: some may be held out, or too long.
    enough = math.ceil(steps * per_step / source.num_rows) + 1 if source.num_rows else 1000
    return changed("stage.epochs", min(enough, 10_000), source, f"max_steps alone decides: {steps} steps")


def max_steps(value: Any, source: Source) -> Outcome:
    steps = whole(value)
    return taken("stage.max_steps", steps, source) if steps > 0 else unneeded("no bound")


def schedule(value: Any, source: Source) -> Outcome:
    asked = str(value).lower()
    if asked in SCHEDULES:
        return taken("optimiser.schedule", SCHEDULES[asked], source)
    if asked in NEAR_SCHEDULES:
        near = NEAR_SCHEDULES[asked]
        return changed("optimiser.schedule", near, source, f"the nearest of cosine, linear and constant to {asked}")
    raise ValueError(f"must be a schedule such as {', '.join(SCHEDULES)}, found {quoted(value)}")


def warmup_ratio(value: Any, source: Source) -> Outcome:
    if source.given.get("warmup_steps"):
        return unneeded("warmup_steps counts where both are set")
    return taken("optimiser.warmup", number(value), source)


def warmup_steps(value: Any, source: Source) -> Outcome:
    """Kedge warms up over a share of all steps."""
    steps, total = number(value), whole(source.get("max_steps", -1))
    if steps == 0:
        return (
            unneeded("no warm-up, unless a ratio says so")
            if _has_ratio(source)
            else taken("optimiser.warmup", 0.0, source)
        )
    if 0 < steps < 1:
        return taken("optimiser.warmup", steps, source)
    if total <= 0 and source.num_rows and not source.is_rl:
        size = whole(source.get("per_device_train_batch_size", source.get("micro_batch_size", 1)))
        size *= whole(source.get("gradient_accumulation_steps", 1)) * source.processes
        total = math.ceil(source.num_rows * source.number("num_train_epochs", source.number("num_epochs", 1)) / size)
    if total <= 0:
        return refused("warm-up is a share of all steps, whose number is not known here: set `warmup` of the optimiser")
    return changed("optimiser.warmup", min(steps / total, 0.99), source, f"{steps:g} of {total} steps")


def _has_ratio(source: Source) -> bool:
    return source.given.get("warmup_ratio") is not None


def optim(value: Any, source: Source) -> Outcome:
    """AdamW, whoever computes it; in 8 bits where a package for it is there."""
    asked = str(value).lower()
    if asked in ADAMS:
        return taken("optimiser.name", "adamw", source)
    if "8bit" in asked and "adam" in asked:
        if eight_bit_package() is None:
            return changed(
                "optimiser.name",
                "adamw",
                source,
                "adamw_8bit needs bitsandbytes or torchao, which are not installed here",
            )
        return changed("optimiser.name", "adamw_8bit", source, "moments of 8 bits")
    if "adam" in asked:
        return changed("optimiser.name", "adamw", source, f"{asked} is not there: AdamW in full precision")
    return refused(f"{asked} is no optimiser here: AdamW learns, and wants another learning rate")


def clip(value: Any, source: Source) -> Outcome:
    norm = number(value)
    if norm == 0:
        return changed("optimiser.clip", 1e6, source, "no clipping: a norm that no gradient has")
    return taken("optimiser.clip", norm, source)


def run_name(value: Any, source: Source) -> Outcome:
    return changed("name", folder_name(value), source, "names the run, runs/NAME")


def output_dir(value: Any, source: Source) -> Outcome:
    if source.given.get("run_name"):
        return unneeded("run_name names the run")
    return changed(
        "name", folder_name(value), source, "runs/NAME is where a run is written; --to another folder at `kedge run`"
    )


def report_to(value: Any, source: Source) -> Outcome:
    asked = [str(name) for name in (cast("list[Any]", value) if isinstance(value, list) else [value])]
    known = [name for name in asked if name in TRACKERS]
    if known:
        left_out = sorted(set(asked) - set(known))
        why = f"{', '.join(left_out)} is not there" if left_out else ""
        return taken("trackers", {name: {} for name in known}, source, why)
    if not asked or asked[0] in ("none", "all", "False", "None"):
        return unneeded("metrics are always in the run's own files")
    return refused(f"no tracker {quoted(asked[0])}; there are {', '.join(TRACKERS)}, and the run's own files")


def eval_strategy(value: Any, source: Source) -> Outcome:
    """Stages of preferences always measure on a share; others measure where there is held-out data."""
    if value is False or str(value).lower() in ("no", "false"):
        if source.kind in ("reward", "preference") and not source.get("eval_dataset"):
            return changed("stage.heldout_share", 0.01, source, "a share is always held out and measured on; the least")
        return unneeded("without `heldout` nothing is measured")
    if source.is_rl:
        return told("`eval` of this stage has exams and judges (docs/exams.md); the reward is written at every step")
    return told("there is an evaluation wherever there is held-out data: every `eval.every` steps and at the end")


def eval_steps(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return unneeded("the reward is written at every step")
    steps = number(value)
    if steps < 1:
        return refused("a share of all steps; `eval.every` is a number of steps")
    return taken("stage.eval.every", whole(value), source)


def save_steps(value: Any, source: Source) -> Outcome:
    steps = number(value)
    if steps < 1:
        return unneeded("checkpoints are written by themselves (`checkpoints.every`)")
    return taken("stage.checkpoints.every", int(steps), source)


def save_total_limit(value: Any, source: Source) -> Outcome:
    return taken("stage.checkpoints.keep", max(whole(value), 1), source)


def recompute(value: Any, source: Source) -> Outcome:
    if isinstance(value, str) and value.lower() in ("offload", "offload_disk", "unsloth"):
        return changed("stage.memory.recompute", True, source, "recomputed, not offloaded")
    return taken("stage.memory.recompute", flag(value), source)


def compiled(value: Any, source: Source) -> Outcome:
    if str(value).lower() == "auto" or not flag(value):
        return unneeded("`memory.compile: auto` decides")
    return taken("stage.memory.compile", True, source)


def dtype(value: Any, source: Source) -> Outcome:
    asked = str(value).lower().removeprefix("torch.")
    if asked in ("float32", "fp32", "bfloat16", "bf16", "auto"):
        return unneeded("the device decides (`memory.dtype: auto`); what learns has float32 weights")
    return told("bfloat16 on a GPU; what learns has float32 weights")


def half(value: Any, source: Source) -> Outcome:
    return (
        told("bfloat16 on a GPU; what learns has float32 weights") if flag(value) else unneeded("it asks for nothing")
    )


def bits(number_of: int) -> Rule:
    """Bits a weight of the frozen base."""

    def rule(value: Any, source: Source) -> Outcome:
        if not flag(value):
            return unneeded("it asks for nothing")
        if not source.is_lora:
            return refused("a base in few bits learns by adapters alone: train with LoRA")
        return taken("lora.base_bits", number_of, source)

    return rule


def targets(value: Any) -> Any:
    """Names of matrices, or all linear layers."""
    chosen = names(value)
    return "all" if chosen in (["all"], ["all-linear"], ["all_linear"]) else chosen


def model(value: Any, source: Source) -> Outcome:
    if source.asked.model:
        return changed("model", source.asked.model, source, "--model stands in its place")
    return taken("model", places.place(str(value), source), source)


def model_revision(value: Any, source: Source) -> Outcome:
    if str(value) == "main":
        return unneeded("the newest one")
    return refused("a model of the hub is taken as it is now: download that revision, and name the folder as --model")


def sharded(value: Any, source: Source) -> Outcome:
    """DeepSpeed, FSDP: weights in parts where the other tool has them so."""
    if not value or str(value).lower() in ("false", "none"):
        return unneeded("it asks for nothing")
    is_offloaded = "offload" in str(value).lower()
    if _PARTS.search(str(value)):
        host = "; none of it is moved to the host" if is_offloaded else ""
        return Outcome(verdict="changed", sets=SHARD, why=f"each process holds a part of the weights (FSDP2){host}")
    host = "; `memory: {offload: [optimiser]}` moves the moments to the host" if is_offloaded else ""
    why = f"each process holds all weights; `placement.weights: shard` gives it a part{host}"
    return Outcome(verdict="changed", sets={"placement.processes": "auto"}, why=why)


def fully_sharded(value: Any, source: Source) -> Outcome:
    return sharded(f"full_shard {value}" if value else value, source)


def seed(value: Any, source: Source) -> Outcome:
    return taken("seed", max(whole(value), 0), source)


DEFAULTS: Final[Mapping[str, Any]] = {
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 3.0,
    "learning_rate": 5e-5,
    "lr_scheduler_type": "linear",
    "warmup_steps": 0,
    "weight_decay": 0.0,
    "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0,
    "seed": 42,
    "eval_strategy": "no",
}
"""Of transformers 5."""

TABLE: Final = table(
    {
        "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": part_of("batch", "what one optimiser step sees; passes are of their own size"),
        "num_processes": part_of("batch", "and `placement.processes`"),
        "num_train_epochs": epochs,
        "max_steps": max_steps,
        "learning_rate": take("optimiser.lr", number),
        "lr_scheduler_type": schedule,
        "lr_scheduler_kwargs": refuse("a schedule has no settings of its own here; cosine and linear fall to 0"),
        "warmup_ratio": warmup_ratio,
        "warmup_steps": warmup_steps,
        "optim": optim,
        "weight_decay": take("optimiser.weight_decay", number),
        "adam_beta1": take("optimiser.beta1", number),
        "adam_beta2": take("optimiser.beta2", number),
        "adam_epsilon": take("optimiser.eps", number),
        "max_grad_norm": clip,
        "seed": seed,
        "data_seed": skip("one `seed` is all randomness of a run"),
        "output_dir": output_dir,
        "run_name": run_name,
        "report_to": report_to,
        "eval_strategy": eval_strategy,
        "evaluation_strategy": eval_strategy,
        "eval_steps": eval_steps,
        "save_steps": save_steps,
        "save_total_limit": save_total_limit,
        "gradient_checkpointing": recompute,
        "torch_compile": compiled,
        "bf16": skip("the device decides (`memory.dtype: auto`); what learns has float32 weights"),
        "fp16": half,
        "label_smoothing_factor": refuse("labels are not smoothed here"),
        "optim_args": refuse("the optimiser has settings of its own: beta1, beta2, eps, weight_decay"),
        "neftune_noise_alpha": refuse("noise on embeddings (NEFTune) is not there; leave it out"),
        "deepspeed": sharded,
        "fsdp": fully_sharded,
        "fsdp_config": fully_sharded,
        "accelerate_config": sharded,
        "use_liger_kernel": skip("layers run as CUDA graphs with kernels of Kedge's own"),
        "auto_find_batch_size": skip("`micro_batch: auto` finds it, and halves it when memory runs out"),
        "group_by_length": skip("rows are packed without padding"),
        "use_cpu": lambda value, source: (
            taken("device", "cpu", source) if flag(value) else unneeded("`device: auto` takes a GPU where there is one")
        ),
    },
    {
        "logging_steps logging_strategy logging_first_step logging_dir logging_nan_inf_filter log_level "
        "log_level_replica "
        "log_on_each_node disable_tqdm include_num_input_tokens_seen include_tokens_per_second plot_loss": skip(
            EVERY_STEP
        ),
        "save_strategy save_only_model save_safetensors save_on_each_node overwrite_output_dir resume_from_checkpoint "
        "ignore_data_skip enable_jit_checkpoint restore_callback_states_from_checkpoint": skip(
            f"{FILES}; `kedge run --resume` goes on"
        ),
        "load_best_model_at_end metric_for_best_model greater_is_better": lambda value, source: (
            unneeded("it asks for nothing") if not value else refused("`eval.patience` keeps the best weights: set it")
        ),
        "push_to_hub hub_model_id hub_strategy hub_private_repo hub_always_push hub_revision push_to_hub_model_id "
        "push_to_hub_organization hub_token push_to_hub_token": skip(
            "a run stays on the disk; push its folder `model/`"
        ),
        "dataloader_num_workers dataloader_pin_memory dataloader_drop_last dataloader_persistent_workers "
        "dataloader_prefetch_factor dataloader_in_order dataloader_multiprocessing_context remove_unused_columns "
        "dataset_num_proc preprocessing_num_workers accelerator_config": skip(
            "data are read and tokenised by Kedge's own"
        ),
        "ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend ddp_static_graph "
        "local_rank fsdp_transformer_layer_cls_to_wrap parallelism_config average_tokens_across_devices "
        "num_machines machine_rank main_process_ip main_process_port": skip(SHARDED),
        "per_device_eval_batch_size eval_accumulation_steps eval_on_start eval_delay prediction_loss_only "
        "do_train do_eval "
        "do_predict eval_do_concat_batches batch_eval_metrics include_for_metrics eval_use_gather_object": skip(
            "evaluations choose their own passes"
        ),
        "tf32 bf16_full_eval fp16_full_eval torch_compile_backend torch_compile_mode gradient_checkpointing_kwargs "
        "torch_empty_cache_steps liger_kernel_config use_cache full_determinism skip_memory_metrics debug "
        "label_names train_sampling_strategy length_column_name project trackio_space_id": skip(
            "it changes speed, memory or display, and Kedge has its own way"
        ),
    },
)
