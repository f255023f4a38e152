"""A reward stage that learns from certainties and ties."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.stages.reward.settings import RewardSettings
from kedge.stages.reward.train import train

RunStage = Callable[..., Any]
TIED = frozenset({3, 7, 11})


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", hidden=32, layers=1)


@pytest.fixture
def start(tiny: Path, tmp_path: Path, run_recorded: RunStage) -> Callable[..., Any]:
    def start(name: str, certainty: Callable[[int], float | None], **fields: Any) -> Any:
        rows = [{"prompt": f"q {i}", "chosen": f"{i} yes", "rejected": f"{i} no"} for i in range(24)]
        given = [row if (c := certainty(i)) is None else row | {"certainty": c} for i, row in enumerate(rows)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in given))
        few = {"kind": "reward", "data": "data", "batch": 8, "max_length": 48, "heldout_share": 0.3, "epochs": 1}
        settings = RewardSettings.model_validate(few | {"if_unfit": "go_on", **fields})
        sources = {"from": str(tiny), "data": str(tmp_path / f"{name}.jsonl")}
        return run_recorded(tmp_path / name, train, settings, **sources)

    return start


def certainties(recorded: Any) -> list[float]:
    return sorted(c for update in recorded.updates for batch in update for c in batch.certainty_C.tolist())


def test_certain_pairs_train_as_plain_ones_to_the_last_bit(start: Callable[..., Any]) -> None:
    plain = start("plain", lambda _: None).metric("train/loss")
    certain = start("certain", lambda _: 1.0, labels="soft").metric("train/loss")
    doubted = start("doubted", lambda _: 0.75, labels="soft").metric("train/loss")
    assert plain
    assert plain == certain != doubted


def test_hard_labels_leave_ties_out_and_say_so(start: Callable[..., Any], tmp_path: Path) -> None:
    recorded = start("hard", lambda i: 0.5 if i in TIED else 0.75)
    assert set(certainties(recorded)) == {1.0}
    assert "3 comparisons of `data` prefer nothing: left out" in (tmp_path / "hard/events.jsonl").read_text()


def test_soft_labels_and_half_ties_reach_the_loss(start: Callable[..., Any], tmp_path: Path) -> None:
    recorded = start("soft", lambda i: 0.5 if i in TIED else 0.75, labels="soft", ties="half")
    assert set(certainties(recorded)) == {0.5, 0.75}
    evaluated = [c for batch in recorded.evaluations[0] for c in batch.certainty_C.tolist()]
    report = json.loads((tmp_path / "soft/reward-report.json").read_text())
    assert len(certainties(recorded)) + len(evaluated) == 24
    assert report["pairs"] == sum(c != 0.5 for c in evaluated)  # a tie has no better answer to report on
