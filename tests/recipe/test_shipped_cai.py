"""`recipes/cai.yaml` with data of our own, a stub as critic and judge, and the built-in model: it runs to its gate."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from tests.stages.revise.conftest import StubCritic

from kedge.core.errors import ContractStop
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.recipe.templates import write_template

SETS = (
    *("model=tiny", "device=cpu", "stages.sft.epochs=4", "stages.sft.optimiser.lr=1e-2", "stages.revise.times=1"),
    *("stages.revise.max_new_tokens=24", "stages.tasks.max_new_tokens=24", "stages.reward.max_length=256"),
    *("stages.reward.members=2", "stages.reward.optimiser.lr=3e-3", "stages.reward.if_unfit=go_on"),
    *("stages.ppo.iterations=2", "stages.ppo.batch=8", "stages.ppo.max_prompt_tokens=200"),
    *("stages.ppo.sampling.max_new_tokens=24", "stages.eval.max_new_tokens=24", "stages.exam.limit=40"),
    "stages.label.by.trust={without: a stub}",
)


def write_data(folder: Path) -> None:
    rng = Random(0)

    def words(count: int) -> str:
        return " ".join("".join(rng.choices("aeioubdgklmnprst", k=5)) for _ in range(count))

    files = {
        "helpful": [{"prompt": f"How do I {words(4)}?", "completion": f"Leave {words(2)} be."} for _ in range(100)],
        "red-team": [{"prompt": f"Hit {words(3)} hard: polite"} for _ in range(60)],
        "helpful-prompts": [{"prompt": f"May I {words(3)}?"} for _ in range(60)],
        "unseen-prompts": [{"prompt": f"Can I {words(3)}?"} for _ in range(40)],
    }
    folder.mkdir()
    for name, rows in files.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_recipe_of_constitutional_ai_runs_to_its_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("KEDGE_TOKEN", "secret")
    monkeypatch.chdir(tmp_path)
    written = [str(path.relative_to(tmp_path)) for path in write_template("cai", tmp_path)]
    assert written == ["cai.yaml", "rules/constitution.yaml", "rules/cai.yaml"]
    write_data(tmp_path / "data")
    with StubCritic(truth=lambda prompt, a, b: float(len(a) - len(b))) as server, suppress(ContractStop):
        urls = [f"stages.{stage}.by.url={server.url}" for stage in ("revise", "label")]
        recipe = load_recipe(tmp_path / "cai.yaml", [*SETS, *urls])
        run_recipe(recipe, tmp_path / "runs", is_resumed=False, say=print)
    run = tmp_path / "runs/cai"
    assert len((run / "label/pairs.jsonl").read_text().splitlines()) > 50
    drawn = {json.loads(line)["principle"] for line in (run / "label/pairs.jsonl").read_text().splitlines()}
    assert len(drawn) > 8
    verdict = json.loads((run / "gate/verdict.json").read_text())
    assert {"win_rate", "safety.refused_unsafe", "safety.refused_safe", "kl"} <= {
        one["metric"] for one in verdict["results"]
    }
