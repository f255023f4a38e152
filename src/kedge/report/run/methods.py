"""What was run, in one sentence from the settings of a stage: one function a kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kedge.report.words import listed

_METHODS = {"grpo": "GRPO", "dr_grpo": "Dr. GRPO", "remax": "ReMax", "simpo": "SimPO"}
"""Names that are not written in capitals throughout."""
_WITHOUT_REFERENCE = ("orpo", "simpo", "cpo")


def what_was_run(kind: str, settings: Mapping[str, Any]) -> str:
    """One sentence from the settings of a stage."""
    if kind in _SENTENCES:
        return _SENTENCES[kind](settings)
    start = f" starting from {_named(settings['from'])}" if settings.get("from") else ""
    return f"A stage of kind `{kind}`{start}."


def _named(value: Any) -> str:
    """
    >>> _named(["a.jsonl", "b.jsonl"]), _named(None), _named({"kind": "regex"})
    ('`a.jsonl` and `b.jsonl`', "the recipe's model", 'a reward of kind `regex`')
    """
    if value is None:
        return "the recipe's model"
    if isinstance(value, Mapping):
        return f"a reward of kind `{value.get('kind', '?')}`"
    if isinstance(value, (list, tuple)):
        return listed([f"`{part}`" for part in value]) if value else "nothing"
    return f"`{value}`"


def _sft(of: Mapping[str, Any]) -> str:
    return (
        f"Supervised fine-tuning: {_named(of.get('from'))} imitates the conversations of {_named(of.get('data'))}, "
        f"{_passes(of)}, {of.get('batch')} conversations a step."
    )


def _reward(of: Mapping[str, Any]) -> str:
    members = of.get("members", 1)
    what = "A reward model" if members == 1 else f"An ensemble of {members} reward models"
    return f"{what}: {_named(of.get('from'))} learns to score answers from {_named(of.get('data'))}, {_passes(of)}."


def _ppo(of: Mapping[str, Any]) -> str:
    return f"PPO: {_on_rollouts(of)}."


def _group(of: Mapping[str, Any]) -> str:
    rivals = " that are compared with each other" if (of.get("answers") or 1) > 1 else ""
    return f"{_method(of)}, without a critic: {_on_rollouts(of, rivals=rivals)}."


def _on_rollouts(of: Mapping[str, Any], *, rivals: str = "") -> str:
    answers = "one answer" if of.get("answers") == 1 else f"{of.get('answers')} answers"
    sentence = (
        f"the policy {_named(of.get('from'))} is improved against {_named(of.get('reward'))} on prompts of "
        f"{_named(of.get('prompts'))}, {of.get('iterations')} iterations of {of.get('batch')} prompts × "
        f"{answers}{rivals}"
    )
    kl = of.get("kl") or {}
    is_held = kl.get("start", 1) > 0 or kl.get("limit") is not None
    sentence += ", while its reference holds it" if is_held else ", and nothing holds it to its reference"
    if kl.get("target") is not None:
        sentence += f" near a KL of {kl['target']:g} nats a sequence"
    if kl.get("limit") is not None:
        sentence += f" (past {kl['limit']:g} it {'goes back' if kl.get('on_limit') == 'rollback' else 'stops'})"
    return sentence


def _preference(of: Mapping[str, Any]) -> str:
    online: Mapping[str, Any] | None = of.get("online")
    start, noun = _named(of.get("from")), "answers" if _kind(of) == "kto" else "pairs"
    if online is None:
        held = "no reference" if _kind(of) in _WITHOUT_REFERENCE else "its start as the reference"
        return (
            f"{_method(of)}: {start} learns from the preferences of {_named(of.get('data'))} directly, {_passes(of)}, "
            f"{of.get('batch')} {noun} a step, with {held}."
        )
    sides = "every two that score apart" if online.get("pairs") == "all" else "the best against the worst"
    beside = f", beside pairs of {_named(of.get('data'))}" if of.get("data") else ""
    return (
        f"{_method(of)}, online: in each of {online.get('rounds')} rounds {start} answers prompts of "
        f"{_named(online.get('prompts'))} {online.get('answers')} times, {_named(online.get('reward'))} scores the "
        f"answers, and it learns from pairs of them ({sides}){beside}."
    )


def _best_of_n(of: Mapping[str, Any]) -> str:
    start, n = _named(of.get("from")), of.get("n")
    choice = f"its {n} answers to each prompt of {_named(of.get('prompts'))}, chosen by {_named(of.get('reward'))}"
    method: Mapping[str, Any] = of.get("method") or {}
    if _kind(of) == "distil":
        return (
            f"Best of {n}, distilled: {start} is moved to the distribution of the best of {choice}, in "
            f"{method.get('steps')} steps."
        )
    rounds = method.get("rounds", 1)
    when = "in one round" if rounds == 1 else f"in {rounds} rounds"
    return f"Best of {n}, by rejection sampling: {start} imitates the best of {choice}, {when}."


def _data(of: Mapping[str, Any]) -> str:
    return f"Data: {_named(of.get('files'))} cleaned and split by prompt, {100 * of.get('heldout', 0):g} % held out."


def _evaluate(of: Mapping[str, Any]) -> str:
    return f"Evaluation: the answers of {_named(of.get('models'))} to {_named(of.get('prompts'))}, compared."


def _passes(of: Mapping[str, Any]) -> str:
    epochs = of.get("epochs", 1)
    return "one pass over them" if epochs == 1 else f"{epochs:g} passes over them"


def _kind(of: Mapping[str, Any]) -> str:
    """The method of a stage that has several, as a recipe names it."""
    method: Any = of.get("method")
    return str(method.get("kind")) if isinstance(method, Mapping) else str(method)


def _method(of: Mapping[str, Any]) -> str:
    """
    >>> _method({"method": {"kind": "dr_grpo"}}), _method({"method": "reinforce++"}), _method({"method": "tdpo"})
    ('Dr. GRPO', 'REINFORCE++', 'TDPO')
    """
    return _METHODS.get(_kind(of), _kind(of).upper())


_SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "sft": _sft,
    "reward": _reward,
    "ppo": _ppo,
    "group": _group,
    "preference": _preference,
    "best_of_n": _best_of_n,
    "data": _data,
    "evaluate": _evaluate,
}
