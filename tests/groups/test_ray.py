"""Roles in groups with Ray itself: actors of a cluster on this machine, killed for good where a test says so."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tests.groups import lost_groups as lost
from tests.groups.threads import layout_of
from tests.processes import stages
from tests.processes.test_training import assert_near

from kedge.core.errors import ProcessError
from kedge.core.world import ALONE
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.runtime.groups import Call, Group
from kedge.runtime.ray_groups import cluster_lacks, ray_groups

pytestmark = [
    pytest.mark.ray,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed: pip install 'kedge[ray]'"),
    pytest.mark.timeout(900),
]

PAIRS = {
    "learner": {"roles": ["policy", "reference"], "gpus": 2},
    "critic": {"roles": ["critic"], "gpus": 1},
    "judge": {"roles": ["reward", "gold"], "gpus": 2},
}
RECIPE = """
kedge: 1
name: short
model: tiny
seed: 3
device: cpu
stages:
  ppo:
    kind: ppo
    reward: {kind: function, path: "reward.py:score"}
    prompts: prompts.jsonl
    iterations: 2
    batch: 4
    answers: 2
    max_prompt_tokens: 32
    sampling: {max_new_tokens: 6}
"""
_CLUSTER = """
import os, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1")
import ray
ray.init(address="local", num_cpus=8, num_gpus=0, include_dashboard=False, log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""
_TWO_MACHINES = """
import os, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1")
from ray.cluster_utils import Cluster
cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 3, "num_gpus": 0, "include_dashboard": False})
cluster.add_node(num_cpus=3, num_gpus=0)
cluster.wait_for_nodes()
print(cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """A cluster that somebody else has started."""
    with running(_CLUSTER) as place:
        yield place


@contextmanager
def running(cluster: str) -> Generator[str]:
    """A child that starts a cluster, says where it is, and ends it."""
    pipe, nothing = subprocess.PIPE, subprocess.DEVNULL
    child = subprocess.Popen([sys.executable, "-c", cluster], stdin=pipe, stdout=pipe, stderr=nothing, text=True)
    assert child.stdout is not None
    yield child.stdout.readline().strip()
    child.communicate(timeout=60)


@pytest.fixture
def cluster(address: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    return address


@pytest.fixture(scope="module")
def expected(home: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return lost.undisturbed(home, tmp_path_factory.mktemp("alone"))


def opened(groups: dict[str, Any], timeout_s: float = 120.0) -> Any:
    return ray_groups(list(layout_of(groups).values()), device="cpu", timeout_s=timeout_s, restarts=3)


def test_ppo_in_groups_of_two_gives_what_one_process_gives(cluster: str, home: Path, tmp_path: Path) -> None:
    name = "ppo, separate"  # an ensemble, a moving average, text to imitate, exams
    alone = stages.run_stage(ALONE, home, name, tmp_path / "alone")
    with opened(PAIRS) as groups:
        apart = stages.run_stage(ALONE, home, name, tmp_path / "groups", None, groups)
    for facts in (alone, apart):
        del facts["checkpoints"]
        facts["events"].sort()
        for sample in facts["samples"]:
            assert sample["answer"]
    assert [sample["answer"] for sample in apart["samples"]] == [sample["answer"] for sample in alone["samples"]]
    assert_near(apart["model"], alone["model"], within=1e-6)
    assert_near(apart, alone, within=1e-5)  # metrics are sums of hundreds of numbers in another order


def test_groups_of_which_each_process_holds_a_part_of_the_weights_give_what_one_process_gives(
    cluster: str, home: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    cut = {name: {**group, "weights": "shard"} for name, group in PAIRS.items()}
    with opened(cut) as groups:
        apart = stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "groups", lost.CHANGES, groups)
    assert [sample["answer"] for sample in apart["samples"]] == [sample["answer"] for sample in expected["samples"]]
    for part in ("metrics", "model"):
        assert_near(apart[part], expected[part], within=1e-5)


def test_groups_that_do_not_fit_machines_are_spread_over_them(
    home: Path, tmp_path: Path, expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three groups of two on two machines of three: one of them is on both."""
    pairs = {name: {**group, "gpus": 2} for name, group in PAIRS.items()}
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    with running(_TWO_MACHINES) as place:
        monkeypatch.setenv("RAY_ADDRESS", place)
        with opened(pairs) as groups:
            apart = stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "groups", lost.CHANGES, groups)
    assert_near(apart["model"], expected["model"], within=1e-5)


def test_an_engine_of_its_own_gets_the_weights_through_the_object_store(
    cluster: str, home: Path, tmp_path: Path
) -> None:
    engines = {"learner": {"gpus": 1}, "engines": {"roles": ["generator"], "gpus": 2}}
    changes = {"generator": {"kind": "local", "lag": 1}, "max_rounds": 1, "iterations": 3}
    alone = stages.run_stage(ALONE, home, "grpo", tmp_path / "alone", changes)
    with opened(engines) as groups:
        apart = stages.run_stage(ALONE, home, "grpo", tmp_path / "groups", changes, groups)
    assert [sample["answer"] for sample in apart["samples"]] == [sample["answer"] for sample in alone["samples"]]
    assert_near(apart["metrics"], alone["metrics"], within=1e-6)


