"""OpenRLHF: a command line `python -m openrlhf.cli.train_…`, alone or in a script with deepspeed or ray around it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kedge.importing import openrlhf_rules, places, preferences, rollouts, training
from kedge.importing.rules import (
    Asked,
    Kind,
    Rule,
    Source,
    changed,
    flag,
    lora,
    names,
    number,
    part_of,
    refuse,
    refused,
    skip,
    table,
    take,
    take_in,
    taken,
    unneeded,
    whole,
)
from kedge.importing.shell import read_command

MODULE: Final = re.compile(r"openrlhf[./]cli[./]train_(sft|rm|dpo|kto|ppo_ray|ppo)\b(?:\.py)?")
KINDS: Final[Mapping[str, Kind]] = {
    "sft": "sft",
    "rm": "reward",
    "dpo": "preference",
    "kto": "preference",
    "ppo": "ppo",
}
RATES: Final = {"sft": 5e-6, "rm": 9e-6, "dpo": 1e-5, "kto": 1e-5}


def source_of(file: Path, asked: Asked, folder: Path) -> Source:
    """A script, or a file with the command line alone."""
    command = read_command(file, MODULE)
    trainer = command.module.removesuffix("_ray")
    given: dict[str, Any] = {"(launcher)": command.launcher or "python", **command.options}
    estimator = str(given.get("advantage_estimator", "gae"))
    kind = KINDS[trainer] if estimator == "gae" else "group"
    data = given.get("prompt_data" if kind in ("ppo", "group") else "dataset")
    return Source(
        file=file,
        trainer=trainer if kind != "group" else estimator,
        kind=kind,
        given=given,
        defaults=_defaults(trainer),
        lines=command.lines,
        asked=asked,
        is_lora=int(number(given.get("lora_rank", 0))) > 0,
        num_rows=_rows(data, file.parent, given, asked),
        folder=folder,
    )


def _rows(data: Any, beside: Path, given: Mapping[str, Any], asked: Asked) -> int | None:
    if asked.data:
        return places.num_rows(asked.data, beside)
    rows = places.num_rows(str(data), beside) if data else None
    return min(rows, whole(given.get("max_samples", rows))) if rows else None


def _defaults(trainer: str) -> dict[str, Any]:
    """Of OpenRLHF 0.9, as far as Kedge would do otherwise."""
    both = {
        "train_batch_size": 128, "max_epochs": 1, "adam_betas": [0.9, 0.95], "lr_scheduler": "cosine_with_min_lr",
        "lr_warmup_ratio": 0.03, "max_norm": 1.0, "l2": 0.0, "seed": 42, "lora_rank": 0, "lora_alpha": 16,
    }  # fmt: skip
    if trainer != "ppo":
        own = {"learning_rate": RATES[trainer], "max_len": 2048 if trainer == "sft" else 512, "eval_dataset": ""}
        return {
            **both,
            **own,
            **({"max_epochs": 2} if trainer == "sft" else {}),
            **({"beta": 0.1} if trainer == "dpo" else {}),
        }
    return both | {
        "rollout_batch_size": 1024, "num_episodes": 1, "n_samples_per_prompt": 1, "prompt_max_len": 1024,
        "generate_max_len": 1024, "actor_learning_rate": 1e-6, "critic_learning_rate": 9e-6, "init_kl_coef": 0.01,
        "kl_estimator": "k1", "eps_clip": 0.2, "value_clip": 0.5, "lambd": 1.0, "gamma": 1.0, "temperature": 1.0,
        "top_p": 1.0, "reward_clip_range": [-10, 10], "advantage_estimator": "gae",
    }  # fmt: skip


def fixed(source: Source) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if source.is_rl:
        settings["stage.roles"] = "lora" if source.is_lora else "separate"
        settings |= {
            f"stage.{name}.eps": 1e-8 for name in (("actor", "critic") if source.kind == "ppo" else ("actor",))
        }
    if source.kind == "preference":
        settings["stage.method.kind"] = "ipo" if flag(source.get("ipo", False)) else source.trainer
    return settings


GPUS: Final = "processes of Kedge hold all roles: `placement: {processes: auto}`, `roles` says how"
TABLE: Final[Mapping[str, Rule]] = table(
    {
        "(launcher)": skip("`kedge run` starts its own processes; nothing of the launcher's is copied"),
        "pretrain": training.model,
        "reward_pretrain": rollouts.reward_model,
        "remote_rm_url": rollouts.reward_server,
        "ref_pretrain": lambda value, source: (
            unneeded("the reference is the model that a stage starts from")
            if value == source.get("pretrain")
            else refused("the reference is the model that a stage starts from; another one is not there")
        ),
        "critic_pretrain": lambda value, source: (
            unneeded("the critic starts from the reward model")
            if value == source.get("reward_pretrain")
            else changed("stage.memory.critic_from_reward", False, source, "the critic starts from the policy")
        ),
        "dataset": openrlhf_rules.data,
        "prompt_data": openrlhf_rules.data,
        "eval_dataset": openrlhf_rules.heldout,
        "max_samples": part_of("data", "its limit, where it is one"),
        "train_batch_size": openrlhf_rules.train_batch,
        "rollout_batch_size": take("stage.batch", whole, "prompts of an iteration"),
        "n_samples_per_prompt": take("stage.answers", whole),
        "max_epochs": openrlhf_rules.epochs,
        "num_episodes": openrlhf_rules.episodes,
        "learning_rate": take("optimiser.lr", number),
        "actor_learning_rate": openrlhf_rules.actor_rate,
        "critic_learning_rate": take_in(("ppo",), "stage.critic.lr", number),
        "lr_scheduler": openrlhf_rules.schedule,
        "lr_warmup_ratio": training.warmup_ratio,
        "adam_betas": openrlhf_rules.betas,
        "l2": take("optimiser.weight_decay", number),
        "max_norm": training.clip,
        "seed": training.seed,
        "max_len": openrlhf_rules.max_len,
        "prompt_max_len": openrlhf_rules.prompt_len,
        "generate_max_len": take("stage.sampling.max_new_tokens", whole),
        "temperature": take("stage.sampling.temperature", number),
        "top_p": take("stage.sampling.top_p", number),
        "advantage_estimator": openrlhf_rules.estimator,
        "policy_loss_type": refuse("gspo goes with group_norm", ("ppo", "gspo")),
        "init_kl_coef": openrlhf_rules.kl,
        "kl_target": take("stage.kl.target", number),
        "kl_horizon": take("stage.kl.horizon", whole),
        "kl_estimator": take("stage.kl.kind", str),
        "use_kl_loss": part_of("kl.where", "loss"),
        "eps_clip": openrlhf_rules.eps_clip,
        "eps_clip_low_high": openrlhf_rules.clip,
        "dual_clip": take_in(("ppo",), "stage.loss.policy.dual_clip", number),
        "value_clip": take_in(("ppo",), "stage.loss.value.clip", number),
        "lambd": take_in(("ppo",), "stage.loss.credit.lam", number),
        "gamma": lambda value, source: (
            taken("stage.loss.credit.gamma", number(value), source)
            if source.kind == "ppo"
            else preferences.method({"gamma": number(value)})
            if source.trainer.startswith("reinforce")
            else unneeded("an answer is one action")
        ),
        "entropy_loss_coef": lambda value, source: taken(
            "stage.loss.policy.entropy" if source.kind == "ppo" else "stage.loss.entropy", number(value), source
        ),
        "ptx_coef": skip("`loss.imitate` has a weight of its own, and wants its data"),
        "normalize_reward": openrlhf_rules.normalised,
        "reward_clip_range": openrlhf_rules.score_clip,
        "freezing_actor_steps": openrlhf_rules.freeze,
        "enable_ema": openrlhf_rules.ema,
        "ema_beta": part_of("ema", "its decay"),
        "overlong_buffer_len": take("stage.scores.overlong_buffer", whole),
        "overlong_penalty_factor": take("stage.scores.overlong_penalty", number),
        "dynamic_filtering": openrlhf_rules.filtering,
        "dynamic_filtering_reward_range": skip("groups whose scores are all equal are left out"),
        "beta": preferences.setting("beta", ("dpo", "kto")),
        "ipo": openrlhf_rules.ipo,
        "label_smoothing": lambda value, source: (
            preferences.method({"label_smoothing": number(value)}) if number(value) else unneeded("it asks for nothing")
        ),
        "nll_loss_coef": preferences.setting("sft_weight", ("dpo",)),
        "desirable_loss_weight": preferences.setting("desirable_weight", ("kto",)),
        "undesirable_loss_weight": preferences.setting("undesirable_weight", ("kto",)),
        "unpaired_preference": skip("rows with a label each are known by their columns"),
        "pretrain_data": refuse("texts learnt beside PPO are `loss.imitate`, with data and a weight: set it"),
        "margin_loss": take("stage.loss.margin", flag),
        "loss": refuse("comparisons of two are Bradley–Terry", ("sigmoid",)),
        "pretrain_mode": refuse("rows of bare `text` are learnt whole without a mode"),
        "lora_rank": openrlhf_rules.lora_rank,
        "lora_alpha": lora("alpha", number),
        "lora_dropout": lora("dropout", number),
        "target_modules": lora("targets", lambda value: training.targets(names(value))),
        "load_in_4bit": training.bits(4),
        "gradient_checkpointing": training.recompute,
        "use_wandb": openrlhf_rules.wandb,
        "use_tensorboard": openrlhf_rules.tensorboard,
        "wandb_project": take("trackers.wandb.project", str),
        "wandb_group": take("trackers.wandb.group", str),
        "wandb_org": take("trackers.wandb.entity", str),
        "wandb_run_name": training.run_name,
        "save_path": lambda value, source: (
            unneeded("wandb_run_name names the run")
            if source.given.get("wandb_run_name")
            else training.output_dir(value, source)
        ),
        "save_steps": training.save_steps,
        "max_ckpt_num": training.save_total_limit,
        "eval_steps": lambda value, source: (
            training.eval_steps(value, source) if number(value) > 0 else unneeded("at the end")
        ),
        "vllm_num_engines": openrlhf_rules.engines,
        "vllm_tensor_parallel_size": openrlhf_rules.tensor_parallel,
        "async_train": openrlhf_rules.ahead,
        "async_queue_size": part_of("generator.lag", "batches that are sampled ahead"),
        "agent_func_path": refuse("answers have one turn, without tools or environments"),
        "no_advantage_std_norm": refuse("take dr_grpo as the estimator"),
        "aux_loss_coef": refuse("there is no loss of routers", ("0", "0.0")),
        "input_template": lambda value, source: (
            unneeded("the chat template makes the text")
            if not value
            else refused("a chat template makes the text: chat_template")
        ),
        "tokenizer_chat_template": refuse("write the template to a Jinja file, and name it as `chat_template`"),
        "apply_chat_template": skip("always"),
        "ring_attn_size": refuse("long texts are not spread over GPUs", ("1",)),
        "ds_tensor_parallel_size": refuse("layers are not spread over GPUs", ("1",)),
    },
    {
        "prompt_data_probs dataset_probs": part_of("data", "weights, where there are several files"),
        "prompt_split train_split dataset_split": part_of("data", "the split of a dataset of the hub"),
        "eval_split": part_of("heldout", "the split of a dataset of the hub"),
        "input_key output_key prompt_key chosen_key rejected_key label_key": part_of("data", "its columns"),
        "ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node actor_num_nodes "
        "actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node colocate_actor_ref colocate_critic_reward "
        "colocate_all_models actor_init_on_gpu": skip(GPUS),
        "zpg local_rank overlap_comm grad_accum_dtype deepcompile dist_backend "
        "deepspeed_enable_sleep fsdp2_enable_sleep use_ds_universal_ckpt disable_ds_ckpt": skip(training.SHARDED),
        "micro_train_batch_size micro_rollout_batch_size use_dynamic_batch train_max_tokens_per_gpu "
        "rollout_max_tokens_per_gpu vllm_generate_batch_size rollout_tasks_per_gpu": skip(
            "`micro_batch: auto` finds its size"
        ),
        "adam_offload ref_offload ref_reward_offload": openrlhf_rules.offload,
        "zero_stage": lambda value, source: training.sharded(f"stage{whole(value)}", source),
        "bf16 param_dtype": skip("the device decides (`memory.dtype: auto`); what learns has float32 weights"),
        "flash_attn attn_implementation packing_samples use_liger_kernel gradient_checkpointing_use_reentrant "
        "disable_fast_tokenizer ring_head_stride full_determinism perf compute_fp32_loss disable_trace_cache": skip(
            "it changes speed and memory; Kedge has its own way"
        ),
        "vllm_sync_backend vllm_sync_with_ray vllm_enable_sleep vllm_gpu_memory_utilization enable_prefix_caching "
        "enforce_eager enable_vllm_is_correction vllm_is_truncated_threshold vllm_is_correction_type": skip(
            "`generator` and `loss.correct: auto` see to it (docs/vllm.md)"
        ),
        "logging_steps": skip(training.EVERY_STEP),
        "ckpt_path max_ckpt_mem load_checkpoint save_hf_ckpt save_value_network value_head_prefix": skip(
            training.FILES
        ),
        "eval_temperature eval_n_samples_per_prompt": skip("of eval_dataset"),
        "use_ms": refuse("models come from folders and the Hugging Face hub"),
    },
)
