"""Parquet, saved datasets and hub datasets give the rows that went in."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kedge.core.errors import DataError
from kedge.data.sources import rows

ROWS = [{"prompt": f"p{n}", "nested": [{"role": "user", "content": str(n)}]} for n in range(2500)]


def refusal(source: str | Path) -> str:
    with pytest.raises(DataError) as caught:
        list(rows(source))
    return str(caught.value)


def test_parquet_rows_over_several_groups(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path, row_group_size=700)
    read_rows = list(rows(path))
    assert [row.fields for row in read_rows] == ROWS
    assert (read_rows[0].origin.line, read_rows[-1].origin.line) == (1, 2500)


def test_parquet_null_is_an_absent_field(tmp_path: Path) -> None:
    path = tmp_path / "named-otherwise"
    pq.write_table(pa.Table.from_pylist([{"prompt": "x", "answer": "1"}, {"prompt": "y", "answer": None}]), path)
    assert [row.fields for row in rows(path)] == [{"prompt": "x", "answer": "1"}, {"prompt": "y"}]


def test_damaged_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS), path)
    path.write_bytes(path.read_bytes()[:-50])
    assert refusal(path).startswith(f"{path}: a damaged Parquet file")
    path.write_bytes(b"garbage, and no magic bytes")
    assert refusal(path).startswith(f"{path}: a damaged Parquet file")


def test_parquet_without_rows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), path)
    assert refusal(path) == f"{path}: the file has no rows"


def test_saved_dataset(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS[:30]).save_to_disk(folder, num_shards=2)
    read_rows = list(rows(folder))
    assert [row.fields for row in read_rows] == ROWS[:30]
    assert str(read_rows[-1].origin) == f"{folder}:30"
    assert "without splits; leave out ':train'" in refusal(f"{folder}:train")


def test_saved_splits_want_one_named(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    parts = {"train": datasets.Dataset.from_list(ROWS[:3]), "test": datasets.Dataset.from_list(ROWS[3:5])}
    datasets.DatasetDict(list(parts.items())).save_to_disk(folder)
    assert [row.fields for row in rows(f"{folder}:test")] == ROWS[3:5]
    assert "several splits: train, test. Say which" in refusal(folder)
    assert "no split 'tests' (did you mean 'test'?)" in refusal(f"{folder}:tests")


def test_damaged_saved_dataset_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    datasets.Dataset.from_list(ROWS[:30]).save_to_disk(folder)
    data = next(folder.glob("*.arrow"))
    data.write_bytes(data.read_bytes()[:200])
    assert refusal(folder).startswith(f"{data}: a damaged Arrow file")
    (folder / "state.json").write_text("{")
    assert refusal(folder).startswith(f"{folder / 'state.json'}: cannot be read")


def test_hub_dataset_by_config_revision_and_split(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Any] = []

    def load(name: str, config: str | None, *, revision: str | None) -> Any:
        requests.append((name, config, revision))
        return {"train": datasets.Dataset.from_list(ROWS[:2]), "test": datasets.Dataset.from_list(ROWS[2:5])}

    monkeypatch.setattr("datasets.load_dataset", load)
    read_rows = list(rows("hub:some-org/set/main@v2:test"))
    assert requests == [("some-org/set", "main", "v2")]
    assert [row.fields for row in read_rows] == ROWS[2:5]
    assert str(read_rows[0].origin) == "hub:some-org/set/main@v2:test:1"
    assert "several splits: train, test" in refusal("some-org/set")


def test_hub_without_a_connection_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ConnectionError("Couldn't reach the hub\nlong tail")

    monkeypatch.setattr("datasets.load_dataset", fail)
    message = refusal("some-org/set:train")
    assert message.startswith("hub:some-org/set: the dataset cannot be fetched")
    assert "ConnectionError: Couldn't reach the hub)" in message
    assert "download it and give the path" in message
