"""Kill −9 in the middle of training, resume: the same metrics, samples and weights to the last bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.runs.folder import Run
from kedge.runs.state import load_state
from kedge.testing import toy
from kedge.testing.journals import records, wait_for

SFT = """
    kind: sft
    data: demonstrations.jsonl
    heldout: demonstrations-heldout.jsonl
    batch: 4
    max_length: 192
    samples: 3
    sample_tokens: 8
"""
REWARD = """
    kind: reward
    data: pairs.jsonl
    heldout: pairs-heldout.jsonl
    batch: 4
    micro_batch: 2
    members: 2
    max_length: 192
    if_unfit: go_on
"""
LORA = "    lora: {rank: 2, dropout: 0.2}\n"
OFTEN = "    optimiser: {lr: 3e-3}\n    eval: {every: 5}\n    checkpoints: {every: 3}\n"
IMPATIENT = """    optimiser: {lr: 1.0, schedule: constant}
    eval: {every: 2, patience: 1}
    checkpoints: {every: 3}
"""

STAGES = {
    "sft": SFT + OFTEN,
    "sft-lora": SFT + LORA + OFTEN,
    "reward": REWARD + OFTEN,
    "reward-lora": REWARD + LORA + OFTEN,
    "sft-impatient": SFT + IMPATIENT,
    "reward-impatient": REWARD + IMPATIENT,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a model and a recipe for each sort of training: about 30 short steps a member."""
    home = tmp_path_factory.mktemp("parity")
    make_tiny(home / "tiny", hidden=32, layers=1)
    rows = {
        "demonstrations": toy.demonstrations(120, 1),
        "demonstrations-heldout": toy.demonstrations(10, 2),
        "pairs": toy.pairs(200, 3),
        "pairs-heldout": toy.pairs(30, 4),
    }
    for name, made in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    for name, stage in STAGES.items():
        text = f"kedge: 1\nname: {name}\nseed: 5\nmodel: ./tiny\nstages:\n  train:{stage}"
        (home / f"{name}.yaml").write_text(text)
    return home


@pytest.fixture(scope="module")
def whole(home: Path, kedge: Any) -> Callable[[str], Path]:
    """The stage folder of a run that nothing interrupted, made once for each recipe."""

    def run(name: str) -> Path:
        if not (home / "whole" / name).exists():
            code = kedge.run("run", home / f"{name}.yaml", "--runs", home / "whole", "--no-check")
            assert code == 0, kedge.output.read_text()
            (home / f"{name}.calls").write_text(str(kedge.calls()))
        return home / "whole" / name / "train"

    return run


def weights(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*.safetensors"))}


def assert_same(found: Path, expected: Path) -> None:
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(found / journal) == records(expected / journal)
    assert weights(found / "model") == weights(expected / "model")
    assert weights(expected / "model")
    assert Run.open(found, for_writing=False).status == "done"
    hidden = [path.name for path in (found / "checkpoints").iterdir() if path.name.startswith(".")]
    assert hidden == []


def kill_points(pick: Random, steps: int, count: int) -> Iterator[tuple[int, float]]:
    """Rising numbers of logged steps, spread over the run, and a short wait after each."""
    for part in range(count):
        low, high = part * steps // count, (part + 1) * steps // count
        yield pick.randrange(max(low, 1), high), pick.uniform(0.0, 0.01)


def kill_often(kedge: Any, home: Path, name: str, runs: Path, pick: Random, steps: int, kills: int) -> None:
    """One run, killed at so many moments and resumed after each."""
    resumed: list[str] = []
    for count, delay in kill_points(pick, steps, kills):
        process = kedge.start("run", home / f"{name}.yaml", "--runs", runs, "--no-check", *resumed)
        wait_for(runs / name / "train/metrics.jsonl", count)
        time.sleep(delay)
        assert kedge.kill(process) == -signal.SIGKILL
        resumed = ["--resume"]
    assert kedge.run("run", home / f"{name}.yaml", "--runs", runs, "--resume") == 0, kedge.output.read_text()


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        pytest.param(name, seed, marks=[] if seed == 1 and name in ("sft-lora", "reward") else pytest.mark.slow)
        for name in ("sft", "sft-lora", "reward", "reward-lora")
        for seed in range(1, 8)
    ],
)
def test_killed_three_times_and_resumed_it_is_the_same_run(
    name: str, seed: int, home: Path, whole: Callable[[str], Path], kedge: Any, tmp_path: Path
) -> None:
    expected = whole(name)
    steps = len(records(expected / "metrics.jsonl"))
    assert steps == {"sft": 30, "reward": 51}[name.removesuffix("-lora")]  # 200 pairs in two folds of unequal size
    kill_often(kedge, home, name, tmp_path, Random(seed), steps, 3)
    assert_same(tmp_path / name / "train", expected)
    codes = [event["code"] for event in records(tmp_path / name / "train/events.jsonl")]
    assert codes.count("run.resumed") >= 3


