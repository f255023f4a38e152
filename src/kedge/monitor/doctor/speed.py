"""Where the time of a run goes: the slowest part of its steps and the setting that moves it, and which process keeps
the others waiting. Nothing here makes a run unhealthy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from kedge.core.metric_table import as_table
from kedge.core.world import Spent
from kedge.monitor.doctor.diagnosis import History
from kedge.monitor.doctor.settings_changes import has_setting, value_at

MIN_STEPS: Final = 3
"""The first step warms up; fewer than this say little of the others."""
SLOWER: Final = 1.1
"""A process that is busy so many times as long as the others are keeps them waiting."""
MUCH_WAITING: Final = 0.3
"""A share of waiting above which a healthy run is told of it in its verdict."""


@dataclass(frozen=True, slots=True)
class _Hint:
    """A setting that makes a part shorter; no hint where the recipe has it at `best` already."""

    key: str
    words: str
    best: Any = None


@dataclass(frozen=True, slots=True)
class _Part:
    """A part of a step, by its metrics below `time/`; `inside` are the parts that it consists of."""

    words: str
    hints: tuple[_Hint, ...] = ()
    inside: Mapping[str, _Part] | None = None


_ROWS = "sample more rows at once"
_PASSES = _Hint("micro_batch", "`auto` finds the largest passes that fit", best="auto")
_EPOCHS = _Hint("epochs", "fewer passes over each batch", best=1)
_UPDATE = (_PASSES, _EPOCHS)
_REFERENCE = _Hint("roles", "`trunk` shares layers between the roles", best="trunk")
_REWARD = _Hint("reward", "a smaller reward model, or a server that answers more requests at once")
_OLD = _Hint("loss.policy.old_logprobs", "`sampled` takes those of the generator", best="sampled")
_PARTS: Final[Mapping[str, _Part]] = {
    "generate": _Part(
        "sampling answers",
        (
            _Hint("memory.generate_rows", _ROWS),
            _Hint("rows", _ROWS),
            _Hint("sampling.max_new_tokens", "allow shorter answers"),
        ),
    ),
    "judge": _Part(
        "judging answers",
        (_REWARD,),
        {
            "reward_score": _Part("scoring answers", (_REWARD,)),
            "policy_logprobs": _Part("log-probs of the policy", (_OLD,)),
            "reference_logprobs": _Part("log-probs of the reference", (_REFERENCE,)),
            "critic_values": _Part("values of the critic", (_REFERENCE,)),
        },
    ),
    "update": _Part(
        "learning",
        _UPDATE,
        {
            "policy_update": _Part("learning of the policy", _UPDATE),
            "critic_update": _Part("learning of the critic", _UPDATE),
        },
    ),
    "gold_score": _Part("scores of the gold source", (_Hint("logging.gold_every", "ask it less often"),)),
    "data": _Part("reading batches", (_Hint("data", "put the data and the cache on a faster disk"),)),
    "exam": _Part("looks at the policy", (_Hint("eval.every", "look less often"), _Hint("eval.limit", "ask less"))),
    "evaluate": _Part("held-out measurements", (_Hint("eval.every", "measure less often"),)),
    "save": _Part("saving checkpoints", (_Hint("checkpoints.every", "save less often"),)),
    "sync": _Part("bringing new weights to the generator"),
}


def notes(history: History) -> list[str]:
    """The slowest part of the steps, and how the processes spent their time where there are several."""
    times = process_times(history.metrics)
    lines = [line for line in (_slowest_part(history),) if line]
    if times:
        lines.append(f"its {len(times)} processes are {_shares(times)} of the time")
        lines += [line for line in (_kept_waiting(times),) if line]
    return lines


def notice(history: History) -> str:
    """A sentence on processes that wait for each other too long; empty where they do not."""
    times = process_times(history.metrics)
    if not times or share_of(times, "waiting") <= MUCH_WAITING:
        return ""
    who = _kept_waiting(times) or "no single one is slower, so the rows may be too few to share: a larger batch helps"
    return f"But its processes wait for each other {_percent(share_of(times, 'waiting'))} of the time: {who}."


def process_times(metrics: Sequence[Mapping[str, Any]]) -> list[Spent]:
    """The seconds of each process, by rank; none for a run of one. Where a resumed run had another number of them, of
    those that it has now."""
    table = as_table(metrics)
    busy = [name for name in table.names if name.startswith("time/busy/")]
    if not busy:
        return []
    count_R = np.sum([table.present(name) for name in busy], axis=0)
    size = int(count_R[np.flatnonzero(count_R)[-1]])
    is_now_R = count_R == size

    def seconds(what: str, rank: int) -> float:
        return float(np.nansum(table.values(f"time/{what}/{rank}")[is_now_R]))

    return [
        Spent(busy=seconds("busy", rank), communicating=seconds("communicate", rank), waiting=seconds("wait", rank))
        for rank in range(size)
    ]


def share_of(times: Sequence[Spent], what: str) -> float:
    """The share of "busy", "communicating" or "waiting" in the time of all processes.

    >>> share_of([Spent(busy=8, communicating=1, waiting=1), Spent(busy=5, communicating=1, waiting=4)], "waiting")
    0.25
    """
    total = sum(time.busy + time.communicating + time.waiting for time in times)
    return sum(getattr(time, what) for time in times) / total if total else 0.0


def slowest_process(times: Sequence[Spent]) -> tuple[int, float] | None:
    """The process that is busy longest, and how many times as long as the others; None where they are about equal.

    >>> slowest_process([Spent(busy=6, communicating=1, waiting=3), Spent(busy=9, communicating=1, waiting=0)])
    (1, 1.5)
    """
    rank = max(range(len(times)), key=lambda rank: times[rank].busy)
    others = [time.busy for other, time in enumerate(times) if other != rank]
    mean = sum(others) / len(others) if others else 0.0
    return (rank, times[rank].busy / mean) if mean and times[rank].busy > SLOWER * mean else None


def _kept_waiting(times: Sequence[Spent]) -> str:
    slowest = slowest_process(times)
    if slowest is None:
        return ""
    rank, factor = slowest
    why = (
        "it alone writes the run folder (`checkpoints.every`, `logging.samples`) and asks trackers"
        if rank == 0
        else "its device is slower or shared with others, or a reward takes longer there"
    )
    return f"process {rank} keeps the others waiting: it is busy {_percent(factor - 1)} longer than they are; {why}"


def _shares(times: Sequence[Spent]) -> str:
    busy, communicating, waiting = (_percent(share_of(times, what)) for what in ("busy", "communicating", "waiting"))
    return f"busy {busy}, communicating {communicating} and waiting {waiting}"


def _slowest_part(history: History) -> str:
    """In words; empty where the parts of the steps were not measured, or in too few of them."""
    table = as_table(history.metrics)
    whole = float(np.nansum(table.values("time/step")))
    seconds = {name: _sum(history, name) for name in _PARTS}
    if int(table.present("time/step").sum()) < MIN_STEPS or not whole or not any(seconds.values()):
        return ""
    name = max(seconds, key=lambda name: seconds[name])
    part, spent = _PARTS[name], seconds[name]
    for inner, inner_part in (part.inside or {}).items():
        if _sum(history, inner) > spent / 2:
            part, spent = inner_part, _sum(history, inner)
            break
    hint = next((hint for hint in part.hints if _is_open(hint, history.settings)), None)
    advice = f"; to move it: `{hint.key}` ({hint.words})" if hint else ""
    return f"the slowest part of a step is {part.words}: {_percent(spent / whole)} of the time{advice}"


def _is_open(hint: _Hint, settings: Mapping[str, Any]) -> bool:
    return has_setting(settings, hint.key) and (hint.best is None or value_at(settings, hint.key) != hint.best)


def _sum(history: History, name: str) -> float:
    return float(np.nansum(as_table(history.metrics).values(f"time/{name}")))


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"
