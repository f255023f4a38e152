"""The files as schedulers run them: an imitation of Slurm, and torchrun as pods would call it, on this machine."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from launch_attacks import IN_GROUPS, expanded
from ruamel.yaml import YAML

from kedge.runs.folder import status_of

Kedge = Callable[..., Any]
RECIPE = """
kedge: 1
name: pair
model: tiny
device: cpu
stages:
  sft: {kind: sft, data: demos.jsonl, epochs: 12, batch: 4, max_length: 64, samples: 0, checkpoints: {every: 4}}
"""
_SRUN = """#!{python}
import os, pathlib, subprocess, sys
words = sys.argv[1:]
first = next(number for number, word in enumerate(words) if not word.startswith("--"))
assert {{"--ntasks-per-node=2", "--kill-on-bad-exit=0", "--wait=60"}} <= {{*words[:first]}}, words
assert os.environ["MASTER_ADDR"] == "localhost"
tasks = [
    subprocess.Popen(words[first:], env={{**os.environ, "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(rank), "SLURM_STEP_NODELIST": "node1", "OMP_NUM_THREADS": "1"}})
    for rank in range(2)
]
pathlib.Path("tasks").write_text(" ".join(str(task.pid) for task in tasks))
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
_SCONTROL = """#!/bin/bash
if [[ $1 == show ]]; then echo localhost; else echo "$@" >> requeued; fi
"""
_KEDGE = """#!/bin/bash
exec {python} -m kedge.cli "$@"
"""


def write_inputs(home: Path) -> None:
    (home / "r.yaml").write_text(RECIPE)
    turns = [
        [{"role": "user", "content": f"q {row}"}, {"role": "assistant", "content": f"a {row}"}] for row in range(16)
    ]
    (home / "demos.jsonl").write_text("".join(json.dumps({"messages": turn}) + "\n" for turn in turns))


def write_tools(folder: Path) -> None:
    folder.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL), ("kedge", _KEDGE)):
        (folder / name).write_text(text.format(python=sys.executable) if name != "scontrol" else text)
        (folder / name).chmod(0o755)


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return door.getsockname()[1]


def start(home: Path, *, seconds_left: int, job: int, more: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
    """The sbatch file as Slurm starts it, so long before its time limit."""
    environment = {
        **os.environ,
        "PATH": f"{home / 'bin'}:/usr/bin:/bin",
        "SLURM_JOB_ID": str(job),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_END_TIME": str(int(time.time()) + seconds_left),
        **(more or {}),
    }
    return subprocess.Popen(
        ["bash", "pair.sbatch"],
        cwd=home,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def metrics(home: Path) -> list[dict[str, Any]]:
    lines = (home / "runs/pair/sft/metrics.jsonl").read_text().splitlines()
    return [{name: value for name, value in json.loads(line).items() if _is_told(name)} for line in lines]


def _is_told(name: str) -> bool:
    return not name.startswith(("time/", "tokens/")) and name != "at"


def tell_after_a_step(home: Path, job: subprocess.Popen[str]) -> None:
    """SIGTERM to the processes of the job, as Slurm sends it, once they learn."""
    written, until = home / "runs/pair/sft/metrics.jsonl", time.monotonic() + 120
    while not (written.exists() and written.read_text().count("\n") >= 2):
        assert job.poll() is None, job.communicate()
        assert time.monotonic() < until
        time.sleep(0.02)
    for task in (home / "tasks").read_text().split():
        os.kill(int(task), signal.SIGTERM)


@pytest.mark.slow
def test_a_job_saves_before_its_time_limit_goes_back_into_the_queue_and_ends_like_one_that_had_time(
    kedge: Kedge, tmp_path: Path
) -> None:
    for home in (tmp_path / "short", tmp_path / "long"):
        home.mkdir()
        write_inputs(home)
        write_tools(home / "bin")
        os.chdir(home)
        arguments = ("--gpus-per-node", "0", "--processes-per-node", "2")
        assert kedge("launch", "slurm", "r.yaml", *arguments).code == 0
    whole = start(tmp_path / "long", seconds_left=3600, job=free_port() % 20_000)
    assert whole.communicate(timeout=250)[1] is None
    assert whole.returncode == 0
    home = tmp_path / "short"
    job = start(home, seconds_left=100, job=free_port() % 20_000)
    tell_after_a_step(home, job)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 130, said
    assert (home / "requeued").read_text().startswith("requeue ")
    assert status_of(home / "runs/pair") == "interrupted"
    again = start(home, seconds_left=3600, job=free_port() % 20_000)
    said, _ = again.communicate(timeout=250)
    assert again.returncode == 0, said
    assert status_of(home / "runs/pair") == "done"
    assert metrics(home) == metrics(tmp_path / "long")


@pytest.mark.slow
def test_a_person_who_stops_a_job_long_before_its_end_is_obeyed(kedge: Kedge, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    write_tools(tmp_path / "bin")
    assert kedge("launch", "slurm", "r.yaml", "--gpus-per-node", "0", "--processes-per-node", "2").code == 0
    job = start(tmp_path, seconds_left=3600, job=free_port() % 20_000)
    tell_after_a_step(tmp_path, job)
    said, _ = job.communicate(timeout=120)
    assert job.returncode == 130, said
    assert not (tmp_path / "requeued").exists()


@pytest.mark.slow
def test_the_pods_of_a_jobset_find_each_other_and_a_second_start_goes_on(kedge: Kedge, tmp_path: Path) -> None:
    """Their command, with the first pod's name replaced by this machine's."""
    write_inputs(tmp_path)
    arguments = ("--nodes", "2", "--gpus-per-node", "0", "--processes-per-node", "1", "--image", "a:1")
    done = kedge("launch", "kubernetes", "r.yaml", *arguments, "--volume", f"data:{tmp_path}", "--to", "-")
    assert done.code == 0, done.err
    job = YAML(typ="safe", pure=True).load(done.out)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = job["template"]["spec"]["containers"]
    for _ in range(2):
        port = free_port()
        pods = [pod(container, rank, port) for rank in range(job["completions"])]
        ended = [(process.communicate(timeout=250)[0], process.returncode) for process in pods]
        assert [code for _, code in ended] == [0, 0], ended
        assert status_of(tmp_path / "runs/pair") == "done"
    steps = [line["step"] for line in metrics_with_steps(tmp_path)]
    assert steps == list(range(1, len(steps) + 1)), "the second start found everything done"


def metrics_with_steps(home: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (home / "runs/pair/sft/metrics.jsonl").read_text().splitlines()]


def pod(container: Any, rank: int, port: int) -> subprocess.Popen[str]:
    words = [expanded(word, {"NODE_RANK": str(rank)}) for word in container["command"]]
    here = {
        "--master-addr=pair-node-0-0.pair": "--master-addr=127.0.0.1",
        "--master-port=29500": f"--master-port={port}",
    }
    command = [sys.executable, "-m", "torch.distributed.run", *(here.get(word, word) for word in words[1:])]
    own = {entry["name"]: entry["value"] for entry in container["env"] if "value" in entry}
    return subprocess.Popen(
        command,
        cwd=container["workingDir"],
        env={**os.environ, **own, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


_DRIVER = """#!/bin/bash
trap 'sleep 0.3; touch saved; exit 130' TERM
touch started
for _ in {1..200}; do sleep 0.05; done
exit 9
"""


def test_the_driver_of_groups_is_told_through_the_script_and_saves_before_the_job_goes_back(
    kedge: Kedge, tmp_path: Path
) -> None:
    """Slurm signals the script alone (B:). Ray and Python are not called for real."""
    (tmp_path / "r.yaml").write_text(IN_GROUPS)
    assert kedge("launch", "slurm", "r.yaml", "--nodes", "2").code == 0
    write_tools(tmp_path / "bin")
    for name, text in (("srun", '#!/bin/bash\necho "$*" >> steps\n'), ("python", "#!/bin/bash\n"), ("kedge", _DRIVER)):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    job = start(tmp_path, seconds_left=100, job=7)
    while not (tmp_path / "started").exists():
        assert job.poll() is None, job.communicate()
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    said, _ = job.communicate(timeout=60)
    assert (job.returncode, (tmp_path / "saved").exists()) == (130, True), said
    assert (tmp_path / "requeued").read_text() == "requeue 7\n"
    head, worker = sorted((tmp_path / "steps").read_text().splitlines(), key=lambda step: "--head" not in step)
    assert "--nodelist=localhost" in head
    assert "--num-gpus=8 --include-dashboard=false --block" in head
    assert "--nodes=1 --ntasks=1 --exclude=localhost" in worker
    assert "--address=localhost:20007 --num-gpus=8 --block" in worker


_RAY_SRUN = """#!/bin/bash
while [[ $1 == --* ]]; do shift; done
[[ $* == *--head* ]] && sleep 5  # the machines of a job do not come in order
exec "$@" --num-cpus=2
"""


@pytest.mark.ray
@pytest.mark.timeout(600)
def test_the_script_of_groups_starts_ray_on_all_machines_and_the_driver_when_they_have_come(
    kedge: Kedge, tmp_path: Path
) -> None:
    """With Ray itself, two of it on this machine."""
    pytest.importorskip("ray", reason="Ray is not installed: pip install 'kedge[ray]'")
    from tests.groups.test_ray import RECIPE as PPO
    from tests.groups.test_ray import write_run

    write_run(tmp_path)
    (tmp_path / "r.yaml").write_text(
        f"{PPO}placement: {{groups: {{learner: {{gpus: 2}}, critic: {{roles: [critic]}}}}}}\n"
    )
    arguments = ("--nodes", "2", "--gpus-per-node", "0", "--set", "stages.ppo.roles=separate")
    assert kedge("launch", "slurm", "r.yaml", *arguments, "--to", "pair.sbatch").code == 0
    write_tools(tmp_path / "bin")
    (tmp_path / "bin/srun").write_text(_RAY_SRUN)
    for name in ("ray", "python"):  # not links: by a link Python does not find its environment
        shim = tmp_path / "bin" / name
        shim.write_text(f'#!/bin/bash\nexec "{Path(sys.executable).with_name(name)}" "$@"\n')
        shim.chmod(0o755)
    job = start(tmp_path, seconds_left=3600, job=free_port() % 20_000, more={"RAY_AUTH_MODE": "disabled"})
    try:
        job.wait(timeout=300)
    finally:
        os.killpg(job.pid, signal.SIGTERM)  # as Slurm does with the steps of a job whose script has ended
    said, _ = job.communicate(timeout=60)
    assert job.returncode == 0, said
    assert "group critic: 1 process(es), critic" in said
    assert status_of(tmp_path / "runs/short") == "done"
