"""The table of each configuration: its fields by verdict, and settings of the stage that they became."""

from __future__ import annotations

from typing import Any, Final

EXPECTED: Final[dict[str, dict[str, Any]]] = {
    "trl-sft.yaml": {
        "taken": (
            "model_name_or_path dataset_name learning_rate lr_scheduler_type warmup_ratio max_steps "
            "gradient_checkpointing use_peft lora_r lora_alpha lora_target_modules save_steps "
            "save_total_limit seed "
        ),
        "changed": ("output_dir per_device_train_batch_size gradient_accumulation_steps max_length "),
        "not needed": ("packing assistant_only_loss bf16 attn_implementation logging_steps eval_strategy report_to "),
        "stage": {
            "kind": "sft",
            "batch": 4,
            "max_steps": 2,
            "optimiser.lr": 0.0001,
            "optimiser.schedule": "cosine",
            "optimiser.warmup": 0.1,
            "lora.rank": 8,
            "lora.dropout": 0.05,
            "memory.recompute": True,
            "checkpoints.keep": 3,
            "too_long": "drop",
        },
    },
    "trl-dpo.json": {
        "taken": ("model_name_or_path dataset_name beta learning_rate num_train_epochs eval_steps report_to optim "),
        "changed": (
            "dataset_train_split run_name loss_type loss_weights per_device_train_batch_size "
            "gradient_accumulation_steps num_processes max_length eval_strategy deepspeed "
        ),
        "not needed": ("output_dir label_smoothing precompute_ref_log_probs push_to_hub "),
        "refused": ("hub_token "),
        "stage": {
            "kind": "preference",
            "batch": 64,
            "epochs": 1,
            "method": {"kind": "dpo", "loss": "sigmoid", "beta": 0.05, "sft_weight": 0.2},
            "optimiser.schedule": "linear",
            "optimiser.warmup": 0.0,
            "heldout": "hub:trl-lib/ultrafeedback_binarized:test",
            "eval.every": 100,
        },
    },
    "trl-grpo.yaml": {
        "taken": (
            "model_name_or_path dataset_name num_generations max_completion_length temperature beta "
            "loss_type num_iterations learning_rate warmup_steps "
        ),
        "changed": (
            "reward_funcs reward_weights epsilon epsilon_high per_device_train_batch_size "
            "gradient_accumulation_steps num_train_epochs use_vllm "
        ),
        "not needed": ("top_k scale_rewards vllm_mode vllm_gpu_memory_utilization log_completions "),
        "refused": ("mask_truncated_completions env "),
        "stage": {
            "kind": "group",
            "batch": 4,
            "answers": 4,
            "minibatches": 1,
            "iterations": 6,
            "epochs": 1,
            "roles": "separate",
            "method": {"kind": "grpo", "clip": 0.2, "clip_high": 0.28},
            "kl": {"start": 0.02, "where": "loss", "kind": "k3"},
            "sampling": {"max_new_tokens": 128, "temperature": 0.9},
            "actor.lr": 2e-06,
            "reward.weights": {"accuracy_reward": 1.0, "brief": 0.25},
        },
    },
    "openrlhf-ppo.sh": {
        "taken": (
            "pretrain reward_pretrain prompt_data rollout_batch_size n_samples_per_prompt max_epochs "
            "prompt_max_len generate_max_len actor_learning_rate critic_learning_rate init_kl_coef "
            "kl_estimator eps_clip_low_high normalize_reward reward_clip_range gradient_checkpointing "
        ),
        "changed": ("save_path input_key label_key train_batch_size num_episodes zero_stage use_wandb "),
        "not needed": (
            "(launcher) ref_num_nodes ref_num_gpus_per_node actor_num_nodes actor_num_gpus_per_node "
            "vllm_num_engines colocate_all_models apply_chat_template micro_rollout_batch_size "
            "micro_train_batch_size bf16 "
        ),
        "stage": {
            "kind": "ppo",
            "batch": 6,
            "minibatches": 2,
            "iterations": 2,
            "actor.lr": 5e-07,
            "critic.lr": 9e-06,
            "critic.beta2": 0.95,
            "kl.start": 0.02,
            "kl.where": "reward",
            "loss.policy": {"clip": 0.2, "clip_high": 0.28},
            "loss.value.clip": 0.5,
            "loss.credit.lam": 1.0,
            "scores": {"normalise": "standard", "clip": 5.0},
            "sampling.max_new_tokens": 12,
            "prompts.columns": {"prompt": "question"},
            "roles": "separate",
        },
    },
    "openrlhf-dpo.sh": {
        "taken": (
            "train_batch_size pretrain max_epochs learning_rate beta label_smoothing dataset lora_rank lora_alpha "
        ),
        "changed": ("save_path max_len zero_stage chosen_key rejected_key "),
        "not needed": ("(launcher) save_steps logging_steps eval_steps micro_train_batch_size bf16 flash_attn "),
        "stage": {
            "kind": "preference",
            "batch": 4,
            "max_length": 256,
            "method": {"kind": "dpo", "beta": 0.2, "label_smoothing": 0.1},
            "optimiser.lr": 5e-07,
            "optimiser.beta2": 0.95,
            "lora": {"rank": 4, "alpha": 8},
        },
    },
    "openrlhf-grpo.sh": {
        "taken": (
            "pretrain prompt_data advantage_estimator n_samples_per_prompt rollout_batch_size kl_estimator "
            "init_kl_coef eps_clip vllm_tensor_parallel_size seed "
        ),
        "changed": ("remote_rm_url train_batch_size use_kl_loss vllm_num_engines dynamic_filtering "),
        "not needed": ("(launcher) gamma dynamic_filtering_reward_range "),
        "refused": ("agent_func_path "),
        "stage": {
            "kind": "group",
            "batch": 4,
            "answers": 4,
            "minibatches": 2,
            "iterations": 3,
            "method": {"kind": "grpo", "clip": 0.2},
            "kl": {"start": 0.001, "where": "loss", "kind": "k3"},
            "max_rounds": 10,
            "generator.gpus": 2,
            "reward": {"kind": "http", "url": "http://localhost:5000/get_reward"},
        },
    },
    "llama-factory-sft.yaml": {
        "taken": (
            "model_name_or_path finetuning_type lora_rank lora_target save_steps learning_rate "
            "num_train_epochs lr_scheduler_type warmup_ratio "
        ),
        "changed": (
            "stage dataset template cutoff_len max_samples output_dir per_device_train_batch_size "
            "gradient_accumulation_steps "
        ),
        "not needed": (
            "trust_remote_code do_train overwrite_cache preprocessing_num_workers logging_steps plot_loss "
            "overwrite_output_dir bf16 ddp_timeout flash_attn "
        ),
        "stage": {
            "kind": "sft",
            "batch": 4,
            "epochs": 1.0,
            "lora": {"rank": 8, "alpha": 16, "targets": "all"},
            "data.limit": 8,
            "optimiser.lr": 0.0001,
            "optimiser.warmup": 0.1,
            "memory.recompute": True,
        },
    },
    "llama-factory-dpo.yaml": {
        "taken": (
            "model_name_or_path pref_beta pref_loss pref_ftx learning_rate num_train_epochs "
            "lr_scheduler_type val_size eval_steps "
        ),
        "changed": (
            "stage simpo_gamma dataset template cutoff_len output_dir per_device_train_batch_size "
            "gradient_accumulation_steps deepspeed eval_strategy "
        ),
        "not needed": ("do_train finetuning_type quantization_bit "),
        "refused": ("hf_hub_token "),
        "stage": {
            "kind": "preference",
            "batch": 8,
            "epochs": 2.0,
            "method": {"kind": "simpo", "beta": 0.2, "gamma": 0.8, "sft_weight": 0.1},
            "heldout_share": 0.2,
            "optimiser.schedule": "constant",
        },
    },
    "llama-factory-ppo.yaml": {
        "taken": (
            "model_name_or_path reward_model cutoff_len ppo_epochs ppo_target ppo_score_norm learning_rate "
            "lr_scheduler_type max_new_tokens top_p "
        ),
        "changed": (
            "stage dataset template output_dir per_device_train_batch_size gradient_accumulation_steps "
            "ppo_buffer_size num_train_epochs "
        ),
        "not needed": ("reward_model_type finetuning_type top_k use_galore "),
        "stage": {
            "kind": "ppo",
            "batch": 8,
            "minibatches": 2,
            "epochs": 2,
            "iterations": 5,
            "kl": {"start": 0.2, "target": 4.0},
            "sampling": {"max_new_tokens": 64, "temperature": 0.95, "top_p": 0.9},
            "scores.normalise": "standard",
        },
    },
    "axolotl-lora.yaml": {
        "taken": (
            "base_model adapter lora_r lora_alpha lora_dropout lora_target_linear chat_template "
            "datasets[0].path datasets[1].path sequence_len num_epochs lr_scheduler learning_rate "
            "gradient_checkpointing weight_decay wandb_project wandb_entity "
        ),
        "changed": (
            "datasets[0].field_messages datasets[1].field_messages output_dir sample_packing "
            "gradient_accumulation_steps micro_batch_size optimizer "
        ),
        "not needed": (
            "load_in_8bit load_in_4bit datasets[0].type datasets[0].roles_to_train datasets[1].type "
            "dataset_prepared_path pad_to_sequence_len bf16 tf32 flash_attention saves_per_epoch "
        ),
        "refused": ("datasets[1].split val_set_size warmup_steps evals_per_epoch special_tokens "),
        "stage": {
            "kind": "sft",
            "batch": 8,
            "lora": {"rank": 16, "alpha": 32, "dropout": 0.05, "targets": "all", "base_bits": 4},
            "max_length": 2048,
        },
    },
    "axolotl-dpo.yaml": {
        "taken": (
            "base_model rl_beta rpo_alpha datasets[0].path sequence_len max_steps learning_rate optimizer "
            "lr_scheduler warmup_ratio seed "
        ),
        "changed": ("rl datasets[0].ds_type output_dir micro_batch_size gradient_accumulation_steps "),
        "not needed": ("datasets[0].type bf16 flash_attention "),
        "stage": {
            "kind": "preference",
            "batch": 4,
            "max_steps": 2,
            "method": {"kind": "dpo", "beta": 0.05, "sft_weight": 0.1},
            "optimiser.schedule": "linear",
            "heldout_share": 0.01,
        },
    },
    "axolotl-grpo.yaml": {
        "taken": (
            "base_model trl.num_generations trl.max_completion_length trl.beta trl.loss_type trl.temperature "
            "datasets[0].path learning_rate optimizer lora_r lora_alpha lora_target_modules max_prompt_len "
        ),
        "changed": (
            "rl trl.reward_funcs trl.scale_rewards datasets[0].split micro_batch_size "
            "gradient_accumulation_steps num_epochs output_dir fsdp_config "
        ),
        "not needed": ("trl.use_vllm datasets[0].type adapter fsdp_version "),
        "stage": {
            "kind": "group",
            "batch": 2,
            "answers": 4,
            "iterations": 6,
            "method": {"kind": "dr_grpo", "clip": 0.2},
            "roles": "lora",
            "memory.lora.rank": 8,
            "actor.schedule": "cosine",
            "actor.warmup": 0.03,
        },
    },
}
