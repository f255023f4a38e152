"""Whatever goes in, one clear message comes out: the right exit code, no traceback, nothing half written."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import pytest

from kedge.models.loading.tiny import make_tiny
from kedge.runs.folder import Run, status_of
from kedge.testing import toy

Kedge = Callable[..., Any]

PAIR = {"prompt": "What is it?", "chosen": "a lamp", "rejected": "no idea"}
GOOD = [json.dumps({**PAIR, "prompt": f"What is number {i}?"}) for i in range(200)]
HEAD = "kedge: 1\nname: a\nmodel: tiny\nstages:\n"
PREPARE = HEAD + "  prep: {kind: data, files: [good.jsonl]}\n"


def text(*lines: str) -> bytes:
    return "".join(f"{line}\n" for line in lines).encode()


@pytest.fixture(autouse=True)
def _files(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(text(*GOOD))
    (tmp_path / "a.yaml").write_text(PREPARE)


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def assert_one_error(done: Any, start: str, *, code: int = 2) -> None:
    assert done.err.startswith("error: "), done.err
    assert start in done.err
    assert (done.code, done.err.count("error:")) == (code, 1)
    assert "Traceback" not in done.out + done.err


BAD_FILES = {
    "empty": (b"", "bad.jsonl: the file is empty"),
    "blank": (b"\n \n\n", "bad.jsonl: the file is empty"),
    "binary": (bytes(range(256)) * 8, "bad.jsonl: this is a binary file. Kedge reads JSON Lines"),
    "not UTF-8": (
        text(GOOD[0]).replace(b"What", b"caf\xe9"),
        "bad.jsonl: neither JSON Lines nor one JSON object: line 1",
    ),
    "not JSON": (
        text("{'prompt': 'a'}", "{'prompt': 'b'}"),
        "bad.jsonl: neither JSON Lines nor one JSON object: line 1",
    ),
    "unknown fields": (text('{"x": 1}', '{"x": 2}'), "bad.jsonl: no known format has these fields: x."),
    "an array cut off": (b"[\n" + text(*(f"{line}," for line in GOOD[:3])), "bad.jsonl: starts as a JSON array, but"),
}
COMMANDS = {
    "check": ("data", "check", "bad.jsonl"),
    "convert": ("data", "convert", "bad.jsonl", "--to", "out.jsonl"),
    "split": ("data", "split", "bad.jsonl", "--to", "parts"),
    "run": ("run", "a.yaml", "--set", "stages.prep.files=[bad.jsonl]"),
}


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
@pytest.mark.parametrize(("content", "start"), BAD_FILES.values(), ids=BAD_FILES)
def test_a_file_that_is_no_data_is_refused_and_leaves_nothing(
    kedge: Kedge, tmp_path: Path, command: tuple[str, ...], content: bytes, start: str
) -> None:
    (tmp_path / "bad.jsonl").write_bytes(content)
    before = names(tmp_path)
    assert_one_error(kedge(*command), start)
    assert names(tmp_path) == before


@pytest.mark.parametrize("command", COMMANDS.values(), ids=COMMANDS)
def test_a_missing_file_names_its_neighbour(kedge: Kedge, tmp_path: Path, command: tuple[str, ...]) -> None:
    before = names(tmp_path)
    named = [argument.replace("bad.jsonl", "god.jsonl") for argument in command]
    assert_one_error(kedge(*named), "god.jsonl: no such file (did you mean 'good.jsonl'?) in ")
    assert names(tmp_path) == before


def test_the_byte_that_is_not_utf8_is_named_with_its_line(kedge: Kedge, tmp_path: Path) -> None:
    lines = text(*GOOD[:150]) + text(GOOD[0]).replace(b"What", b"caf\xe9") + text(*GOOD[150:])
    (tmp_path / "bad.jsonl").write_bytes(lines)
    done = kedge("data", "check", "bad.jsonl")
    assert done.code == 0
    assert "bad.jsonl:151 (invalid UTF-8 at byte 16 (0xe9))" in done.out


def test_an_array_where_lines_are_expected_is_read_all_the_same(kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "array.jsonl").write_text(f"[{','.join(GOOD)}]")
    done = kedge("data", "convert", "array.jsonl", "--to", "out.jsonl")
    assert done.code == 0
    assert "wrote 200 pairs to out.jsonl" in done.out


def with_broken(tmp_path: Path, count: int) -> None:
    (tmp_path / "bad.jsonl").write_bytes(text(*GOOD[:70], *['{"prompt": "cut'] * count, *GOOD[70:]))


def test_one_bad_line_is_set_aside_with_its_place(kedge: Kedge, tmp_path: Path) -> None:
    with_broken(tmp_path, 1)
    done = kedge("data", "check", "bad.jsonl")
    assert done.code == 0
    assert "1 of 201 lines (0.498 %) cannot be read" in done.out
    assert "bad.jsonl:71 (invalid JSON" in done.out
    assert kedge(*COMMANDS["split"]).code == 0
    (aside,) = (tmp_path / "parts/bad.broken.jsonl").read_text().splitlines()
    assert (json.loads(aside)["file"], json.loads(aside)["line"]) == ("bad.jsonl", 71)


@pytest.mark.parametrize("command", ["convert", "split", "run"])
def test_more_than_one_in_a_hundred_is_an_error_unless_allowed(kedge: Kedge, tmp_path: Path, command: str) -> None:
    with_broken(tmp_path, 3)
    done = kedge(*COMMANDS[command])
    assert_one_error(done, "bad.jsonl: 3 of the 203 rows read are broken (1.5%; at most 1.0% may be: max_broken)")
    assert "  bad.jsonl:71: invalid JSON" in done.err
    assert not {"out.jsonl", "parts/bad.train.jsonl", "runs/a/prep/data/train.jsonl"} & names(tmp_path)
    allowed = (
        ("--set", "stages.prep.max_broken=0.05", "--set", "name=b") if command == "run" else ("--max-broken", "0.05")
    )
    assert kedge(*COMMANDS[command], *allowed).code == 0


def test_too_many_bad_lines_are_a_fatal_finding_of_the_audit(kedge: Kedge, tmp_path: Path) -> None:
    with_broken(tmp_path, 3)
    assert kedge("data", "check", "bad.jsonl").code == 2
    assert kedge("data", "check", "bad.jsonl", "--max-broken", "0.05").code == 0


def test_a_pair_with_the_same_text_on_both_sides_is_fatal_with_its_line(kedge: Kedge, tmp_path: Path) -> None:
    same = json.dumps({**PAIR, "rejected": " a  lamp"})
    (tmp_path / "same.jsonl").write_bytes(text(*GOOD[:40], same))
    done = kedge("data", "check", "same.jsonl")
    assert done.code == 2
    assert "fatal   1 of 41 pairs (2.44 %) have the same text on both sides." in done.out
    assert "same.jsonl:41" in done.out


RECIPES = {
    "a typing error": (
        PREPARE.replace("files", "fils"),
        "bad.yaml: 2 problem(s)\n  line 5: stages.prep.files: is required and missing\n"
        "  line 5: stages.prep.fils: not a setting here (did you mean 'files'?)\n",
    ),
    "a wrong type": (
        PREPARE.replace("]}", "], heldout: lots}"),
        "bad.yaml: 1 problem(s)\n  line 5: stages.prep.heldout: must be a number, found 'lots'\n",
    ),
    "an unknown kind": (
        PREPARE.replace("kind: data", "kind: dta"),
        "bad.yaml: 1 problem(s)\n  line 5: stages.prep.kind: no stage of kind 'dta' (did you mean 'data'?); installed",
    ),
    "a circle": ("extends: other.yaml\n", "bad.yaml: `extends` goes in a circle: bad.yaml -> other.yaml -> bad.yaml"),
    "an unknown stage": (
        PREPARE + "  rm: {kind: reward, data: perp}\n",
        "bad.yaml: the pipeline cannot run:\n  rm.data: there is no file 'perp' and no stage of that name",
    ),
    "no YAML": ("stages: [\n", "bad.yaml: 1 problem(s)\n  line 2: not valid YAML"),
    "nothing": ("", "bad.yaml: the file is empty"),
}


@pytest.mark.parametrize("command", ["check", "run"])
@pytest.mark.parametrize(("recipe", "start"), RECIPES.values(), ids=RECIPES)
def test_a_recipe_that_is_wrong_names_line_and_field_and_starts_nothing(
    kedge: Kedge, tmp_path: Path, command: str, recipe: str, start: str
) -> None:
    (tmp_path / "bad.yaml").write_text(recipe)
    (tmp_path / "other.yaml").write_text("extends: bad.yaml\n")
    before = names(tmp_path)
    done = kedge(command, "bad.yaml")
    assert_one_error(done, start)
    assert names(tmp_path) == before


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return Path(shutil.copytree(make_tiny(), tmp_path / "m"))


@pytest.fixture
def imitate(tmp_path: Path) -> Path:
    """A recipe of six optimiser steps with a checkpoint at each."""
    toy.write(tmp_path / "data", 12, seed=3)
    settings = "data: data/demonstrations.jsonl, batch: 2, max_length: 192, samples: 0"
    file = tmp_path / "sft.yaml"
    file.write_text(HEAD + f"  sft: {{kind: sft, {settings}, checkpoints: {{every: 1, keep: 3}}}}\n")
    return file


@pytest.mark.usefixtures("imitate")
def test_a_model_without_a_tokenizer_starts_nothing(kedge: Kedge, tmp_path: Path, model: Path) -> None:
    for file in model.glob("token*"):
        file.unlink()
    done = kedge("run", "sft.yaml", "--set", "model=./m")
    assert_one_error(done, "m: no tokenizer.json; copy the tokenizer files of the model that this one was trained from")
    assert not (tmp_path / "runs").exists()
    assert kedge("check", "sft.yaml", "--set", "model=./m").code == 2


@pytest.mark.usefixtures("imitate")
def test_a_tokenizer_without_a_chat_template_is_refused(kedge: Kedge, tmp_path: Path, model: Path) -> None:
    (model / "chat_template.jinja").unlink()
    done = kedge("run", "sft.yaml", "--set", "model=./m")
    assert_one_error(done, "m: this tokenizer has no chat template, so messages cannot be turned into text; ")
    assert not (tmp_path / "runs").exists()
    checked = kedge("check", "sft.yaml", "--set", "model=./m")
    assert checked.code == 2
    assert "✗ this tokenizer has no chat template" in checked.out


def disk_full(*_: object, **__: object) -> NoReturn:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("command", ["convert", "split"])
def test_a_full_disk_leaves_no_half_written_data(
    kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setattr("kedge.core.files.os.fsync", disk_full)
    done = kedge(*(argument.replace("bad", "good") for argument in COMMANDS[command]))
    place = {"convert": "out.jsonl", "split": "parts"}[command]
    assert_one_error(done, f"{place}: No space left on device; free some space, then try again", code=1)
    assert {name for name in names(tmp_path) if name != "parts"} == {"good.jsonl", "a.yaml"}


def test_a_full_disk_leaves_no_half_of_a_page(kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.core.files.os.fsync", disk_full)
    done = kedge("data", "check", "good.jsonl", "--html", "page.html")
    assert_one_error(done, "page.html: No space left on device; free some space", code=1)
    assert names(tmp_path) == {"good.jsonl", "a.yaml"}


def test_a_full_disk_in_the_data_stage_fails_and_the_run_goes_on_later(
    kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def full(_: Path) -> Generator[Callable[..., NoReturn]]:
        yield disk_full

    with monkeypatch.context() as patched:
        patched.setattr("kedge.data.prepare.row_writer", full)
        done = kedge("run", "a.yaml")
    assert_one_error(done, "runs/a: No space left on device; free some space, then try again", code=1)
    assert (status_of(tmp_path / "runs/a"), status_of(tmp_path / "runs/a/prep")) == ("failed", "failed")
    assert kedge("run", "a.yaml", "--resume").code == 0
    assert len((tmp_path / "runs/a/prep/data/train.jsonl").read_text().splitlines()) == 180


def full_at_checkpoint(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from kedge.runs import checkpoints

    calls = iter(range(1, 100))

    def seal(*arguments: Any) -> None:
        if next(calls) == number:
            disk_full()
        real_seal(*arguments)

    real_seal = checkpoints.seal
    monkeypatch.setattr(checkpoints, "seal", seal)


@pytest.fixture
def stopped(kedge: Kedge, tmp_path: Path, imitate: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The checkpoints of a run that the disk stopped at its fourth."""
    with monkeypatch.context() as patched:
        full_at_checkpoint(4, patched)
        done = kedge("run", imitate.name)
    assert_one_error(done, "The disk is full: checkpoint runs/a/sft/checkpoints/step-000004 needs about ", code=1)
    assert "runs/a/sft/checkpoints/step-000003 is untouched" in done.err
    folder = tmp_path / "runs/a/sft/checkpoints"
    assert sorted(path.name for path in folder.iterdir() if path.is_dir()) == [f"step-00000{i}" for i in (1, 2, 3)]
    return folder


