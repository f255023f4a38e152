"""TRL: the YAML of `trl sft|dpo|kto|grpo|rloo|reward|ppo --config`, or a JSON of training arguments."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.errors import ConfigError
from kedge.core.suggest import did_you_mean
from kedge.core.urls import has_secret
from kedge.importing import places, preferences, rollouts, training
from kedge.importing.fields import read_fields
from kedge.importing.rules import (
    Asked,
    Kind,
    Outcome,
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
    told,
    unneeded,
    whole,
)

KINDS: Final[Mapping[str, Kind]] = {
    "sft": "sft", "reward": "reward", "dpo": "preference", "kto": "preference", "orpo": "preference", "cpo": "preference",
    "grpo": "group", "rloo": "group", "ppo": "ppo",
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
    return values | _DEFAULTS.get(trainer, {})


_DEFAULTS: Final[Mapping[str, Mapping[str, Any]]] = {
    "dpo": {"beta": 0.1, "loss_type": "sigmoid"},
    "kto": {"beta": 0.1, "loss_type": "kto"},
    "orpo": {"beta": 0.1},
    "cpo": {"beta": 0.1, "loss_type": "sigmoid", "cpo_alpha": 1.0, "simpo_gamma": 0.5},
    "grpo": {
        "num_generations": 8, "max_completion_length": RL_LENGTH, "beta": 0.0, "loss_type": "dapo", "epsilon": 0.2,
        "num_iterations": 1, "temperature": 1.0,
    },
    "rloo": {"num_generations": 2, "max_completion_length": RL_LENGTH, "beta": 0.05, "num_iterations": 1, "temperature": 1.0},
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


def _completions(source: Source) -> tuple[int, int]:
    """Completions of one generation, and of one optimiser step."""
    rows = whole(source.get("per_device_train_batch_size")) * source.processes
    accumulated = whole(source.get("gradient_accumulation_steps"))
    sampled = source.get("generation_batch_size")
    return whole(sampled) if sampled else rows * whole(
        source.get("steps_per_generation", accumulated)
    ), rows * accumulated


def _batch(value: Any, source: Source) -> Outcome:
    """Supervised: rows a step. RL: prompts an iteration, and minibatches; TRL counts completions."""
    if source.kind == "ppo":
        return training.batch(value, source)
    if source.kind != "group":
        return training.batch(value, source)
    sampled, learnt = _completions(source)
    answers = whole(source.get("num_generations"))
    prompts = rollouts.exactly(sampled, answers, "completions of a generation by num_generations")
    minibatches = (
        rollouts.exactly(sampled, learnt, "completions of a generation by those of a step") if sampled > learnt else 1
    )
    return Outcome(
        verdict="changed",
        sets={"stage.batch": prompts, "stage.minibatches": minibatches},
        why=f"TRL counts completions: {sampled} of a generation are {prompts} prompts × {answers}; a step learns from {learnt}",
    )


def _prompts(source: Source) -> int:
    if source.kind == "ppo":
        step = whole(source.get("per_device_train_batch_size")) * whole(source.get("gradient_accumulation_steps"))
        return step * source.processes
    return max(1, _completions(source)[0] // whole(source.get("num_generations")))


def _epochs(value: Any, source: Source) -> Outcome:
    if not source.is_rl:
        return training.epochs(value, source)
    if whole(source.get("max_steps", -1)) > 0 or source.get("total_episodes"):
        return unneeded("a number of steps or episodes is set")
    return rollouts.passes(value, source, _prompts(source))


def _max_steps(value: Any, source: Source) -> Outcome:
    steps = whole(value)
    if not source.is_rl or steps <= 0:
        return training.max_steps(value, source)
    if source.kind == "ppo":
        return unneeded("PPO of TRL counts episodes")
    sampled, learnt = _completions(source)
    each = max(1, sampled // learnt) * whole(source.get("num_iterations", 1))
    why = f"{steps} optimiser steps, {each} an iteration"
    return changed("stage.iterations", max(1, -(-steps // each)), source, why)


def _episodes(value: Any, source: Source) -> Outcome:
    return rollouts.iterations(whole(value), _prompts(source), source, f"{whole(value)} episodes")


def _loss(value: Any, source: Source) -> Outcome:
    if source.trainer in ("dpo", "cpo"):
        is_cpo = source.trainer == "cpo" and value == "sigmoid"
        return preferences.method({"kind": "cpo"}) if is_cpo else preferences.loss_type(value, source)
    if source.trainer == "kto":
        return unneeded("the loss of KTO") if value == "kto" else refused(f"{value} is not there: kto")
    if source.kind != "group" or source.trainer == "rloo":
        if source.kind == "sft" and value == "dft":
            raise ValueError("the loss `dft` (dynamic fine-tuning) is not there; take nll")
        return unneeded("the likelihood, however it is computed")
    return _group_loss(str(value), source)


def _group_loss(loss: str, source: Source) -> Outcome:
    """A method of stage `group`; what its paper turns on beside the loss, and TRL does not, is turned off."""
    low = source.number("epsilon", 0.2)
    high = source.number("epsilon_high", low)
    is_scaled = str(source.get("scale_rewards", "group")).lower() in ("true", "group")
    if source.get("importance_sampling_level", "token") == "sequence":
        sets = {"kind": "gspo", "clip": low, "clip_high": high}
        return preferences.method(
            sets, "one ratio an answer (importance_sampling_level: sequence)", is_same=loss == "grpo"
        )
    if not is_scaled and loss in ("dr_grpo", "grpo"):
        why = (
            "" if loss == "dr_grpo" else "without scale_rewards: sums over tokens / max_new_tokens, as Dr. GRPO has it"
        )
        return preferences.method({"kind": "dr_grpo", "clip": low}, why, is_same=loss == "dr_grpo")
    if loss == "grpo":
        return preferences.method({"kind": "grpo", "clip": low, "clip_high": high})
    if loss in ("dapo", "bnpo", "dr_grpo"):
        outcome = preferences.method({"kind": "dapo", "clip": low, "clip_high": high})
        why = {
            "dapo": "the loss alone: no dynamic sampling, no price of long answers",
            "bnpo": "a mean over all tokens of a step, not of a process",
            "dr_grpo": "with scale_rewards this is no Dr. GRPO: a mean over the tokens of a step is nearest",
        }[loss]
        off = {"stage.max_rounds": None, "stage.scores.overlong_buffer": None}
        return Outcome(verdict="changed", sets={**outcome.sets, **off}, why=why)
    if loss == "cispo":
        bound = max(source.number("epsilon_high", 5.0) - 1, 1e-3)
        return preferences.method({"kind": "cispo", "clip_high": bound}, "1 + clip_high is the bound", is_same=False)
    raise ValueError(f"there is no loss {loss!r} here; there are grpo, dapo, dr_grpo, bnpo, cispo")


def _scaled(value: Any, source: Source) -> Outcome:
    kind = str(value).lower()
    if kind in ("true", "group"):
        return unneeded("advantages are divided by the std of their group, as here")
    if kind in ("false", "none") and str(source.get("loss_type")) in ("dr_grpo", "grpo"):
        return told("a part of `method`: dr_grpo divides by no std")
    return refused(f"scale_rewards: {value} is not there beside this loss; take loss_type dr_grpo for none")


def _beta(value: Any, source: Source) -> Outcome:
    """The coefficient of KL: of a preference loss, in the loss of GRPO, in the reward of RLOO."""
    beta = number(value)
    if source.kind == "preference":
        return preferences.method({"beta": beta})
    if source.trainer == "rloo":
        return taken("stage.kl.start", beta, source, "in the reward")
    sets = {"stage.kl.start": beta, "stage.kl.where": "loss", "stage.kl.kind": "k3"}
    return Outcome(verdict="taken", sets=sets, why="in the loss")


def _max_length(value: Any, source: Source) -> Outcome:
    """Kedge never cuts the end of what is learnt."""
    if source.is_rl:
        return unneeded(f"{source.trainer} does not read it")
    keeps_end = source.get("truncation_mode") == "keep_end" or source.trainer == "kto"
    sets = {"stage.max_length": whole(value), "stage.too_long": "cut" if keeps_end else "drop"}
    why = "longer ones lose their beginning" if keeps_end else "longer ones are left out and counted: no end is cut off"
    return Outcome(verdict="changed", sets=sets, why=why)


def _max_prompt(value: Any, source: Source) -> Outcome:
    if not source.is_rl:
        return told("`max_length` bounds prompt and answer together")
    sets = {"stage.max_prompt_tokens": whole(value), "stage.too_long": "cut"}
    return Outcome(verdict="taken", sets=sets, why="a longer prompt loses its beginning")


def _packing(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("rows are packed without padding and do not see each other; it changes no number")
    return told(
        "`batch` counts conversations, not packed blocks of max_length tokens: raise it by as many as fill a block"
    )


def _data(value: Any, source: Source) -> Outcome:
    path = "stage.prompts" if source.is_rl else "stage.data"
    if source.asked.data:
        return changed(path, source.asked.data, source, "--data stands in its place")
    config, split = source.get("dataset_config"), source.get("dataset_train_split")
    where = places.data_place(str(value), source, config=config, split=split)
    sets = {path: where}
    if _is_evaluated(source) and where.startswith("hub:") and not source.is_rl:
        held_out = source.get("dataset_test_split", "test")
        sets["stage.heldout"] = places.data_place(str(value), source, config=config, split=held_out)
    return Outcome(verdict="taken", sets=sets)


def _is_evaluated(source: Source) -> bool:
    return str(source.get("eval_strategy", "no")).lower() not in ("no", "false")


def _mixture(value: Any, source: Source) -> Outcome:
    """The first path of a list of datasets stands for all of them."""
    count = sum(1 for name in source.given if re.fullmatch(r"datasets\[\d+\]\.path", name))
    files: list[str] = []
    for index in range(count):
        at = {key: source.given.get(f"datasets[{index}].{key}") for key in ("path", "name", "split", "data_files")}
        place = places.data_place(str(at["path"]), source, config=at["name"], split=at["split"], files=at["data_files"])
        files.append(place)
    chosen: Any = source.asked.data or (files[0] if count == 1 else files)
    return taken("stage.prompts" if source.is_rl else "stage.data", chosen, source)


def _reward(value: Any, source: Source) -> Outcome:
    """Functions, with a model beside them, and their weights."""
    given: Any = source.get("reward_weights")
    weights = [number(weight) for weight in cast("list[Any]", given)] if isinstance(given, list) else None
    model = source.get("reward_model_name_or_path")
    why = "functions get `answers` and columns by name here (docs/from-trl.md)"
    return changed("stage.reward", rollouts.rewards(names(value), weights, model), source, why)


def _reward_model(value: Any, source: Source) -> Outcome:
    if source.trainer == "ppo" or not source.get("reward_funcs"):
        return rollouts.reward_model(value, source)
    return told("a part of `reward`")


def _peft(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return taken("stage.roles", "lora" if flag(value) else "separate", source)
    return taken("stage.lora", {}, source) if flag(value) else unneeded("all weights learn, as here")


def _vllm(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("Kedge's own engine samples")
    url = source.get("vllm_server_base_url")
    why = "vLLM in an environment of its own, on a GPU of its own (docs/vllm.md)"
    if url and source.get("vllm_mode") == "server":
        return refused("a key in a URL is never copied") if has_secret(str(url)) else rollouts.vllm(why, servers=[str(url)])
    return rollouts.vllm(why)


def _clip_range(value: Any, source: Source) -> Outcome:
    low, high = (number(bound) for bound in cast("list[Any]", value))
    return (
        taken("stage.scores.clip", high, source) if low == -high else refused("scores are clipped on both sides alike")
    )


def _stop(value: Any, source: Source) -> Outcome:
    return (
        unneeded("an answer ends with the end-of-sequence token")
        if value == "eos"
        else refused("only `eos` ends an answer")
    )


RL = ("ppo", "group")
PREFERENCES = ("dpo", "kto", "orpo", "cpo")
TABLE: Final[Mapping[str, Rule]] = {
    **training.TABLE,
    **table(
        {
            "model_name_or_path": training.model,
            "sft_model_path": training.model,
            "model_revision": training.model_revision,
            "dataset_name": _data,
            "dataset_config": part_of("data", "the configuration of the dataset"),
            "dataset_train_split": part_of("data", "the split"),
            "dataset_test_split": part_of("heldout", "where there is an evaluation"),
            "datasets[].path": _mixture,
            "per_device_train_batch_size": _batch,
            "num_train_epochs": _epochs,
            "max_steps": _max_steps,
            "total_episodes": _episodes,
            "max_length": _max_length,
            "max_seq_length": _max_length,
            "max_prompt_length": _max_prompt,
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
            "loss_type": _loss,
            "loss_weights": part_of("method", "weight of `sft` beside a loss"),
            "beta": _beta,
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
            "scale_rewards": _scaled,
            "entropy_coef": take_in(("group",), "stage.loss.entropy", number),
            "cliprange": take("stage.loss.policy.clip", number),
            "cliprange_value": take("stage.loss.value.clip", number),
            "gamma": take("stage.loss.credit.gamma", number),
            "lam": take("stage.loss.credit.lam", number),
            "whiten_rewards": take("stage.loss.credit.scale_rewards", flag),
            "vf_coef": skip("the critic has an optimiser of its own, of the same rate; Adam does not see the weight"),
            "missing_eos_penalty": take("stage.scores.missing_eos_penalty", number),
            "reward_clip_range": _clip_range,
            "stop_token": _stop,
            "stop_token_id": refuse("only the end-of-sequence token ends an answer"),
            "reward_funcs": _reward,
            "reward_weights": part_of("reward", "weights of its parts"),
            "reward_model_name_or_path": _reward_model,
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
            "use_vllm": _vllm,
            "use_peft": _peft,
            "lora_r": lora("rank", whole),
            "lora_alpha": lora("alpha", number),
            "lora_dropout": lora("dropout", number),
            "lora_target_modules": lora(
                "targets", training.targets, "PEFT's own for most families, where none are named"
            ),
            "use_rslora": lora("rslora", flag),
            "use_dora": refuse("DoRA is not computed; rslora is there"),
            "lora_modules_to_save": refuse("adapters learn, and nothing beside them"),
            "load_in_4bit": training.bits(4),
            "load_in_8bit": training.bits(8),
            "bnb_4bit_quant_type": refuse("a base of 4 bits is nf4", ("nf4",)),
            "trust_remote_code": refuse("code of a model is never run; take a model that transformers has"),
            "chat_template_path": take("chat_template", str),
            "packing": _packing,
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
            "datasets[].name datasets[].split datasets[].data_files datasets[].data_dir datasets[].columns": part_of(
                "data", "which part of the dataset"
            ),
            "dtype torch_dtype": training.dtype,
            "attn_implementation use_flash_attention_2 padding_free pad_to_multiple_of eval_packing cast_lm_head_to_fp32 "
            "activation_offloading ds3_gather_for_generation use_transformers_paged cache_implementation "
            "use_transformers_continuous_batching gradient_checkpointing_use_reentrant ignore_bias_buffers "
            "precompute_ref_batch_size local_rollout_forward_batch_size bnb_4bit_quant_storage use_bnb_nested_quant": skip(
                "it changes speed and memory; Kedge has its own way"
            ),
            "vllm_mode vllm_model_impl vllm_server_base_url vllm_server_host vllm_server_port vllm_server_timeout "
            "vllm_group_port vllm_gpu_memory_utilization vllm_max_model_length vllm_tensor_parallel_size "
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
