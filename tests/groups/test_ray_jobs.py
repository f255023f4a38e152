"""`ray job submit -- kedge run r.yaml` with Ray itself: a job of a cluster drives groups as a single process would."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.groups.test_ray import RECIPE, metrics, running, write_run
from tests.processes.test_training import assert_near

from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe

pytestmark = [pytest.mark.ray, pytest.mark.timeout(900)]

_CLUSTER = """
import os, sys
os.environ.update(RAY_USAGE_STATS_ENABLED="0", RAY_AUTH_MODE="disabled", OMP_NUM_THREADS="1")
import ray
cluster = ray.init(address="local", num_cpus=4, num_gpus=0, include_dashboard=True, log_to_driver=False)
print("http://" + cluster.dashboard_url, flush=True)
sys.stdin.read()
"""
_GROUPS = "{learner: {gpus: 1}, judge: {roles: [reward], gpus: 1}}"


@pytest.fixture(scope="module")
def dashboard() -> Iterator[str]:
    """Where a cluster takes jobs."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kedge[ray]'")
    pytest.importorskip("aiohttp_cors", reason="this Ray takes no jobs: pip install 'ray[default]'")
    with running(_CLUSTER) as place:
        yield place


def submitted(dashboard: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A job that runs the recipe in a copy of its folder, and how it ended."""
    ray = str(Path(sys.executable).with_name("ray"))
    job = [sys.executable, "-m", "kedge.cli", "run", "r.yaml", *arguments]
    command = [ray, "job", "submit", "--address", dashboard, "--working-dir", str(folder), "--", *job]
    environment = {**os.environ, "RAY_AUTH_MODE": "disabled"}
    for _ in range(10):
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if "No available agent" not in ended.stderr:
            return ended
        time.sleep(3.0)  # what starts jobs comes a little later than the cluster
    raise AssertionError("the cluster takes no jobs; another one on this machine may have the port of its agent")


def test_a_job_of_a_cluster_gives_what_one_process_gives(dashboard: str, tmp_path: Path) -> None:
    write_run(tmp_path / "work")
    recipe = load_recipe(tmp_path / "work/r.yaml")
    alone = run_recipe(recipe, tmp_path / "alone", is_resumed=False, say=lambda _: None)
    (tmp_path / "work/r.yaml").write_text(f"{RECIPE}placement: {{groups: {_GROUPS}}}\n")
    ended = submitted(dashboard, tmp_path / "work", "--runs", str(tmp_path / "runs"))
    assert ended.returncode == 0, ended.stdout
    assert "group judge: 1 process(es), reward" in ended.stdout
    assert_near(metrics(tmp_path / "runs/short"), metrics(alone), within=1e-5)


def test_a_job_whose_driver_is_killed_goes_on_in_other_groups(dashboard: str, tmp_path: Path) -> None:
    long = RECIPE.replace("iterations: 2", "iterations: 8\n    checkpoints: {every: 1}")
    write_run(tmp_path / "work")
    (tmp_path / "work/r.yaml").write_text(long)
    alone = run_recipe(load_recipe(tmp_path / "work/r.yaml"), tmp_path / "alone", is_resumed=False, say=lambda _: None)
    (tmp_path / "work/r.yaml").write_text(f"{long}placement: {{groups: {_GROUPS}}}\n")
    runs = ("--runs", str(tmp_path / "runs"))
    with ThreadPoolExecutor(max_workers=1) as pool:
        first = pool.submit(submitted, dashboard, tmp_path / "work", *runs)
        os.kill(driver_of(tmp_path / "runs"), signal.SIGKILL)
        assert first.result().returncode == 1
    parts = "placement.groups={learner: {gpus: 1}, judge: {roles: [reward], gpus: 2, weights: shard}}"
    ended = submitted(dashboard, tmp_path / "work", *runs, "--resume-if-begun", "--set", parts)
    assert ended.returncode == 0, ended.stdout
    assert_near(metrics(tmp_path / "runs/short"), metrics(alone), within=1e-5)


def driver_of(runs: Path) -> int:
    """The process that drives the groups of the run, once it has made two steps."""
    steps, until = runs / "short/ppo/metrics.jsonl", time.monotonic() + 300
    while time.monotonic() < until:
        if steps.exists() and steps.read_text().count("\n") >= 2:
            listed = subprocess.run(["ps", "-eww", "-o", "pid=,args="], capture_output=True, text=True, check=True)
            lines = [line.split(maxsplit=1) for line in listed.stdout.splitlines() if str(runs) in line]
            start = f"{sys.executable} -m kedge.cli"
            return next(int(number) for number, command in lines if command.startswith(start))
        time.sleep(0.05)
    raise AssertionError("the job has made no two steps")


def test_a_run_is_not_written_into_the_copy_that_ray_deletes(dashboard: str, tmp_path: Path) -> None:
    write_run(tmp_path)
    ended = submitted(dashboard, tmp_path)
    assert ended.returncode == 1, ended.stdout
    assert "lies in Ray's copy of the job's working directory" in ended.stdout
    assert "failed with exit code 2" in ended.stdout
