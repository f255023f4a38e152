"""Processes that outlive the server: started once, found again, stopped step by step."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from studio_site import StudioSite, make_site

from kedge.core.errors import ConfigError
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.web.studio import jobs as module
from kedge.web.studio.jobs import Job, Jobs

SAVES = """
import signal, sys, time
def stop(*_):
    print("saved", flush=True)
    sys.exit(130)
signal.signal(signal.SIGINT, stop)
print("begun", flush=True)
time.sleep(60)
"""
DEAF = "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('begun', flush=True)\ntime.sleep(60)\n"


def wait_for(is_so: Callable[[], bool]) -> None:
    for _ in range(400):
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError("it never came")


def start(jobs: Jobs, code: str, name: str = "first", at_once: int = 1) -> Job:
    command = (sys.executable, "-S", "-c", code)
    job = jobs.start("run", command, subject=f"{name}.yaml", name=name, at_once=at_once)
    wait_for(lambda: "begun" in jobs.log(job)[0])
    return job


@pytest.fixture
def jobs(tmp_path: Path):
    made = Jobs(tmp_path / "jobs", cwd=tmp_path)
    yield made
    for job in made.all():
        made.end_now(job.id)


def test_stop_asks_to_save_and_the_end_is_kept(jobs: Jobs) -> None:
    job = start(jobs, SAVES)
    assert job.is_alive
    assert "saves and ends" in jobs.stop(job.id)
    wait_for(lambda: jobs.find(job.id).code == 130)
    assert jobs.log(job)[0] == "begun\nsaved\n"
    assert jobs.log(job, 6)[0] == "saved\n"
    assert jobs.stop(job.id) == "it has ended already"


def test_who_does_not_listen_is_asked_more_firmly(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = start(jobs, DEAF)
    jobs.stop(job.id)
    assert "you can ask more firmly" in jobs.stop(job.id)
    assert jobs.find(job.id).is_alive
    monkeypatch.setattr(module, "PRESS_AFTER_S", 0.0)
    assert "at once" in jobs.stop(job.id)
    wait_for(lambda: jobs.find(job.id).code == -signal.SIGTERM)


def test_one_run_at_a_time_unless_asked(jobs: Jobs) -> None:
    start(jobs, DEAF)
    with pytest.raises(ConfigError, match="first is running, and 1 may run at once here"):
        start(jobs, DEAF, "second")
    with pytest.raises(ConfigError, match="first is running already"):
        start(jobs, DEAF, "first", at_once=2)
    assert start(jobs, DEAF, "second", at_once=2).is_alive


def test_another_server_finds_what_runs(jobs: Jobs) -> None:
    job = start(jobs, SAVES)
    others = Jobs(jobs.folder, cwd=jobs.folder.parent)
    assert [found.id for found in others.running("run")] == [job.id]
    with pytest.raises(ConfigError, match="is running"):
        start(others, SAVES, "second")
    others.stop(job.id)
    wait_for(lambda: not others.find(job.id).is_alive)
    assert "saved" in others.log(job)[0]


def test_another_process_with_the_number_is_not_ours(jobs: Jobs) -> None:
    """A number comes again; the time at which its process began does not."""
    job = start(jobs, DEAF)
    file = jobs.folder / f"{job.id}.json"
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "born": "12345"}))
    assert not jobs.find(job.id).is_alive
    assert jobs.stop(job.id) == "it has ended already"
    assert job.is_alive  # nobody was told to end
    file.write_text(json.dumps({**json.loads(file.read_bytes()), "born": job.born}))


def test_a_damaged_file_is_no_job(jobs: Jobs) -> None:
    jobs.folder.mkdir(parents=True)
    (jobs.folder / "x.json").write_text("{")
    (jobs.folder / "y.json").write_text('{"id": "y"}')
    assert jobs.all() == []


def test_a_run_is_started_shown_and_stopped_by_pages(tmp_path: Path) -> None:
    site = make_site(tmp_path / "project", command=(sys.executable, "-S", "-c", SAVES))
    base = site.recipe()
    assert site.post("/run/start", {"file": "first.yaml", "base": base}).json() == {"go": "/run?name=first"}
    wait_for(lambda: "begun" in site.get("/run/live", name="first").json()["log"])
    news = site.get("/run/live", name="first").json()
    assert (news["status"], news["is_alive"]) == ("starting", True)
    again = site.get("/run/live", name="first", log=news["log_at"]).json()
    assert (again["log"], again["is_log_new"]) == ("", False)
    second = site.post("/run/start", {"file": "first.yaml", "base": base})
    assert second.status_code == 400
    assert "first is running" in second.json()["error"]
    assert "stopping" in site.post("/run/stop", {"name": "first"}).json()["say"]
    wait_for(lambda: "it can be resumed" in site.get("/run/live", name="first").json()["outcome"])
    assert not site.get("/run/live", name="first").json()["is_alive"]
    assert "first" in site.get("/").text


@pytest.mark.parametrize(("status", "outcome"), [("done", ""), ("interrupted", "how its process ended is not known")])
def test_an_end_that_nobody_saw_is_not_told_as_one(site: StudioSite, status: Any, outcome: str) -> None:
    """The server that began it was killed, and another one was open when it ended."""
    manifest = new_manifest(name="first", kind="sft", seed=1, settings={})
    with Run.create(site.folder / "runs" / "first", manifest=manifest) as run:
        run.finish(status)
    gone = Job(
        id="1-a", kind="run", subject="first.yaml", name="first", command=(), started=1.0, pid=2**22, born="gone"
    )
    site.studio.jobs.folder.mkdir(parents=True)
    site.studio.jobs._write(gone)
    news = site.get("/run/live", name="first").json()
    assert (news["status"], news["is_alive"]) == (status, False)
    assert news["outcome"].endswith(outcome and f"{outcome}; what it saved is here")
    assert bool(news["outcome"]) == bool(outcome)


def test_a_name_that_is_taken_is_told_at_its_field(site: StudioSite) -> None:
    base = site.recipe()
    (site.folder / "runs" / "first").mkdir(parents=True)
    reply = site.post("/run/start", {"file": "first.yaml", "base": base}).json()
    assert "resume it on its page" in reply["problems"]['["name"]'][0]
    assert site.commands == []


def test_what_another_tab_has_changed_is_not_started(site: StudioSite) -> None:
    base = site.recipe()
    site.change(base, "set", ("seed",), "5")
    assert site.post("/run/start", {"file": "first.yaml", "base": base}).status_code == 409
    assert site.commands == []
