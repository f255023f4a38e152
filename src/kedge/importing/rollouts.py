"""What the RL trainers of other tools have in common: who scores, how answers are drawn, how many batches there are."""

from __future__ import annotations

import math
from typing import Any, Final

from kedge.core.urls import check_url, has_secret
from kedge.importing import places
from kedge.importing.rules import Outcome, Source, changed, number, refused, taken, unneeded, whole

FUNCTIONS: Final[dict[str, dict[str, Any]]] = {
    "accuracy_reward": {"kind": "math"},
    "think_format_reward": {"kind": "regex", "pattern": r"(?s)<think>(?!.*<think>).*?</think>.*", "must": "be"},
}
VLLM_PYTHON: Final = ".venv-vllm/bin/python"
"""Where `make vllm` puts the interpreter that has vLLM."""
"""Rewards that TRL has by name, and what computes the same here."""


def function(name: str) -> dict[str, Any]:
    """A reward function of Python by its dotted name: `rewards.short` is `short` in rewards.py."""
    if name in FUNCTIONS:
        return FUNCTIONS[name]
    module, _, attribute = name.rpartition(".")
    if not module:
        raise ValueError(f"{name!r} is no reward here; write module.function, or one of {', '.join(FUNCTIONS)}")
    return {"kind": "function", "path": f"{module.replace('.', '/')}.py:{attribute}"}


def rewards(functions: list[str], weights: list[float] | None, model: str | None) -> dict[str, Any]:
    """One source of rewards, or several as a weighted sum."""
    parts: dict[str, dict[str, Any]] = {"model": {"kind": "model", "from": model}} if model else {}
    parts |= {name.rpartition(".")[2]: function(name) for name in functions}
    if len(parts) == 1 and not weights:
        return next(iter(parts.values()))
    weighted = dict(zip(parts, weights, strict=True)) if weights else {}
    return {"kind": "mix", "parts": parts, **({"weights": weighted} if weights else {})}


def reward_model(value: Any, source: Source) -> Outcome:
    if source.asked.reward:
        return changed("stage.reward", source.asked.reward, source, "--reward stands in its place")
    return taken("stage.reward", places.place(str(value), source), source)


def reward_server(value: Any, source: Source) -> Outcome:
    """A server that scores, with a protocol of Kedge's own."""
    url = str(value).split(",")[0].strip()
    if url.endswith(".py") or ".py:" in url:
        why = "its functions have other parameters here: `answers` and columns by name (docs/rewards.md)"
        path = places.place(url, source) + ("" if ":" in url else ":reward_func")
        return changed("stage.reward", {"kind": "function", "path": path}, source, why)
    if has_secret(url):
        return refused(
            "a key in a URL is never copied: `reward: {kind: http, url: …, key_variable: NAME}`, and --reward"
        )
    why = "the server is asked in Kedge's way, {answers: […]} for {scores: […]} (docs/rewards.md)"
    return changed("stage.reward", {"kind": "http", "url": check_url(url)}, source, why)


def iterations(prompts: float | None, batch: int, source: Source, said: str) -> Outcome:
    """So many prompts in all, by batches."""
    if prompts is None:
        return refused("the number of prompts is not known here: set `iterations` to passes × prompts / batch")
    return changed(
        "stage.iterations", max(1, math.ceil(prompts / batch)), source, f"{said}, {batch} prompts an iteration"
    )


def passes(value: Any, source: Source, batch: int) -> Outcome:
    """Passes over the prompts as iterations."""
    times = number(value)
    rows = source.num_rows
    return iterations(times * rows if rows else None, batch, source, f"{times:g} pass(es) over {rows} prompts")


def top_k(value: Any, source: Source) -> Outcome:
    kept = whole(value)
    return taken("stage.sampling.top_k", kept, source) if kept > 0 else unneeded("all tokens, as here")


def vllm(why: str, **settings: Any) -> Outcome:
    """vLLM as the generator: servers that run already, or ones that Kedge starts."""
    places_of = settings if "servers" in settings else {**settings, "python": VLLM_PYTHON}
    sets = {"stage.generator.kind": "vllm", **{f"stage.generator.{key}": value for key, value in places_of.items()}}
    return Outcome(verdict="changed", sets=sets, why=why)


def exactly(total: int, part: int, names: str) -> int:
    if part < 1 or total % part:
        raise ValueError(f"{names}: {total} is not divisible by {part}")
    return total // part
