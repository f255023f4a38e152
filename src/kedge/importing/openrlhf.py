"""OpenRLHF: a command line `python -m openrlhf.cli.train_…`, alone or in a script with deepspeed or ray around it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final, cast

from kedge.importing import places, preferences, rollouts, training
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
ESTIMATORS: Final = {
    "gae": "ppo",
    "reinforce": "reinforce++",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "grpo": "grpo",
}
MANY: Final = 1_000_000
"""A bound of rows from which on it is none."""
RATES: Final = {"sft": 5e-6, "rm": 9e-6, "dpo": 1e-5, "kto": 1e-5}


def source_of(file: Path, asked: Asked, folder: Path) -> Source:
    """A script, or a file with the command line alone."""
    command = read_command(file, MODULE)
    trainer = command.module.removesuffix("_ray")
    given: dict[str, Any] = {"(launcher)": command.launcher or "python", **command.options}
    estimator = str(given.get("advantage_estimator", "gae"))
    kind = KINDS[trainer] if estimator == "gae" else "group"
    data = asked.data or given.get("prompt_data" if kind in ("ppo", "group") else "dataset")
    return Source(
        file=file,
        trainer=trainer if kind != "group" else estimator,
        kind=kind,
        given=given,
        defaults=_defaults(trainer),
        lines=command.lines,
        asked=asked,
        is_lora=int(number(given.get("lora_rank", 0))) > 0,
        num_rows=places.num_rows(str(data), file.parent) if data else None,
        folder=folder,
    )


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


def _numbers(value: Any) -> list[float]:
    return [number(part) for part in cast("list[Any]", value)] if isinstance(value, list) else [number(value)]


def _train_batch(value: Any, source: Source) -> Outcome:
    """Rows of an optimiser step over all processes; in RL it cuts what was sampled into minibatches."""
    rows = whole(value)
    if not source.is_rl:
        return taken("stage.batch", rows, source)
    sampled = whole(source.get("rollout_batch_size")) * whole(source.get("n_samples_per_prompt"))
    minibatches = max(1, sampled // rows)
    return changed("stage.minibatches", minibatches, source, f"{sampled} answers by steps of {rows}")


def _epochs(value: Any, source: Source) -> Outcome:
    return taken(
        "stage.epochs", whole(value), source, "passes over the answers of an iteration" if source.is_rl else ""
    )


def _episodes(value: Any, source: Source) -> Outcome:
    return rollouts.passes(value, source, whole(source.get("rollout_batch_size")))


def _estimator(value: Any, source: Source) -> Outcome:
    name = ESTIMATORS.get(str(value))
    if str(value) == "reinforce_baseline":
        return preferences.method({"kind": "reinforce++"}, "without the baseline of a group", is_same=False)
    if name is None:
        raise ValueError(f"must be one of {', '.join(ESTIMATORS)}, found {value!r}")
    if name == "ppo":
        return unneeded("a critic estimates, as stage `ppo` does")
    if source.get("policy_loss_type") == "gspo" and name == "grpo":
        name = "gspo"
    return preferences.method({"kind": name})


def _clip(value: Any, source: Source) -> Outcome:
    low, high = ([*_numbers(value), *_numbers(value)])[:2]
    if source.kind == "ppo":
        extra = {"stage.loss.policy.clip_high": high} if high != low else {}
        return Outcome(verdict="taken", sets={"stage.loss.policy.clip": low, **extra})
    if source.trainer in ("rloo",):
        return unneeded("rloo has no ratio")
    extra = {"clip_high": high} if high != low and source.trainer in ("group_norm", "grpo") else {}
    return preferences.method({"clip": low, **extra})


def _eps_clip(value: Any, source: Source) -> Outcome:
    return unneeded("eps_clip_low_high is set") if source.get("eps_clip_low_high") else _clip(value, source)


def _betas(value: Any, source: Source) -> Outcome:
    first, second = _numbers(value)
    sets = {**taken("optimiser.beta1", first, source).sets, **taken("optimiser.beta2", second, source).sets}
    return Outcome(verdict="taken", sets=sets)


def _schedule(value: Any, source: Source) -> Outcome:
    outcome = training.schedule(value, source)
    why = "falls to 0, not to a tenth" if str(value) == "cosine_with_min_lr" else outcome.why
    return Outcome(verdict=outcome.verdict, sets=outcome.sets, why=why)


def _kl(value: Any, source: Source) -> Outcome:
    where = "loss" if flag(source.get("use_kl_loss", False)) else "reward"
    sets: dict[str, Any] = {"stage.kl.start": number(value), "stage.kl.where": where}
    return Outcome(verdict="taken", sets=sets, why=f"in the {where}")


def _score_clip(value: Any, source: Source) -> Outcome:
    low, high = _numbers(value)
    return (
        taken("stage.scores.clip", high, source) if low == -high else refused("scores are clipped on both sides alike")
    )


def _data(value: Any, source: Source) -> Outcome:
    """Files with commas between them, shares in another option; columns by their keys."""
    path = "stage.prompts" if source.is_rl else "stage.data"
    if source.asked.data:
        return changed(path, source.asked.data, source, "--data stands in its place")
    shares = source.get("prompt_data_probs", source.get("dataset_probs"))
    split = source.get("prompt_split", source.get("dataset_split", source.get("train_split")))
    files = [places.data_place(name.strip(), source, split=split) for name in str(value).split(",")]
    weights = [number(share) for share in str(shares).split(",")] if shares and len(files) > 1 else []
    columns, limit = _columns(source), whole(source.get("max_samples", MANY))
    entries: list[Any] = []
    for index, file in enumerate(files):
        entry: dict[str, Any] = {"file": file}
        entry |= {"columns": columns} if columns else {}
        entry |= {"limit": limit} if limit < MANY else {}
        entry |= {"weight": weights[index]} if index < len(weights) else {}
        entries.append(entry if len(entry) > 1 else file)
    return taken(path, entries[0] if len(entries) == 1 else entries, source)


def _columns(source: Source) -> dict[str, str]:
    """Which column plays which part, where it is not called so anyway."""
    parts = {"sft": "prompt", "reward": "prompt", "preference": "prompt", "ppo": "prompt", "group": "prompt"}
    named = {
        parts[source.kind]: source.given.get("input_key") or source.given.get("prompt_key"),
        "completion": source.given.get("output_key"),
        "chosen": source.given.get("chosen_key"),
        "rejected": source.given.get("rejected_key"),
        "answer": source.given.get("label_key") if source.is_rl else None,
        "label": source.given.get("label_key") if source.trainer == "kto" else None,
    }
    chosen = {part: str(column) for part, column in named.items() if column and str(column) != part}
    if chosen.get("prompt") in ("messages", "conversations") and source.kind == "sft":
        chosen.pop("prompt")  # whole conversations are known by their column
        chosen.pop("completion", None)
    return chosen


def _heldout(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return refused("stage `evaluate` measures on prompts of its own (docs/evaluate.md)")
    if not value:
        return training.eval_strategy("no", source)
    return taken("stage.heldout", places.data_place(str(value), source, split=source.get("eval_split")), source)


def _lora_rank(value: Any, source: Source) -> Outcome:
    return taken("lora.rank", whole(value), source) if whole(value) > 0 else unneeded("all weights learn")


def _ema(value: Any, source: Source) -> Outcome:
    return (
        taken("stage.ema", source.number("ema_beta", 0.992), source) if flag(value) else unneeded("it asks for nothing")
    )


def _engines(value: Any, source: Source) -> Outcome:
    engines = whole(value)
    if engines == 0:
        return unneeded("Kedge's own engine samples")
    gpus = engines * whole(source.get("vllm_tensor_parallel_size", 1))
    return rollouts.vllm("on GPUs of its own, in an environment of its own (docs/vllm.md)", gpus=gpus)


def _wandb(value: Any, source: Source) -> Outcome:
    return changed("trackers.wandb", {}, source, "the key is not copied: `wandb login`, or WANDB_API_KEY")


def _ipo(value: Any, source: Source) -> Outcome:
    return preferences.method({"kind": "ipo"}) if flag(value) else unneeded("it asks for nothing")


def _freeze(value: Any, source: Source) -> Outcome:
    steps = whole(value)
    return taken("stage.critic_warmup", steps, source) if steps > 0 else unneeded("the policy learns from the first")


def _normalised(value: Any, source: Source) -> Outcome:
    return taken("stage.scores.normalise", "standard", source, "by running moments") if flag(value) else unneeded("")


def _max_len(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return unneeded("prompt_max_len and generate_max_len bound both")
    sets = {"stage.max_length": whole(value), "stage.too_long": "drop"}
    return Outcome(verdict="changed", sets=sets, why="longer ones are left out and counted: no end is cut off")


def _prompt_len(value: Any, source: Source) -> Outcome:
    return Outcome(verdict="taken", sets={"stage.max_prompt_tokens": whole(value), "stage.too_long": "cut"})


def _actor_rate(value: Any, source: Source) -> Outcome:
    return taken("stage.actor.lr", number(value), source)


def _filtering(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("it asks for nothing")
    return changed("stage.max_rounds", 10, source, "groups of equal scores are left out, for 10 batches at most")


def _tensorboard(value: Any, source: Source) -> Outcome:
    return taken("trackers.tensorboard", {}, source)


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
        "dataset": _data,
        "prompt_data": _data,
        "eval_dataset": _heldout,
        "max_samples": part_of("data", "its limit, where it is one"),
        "train_batch_size": _train_batch,
        "rollout_batch_size": take("stage.batch", whole, "prompts of an iteration"),
        "n_samples_per_prompt": take("stage.answers", whole),
        "max_epochs": _epochs,
        "num_episodes": _episodes,
        "learning_rate": take("optimiser.lr", number),
        "actor_learning_rate": _actor_rate,
        "critic_learning_rate": take_in(("ppo",), "stage.critic.lr", number),
        "lr_scheduler": _schedule,
        "lr_warmup_ratio": training.warmup_ratio,
        "adam_betas": _betas,
        "l2": take("optimiser.weight_decay", number),
        "max_norm": training.clip,
        "seed": training.seed,
        "max_len": _max_len,
        "prompt_max_len": _prompt_len,
        "generate_max_len": take("stage.sampling.max_new_tokens", whole),
        "temperature": take("stage.sampling.temperature", number),
        "top_p": take("stage.sampling.top_p", number),
        "advantage_estimator": _estimator,
        "policy_loss_type": refuse("gspo goes with group_norm", ("ppo", "gspo")),
        "init_kl_coef": _kl,
        "kl_target": take("stage.kl.target", number),
        "kl_horizon": take("stage.kl.horizon", whole),
        "kl_estimator": take("stage.kl.kind", str),
        "use_kl_loss": part_of("kl.where", "loss"),
        "eps_clip": _eps_clip,
        "eps_clip_low_high": _clip,
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
        "normalize_reward": _normalised,
        "reward_clip_range": _score_clip,
        "freezing_actor_steps": _freeze,
        "enable_ema": _ema,
        "ema_beta": part_of("ema", "its decay"),
        "overlong_buffer_len": take("stage.scores.overlong_buffer", whole),
        "overlong_penalty_factor": take("stage.scores.overlong_penalty", number),
        "dynamic_filtering": _filtering,
        "dynamic_filtering_reward_range": skip("groups whose scores are all equal are left out"),
        "beta": preferences.setting("beta", ("dpo", "kto")),
        "ipo": _ipo,
        "label_smoothing": lambda value, source: (
            preferences.method({"label_smoothing": number(value)}) if number(value) else unneeded("it asks for nothing")
        ),
        "nll_loss_coef": preferences.setting("sft_weight", ("dpo",)),
        "margin_loss": take("stage.loss.margin", flag),
        "loss": refuse("comparisons of two are Bradley–Terry", ("sigmoid",)),
        "pretrain_mode": refuse("rows of bare `text` are learnt whole without a mode"),
        "lora_rank": _lora_rank,
        "lora_alpha": lora("alpha", number),
        "lora_dropout": lora("dropout", number),
        "target_modules": lora("targets", lambda value: training.targets(names(value))),
        "load_in_4bit": training.bits(4),
        "gradient_checkpointing": training.recompute,
        "use_wandb": _wandb,
        "use_tensorboard": _tensorboard,
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
        "vllm_num_engines": _engines,
        "vllm_tensor_parallel_size": take("stage.generator.tensor_parallel", whole),
        "async_train": lambda value, source: (
            taken("stage.generator.lag", whole(source.get("async_queue_size", 1)), source)
            if flag(value)
            else unneeded("")
        ),
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
        "prompt_split train_split dataset_split eval_split": part_of("data", "the split of a dataset of the hub"),
        "input_key output_key prompt_key chosen_key rejected_key label_key": part_of("data", "its columns"),
        "ref_num_nodes ref_num_gpus_per_node reward_num_nodes reward_num_gpus_per_node actor_num_nodes "
        "actor_num_gpus_per_node critic_num_nodes critic_num_gpus_per_node colocate_actor_ref colocate_critic_reward "
        "colocate_all_models ref_reward_offload ref_offload actor_init_on_gpu": skip(GPUS),
        "zero_stage zpg adam_offload local_rank overlap_comm grad_accum_dtype deepcompile dist_backend "
        "deepspeed_enable_sleep use_ds_universal_ckpt disable_ds_ckpt": skip(training.SHARDED),
        "micro_train_batch_size micro_rollout_batch_size use_dynamic_batch train_max_tokens_per_gpu "
        "rollout_max_tokens_per_gpu vllm_generate_batch_size rollout_tasks_per_gpu": skip(
            "`micro_batch: auto` finds its size"
        ),
        "bf16": skip("the device decides (`memory.dtype: auto`); what learns has float32 weights"),
        "flash_attn attn_implementation packing_samples use_liger_kernel gradient_checkpointing_use_reentrant "
        "disable_fast_tokenizer ring_head_stride full_determinism perf compute_fp32_loss disable_trace_cache": skip(
            "it changes speed and memory; Kedge has its own way"
        ),
        "vllm_sync_backend vllm_sync_with_ray vllm_enable_sleep vllm_gpu_memory_utilization enable_prefix_caching "
        "enforce_eager enable_vllm_is_correction vllm_is_truncated_threshold": skip(
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
