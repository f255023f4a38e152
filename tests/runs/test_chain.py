"""The chain beside a journal: what it notices, what it survives, what it lets pass."""

from __future__ import annotations

from pathlib import Path

import pytest

from kedge.runs import lines
from kedge.runs.folder import Run
from kedge.runs.journal import Journal
from kedge.runs.manifest import Manifest


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    journal = Journal(tmp_path / "metrics.jsonl")
    for step in range(1, 6):
        journal.append({"step": step})
    journal.close()
    return journal


def chain(journal: Journal) -> Path:
    return journal.path.with_name(".metrics.jsonl.chain")


def test_what_was_written_is_as_it_was_written(journal: Journal) -> None:
    assert journal.alteration() is None
    journal.append({"step": 6})
    assert (journal.alteration(), journal.num_lines(), chain(journal).stat().st_size) == (None, 6, 48)


@pytest.mark.parametrize(
    ("kept", "line", "missing", "is_cut"),
    [("1 2 4 5", 3, 1, False), ("1 2 3", 4, 2, True), ("", 1, 5, True), ("1 3 2 4 5", 2, 0, False)],
)
def test_removed_and_moved_lines_are_placed(journal: Journal, kept: str, line: int, missing: int, is_cut: bool) -> None:
    journal.path.write_text("".join(f'{{"step": {step}}}\n' for step in kept.split()))
    found = journal.alteration()
    assert found is not None
    assert (found.line, found.num_missing, found.is_cut) == (line, missing, is_cut)
    assert str(journal.path) in str(found)


def test_a_changed_number_is_placed(journal: Journal) -> None:
    journal.path.write_bytes(journal.path.read_bytes().replace(b"4", b"7"))
    assert str(journal.alteration()).startswith(f"{journal.path}:4: not the line that was written")


def test_lines_behind_the_chain_are_taken_in_by_the_next_writer(journal: Journal) -> None:
    """As a kill between a line and its hash leaves them, within the hash, or as an older version wrote them."""
    whole = chain(journal).read_bytes()
    for left in (whole[:32], whole[:35], b""):
        chain(journal).write_bytes(left)
        assert journal.alteration() is None
        journal.append({"step": 6})
        journal.close()
        assert chain(journal).read_bytes()[:40] == whole
        assert journal.alteration() is None
        journal.filter(lambda place, _: place < 5)
    chain(journal).unlink()
    assert (journal.alteration(), journal.has_chain) == (None, False)
    journal.append({"step": 6})
    assert chain(journal).read_bytes()[:40] == whole


def test_dropped_lines_are_no_alteration(journal: Journal) -> None:
    assert journal.filter(lambda place, _: place != 1) == 1
    assert journal.alteration() is None
    journal.append({"step": 6})
    assert journal.alteration() is None
    journal.path.write_bytes(journal.path.read_bytes().replace(b"3", b"7"))
    assert journal.alteration() is not None


def test_events_after_a_checkpoint_are_dropped_and_what_a_process_says_anew_is_not_doubled(
    tmp_path: Path, manifest: Manifest
) -> None:
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        run.event("info", "data", "10 rows")
        run.log({"x": 1.0}, 1)
        run.save_checkpoint(1, lambda folder: None)
        run.event("warning", "kl.rollback", "back", 1)  # killed before the checkpoint that goes with it
        run.event("info", "run.failed", "too bad")
        run.sample({"text": "late"}, 1)
    with Run.open(tmp_path / "run", for_writing=True) as run:
        run.event("info", "data", "10 rows")
        run.event("info", "memory", "2 GiB")
        assert run.has_later_records(1)
        run.resume_at(1)
        assert not run.has_later_records(1)
        codes = [event["code"] for event in run.read_events()]
        assert codes == ["data", "run.failed", "memory", "run.resumed"]
        assert (run.read_samples(), len(run.read_metrics()), run.alterations()) == ([], 1, [])


def test_a_run_that_starts_over_keeps_its_history_and_what_it_says_now(tmp_path: Path, manifest: Manifest) -> None:
    with Run.create(tmp_path / "run", manifest=manifest) as run:
        run.event("info", "data", "10 rows")
        run.event("info", "run.interrupted", "stopped")
    with Run.open(tmp_path / "run", for_writing=True) as run:
        run.event("info", "data", "10 rows")
        run.resume_at(None)
        assert [event["code"] for event in run.read_events()] == ["data", "run.interrupted", "run.resumed"]


def test_the_chain_of_a_long_journal_is_followed_through_all_blocks(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines, "_BLOCK_BYTES", 30)
    for step in range(6, 100):
        journal.append({"step": step})
    assert journal.alteration() is None
    content = journal.path.read_bytes().splitlines(keepends=True)
    journal.path.write_bytes(b"".join([*content[:70], b'{"step": 0}\n', *content[71:90]]))
    assert str(journal.alteration()).endswith(
        ":71: not the line that was written: it was changed, or one was removed (9 lines are missing in all)"
    )
    journal.path.write_bytes(b"".join(content[:40]))
    assert str(journal.alteration()).endswith("59 lines are missing from line 41 on, which had been written")
