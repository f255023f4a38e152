"""What becomes of the fields of TRL that are more than another name: batches, losses, lengths, data, rewards."""

from __future__ import annotations

import re
from typing import Any, cast

from kedge.core.urls import has_secret
from kedge.importing import places, preferences, rollouts, training
from kedge.importing.rules import (
    Outcome,
    Source,
    changed,
    flag,
    names,
    number,
    refused,
    taken,
    told,
    unneeded,
    whole,
)


def _completions(source: Source) -> tuple[int, int]:
    """Completions of one generation, and of one optimiser step."""
    rows = whole(source.get("per_device_train_batch_size")) * source.processes
    accumulated = whole(source.get("gradient_accumulation_steps"))
    sampled = source.get("generation_batch_size")
    return whole(sampled) if sampled else rows * whole(
        source.get("steps_per_generation", accumulated)
    ), rows * accumulated


def batch(value: Any, source: Source) -> Outcome:
    """Supervised: rows a step. RL: prompts an iteration, and minibatches; TRL counts completions."""
    if source.kind == "ppo":
        parts, step = whole(source.get("num_mini_batches")), training.batch(value, source).sets["stage.batch"]
        return changed("stage.batch", parts * step, source, f"{step} a step × num_mini_batches {parts}")
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
        why=f"TRL counts completions: {sampled} are {prompts} prompts × {answers}; a step learns from {learnt}",
    )


