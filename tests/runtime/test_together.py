"""Two processes as a user runs them: the same numbers as one, one writer, and refusals that come at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import crew
import every_stage
import failures
import kills
import pytest
from crew import Member

from kedge.runs.folder import status_of


def files_of(run: Path) -> set[str]:
    return {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}


def test_a_run_of_two_that_loses_one_goes_on_by_itself_and_gives_the_numbers_of_one(tmp_path: Path) -> None:
    planted = f'Path("done").exists() or (Path("done").touch(), {failures.SUICIDE})'
    failures.write_recipe(tmp_path, planted)
    command = [sys.executable, "-m", "kedge.cli", "run", "r.yaml", "--no-check", "--set", "placement.processes=2"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "process 1 was lost (SIGKILL), and the other processes were stopped: restart 1 of 3" in ended.stdout
    assert ended.stdout.count("done: runs/pair") == 1
    events = [json.loads(line) for line in (tmp_path / "runs/pair/events.jsonl").read_text().splitlines()]
    (lost,) = [event for event in events if event["code"] == "process.lost"]
    assert (lost["level"], lost["evidence"]["rank"], lost["evidence"]["signal"]) == ("warning", 1, "SIGKILL")
    assert failures.difference(failures.metrics(failures.alone()), failures.metrics(tmp_path)) is None
    assert status_of(tmp_path / "runs/pair") == "done"


def test_two_under_srun_leave_what_one_leaves(tmp_path: Path) -> None:
    failures.write_recipe(tmp_path)
    arguments = ["run", "r.yaml", "--no-check"]
    pair = crew.run([Member(tmp_path, arguments, place) for place in crew.by_srun(2)], tmp_path)
    assert pair.codes == [0, 0], pair
    assert (pair.err, pair.out[1]) == (["", ""], "")
    one, two = failures.alone() / "runs/pair", tmp_path / "runs/pair"
    assert files_of(one) == files_of(two)
    assert len((one / "ppo/samples.jsonl").read_text().splitlines()) == len(
        (two / "ppo/samples.jsonl").read_text().splitlines()
    )
    events = [json.loads(line)["message"] for line in (two / "ppo/events.jsonl").read_text().splitlines()]
    assert len(events) == len(set(events))
    assert failures.difference(failures.metrics(failures.alone()), failures.metrics(tmp_path)) is None
    assert_timed_by_process(one, two)


def assert_timed_by_process(one: Path, two: Path) -> None:
    """From the second step on the seconds of both processes are written, and those of one process alone never."""
    first, *others = [json.loads(line) for line in (two / "ppo/metrics.jsonl").read_text().splitlines()]
    by_rank = {f"time/{what}/{rank}" for what in ("busy", "communicate", "wait") for rank in (0, 1)}
    assert not by_rank & {*first}, "before the first step models and data were read"
    for line in others:
        assert by_rank | {"time/communicate", "time/wait"} <= {*line}
        for rank in (0, 1):
            whole = sum(line[f"time/{what}/{rank}"] for what in ("busy", "communicate", "wait"))
            assert abs(whole - line["time/step"]) < 0.5 * line["time/step"] + 0.3
            assert line[f"time/communicate/{rank}"] > 0
    alone = [json.loads(line) for line in (one / "ppo/metrics.jsonl").read_text().splitlines()]
    phases = {"step", "generate", "judge", "update", "save", "sync"}
    calls = {"reward_score", "policy_logprobs", "policy_update", "reference_logprobs", "critic_values", "critic_update"}
    assert {name for name in alone[1] if name.startswith("time/")} == {f"time/{name}" for name in phases | calls}
    for line in alone:
        parts = sum(line.get(f"time/{name}", 0.0) for name in phases - {"step"})
        assert abs(parts - line["time/step"]) < 1e-6
        assert sum(line[f"time/{name}"] for name in calls) <= line["time/judge"] + line["time/update"]


_KILLED_IN_SAVE = """
import os, signal
from pathlib import Path
rename = Path.rename

