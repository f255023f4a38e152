"""Kill −9 in the middle of preference training, resume: the same metrics, samples and weights to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.testing import toy
from kedge.testing.journals import records, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
RECIPE = """
kedge: 1
name: NAME
seed: 5
model: ./tiny
stages:
  train:
    kind: preference
    batch: 8
    micro_batch: 3
    epochs: 2
    max_length: 192
    samples: 2
    sample_tokens: 6
    optimiser: {lr: 3e-3}
    eval: {every: 5}
    checkpoints: {every: 3}
"""
DATA = "    data: pairs.jsonl\n"
ONLINE = """
    online:
      rounds: 3
      prompts: prompts.jsonl
      reward: {kind: function, path: "rules.py:plain"}
      answers: 3
      finished: false
      offline: 0.5
      max_prompt_tokens: 120
      sampling: {max_new_tokens: 6}
      rows: 16
"""
EXTRA = {
    "dpo-lora": f"{DATA}    method: dpo\n    lora: {{rank: 2, dropout: 0.2}}\n",
    "kto": f"{DATA}    method: kto\n",
    "tdpo": f"{DATA}    method: tdpo\n",
    "online": f"    method: dpo\n{ONLINE}",
    "online-mixed": f"{DATA}    method: kto\n    lora: {{rank: 2, dropout: 0.2}}\n{ONLINE}",
}
RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("parity-preference")
    make_tiny(home / "tiny", hidden=32, layers=1)
    (home / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy.pairs(110, 3)))
    (home / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy.prompts(40, 4)))
    (home / "rules.py").write_text(RULES)
    for name, extra in EXTRA.items():
        (home / f"{name}.yaml").write_text(RECIPE.replace("NAME", name) + extra)
    return home


@pytest.fixture
def start(home: Path) -> Callable[..., subprocess.Popen[bytes]]:
    """The command, in a process and with a cache of its own: a resumed run must not live on another run's numbers."""

    def begin(name: str, runs: Path, *more: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "kedge.cli", "run", str(home / f"{name}.yaml"), "--runs", str(runs), *more]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "KEDGE_CACHE": str(runs / "cache")}
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)

    return begin


@pytest.mark.parametrize("name", EXTRA)
def test_killed_and_resumed_it_is_the_same_run(
    name: str, start: Callable[..., subprocess.Popen[bytes]], tmp_path: Path
) -> None:
    assert start(name, tmp_path / "whole", "--no-check").wait() == 0
    whole = tmp_path / "whole" / name / "train"
    total = len(records(whole / "metrics.jsonl"))
    assert total > 20
    resumed: list[str] = []
    # before the first checkpoint, between two (online: in the first round), in the middle, near the end
    for count in (1, 8, total // 2, total - 3):
        child = start(name, tmp_path / "cut", "--no-check", *resumed)
        try:
            wait_for(tmp_path / "cut" / name / "train/metrics.jsonl", count)
        finally:
            child.kill()
            ended = child.wait()
        assert ended == -signal.SIGKILL
        resumed = ["--resume"]
    assert start(name, tmp_path / "cut", "--resume").wait() == 0
    cut = tmp_path / "cut" / name / "train"
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(cut / journal) == records(whole / journal)
    assert (cut / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
