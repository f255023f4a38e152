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
    start = f" starting from {_named(settings, 'from')}" if settings.get("from") else ""
    return f"A stage of kind `{kind}`{start}."


def _named(settings: Mapping[str, Any], key: str) -> str:
    """A model, a reward or files, by the name in the settings.

    >>> settings = {"data": ["a.jsonl", "b.jsonl"], "reward": {"kind": "regex"}}
    >>> settings["gold"] = {"kind": "callable", "name": "m.f"}
    >>> _named(settings, "data"), _named(settings, "from"), _named(settings, "reward"), _named(settings, "gold")
    ('`a.jsonl` and `b.jsonl`', "the recipe's model", 'a reward of kind `regex`', 'the function `m.f`')
    """
    value = settings.get(key)
    if value is None:
        return "the recipe's model"
    if isinstance(value, Mapping) and value.get("kind") == "callable":
        return f"the function `{value.get('name', '?')}`"
    if isinstance(value, Mapping):
        return f"a reward of kind `{value.get('kind', '?')}`"
    if isinstance(value, (list, tuple)):
        return listed([f"`{part}`" for part in value]) if value else "nothing"
    return f"`{value}`"


def _sft(settings: Mapping[str, Any]) -> str:
    return (
        f"Supervised fine-tuning: {_named(settings, 'from')} imitates the conversations of {_named(settings, 'data')}, "
        f"{_passes(settings)}, {settings.get('batch')} conversations a step."
    )


def _reward(settings: Mapping[str, Any]) -> str:
    members = settings.get("members", 1)
    what = "A reward model" if members == 1 else f"An ensemble of {members} reward models"
    data = _named(settings, "data")
    return f"{what}: {_named(settings, 'from')} learns to score answers from {data}, {_passes(settings)}."


def _ppo(settings: Mapping[str, Any]) -> str:
    return f"PPO: {_on_rollouts(settings)}."


def _group(settings: Mapping[str, Any]) -> str:
    rivals = " that are compared with each other" if (settings.get("answers") or 1) > 1 else ""
    return f"{_method(settings)}, without a critic: {_on_rollouts(settings, rivals=rivals)}."


def _on_rollouts(settings: Mapping[str, Any], *, rivals: str = "") -> str:
    answers = "one answer" if settings.get("answers") == 1 else f"{settings.get('answers')} answers"
    sentence = (
        f"the policy {_named(settings, 'from')} is improved against {_named(settings, 'reward')} on prompts of "
        f"{_named(settings, 'prompts')}, {settings.get('iterations')} iterations of {settings.get('batch')} prompts × "
        f"{answers}{rivals}"
    )
    kl = settings.get("kl") or {}
    is_held = kl.get("start", 1) > 0 or kl.get("limit") is not None
    sentence += ", while its reference holds it" if is_held else ", and nothing holds it to its reference"
    if kl.get("target") is not None:
        sentence += f" near a KL of {kl['target']:g} nats a sequence"
    if kl.get("limit") is not None:
        sentence += f" (past {kl['limit']:g} it {'goes back' if kl.get('on_limit') == 'rollback' else 'stops'})"
    return sentence


def _preference(settings: Mapping[str, Any]) -> str:
    online: Mapping[str, Any] | None = settings.get("online")
    start, noun = _named(settings, "from"), "answers" if _kind(settings) == "kto" else "pairs"
    if online is None:
        reference = "no reference" if _kind(settings) in _WITHOUT_REFERENCE else "its start as the reference"
        return (
            f"{_method(settings)}: {start} learns from the preferences of {_named(settings, 'data')} directly, "
            f"{_passes(settings)}, {settings.get('batch')} {noun} a step, with {reference}."
        )
    sides = "every two that score apart" if online.get("pairs") == "all" else "the best against the worst"
    beside = f", beside pairs of {_named(settings, 'data')}" if settings.get("data") else ""
    return (
        f"{_method(settings)}, online: in each of {online.get('rounds')} rounds {start} answers prompts of "
        f"{_named(online, 'prompts')} {online.get('answers')} times, {_named(online, 'reward')} scores the "
        f"answers, and it learns from pairs of them ({sides}){beside}."
    )


