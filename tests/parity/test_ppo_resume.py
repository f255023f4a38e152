"""Kill -9 and Ctrl-C in the middle of PPO, resume: the same metrics, samples and weights to the last bit.

In generation, in the update and in saving; with a reward model beside a function, and everything else that has a state.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.runs.folder import Run, status_of
from kedge.testing import toy
from kedge.testing.journals import records, wait_for

Whole = Callable[..., tuple[Path, int]]
ROLES = ("separate", "lora", "trunk")
WATCHED = ("generation", "update", "system")
SHORT = "data: pairs.jsonl, heldout: heldout.jsonl, batch: 8, max_length: 192, if_unfit: go_on"
JUDGES = f"""
  plain: {{kind: reward, {SHORT}, frozen_layers: 1}}
  lora: {{kind: reward, {SHORT}, lora: {{rank: 2}}}}
"""
TRAIN = """
  train:
    kind: ppo
    roles: {roles}
    memory: {{lora: {{rank: 2}}, dtype: float32}}
    reward:
      kind: mix
      parts:
        model: {{kind: model, from: {judge}}}
        rule: {{kind: function, path: "rules.py:plain"}}
    prompts: prompts.jsonl
    iterations: 6
    batch: 2
    answers: 2
    epochs: 2
    minibatches: 2
    micro_batch: 2
    max_prompt_tokens: 40
    sampling: {{max_new_tokens: 8}}
    kl: {{start: 0.1, target: 0.5, horizon: 20}}
    scores: {{normalise: standard}}
    ema: 0.9
    loss: {{imitate: {{data: demonstrations.jsonl, batch: 2, max_length: 64}}}}
    actor: {{lr: 1e-2}}
    critic: {{lr: 1e-2}}
    logging: {{every: 2, samples: 2}}
    checkpoints: {{every: 2}}
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, kedge: Any) -> Path:
    """Data, a model of two layers, reward models, and a recipe for each way to hold the roles."""
    home = tmp_path_factory.mktemp("ppo")
    make_tiny(home / "tiny", hidden=32, layers=2)
    said = [{"role": "user", "content": "Say yes"}, {"role": "assistant", "content": "Yes it is."}]
    rows = {
        "pairs": toy.pairs(16, 3),
        "heldout": toy.pairs(6, 4),
        "prompts": [{"prompt": f"Say {letter}"} for letter in "abcde"],
        "demonstrations": [{"messages": said}, {"messages": [{"role": "user", "content": "Why?"}, said[1]]}],
    }
    for name, made in rows.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made))
    (home / "rules.py").write_text('def plain(answer):\n    return sum(one < "\\x80" for one in answer.text) / 8\n')
    write_recipe(home, "judges", JUDGES)
    assert kedge.run("run", home / "judges.yaml", "--runs", home, "--no-check") == 0, kedge.output.read_text()
    for roles in ROLES:
        judge = home / "judges" / ("lora" if roles == "lora" else "plain") / "model"
        write_recipe(home, roles, TRAIN.format(roles=roles, judge=judge))
    return home


def write_recipe(home: Path, name: str, stages: str) -> None:
    text = f"kedge: 1\nname: {name}\nseed: 5\nmodel: ./tiny\ndevice: cpu\nstages:{stages}"
    (home / f"{name}.yaml").write_text(text)


@pytest.fixture(scope="module")
def whole(home: Path, kedge: Any) -> Whole:
    """A run that nothing interrupted, made once: the folder of its stage, and how often it called what was watched."""
    made: dict[tuple[str, str], tuple[Path, int]] = {}

    def run(roles: str, watched: str = "generation") -> tuple[Path, int]:
        if (roles, watched) not in made:
            runs = home / "whole" / watched
            code = kedge.run("run", home / f"{roles}.yaml", "--runs", runs, "--no-check", watched=watched)
            assert code == 0, kedge.output.read_text()
            made[roles, watched] = runs / roles / "train", kedge.calls()
        return made[roles, watched]

    return run


