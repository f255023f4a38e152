"""A process of a group that is gone while a role judges, learns, is saved or samples: the stage must end with what it
ends with where nothing happens, and the groups of other roles must have stayed."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.groups.threads import thread_groups
from tests.processes import stages
from tests.processes.test_training import assert_near

from kedge.core.world import ALONE

GROUPS = {"learner": {"roles": ["policy"]}, "critic": {"roles": ["critic"]}, "judge": {"roles": ["reward"]}}
STAGE = "ppo, separate"
CHANGES: dict[str, Any] = {"iterations": 2, "checkpoints": {"every": 1}, "eval": None, "ema": None}


@dataclass(frozen=True, slots=True)
class Case:
    what: str
    falls: tuple[tuple[str, str], ...]
    """Calls, by part and verb, at which the process that is asked is gone; the later ones after a restart."""
    group: str
    """That is lost first."""

    def __str__(self) -> str:
        return self.what


CASES = [
    Case("judge", (("reward", "score"),), "judge"),
    Case("log-probs", (("reference", "logprobs"),), "learner"),
    Case("policy learns", (("policy", "update"),), "learner"),
    Case("critic learns", (("critic", "update"),), "critic"),
    Case("save", (("critic", "state"),), "critic"),
    Case("generation", (("generator", "generate"),), "learner"),
    Case("weights for the generator", (("generator", "load_own"),), "learner"),
    Case("the model is written", (("stage", "save_policy"),), "learner"),
    Case("restart", (("policy", "update"), ("policy", "load")), "learner"),
    Case("build", (("group", "build"),), "learner"),
]


def undisturbed(home: Path, folder: Path) -> dict[str, Any]:
    return stages.run_stage(ALONE, home, STAGE, folder, CHANGES)


def attempt(case: Case) -> str | None:
    """None where the run gives what the undisturbed one gives, and no other group was started again."""
    with tempfile.TemporaryDirectory(prefix="kedge-groups-") as made:
        home = Path(made) / "home"
        home.mkdir()
        stages.write_inputs(home)
        return compare(case, home, Path(made), undisturbed(home, Path(made) / "alone"))


def compare(case: Case, home: Path, folder: Path, expected: dict[str, Any]) -> str | None:
    """The same, where what is expected is known already."""
    cache = os.environ.get("KEDGE_CACHE")
    falls, starts = list(case.falls), list[str]()
    try:
        with thread_groups(GROUPS, falls=falls, starts=starts) as groups:
            facts = stages.run_stage(ALONE, home, STAGE, folder / "groups", CHANGES, groups)
    finally:
        os.environ["KEDGE_CACHE"] = cache or ""
    if falls:
        return f"nobody was asked {falls}"
    if facts["events"].count("process.lost") != len(case.falls):
        return f"{facts['events'].count('process.lost')} losses were written down"
    if starts.count(case.group) < 2 and case.what != "build":
        return f"groups were started: {starts}"
    if any(starts.count(name) != 1 for name in GROUPS if name != case.group and case.what != "build"):
        return f"other groups were started again: {starts}"
    try:
        for part in ("metrics", "samples", "model"):
            assert_near(facts[part], expected[part], within=1e-6)
    except AssertionError as error:
        return f"{part}: {error}"
    return None
