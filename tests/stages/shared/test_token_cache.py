"""The token cache: the same tokens as without it, made once, by content; nothing half-made, nothing stale."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import kedge.data.encoding.workers
import kedge.stages.shared.token_cache as token_cache
from kedge.core.errors import DataError, RunError
from kedge.data.template import apply_template
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.preference.preferences import read_preferences
from kedge.stages.reward.comparisons import read_comparisons
from kedge.stages.rl.prompts import read_prompts
from kedge.stages.shared.encoding import Encoder, encode_demonstrations

TOKENIZER = tiny_tokenizer()
WORDS = (
    "all",
    "the",
    "small",
    "words,",
    "and",
    "some",
    "—",
    "naïve",
    "longer",
    "isn't",
    "so?",
    "Yes!",
    "(1.5)\n\nNext",
)


def text(number: int, count: int) -> str:
    return " ".join(WORDS[(number * 7 + at * at) % len(WORDS)] for at in range(count)) + f" {number}"


def demonstration(number: int) -> dict[str, Any]:
    roles = ("user", "assistant") * (1 + number % 2)
    return {"messages": [{"role": role, "content": text(number + at, 4 + number % 9)} for at, role in enumerate(roles)]}


def pair(number: int) -> dict[str, Any]:
    chosen, rejected = text(number, 5), text(number + (number % 11 > 0), 6 - (number % 11 == 0))
    return {"prompt": text(number // 2, 4), "chosen": chosen, "rejected": rejected, "margin": number / 8}


def thumb(number: int) -> dict[str, Any]:
    return {"prompt": text(number // 2, 4), "completion": text(number, 5), "label": number % 3 > 0}


def ranking(number: int) -> dict[str, Any]:
    answers = [text(number + at, 3 + at) for at in range(3)]
    return {"prompt": text(number, 4), "answers": answers, "rank": [1, 2, 2] if number % 5 else [1, 1, 1]}


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., str]:
    def write_rows(make: Callable[[int], dict[str, Any]], count: int = 40, *, name: str = "rows.jsonl") -> str:
        file = tmp_path / name
        file.write_text("".join(json.dumps(make(number)) + "\n" for number in range(count)))
        return str(file)

    return write_rows


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of caches; files of more than ten examples have one."""
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 10)
    return tmp_path / "cache" / "tokens"


def read_all(kind: str, source: str) -> Sequence[Any]:
    match kind:
        case "demonstrations":
            return encode_demonstrations(source, TOKENIZER, max_length=400).sequences
        case "pairs" | "thumbs":
            return read_preferences(source, TOKENIZER, max_length=150, wants_thumbs=kind == "thumbs").items
        case "prompts":
            aside = Path(source).with_suffix(".broken.jsonl")
            return read_prompts(
                source, TOKENIZER, batch=1, answers=1, max_tokens=45, seed=0, set_aside=aside, too_long="cut"
            ).tokens
        case _:
            encoder = Encoder(tokenizer=TOKENIZER, max_length=120, truncate="left")
            return read_comparisons([source, source], encoder, use_margin=True)


KINDS = {
    "demonstrations": demonstration,
    "pairs": pair,
    "thumbs": thumb,
    "comparisons": pair,
    "rankings": ranking,
    "prompts": thumb,
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_cache_holds_what_encoding_in_memory_gives(
    kind: str, write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(KINDS[kind])
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 1000)
    direct = list(read_all(kind, source))
    assert not folder.exists()
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 10)
    made, found = read_all(kind, source), read_all(kind, source)
    assert len(list(folder.iterdir())) == 1
    assert len(direct) > 20
    assert list(made) == direct
    assert [found[row] for row in (7, 3, -1, 3)] == [direct[row] for row in (7, 3, -1, 3)]
    assert list(found[2:9:3]) == direct[2:9:3]


def test_what_is_left_out_is_counted_in_the_cache_too(
    write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(pair)

    def counts() -> tuple[int, int, int]:
        read = read_preferences(source, TOKENIZER, max_length=85, wants_thumbs=False)
        return len(read.items), read.num_identical, read.num_too_long

    made, found = counts(), counts()
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 1000)
    assert made == found == counts()
    assert sum(made) == 40
    assert all(made)


