"""Axolotl: the YAML of `axolotl train`, for SFT, reward models, preferences and GRPO."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.importing import axolotl_rules, places, preferences, training, trl
from kedge.importing.fields import read_fields
from kedge.importing.rules import (
    Asked,
    Kind,
    Outcome,
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
    taken,
    unneeded,
    whole,
)

KINDS: Final[Mapping[str, Kind]] = {
    "sft": "sft", "reward": "reward", "dpo": "preference", "ipo": "preference", "kto": "preference",
    "orpo": "preference", "simpo": "preference", "grpo": "group",
}  # fmt: skip


def source_of(file: Path, asked: Asked, folder: Path) -> Source:
    given, lines = read_fields(file, nested=("datasets", "test_datasets", "trl", "vllm"))
    trainer = str(given.get("rl") or ("reward" if flag(given.get("reward_model", False)) else "sft"))
    if trainer not in KINDS:
        raise ConfigError(
            f"{file}: rl: {trainer!r} is not there{did_you_mean(trainer, KINDS)}; take {', '.join(KINDS)}"
        )
    data = asked.data or given.get("datasets[0].path")
    return Source(
        file=file,
        trainer=trainer,
        kind=KINDS[trainer],
        given=given,
        defaults=_defaults(trainer, given),
        lines=lines,
        asked=asked,
        is_lora=given.get("adapter") in ("lora", "qlora"),
        num_rows=places.num_rows(str(data), file.parent) if data and "datasets[1].path" not in given else None,
        folder=folder,
    )


def _defaults(trainer: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Of Axolotl 0.13, as far as Kedge would do otherwise."""
    values: dict[str, Any] = {
        "micro_batch_size": 1, "gradient_accumulation_steps": 1, "num_epochs": 1.0, "lr_scheduler": "cosine",
        "weight_decay": 0.0, "adam_epsilon": 1e-8, "max_grad_norm": 1.0, "sequence_len": 512, "seed": 42,
        "val_set_size": 0.0, "lora_dropout": 0.0,
    }  # fmt: skip
    if given.get("warmup_steps") is None:
        values["warmup_ratio"] = 0.03
    if trainer in axolotl_rules.BETAS:
        values["rl_beta"] = 0.1
    if trainer == "grpo":
        values |= {f"trl.{name}": value for name, value in trl.defaults_of("grpo", "group", {}).items()
                   if name in ("num_generations", "max_completion_length", "beta", "loss_type", "num_iterations",
                               "temperature", "epsilon")}  # fmt: skip
    return values


def fixed(source: Source) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if source.kind == "group":
        settings["stage.roles"] = "lora" if source.is_lora else "separate"
    if source.kind == "preference":
        settings["stage.method.kind"] = source.trainer
        settings |= {"stage.method.log_probs": "mean"} if source.trainer == "ipo" else {}
    return settings