def assert_same(found: Path, expected: Path) -> None:
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(found / journal) == records(expected / journal)
    assert [one["step"] for one in records(expected / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]
    weights = "model/model.safetensors"
    assert (found / weights).read_bytes() == (expected / weights).read_bytes()
    assert status_of(found) == "done"
    assert [path.name for path in (found / "checkpoints").iterdir() if path.name.startswith(".")] == []


QUICK = {("separate", "generation", 1), ("lora", "update", 1)}
POINTS = [(roles, watched, part) for roles in ROLES for watched in WATCHED for part in range(4)]


@pytest.mark.parametrize(
    ("roles", "watched", "part"),
    [pytest.param(*point, marks=() if point in QUICK else pytest.mark.slow) for point in POINTS],
)
def test_killed_where_it_hurts_it_is_the_same_run(
    roles: str,
    watched: str,
    part: int,
    home: Path,
    whole: Whole,
    kedge: Any,
    tmp_path: Path,
) -> None:
    """At a random token of generation, a random part of a step, a random call into the system, in each quarter."""
    expected, total = whole(roles, watched)
    assert total > 40
    at = total * part // 4 + Random(f"{roles} {watched} {part}").randrange(1, total // 4)
    command = ("run", home / f"{roles}.yaml", "--runs", tmp_path)
    assert kedge.run(*command, "--no-check", calls=at, watched=watched) == -signal.SIGKILL
    resumed = ["--resume"] if (tmp_path / roles / "run.json").exists() else ["--no-check"]
    assert kedge.run(*command, *resumed) == 0, kedge.output.read_text()
    assert_same(tmp_path / roles / "train", expected)


@pytest.mark.slow
@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize("seed", [1, 2])
def test_killed_three_times_at_any_moment_it_is_the_same_run(
    roles: str, seed: int, home: Path, whole: Whole, kedge: Any, tmp_path: Path
) -> None:
    pick, resumed = Random(seed), ["--no-check"]
    for number, count in enumerate((1, 3, 5)):
        process = kedge.start("run", home / f"{roles}.yaml", "--runs", tmp_path, *resumed)
        # What the one before it logged may be lines enough: it must have gone on from there.
        wait_for(tmp_path / roles / "train/events.jsonl", number, having=b'"run.resumed"')
        wait_for(tmp_path / roles / "train/metrics.jsonl", count)
        time.sleep(pick.uniform(0.0, 0.15))
        assert kedge.kill(process) == -signal.SIGKILL
        resumed = ["--resume"]
    assert kedge.run("run", home / f"{roles}.yaml", "--runs", tmp_path, "--resume") == 0, kedge.output.read_text()
    assert_same(tmp_path / roles / "train", whole(roles)[0])
    codes = [one["code"] for one in records(tmp_path / roles / "train/events.jsonl")]
    assert codes.count("run.resumed") == 3


@pytest.mark.slow
def test_a_damaged_checkpoint_is_left_out_and_the_one_before_gives_the_same_run(
    home: Path, whole: Whole, kedge: Any, tmp_path: Path
) -> None:
    process = kedge.start("run", home / "separate.yaml", "--runs", tmp_path, "--no-check")
    wait_for(tmp_path / "separate/train/metrics.jsonl", 5)
    assert kedge.kill(process) == -signal.SIGKILL
    run = Run.open(tmp_path / "separate/train", for_writing=False)
    newest = run.checkpoints.path(run.checkpoints.steps()[-1]) / "state.safetensors"
    content = bytearray(newest.read_bytes())
    content[-5] ^= 1  # one bit
    newest.write_bytes(content)
    assert kedge.run("run", home / "separate.yaml", "--runs", tmp_path, "--resume") == 0, kedge.output.read_text()
    assert_same(tmp_path / "separate/train", whole("separate")[0])
    assert "checkpoint.damaged" in [one["code"] for one in records(tmp_path / "separate/train/events.jsonl")]


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_ctrl_c_once_saves_and_twice_stops_at_once(
    times: int, home: Path, whole: Whole, kedge: Any, tmp_path: Path
) -> None:
    stage = tmp_path / "separate/train"
    process = kedge.start("run", home / "separate.yaml", "--runs", tmp_path, "--no-check")
    wait_for(stage / "metrics.jsonl", 1)
    for _ in range(times):
        os.kill(process, signal.SIGINT)
        time.sleep(0.005)
    assert kedge.wait() == 130
    assert (status_of(stage), status_of(stage.parent)) == ("interrupted", "interrupted")
    done = len(records(stage / "metrics.jsonl"))
    codes = [one["code"] for one in records(stage / "events.jsonl")]
    if times == 1:
        assert Run.open(stage, for_writing=False).checkpoints.steps()[-1] == done
        assert codes == ["run.interrupted"]
    assert kedge.run("run", home / "separate.yaml", "--runs", tmp_path, "--resume") == 0, kedge.output.read_text()
    assert_same(stage, whole("separate")[0])


def test_an_uninterrupted_run_never_says_that_it_was_resumed(whole: Whole) -> None:
    codes = {one["code"] for one in records(whole("separate")[0] / "events.jsonl")}
    assert not codes & {"run.resumed", "run.cleared", "checkpoint.damaged"}