def _prompts(source: Source) -> int:
    if source.kind == "ppo":
        return int(batch(source.get("per_device_train_batch_size"), source).sets["stage.batch"])
    return max(1, _completions(source)[0] // whole(source.get("num_generations")))


def epochs(value: Any, source: Source) -> Outcome:
    if not source.is_rl:
        return training.epochs(value, source)
    if whole(source.get("max_steps", -1)) > 0 or source.get("total_episodes"):
        return unneeded("a number of steps or episodes is set")
    return rollouts.passes(value, source, _prompts(source))


def max_steps(value: Any, source: Source) -> Outcome:
    steps = whole(value)
    if not source.is_rl or steps <= 0:
        return training.max_steps(value, source)
    if source.kind == "ppo":
        return unneeded("PPO of TRL counts episodes")
    sampled, learnt = _completions(source)
    each = max(1, sampled // learnt) * whole(source.get("num_iterations", 1))
    why = f"{steps} optimiser steps, {each} an iteration"
    return changed("stage.iterations", max(1, -(-steps // each)), source, why)


def episodes(value: Any, source: Source) -> Outcome:
    return rollouts.iterations(whole(value), _prompts(source), source, f"{whole(value)} episodes")


def loss(value: Any, source: Source) -> Outcome:
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


def scaled(value: Any, source: Source) -> Outcome:
    kind = str(value).lower()
    if kind in ("true", "group"):
        return unneeded("advantages are divided by the std of their group, as here")
    if kind in ("false", "none") and str(source.get("loss_type")) in ("dr_grpo", "grpo"):
        return told("a part of `method`: dr_grpo divides by no std")
    return refused(f"scale_rewards: {value} is not there beside this loss; take loss_type dr_grpo for none")


def beta(value: Any, source: Source) -> Outcome:
    """The coefficient of KL: of a preference loss, in the loss of GRPO, in the reward of RLOO."""
    beta = number(value)
    if source.kind == "preference":
        return preferences.method({"beta": beta})
    if source.trainer == "rloo":
        return taken("stage.kl.start", beta, source, "in the reward")
    sets = {"stage.kl.start": beta, "stage.kl.where": "loss", "stage.kl.kind": "k3"}
    return Outcome(verdict="taken", sets=sets, why="in the loss")


def max_length(value: Any, source: Source) -> Outcome:
    """Kedge never cuts the end of what is learnt."""
    if source.is_rl:
        return unneeded(f"{source.trainer} does not read it")
    keeps_end = source.get("truncation_mode") == "keep_end" or source.trainer == "kto"
    sets = {"stage.max_length": whole(value), "stage.too_long": "cut" if keeps_end else "drop"}
    why = "longer ones lose their beginning" if keeps_end else "longer ones are left out and counted: no end is cut off"
    return Outcome(verdict="changed", sets=sets, why=why)


def max_prompt(value: Any, source: Source) -> Outcome:
    if not source.is_rl:
        return told("`max_length` bounds prompt and answer together")
    sets = {"stage.max_prompt_tokens": whole(value), "stage.too_long": "cut"}
    return Outcome(verdict="taken", sets=sets, why="a longer prompt loses its beginning")


def packing(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("rows are packed without padding and do not see each other; it changes no number")
    return told(
        "`batch` counts conversations, not packed blocks of max_length tokens: raise it by as many as fill a block"
    )


def data(value: Any, source: Source) -> Outcome:
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


def mixture(value: Any, source: Source) -> Outcome:
    """The first path of a list of datasets stands for all of them."""
    count = sum(1 for name in source.given if re.fullmatch(r"datasets\[\d+\]\.path", name))
    files: list[str] = []
    for index in range(count):
        at = {key: source.given.get(f"datasets[{index}].{key}") for key in ("path", "name", "split", "data_files")}
        place = places.data_place(str(at["path"]), source, config=at["name"], split=at["split"], files=at["data_files"])
        files.append(place)
    chosen: Any = source.asked.data or (files[0] if count == 1 else files)
    return taken("stage.prompts" if source.is_rl else "stage.data", chosen, source)


def reward(value: Any, source: Source) -> Outcome:
    """Functions, with a model beside them, and their weights."""
    given: Any = source.get("reward_weights")
    weights = [number(weight) for weight in cast("list[Any]", given)] if isinstance(given, list) else None
    model = source.get("reward_model_name_or_path")
    why = "functions get `answers` and columns by name here (docs/from-trl.md)"
    return changed("stage.reward", rollouts.rewards(names(value), weights, model), source, why)


def reward_model(value: Any, source: Source) -> Outcome:
    if source.trainer == "ppo" or not source.get("reward_funcs"):
        return rollouts.reward_model(value, source)
    return told("a part of `reward`")


def peft(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return taken("stage.roles", "lora" if flag(value) else "separate", source)
    return taken("stage.lora", {}, source) if flag(value) else unneeded("all weights learn, as here")


def vllm(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("Kedge's own engine samples")
    url = source.get("vllm_server_base_url")
    why = "vLLM in an environment of its own, on a GPU of its own (docs/vllm.md)"
    if url and source.get("vllm_mode") == "server":
        return (
            refused("a key in a URL is never copied")
            if has_secret(str(url))
            else rollouts.vllm(why, servers=[str(url)])
        )
    if source.get("vllm_mode", "colocate") == "server":
        return rollouts.vllm(why)
    return rollouts.vllm(
        "on the GPUs that learn, in turn with it, in an environment of its own (docs/vllm.md)", gpus="shared"
    )


def model(value: Any, source: Source) -> Outcome:
    """Of PPO the policy has a field of its own, and this one names the tokenizer."""
    if source.given.get("sft_model_path"):
        return unneeded("sft_model_path is the policy, and has its tokenizer")
    return training.model(value, source)


def tensor_parallel(value: Any, source: Source) -> Outcome:
    if not flag(source.get("use_vllm", False)):
        return unneeded("vLLM does not sample")
    if source.get("vllm_server_base_url"):
        return unneeded("the server that runs says so")
    return taken("stage.generator.tensor_parallel", whole(value), source)


def clip_range(value: Any, source: Source) -> Outcome:
    low, high = (number(bound) for bound in cast("list[Any]", value))
    return (
        taken("stage.scores.clip", high, source) if low == -high else refused("scores are clipped on both sides alike")
    )


def stop(value: Any, source: Source) -> Outcome:
    return (
        unneeded("an answer ends with the end-of-sequence token")
        if value == "eos"
        else refused("only `eos` ends an answer")
    )
