"""A run's folder from beginning to end, and all the ways of not being one."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kedge.core.errors import RunError
from kedge.core.findings import Finding
from kedge.runs import CheckpointSettings, Manifest, Run, RunTracker, new_manifest, read_manifest, runs_in, status_of

Start = Callable[..., "subprocess.Popen[str]"]


def write_weights(folder: Path) -> None:
    (folder / "weights.bin").write_text("weights")


def without_time(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert all(isinstance(record["at"], float) for record in records)
    return [{name: value for name, value in record.items() if name != "at"} for record in records]


def test_a_run_from_beginning_to_end(tmp_path: Path, manifest: Manifest) -> None:
    folder = tmp_path / "runs" / "hh" / "ppo"
    with Run.create(folder, manifest=manifest) as run:
        assert run.status == "running"
        run.log({"reward/mean": 0.1 + 0.2, "length/mean": 12}, 1)
        run.event("warning", "kl.high", "KL is 7.1 nats", step=1, kl=7.1)
        run.sample({"prompt": "2+2?", "answer": "NaN"}, 1)
        run.save_checkpoint(1, write_weights)
        run.finish("done")

    reader = Run.open(folder, for_writing=False)
    assert reader.status == "done"
    assert reader.manifest.finished is not None
    assert without_time(reader.read_metrics()) == [{"step": 1, "reward/mean": 0.30000000000000004, "length/mean": 12}]
    assert without_time(reader.read_samples()) == [{"step": 1, "prompt": "2+2?", "answer": "NaN"}]
    assert without_time(reader.read_events()) == [
        {"step": 1, "level": "warning", "code": "kl.high", "message": "KL is 7.1 nats", "evidence": {"kl": 7.1}}
    ]
    visible = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
    assert visible == ["checkpoints", "events.jsonl", "metrics.jsonl", "run.json", "samples.jsonl"]


def test_metrics_of_numpy_and_torch_are_plain_numbers(tmp_path: Path, manifest: Manifest) -> None:
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        run.log({"a": np.float32(0.5), "b": torch.tensor(0.25), "c": np.float64(0.1), "d": np.int64(3), "e": True}, 1)  # pyright: ignore[reportArgumentType]

        assert without_time(run.read_metrics()) == [{"step": 1, "a": 0.5, "b": 0.25, "c": 0.1, "d": 3.0, "e": 1.0}]


@pytest.mark.parametrize("bad", ["0.5", None, torch.ones(2)], ids=str)
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, manifest: Manifest, bad: Any) -> None:
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        with pytest.raises(RunError, match="Metric 'loss' is not a number"):
            run.log({"loss": bad}, 1)
        assert run.read_metrics() == []


def test_names_that_every_line_has_are_refused(tmp_path: Path, manifest: Manifest) -> None:
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        with pytest.raises(RunError, match="The name 'step' is taken"):
            run.log({"loss": 1.0, "step": 3.0}, 1)
        with pytest.raises(RunError, match="The name 'at' is taken"):
            run.sample({"at": "home"}, 1)


def test_a_run_is_never_begun_over_another(tmp_path: Path, manifest: Manifest) -> None:
    Run.create(tmp_path / "run", manifest=manifest).close()
    with pytest.raises(
        RunError, match=r"already holds a run\. Resume it \(--resume\), or give the new run another name"
    ):
        Run.create(tmp_path / "run", manifest=manifest)

    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "thesis.tex").write_text("precious")
    with pytest.raises(RunError, match=r"not empty and not a run \(it holds thesis\.tex\)"):
        Run.create(tmp_path / "notes", manifest=manifest)
    assert [path.name for path in (tmp_path / "notes").iterdir()] == ["thesis.tex"]


def test_a_folder_that_a_kill_left_without_a_manifest_can_be_used(tmp_path: Path, manifest: Manifest) -> None:
    (tmp_path / ".lock").write_text("")
    (tmp_path / ".run.json.7.partial").write_text('{"sch')

    with Run.create(tmp_path, manifest=manifest) as run:
        assert run.status == "running"


def test_a_reader_cannot_write(tmp_path: Path, manifest: Manifest) -> None:
    Run.create(tmp_path / "run", manifest=manifest).close()
    before = sorted(path.name for path in (tmp_path / "run").iterdir())
    reader = Run.open(tmp_path / "run", for_writing=False)

    for write in (
        lambda: reader.log({"a": 1.0}, 1),
        lambda: reader.event("info", "a.b", "c"),
        lambda: reader.sample({}, 1),
        lambda: reader.save_checkpoint(1, write_weights),
        lambda: reader.resume_at(None),
        lambda: reader.finish("done"),
    ):
        with pytest.raises(RunError, match="open for reading only"):
            write()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == before


def test_a_closed_run_cannot_be_written(tmp_path: Path, manifest: Manifest) -> None:
    run = Run.create(tmp_path / "run", manifest=manifest)
    run.close()
    run.close()
    with pytest.raises(RunError, match="open for reading only"):
        run.log({"a": 1.0}, 1)


_HOLD = """
import sys
from pathlib import Path
from kedge.runs import Run
run = Run.open(Path(sys.argv[1]), for_writing=True)
print(run.status, flush=True)
sys.stdin.read()
"""


def test_two_processes_cannot_write_and_a_killed_one_is_interrupted(
    tmp_path: Path, manifest: Manifest, start: Start
) -> None:
    folder = tmp_path / "run"
    Run.create(folder, manifest=manifest).close()
    assert status_of(folder) == "interrupted"
    child = start(_HOLD, folder)
    assert child.stdout is not None
    assert child.stdout.readline() == "running\n"

    assert status_of(folder) == "running"
    assert Run.open(folder, for_writing=False).status == "running"
    with pytest.raises(RunError, match=f"being written by process {child.pid} "):
        Run.open(folder, for_writing=True)
    child.kill()
    child.wait()
    assert status_of(folder) == "interrupted"
    Run.open(folder, for_writing=True).close()


@pytest.mark.parametrize("status", ["done", "failed", "stopped", "interrupted"])
def test_how_it_ended_is_kept(tmp_path: Path, manifest: Manifest, status: Any) -> None:
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        run.finish(status)
        assert run.status == status

    assert status_of(tmp_path / "run") == status


def test_resuming_drops_what_will_be_done_again(tmp_path: Path, manifest: Manifest) -> None:
    folder = tmp_path / "run"
    with Run.create(folder, manifest=manifest, keep=CheckpointSettings(keep=9)) as run:
        run.event("info", "run.started", "go")
        for step in range(1, 6):
            run.log({"loss": 1 / step}, step)
            run.sample({"text": str(step)}, step)
            run.event("info", "step.done", "done", step=step)
            if step % 2 == 0:
                run.save_checkpoint(step, write_weights, pin="best")
        run.finish("failed")

    with Run.open(folder, for_writing=True) as run:
        run.resume_at(2)
        assert run.status == "running"
        assert run.manifest.finished is None
        run.log({"loss": 0.25}, 3)
        assert [record["step"] for record in run.read_metrics()] == [1, 2, 3]
        assert [record["step"] for record in run.read_samples()] == [1, 2]
        assert run.checkpoints.steps() == [2]
        assert run.checkpoints.pins() == {"best": 2}  # where it was at that step
        *earlier, resumed = run.read_events()
        assert [event["code"] for event in earlier] == ["run.started", "step.done", "step.done"]
        assert resumed["code"] == "run.resumed"
        assert resumed["evidence"] == {
            "resumed_at": 2,
            "dropped": {"metrics.jsonl": 3, "events.jsonl": 3, "samples.jsonl": 3},
            "dropped_checkpoints": [4],
        }
        run.resume_at(None)
        assert (run.read_metrics(), run.checkpoints.steps()) == ([], [])


def test_a_writer_clears_what_a_kill_left_and_says_so(tmp_path: Path, manifest: Manifest) -> None:
    folder = tmp_path / "run"
    with Run.create(folder, manifest=manifest) as run:
        run.log({"loss": 1.0}, 1)
        run.save_checkpoint(1, write_weights)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "lo')
    (folder / "checkpoints" / ".step-000002.partial-7").mkdir()
    Run.open(folder, for_writing=False)  # a reader leaves everything as it is
    assert (folder / "checkpoints" / ".step-000002.partial-7").exists()

    with Run.open(folder, for_writing=True) as run:
        [event] = run.read_events()
        assert (event["code"], event["evidence"]) == (
            "run.cleared",
            {"bytes_cut": {"metrics.jsonl": 15}, "leftovers": [".step-000002.partial-7"]},
        )
        assert not run.metrics.read().is_cut_off
    with Run.open(folder, for_writing=True) as run:
        assert len(run.read_events()) == 1  # nothing to clear, nothing to say


def test_a_failed_opening_frees_the_lock(tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "run"
    Run.create(folder, manifest=manifest).close()
    (folder / "metrics.jsonl").mkdir()
    with pytest.raises(RunError, match=r"Cannot repair .*metrics\.jsonl: Is a directory"):
        Run.open(folder, for_writing=True)
    (folder / "metrics.jsonl").rmdir()

    Run.open(folder, for_writing=True).close()


def test_journals_are_on_disk_before_a_checkpoint_is(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real_fsync = os.fsync

    def fsync(handle: int) -> None:
        synced.append(Path(os.readlink(f"/proc/self/fd/{handle}")).name)
        real_fsync(handle)

    with Run.create(tmp_path / "run", manifest=manifest) as run:
        run.log({"a": 1.0}, 1)
        monkeypatch.setattr(os, "fsync", fsync)
        run.save_checkpoint(1, write_weights)

    assert synced[0] == "metrics.jsonl"
    assert {"weights.bin", "checkpoints"} <= set(synced[1:])


def test_a_folder_that_cannot_be_made_is_named(
    tmp_path: Path, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Root ignores permissions, so: a path below a regular file, and refusals of the system that are simulated.
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"Cannot create .*file/run: Not a directory"):
        Run.create(tmp_path / "file" / "run", manifest=manifest)

    for code, message in ((errno.EROFS, "read-only for this user"), (errno.ENOSPC, "the disk is full")):

        def refuse(*_: object, code: int = code) -> None:
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "mkdir", refuse)
            with pytest.raises(RunError, match=message) as caught:
                Run.create(tmp_path / "run", manifest=manifest)
            assert caught.value.exit_code == 1


def test_a_full_disk_stops_a_log_and_keeps_what_was_there(tmp_path: Path, manifest: Manifest) -> None:
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        run.event("info", "a.b", "kept")
        (tmp_path / "run" / "metrics.jsonl").symlink_to("/dev/full")
        with pytest.raises(RunError, match="the disk is full"):
            run.log({"loss": 1.0}, 1)

        assert [event["message"] for event in run.read_events()] == ["kept"]


def test_stages_are_runs_inside_the_run_of_the_pipeline(tmp_path: Path) -> None:
    root = tmp_path / "runs" / "hh"
    with Run.create(root, manifest=new_manifest(name="hh", kind="pipeline", seed=7, settings={"name": "hh"})):
        for stage in ("sft", "reward", "ppo"):
            manifest = new_manifest(name="hh", stage=stage, kind=stage, seed=7, settings={})
            with Run.create(root / stage, manifest=manifest) as run:
                run.finish("done")
        (root / "notes").mkdir()

    assert [read_manifest(folder).stage for folder in runs_in(root)] == ["sft", "reward", "ppo"]
    assert runs_in(tmp_path / "runs") == [root]
    assert runs_in(tmp_path / "nowhere") == []


def test_a_finding_becomes_an_event(tmp_path: Path, manifest: Manifest) -> None:
    finding = Finding(level="warning", code="kl.high", message="KL is high", fix="raise kl.start", evidence={"kl": 9.5})
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        tracker = RunTracker(run)
        tracker.event(finding.as_dict() | {"step": 4})
        tracker.log({"loss": 2.0}, step=4)
        tracker.close()

        [event] = run.read_events()
        assert (event["step"], event["evidence"]) == (4, {"fix": "raise kl.start", "kl": 9.5})
        assert without_time(run.read_metrics()) == [{"step": 4, "loss": 2.0}]


def test_torch_is_not_imported_for_a_run_folder() -> None:
    script = "import sys, kedge.runs, kedge.monitor.trackers; print(json.dumps('torch' in sys.modules))"
    child = subprocess.run([sys.executable, "-c", "import json; " + script], capture_output=True, text=True, check=True)

    assert json.loads(child.stdout) is False


def test_what_a_start_reports_is_told_once_by_all_processes(tmp_path: Path, manifest: Manifest) -> None:
    with Run.create(tmp_path / "a", manifest=manifest) as run:
        run.event("info", "sft.data", "60 conversations", share=0.1)
        run.event("info", "eval.note", "twice in one process")
        run.event("info", "eval.note", "twice in one process")
    with Run.open(tmp_path / "a", for_writing=True) as run:
        run.event("info", "sft.data", "60 conversations", share=0.1)
        run.event("info", "sft.data", "61 conversations", share=0.1)
        run.event("info", "sft.data", "60 conversations", step=3, share=0.1)
        run.event("info", "run.resumed", "again")
        run.event("info", "run.resumed", "again")
    told = [(event["code"], event["message"], event["step"]) for event in run.read_events()]
    assert told == [
        ("sft.data", "60 conversations", None),
        ("eval.note", "twice in one process", None),
        ("eval.note", "twice in one process", None),
        ("sft.data", "61 conversations", None),
        ("sft.data", "60 conversations", 3),
        ("run.resumed", "again", None),
        ("run.resumed", "again", None),
    ]
