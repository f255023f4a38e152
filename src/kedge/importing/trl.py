"""TRL: the YAML of `trl sft|dpo|kto|grpo|rloo|reward|ppo --config`, or a JSON of training arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.importing import places, preferences, rollouts, training, trl_rules
from kedge.importing.fields import read_fields
from kedge.importing.rules import (
    Asked,
    Kind,
    Rule,
    Source,
    flag,
    lora,
    number,
    part_of,
    refuse,
    skip,
    split_of,
    table,
    take,
    take_in,
    told,
    unneeded,
    whole,
)

KINDS: Final[Mapping[str, Kind]] = {
    "sft": "sft", "reward": "reward", "dpo": "preference", "kto": "preference", "orpo": "preference",
    "cpo": "preference", "grpo": "group", "rloo": "group", "ppo": "ppo",
}  # fmt: skip
SIGNS: Final[Mapping[str, tuple[str, ...]]] = {
    "grpo": ("scale_rewards", "epsilon_high", "importance_sampling_level", "loss_type=grpo", "loss_type=dapo",
             "loss_type=dr_grpo", "loss_type=bnpo", "loss_type=cispo"),
    "rloo": ("normalize_advantages", "rloo_k"),
    "ppo": ("num_ppo_epochs", "total_episodes", "kl_coef", "cliprange", "vf_coef", "response_length"),
    "kto": ("desirable_weight", "undesirable_weight", "loss_type=kto"),
    "reward": ("center_rewards_coefficient",),
    "cpo": ("cpo_alpha", "simpo_gamma", "loss_type=simpo"),
    "dpo": ("precompute_ref_log_probs", "f_divergence_type", "rpo_alpha", "loss_type=sigmoid", "loss_type=ipo",
            "loss_type=hinge"),
    "sft": ("packing", "assistant_only_loss", "completion_only_loss", "dataset_text_field", "max_seq_length",
            "loss_type=nll", "packing_strategy"),
}  # fmt: skip
"""Fields, and values of fields, that one trainer alone has."""
RATES: Final = {"sft": 2e-5, "reward": 1e-4, "ppo": 3e-6}
"""Learning rates; others have 1e-6."""
RL_LENGTH: Final = 512


def source_of(file: Path, asked: Asked, folder: Path) -> Source:
    """A YAML or JSON file of TRL."""
    given, lines = read_fields(file, nested=("datasets",))
    trainer = _trainer(file, given, asked)
    kind = KINDS[trainer]
    data = asked.data or given.get("dataset_name") or given.get("datasets[0].path")
    return Source(
        file=file,
        trainer=trainer,
        kind=kind,
        given=given,
        defaults=defaults_of(trainer, kind, given),
        lines=lines,
        asked=asked,
        is_lora=flag(given.get("use_peft", False)),
        num_rows=places.num_rows(str(data), file.parent) if data else None,
        folder=folder,
    )


def _trainer(file: Path, given: Mapping[str, Any], asked: Asked) -> str:
    """As asked; else by fields that one trainer alone has, else by a word of the file's name."""
    if asked.trainer:
        if asked.trainer not in KINDS:
            near = did_you_mean(asked.trainer, KINDS)
            raise ConfigError(f"--trainer {asked.trainer}: no trainer of TRL{near}; there are {', '.join(KINDS)}")
        return asked.trainer
    signs = set(given) | {f"{name}={value}" for name, value in given.items() if isinstance(value, str)}
    by_fields = [trainer for trainer, known in SIGNS.items() if signs & set(known)]
    by_name = [word for word in re.split(r"[^a-z]+", file.stem.lower()) if word in KINDS]
    if "rloo" in by_fields or "rloo" in by_name:
        return "rloo"
    for candidates in (by_fields, by_name):
        if len(set(candidates)) == 1:
            return candidates[0]
    if "num_generations" in given:
        return "grpo"
    raise ConfigError(
        f"{file}: which trainer it is for does not stand in a file of TRL: give --trainer, one of {', '.join(KINDS)}"
    )


def defaults_of(trainer: str, kind: Kind, given: Mapping[str, Any]) -> dict[str, Any]:
    """What TRL 1.12 does where nothing is said, as far as Kedge would do otherwise."""
    values = {**training.DEFAULTS, "learning_rate": RATES.get(trainer, 1e-6), "gradient_checkpointing": True}
    values |= {"lora_r": 16, "lora_alpha": 32, "lora_dropout": 0.05, "lora_target_modules": ["q_proj", "v_proj"]}
    values |= {"use_peft": False}
    if kind in ("sft", "reward", "preference"):
        values |= {"max_length": 1024}
    if "warmup_ratio" in given:
        values.pop("warmup_steps")
    return {**values, **_DEFAULTS.get(trainer, {})}


