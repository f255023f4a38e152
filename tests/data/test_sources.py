"""Files in, rows out: every layout that can be read, and a clear refusal for what cannot."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.data.sources import is_hub_id, rows, stem_of

THREE = [{"prompt": "one"}, {"prompt": "two", "n": 2}, {"prompt": "drei ß"}]


def fields_of(source: str | Path) -> list[dict[str, Any] | None]:
    return [row.fields for row in rows(source)]


def refusal(source: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        list(rows(source))
    return str(caught.value)


def test_json_lines_keep_fields_and_line_numbers(write_lines: Any) -> None:
    path = write_lines("a.jsonl", [THREE[0], "", THREE[1], "   ", THREE[2]])
    read_rows = list(rows(path))
    assert [row.fields for row in read_rows] == THREE
    assert [str(row.origin) for row in read_rows] == [f"{path}:1", f"{path}:3", f"{path}:5"]


def test_gzip_is_told_by_content_not_by_name(tmp_path: Path) -> None:
    lines = "".join(json.dumps(row) + "\n" for row in THREE).encode()
    (tmp_path / "plainly-named.jsonl").write_bytes(gzip.compress(lines, mtime=0))
    (tmp_path / "not-packed.jsonl.gz").write_bytes(lines)
    assert fields_of(tmp_path / "plainly-named.jsonl") == THREE
    assert fields_of(tmp_path / "not-packed.jsonl.gz") == THREE


@pytest.mark.parametrize("name", ["a.json", "a.jsonl"])
@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("wrap", [list, lambda items: {"version": 1, "data": items}])
def test_an_array_is_read_under_any_name(tmp_path: Path, name: str, indent: int | None, wrap: Any) -> None:
    (tmp_path / name).write_text(json.dumps(wrap(THREE), indent=indent))
    read_rows = list(rows(tmp_path / name))
    assert [row.fields for row in read_rows] == THREE
    assert [row.origin.line for row in read_rows] == [1, 2, 3]


def test_json_lines_named_json_are_lines(write_lines: Any) -> None:
    assert fields_of(write_lines("a.json", THREE)) == THREE
    assert fields_of(write_lines("b.json", THREE[:1])) == THREE[:1]


def test_array_that_does_not_parse_is_refused_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('[\n{"prompt": "x"},\n\n{"prompt": }\n]')
    message = refusal(path)
    assert message.startswith(f"{path}: starts as a JSON array, but does not parse")
    assert "line 4: invalid JSON at column 12" in message
    assert "one object a line" in message


def test_objects_over_several_lines_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps(row, indent=1) for row in THREE))
    assert "neither JSON Lines nor one JSON object: line 4: invalid JSON" in refusal(path)


def test_text_lines_are_prompts(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffFirst?\r\n\r\n{not json}\n".encode())
    read_rows = list(rows(tmp_path / "a.txt"))
    assert [(row.fields, row.origin.line) for row in read_rows] == [
        ({"prompt": "First?"}, 1),
        ({"prompt": "{not json}"}, 3),
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"prompt": "x"', "invalid JSON at column 15"),
        (b'{"prompt": NaN}', "NaN and Infinity are not JSON"),
        (b'{"prompt": -Infinity}', "NaN and Infinity are not JSON"),
        (b'{"prompt": "\xff"}', "invalid UTF-8 at byte 13 (0xff)"),
        (b'["x"]', "expected a JSON object, found an array"),
        (b'"x"', "expected a JSON object, found text"),
        (b"null", "expected a JSON object, found null"),
    ],
)
def test_one_bad_line_is_a_problem_of_that_row_only(write_lines: Any, line: bytes, reason: str) -> None:
    path = write_lines("a.jsonl", [THREE[0], line, THREE[1]])
    before, broken, after = rows(path)
    assert [before.fields, after.fields] == THREE[:2]
    assert broken.fields is None
    assert reason in broken.problem
    assert broken.raw == line.decode("utf-8", "backslashreplace")
    assert (broken.origin.line, after.origin.line) == (2, 3)


def test_bad_first_line_does_not_hide_the_rest(write_lines: Any) -> None:
    first, second = rows(write_lines("a.jsonl", ['{"prompt": "x', THREE[1]]))
    assert first.fields is None
    assert second.fields == THREE[1]


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "the file is empty"),
        (b"\n  \n", "the file is empty"),
        (gzip.compress(b"", mtime=0), "the file is empty"),
        (b"[]", "the array is empty"),
        (b"\x89\x00\x01\x02", "a binary file"),
        (b"PK\x03\x04rest", "a zip archive"),
        (b"\x28\xb5\x2f\xfdrest", "zstd"),
        ('{"a": 1}'.encode("utf-16"), "UTF-16"),
        (gzip.compress(b"PAR1rest", mtime=0), "a gzipped Parquet file"),
        (b"prompt,answer\nx,y\n", "neither a JSON object nor an array, but: 'prompt,answer'"),
    ],
)
def test_unreadable_files_are_named_with_the_reason(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    message = refusal(path)
    assert message.startswith(str(path))
    assert reason in message


def test_truncated_gzip_says_after_which_line(tmp_path: Path) -> None:
    lines = b"".join(json.dumps({"prompt": str(n) * 50}).encode() + b"\n" for n in range(1000))
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(lines, mtime=0)[:-20])
    message = refusal(path)
    assert message.startswith(f"{path}: the gzip stream breaks off after line ")
    assert "fetch it or pack it again" in message


def test_damaged_gzip_is_refused(tmp_path: Path) -> None:
    packed = bytearray(gzip.compress(b'{"prompt": "x"}\n' * 100, mtime=0))
    packed[-6] ^= 0xFF
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(packed)
    assert "incomplete or damaged" in refusal(path)


def test_missing_file_suggests_the_nearest_name(write_lines: Any, tmp_path: Path) -> None:
    write_lines("pairs.jsonl", THREE)
    assert "no such file (did you mean 'pairs.jsonl'?)" in refusal(tmp_path / "pair.jsonl")
    assert f"there is no folder '{tmp_path / 'absent'}'" in refusal(tmp_path / "absent" / "a.jsonl")


def test_no_permission_is_said(write_lines: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_lines("a.jsonl", THREE)

    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    assert "no permission to read it; try: chmod u+r" in refusal(path)


def test_folder_of_shards_in_order_of_name(write_lines: Any, tmp_path: Path) -> None:
    write_lines("shards/b.jsonl", THREE[1:])
    write_lines("shards/a.jsonl", THREE[:1])
    write_lines("shards/README.md", ["words"])
    write_lines("shards/.hidden.jsonl", ["words"])
    write_lines("shards/a.broken.jsonl", [{"reason": "set aside"}])
    read_rows = list(rows(tmp_path / "shards"))
    assert [row.fields for row in read_rows] == THREE
    assert [row.origin.line for row in read_rows] == [1, 1, 2]


def test_folder_that_mixes_splits_wants_one_named(write_lines: Any, tmp_path: Path) -> None:
    write_lines("parts/x.train.jsonl", THREE[:2])
    write_lines("parts/x.heldout.jsonl", THREE[2:])
    assert "mixes splits (heldout, train); say which" in refusal(tmp_path / "parts")
    assert fields_of(f"{tmp_path / 'parts'}:heldout") == THREE[2:]
    assert "no split 'tran' (did you mean 'train'?)" in refusal(f"{tmp_path / 'parts'}:tran")


def test_folder_without_data_lists_what_it_has(write_lines: Any, tmp_path: Path) -> None:
    write_lines("docs/README.md", ["words"])
    assert "holds no data files (README.md)" in refusal(tmp_path / "docs")


def test_text_files_are_streamed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for number in range(20_000):
            file.write(json.dumps({"prompt": f"{number} " + "x" * 1000}).encode() + b"\n")
    tracemalloc.start()
    count = sum(1 for _ in rows(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 20_000
    assert peak < 6_000_000  # the text is 20 MB


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("org/name", True),
        ("org/name@v1.0:train", True),
        ("hub:org/name/config:test", True),
        ("org/name/config", False),
        ("org/name.jsonl", False),
        ("org/name.jsonl.gz", False),
        ("./org/name", False),
        ("/org/name", False),
        ("name", False),
        ("present/pairs", False),
    ],
)
def test_what_is_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: bool) -> None:
    (tmp_path / "present").mkdir()
    monkeypatch.chdir(tmp_path)
    assert is_hub_id(source) is expected


def test_local_path_wins_over_the_hub(write_lines: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_lines("org/name/a.jsonl", THREE)
    monkeypatch.chdir(tmp_path)
    assert not is_hub_id("org/name")
    assert fields_of("org/name") == THREE


@pytest.mark.parametrize(
    ("source", "stem"), [("x/pairs.jsonl.gz", "pairs"), ("a.b.parquet", "a.b"), ("folder:train", "folder-train")]
)
def test_stem(source: str, stem: str) -> None:
    assert stem_of(source) == stem
