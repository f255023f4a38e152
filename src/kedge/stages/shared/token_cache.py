"""The tokens of a data file, made once: kept as an Arrow file in the cache, and mapped rather than read.

A cache is known by all that its tokens depend on: the content of the data, the tokenizer with its chat template, the
settings and the code of the encoder. A changed input has another name and never reads an old one. Small files are
encoded in memory each time, which takes less than a look into the cache.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from functools import cache
from importlib import import_module
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import pyarrow as pa
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

import kedge
from kedge.core.errors import DataError
from kedge.core.files import hash_file, hash_folder, hash_json, run_errors, write_json
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.encoding.store import TokenTable, write_table
from kedge.data.encoding.workers import LeftOut, RowEncoder, encode_all, encode_batch
from kedge.data.sources import content_hash, signature
from kedge.data.tokenizer import tokenizer_hash
from kedge.models.loading.cache import build_once, cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ItemT = TypeVar("ItemT")

SMALL_ITEMS = 2000
"""Files of at most so many examples are encoded in memory."""
FOLDER = "tokens"
_TABLE, _ABOUT = "rows.arrow", "about.json"
_QUIET_S = 10.0
"""Between two lines about the progress where there is no terminal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedData:
    """The rows of a data file, and the examples that have none: how many for each reason, and where the first is."""

    table: TokenTable
    left_out: Mapping[str, int]
    first_left_out: Mapping[str, str]


def encoded_data(
    source: str,
    items: Iterable[ItemT],
    make_encoder: Callable[[TextTokenizer], RowEncoder[ItemT]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    settings: Mapping[str, Any],
    code: Sequence[str] = (),
) -> EncodedData:
    """The items that are read of `source`, encoded: in memory where they are few, else from the cache.

    `settings` are those of the items and the encoder, `code` names modules outside of `kedge.data` that take part: with
    the content of the source and the tokenizer they must decide what the rows are.
    """
    before = signature(source)
    iterator = iter(items)
    head = list(islice(iterator, SMALL_ITEMS + 1))
    if len(head) <= SMALL_ITEMS:
        return _in_memory(head, make_encoder(TextTokenizer(tokenizer)))
    folder = cache_root() / FOLDER / _key(source, tokenizer, settings, code)

    def write(partial: Path) -> None:
        encoder = make_encoder(TextTokenizer(tokenizer, for_many=True))
        _write(partial, chain(head, iterator), encoder, source)
        if signature(source) != before:
            raise DataError(f"{source}: the file was changed while it was read; start again when it is whole")

    with run_errors("keep the tokens of the data in", folder):
        build_once(folder, write)
        try:
            return _opened(folder)
        except (pa.ArrowException, OSError, ValueError, KeyError):  # damaged: by the disk, or by somebody
            shutil.rmtree(folder)
    return encoded_data(source, chain(head, iterator), make_encoder, tokenizer, settings=settings, code=code)


def _in_memory(items: list[ItemT], encoder: RowEncoder[ItemT]) -> EncodedData:
    batch = encode_batch(encoder, items)
    table = TokenTable([batch.rows], batch.rows.num_rows, max(batch.rows.num_rows, 1))
    counts, first = Counter[str](), dict[str, str]()
    _note(batch.left_out, counts, first)
    return EncodedData(table=table, left_out=counts, first_left_out=first)


def _note(left_out: Iterable[LeftOut], counts: Counter[str], first: dict[str, str]) -> None:
    for item in left_out:
        counts[item.reason] += 1
        first.setdefault(item.reason, item.where)


def _write(folder: Path, items: Iterable[ItemT], encoder: RowEncoder[ItemT], source: str) -> None:
    counts, first = Counter[str](), dict[str, str]()

    def batches(show: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
        done = 0
        for batch in encode_all(items, encoder):
            _note(batch.left_out, counts, first)
            done += batch.rows.num_rows + len(batch.left_out)
            show(done)
            yield batch.rows

    with _progress(source) as show:
        num_rows = write_table(folder / _TABLE, batches(show), encoder.columns)
    write_json(folder / _ABOUT, {"rows": num_rows, "left_out": counts, "first_left_out": first})


def _opened(folder: Path) -> EncodedData:
    about = json.loads((folder / _ABOUT).read_bytes())
    table = TokenTable.mapped(folder / _TABLE)
    if len(table) != about["rows"]:
        raise ValueError(f"{folder}: {len(table)} rows, and {about['rows']} were written")
    return EncodedData(table=table, left_out=about["left_out"], first_left_out=about["first_left_out"])


def _key(source: str, tokenizer: PreTrainedTokenizerBase, settings: Mapping[str, Any], code: Sequence[str]) -> str:
    template = str(tokenizer.chat_template)
    return hash_json(
        {
            "content": content_hash(source),
            "tokenizer": tokenizer_hash(tokenizer),
            "settings": dict(settings),
            "code": [_code_hash(), *(hash_file(_file_of(module)) for module in code)],
            "version": kedge.__version__,
            # A template that writes the date gives other tokens tomorrow.
            "date": date.today().isoformat() if "strftime_now" in template else "",
        }
    )


@cache
def _code_hash() -> str:
    """Of everything between the bytes of a file and its tokens."""
    return hash_folder(_file_of("kedge.data").parent, suffixes=(".py",))


def _file_of(module: str) -> Path:
    return Path(str(import_module(module).__file__))


@contextmanager
def _progress(source: str) -> Generator[Callable[[int], None]]:
    """A bar on a terminal, else a line now and then; gives a function that takes the number of examples done."""
    name = Path(source).name
    console = Console(stderr=True, highlight=False, emoji=False)
    if console.is_terminal:
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as bar:
            task = bar.add_task(f"tokens of {name}", total=None)
            since = time.monotonic()
            yield lambda done: bar.update(
                task,
                completed=done,
                description=f"tokens of {name}: {done:,} examples, {done / (time.monotonic() - since):,.0f}/s",
            )
        return
    start = last = time.monotonic()

    def show(done: int) -> None:
        nonlocal last
        if time.monotonic() - last >= _QUIET_S:
            last = time.monotonic()
            print(f"  tokens of {name}: {done:,} examples, {done / (last - start):,.0f}/s", file=sys.stderr, flush=True)

    yield show
