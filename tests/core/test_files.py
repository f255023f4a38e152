"""Hashes of files: small ones as they are, large ones by their parts, each byte at its place."""

from __future__ import annotations

import os
from pathlib import Path
from threading import Thread

import pytest

from kedge.core import files
from kedge.core.files import hash_bytes, hash_file, hash_files

PART = 3 << 20


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_PART_BYTES", PART)


def written(folder: Path, content: bytes) -> str:
    path = folder / "weights"
    path.write_bytes(content)
    return hash_file(path)


@pytest.mark.parametrize("size", [0, 1, PART])
def test_a_file_of_one_part_has_the_hash_of_its_bytes(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    assert written(tmp_path, content) == hash_bytes(content)


def test_a_byte_that_differs_anywhere_in_a_large_file_changes_its_hash(tmp_path: Path) -> None:
    content = bytearray(os.urandom(2 * PART + 5))
    hashes = {written(tmp_path, bytes(content))}
    places = (0, PART - 1, PART, 2 * PART, 2 * PART + 4)
    for place in places:
        content[place] ^= 1
        hashes.add(written(tmp_path, bytes(content)))
    assert len(hashes) == 1 + len(places)
    assert written(tmp_path, bytes(content)) in hashes


def test_parts_count_in_their_order(tmp_path: Path) -> None:
    first, second = os.urandom(PART), os.urandom(PART)
    assert written(tmp_path, first + second) != written(tmp_path, second + first)


def test_each_file_has_its_own_hash_in_the_order_asked(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (PART * number + 1))
    order = [paths[2], paths[0], paths[1], paths[0]]
    assert hash_files(order) == [hash_file(path) for path in order]


def test_a_pipe_is_read_to_its_end(tmp_path: Path) -> None:
    pipe, content = tmp_path / "pipe", os.urandom(PART + 1)
    os.mkfifo(pipe)
    writer = Thread(target=pipe.write_bytes, args=[content])
    writer.start()
    assert hash_file(pipe) == hash_bytes(content)
    writer.join()
