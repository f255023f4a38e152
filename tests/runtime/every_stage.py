"""A small recipe with every kind of stage, and its data."""

from __future__ import annotations

import json
from pathlib import Path

RECIPE = """
kedge: 1
name: all
model: tiny
seed: 5
device: cpu
stages:
  prepare: {kind: data, files: [pairs.jsonl], heldout: 0.25}
  sft: {kind: sft, data: demos.jsonl, epochs: 2, batch: 4, max_length: 64, samples: 1, sample_tokens: 4}
  reward:
    {kind: reward, from: sft, data: prepare.train, heldout: prepare.heldout, members: 2, epochs: 1, batch: 4,
     max_length: 64, if_unfit: go_on}
  dpo: {kind: preference, from: sft, data: prepare.train, epochs: 1, batch: 4, max_length: 64, samples: 1}
  online:
    kind: preference
    from: sft
    batch: 4
    max_length: 64
    online: {rounds: 2, prompts: prompts.jsonl, reward: {kind: function, path: "reward.py:score"}, answers: 2,
             finished: false, max_prompt_tokens: 40, sampling: {max_new_tokens: 6}}
  best:
    {kind: best_of_n, from: sft, prompts: prompts.jsonl, reward: reward, n: 2, batch: 4, sampling: {max_new_tokens: 6}}
  group:
    {kind: group, from: sft, prompts: prompts.jsonl, reward: reward, iterations: 2, batch: 4, answers: 2,
     max_prompt_tokens: 32, sampling: {max_new_tokens: 6}, kl: {limit: 100}}
  ppo:
    {kind: ppo, from: sft, prompts: prompts.jsonl, reward: reward, gold: {kind: function, path: "reward.py:score"},
     iterations: 2, batch: 4, answers: 2, minibatches: 2, max_prompt_tokens: 32, sampling: {max_new_tokens: 6}}
  eval:
    {kind: evaluate, models: [sft, ppo], prompts: prompts.jsonl, reward: reward, max_new_tokens: 6}
  exam: {kind: exam, models: [sft, ppo], exams: [knowledge], limit: 6, template: plain}
"""


def write_recipe(home: Path) -> None:
    home.mkdir(parents=True, exist_ok=True)
    (home / "r.yaml").write_text(RECIPE)
    (home / "reward.py").write_text("def score(answers):\n    return [float(len(set(a.text))) for a in answers]\n")
    rows = range(16)
    _write(home / "prompts.jsonl", [{"prompt": f"question {row}"} for row in rows])
    _write(
        home / "pairs.jsonl", [{"prompt": f"q {row}", "chosen": f"good {row}", "rejected": f"bad{row}"} for row in rows]
    )
    _write(
        home / "demos.jsonl",
        [
            {"messages": [{"role": "user", "content": f"q {row}"}, {"role": "assistant", "content": f"a {row}"}]}
            for row in rows
        ],
    )


def _write(file: Path, rows: list[dict[str, object]]) -> None:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