SHOTS = [
    ("judge", "reward", "score", "judge", 0),
    ("update", "policy", "update", "learner", 1),
    ("update of the critic", "critic", "update", "critic", 0),
    ("save", "policy", "state", "learner", 0),
    ("generation", "generator", "generate", "learner", 1),
]


@pytest.mark.parametrize(("what", "part", "verb", "group", "rank"), SHOTS, ids=[shot[0] for shot in SHOTS])
def test_an_actor_that_is_killed_changes_nothing(
    what: str, part: str, verb: str, group: str, rank: int, cluster: str, home: Path, tmp_path: Path,
    expected: dict[str, Any], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    submit, processes = Group.submit, dict[str, list[int]]()

    def shoot(self: Group, asked: str, how: str, *args: Any, **named: Any) -> Call:
        call = submit(self, asked, how, *args, **named)
        number = self.places.get(0, ("", 0))[1]
        if number and number not in processes.setdefault(self.name, []):
            processes[self.name].append(number)
        if (asked, how) == (part, verb) and "shot" not in processes and self.places:
            processes["shot"] = [self.places[rank][1]]
            os.kill(self.places[rank][1], signal.SIGKILL)
        return call

    monkeypatch.setattr(Group, "submit", shoot)
    with opened(PAIRS) as groups:
        facts = stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "groups", lost.CHANGES, groups)
    assert "shot" in processes, "nobody was killed"
    assert facts["events"].count("process.lost") == 1
    events = [json.loads(line) for line in (tmp_path / "groups/process-0/events.jsonl").read_text().splitlines()]
    evidence = next(line["evidence"] for line in events if line["code"] == "process.lost")
    assert (evidence["group"], evidence["restarts"]) == (group, 0)
    assert {name: len(numbers) for name, numbers in processes.items() if name != "shot"} == {
        name: 2 if name == group else 1 for name in PAIRS
    }, "other groups were built again"
    for what_part in ("metrics", "samples", "model"):
        assert_near(facts[what_part], expected[what_part], within=1e-5 if what_part == "metrics" else 1e-6)


def test_a_process_that_hangs_ends_the_run_with_its_stack(cluster: str, home: Path, tmp_path: Path) -> None:
    (home / "hangs.py").write_text("import time\ndef score(answers):\n    time.sleep(600)\n")
    changes = {**lost.CHANGES, "reward": {"kind": "function", "path": "hangs.py:score"}, "gold": None}
    with (
        opened({"learner": {"gpus": 1}, "judge": {"roles": ["reward"], "gpus": 1}}, timeout_s=60.0) as groups,
        pytest.raises(ProcessError, match=r"group judge: process 0 did not answer reward.score within 60 s"),
    ):
        stages.run_stage(ALONE, home, lost.STAGE, tmp_path / "run", changes, groups)
    assert "in score" in (tmp_path / "run/process-0/stacks/judge/rank-0.txt").read_text()


def test_more_than_the_cluster_has_is_refused(cluster: str) -> None:
    assert cluster_lacks(8, device="cpu", num_gpus=None, most_on_cpu=64) is None
    lacks = cluster_lacks(9, device="cpu", num_gpus=None, most_on_cpu=64)
    assert lacks == "the groups have 9 processes together, each on a CPU, and the cluster has 8"
    assert (
        cluster_lacks(1, device="cuda", num_gpus=0, most_on_cpu=64)
        == "the groups have 1 GPUs together, and the cluster has 0"
    )


def test_kedge_run_starts_a_cluster_of_its_own_and_ends_it(tmp_path: Path) -> None:
    write_run(tmp_path)
    alone = run_recipe(load_recipe(tmp_path / "r.yaml"), tmp_path / "alone", is_resumed=False, say=lambda _: None)
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    groups = "{learner: {gpus: 1}, judge: {roles: [reward], gpus: 1}}"
    command = [sys.executable, "-m", "kedge.cli", "run", "r.yaml", "--set", f"placement.groups={groups}"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended
    assert "group judge: 1 process(es), reward" in ended.stdout
    assert_near(metrics(tmp_path / "runs/short"), metrics(alone), within=1e-5)
    time.sleep(1.0)
    left = subprocess.run(["ps", "-eww", "-o", "args"], capture_output=True, text=True, check=True).stdout
    assert not [line for line in left.splitlines() if str(tmp_path) in line]


def write_run(folder: Path) -> None:
    """The recipe and what it reads."""
    folder.mkdir(exist_ok=True)
    (folder / "r.yaml").write_text(RECIPE)
    (folder / "reward.py").write_text("def score(answers):\n    return [float(len(a.text)) for a in answers]\n")
    questions = [json.dumps({"prompt": f"question {number}"}) + "\n" for number in range(12)]
    (folder / "prompts.jsonl").write_text("".join(questions))


def metrics(run: Path) -> list[dict[str, float]]:
    lines = [json.loads(line) for line in (run / "ppo/metrics.jsonl").read_text().splitlines()]
    timed = ("idle/", "time/", "tokens/per_second", "at")
    return [{name: value for name, value in line.items() if not name.startswith(timed)} for line in lines]
