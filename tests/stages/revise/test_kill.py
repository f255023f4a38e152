"""Kill -9 in the middle of `revise`, then --resume: the same files, and what was paid is counted once."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tests.stages.revise.conftest import StubCritic

from kedge.testing.commands import Kedge, forking_server

pytestmark = pytest.mark.slow
OUTPUTS = ("demonstrations.jsonl", "pairs.jsonl", "heldout.jsonl", "revisions.jsonl")
PROMPTS = 150
"""More than one piece."""
WORKERS = 2


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kedge]:
    with forking_server(tmp_path_factory.mktemp("kedge")) as commands:
        yield commands


def write_recipe(folder: Path, home: Path, **more: Any) -> Path:
    folder.mkdir()
    ways = ("polite", "unchanged", "empty", "evasive")
    rows = [{"prompt": f"Case {number} {ways[number % 4]}"} for number in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    stage = {"kind": "revise", "prompts": "prompts.jsonl", "constitution": str(home / "constitution.yaml")}
    stage |= {"max_new_tokens": 6, "times": 2, "safe": True, "heldout": 0.2, "dtype": "float32"} | more
    recipe = {"kedge": 1, "name": "killed", "seed": 3, "model": str(home / "tiny"), "device": "cpu"}
    (folder / "recipe.yaml").write_text(json.dumps({**recipe, "stages": {"revise": stage}}))
    return folder / "recipe.yaml"


def run_killed(commands: Kedge, recipe: Path, runs: Path, kills: list[int], watched: str) -> Path:
    """The stage's folder after it was killed at each of these calls, resumed each time."""
    for limit in (*kills, 0):
        resumed = ["--resume"] if (runs / "killed/run.json").exists() else []
        code = commands.run("run", recipe, "--runs", runs, "--no-check", *resumed, calls=limit, watched=watched)
        assert code == (-signal.SIGKILL if limit else 0), commands.output.read_text()[-2000:]
    return runs / "killed/revise"


def test_a_killed_run_by_an_endpoint_ends_the_same_and_counts_each_call_once(
    commands: Kedge, revise_home: Path, critic: StubCritic, tmp_path: Path
) -> None:
    by = {"url": critic.url, "model": "stub", "workers": WORKERS}
    recipe = write_recipe(tmp_path / "recipe", revise_home, by=by)
    whole = run_killed(commands, recipe, tmp_path / "whole", [], "system")
    calls, paid = commands.calls(), dict(critic.paid)
    assert set(paid.values()) == {1}
    critic.paid.clear()
    random = Random(5)
    kills = sorted(random.randrange(100, calls // 3) for _ in range(4))
    killed = run_killed(commands, recipe, tmp_path / "killed", kills, "system")
    for name in OUTPUTS:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
    spent = json.loads((killed / "revisions.json").read_text())["spent"]["by"]
    assert set(critic.paid) == set(paid)
    assert spent["calls"] == len(paid)
    twice = sum(count - 1 for count in critic.paid.values())
    assert twice <= spent["lost"] <= WORKERS * len(kills)  # in flight when the kill came, and told


def test_a_killed_run_of_the_model_itself_ends_the_same(commands: Kedge, revise_home: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path / "recipe", revise_home)
    whole = run_killed(commands, recipe, tmp_path / "whole", [], "generation")
    tokens = commands.calls()
    killed = run_killed(commands, recipe, tmp_path / "killed", [tokens // 2, tokens // 4], "generation")
    assert commands.calls() < 2 * tokens // 3  # what was written before the kill is not written again
    for name in OUTPUTS:
        assert (killed / name).read_bytes() == (whole / name).read_bytes(), name
