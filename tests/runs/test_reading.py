"""Reading journals: only what is new is read, half lines wait, rewinds are noticed, long files stay small."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from kedge.core.errors import RunError
from kedge.core.metric_table import MetricTable, as_table
from kedge.runs import lines
from kedge.runs.folder import Run
from kedge.runs.journal import Journal
from kedge.runs.manifest import new_manifest
from kedge.runs.reading import MetricFeed, RecordFeed, read_metrics, read_records


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.create(tmp_path / "a", manifest=new_manifest(name="a", kind="ppo", seed=1, settings={}))


def steps(feed: MetricFeed) -> list[int]:
    return [row["step"] for row in feed.table]


def test_only_new_lines_are_read(run: Run) -> None:
    feed = MetricFeed(run.metrics.path)
    assert not feed.poll()
    run.log({"x": 1.0}, 1)
    run.log({"x": 2.0}, 2)
    assert feed.poll()
    assert steps(feed) == [1, 2]
    assert not feed.poll()
    with run.metrics.path.open("r+b") as file:
        file.write(b"what was read is not read again")
    run.log({"x": float("nan")}, 3)
    assert feed.poll()
    assert steps(feed) == [1, 2, 3]
    assert [str(row["x"]) for row in feed.table] == ["1.0", "2.0", "nan"]


def test_half_a_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n{"ste')
    metrics, records = read_metrics(path), read_records(path)
    assert (steps(metrics), metrics.is_cut_off) == ([1], True)
    assert (list(records.records), records.is_cut_off) == ([{"step": 1}], True)
    with path.open("ab") as file:
        file.write(b'p": 2}\n')
    assert metrics.poll()
    assert records.poll()
    assert steps(metrics) == [1, 2]
    assert list(records.records) == [{"step": 1}, {"step": 2}]
    assert not metrics.is_cut_off


def test_a_rewound_journal_starts_again(run: Run) -> None:
    feed, samples = MetricFeed(run.metrics.path), RecordFeed(run.samples.path)
    for step in (1, 2, 3):
        run.log({"x": 1.0}, step)
        run.sample({"answer": "old"}, step)
    feed.poll()
    samples.poll()
    old = samples.records
    run.resume_at(1)
    for step in (2, 3, 4, 5):  # longer than before: its size tells nothing
        run.log({"x": 2.0}, step)
        run.sample({"answer": "new"}, step)
    assert feed.poll()
    assert samples.poll()
    assert steps(feed) == [1, 2, 3, 4, 5]
    assert [record["answer"] for record in samples.records] == ["old", *["new"] * 4]
    assert [record["answer"] for record in old] == ["old"] * 3  # whoever still has them reads what was there
    run.metrics.close()
    run.metrics.path.unlink()
    assert feed.poll()
    assert len(feed.table) == 0
    assert not feed.poll()


@pytest.mark.parametrize("line", [b"{]", b"[1]", b'{"a": 1}, {"b": 2}'])
def test_a_line_that_is_no_object_is_named(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "m.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b"\n")
    with pytest.raises(RunError, match=r"m\.jsonl:2: this line is not a JSON object"):
        read_metrics(path)
    with pytest.raises(RunError, match=r"m\.jsonl:2: this line is not a JSON object"):
        list(read_records(path).records)


def test_blocks_end_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every way to cut the file gives the same records, those of the journal's own reading."""
    journal = Journal(tmp_path / "m.jsonl")
    rows = [{"step": step, "kl/mean": step / 7, "text": "é" * step, "worst": math.inf} for step in range(1, 9)]
    for row in rows:
        journal.append(row)
    for size in range(1, 90):
        monkeypatch.setattr(lines, "_BLOCK_BYTES", size)
        assert list(read_records(journal.path).records) == rows == journal.read().records
        table = read_metrics(journal.path).table
        assert table.values("kl/mean").tolist() == [row["kl/mean"] for row in rows]
        assert table.values("worst").tolist() == [math.inf] * 8


def test_a_text_that_orjson_refuses_is_read(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples.jsonl")
    journal.append({"answer": "half a letter: \udc80", "said": "NaN", "reward": math.nan})
    (record,) = read_records(journal.path).records
    assert record["answer"] == "half a letter: \udc80"
    assert record["said"] == "NaN"
    assert math.isnan(record["reward"])


def test_only_some_metrics_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "m.jsonl"
    path.write_text("".join(json.dumps({"step": step, "a": 1.0, "b": 2.0}) + "\n" for step in range(5)))
    assert read_metrics(path, only={"step", "b"}).table.names == ("step", "b")


def test_a_table_reads_like_its_rows() -> None:
    """Rows with other names, texts, numbers beyond all floats and flags among them: as a list of dicts would."""
    rows = [
        {"step": 1, "a": 1.5},
        {"step": 2, "b": -2.0, "hash": "abc"},
        {"step": 3, "a": math.nan, "b": 4},
        {"step": 4, "a": "Infinity", "hash": "def"},
        {"step": 5, "a": 10**400},
        {"step": 6, "a": "what is this"},
    ]
    table = MetricTable()
    for row in rows:  # one part each
        table.extend([row])
        assert table.values("a")[0] == 1.5  # read between two additions
    for made in (table, MetricTable(rows)):
        assert [row.get("a") if row.get("a") == row.get("a") else "nan" for row in made] == [
            1.5,
            None,
            "nan",
            math.inf,
            math.inf,
            None,
        ]
        assert [dict(row) for row in made[:2]] == [{"step": 1, "a": 1.5}, {"step": 2, "b": -2.0}]
        assert made.column("b")[0].tolist() == [1, 2]
        assert made.finite("a").tolist() == [1.5]
        assert isinstance(made[-1]["step"], int)
        assert as_table(made) is made
        with pytest.raises(IndexError):
            made[6]
        with pytest.raises(KeyError):
            made[0]["b"]


def test_all_records_are_those_that_are_read_one_by_one(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "samples.jsonl")
    for step in range(600):  # more than a batch, with marks of what is not finite in one of them
        journal.append({"step": step, "answer": "NaN" if step == 300 else f"a\u2028{step}", "kl": math.inf})
    for step in range(600, 1200):
        journal.append({"step": step, "answer": "plain"})
    journal.close()
    records = read_records(journal.path).records
    assert list(records) == [records[row] for row in range(1200)] == journal.read().records


def test_a_bad_line_among_all_records_is_named(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_bytes(b'{"step": 1}\n' * 300 + b'{"step": 2},{"step": 3}\n' + b'{"step": 4}\n')
    with pytest.raises(RunError, match=r"samples\.jsonl:301: this line is not a JSON object"):
        list(read_records(path).records)
