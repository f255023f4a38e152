"""Checkpoints: whole or absent, the last good one survives, damage is detected and explained."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError
from safetensors import SafetensorError

from kedge.core.errors import CheckpointError, RunError
from kedge.runs.checkpoints import Checkpoints, CheckpointSettings, wait_for_files


def writer(text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / "weights.bin").write_text(text)
        (folder / "optimiser").mkdir()
        (folder / "optimiser" / "moments.bin").write_text(text[::-1])

    return write


def checkpoints(folder: Path, *, keep: int = 2, keep_every: int | None = None) -> Checkpoints:
    return Checkpoints(folder / "checkpoints", CheckpointSettings(every=10, keep=keep, keep_every=keep_every))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def newest(store: Checkpoints, *, check_hashes: bool = True) -> int:
    latest = store.latest(check_hashes=check_hashes)
    assert latest is not None
    return latest.checkpoint.step


def test_a_checkpoint_lists_its_files_with_sizes_and_hashes(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    saved = store.save(120, writer("abc"), metrics={"reward/mean": 0.1, "kl/mean": float("nan")})

    assert saved.folder == tmp_path / "checkpoints" / "step-000120"
    listed = json.loads((saved.folder / "checkpoint.json").read_text())
    assert listed["step"] == 120
    assert listed["metrics"] == {"reward/mean": 0.1, "kl/mean": "NaN"}
    # b2sum -l 128 of "abc" and "cba"
    assert listed["files"] == {
        "weights.bin": {"size": 3, "hash": "cf4ab791c62b8d2b2109c90275287816"},
        "optimiser/moments.bin": {"size": 3, "hash": "442454ac0e3fea618a373a13d7ed6cf4"},
    }
    assert names(tmp_path) == ["step-000120"]
    again = store.read(120, check_hashes=True)
    assert (again.step, again.created, again.metrics["reward/mean"]) == (120, saved.created, 0.1)


def test_a_reader_sees_nothing_before_everything_is_there(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)

    def look_while_writing(folder: Path) -> None:
        writer("abc")(folder)
        assert store.steps() == []
        assert store.latest() is None

    store.save(1, look_while_writing)
    assert store.steps() == [1]


def test_none_is_none(tmp_path: Path) -> None:
    assert checkpoints(tmp_path).latest() is None
    assert checkpoints(tmp_path).steps() == []
    assert not list(tmp_path.iterdir())


def test_only_the_newest_stay(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=2)
    for step in (10, 20, 30, 40):
        store.save(step, writer(str(step)))

    assert names(tmp_path) == ["step-000030", "step-000040"]
    assert newest(store) == 40


def test_divisible_steps_and_pinned_ones_stay(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=1, keep_every=40)
    store.save(10, writer("a"), pin="best")
    store.save(20, writer("b"), pin="gold")
    for step in (30, 40, 50, 60):
        store.save(step, writer("c"))
    assert store.steps() == [10, 20, 40, 60]

    store.pin(40, "best")  # takes the pin from 10
    store.save(70, writer("d"))
    assert store.steps() == [20, 40, 70]
    assert store.pins() == {"best": 40, "gold": 20}


def test_a_pin_needs_a_checkpoint(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    store.save(10, writer("a"))
    with pytest.raises(CheckpointError, match=r"Cannot pin step 11 as 'best': .* holds steps \[10\]"):
        store.pin(11, "best")


def test_damaged_pins_are_named(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    store.save(10, writer("a"), pin="best")
    (tmp_path / "checkpoints" / "pins.json").write_text("[1")
    with pytest.raises(CheckpointError, match=r"pins\.json cannot be read"):
        store.save(20, writer("b"), pin="best")
    assert newest(store) == 10


def test_a_pin_that_moves_to_a_checkpoint_that_never_came_stays_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = checkpoints(tmp_path, keep=1)
    store.save(10, writer("a"), pin="best")

    def fail(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises(RunError, match="Input/output error"):
            store.save(20, writer("b"), pin="best")
    assert store.pins() == {"best": 10}
    store.discard_after(10)
    store.save(20, writer("b"))  # another past: this 20 is not the one that was to be pinned
    assert store.pins() == {"best": 10}
    assert store.steps() == [10, 20]


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=3)
    for step in (999_999, 1_000_000, 5):
        store.save(step, writer("a"))

    assert store.steps() == [5, 999_999, 1_000_000]
    assert newest(store) == 1_000_000


def cut_list(folder: Path) -> None:
    (folder / "checkpoint.json").write_text((folder / "checkpoint.json").read_text()[:40])


def flip_a_byte(folder: Path) -> None:
    (folder / "weights.bin").write_text("c")


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no list": (lambda folder: (folder / "checkpoint.json").unlink(), r"checkpoint\.json is missing"),
    "list cut off": (cut_list, r"checkpoint\.json cannot be used"),
    "list of another kind": (lambda folder: (folder / "checkpoint.json").write_text("[]"), r"cannot be used"),
    "file gone": (lambda folder: (folder / "weights.bin").unlink(), r"weights\.bin is missing"),
    "nested file cut off": (
        lambda folder: (folder / "optimiser" / "moments.bin").write_text(""),
        r"moments\.bin has 0 bytes instead of 1",
    ),
    "byte changed": (flip_a_byte, r"weights\.bin has changed since it was written"),
}


@pytest.mark.parametrize(("damage", "reason"), DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_skipped_and_said(
    tmp_path: Path, damage: Callable[[Path], object], reason: str
) -> None:
    store = checkpoints(tmp_path)
    store.save(10, writer("a"))
    damage(store.save(20, writer("b")).folder)
    latest = store.latest()

    assert latest is not None
    assert latest.checkpoint.step == 10
    assert len(latest.skipped) == 1
    with pytest.raises(CheckpointError, match=reason):
        raise CheckpointError(latest.skipped[0])


def test_sizes_alone_do_not_see_a_changed_byte(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    store.save(10, writer("a"))
    flip_a_byte(store.save(20, writer("b")).folder)

    assert newest(store, check_hashes=False) == 20
    assert newest(store, check_hashes=True) == 10


def test_all_damaged_is_an_error_that_lists_them(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    for step in (10, 20):
        flip_a_byte(store.save(step, writer("a")).folder)

    with pytest.raises(CheckpointError, match=r"(?s)none of the 2 checkpoint\(s\).*step-000020.*step-000010") as caught:
        store.latest()
    assert caught.value.exit_code == 1


def test_a_renamed_checkpoint_is_not_believed(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    folder = store.save(10, writer("a")).folder
    shutil.copytree(folder, folder.with_name("step-000030"))

    assert newest(store) == 10


def test_damaged_ones_do_not_push_out_a_good_one(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=2)
    store.save(10, writer("a"))
    (store.save(20, writer("b")).folder / "weights.bin").unlink()
    store.save(30, writer("c"))

    assert store.steps() == [10, 30]


def test_the_one_just_saved_stays_even_below_others(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=1)
    store.save(50, writer("a"))
    store.save(20, writer("b"))

    assert store.steps() == [20, 50]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    store.save(10, writer("old"))
    store.save(10, writer("new"))

    assert (store.path(10) / "weights.bin").read_text() == "new"
    assert names(tmp_path) == ["step-000010"]
    assert newest(store) == 10


def test_a_replacement_that_fails_at_the_last_moment_brings_the_old_one_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = checkpoints(tmp_path)
    store.save(10, writer("old"))
    real_rename = os.rename

    def rename(source: Path, target: Path) -> None:
        if ".partial-" in str(source):
            raise OSError(errno.EIO, "Input/output error")
        real_rename(source, target)

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(RunError, match="Input/output error"):
        store.save(10, writer("new"))
    assert names(tmp_path) == ["step-000010"]
    assert (store.path(10) / "weights.bin").read_text() == "old"


def test_discarding_takes_later_steps_and_their_pins(tmp_path: Path) -> None:
    store = checkpoints(tmp_path, keep=9)
    for step in (10, 20, 30):
        store.save(step, writer("a"), pin=f"pin{step}")

    assert store.discard_after(10) == [20, 30]
    assert (store.steps(), store.pins()) == ([10], {"pin10": 10})
    assert store.discard_after(None) == [10]
    assert names(tmp_path) == ["pins.json"]
    assert store.pins() == {}


def test_leftovers_of_a_kill_are_cleared_and_a_replaced_one_comes_back(tmp_path: Path) -> None:
    store = checkpoints(tmp_path)
    folder = store.save(10, writer("a")).folder
    folder.rename(folder.with_name(".step-000010.replaced-7"))
    store.save(20, writer("b"))
    for name in (".step-000030.partial-7", ".step-000005.removed-7", ".step-000020.replaced-7"):
        (folder.with_name(name)).mkdir()
    folder.with_name(".pins.json.7.partial").write_text("{")
    folder.with_name(".step-notes").mkdir()  # not ours

    assert store.clear_leftovers() == [
        ".pins.json.7.partial",
        ".step-000005.removed-7",
        ".step-000010.replaced-7",
        ".step-000020.replaced-7",
        ".step-000030.partial-7",
    ]
    assert names(tmp_path) == [".step-notes", "step-000010", "step-000020"]
    assert (folder / "weights.bin").read_text() == "a"
    assert newest(store) == 20


FULL = {
    "the system": OSError(errno.ENOSPC, "No space left on device"),
    "a quota": OSError(errno.EDQUOT, "Disk quota exceeded"),
    "safetensors": SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
}


@pytest.mark.parametrize("error", FULL.values(), ids=FULL)
def test_a_disk_that_fills_up_costs_nothing_but_the_new_one(tmp_path: Path, error: Exception) -> None:
    store = checkpoints(tmp_path)
    old = store.save(10, writer("x" * 3000)).folder

    def fills_up(folder: Path) -> None:
        (folder / "weights.bin").write_text("half")
        raise error

    with pytest.raises(CheckpointError) as caught:
        store.save(20, fills_up)
    message = str(caught.value)
    # 3000 + 3000 bytes of files, and the list
    assert "step-000020 needs about 6.2 KiB" in message
    assert "iB are free" in message
    assert f"{old} is untouched" in message
    assert caught.value.exit_code == 1
    assert names(tmp_path) == ["step-000010"]
    assert newest(store) == 10


@pytest.mark.parametrize("call", ["fsync", "rename"])
def test_a_disk_that_fills_up_at_the_end_costs_nothing_either(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    store = checkpoints(tmp_path)
    store.save(10, writer("a"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, call, full)
        with pytest.raises(CheckpointError, match="The disk is full"):
            store.save(20, writer("b"))
    assert names(tmp_path) == ["step-000010"]
    store.save(20, writer("b"))
    assert newest(store) == 20


def test_the_first_checkpoint_on_a_full_disk(tmp_path: Path) -> None:
    def fills_up(folder: Path) -> None:
        (folder / "weights.bin").write_text("half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(CheckpointError, match=r"needs at least 4 bytes .* there is no earlier checkpoint"):
        checkpoints(tmp_path).save(1, fills_up)


def test_an_error_of_the_writer_passes_and_leaves_nothing(tmp_path: Path) -> None:
    def fails(folder: Path) -> None:
        (folder / "weights.bin").write_text("half")
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        checkpoints(tmp_path).save(1, fails)
    assert names(tmp_path) == []


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root ignores permissions, so: a path below a regular file, and a refusal of the system that is simulated.
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match=r"Cannot write checkpoint .*step-000001: Not a directory"):
        checkpoints(tmp_path / "file").save(1, writer("a"))

    def refuse(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(RunError, match=r"read-only for this user \(Read-only file system\)"):
        checkpoints(tmp_path).save(1, writer("a"))


@pytest.mark.parametrize("bad", [{"keep": 0}, {"every": 0}, {"keep_every": 0}, {"kept": 3}])
def test_settings_have_ranges(bad: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match=next(iter(bad))):
        CheckpointSettings.model_validate(bad)


def test_a_share_is_waited_for_until_it_is_seen(tmp_path: Path) -> None:
    (tmp_path / "here").write_text("12345")
    (tmp_path / "growing").write_text("12")
    writer = threading.Timer(0.2, lambda: (tmp_path / "growing").write_text("1234"))
    writer.start()
    wait_for_files(tmp_path, [{"here": 5}, {"growing": 4}])
    writer.join()
    with pytest.raises(CheckpointError, match="gone was written by another process, and is not seen here after 0 s"):
        wait_for_files(tmp_path, [{"here": 5}, {"gone": 4}], within_s=0)
