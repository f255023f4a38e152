"""Malformed data files: each must be answered with a DataError that says where and why, or read with the bad rows
counted; never with a traceback, and never as something else in silence.

`CASES` maps a name to a case; `attempt(name)` is None where it held, else one line on what went wrong.
"""

from __future__ import annotations

import gzip
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kedge.core.errors import KedgeError
from kedge.data.reading import read

Make = Callable[[Path], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A file called `name` that `make` writes. `says` are words of the error; without any, `broken` rows are counted
    and the others read."""

    name: str = "a.jsonl"
    make: Make
    says: tuple[str, ...] = ()
    broken: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])


GOOD = {"prompt": "Why?", "chosen": "good", "rejected": "bad"}
DEMO = {"prompt": "Why?", "response": "So."}
RANKED = {"prompt": "Why?", "answers": ["x", "y"], "scores": [1, 2]}


def attempt(name: str) -> str | None:
    case = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / case.name
        case.make(path)
        try:
            reading = read(path, max_broken=0.9, **case.options)
            count = len(list(reading))
        except KedgeError as error:
            missing = [words for words in case.says if words not in str(error)]
            if not case.says:
                return f"refused, though only some rows are bad: {error}"
            if missing:
                return f"the error does not say {missing[0]!r}: {error}"
            return None if error.exit_code == 2 else f"exit code {error.exit_code}, not 2"
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if case.says:
            return f"read as {count} {reading.kind} ({reading.format})"
        return None if reading.num_broken == case.broken else f"{reading.num_broken} broken rows, not {case.broken}"


def raw(data: bytes) -> Make:
    return lambda path: _write(path, data)


def lines(*values: Any) -> Make:
    """JSON Lines; bytes go in as they are."""
    encoded = (value if isinstance(value, bytes) else json.dumps(value).encode() for value in values)
    return raw(b"".join(line + b"\n" for line in encoded))


def _write(path: Path, data: bytes) -> None:
    path.write_bytes(data)


def refused(data: bytes | Make, *says: str, name: str = "a.jsonl", **options: Any) -> Case:
    return Case(name=name, make=raw(data) if isinstance(data, bytes) else data, says=says, options=options)


def one_bad(row: Any, good: Any = GOOD) -> Case:
    """Five good rows and a bad one, which is set aside."""
    return Case(make=lines(*[good] * 5, row), broken=1)


def table(text: str, *says: str, name: str = "a.csv") -> Case:
    return Case(name=name, make=raw(text.encode()), says=says)


def _link(target: str) -> Make:
    return lambda path: path.symlink_to(target)


def _loop(path: Path) -> None:
    other = path.with_name("other.jsonl")
    other.symlink_to(path.name)
    path.symlink_to(other.name)


def _folder(**files: bytes) -> Make:
    def make(path: Path) -> None:
        path.mkdir()
        for name, data in files.items():
            (path / name.replace("__", ".")).write_bytes(data)

    return make


def _folder_with_dead_link(path: Path) -> None:
    path.mkdir()
    (path / "a.jsonl").write_bytes(json.dumps(GOOD).encode())
    (path / "b.jsonl").symlink_to("nowhere.jsonl")


def _fifo_folder(path: Path) -> None:
    path.mkdir()
    os.mkfifo(path / "pipe.dat")


def _parquet(columns: Mapping[str, list[Any]]) -> Make:
    def make(path: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table(dict(columns)), path)

    return make


_GOOD_LINE = json.dumps(GOOD).encode() + b"\n"
_HUGE = b'{"prompt": "' + b"x" * (65 << 20) + b'"}\n'

CASES: dict[str, Case] = {
    # files
    "empty": refused(b"", "the file is empty"),
    "blank lines": refused(b"\n \n\n", "the file is empty"),
    "bom alone": refused(b"\xef\xbb\xbf", "empty"),
    "words": refused(b"once upon a time\n", "neither a JSON object nor an array"),
    "nul bytes": refused(b"\0\1\2\3" * 10, "binary file"),
    "zip": refused(b"PK\x03\x04rest", "a zip archive"),
    "zstd": refused(b"\x28\xb5\x2f\xfdrest", "zstd"),
    "bzip2": refused(b"BZh91AY", "bzip2"),
    "xz": refused(b"\xfd7zXZ\0", "xz"),
    "utf-16": refused("\ufeff{}".encode("utf-16-le"), "UTF-16"),
    "cut gzip": refused(gzip.compress(_GOOD_LINE * 100)[:-20], "gzip stream breaks off", name="a.jsonl.gz"),
    "bad gzip": refused(b"\x1f\x8b\x08\0garbage", "gzip", name="a.jsonl.gz"),
    "parquet magic": refused(b"PAR1 and nothing", "damaged Parquet", name="a.parquet"),
    "text as parquet": refused(b"hello", "damaged Parquet", name="a.parquet"),
    "parquet without rows": refused(_parquet({"prompt": []}), "no rows", name="a.parquet"),
    "array cut off": refused(b'[{"prompt": "x"}, {"pro', "does not parse", name="a.json"),
    "array of nothing": refused(b"[]", "the array is empty", name="a.json"),
    "array of numbers": refused(b"[1, 2, 3]", "none of the first 3 rows can be read", name="a.json"),
    "array in an array": refused(b'[[{"prompt": "x"}]]', "found an array", name="a.json"),
    "object cut off": refused(b'{"prompt": "x', "invalid JSON", name="a.json"),
    "data that is no list": refused(b'{"data": 5}', "no known format", name="a.json"),
    "deep nesting": refused(b'{"prompt":' + b"[" * 5000 + b"]" * 5000 + b"}\n", "JSON"),
    "no such file": Case(make=lambda path: None, says=("no such file",)),
    "link in a circle": Case(make=_loop, says=("symbolic link", "leads in a circle")),
    "link to itself": Case(make=_link("a.jsonl"), says=("leads in a circle",)),
    "dead link": Case(make=_link("nowhere.jsonl"), says=("leads to a file that is not there",)),
    "folder without data": Case(name="d", make=_folder(readme__md=b"x"), says=("holds no data files",)),
    "folder of mixed splits": Case(
        name="d", make=_folder(train__jsonl=_GOOD_LINE, test__jsonl=_GOOD_LINE), says=("mixes splits",)
    ),
    "folder with a dead link": Case(name="d", make=_folder_with_dead_link, says=("b.jsonl", "not there")),
    "folder with a pipe": Case(name="d", make=_fifo_folder, says=("holds no data files",)),
    # rows
    "one line cut off": one_bad(b'{"prompt": "x", "cho'),
    "one line of text": one_bad(b"oops"),
    "one array": one_bad([GOOD]),
    "one null": one_bad(None),
    "invalid utf-8": one_bad(b'{"prompt": "\xff", "chosen": "x", "rejected": "y"}'),
    "nan": one_bad(b'{"prompt": "x", "chosen": "a", "rejected": "b", "margin": NaN}'),
    "infinity": one_bad(b'{"prompt": "x", "chosen": "a", "rejected": "b", "margin": Infinity}'),
    "margin of 1e400": one_bad(b'{"prompt": "x", "chosen": "a", "rejected": "b", "margin": 1e400}'),
    "margin of 10**400": one_bad(b'{"prompt": "x", "chosen": "a", "rejected": "b", "margin": 1' + b"0" * 400 + b"}"),
    "margin in words": one_bad({**GOOD, "margin": "much"}),
    "certainty in words": one_bad({**GOOD, "certainty": "very"}),
    "certainty above 1": one_bad({**GOOD, "certainty": 1.01}),
    "certainty below 0": one_bad({**GOOD, "certainty": -0.5}),
    "certainty of nan": one_bad(b'{"prompt": "x", "chosen": "a", "rejected": "b", "certainty": NaN}'),
    "prompt missing": one_bad({"chosen": "a", "rejected": "b"}),
    "prompt a number": one_bad({**GOOD, "prompt": 5}),
    "prompt null": one_bad({**GOOD, "prompt": None}),
    "prompt an empty list": one_bad({**GOOD, "prompt": []}),
    "answer a number": one_bad({**GOOD, "chosen": 5}),
    "answer of the user": one_bad({**GOOD, "chosen": [{"role": "user", "content": "x"}]}),
    "unknown role": one_bad({**GOOD, "prompt": [{"role": "usr", "content": "x"}]}),
    "message without text": one_bad({**GOOD, "prompt": [{"role": "user"}]}),
    "message with an image": one_bad({**GOOD, "prompt": [{"role": "user", "content": [{"type": "image"}]}]}),
    "rank of one": one_bad({**RANKED, "answers": ["x"], "scores": [1]}, RANKED),
    "more answers than scores": one_bad({**RANKED, "scores": [1]}, RANKED),
    "score in words": one_bad({**RANKED, "scores": [1, "two"]}, RANKED),
    "score true": one_bad({**RANKED, "scores": [1, True]}, RANKED),
    "score of 10**400": one_bad(b'{"prompt": "x", "answers": ["a", "b"], "scores": [1' + b"0" * 400 + b", 1]}", RANKED),
    "score nan": one_bad(b'{"prompt": "x", "answers": ["a", "b"], "scores": [NaN, 1]}', RANKED),
    "10,000 answers": one_bad({**RANKED, "answers": ["x"] * 10_000, "scores": [1] * 10_000}, RANKED),
    "a row of 65 MiB": one_bad(_HUGE, {"prompt": "x"}),
    "label neutral": one_bad({**DEMO, "label": "neutral"}, {**DEMO, "label": "good"}),
    "weight of a half": one_bad(
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y", "weight": 0.5}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ),
    "call without a name": one_bad(
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "tool_calls": [{"function": {}}]}]},
        {"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]},
    ),
    "history of half turns": one_bad(
        {"instruction": "x", "output": "y", "history": [["x"]]}, {"instruction": "x", "output": "y"}
    ),
    # read as something else
    "misspelt chosen": refused(lines({"prompt": "x", "choosen": "a", "rejected": "b"}), "'choosen' → 'chosen'"),
    "half a pair": refused(lines({"prompt": "x", "chosen": "a"}), "'rejected' is missing"),
    "unknown fields": refused(lines({"a": 1, "b": 2}), "no known format has these fields: a, b"),
    "no fields": refused(lines({}), "these fields: none"),
    "two formats": refused(lines(GOOD, DEMO), "two formats in equal number"),
    "score column": refused(lines({**DEMO, "score": 1}), "column 'score'", "ignore: [score]"),
    "second answer": refused(lines({**DEMO, "response_2": "b"}), "column 'response_2'"),
    "stars": refused(lines({**DEMO, "rating": 1}, {**DEMO, "rating": 5}), "column 'rating'"),
    "three labels": refused(lines(*({**DEMO, "label": label} for label in (1, 0, -1))), "-1 and 0 beside 1"),
    "axes that differ": refused(
        lines({"prompt": "x", "response_0": "a", "response_1": "b", "better_response_id": 0, "safer_response_id": 1}),
        "better_response_id",
        "safer_response_id",
    ),
    "winner of nobody": Case(
        make=lines(
            *[{"prompt": "x", "response_a": "a", "response_b": "b", "winner": "model_a"}] * 5,
            {"prompt": "x", "response_a": "a", "response_b": "b", "winner": "model_c"},
        ),
        broken=1,
    ),
    "steps without labels": Case(
        make=lines(
            *[{"prompt": "x", "completions": ["a"], "labels": [True]}] * 5,
            {"prompt": "x", "completions": ["a", "b"], "labels": [True]},
        ),
        broken=1,
    ),
    "orphans of a tree": refused(
        lines({"message_id": "2", "parent_id": "1", "message_tree_id": "1", "text": "x", "role": "assistant"}),
        "answers '1', which is not in the file",
    ),
    "tree in a circle": refused(
        lines(
            *(
                {"message_id": a, "parent_id": b, "message_tree_id": "1", "text": "x", "role": "prompter"}
                for a, b in (("1", "2"), ("2", "1"))
            )
        ),
        "in a circle",
    ),
    # columns
    "columns of a misspelt part": refused(_GOOD_LINE, "columns.promt", "'prompt'", columns={"promt": "x"}),
    "columns that no row has": refused(_GOOD_LINE, "no row has a column 'quesion'", columns={"prompt": "quesion"}),
    "columns to ignore that no row has": refused(
        _GOOD_LINE, "no row has a column 'scor'", columns={"ignore": ["scor"]}
    ),
    "columns that are no names": refused(_GOOD_LINE, "columns.prompt: found 5", columns={"prompt": 5}),
    "columns for another kind": refused(
        lines({"q": "x", "a": "y", "s": 1}),
        "columns.rejected",
        columns={"prompt": "q", "completion": "a", "rejected": "s"},
    ),
    # tables
    "csv without a name": table("prompt,,rejected\nx,y,z\n", "a column without a name"),
    "csv with a name twice": table("prompt,prompt\nx,y\n", "two columns of one name"),
    "csv with semicolons": table("prompt;chosen;rejected\nx;y;z\n", "split by ';'"),
    "csv with an open quote": table('prompt,chosen,rejected\n"x,y,z\nq,r,s\n', "quotation mark"),
    "csv of a header": table("prompt,chosen,rejected\n", "there are no rows in it"),
    "csv in latin-1": Case(name="a.csv", make=raw("prompt\ncafé\n".encode("latin-1")), says=("invalid UTF-8",)),
    "csv with a cell too many": Case(
        name="a.csv", make=raw(b"prompt,chosen,rejected\n" + b"x,y,z\n" * 5 + b"x,y,z,w\n"), broken=1
    ),
    "csv with a cell too few": Case(
        name="a.csv", make=raw(b"prompt,chosen,rejected\n" + b"x,y,z\n" * 5 + b"x,y\n"), broken=1
    ),
    "tsv with commas": table("prompt,chosen,rejected\nx,y,z\n", "split by ','", name="a.tsv"),
}
