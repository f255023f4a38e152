"""A recipe of two rounds that takes seconds: a tiny model, a rule that labels, a reward model, PPO, an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kedge.models.loading.tiny import make_tiny

LEARN = {"lr": 1e-2, "schedule": "constant", "warmup": 0.0, "eps": 1e-5}
RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8
"""
ANY = dict.fromkeys(
    (
        *("kl_previous", "kl_first", "spearman", "flips", "forgetting", "ece", "shift"),
        *("length_ratio", "refusal_rise", "distinct_ratio", "win_rate"),
    )
)
"""No limit of drift: so small a model drifts at once."""
ROUNDS: dict[str, Any] = {
    "count": 2,
    "first": {"ppo": "sft", "reward": None},
    "keep": {"weight_halves_after": 1},
    "drift": {"count": 8, "limits": ANY},
}
STAGES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "data": "demonstrations.jsonl", "max_steps": 2, "batch": 4, "max_length": 64},
    "ask": {
        "kind": "evaluate",
        "models": ["sft", "previous.ppo"],
        "answers": 2,
        "prompts": "prompts.jsonl",
        "reward": {"kind": "function", "path": "rules.py:plain"},
        "max_new_tokens": 6,
    },
    "prepare": {"kind": "data", "files": ["ask.pairs"], "heldout": 0.25},
    "reward": {
        "kind": "reward",
        "from": "sft",
        "data": "prepare.train",
        "heldout": "prepare.heldout",
        "max_steps": 2,
        "batch": 8,
        "max_length": 64,
        "if_unfit": "go_on",
        "optimiser": {"lr": 1e-3},
    },
    "ppo": {
        "kind": "ppo",
        "from": "previous.ppo",
        "reward": "reward",
        "prompts": "prompts.jsonl",
        "roles": "separate",
        "memory": {"dtype": "float32"},
        "iterations": 2,
        "batch": 4,
        "epochs": 1,
        "minibatches": 1,
        "micro_batch": 4,
        "max_prompt_tokens": 40,
        "sampling": {"max_new_tokens": 6},
        "actor": LEARN,
        "critic": LEARN,
        "checkpoints": {"every": 1},
    },
    "eval": {
        "kind": "evaluate",
        "models": ["previous.ppo", "ppo"],
        "prompts": "heldout.jsonl",
        "reward": "reward",
        "gold": {"kind": "function", "path": "rules.py:plain"},
        "max_new_tokens": 6,
    },
}


def write_rounds(
    place: Path, *, rounds: Mapping[str, Any] | None = None, stages: Mapping[str, Mapping[str, Any]] | None = None
) -> Path:
    """The recipe with its files below `place`; `rounds` and `stages` go over those above, key by key."""
    place.mkdir(parents=True, exist_ok=True)
    make_tiny(place / "tiny", hidden=32, layers=2)
    words = [a + b for a in "abcdef" for b in "ghijkl"]
    demonstrations = [
        {"messages": [{"role": "user", "content": f"Say {word}"}, {"role": "assistant", "content": f"{word} it is."}]}
        for word in words[:8]
    ]
    files = {
        "demonstrations": demonstrations,
        "prompts": [{"prompt": f"Say {word}"} for word in words[8:28]],
        "heldout": [{"prompt": f"Say {word}"} for word in words[28:]],
    }
    for name, rows in files.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "rules.py").write_text(RULES)
    changed = {name: {**STAGES.get(name, {}), **stage} for name, stage in (stages or {}).items()}
    recipe = {
        "kedge": 1,
        "name": "small",
        "seed": 5,
        "model": str(place / "tiny"),
        "device": "cpu",
        "rounds": {**ROUNDS, **(rounds or {})},
        "stages": {**STAGES, **changed},
    }
    file = place / "small.yaml"
    file.write_text(json.dumps(recipe, indent=1))
    return file