def steps(folder: Path) -> list[int]:
    return [row["step"] for row in Run.open(folder, for_writing=False).read_metrics()]


def test_a_full_disk_at_a_checkpoint_keeps_the_others_and_resumes(kedge: Kedge, tmp_path: Path, stopped: Path) -> None:
    assert kedge("run", "sft.yaml", "--resume").code == 0
    assert steps(stopped.parent) == [1, 2, 3, 4, 5, 6]
    assert (stopped.parent / "model/model.safetensors").is_file()


def test_a_checkpoint_cut_off_half_way_is_left_out_for_an_older_one(kedge: Kedge, stopped: Path) -> None:
    newest = stopped / "step-000003/state.safetensors"
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    done = kedge("run", "sft.yaml", "--resume")
    assert done.code == 0
    events = Run.open(stopped.parent, for_writing=False).read_events()
    told = {event["code"]: event["message"] for event in events}
    assert "The run goes on from step 2" in told["run.resumed"]
    assert "step-000003/state.safetensors has" in told["checkpoint.damaged"]
    assert steps(stopped.parent) == [1, 2, 3, 4, 5, 6]


def test_no_usable_checkpoint_is_a_clear_error(kedge: Kedge, stopped: Path) -> None:
    for checkpoint in stopped.glob("step-*"):
        (checkpoint / "checkpoint.json").unlink()
    done = kedge("run", "sft.yaml", "--resume")
    assert_one_error(done, "runs/a/sft/checkpoints: none of the 3 checkpoint(s) can be used:\n", code=1)
    assert "Restore one from a copy, or remove them all to start from the beginning." in done.err
    assert sorted(path.name for path in stopped.glob("step-*")) == ["step-000001", "step-000002", "step-000003"]


def test_a_read_only_place_says_so(kedge: Kedge, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, *_: object, **__: object) -> NoReturn:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    before = names(tmp_path)
    monkeypatch.setattr("pathlib.Path.mkdir", refused)  # chmod would not stop root
    done = kedge("run", "a.yaml")
    assert_one_error(done, "Cannot create runs/a: it is read-only for this user (Permission denied). Choose", code=1)
    done = kedge("new", "tiny", "--to", "there")
    assert_one_error(done, "there: Permission denied", code=1)
    assert names(tmp_path) == before


def test_a_file_where_the_runs_should_be_is_named(kedge: Kedge, tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("not a folder")
    assert_one_error(kedge("run", "a.yaml"), "Cannot create runs/a: ", code=1)
    assert (tmp_path / "runs").read_text() == "not a folder"