def _read_cut(kind: str, source: str) -> tuple[Any, ...]:
    if kind == "demonstrations":
        read = encode_demonstrations(source, TOKENIZER, max_length=150, too_long="cut", samples=3)
        return list(read.sequences), read.prompts, read.num_cut, read.num_too_long
    if kind == "pairs":
        preferences = read_preferences(source, TOKENIZER, max_length=75, wants_thumbs=False, too_long="cut")
        return list(preferences.items), preferences.num_cut, preferences.num_too_long, preferences.num_identical
    encoder, counts = Encoder(tokenizer=TOKENIZER, max_length=75, truncate="left"), list[int]()
    items = read_comparisons([source], encoder, use_margin=False, too_long="cut", report=counts.append)
    return list(items), counts


@pytest.mark.parametrize("kind", ["demonstrations", "pairs", "comparisons"])
def test_what_is_too_long_is_cut_alike(
    kind: str, write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(KINDS[kind])
    made, found = _read_cut(kind, source), _read_cut(kind, source)
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 1000)
    assert made == found == _read_cut(kind, source)
    assert any(made[1:])


def test_what_is_too_long_is_refused_with_the_longest(
    write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(demonstration)
    messages: list[str] = []
    for small in (10, 10, 1000):
        monkeypatch.setattr(token_cache, "SMALL_ITEMS", small)
        with pytest.raises(DataError, match="conversations are longer than max_length 300; the longest has") as error:
            encode_demonstrations(source, TOKENIZER, max_length=300, too_long="refuse")
        messages.append(str(error.value))
    assert len(set(messages)) == 1


def test_the_cache_is_not_made_twice(write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write(demonstration)
    encode_demonstrations(source, TOKENIZER, max_length=400)
    monkeypatch.setattr(token_cache, "encode_all", lambda *_: pytest.fail("encoded again"))
    copy = Path(source).with_name("copy.jsonl")
    copy.write_bytes(Path(source).read_bytes())
    assert len(encode_demonstrations(str(copy), TOKENIZER, max_length=400).sequences) == 40


def _other_data(source: str) -> Any:
    Path(source).write_text(Path(source).read_text().replace("small", "large"))
    return encode_demonstrations(source, TOKENIZER, max_length=400)


def _other_template(source: str) -> Any:
    return encode_demonstrations(source, apply_template(TOKENIZER, "plain"), max_length=400)


def _other_tokenizer(source: str) -> Any:
    other = tiny_tokenizer()
    other.add_tokens(["small"])
    return encode_demonstrations(source, other, max_length=400)


def _other_length(source: str) -> Any:
    return encode_demonstrations(source, TOKENIZER, max_length=200)


@pytest.mark.parametrize("change", [_other_data, _other_template, _other_tokenizer, _other_length])
def test_a_changed_input_never_reads_an_old_cache(
    change: Callable[[str], Any], write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(demonstration)
    before = list(encode_demonstrations(source, TOKENIZER, max_length=400).sequences)
    changed = list(change(source).sequences)
    assert changed != before
    assert len(list(folder.iterdir())) == 2
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 1000)
    assert changed == list(change(source).sequences)


def test_changed_code_reads_no_old_cache(
    write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(demonstration)
    encode_demonstrations(source, TOKENIZER, max_length=400)
    monkeypatch.setattr(token_cache, "_code_hash", lambda: "other code")
    encode_demonstrations(source, TOKENIZER, max_length=400)
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_cache_is_made_again(write: Callable[..., str], folder: Path) -> None:
    source = write(demonstration)
    whole = list(encode_demonstrations(source, TOKENIZER, max_length=400).sequences)
    (table,) = folder.glob("*/rows.arrow")
    table.write_bytes(table.read_bytes()[:1000])
    assert list(encode_demonstrations(source, TOKENIZER, max_length=400).sequences) == whole


def test_data_that_changes_while_it_is_read_is_refused(
    write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(demonstration)
    encode = token_cache.encode_all

    def meddling(*arguments: Any) -> Any:
        yield from encode(*arguments)
        Path(source).write_text(Path(source).read_text() + "\n")

    monkeypatch.setattr(token_cache, "encode_all", meddling)
    with pytest.raises(DataError, match="changed while it was read"):
        encode_demonstrations(source, TOKENIZER, max_length=400)
    assert list(folder.iterdir()) == []


def test_a_full_disk_is_one_clear_error_and_leaves_nothing(
    write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(token_cache, "write_table", full)
    with pytest.raises(RunError, match=r"keep the tokens of the data in .*: the disk is full"):
        encode_demonstrations(write(demonstration), TOKENIZER, max_length=400)
    assert list(folder.iterdir()) == []


# Several processes


@pytest.fixture
def few_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers from the ninth example on."""
    monkeypatch.setattr(kedge.data.encoding.workers, "ALONE_ITEMS", 8)
    monkeypatch.setattr(kedge.data.encoding.workers, "CHUNK_ITEMS", 4)
    monkeypatch.setattr(kedge.data.encoding.workers, "num_cores", lambda: 2)


@pytest.mark.slow
@pytest.mark.usefixtures("few_alone")
def test_several_processes_keep_the_order_and_the_first_error(
    write: Callable[..., str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write(pair, 50)
    many = list(read_all("pairs", source))
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 1000)
    assert many == list(read_all("pairs", source))

    rows = [pair(number) for number in range(50)]
    for at in (41, 43):
        rows[at]["chosen"] = [{"role": "assistant", "content": "not trained", "weight": 0}]
    Path(source).write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(token_cache, "SMALL_ITEMS", 10)
    with pytest.raises(DataError, match=r"rows.jsonl:42: an answer has no token of the assistant's"):
        read_all("pairs", source)


_MAKE = """
import os, sys, time
import kedge.data.encoding.workers as worker
import kedge.stages.shared.token_cache as token_cache
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.shared.encoding import encode_demonstrations
token_cache.SMALL_ITEMS, worker.ALONE_ITEMS, worker.CHUNK_ITEMS = 10, 8, 4
worker.num_cores = lambda: 2
encode = token_cache.encode_all

def slowly(*arguments):
    for number, batch in enumerate(encode(*arguments)):
        yield batch
        if number == 4:
            print("under way", flush=True)
            time.sleep(float(sys.argv[2]))

token_cache.encode_all = slowly
print(len(encode_demonstrations(sys.argv[1], tiny_tokenizer(), max_length=400).sequences))
"""


def _making(source: str, pause: float) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _MAKE, source, str(pause)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)


@pytest.mark.slow
def test_a_killed_build_leaves_nothing_half_made(write: Callable[..., str], folder: Path) -> None:
    source = write(demonstration)
    process = _making(source, 600)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "under way\n"
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate()
    (partial,) = folder.iterdir()
    assert partial.name.endswith(".partial")
    assert len(children) == 2
    deadline = time.monotonic() + 30
    while any(_is_running(child) for child in children):
        assert time.monotonic() < deadline, "a worker outlived the process that it worked for"
        time.sleep(0.05)
    hour_ago = time.time() - 3600
    os.utime(partial, (hour_ago, hour_ago))
    assert len(encode_demonstrations(source, TOKENIZER, max_length=400).sequences) == 40
    assert [path.name.endswith(".partial") for path in folder.iterdir()] == [False]


def _is_running(process: str) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.slow
def test_two_builds_at_once_do_not_hurt_each_other(write: Callable[..., str], folder: Path) -> None:
    source = write(demonstration)
    processes = [_making(source, 0.5) for _ in range(2)]
    assert [process.communicate()[0].split()[-1] for process in processes] == ["40", "40"]
    (cache,) = folder.iterdir()
    assert len(encode_demonstrations(source, TOKENIZER, max_length=400).sequences) == 40
    assert [path.name for path in folder.iterdir()] == [cache.name]
