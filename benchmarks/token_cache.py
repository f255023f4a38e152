"""Memory and speed of the token cache: synthetic conversations, the cache made of them, and SFT steps on it.

    python benchmarks/token_cache.py --rows 1000000

For 10,000 and for `--rows` conversations of about 500 tokens, each in a process of its own: how fast the cache is made
(MB of text a second of the clock, and a CPU second: user and system time of the process and its workers, which other
load on the machine hardly changes), beside what the tokenizers library alone does with the same text; and the peak of
anonymous memory (RssAnon: pages of mapped files do not count) while the cache is made, and of a `kedge run` that trains
a very small model on it.

    python benchmarks/token_cache.py --data conversations.jsonl

only encodes the conversations of a file, in one process: its first pass meets every word for the first time, the
second none.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from kedge.data.examples import Demonstration

FEW = 10_000
_SOUNDS = ("ba", "co", "di", "fu", "ga", "le", "mi", "no", "pra", "quo", "re", "sta", "ti", "un", "ver", "win", "ing")
_ENDS = (". ", ". ", ", ", "? ", "! ", ".\n\n", "; ", " (1.5) ", "'s ", " — ")


def vocabulary(model: Path) -> list[str]:
    """Words by how common they are: those that are one token, the first of which were found most often, and behind
    every tenth of them a made-up one that is several."""
    from kedge.data.tokenizer import load_tokenizer

    rng = random.Random(0)
    tokens = sorted(load_tokenizer(model).get_vocab().items(), key=lambda item: item[1])
    known = [token[1:] for token, _ in tokens if token[:1] == "\u0120" and token[1:].isascii() and token[1:].isalpha()]
    made_up = ("".join(rng.choices(_SOUNDS, k=rng.randint(2, 4))) for _ in known[::10])
    return [word for at, word in enumerate(known) for word in ([word] if at % 10 else [word, next(made_up)])]


def write_conversations(path: Path, rows: int, words: Sequence[str], *, seed: int = 0) -> int:
    """Two questions with their answers a row, of words as frequent as words are (Zipf); returns the bytes of their
    texts."""
    rng = random.Random(seed)
    weights = [1 / (rank + 2.7) for rank in range(len(words))]
    sentences = [
        " ".join(rng.choices(words, weights, k=rng.randint(5, 16))).capitalize() + rng.choice(_ENDS)
        for _ in range(40_000)
    ]
    num_bytes = 0
    with path.open("wb") as file:
        for _ in range(rows):
            texts = ["".join(rng.choices(sentences, k=count)).strip() for count in (6, 13, 5, 14)]
            roles = ("user", "assistant") * 2
            turns = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
            num_bytes += sum(len(text.encode()) for text in texts)
            file.write(json.dumps({"messages": turns}, ensure_ascii=False).encode() + b"\n")
    return num_bytes


def rss_anon(process: int | str = "self") -> int:
    """Anonymous resident memory of a process in bytes; 0 for one that is gone."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon")), 0)


def peak_of(process: subprocess.Popen[bytes]) -> tuple[int, int]:
    """Wait for a process: the peak of its anonymous memory, and that of its children together."""
    own = children = 0
    while process.poll() is None:
        own = max(own, rss_anon(process.pid))
        with suppress(OSError):
            listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            children = max(children, sum(rss_anon(child) for child in listed))
        time.sleep(0.05)
    if process.returncode:
        raise SystemExit(f"{process.args} ended with {process.returncode}")
    return own, children


def make_cache(data: str, model: str) -> None:
    """What a stage does before its first step; prints seconds of the clock and of all processors, and tokens a row."""
    from kedge.data.tokenizer import load_tokenizer
    from kedge.stages.shared.encoding import encode_demonstrations

    tokenizer = load_tokenizer(model)
    clock, cpu = time.perf_counter(), cpu_seconds()
    sequences = encode_demonstrations(data, tokenizer, max_length=1024).sequences
    clock, cpu = time.perf_counter() - clock, cpu_seconds() - cpu
    places = random.Random(0).choices(range(len(sequences)), k=2000)
    since = time.perf_counter()
    num_tokens = sum(len(sequences[row].tokens) for row in places)
    seconds_a_row = (time.perf_counter() - since) / len(places)
    print(json.dumps([len(sequences), num_tokens / len(places), clock, cpu, seconds_a_row]))


def library_rate(data: str, model: str, rows: int = 2000) -> float:
    """MB of text a CPU second that the tokenizers library alone does in one thread, with the first rows as rendered."""
    from kedge.data.template import render
    from kedge.data.tokenizer import load_tokenizer

    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = load_tokenizer(model)
    examples = list(islice(conversations(data), rows))
    texts = [render(tokenizer, example.messages, add_generation_prompt=False) for example in examples]
    since = cpu_seconds()
    cast(Any, tokenizer).backend_tokenizer.encode_batch(texts, add_special_tokens=False)
    return num_bytes_of(examples) / 1e6 / (cpu_seconds() - since)


def conversations(data: str) -> Iterator[Demonstration]:
    from kedge.data.reading import read

    return cast("Iterator[Demonstration]", iter(read(data, kind="demonstrations")))


