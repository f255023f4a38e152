"""Pipelines made to order: a PPO stage, a best-of-N stage, and an evaluation of both."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kedge.runs.folder import Run
from kedge.runs.manifest import Artefact, new_manifest
from kedge.testing.streams import PPO_SETTINGS, fill


def _estimate(mean: float) -> dict[str, Any]:
    return {"mean": mean, "low": mean - 0.25, "high": mean + 0.5, "prompts": 40}


def _model(reward: float, gold: float, kl: float | None) -> dict[str, Any]:
    scores = {"reward": reward, "gold": gold}
    return {
        "answers": 40,
        "scores": {source: {"mean": _estimate(mean), "unscored": 0} for source, mean in scores.items()},
        "kl": None if kl is None else _estimate(kl),
        "length": _estimate(30.0 + reward),
        "finished": 0.9,
        "repetition": 0.0,
        "distinct": 0.5,
    }


def _won(rate: float) -> dict[str, Any]:
    found = {"rate": rate, "low": rate - 0.125, "high": rate + 0.0625, "ties": 0.0, "prompts": 40}
    return {"win_rate": found, "length_controlled": None, "gain": _estimate(1.0), "left_out": 0}


EVALUATION = {
    "baseline": "sft",
    "prompts": 40,
    "models": {"sft": _model(1.0, 0.5, None), "ppo": _model(3.0, 2.0, 6.5), "best": _model(2.5, 2.25, 1.25)},
    "comparisons": {
        "ppo": {"reward": _won(0.75), "gold": _won(0.625)},
        "best": {"reward": _won(0.6875), "gold": _won(0.65625)},
    },
}
CURVE = {
    "n": 4,
    "prompts": 10,
    "left_out": 0,
    "curve": [
        {"n": n, "kl": kl, "reward": reward, "gold": gold}
        for n, kl, reward, gold in ((1, 0.0, 1.0, 0.5), (2, 0.1931, 1.75, 1.0), (4, 0.6363, 2.25, 1.5))
    ],
}


def _stage(folder: Path, kind: str, settings: dict[str, Any], inputs: tuple[Artefact, ...] = ()) -> Run:
    return Run.create(
        folder,
        manifest=new_manifest(
            name=folder.parent.name, stage=folder.name, kind=kind, seed=7, settings=settings, inputs=inputs
        ),
    )


@pytest.fixture
def pipeline(tmp_path: Path) -> Path:
    """sft, ppo, best (best_of_n), alone (sft without an evaluation) and eval."""
    root = tmp_path / "shop"
    with Run.create(root, manifest=new_manifest(name="shop", kind="pipeline", seed=7, settings={"stages": {}})) as run:
        with _stage(root / "sft", "sft", {"kind": "sft"}) as sft:
            sft.log({"train/loss": 1.0, "time/step": 2.0, "tokens/per_second": 100.0}, 1)
            sft.finish("done")
        with _stage(root / "ppo", "ppo", dict(PPO_SETTINGS)) as ppo:
            fill(ppo, 40)
            for peak in (3.5, 3.25):  # of a run in two parts
                ppo.event("info", "run.memory", "peak memory", None, **{"memory/peak_gib": peak, "of": "process"})
            ppo.finish("done")
        with _stage(root / "best", "best_of_n", {"kind": "best_of_n", "method": {"kind": "rejection"}}) as best:
            for step, kl, reward in ((0, 0.0, 1.0), (8, 0.75, 2.0)):
                best.log({"reward/mean": reward, "kl/mean": kl, "memory/peak_gib": 1.5 + kl}, step)
            best.finish("done")
        (root / "best/best-of.json").write_text(json.dumps(CURVE))
        asked = (Artefact(name="prompts", kind="prompts", path="p.jsonl", hash="aa" * 16),)
        with _stage(root / "eval", "evaluate", {"kind": "evaluate", "reward": "reward"}, asked) as evaluated:
            evaluated.finish("done")
        (root / "eval/evaluation.json").write_text(json.dumps(EVALUATION))
        run.finish("done")
    return root


JUDGE = {"kind": "judge", "model": "m", "url": "http://localhost/v1", "budget": {"usd": 1, "input": 2.0, "output": 8.0}}


def _ledger(file: Path, paid: int) -> None:
    """Calls of 1,000 + 100 tokens, and what is no call that was paid."""
    file.parent.mkdir(parents=True)
    tokens = {"prompt": 1000, "completion": 100}
    lines: list[dict[str, Any]] = [{"sent": "k", **tokens}, {"refused": "k"}, {"lost": "k"}]
    lines += [{"paid": f"k{number}", **tokens, "reply": 7.0} for number in range(paid)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"paid": "half')


def _from(stage: str, name: str) -> Artefact:
    return Artefact(name=name, kind="model", path=f"../{stage}/model", hash="cc" * 16)


@pytest.fixture
def rlaif(pipeline: Path) -> Path:
    """The same, where `ppo` was trained on a reward model that `ai` labelled for, and `direct` on the judge itself."""
    with _stage(pipeline / "ai", "label", {"kind": "label", "by": [JUDGE]}) as ai:
        ai.finish("done")
    _ledger(pipeline / "ai/calls/0-m.jsonl", 5)
    with _stage(
        pipeline / "reward", "reward", {"kind": "reward"}, (_from("ai", "data"), _from("sft", "from"))
    ) as reward:
        reward.finish("done")
    for name, source, inputs in (
        ("distilled", "reward", (_from("reward", "reward"), _from("sft", "from"))),
        ("direct", JUDGE, (_from("sft", "from"),)),
    ):
        with _stage(pipeline / name, "ppo", {**PPO_SETTINGS, "reward": source}, inputs) as ppo:
            fill(ppo, 20)
            ppo.finish("done")
    _ledger(pipeline / "direct/calls/reward-0/hash.jsonl", 3)
    models = {
        name: _model(reward, 1.0, kl)
        for name, reward, kl in (("sft", 1.0, None), ("distilled", 3.0, 6.0), ("direct", 2.0, 4.0))
    }
    found = {
        **EVALUATION,
        "models": models,
        "comparisons": {name: {"reward": _won(0.75)} for name in ("distilled", "direct")},
        "judges": {
            name: {"m": {"rate": rate, "low": rate - 0.1, "high": rate + 0.1}}
            for name, rate in (("distilled", 0.7), ("direct", 0.8))
        },
    }
    (pipeline / "eval/evaluation.json").write_text(json.dumps(found))
    return pipeline
