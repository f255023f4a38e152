"""Checkpoints of tensors that processes hold in parts: read on any number of processes, to the last bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.processes import sharded_state
from tests.processes.pool import Pool

from kedge.core.errors import CheckpointError
from kedge.core.world import ALONE
from kedge.runs.checkpoints import Checkpoints, CheckpointSettings
from kedge.runs.state import load_state
from kedge.testing.contracts.roles import assert_same_state


@pytest.fixture(scope="module")
def written(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two processes."""
    folder = tmp_path_factory.mktemp("written")
    pool.run(sharded_state.write, folder)
    return folder


def test_every_process_writes_files_of_its_own_and_none_is_a_pickle(written: Path) -> None:
    files = sorted(path.name for path in (written / "step-000012").iterdir())
    assert files == [
        "checkpoint.json", "shard-00000-0.safetensors", "shard-00000.json", "shard-00001-0.safetensors",
        "shard-00001.json", "state.json", "state.safetensors",
    ]  # fmt: skip
    entry = json.loads((written / "step-000012" / "shard-00001.json").read_text())
    [uneven] = [value for name, value in entry.items() if name.endswith("weights.uneven torch.float32")]
    assert uneven == {"shape": [7, 3], "offset": [4, 0], "size": [3, 3], "file": "shard-00001-0.safetensors"}


def test_one_process_reads_what_two_have_written(written: Path) -> None:
    assert_same_state(load_state(written / "step-000012"), sharded_state.whole_state())


@pytest.mark.parametrize("size", [1, 2, 3])
def test_any_number_of_processes_reads_what_two_have_written(pool: Pool, written: Path, size: int) -> None:
    for state in pool.run(sharded_state.read, written, size=size):
        assert_same_state(state, sharded_state.whole_state())


def test_processes_read_parts_of_what_one_has_written_whole(pool: Pool, tmp_path: Path) -> None:
    sharded_state.save(ALONE, tmp_path, sharded_state.whole_state())
    for state in pool.run(sharded_state.read, tmp_path):
        assert_same_state(state, sharded_state.whole_state())


def test_of_several_copies_of_a_part_one_is_written(pool: Pool, tmp_path: Path) -> None:
    files, _ = pool.run(sharded_state.write, tmp_path, "copies")
    assert json.loads((tmp_path / "step-000012" / "shard-00001.json").read_text()) == {}, files
    assert_same_state(load_state(tmp_path / "step-000012"), sharded_state.whole_state())


@pytest.mark.parametrize("rank", [0, 1])
def test_where_one_process_cannot_write_all_refuse_and_nothing_is_left(pool: Pool, tmp_path: Path, rank: int) -> None:
    words = pool.run(sharded_state.fail_to_write, tmp_path, rank)
    assert words == ["CheckpointError: The disk is full; ['step-000012']"] * 2


def test_what_is_finished_is_written_together(pool: Pool, tmp_path: Path) -> None:
    for state, files in pool.run(sharded_state.finish, tmp_path):
        assert_same_state(state, sharded_state.whole_state())
        assert files == ["round-0"]


def test_a_checkpoint_without_the_files_of_a_process_is_damaged(written: Path, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    shutil.copytree(written, folder)
    for file in (folder / "step-000012").glob("shard-00001*"):
        file.unlink()
    with pytest.raises(CheckpointError, match=r"shard-00001-0\.safetensors is missing"):
        Checkpoints(folder, CheckpointSettings()).latest()
    with pytest.raises(CheckpointError, match=r"parts of 'shard 00000\.state\.weights\.even .*' are missing"):
        load_state(folder / "step-000012")