def num_bytes_of(examples: Sequence[Demonstration]) -> int:
    return sum(len(message.content.encode()) for example in examples for message in example.messages)


def encode_file(data: str, model: str) -> None:
    """Print how fast the conversations of a file are encoded in one process, without reading and writing them."""
    from kedge.data.encoding.pieces import TextTokenizer
    from kedge.data.encoding.rows import DemonstrationEncoder
    from kedge.data.encoding.workers import CHUNK_ITEMS, encode_batch
    from kedge.data.tokenizer import load_tokenizer

    since = cpu_seconds()
    examples = list(conversations(data))
    megabytes = num_bytes_of(examples) / 1e6
    rates = {"reading": megabytes / (cpu_seconds() - since)}
    encoder = DemonstrationEncoder(tokenise=TextTokenizer(load_tokenizer(model), for_many=True), max_length=1024)
    for name in ("encoding, first pass", "encoding, second pass"):
        since = cpu_seconds()
        for first in range(0, len(examples), CHUNK_ITEMS):
            encode_batch(encoder, examples[first : first + CHUNK_ITEMS])
        rates[name] = megabytes / (cpu_seconds() - since)
    rates["the tokenizers library alone"] = library_rate(data, model)
    print(f"{len(examples):,} conversations, {megabytes:.1f} MB of text; MB a CPU second:")
    for name, rate in rates.items():
        print(f"{name:>34} {rate:>10,.1f}")


def cpu_seconds() -> float:
    """User and system time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def write_model(folder: Path, tokenizer_of: str) -> None:
    """A model so small that what data costs is not hidden behind it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from kedge.data.tokenizer import load_tokenizer
    from kedge.models.loading.resolve import resolve

    tokenizer = load_tokenizer(resolve(tokenizer_of))
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def measure(folder: Path, rows: int, steps: int) -> dict[str, float]:
    """Make the cache of so many conversations, then run a stage that trains on it, each in a process of its own."""
    data, model = folder / f"{rows}.jsonl", folder / "model"
    num_bytes = write_conversations(data, rows, vocabulary(model))
    environment = {**os.environ, "KEDGE_CACHE": str(folder / "cache")}
    printed = folder / "printed"
    with printed.open("wb") as out:
        command = [sys.executable, __file__, "--make", str(data), str(model)]
        making, workers = peak_of(subprocess.Popen(command, env=environment, stdout=out))
    num_rows, tokens, clock, cpu, seconds_a_row = json.loads(printed.read_text().splitlines()[-1])
    batch = 8
    sft = {"kind": "sft", "data": str(data), "batch": batch, "epochs": steps * batch / rows, "max_length": 1024}
    recipe = {
        "kedge": 1,
        "name": "cache",
        "model": str(model),
        "device": "cpu",
        "stages": {"sft": {**sft, "samples": 0}},
    }
    (folder / "recipe.yaml").write_text(json.dumps(recipe))
    command = [sys.executable, "-m", "kedge.cli", "run", "recipe.yaml", "--runs", f"runs-{rows}"]
    training, _ = peak_of(subprocess.Popen(command, env=environment, cwd=folder, stdout=subprocess.DEVNULL))
    alone = library_rate(str(data), str(model))
    data.unlink()
    return {
        "conversations": num_rows,
        "tokens a conversation": tokens,
        "text, MB": num_bytes / 1e6,
        "making, s": clock,
        "making, CPU s": cpu,
        "making, MB a second": num_bytes / 1e6 / clock,
        "making, MB a CPU second": num_bytes / 1e6 / cpu,
        "the library alone, MB a CPU second": alone,
        "making, RssAnon MiB": making / 2**20,
        "its workers together, RssAnon MiB": workers / 2**20,
        "kedge run, RssAnon MiB": training / 2**20,
        "reading any row, µs": 1e6 * seconds_a_row,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--model", default="smollm2-135m", help="whose tokenizer is used")
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps of the training")
    parser.add_argument("--folder", type=Path, help="where data and cache are written (default: a temporary folder)")
    parser.add_argument("--make", nargs=2, metavar=("DATA", "MODEL"), help=argparse.SUPPRESS)
    parser.add_argument("--data", help="only encode the conversations of this file")
    settings = parser.parse_args()
    if settings.make:
        make_cache(*settings.make)
        return
    if settings.data:
        from kedge.models.loading.resolve import resolve

        encode_file(settings.data, str(resolve(settings.model)))
        return
    with tempfile.TemporaryDirectory(dir=settings.folder) as name:
        write_model(Path(name) / "model", settings.model)
        results = [measure(Path(name), rows, settings.steps) for rows in (FEW, settings.rows)]
    for key in results[0]:
        print(f"{key:>34} " + " ".join(f"{result[key]:>14,.1f}" for result in results))
    for key in ("making, RssAnon MiB", "kedge run, RssAnon MiB"):
        print(f"{key:>34}: {results[1][key] / results[0][key]:.3f} ×")


if __name__ == "__main__":
    main()
