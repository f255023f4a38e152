"""`recipes/hh.yaml` with transcripts of our own and the built-in model: it runs to its gate, which decides."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from kedge.core.errors import ContractStop
from kedge.data.converting import convert
from kedge.data.splitting import split
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import write_template

SETS = (
    *("model=tiny", "device=cpu", "stages.sft.epochs=8", "stages.sft.optimiser.lr=1e-2"),
    *("stages.reward.optimiser.lr=3e-3", "stages.reward.max_length=256", "stages.reward.members=2"),
    *("stages.ppo.iterations=2", "stages.ppo.batch=8", "stages.ppo.max_prompt_tokens=200"),
    *("stages.eval.answers=1", "stages.eval.max_new_tokens=32", "stages.exam.limit=40"),
)


def write_transcripts(file: Path) -> None:
    rng = Random(0)

    def words(count: int) -> str:
        return " ".join("".join(rng.choices("aeioubdgklmnprst", k=5)) for _ in range(count))

    def row() -> dict[str, str]:
        asked = f"\n\nHuman: How do I {words(4)}?\n\nAssistant: "
        chosen, rejected = rng.sample((1, 2, 3, 4), 2)
        return {"chosen": f"{asked}Leave {words(chosen)} be.", "rejected": f"{asked}Hit {words(rejected)} hard."}

    file.write_text("".join(json.dumps(row()) + "\n" for _ in range(400)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_for_hh_runs_to_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    assert [path.name for path in write_template("hh", tmp_path)] == ["hh.yaml", "hh.yaml"]
    write_transcripts(tmp_path / "hh.jsonl")
    split(["hh.jsonl"], tmp_path / "data", heldout=0.3)
    convert("data/hh.train.jsonl", Path("data/hh.demonstrations.jsonl"), kind="demonstrations")
    with suppress(ContractStop):  # so small a run may fail at its gate, but must get there
        run_recipe(load_recipe(tmp_path / "hh.yaml", list(SETS)), tmp_path / "runs", is_resumed=False, say=print)
    verdict = json.loads((tmp_path / "runs/hh/gate/verdict.json").read_text())
    metrics = [rule["metric"] for rule in verdict["results"]]
    assert {"win_rate", "knowledge.cloze", "safety.refused_safe", "length.shrinkage", "kl"} <= set(metrics)