@pytest.mark.parametrize("name", ["sft-impatient", pytest.param("reward-impatient", marks=pytest.mark.slow)])
def test_a_run_that_stops_early_is_the_same_after_a_kill(
    name: str, home: Path, whole: Callable[[str], Path], kedge: Any, tmp_path: Path
) -> None:
    expected = whole(name)
    logged = records(expected / "metrics.jsonl")
    assert 2 < len(logged) < {"sft-impatient": 30, "reward-impatient": 51}[name]
    # Killed at the last step of the first learner, when its patience is at an end.
    ends = expected / "finished/member-0"
    end = load_state(ends)["last_step"] if ends.exists() else len(logged)
    process = kedge.start("run", home / f"{name}.yaml", "--runs", tmp_path, "--no-check")
    wait_for(tmp_path / name / "train/metrics.jsonl", end)
    assert kedge.kill(process) == -signal.SIGKILL
    assert kedge.run("run", home / f"{name}.yaml", "--runs", tmp_path, "--resume") == 0, kedge.output.read_text()
    assert_same(tmp_path / name / "train", expected)


@pytest.mark.parametrize("name", ["sft-lora", pytest.param("reward-lora", marks=pytest.mark.slow), "sft-impatient"])
@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=pytest.mark.slow) for part in range(20)] + [20], ids="part-{}".format
)
def test_killed_at_a_call_into_the_system_it_is_the_same_run(
    name: str, part: int, home: Path, whole: Callable[[str], Path], kedge: Any, tmp_path: Path
) -> None:
    """Where files are written and renamed, between two members and at the very end: moments that time seldom hits."""
    expected = whole(name)
    arguments = ("run", home / f"{name}.yaml", "--runs", tmp_path, "--no-check")
    total = int((home / f"{name}.calls").read_text())
    assert total > 100
    pick = Random(part)  # part 20 is the end: the last samples and the model's files
    at = total - pick.randrange(9, 27) if part == 20 else total * part // 20 + pick.randrange(1, total // 20)
    assert kedge.run(*arguments, calls=at) == -signal.SIGKILL
    has_begun = (tmp_path / name / "run.json").exists()
    assert kedge.run(*arguments, *(["--resume"] if has_begun else [])) == 0, kedge.output.read_text()
    assert_same(tmp_path / name / "train", expected)


@pytest.mark.parametrize("name", ["sft", pytest.param("reward-lora", marks=pytest.mark.slow)])
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_gives_the_same_run(
    name: str, home: Path, whole: Callable[[str], Path], kedge: Any, tmp_path: Path
) -> None:
    expected = whole(name)
    process = kedge.start("run", home / f"{name}.yaml", "--runs", tmp_path, "--no-check")
    wait_for(tmp_path / name / "train/metrics.jsonl", 20)
    assert kedge.kill(process) == -signal.SIGKILL
    run = Run.open(tmp_path / name / "train", for_writing=False)
    older, newest = run.checkpoints.steps()[-2:]
    file = run.checkpoints.path(newest) / "state.safetensors"
    content = bytearray(file.read_bytes())
    content[-5] ^= 1  # one bit
    file.write_bytes(content)
    assert kedge.run("run", home / f"{name}.yaml", "--runs", tmp_path, "--resume") == 0, kedge.output.read_text()
    assert_same(tmp_path / name / "train", expected)
    events = records(tmp_path / name / "train/events.jsonl")
    assert [event["evidence"]["resumed_at"] for event in events if event["code"] == "run.resumed"] == [older]
    (damaged,) = [event for event in events if event["code"] == "checkpoint.damaged"]
    assert f"step-{newest:06d}" in damaged["message"]


def test_an_uninterrupted_run_never_says_that_it_was_resumed(whole: Callable[[str], Path]) -> None:
    for name in ("sft", "reward", "reward-lora", "sft-impatient", "reward-impatient"):
        codes = {event["code"] for event in records(whole(name) / "events.jsonl")}
        assert not codes & {"run.resumed", "run.cleared", "checkpoint.damaged"}


def test_the_command_itself_is_killed_and_resumed(home: Path, whole: Callable[[str], Path], tmp_path: Path) -> None:
    """The same without the shared imports of the others."""
    command = [sys.executable, "-m", "kedge.cli", "run", str(home / "sft-lora.yaml"), "--runs", str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen([*command, "--no-check"], env=environment, stdout=subprocess.DEVNULL)
    try:
        wait_for(tmp_path / "sft-lora/train/metrics.jsonl", 11)
    finally:
        child.kill()
        child.wait()
    done = subprocess.run([*command, "--resume"], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert_same(tmp_path / "sft-lora/train", whole("sft-lora"))
