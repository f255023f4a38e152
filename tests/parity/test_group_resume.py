"""Kill -9 in the middle of RL without a critic, resume: the same metrics, samples and weights to the last bit.

With dynamic sampling, under which the place among the prompts is part of the state, and with greedy baselines.
"""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.testing.journals import records, wait_for

RECIPE = """
kedge: 1
name: {method}
seed: 5
model: ./tiny
device: cpu
stages:
  train:
    kind: group
    method: {method}
    roles: separate
    memory: {{dtype: float32}}
    reward: {{kind: function, path: "rules.py:plain"}}
    prompts: prompts.jsonl
    iterations: 8
    batch: 3
    answers: 2
    minibatches: 1
    micro_batch: 4
    max_prompt_tokens: 40
    sampling: {{max_new_tokens: 8}}
    actor: {{lr: 1e-2}}
    logging: {{every: 2, samples: 2}}
    checkpoints: {{every: 3}}
"""
RULES = 'def plain(answer):\n    return float(sum(one < "\\x80" for one in answer.text) > 5)\n'


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("group")
    make_tiny(home / "tiny", hidden=32, layers=2)
    (home / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"Say {one}"}) + "\n" for one in "abcdefg"))
    (home / "rules.py").write_text(RULES)
    for method in ("dapo", "remax"):
        (home / f"{method}.yaml").write_text(RECIPE.format(method=method))
    return home


@pytest.mark.slow
@pytest.mark.parametrize("method", ["dapo", "remax"])
def test_killed_and_resumed_it_is_the_same_run(method: str, home: Path, kedge: Any, tmp_path: Path) -> None:
    command = ("run", home / f"{method}.yaml", "--no-check", "--runs")
    assert kedge.run(*command, tmp_path / "whole") == 0, kedge.output.read_text()
    whole, cut = (tmp_path / name / method / "train" for name in ("whole", "cut"))
    resumed: list[str] = []
    for count in (1, 4, 7):  # before the first checkpoint, and behind each of the next two
        process = kedge.start(*command, tmp_path / "cut", *resumed)
        wait_for(cut / "metrics.jsonl", count)
        assert kedge.kill(process) == -signal.SIGKILL
        resumed = ["--resume"]
    assert kedge.run(*command, tmp_path / "cut", "--resume") == 0, kedge.output.read_text()
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(cut / journal) == records(whole / journal)
    metrics = records(whole / "metrics.jsonl")
    assert len(metrics) == 8
    if method == "dapo":  # so that the place among the prompts is not where the number of a batch says
        assert any(one["group/rounds"] > 1 for one in metrics[:3])
    assert (cut / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
