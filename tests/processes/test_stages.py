"""Every kind of stage on two processes: the metrics, samples and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.processes import stages
from tests.processes.pool import Pool
from tests.processes.test_training import assert_near

from kedge.core.world import ALONE
from kedge.testing.contracts.roles import assert_same_state

RELATIVES = ("reward", "kto", "ppo, trunk", "remax", "bond")
"""Stages that others stand for: they train and are shared out by the same code."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.slow if name in RELATIVES else ()) for name in stages.STAGES],
)
def test_a_stage_gives_on_two_processes_what_it_gives_on_one(
    pool: Pool, home: Path, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    expected = stages.run_stage(ALONE, home, name, tmp_path / "one")
    first, second = pool.run(stages.run_stage, home, name, tmp_path / "two")
    for part in ("metrics", "samples", "checkpoints"):
        assert_same_state(second[part], first[part], part)
    assert first["checkpoints"] or name in ("evaluate", "exam")
    for facts in (first, expected):
        del facts["checkpoints"]
        for line in facts["metrics"]:
            if line["step"] == 0:  # the policy is its reference: which answer it prefers is a matter of rounding
                line.pop("heldout/accuracy", None)
    assert_near(first, expected, within=1e-5)
