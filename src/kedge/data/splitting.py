"""Train and held-out parts that share no prompt, across all files that are split together.

Two passes: the first keeps eight bytes a row, the second writes the rows as they were read.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from kedge.core.errors import ConfigError, DataError
from kedge.core.files import refuse_overwriting
from kedge.core.seeds import seed_for
from kedge.core.suggest import did_you_mean
from kedge.data.converting import to_fields
from kedge.data.examples import Example
from kedge.data.formats import Format
from kedge.data.reading import MAX_BROKEN, prompt_key, read
from kedge.data.sources import SET_ASIDE_SUFFIX, Row, stem_of
from kedge.data.writing import encode, row_writer

Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, kw_only=True)
class FileSplit:
    source: str
    train: Path
    heldout: Path
    num_train: int
    num_heldout: int
    num_broken: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """Rows are counted by file; prompts (or whatever the split goes by) over all files."""

    files: tuple[FileSplit, ...]
    num_keys: int
    num_heldout_keys: int


def assign(keys: Iterable[int] | Keys, heldout: float, seed: int) -> Keys:
    """The keys to hold out, sorted: the share `heldout` of the distinct ones, to the nearest key, at least one.

    Keys are ranked by a hash of key and seed, so that more data moves only the keys next to the cut.
    """
    if not 0 < heldout < 1:
        raise ConfigError(f"heldout is {heldout}; it is a share between 0 and 1, such as 0.1")
    distinct = np.unique(np.asarray(keys if isinstance(keys, np.ndarray) else list(keys), dtype=np.uint64))
    if len(distinct) < 2:
        raise DataError(f"there is nothing to split: {len(distinct)} distinct prompt")
    count = min(max(math.floor(heldout * len(distinct) + 0.5), 1), len(distinct) - 1)
    order = np.argsort(_mixed(distinct, seed_for(seed, "split")), kind="stable")
    return np.sort(distinct[order[:count]])


def _mixed(keys: Keys, seed: int) -> Keys:
    """SplitMix64's finaliser (Steele et al. 2014) over key xor seed: neighbours in, far-apart numbers out."""
    mixed = keys ^ np.uint64(seed)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def split(
    sources: Sequence[str | Path],
    out_folder: Path,
    *,
    heldout: float = 0.1,
    seed: int = 0,
    by: str = "prompt",
    max_broken: float = MAX_BROKEN,
    columns: Mapping[str, Any] | None = None,
    force: bool = False,
) -> Split:
    """Write `<stem>.train.jsonl` and `<stem>.heldout.jsonl` for each source; the fields stay as they were.

    `by` is "prompt" (normalised), or the name of a field whose equal values must stay together. Broken rows go to
    `<stem>.broken.jsonl`. Files that are there are overwritten with `force` only, and the sources never.
    """
    stems = _stems(sources)
    asides = [out_folder / f"{stem}{SET_ASIDE_SUFFIX}" for stem in stems]
    parts = [out_folder / f"{stem}.{part}.jsonl" for stem in stems for part in ("train", "heldout")]
    refuse_overwriting(parts, inputs=sources, force=force)
    refuse_overwriting([*parts, *asides], inputs=sources, force=True)  # what an earlier try set aside is replaced
    keys_by_file = [
        _keys(source, by, max_broken, aside, columns) for source, aside in zip(sources, asides, strict=True)
    ]
    all_keys = np.concatenate([keys for keys, _ in keys_by_file]) if keys_by_file else np.empty(0, np.uint64)
    heldout_keys = assign(all_keys, heldout, seed)
    files: list[FileSplit] = []
    with ExitStack() as stack:  # no file appears before all are written
        for source, stem, (keys, num_broken) in zip(sources, stems, keys_by_file, strict=True):
            train_file, heldout_file = out_folder / f"{stem}.train.jsonl", out_folder / f"{stem}.heldout.jsonl"
            is_heldout = np.isin(keys, heldout_keys)
            writers = stack.enter_context(row_writer(train_file)), stack.enter_context(row_writer(heldout_file))
            reading = read(source, max_broken=max_broken, columns=columns)
            for goes_out, (row, examples) in zip(is_heldout.tolist(), reading.by_row(), strict=True):
                for fields in _rows_to_write(reading.format, row, examples):
                    writers[goes_out](fields)
            files.append(
                FileSplit(
                    source=str(source),
                    train=train_file,
                    heldout=heldout_file,
                    num_train=int((~is_heldout).sum()),
                    num_heldout=int(is_heldout.sum()),
                    num_broken=num_broken,
                )
            )
    return Split(files=tuple(files), num_keys=len(np.unique(all_keys)), num_heldout_keys=len(heldout_keys))


def _rows_to_write(fmt: Format, row: Row, examples: Sequence[Example]) -> Iterable[Mapping[str, Any]]:
    """The row as it was; where several rows make one example, that example in canonical form."""
    assert row.fields is not None
    return (row.fields,) if fmt.layout is None or fmt.layout.key is None else map(to_fields, examples)


def _stems(sources: Sequence[str | Path]) -> list[str]:
    stems = [stem_of(source) for source in sources]
    twice = [stem for stem, count in Counter(stems).items() if count > 1]
    if twice:
        raise ConfigError(
            f"two of the files are called '{twice[0]}': their parts would overwrite each other; rename one"
        )
    return stems


def _keys(
    source: str | Path, by: str, max_broken: float, set_aside: Path, columns: Mapping[str, Any] | None
) -> tuple[Keys, int]:
    reading = read(source, max_broken=max_broken, set_aside=set_aside, columns=columns)
    keys = array("Q", (_key(row, examples, by) for row, examples in reading.by_row()))
    return np.frombuffer(keys, dtype=np.uint64), reading.num_broken


def _key(row: Row, examples: Sequence[Example], by: str) -> int:
    fields = row.fields or {}
    if by == "prompt":  # a row without an example (a tie) stays by itself
        return prompt_key(examples[0]) if examples else xxhash.xxh3_64_intdigest(encode(fields))
    if fields.get(by) is None:
        raise DataError(
            f"{row.origin}: no field '{by}' to split by{did_you_mean(by, fields)}; found: {', '.join(fields)}"
        )
    return xxhash.xxh3_64_intdigest(encode(fields[by]))