def killed(self, target):
    if self.name.startswith(".step-000002.partial"):
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(self, target)

Path.rename = killed
"""


def test_a_kill_while_a_checkpoint_is_written_is_resumed_on_one_process(tmp_path: Path) -> None:
    failures.write_recipe(tmp_path)
    first, second = failures.members(tmp_path, 2)
    ended = crew.run([replace(first, before=_KILLED_IN_SAVE), second], tmp_path)
    assert ended.codes == [-9, 76]
    assert [line["step"] for line in failures.metrics(tmp_path)] == [1, 2]
    assert failures.resumed_equals(tmp_path, 1) is None


def test_a_run_folder_that_not_all_see_is_refused_before_anything_is_there(tmp_path: Path) -> None:
    for name in ("here", "there"):
        failures.write_recipe(tmp_path / name)
    first, second = failures.members(tmp_path / "here", 2)
    ended = crew.run([first, replace(second, folder=tmp_path / "there")], tmp_path)
    assert ended.codes == [2, 2]
    assert "runs/pair: not all processes see this run folder: process 1 (" in ended.err[0]
    assert f"{tmp_path / 'there/runs/pair'}" in ended.err[0]
    assert not (tmp_path / "here/runs/pair").exists()
    assert not (tmp_path / "there/runs").exists()


@pytest.mark.parametrize(
    ("before", "arguments", "words"),
    [
        ('import kedge\nkedge.__version__ = "9.9"', (), "process 1 has Kedge 9.9, and process 0 has"),
        ("", ("--set", "seed=4"), "process 1 has another recipe"),
    ],
)
def test_processes_that_are_unlike_are_refused(
    tmp_path: Path, before: str, arguments: tuple[str, ...], words: str
) -> None:
    failures.write_recipe(tmp_path)
    first, second = failures.members(tmp_path, 2)
    other = replace(second, before=before, arguments=[*second.arguments, *arguments])
    ended = crew.run([first, other], tmp_path)
    assert ended.codes == [2, 2]
    assert words in ended.err[0]
    assert not (tmp_path / "runs/pair").exists()


_DISAGREEING = """
import os
from datetime import timedelta
from kedge.core.errors import ProcessError
from kedge.recipe.together import SharedTracker
from kedge.runtime.processes import joined, place_of
from kedge.stages.shared.interrupt import StopRequest

class Quiet:
    def log(self, metrics, *, step): pass

with joined(place_of(os.environ), on_gpu=False, timeout_s=60) as world:
    stop = StopRequest(world)
    tracker = SharedTracker(world, Quiet() if world.rank == 0 else None, stop)
    tracker.log({"loss": float("nan"), "time/step": world.rank}, step=1)
    assert not stop.is_asked
    if world.rank:
        stop.ask()
    assert not stop.is_asked
    tracker.log({"loss": 0.5}, step=2)
    assert stop.is_asked
    try:
        tracker.log({"kl/mean": 1.0, "reward/mean": 0.12 + world.rank / 100}, step=3)
    except ProcessError as error:
        print(error)