_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "dpo": {"beta": 0.1, "loss_type": "sigmoid"},
    "kto": {"beta": 0.1, "loss_type": "kto"},
    "orpo": {"beta": 0.1},
    "cpo": {"beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    "grpo": {
        "num_generations": 8, "max_completion_length": RL_LENGTH, "beta": 0.0, "loss_type": "dapo", "epsilon": 0.2,
        "num_iterations": 1, "temperature": 1.0,
    },
    "rloo": {
        "num_generations": 2, "max_completion_length": RL_LENGTH, "beta": 0.05, "num_iterations": 1, "temperature": 1.0,
    },
    "ppo": {
        "num_mini_batches": 1, "num_ppo_epochs": 4, "response_length": 53, "temperature": 0.7, "kl_coef": 0.05,
        "kl_estimator": "k1", "cliprange": 0.2, "cliprange_value": 0.2, "gamma": 1.0, "lam": 0.95,
    },
}  # fmt: skip


def fixed(source: Source) -> dict[str, Any]:
    """Settings that follow from the trainer and not from a field."""
    settings: dict[str, Any] = {}
    if source.is_rl and not source.is_lora:
        settings["stage.roles"] = "separate"
    if source.trainer in ("kto", "orpo", "rloo"):
        settings["stage.method.kind"] = source.trainer
    return settings


