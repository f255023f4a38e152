"""LLaMA-Factory: the YAML of `llamafactory-cli train`, with the datasets that its dataset_info.json names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.importing import llama_factory_data, places, preferences, rollouts, training
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
    refused,
    skip,
    table,
    take_in,
    taken,
    told,
    unneeded,
    whole,
)

KINDS: Final[Mapping[str, Kind]] = {
    "pt": "sft", "sft": "sft", "rm": "reward", "dpo": "preference", "kto": "preference", "ppo": "ppo",
}  # fmt: skip


def source_of(file: Path, asked: Asked, folder: Path) -> Source:
    given, lines = read_fields(file)
    stage = str(given.get("stage", "sft"))
    if stage not in KINDS:
        raise ConfigError(
            f"{file}: stage: no stage {stage!r}{did_you_mean(stage, KINDS)}; there are {', '.join(KINDS)}"
        )
    return Source(
        file=file,
        trainer=stage,
        kind=KINDS[stage],
        given=given,
        defaults=_defaults(stage),
        lines=lines,
        asked=asked,
        is_lora=given.get("finetuning_type", "lora") == "lora",
        num_rows=_rows(file, given, asked),
        folder=folder,
    )


def _rows(file: Path, given: Mapping[str, Any], asked: Asked) -> int | None:
    """Rows of the only dataset, where it is a file that is there."""
    if asked.data:
        return places.num_rows(asked.data, file.parent)
    if not isinstance(given.get("dataset"), str) or "," in str(given["dataset"]):
        return None
    found = llama_factory_data.info(file, given)
    entry = llama_factory_data.entry(found[1].get(str(given["dataset"]))) if found else {}
    path = str(found[0] / str(entry.get("file_name", ""))) if found and entry.get("file_name") else None
    rows, most = places.num_rows(path, file.parent), given.get("max_samples")
    return min(rows, whole(most)) if rows and most else rows


def _defaults(stage: str) -> dict[str, Any]:
    """Of LLaMA-Factory 0.9, as far as Kedge would do otherwise."""
    values = {**training.DEFAULTS, "cutoff_len": 2048, "finetuning_type": "lora", "lora_rank": 8, "lora_alpha": None}
    values |= {"disable_gradient_checkpointing": False, "template": None}
    if stage == "dpo":
        values |= {"pref_beta": 0.1, "pref_loss": "sigmoid"}
    if stage == "kto":
        values |= {"pref_beta": 0.1}
    if stage == "ppo":
        values |= {
            "ppo_buffer_size": 1,
            "ppo_epochs": 4,
            "ppo_target": 6.0,
            "max_new_tokens": 1024,
            "temperature": 0.95,
        }
        values |= {"top_p": 0.7, "top_k": 50}
    return values


def fixed(source: Source) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if source.is_lora:
        alpha = source.given.get("lora_alpha") or 2 * whole(source.get("lora_rank"))
        settings |= dict(taken("lora.alpha", number(alpha), source).sets)
    if source.trainer == "ppo":
        settings |= {"stage.roles": "lora" if source.is_lora else "separate", "stage.kl.start": 0.2}
    if source.trainer == "kto":
        settings["stage.method.kind"] = "kto"
    return settings


def _template(value: Any, source: Source) -> Outcome:
    if str(value) == "chatml":
        return taken("chat_template", "chatml", source)
    if str(value) in ("default", "empty", "alpaca", "vicuna"):
        return told("the model's own chat template; `chat_template: plain`, chatml or a Jinja file replaces it")
    return told("the model's own chat template, which for its chat models is the same text; chat_template replaces it")


def _finetuning(value: Any, source: Source) -> Outcome:
    if value == "lora":
        return unneeded("`roles: lora`") if source.is_rl else taken("stage.lora", {}, source)
    if value == "full":
        return unneeded("all weights learn" + (" (`roles: separate`)" if source.is_rl else ""))
    raise ValueError(f"must be lora or full here, found {value!r}: parts of a model (freeze, oft) do not learn alone")


def _lora_alpha(value: Any, source: Source) -> Outcome:
    return lora("alpha", number)(value, source)


def _cutoff(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return Outcome(verdict="taken", sets={"stage.max_prompt_tokens": whole(value), "stage.too_long": "cut"})
    sets = {"stage.max_length": whole(value), "stage.too_long": "drop"}
    return Outcome(verdict="changed", sets=sets, why="longer ones are left out and counted: no end is cut off")


def _val_size(value: Any, source: Source) -> Outcome:
    share = number(value)
    if share == 0:
        return unneeded("nothing is held out")
    if source.kind in ("reward", "preference") and share < 1:
        return taken("stage.heldout_share", share, source)
    return refused("give `heldout` a file; a stage `data` splits one (docs/data.md)")


def _batch(value: Any, source: Source) -> Outcome:
    if source.trainer != "ppo":
        return training.batch(value, source)
    step = training.batch(value, source).sets["stage.batch"]
    buffered = whole(source.get("ppo_buffer_size"))
    sets = {"stage.batch": step * buffered, "stage.minibatches": buffered}
    return Outcome(verdict="changed", sets=sets, why=f"{step} a step × ppo_buffer_size {buffered}")


def _epochs(value: Any, source: Source) -> Outcome:
    if source.trainer != "ppo":
        return training.epochs(value, source)
    if whole(source.get("max_steps", -1)) > 0:
        return unneeded("max_steps decides")
    step = training.batch(source.get("per_device_train_batch_size"), source).sets["stage.batch"]
    return rollouts.passes(value, source, step * whole(source.get("ppo_buffer_size")))


def _max_steps(value: Any, source: Source) -> Outcome:
    if source.trainer == "ppo" and whole(value) > 0:
        return taken("stage.iterations", whole(value), source)
    return training.max_steps(value, source)


def _pref_loss(value: Any, source: Source) -> Outcome:
    kind = {"orpo": "orpo", "simpo": "simpo"}.get(str(value))
    if source.trainer != "dpo":
        return unneeded(f"{source.trainer} does not read it")
    if kind is None:
        return preferences.loss_type(value, source)
    extra = {"gamma": source.number("simpo_gamma", 0.5)} if kind == "simpo" else {}
    return preferences.method({"kind": kind, **extra})


def _pref_ftx(value: Any, source: Source) -> Outcome:
    weight = number(value)
    if not weight:
        return unneeded("it asks for nothing")
    if source.get("pref_loss") == "orpo":
        return preferences.method({"sft_weight": 1 + weight}, "beside the likelihood that is in ORPO", is_same=False)
    return preferences.method({"sft_weight": weight})


def _quantised(value: Any, source: Source) -> Outcome:
    bits = whole(value)
    if bits not in (4, 8):
        raise ValueError(f"must be 4 or 8 here, found {bits}")
    return training.bits(bits)(True, source)


def _pure(value: Any, source: Source) -> Outcome:
    return told("what learns has float32 weights, also on a GPU") if flag(value) else unneeded("it asks for nothing")


def _recompute(value: Any, source: Source) -> Outcome:
    return taken("stage.memory.recompute", not flag(value), source)


def _score_norm(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("it asks for nothing")
    return taken("stage.scores.normalise", "standard", source)


def _stage(value: Any, source: Source) -> Outcome:
    if value == "pt":
        return told("stage sft; rows of `text` are learnt whole")
    return told(f"stage {source.kind}")


TABLE: Final[Mapping[str, Rule]] = {
    **training.TABLE,
    **table(
        {
            "stage": _stage,
            "model_name_or_path": training.model,
            "model_revision": training.model_revision,
            "adapter_name_or_path": refuse("merge the adapter into its model first, and name that as --model"),
            "finetuning_type": _finetuning,
            "dataset": llama_factory_data.data,
            "eval_dataset": llama_factory_data.heldout,
            "dataset_dir": part_of("data", f"where {llama_factory_data.INFO} lies"),
            "max_samples": part_of("data", "its limit"),
            "interleave_probs": part_of("data", "weights of its files"),
            "mix_strategy": skip("files with weights have their shares; without any, every row counts once"),
            "template": _template,
            "cutoff_len": _cutoff,
            "val_size": _val_size,
            "per_device_train_batch_size": _batch,
            "num_train_epochs": _epochs,
            "max_steps": _max_steps,
            "lora_rank": lora("rank", whole),
            "lora_alpha": _lora_alpha,
            "lora_dropout": lora("dropout", number),
            "lora_target": lora("targets", training.targets),
            "use_rslora": lora("rslora", flag),
            "use_dora": refuse("DoRA is not computed; rslora is there"),
            "additional_target": refuse("adapters learn, and nothing beside them"),
            "loraplus_lr_ratio": refuse("both matrices of an adapter have one rate"),
            "pissa_init": refuse("adapters start from zero"),
            "quantization_bit": _quantised,
            "quantization_type": refuse("a base of 4 bits is nf4", ("nf4",)),
            "quantization_method": refuse("bitsandbytes quantises", ("bnb", "bitsandbytes")),
            "pref_loss": _pref_loss,
            "pref_beta": preferences.setting("beta", ("dpo", "kto")),
            "pref_ftx": _pref_ftx,
            "pref_bco_weight": refuse("the loss BCO is not there"),
            "dpo_label_smoothing": preferences.smoothing,
            "simpo_gamma": part_of("method", "of simpo"),
            "kto_chosen_weight": preferences.setting("desirable_weight", ("kto",)),
            "kto_rejected_weight": preferences.setting("undesirable_weight", ("kto",)),
            "ld_alpha": refuse("length-desensitised DPO is not there"),
            "ref_model": refuse("the reference is the model that a stage starts from"),
            "ref_model_adapters": refuse("the reference is the model that a stage starts from"),
            "reward_model": rollouts.reward_model,
            "reward_model_type": refuse("merge its adapter into a model first (`full`), and name that", ("full",)),
            "reward_model_adapters": refuse("merge them into the reward model first"),
            "ppo_buffer_size": part_of("batch", "and `minibatches`: steps of a pass"),
            "ppo_epochs": take_in(("ppo",), "stage.epochs", whole),
            "ppo_target": take_in(("ppo",), "stage.kl.target", number),
            "ppo_score_norm": _score_norm,
            "ppo_whiten_rewards": take_in(("ppo",), "stage.loss.credit.scale_rewards", flag),
            "max_new_tokens": take_in(("ppo",), "stage.sampling.max_new_tokens", whole),
            "temperature": take_in(("ppo",), "stage.sampling.temperature", number),
            "top_p": take_in(("ppo",), "stage.sampling.top_p", number),
            "top_k": lambda value, source: (
                rollouts.top_k(value, source) if source.is_rl else unneeded("nothing is sampled")
            ),
            "repetition_penalty": refuse("sampling has temperature, top_p and top_k", (1.0,)),
            "packing": lambda value, source: (
                told("`batch` counts conversations, not packed blocks: raise it by as many as fill a block")
                if flag(value)
                else unneeded("rows are packed without padding; it changes no number")
            ),
            "neat_packing": skip("conversations do not see each other"),
            "train_on_prompt": refuse("the loss is on the assistant's tokens alone"),
            "mask_history": refuse("all turns of the assistant are learnt; `weight: 0` on a message leaves one out"),
            "disable_gradient_checkpointing": _recompute,
            "pure_bf16": _pure,
            "early_stopping_steps": lambda value, source: taken("stage.eval.patience", whole(value), source),
            "train_from_scratch": refuse("a run starts from a model that is there"),
            "trust_remote_code": skip("code of a model is never run"),
            "use_swanlab": refuse("trackers are wandb, tensorboard and mlflow"),
            "rope_scaling": refuse("a model has the window that its configuration says"),
            "resize_vocab": refuse("a model keeps its vocabulary"),
            "add_tokens": refuse("a model keeps its vocabulary"),
            "add_special_tokens": refuse("a model keeps its vocabulary"),
        },
        {
            "use_dft_loss use_asft_loss use_eaft_loss": refuse("the loss is the likelihood"),
            "fp8 fp8_backend fp8_enable_fsdp_float8_all_gather": refuse("products are not computed in 8 bits"),
            "freeze_trainable_layers freeze_trainable_modules freeze_extra_modules": refuse(
                "parts of a model do not learn alone: all weights do, or adapters"
            ),
            "ref_model_quantization_bit reward_model_quantization_bit": refuse(
                "`memory.frozen_bits` is for reference and reward model together"
            ),
            "moe_aux_loss_coef": refuse("there is no loss of routers"),
            "pissa_iter pissa_convert loraplus_lr_embedding create_new_adapter asft_alpha eaft_alpha "
            "galore_target galore_rank galore_update_interval galore_scale galore_proj_type galore_layerwise "
            "apollo_target apollo_rank apollo_update_interval apollo_scale apollo_proj apollo_proj_type "
            "apollo_scale_type apollo_layerwise apollo_scale_front "
            "badam_mode badam_start_block badam_switch_mode badam_switch_interval badam_update_ratio badam_mask_mode "
            "badam_verbose oft_rank oft_block_size oft_target module_dropout": skip("of a field that is refused"),
            "use_galore use_apollo use_badam use_adam_mini use_muon use_llama_pro shift_attn mixture_of_depths": refuse(
                "AdamW on all weights or on adapters is what there is"
            ),
            "flash_attn use_unsloth use_unsloth_gc enable_liger_kernel use_reentrant_gc low_cpu_mem_usage "
            "upcast_layernorm "
            "upcast_lmhead_output double_quantization quantization_device_map use_fast_tokenizer split_special_tokens "
            "use_v1_kernels use_mca offload_folder use_kv_cache infer_backend infer_dtype print_param_status "
            "cache_dir": skip("it changes speed, memory or display; Kedge has its own way"),
            "overwrite_cache preprocessing_batch_size streaming buffer_size tokenized_path eval_on_each_dataset "
            "media_dir "
            "data_shared_file_system disable_shuffling ignore_pad_token_for_loss tool_format default_system "
            "enable_thinking": skip("data are read, tokenised and shuffled by Kedge's own"),
            "predict_with_generate eval_num_beams do_sample num_beams max_length compute_accuracy skip_special_tokens "
            "length_penalty include_effective_tokens_per_second": skip("stage `evaluate` asks and measures"),
            "hf_hub_token ms_hub_token om_hub_token swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url "
            "swanlab_project swanlab_run_name swanlab_workspace swanlab_mode swanlab_logdir": skip("of a service"),
            "freeze_vision_tower freeze_multi_modal_projector freeze_language_model image_max_pixels image_min_pixels "
            "video_max_pixels video_min_pixels video_fps video_maxlen": skip("models of text have none"),
            "ray_run_name ray_num_workers ray_storage_path resources_per_worker placement_strategy "
            "ray_init_kwargs": skip(training.SHARDED),
        },
    ),
}
