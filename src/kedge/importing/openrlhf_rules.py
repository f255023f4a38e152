"""What becomes of the options of OpenRLHF that are more than another name."""

from __future__ import annotations

from typing import Any, Final, cast

from kedge.importing import places, preferences, rollouts, training
from kedge.importing.rules import (
    Outcome,
    Source,
    changed,
    flag,
    number,
    refused,
    taken,
    unneeded,
    whole,
)

ESTIMATORS: Final = {
    "gae": "ppo",
    "reinforce": "reinforce++",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "grpo": "grpo",
}
OFFLOADED: Final = {
    "adam_offload": ("optimiser",),
    "ref_offload": ("reference",),
    "ref_reward_offload": ("reference", "reward"),
}
MANY: Final = 1_000_000
"""A bound of rows from which on it is none."""


def _numbers(value: Any) -> list[float]:
    return [number(part) for part in cast("list[Any]", value)] if isinstance(value, list) else [number(value)]


def train_batch(value: Any, source: Source) -> Outcome:
    """Rows of an optimiser step over all processes; in RL it cuts what was sampled into minibatches."""
    rows = whole(value)
    if not source.is_rl:
        return taken("stage.batch", rows, source)
    sampled = whole(source.get("rollout_batch_size")) * whole(source.get("n_samples_per_prompt"))
    minibatches = max(1, sampled // rows)
    return changed("stage.minibatches", minibatches, source, f"{sampled} answers by steps of {rows}")


def epochs(value: Any, source: Source) -> Outcome:
    return taken(
        "stage.epochs", whole(value), source, "passes over the answers of an iteration" if source.is_rl else ""
    )


def episodes(value: Any, source: Source) -> Outcome:
    return rollouts.passes(value, source, whole(source.get("rollout_batch_size")))


def estimator(value: Any, source: Source) -> Outcome:
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


def clip(value: Any, source: Source) -> Outcome:
    low, high = ([*_numbers(value), *_numbers(value)])[:2]
    if source.kind == "ppo":
        extra = {"stage.loss.policy.clip_high": high} if high != low else {}
        return Outcome(verdict="taken", sets={"stage.loss.policy.clip": low, **extra})
    if source.trainer in ("rloo",):
        return unneeded("rloo has no ratio")
    if high != low and source.trainer not in ("group_norm", "grpo"):
        why = f"the clip above, {high:g}, is not there for this method: both are {low:g}"
        return preferences.method({"clip": low}, why, is_same=False)
    return preferences.method({"clip": low, **({"clip_high": high} if high != low else {})})


def eps_clip(value: Any, source: Source) -> Outcome:
    return unneeded("eps_clip_low_high is set") if source.get("eps_clip_low_high") else clip(value, source)


def betas(value: Any, source: Source) -> Outcome:
    first, second = _numbers(value)
    sets = {**taken("optimiser.beta1", first, source).sets, **taken("optimiser.beta2", second, source).sets}
    return Outcome(verdict="taken", sets=sets)


def schedule(value: Any, source: Source) -> Outcome:
    outcome = training.schedule(value, source)
    why = "falls to 0, not to a tenth" if str(value) == "cosine_with_min_lr" else outcome.why
    return Outcome(verdict=outcome.verdict, sets=outcome.sets, why=why)


def kl(value: Any, source: Source) -> Outcome:
    where = "loss" if flag(source.get("use_kl_loss", False)) else "reward"
    sets: dict[str, Any] = {"stage.kl.start": number(value), "stage.kl.where": where}
    return Outcome(verdict="taken", sets=sets, why=f"in the {where}")


def score_clip(value: Any, source: Source) -> Outcome:
    low, high = _numbers(value)
    return (
        taken("stage.scores.clip", high, source) if low == -high else refused("scores are clipped on both sides alike")
    )


def data(value: Any, source: Source) -> Outcome:
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


def heldout(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return refused("stage `evaluate` measures on prompts of its own (docs/evaluate.md)")
    if not value:
        return training.eval_strategy("no", source)
    return taken("stage.heldout", places.data_place(str(value), source, split=source.get("eval_split")), source)


def lora_rank(value: Any, source: Source) -> Outcome:
    return taken("lora.rank", whole(value), source) if whole(value) > 0 else unneeded("all weights learn")


def ema(value: Any, source: Source) -> Outcome:
    return (
        taken("stage.ema", source.number("ema_beta", 0.992), source) if flag(value) else unneeded("it asks for nothing")
    )


def offload(value: Any, source: Source) -> Outcome:
    """All options that ask for it make one list, which each of them sets."""
    if not flag(value):
        return unneeded("it asks for nothing")
    if whole(source.get("zero_stage", 2)) == 3:
        return unneeded("weights in parts (zero_stage 3) stay on their GPUs: each process holds a part")
    wanted = {role for option, roles in OFFLOADED.items() if flag(source.get(option, False)) for role in roles}
    movable = ["optimiser"]
    if source.is_rl and not source.is_lora:
        movable.append("reference")
    if source.is_rl and source.get("reward_pretrain") and not source.get("remote_rm_url"):
        movable.append("reward")
    moved = [role for role in movable if role in wanted]
    if not moved:
        return unneeded("the reference shares the policy's weights, and no reward model is held here")
    return taken("stage.memory.offload", moved, source, "in the host's memory between turns")


def engines(value: Any, source: Source) -> Outcome:
    engines = whole(value)
    if engines == 0:
        return unneeded("Kedge's own engine samples")
    gpus = engines * whole(source.get("vllm_tensor_parallel_size", 1))
    if flag(source.get("colocate_all_models", False)) and not flag(source.get("async_train", False)):
        return rollouts.vllm("on the GPUs that learn, in turn with it (docs/vllm.md)", gpus="shared")
    return rollouts.vllm("on GPUs of its own, in an environment of its own (docs/vllm.md)", gpus=gpus)


def wandb(value: Any, source: Source) -> Outcome:
    return changed("trackers.wandb", {}, source, "the key is not copied: `wandb login`, or WANDB_API_KEY")


def ipo(value: Any, source: Source) -> Outcome:
    return preferences.method({"kind": "ipo"}) if flag(value) else unneeded("it asks for nothing")


def freeze(value: Any, source: Source) -> Outcome:
    steps = whole(value)
    return taken("stage.critic_warmup", steps, source) if steps > 0 else unneeded("the policy learns from the first")


def normalised(value: Any, source: Source) -> Outcome:
    return taken("stage.scores.normalise", "standard", source, "by running moments") if flag(value) else unneeded("")


def max_len(value: Any, source: Source) -> Outcome:
    if source.is_rl:
        return unneeded("prompt_max_len and generate_max_len bound both")
    sets = {"stage.max_length": whole(value), "stage.too_long": "drop"}
    return Outcome(verdict="changed", sets=sets, why="longer ones are left out and counted: no end is cut off")


def prompt_len(value: Any, source: Source) -> Outcome:
    return Outcome(verdict="taken", sets={"stage.max_prompt_tokens": whole(value), "stage.too_long": "cut"})


def actor_rate(value: Any, source: Source) -> Outcome:
    return taken("stage.actor.lr", number(value), source)


def filtering(value: Any, source: Source) -> Outcome:
    if not flag(value):
        return unneeded("it asks for nothing")
    return changed("stage.max_rounds", 10, source, "groups of equal scores are left out, for 10 batches at most")


def tensorboard(value: Any, source: Source) -> Outcome:
    return taken("trackers.tensorboard", {}, source)


def tensor_parallel(value: Any, source: Source) -> Outcome:
    if not _has_vllm(source):
        return unneeded("vLLM does not sample")
    return taken("stage.generator.tensor_parallel", whole(value), source)


def ahead(value: Any, source: Source) -> Outcome:
    """Batches that are sampled ahead of the policy."""
    if not flag(value):
        return unneeded("it asks for nothing")
    kind = "vllm" if _has_vllm(source) else "local"
    sets = {"stage.generator.kind": kind, "stage.generator.lag": whole(source.get("async_queue_size", 1))}
    return Outcome(verdict="taken", sets=sets, why="answers of a batch are at most so many versions old")


def _has_vllm(source: Source) -> bool:
    return whole(source.get("vllm_num_engines", 0)) > 0