raise SystemExit(7)
"""


def test_processes_that_disagree_name_the_metric_and_a_stop_of_one_is_the_stop_of_all(tmp_path: Path) -> None:
    members = [Member(tmp_path, [], place, _DISAGREEING) for place in crew.by_torchrun(2)]
    ended = crew.run(members, tmp_path)
    assert ended.codes == [7, 7], ended
    words = "step 3: the processes do not agree: process 1 saw reward/mean 0.13, process 0 saw 0.12"
    assert all(text.startswith(words) for text in ended.out)


def test_a_number_of_processes_that_the_launcher_did_not_start_is_refused(tmp_path: Path) -> None:
    failures.write_recipe(tmp_path)
    ended = crew.run(failures.members(tmp_path, 2, "--set", "placement.processes=3"), tmp_path)
    assert ended.codes == [2, 2]
    assert "placement.processes is 3, and 2 processes were started; leave it out" in ended.err[0]


@pytest.mark.slow
def test_torchrun_starts_a_run(tmp_path: Path) -> None:
    failures.write_recipe(tmp_path)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*torchrun, "-m", "kedge.cli", "run", "r.yaml"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, timeout=280, check=False, env=environment
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("done: runs/pair") == 1
    assert failures.difference(failures.metrics(failures.alone()), failures.metrics(tmp_path)) is None


@pytest.mark.slow
def test_workers_end_when_their_launcher_is_killed(tmp_path: Path) -> None:
    failures.write_recipe(tmp_path, "time.sleep(3600)")
    command = [sys.executable, "-m", "kedge.cli", "run", "r.yaml", "--no-check", "--set", "placement.processes=2"]
    launcher = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    assert launcher.stdout.readline() == "run folder: runs/pair\n"
    launcher.kill()
    launcher.wait()
    until = time.monotonic() + 60
    while status_of(tmp_path / "runs/pair") == "running" and time.monotonic() < until:
        time.sleep(0.5)
    launcher.stdout.close()
    assert status_of(tmp_path / "runs/pair") == "interrupted"


@pytest.mark.slow
@pytest.mark.parametrize("case", kills.CASES, ids=str)
def test_killed_at_random_a_run_is_resumed_on_any_number_of_processes(case: kills.Case) -> None:
    assert kills.attempt(case) is None


@pytest.mark.slow
def test_every_kind_of_stage_leaves_the_same_files_and_numbers_on_two_processes(tmp_path: Path) -> None:
    for name in ("one", "two"):
        every_stage.write_recipe(tmp_path / name)
    arguments = ["run", "r.yaml", "--no-check"]
    assert crew.run([Member(tmp_path / "one", arguments)], tmp_path).codes == [0]
    pair = crew.run([Member(tmp_path / "two", arguments, place) for place in crew.by_torchrun(2)], tmp_path)
    assert (pair.codes, pair.err) == ([0, 0], ["", ""])
    one, two = tmp_path / "one/runs/all", tmp_path / "two/runs/all"
    assert files_of(one) == files_of(two)
    for journal in sorted(one.glob("*/metrics.jsonl")):
        left, right = (untied(failures.lines_of(path)) for path in (journal, two / journal.parent.name / journal.name))
        assert failures.difference(left, right) is None


def untied(lines: list[dict[str, float]]) -> list[dict[str, float]]:
    """Without which answer a policy prefers that has not learnt yet: it is its reference, so rounding decides."""
    return [
        {name: value for name, value in line.items() if line["step"] > 1 or not name.endswith("/accuracy")}
        for line in lines
    ]


LEAVES = """
import sys
from pathlib import Path

from kedge.runtime.processes import Place, joined

def threads():
    return {file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")}

try:
    place = Place(rank=0, size=1, local_rank=0, address="127.0.0.1", port=int(sys.argv[1]))
    with joined(place, on_gpu=False, timeout_s=60) as world:
        world.gather(1)
        import torch.distributed.checkpoint, torch.distributed.fsdp
        assert any("gloo" in name for name in threads()), threads()
        if sys.argv[2] == "fails":
            raise ValueError
except ValueError:
    pass
print(sorted(name for name in threads() if "gloo" in name))
"""


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads have names in /proc on Linux")
@pytest.mark.parametrize("how", ["ends", "fails"])
def test_no_thread_of_the_group_is_left_for_the_end_of_python(how: str) -> None:
    """One that then drops a tensor would abort the process, which the launcher takes for a lost one. What is imported
    within may hold the group for ever."""
    command = [sys.executable, "-c", LEAVES, str(crew.free_port()), how]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout.strip()) == (0, "[]"), ended.stderr
