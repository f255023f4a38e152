"""Run folders made to order: a PPO stage from a simple law, and a pipeline around it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.runs.folder import Run
from kedge.runs.manifest import Artefact, Status, new_manifest
from kedge.testing.streams import PPO_SETTINGS, fill

HOSTILE = "</pre><script>alert('x')</script> & <b>"
MakeRun = Callable[..., Path]


def _estimate(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.5, "high": mean + 0.5, "prompts": 40}


EVALUATION: dict[str, Any] = {
    "baseline": "sft",
    "prompts": 40,
    "models": {
        name: {
            "answers": 40,
            "scores": {"reward": {"mean": _estimate(mean), "unscored": unscored}},
            "kl": _estimate(kl) if kl else None,
            "length": _estimate(30.0),
            "finished": 0.975,
            "repetition": 0.031,
            "distinct": 0.62,
        }
        for name, mean, kl, unscored in (("sft", 1.0, 0.0, 0), ("ppo", 2.25, 5.5, 3))
    },
    "comparisons": {
        "ppo": {
            "reward": {
                "win_rate": {"rate": 0.81, "low": 0.7, "high": 0.9, "ties": 0.05, "prompts": 40},
                "length_controlled": None,
                "gain": _estimate(1.25),
                "left_out": 0,
            }
        }
    },
}

REWARD_REPORT: dict[str, Any] = {
    "verdict": "Fit to optimise against.",
    "accuracy": {"value": 0.742, "low": 0.69, "high": 0.79},
    "length": {"balanced": None, "rule": {"value": 0.58, "low": 0.52, "high": 0.63}},
    "calibration": {"error": 0.134},
    "pairs": 1191,
    "agreement": None,
}


@pytest.fixture
def ppo_run(tmp_path: Path) -> MakeRun:
    """One PPO stage on its own."""

    def make(iterations: int = 40, *, name: str = "ppo", status: Status | None = "done", **settings: Any) -> Path:
        folder = tmp_path / name
        manifest = new_manifest(
            name=name, stage="ppo", kind="ppo", seed=7, settings={**PPO_SETTINGS, "iterations": iterations, **settings}
        )
        with Run.create(folder, manifest=manifest) as run:
            fill(run, iterations, every=max(1, iterations // 4))
            if status:
                run.finish(status)
        return folder

    return make


@pytest.fixture
def pipeline_run(tmp_path: Path) -> Path:
    """All kinds of stages, with markup in every text that comes from outside; `last` has not begun."""
    root = tmp_path / "loop"
    kinds = {"prepare": "data", "sft": "sft", "reward": "reward", "ppo": "ppo", "eval": "evaluate"}
    settings: dict[str, dict[str, Any]] = {name: {"kind": kind} for name, kind in kinds.items()}
    settings["ppo"] = {**PPO_SETTINGS, "prompts": HOSTILE}
    recipe = {"name": "loop", "model": "tiny", "stages": {**settings, "last": {"kind": "sft"}}}
    with Run.create(root, manifest=new_manifest(name="loop", kind="pipeline", seed=7, settings=recipe)) as whole:
        for name in kinds:
            _write_stage(root / name, kinds[name], settings[name])
        whole.finish("stopped")
    (root / "reward/reward-report.json").write_text(json.dumps(REWARD_REPORT))
    (root / "eval/evaluation.json").write_text(json.dumps(EVALUATION))
    return root


def _write_stage(folder: Path, kind: str, settings: dict[str, Any]) -> None:
    inputs = [Artefact(name="data", kind="records", path=f"/data/{HOSTILE}.jsonl", hash="ab" * 16)]
    if kind == "ppo":
        inputs.append(Artefact(name="from", kind="model", path="../sft/model", hash="00" * 16))
    manifest = new_manifest(name="loop", stage=folder.name, kind=kind, seed=7, settings=settings, inputs=inputs)
    with Run.create(folder, manifest=manifest) as run:
        if kind == "ppo":
            fill(run, 40, every=20)
            run.event("warning", "kl.over_target", f"KL is high {HOSTILE}", 20, advice="Raise `kl.start`.", kl=8.5)
        elif kind in ("sft", "reward"):
            for step in range(1, 31):
                held = {"heldout/loss": 2.5 - step / 30} if step % 10 == 0 else {}
                run.log({"train/loss": 2.0 - step / 30, "time/step": 0.5, "tokens/per_second": 400.0, **held}, step)
            (folder / "model").mkdir()
        run.event("info", "stage.note", "something of note")
        outputs = [Artefact(name="model", kind="model", path="model", hash="11" * 16)] if kind == "sft" else []
        run.finish("done", outputs=outputs)
