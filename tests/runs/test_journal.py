"""Journals: nothing is lost, nothing is half there, and a full disk says so."""

from __future__ import annotations

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.errors import RunError
from kedge.runs.journal import Journal, dump_exact, load_exact

_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_VALUES = st.recursive(_SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=8)


@given(_VALUES)
def test_json_gives_back_what_it_was_given(value: Any) -> None:
    again = load_exact(dump_exact(value))

    assert again == value
    assert repr(again) == repr(value)  # 1 and 1.0 and True are equal, but not the same


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", r"\NaN", r"\\Infinity", "nan", "NaN "])
def test_a_text_that_looks_like_a_number_stays_a_text(text: str) -> None:
    assert load_exact(dump_exact({"answer": text})) == {"answer": text}


def test_non_finite_floats_are_strings_in_the_file_and_floats_again_when_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1, "a": math.nan, "b": math.inf, "c": -math.inf})

    assert json.loads(journal.path.read_text()) == {"step": 1, "a": "NaN", "b": "Infinity", "c": "-Infinity"}
    [record] = journal.read().records
    assert math.isnan(record["a"])
    assert (record["b"], record["c"]) == (math.inf, -math.inf)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_keep_every_bit(value: float) -> None:
    again = load_exact(dump_exact(value))

    assert struct.pack("<d", again) == struct.pack("<d", value)


def test_lines_come_back_in_order_and_are_readable_by_anyone(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples.jsonl")
    journal.append({"step": 1, "text": "zwei\nZeilen\u2028é🙂"})
    journal.append({"step": 2, "text": "half a pair \ud83d alone"})

    assert [json.loads(line)["step"] for line in journal.path.read_bytes().decode().split("\n")[:-1]] == [1, 2]
    assert journal.read().records == [
        {"step": 1, "text": "zwei\nZeilen\u2028é🙂"},
        {"step": 2, "text": "half a pair \ud83d alone"},
    ]


def test_each_line_is_one_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[bytes] = []
    real_write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: (written.append(bytes(data)), real_write(handle, data))[1])
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1})
    journal.append({"step": 2})

    assert written[::2] == [b'{"step": 1}\n', b'{"step": 2}\n']
    assert [len(hashed) for hashed in written[1::2]] == [8, 8]  # behind each line its hash, in the chain
    assert journal.path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'  # nothing waits in a buffer


def test_a_missing_file_is_an_empty_journal(tmp_path: Path) -> None:
    contents = Journal(tmp_path / "metrics.jsonl").read()

    assert (contents.records, contents.is_cut_off) == ([], False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("rest", ['{"step": 3, "rew', '{"step": 3}', "\0\0\0"])
def test_a_cut_off_last_line_is_left_out_reported_and_removed_by_the_next_writer(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + rest)
    contents = Journal(path).read()
    assert ([record["step"] for record in contents.records], contents.is_cut_off) == ([1, 2], True)

    journal = Journal(path)
    assert journal.repair() == len(rest)
    assert journal.repair() == 0
    path.write_text('{"step": 1}\n{"step": 2}\n' + rest)
    journal.append({"step": 4})  # repairs by itself as well

    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 4}\n'
    assert not journal.read().is_cut_off


def test_a_long_cut_off_line_is_removed_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1}\n' + "x" * 200_000)

    assert Journal(path).repair() == 200_000
    assert path.read_text() == '{"step": 1}\n'


def test_a_file_of_one_cut_off_line_becomes_empty(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"st')

    assert Journal(path).repair() == 4
    assert path.read_bytes() == b""


@pytest.mark.parametrize("bad", ['{"step": 2', "[1, 2]", "", "\x00"])
def test_a_bad_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path, bad: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{bad}\n{{"step": 3}}\n')

    with pytest.raises(RunError, match=r"metrics\.jsonl:2: this line is not a JSON object"):
        Journal(path).read()


def up_to(step: int) -> Callable[[int, Mapping[str, Any]], bool]:
    return lambda _, record: (record["step"] or 0) <= step


def test_rewind_keeps_the_kept_lines_byte_for_byte(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    first, second, without = '{"step":1,  "a": 0.10}\n', '{"step": 2}\n', '{"step": null, "code": "x"}\n'
    path.write_text(first + '{"step": 3}\n' + without + second + '{"step": 4}\n{"cut')
    journal = Journal(path)

    assert journal.filter(up_to(2)) == 2
    assert path.read_text() == first + without + second
    journal.append({"step": 3})
    assert path.read_text() == first + without + second + '{"step": 3}\n'
    assert journal.filter(up_to(0)) == 3
    journal.append({"step": 1})  # the journal was open: it must not go on writing to the file that was replaced
    assert path.read_text() == without + '{"step": 1}\n'
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", ".events.jsonl.chain"}


def test_a_rewind_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n')

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(RunError, match="the disk is full"):
        Journal(path).filter(up_to(1))

    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.symlink_to("/dev/full")  # a device on which every write fails with ENOSPC

    with pytest.raises(RunError, match=r"Cannot append to .*metrics\.jsonl: the disk is full \(.* free\)") as caught:
        Journal(path).append({"step": 1})
    assert caught.value.exit_code == 1


def test_a_disk_that_fills_up_within_a_line_leaves_no_half_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "metrics.jsonl")
    journal.append({"step": 1})
    real_write, calls = os.write, iter([5])

    def nearly_full(handle: int, data: bytes) -> int:
        if (room := next(calls, None)) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real_write(handle, data[:room])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", nearly_full)
        with pytest.raises(RunError, match="the disk is full"):
            journal.append({"step": 2})
    assert journal.path.read_text() == '{"step": 1}\n'
    journal.append({"step": 3})
    assert journal.path.read_text() == '{"step": 1}\n{"step": 3}\n'


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tests may run as root, whom permissions do not bind: the refusal of the system is simulated.
    def refuse(*_: object) -> int:
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(RunError, match=r"read-only for this user \(Permission denied\)"):
        Journal(tmp_path / "metrics.jsonl").append({"step": 1})


@pytest.mark.parametrize("record", [{"step": 1, "x": object()}, {"step": 1, "x": {2: "int key"}}, {"x": {1, 2}}])
def test_what_json_cannot_hold_is_refused_before_anything_is_written(tmp_path: Path, record: dict[str, Any]) -> None:
    journal = Journal(tmp_path / "samples.jsonl")
    with pytest.raises(RunError, match=r"Cannot write a record to .*samples\.jsonl"):
        journal.append(record)
    assert not journal.path.exists()


def test_threads_that_write_at_once_leave_lines_and_hashes_in_one_order(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "events.jsonl")

    def write(thread: int) -> None:
        for number in range(100):
            journal.append({"thread": thread, "number": number})

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(write, range(4)))
    assert journal.alteration() is None
    assert len(journal.read().records) == journal.num_lines() == 400
