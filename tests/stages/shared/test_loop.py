"""What the stages that train share."""

from __future__ import annotations

from pathlib import Path

import torch

from kedge.core.batches import Batch
from kedge.runs import Run, new_manifest
from kedge.runs.state import load_state
from kedge.stages.shared.loop import keep_bad


def test_the_batches_of_a_refused_step_are_kept_as_they_were(tmp_path: Path) -> None:
    batch = Batch(
        tokens_BT=torch.tensor([[5, 7, 0]]),
        segment_BT=torch.tensor([[1, 1, 0]]),
        counted_BT=torch.tensor([[False, True, False]]),
    )
    with Run.create(tmp_path / "run", manifest=new_manifest(name="a", kind="sft", seed=0, settings={})) as run:
        assert keep_bad(run, 12, [batch]) == "bad-steps/step-000012"
    (kept,) = load_state(tmp_path / "run/bad-steps/step-000012")["batches"]
    assert {name: tensor.tolist() for name, tensor in kept.items()} == {
        "tokens_BT": [[5, 7, 0]],
        "segment_BT": [[1, 1, 0]],
        "counted_BT": [[False, True, False]],
    }