RL: Final = ("ppo", "group")
TABLE: Final[Mapping[str, Rule]] = {
    **training.TABLE,
    **table(
        {
            "model_name_or_path": trl_rules.model,
            "sft_model_path": training.model,
            "model_revision": training.model_revision,
            "dataset_name": trl_rules.data,
            "dataset_config": part_of("data", "the configuration of the dataset"),
            "dataset_train_split": split_of("data"),
            "dataset_test_split": part_of("heldout", "where there is an evaluation"),
            "datasets[].path": trl_rules.mixture,
            "datasets[].split": split_of("data"),
            "per_device_train_batch_size": trl_rules.batch,
            "num_train_epochs": trl_rules.epochs,
            "max_steps": trl_rules.max_steps,
            "total_episodes": trl_rules.episodes,
            "max_length": trl_rules.max_length,
            "max_seq_length": trl_rules.max_length,
            "max_prompt_length": trl_rules.max_prompt,
            "max_completion_length": take_in(RL, "stage.sampling.max_new_tokens", whole),
            "response_length": take_in(RL, "stage.sampling.max_new_tokens", whole),
            "temperature": take_in(RL, "stage.sampling.temperature", number),
            "top_p": take_in(RL, "stage.sampling.top_p", number),
            "top_k": rollouts.top_k,
            "num_generations": take_in(("group",), "stage.answers", whole),
            "rloo_k": take_in(("group",), "stage.answers", whole),
            "num_iterations": take_in(("group",), "stage.epochs", whole),
            "num_ppo_epochs": take("stage.epochs", whole),
            "num_mini_batches": take("stage.minibatches", whole),
            "steps_per_generation": part_of("minibatches", "with gradient_accumulation_steps"),
            "generation_batch_size": part_of("batch", "completions of a generation"),
            "loss_type": trl_rules.loss,
            "loss_weights": part_of("method", "weight of `sft` beside a loss"),
            "beta": trl_rules.beta,
            "kl_coef": take("stage.kl.start", number, "in the reward"),
            "kl_estimator": take("stage.kl.kind", str),
            "label_smoothing": preferences.smoothing,
            "rpo_alpha": preferences.setting("sft_weight", ("dpo",)),
            "cpo_alpha": preferences.setting("sft_weight", ("cpo",)),
            "simpo_gamma": lambda value, source: (
                preferences.method({"gamma": number(value)})
                if source.get("loss_type") == "simpo"
                else unneeded("it is of the loss simpo")
            ),
            "desirable_weight": preferences.setting("desirable_weight", ("kto",)),
            "undesirable_weight": preferences.setting("undesirable_weight", ("kto",)),
            "center_rewards_coefficient": take_in(("reward",), "stage.loss.centre", number),
            "epsilon": part_of("method", "its clip, where it has one"),
            "epsilon_high": part_of("method", "its clip above"),
            "importance_sampling_level": part_of("method", "sequence is gspo"),
            "scale_rewards": trl_rules.scaled,
            "entropy_coef": take_in(("group",), "stage.loss.entropy", number),
            "cliprange": take("stage.loss.policy.clip", number),
            "cliprange_value": take("stage.loss.value.clip", number),
            "gamma": take("stage.loss.credit.gamma", number),
            "lam": take("stage.loss.credit.lam", number),
            "whiten_rewards": take("stage.loss.credit.scale_rewards", flag),
            "vf_coef": skip("the critic has an optimiser of its own, of the same rate; Adam does not see the weight"),
            "missing_eos_penalty": take("stage.scores.missing_eos_penalty", number),
            "reward_clip_range": trl_rules.clip_range,
            "stop_token": trl_rules.stop,
            "stop_token_id": refuse("only the end-of-sequence token ends an answer"),
            "reward_funcs": trl_rules.reward,
            "reward_weights": part_of("reward", "weights of its parts"),
            "reward_model_name_or_path": trl_rules.reward_model,
            "reward_model_path": rollouts.reward_model,
            "mask_truncated_completions": refuse("a cut answer costs, it is not left out: scores.missing_eos_penalty"),
            "normalize_advantages": refuse("advantages of rloo are not whitened"),
            "min_p": refuse("sampling has temperature, top_p and top_k"),
            "repetition_penalty": refuse("sampling has temperature, top_p and top_k", (1.0,)),
            "generation_kwargs": refuse("sampling has temperature, top_p, top_k, min_new_tokens and stop"),
            "chat_template_kwargs": refuse("put what they choose into a Jinja file: chat_template"),
            "delta": refuse("two-sided clipping is `dual_clip` of ppo; group has none"),
            "sync_ref_model": refuse("the reference stays the model that a stage starts from"),
            "ref_model_mixup_alpha": skip("of sync_ref_model"),
            "ref_model_sync_steps": skip("of sync_ref_model"),
            "use_vllm": trl_rules.vllm,
            "vllm_tensor_parallel_size": trl_rules.tensor_parallel,
            "use_peft": trl_rules.peft,
            "lora_r": lora("rank", whole),
            "lora_alpha": lora("alpha", number),
            "lora_dropout": lora("dropout", number),
            "lora_target_modules": lora("targets", training.targets),
            "use_rslora": lora("rslora", flag),
            "use_dora": refuse("DoRA is not computed; rslora is there"),
            "lora_modules_to_save": refuse("adapters learn, and nothing beside them"),
            "load_in_4bit": training.bits(4),
            "load_in_8bit": training.bits(8),
            "bnb_4bit_quant_type": refuse("a base of 4 bits is nf4", ("nf4",)),
            "trust_remote_code": refuse("code of a model is never run; take a model that transformers has"),
            "chat_template_path": take("chat_template", str),
            "packing": trl_rules.packing,
            "packing_strategy": skip("of packing"),
            "assistant_only_loss": lambda value, source: (
                unneeded("always so") if flag(value) else told("the loss is on the assistant's tokens alone")
            ),
            "completion_only_loss": lambda value, source: (
                unneeded("always so") if flag(value) else told("the loss is on the assistant's tokens alone")
            ),
            "dataset_text_field": skip("rows with `text` are read as they are; columns: {text: NAME} names another"),
            "test_split_size": refuse("give `heldout` a file; a stage `data` splits one (docs/data.md)"),
            "f_divergence_type": refuse("the reverse KL is what there is", ("reverse_kl",)),
            "ld_alpha": refuse("length-desensitised DPO is not there"),
            "use_weighting": refuse("weighted DPO (WPO) is not there"),
            "precompute_ref_log_probs": skip("always, and kept"),
            "max_tool_calling_iterations": refuse("answers have one turn, without tools"),
            "top_entropy_quantile": refuse("all tokens count", (1.0,)),
            "off_policy_mask_threshold": refuse("loss.correct: {drop: […]} leaves out answers that differ"),
            "multi_objective_aggregation": refuse("rewards are summed first", ("sum_then_normalize",)),
            "router_aux_loss_coef": skip("there is no loss of routers"),
            "env": skip("set variables where `kedge run` starts"),
        },
        {
            "datasets[].name datasets[].data_files datasets[].data_dir datasets[].columns": part_of(
                "data", "which part of the dataset"
            ),
            "dtype torch_dtype": training.dtype,
            "attn_implementation use_flash_attention_2 padding_free pad_to_multiple_of eval_packing "
            "cast_lm_head_to_fp32 "
            "activation_offloading ds3_gather_for_generation use_transformers_paged cache_implementation "
            "use_transformers_continuous_batching gradient_checkpointing_use_reentrant ignore_bias_buffers "
            "precompute_ref_batch_size local_rollout_forward_batch_size bnb_4bit_quant_storage "
            "use_bnb_nested_quant": skip("it changes speed and memory; Kedge has its own way"),
            "vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
            "vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length "
            "vllm_enable_sleep_mode vllm_importance_sampling_correction vllm_importance_sampling_mode "
            "vllm_importance_sampling_cap vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min": skip(
                "vLLM is started, asked and corrected for by `generator` and `loss.correct: auto` (docs/vllm.md)"
            ),
            "log_completions num_completions_to_print log_unique_prompts log_multimodal num_sample_generations "
            "generate_during_eval num_generations_eval": skip("`logging` writes answers to samples.jsonl"),
            "disable_dropout truncation_mode shuffle_dataset dataset_kwargs dataset_streaming streaming lora_task_type "
            "model_init_kwargs discopop_tau f_alpha_divergence_coef": skip("as it is here, or of another field"),
            "eos_token pad_token": skip("the tokenizer in the model's folder says so"),
            "exp_name reward_adapter model_adapter_name ref_adapter_name": skip("a name of TRL's own"),
        },
    ),
}