GRPO: Final = [
    "num_generations",
    "max_completion_length",
    "temperature",
    "top_p",
    "top_k",
    "beta",
    "loss_type",
    "epsilon",
    "epsilon_high",
    "num_iterations",
    "scale_rewards",
    "reward_funcs",
    "reward_weights",
    "use_vllm",
    "min_p",
    "repetition_penalty",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "log_completions",
    "mask_truncated_completions",
    "delta",
    "importance_sampling_level",
    "vllm_mode",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "generation_batch_size",
    "steps_per_generation",
]
TABLE: Final[Mapping[str, Rule]] = {
    **{
        name: rule
        for name, rule in training.TABLE.items()
        if name not in ("num_train_epochs", "optim", "lr_scheduler_type")
    },
    **{f"trl.{name}": axolotl_rules.of_trl(name) for name in GRPO},
    **table(
        {
            "base_model": training.model,
            "rl": axolotl_rules.rl,
            "reward_model": axolotl_rules.rl,
            "rl_beta": axolotl_rules.beta,
            "orpo_alpha": preferences.setting("beta", ("orpo",)),
            "rpo_alpha": preferences.setting("sft_weight", ("dpo",)),
            "cpo_alpha": preferences.setting("sft_weight", ("simpo",)),
            "simpo_gamma": preferences.setting("gamma", ("simpo",)),
            "kto_desirable_weight": preferences.setting("desirable_weight", ("kto",)),
            "kto_undesirable_weight": preferences.setting("undesirable_weight", ("kto",)),
            "dpo_label_smoothing": preferences.smoothing,
            "center_rewards_coefficient": take_in(("reward",), "stage.loss.centre", number),
            "dpo_use_weighting": refuse("weighted DPO (WPO) is not there"),
            "datasets[].path": axolotl_rules.datasets("datasets", "stage.data"),
            "test_datasets[].path": axolotl_rules.datasets("test_datasets", "stage.heldout"),
            "datasets[].type": axolotl_rules.type,
            "test_datasets[].type": axolotl_rules.type,
            "datasets[].roles_to_train": refuse(
                "the assistant's turns are learnt; `weight: 0` leaves one out", (["assistant"],)
            ),
            "datasets[].message_property_mappings": axolotl_rules.message_keys,
            "datasets[].message_field_role": axolotl_rules.message_keys,
            "datasets[].message_field_content": axolotl_rules.message_keys,
            "datasets[].roles": axolotl_rules.roles,
            "datasets[].train_on_eos": refuse("the end of each of the assistant's turns is learnt", ("turn",)),
            "datasets[].split": split_of("data"),
            "test_datasets[].split": split_of("heldout"),
            "datasets[].shards": refuse("`limit` of a file takes its first rows"),
            "pretraining_dataset": refuse("rows of `text` are learnt whole by stage sft: name them as --data"),
            "vllm.tensor_parallel_size": axolotl_rules.of_trl("vllm_tensor_parallel_size"),
            "val_set_size": axolotl_rules.val_set,
            "sequence_len": axolotl_rules.length,
            "max_prompt_len": lambda value, source: (
                Outcome(verdict="taken", sets={"stage.max_prompt_tokens": whole(value), "stage.too_long": "cut"})
                if source.is_rl
                else unneeded("`max_length` bounds prompt and answer together")
            ),
            "excess_length_strategy": refuse("no end is cut off: `too_long: cut` takes the beginning away", ("drop",)),
            "sample_packing": axolotl_rules.packing,
            "micro_batch_size": axolotl_rules.counted("per_device_train_batch_size", training.batch),
            "batch_size": axolotl_rules.batch_size,
            "num_epochs": axolotl_rules.counted("num_train_epochs", training.epochs),
            "max_steps": axolotl_rules.counted("max_steps", training.max_steps),
            "optimizer": training.optim,
            "lr_scheduler": training.schedule,
            "cosine_min_lr_ratio": refuse("cosine falls to 0"),
            "cosine_constant_lr_ratio": refuse("cosine falls from the warm-up on"),
            "adapter": axolotl_rules.base_bits,
            "lora_r": lora("rank", whole),
            "lora_alpha": lora("alpha", number),
            "lora_dropout": lora("dropout", number),
            "lora_target_modules": axolotl_rules.targets,
            "lora_target_linear": axolotl_rules.linear,
            "lora_model_dir": refuse("merge the adapter into its model first, and name that as --model"),
            "lora_modules_to_save": refuse("adapters learn, and nothing beside them"),
            "peft_use_dora": refuse("DoRA is not computed; rslora is there"),
            "peft_use_rslora": lora("rslora", flag),
            "peft_layers_to_transform": refuse("adapters are on all blocks"),
            "loraplus_lr_ratio": refuse("both matrices of an adapter have one rate"),
            "relora": refuse("adapters are merged once, at the end"),
            "load_in_8bit": training.bits(8),
            "load_in_4bit": lambda value, source: (
                unneeded("qlora says so") if source.get("adapter") == "qlora" else training.bits(4)(value, source)
            ),
            "chat_template": axolotl_rules.template,
            "chat_template_jinja": axolotl_rules.jinja,
            "special_tokens": refuse("the tokenizer in the model's folder says so; pad_token needs no word"),
            "tokens": refuse("a model keeps its vocabulary"),
            "train_on_inputs": refuse("the loss is on the assistant's tokens alone"),
            "unfrozen_parameters": refuse("all weights learn, or adapters"),
            "early_stopping_patience": lambda value, source: taken("stage.eval.patience", whole(value), source),
            "evals_per_epoch": refuse("`eval.every` is a number of steps"),
            "saves_per_epoch": skip("checkpoints are written by themselves (`checkpoints.every`)"),
            "gradient_checkpointing": training.recompute,
            "use_tensorboard": lambda value, source: (
                taken("trackers.tensorboard", {}, source) if flag(value) else unneeded("")
            ),
            "wandb_project": axolotl_rules.wandb,
            "wandb_entity": take("trackers.wandb.entity", str),
            "wandb_name": training.run_name,
            "mlflow_experiment_name": lambda value, source: taken("trackers.mlflow", {}, source),
            "plugins": refuse("plugins of Axolotl are code of its own"),
            "trust_remote_code": refuse("code of a model is never run; take a model that transformers has"),
            "process_reward_model": refuse("rewards are of answers, not of steps"),
            "min_sample_len": refuse("`kedge data` finds short rows"),
        },
        {
            "datasets[].name datasets[].data_files datasets[].ds_type datasets[].revision "
            "datasets[].field_messages datasets[].field datasets[].field_tools datasets[].field_chosen "
            "datasets[].field_rejected datasets[].field_prompt datasets[].field_instruction datasets[].field_output "
            "datasets[].field_completion datasets[].field_label datasets[].field_system": part_of(
                "data", "which part of it, and its columns"
            ),
            "test_datasets[].name test_datasets[].data_files test_datasets[].ds_type test_datasets[].revision "
            "test_datasets[].field_messages": part_of("heldout", "which part of it, and its columns"),
            "datasets[].chat_template datasets[].field_human datasets[].field_model "
            "datasets[].conversation datasets[].drop_system_message datasets[].trust_remote_code": skip(
                "layouts of messages are known by their columns"
            ),
            "model_type tokenizer_type tokenizer_config base_model_config is_llama_derived_model "
            "is_mistral_derived_model "
            "is_qwen_derived_model is_falcon_derived_model num_labels processor_type tokenizer_use_fast "
            "cls_model_config": axolotl_rules.shape,
            "flash_attention sdp_attention xformers_attention eager_attention flex_attention attn_implementation "
            "flash_attn_cross_entropy flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp pad_to_sequence_len "
            "eval_sample_packing sample_packing_bin_size sample_packing_group_size sample_packing_sequentially "
            "multipack_real_batches batch_flattening lora_mlp_kernel lora_qkv_kernel lora_o_kernel "
            "unsloth_cross_entropy_loss unsloth_lora_mlp unsloth_lora_qkv unsloth_lora_o liger_rope liger_rms_norm "
            "liger_glu_activation liger_layer_norm liger_fused_linear_cross_entropy low_cpu_mem_usage strict "
            "device_map "
            "lora_on_cpu qlora_sharded_model_loading gc_steps float16 bfloat16 float32 fp8 "
            "dpo_use_logits_to_keep": skip("it changes speed and memory; Kedge has its own way"),
            "fsdp_version fsdp_final_state_dict_type ddp world_size use_ray ray_num_workers tensor_parallel_size "
            "dp_shard_size": skip(training.SHARDED),
            "context_parallel_size sequence_parallel_degree": refuse("long texts are not spread over GPUs", (1,)),
            "dataset_prepared_path dataset_processes dataset_exact_deduplication shuffle_merged_datasets "
            "dataset_keep_in_memory skip_prepare_dataset push_dataset_to_hub hf_use_auth_token eval_batch_size "
            "eval_table_size eval_max_new_tokens do_causal_lm_eval do_bench_eval auto_resume_from_checkpoints "
            "loss_watchdog_threshold loss_watchdog_patience include_tkps save_first_step": skip(
                "the run folder, its checks and its detectors are Kedge's own"
            ),
            "wandb_watch wandb_run_id wandb_log_model wandb_mode use_wandb mlflow_tracking_uri hf_mlflow_log_artifacts "
            "comet_api_key use_comet use_mlflow": skip("of a service; its project and entity are taken"),
            "vllm.host vllm.port vllm.data_parallel_size vllm.gpu_memory_utilization "
            "vllm.dtype "
            "vllm.max_model_len vllm.enable_prefix_caching trl.vllm_gpu_memory_utilization trl.vllm_device "
            "trl.vllm_dtype "
            "trl.vllm_max_model_len trl.vllm_enable_prefix_caching trl.vllm_guided_decoding_regex": skip(
                "vLLM is started and asked by `generator` (docs/vllm.md)"
            ),
        },
    ),
}
