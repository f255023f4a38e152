"""Two processes and a stand-in for vLLM: the first one starts it, sends weights and asks, and both learn alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.processes import stages
from tests.processes.pool import Pool
from tests.processes.test_training import assert_near
from tests.rollout.fake_vllm import interpreter

from kedge.core.world import ALONE
from kedge.testing.contracts.roles import assert_same_state


def settings_of(folder: Path, *, dies_at: int = 0) -> dict[str, Any]:
    folder.mkdir()
    python = str(interpreter(folder, dies_at=dies_at))
    generator = {"kind": "vllm", "python": python, "gpus": 0, "mismatch": 1e-4, "lag": 1}
    return {"generator": generator, "iterations": 3, "checkpoints": {"every": 1}}


def test_the_first_of_two_processes_asks_vllm_for_both_and_starts_it_again_when_it_dies(
    pool: Pool, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batches are under way while checkpoints are written and while the server dies in the second one."""
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    name = "ppo, lora"
    expected = stages.run_stage(ALONE, home, name, tmp_path / "one", settings_of(tmp_path / "undisturbed"))
    dying = settings_of(tmp_path / "dying", dies_at=8)  # batches have 5 answers
    first, second = pool.run(stages.run_stage, home, name, tmp_path / "two", dying)
    assert [line["age/mean"] for line in first["metrics"]] == [0, 1, 1]
    assert first["metrics"][0]["policy/mismatch"] < 1e-5
    assert first["events"].count("vllm.restarted") == 1
    assert "vllm.servers" not in second["events"]
    assert (tmp_path / "two/process-0/vllm/server-0.log").exists()
    assert not (tmp_path / "two/process-1/vllm").exists()
    for part in ("metrics", "samples", "checkpoints"):
        assert_same_state(second[part], first[part], part)
    for part in ("metrics", "samples", "model"):
        assert_near(first[part], expected[part], within=1e-5)