def _best_of_n(settings: Mapping[str, Any]) -> str:
    start, n = _named(settings, "from"), settings.get("n")
    choice = f"its {n} answers to each prompt of {_named(settings, 'prompts')}, chosen by {_named(settings, 'reward')}"
    method: Mapping[str, Any] = settings.get("method") or {}
    if _kind(settings) == "bond":
        return (
            f"Best of {n}, distilled: {start} is moved to the distribution of the best of {choice}, in "
            f"{method.get('steps')} steps."
        )
    rounds = method.get("rounds", 1)
    when = "in one round" if rounds == 1 else f"in {rounds} rounds"
    return f"Best of {n}, by rejection sampling: {start} imitates the best of {choice}, {when}."


def _data(settings: Mapping[str, Any]) -> str:
    heldout = 100 * settings.get("heldout", 0)
    return f"Data: {_named(settings, 'files')} cleaned and split by prompt, {heldout:g} % held out."


def _evaluate(settings: Mapping[str, Any]) -> str:
    return f"Evaluation: the answers of {_named(settings, 'models')} to {_named(settings, 'prompts')}, compared."


def _exam(settings: Mapping[str, Any]) -> str:
    return f"Exams: {_named(settings, 'exams')} put to {_named(settings, 'models')}, graded item by item."


def _tasks(settings: Mapping[str, Any]) -> str:
    return f"Tasks for people: what they are asked about the answers of {_named(settings, 'models')}."


def _revise(settings: Mapping[str, Any]) -> str:
    who = (settings.get("by") or {}).get("model", "the model itself")
    times = settings.get("times", 4)
    return f"Constitutional AI, the supervised half: answers, criticised and revised {times} times by {who}."


def _label(settings: Mapping[str, Any]) -> str:
    by: Any = settings.get("by") or {}
    labellers: list[Any] = by if isinstance(by, list) else [by]
    if all(labeller.get("kind") == "judge" for labeller in labellers):
        judges = " and ".join(str(labeller.get("name") or labeller.get("model")) for labeller in labellers)
        return f"Labels by a machine: what {judges} says of the tasks, both orders of every comparison."
    project = labellers[0].get("project", "a project")
    return f"Labels: what people of {project} say of the tasks, settled by {settings.get('settle', 'votes')}."


def _gate(settings: Mapping[str, Any]) -> str:
    candidate, baseline = _named(settings, "candidate"), _named(settings, "baseline")
    return f"Gate: may {candidate} go out? Decided beside {baseline} by rules, exams and badcases."


def _drift(settings: Mapping[str, Any]) -> str:
    compared = [str(settings[name]) for name in ("policy", "reward") if settings.get(name)]
    return f"Drift: {' and '.join(compared) or 'nothing'} beside the round before."


def _passes(settings: Mapping[str, Any]) -> str:
    epochs = settings.get("epochs", 1)
    return "one pass over them" if epochs == 1 else f"{epochs:g} passes over them"


def _kind(settings: Mapping[str, Any]) -> str:
    """The method of a stage that has several, as a recipe names it."""
    method: Any = settings.get("method")
    return str(method.get("kind")) if isinstance(method, Mapping) else str(method)


def _method(settings: Mapping[str, Any]) -> str:
    """
    >>> _method({"method": {"kind": "dr_grpo"}}), _method({"method": "reinforce++"}), _method({"method": "tdpo"})
    ('Dr. GRPO', 'REINFORCE++', 'TDPO')
    """
    return _METHODS.get(_kind(settings), _kind(settings).upper())


_SENTENCES: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "sft": _sft,
    "reward": _reward,
    "ppo": _ppo,
    "group": _group,
    "preference": _preference,
    "best_of_n": _best_of_n,
    "data": _data,
    "evaluate": _evaluate,
    "exam": _exam,
    "gate": _gate,
    "tasks": _tasks,
    "revise": _revise,
    "label": _label,
    "drift": _drift,
}
