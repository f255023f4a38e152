"""Splits: by prompt, exact, deterministic, consistent over files, and the rows unchanged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kedge.core.errors import ConfigError, DataError
from kedge.data.splitting import assign, split


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@given(
    st.lists(st.integers(0, 2**64 - 1), min_size=2, max_size=60, unique=True),
    st.sampled_from([0.1, 0.25, 0.5, 0.9]),
    st.integers(0, 5),
)
def test_assign_holds_out_the_nearest_number_whatever_the_order(keys: list[int], heldout: float, seed: int) -> None:
    heldout_keys = assign(keys, heldout, seed).tolist()
    assert set(heldout_keys) < set(keys)
    assert heldout_keys == assign([*reversed(keys), keys[0]], heldout, seed).tolist() == sorted(heldout_keys)
    exact = heldout * len(keys)
    assert abs(len(heldout_keys) - exact) <= 0.5 or len(heldout_keys) in (1, len(keys) - 1)


def test_assign_golden() -> None:
    # Pinned so that no release silently moves a held-out set; worked out with plain Python integers (see below).
    assert assign(range(1, 11), 0.3, 0).tolist() == held_by_hand(range(1, 11), 3, 0)
    assert assign(range(1, 11), 0.3, 1).tolist() == held_by_hand(range(1, 11), 3, 1)
    assert held_by_hand(range(1, 11), 3, 0) != held_by_hand(range(1, 11), 3, 1)


def held_by_hand(keys: range, count: int, seed: int) -> list[int]:
    from hashlib import blake2b

    start = int.from_bytes(blake2b(f"{seed}\x1fsplit\x1f0".encode(), digest_size=8).digest(), "big") >> 1
    whole = 2**64 - 1

    def mixed(key: int) -> int:
        x = key ^ start
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & whole
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & whole
        return x ^ (x >> 31)

    return sorted(sorted(keys, key=mixed)[:count])


def test_assign_spreads_over_the_keys() -> None:
    heldout_keys = assign(range(100_000), 0.1, 3)
    assert len(heldout_keys) == 10_000
    by_tenth = np.histogram(heldout_keys, bins=10, range=(0, 100_000))[0]
    assert by_tenth.min() > 850  # 1000 expected, standard deviation 28
    assert by_tenth.max() < 1150


@pytest.mark.parametrize("heldout", [0, 1, -0.1, 10])
def test_share_must_be_a_share(heldout: float) -> None:
    with pytest.raises(ConfigError, match="a share between 0 and 1"):
        assign([1, 2], heldout, 0)


def test_one_prompt_cannot_be_split(write_lines: Any, tmp_path: Path) -> None:
    path = write_lines("a.jsonl", [{"prompt": "same"}, {"prompt": " SAME "}])
    with pytest.raises(DataError, match="1 distinct prompt"):
        split([path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_no_prompt_on_both_sides_even_across_files_and_kinds(write_lines: Any, tmp_path: Path) -> None:
    pairs = [
        {"prompt": f"Q{n // 3}" if n % 2 else f" q{n // 3}", "chosen": "x", "rejected": "y", "n": n} for n in range(300)
    ]
    demos = [
        {"messages": [{"role": "user", "content": f"Q{n}"}, {"role": "assistant", "content": "A"}]}
        for n in range(50, 150)
    ]
    sources = [write_lines("pairs.jsonl", pairs), write_lines("demos.jsonl", demos)]
    done = split(sources, tmp_path / "out", heldout=0.2, seed=4)
    assert (done.num_keys, done.num_heldout_keys) == (150, 30)
    first, second = done.files
    assert (first.train.name, first.heldout.name) == ("pairs.train.jsonl", "pairs.heldout.jsonl")
    held_pairs, held_demos = rows_of(first.heldout), rows_of(second.heldout)
    heldout_prompts = {row["prompt"].strip().lower() for row in held_pairs} | {
        row["messages"][0]["content"].lower() for row in held_demos
    }
    trained = {row["prompt"].strip().lower() for row in rows_of(first.train)} | {
        row["messages"][0]["content"].lower() for row in rows_of(second.train)
    }
    assert len(heldout_prompts) == 30
    assert not heldout_prompts & trained
    assert (first.num_train, first.num_heldout) == (len(rows_of(first.train)), len(held_pairs))
    assert first.num_train + first.num_heldout == 300
    together = sorted(rows_of(first.train) + held_pairs, key=lambda row: row["n"])
    assert together == pairs  # the fields as they were, not the canonical form


def test_same_seed_same_files_other_seed_other_files(write_lines: Any, tmp_path: Path) -> None:
    path = write_lines("a.jsonl", [{"prompt": f"Q{n}"} for n in range(100)])
    heldout_files = [
        split([path], tmp_path / name, seed=seed).files[0].heldout for name, seed in (("x", 0), ("y", 0), ("z", 1))
    ]
    assert heldout_files[0].read_bytes() == heldout_files[1].read_bytes()
    assert heldout_files[0].read_bytes() != heldout_files[2].read_bytes()
    assert [len(rows_of(path)) for path in heldout_files] == [10, 10, 10]


def test_split_by_a_field(write_lines: Any, tmp_path: Path) -> None:
    path = write_lines("a.jsonl", [{"prompt": f"Q{n}", "user": n % 10} for n in range(100)])
    done = split([path], tmp_path / "out", heldout=0.3, by="user")
    heldout_users = {row["user"] for row in rows_of(done.files[0].heldout)}
    assert len(heldout_users) == 3
    assert len(rows_of(done.files[0].heldout)) == 30
    with pytest.raises(DataError, match=r"a\.jsonl:1: no field 'usr' to split by \(did you mean 'user'\?\)"):
        split([path], tmp_path / "other", by="usr")
    assert not (tmp_path / "other").exists()


def test_broken_rows_are_on_neither_side_but_aside(write_lines: Any, tmp_path: Path) -> None:
    values: list[Any] = [{"prompt": f"Q{n}"} for n in range(10)]
    values[4] = {"prompt": 5}
    done = split([write_lines("a.jsonl", values)], tmp_path / "out", max_broken=0.1)
    (file,) = done.files
    assert (file.num_train, file.num_heldout, file.num_broken) == (8, 1, 1)
    assert json.loads((tmp_path / "out" / "a.broken.jsonl").read_text())["line"] == 5


def test_same_name_twice_is_refused(write_lines: Any, tmp_path: Path) -> None:
    sources = [write_lines(f"{folder}/a.jsonl", [{"prompt": "Q"}]) for folder in ("x", "y")]
    with pytest.raises(ConfigError, match="two of the files are called 'a'"):
        split(sources, tmp_path / "out")
