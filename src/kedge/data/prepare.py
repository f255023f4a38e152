"""Data preparation: unfit examples set aside with the reason, evaluation prompts kept out, the rest split by prompt.

Two passes over the files, so that memory holds a few numbers an example and never their text.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kedge.core.errors import DataError
from kedge.data.auditing.scan import contents
from kedge.data.auditing.text_matching import collapse_spaces, text_key
from kedge.data.converting import to_fields
from kedge.data.examples import Example, Kind, Messages, Pair, Thumb, answers_of, prompt_of
from kedge.data.mixing import check_values, even_copies, even_marks, group_value
from kedge.data.reading import prompt_key, read, recognised
from kedge.data.splitting import assign
from kedge.data.writing import row_writer

Fault = Literal["empty", "identical", "contradictory", "duplicate", "contaminated"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Keys:
    """Hashes of one example, for the second pass. `sides` are those of a pair's chosen and rejected answers."""

    prompt: int
    answers: tuple[int, ...]
    sides: tuple[int, int] | None
    is_empty: bool


def prepare(
    sources: Sequence[str],
    folder: Path,
    *,
    heldout: float,
    drop: Sequence[Fault],
    decontaminate: Sequence[str] = (),
    balance: str | None = None,
    max_broken: float = 0.01,
    seed: int = 0,
    report: Callable[..., None] = lambda *_, **__: None,
) -> dict[str, Path]:
    """Write train.jsonl, heldout.jsonl and set-aside.jsonl; returns the paths of the first two.

    With `balance` every value of that field has the same weight in train.jsonl.
    """
    folder.mkdir(parents=True, exist_ok=True)
    kind = _common_kind(sources)
    keys = [_keys(example) for example in _examples(sources, kind, max_broken, folder)]
    evaluated = {prompt_key(example) for source in decontaminate for example in read(source, kind="prompts")}
    faults = list(_faults(keys, frozenset(drop), evaluated))
    left_out = Counter[Fault](fault for fault in faults if fault)
    prompts = sorted({example_keys.prompt for example_keys, fault in zip(keys, faults, strict=True) if fault is None})
    if not prompts:
        raise DataError(f"{', '.join(sources)}: nothing is left of {len(keys):,} {kind}: {_listed(left_out)}")
    heldout_prompts = frozenset(assign(prompts, heldout, seed).tolist()) if heldout else frozenset[int]()
    places = [
        "set-aside" if fault else "heldout" if example_keys.prompt in heldout_prompts else "train"
        for example_keys, fault in zip(keys, faults, strict=True)
    ]
    writes = [(1, dict[str, Any]())] * len(keys)
    if balance is not None:
        examples = _examples(sources, kind, max_broken, folder)
        writes = _balanced(examples, places, balance, kind=kind, seed=seed)
    counts = _write(_examples(sources, kind, max_broken, folder), places, faults, writes, folder)
    message = f"{counts['train']:,} {kind} to train, {counts['heldout']:,} held out, {left_out.total():,} set aside"
    report(
        "info",
        "data.prepared",
        f"{message}: {_listed(left_out)}" if left_out else message,
        counts=dict(counts),
        left_out=dict(left_out),
    )
    return {"train": folder / "train.jsonl", "heldout": folder / "heldout.jsonl"}


def _common_kind(sources: Sequence[str]) -> Kind:
    kinds: dict[str, Kind] = {source: recognised(source, None).kind for source in sources}
    if len(set(kinds.values())) > 1:
        listed = ", ".join(f"{source} holds {kind}" for source, kind in kinds.items())
        raise DataError(f"files of one `data` stage must hold the same kind of examples: {listed}; use one stage each")
    return kinds[sources[0]]


def _examples(sources: Sequence[str], kind: Kind, max_broken: float, folder: Path) -> Iterator[Example]:
    for number, source in enumerate(sources):
        yield from read(source, kind=kind, max_broken=max_broken, set_aside=folder / f"broken-{number}.jsonl")


def _keys(example: Example) -> _Keys:
    answers = answers_of(example)
    # The audit goes by the same keys: what it counts as identical is what is left out here.
    keys = tuple(text_key(collapse_spaces(contents(answer))[0]) for answer in answers)
    sides = (keys[0], keys[1]) if isinstance(example, Pair) else None
    is_empty = not _has_text(prompt_of(example)) or not all(_has_text(answer) for answer in answers)
    label = (int(example.is_good),) if isinstance(example, Thumb) else ()
    return _Keys(prompt=prompt_key(example), answers=keys + label, sides=sides, is_empty=is_empty)


def _has_text(messages: Messages) -> bool:
    return any(message.content.strip() for message in messages)


def _faults(examples: Sequence[_Keys], drop: frozenset[Fault], evaluated: set[int]) -> Iterator[Fault | None]:
    """The first reason to leave an example out, in the order of the settings' documentation."""
    orders: dict[tuple[int, frozenset[int]], set[tuple[int, int]]] = defaultdict(set)
    for keys in examples:
        if keys.sides:
            orders[keys.prompt, frozenset(keys.sides)].add(keys.sides)
    earlier: set[tuple[int, tuple[int, ...]]] = set()
    for keys in examples:
        is_duplicate = (keys.prompt, keys.answers) in earlier
        earlier.add((keys.prompt, keys.answers))
        tests: tuple[tuple[Fault, bool], ...] = (
            ("empty", keys.is_empty),
            ("identical", keys.sides is not None and keys.sides[0] == keys.sides[1]),
            ("contradictory", keys.sides is not None and len(orders[keys.prompt, frozenset(keys.sides)]) > 1),
            ("duplicate", is_duplicate),
        )
        faults: list[Fault] = [fault for fault, is_so in tests if is_so and fault in drop]
        if keys.prompt in evaluated:
            faults.append("contaminated")
        yield faults[0] if faults else None


def _balanced(
    examples: Iterable[Example], places: Sequence[str], field: str, *, kind: Kind, seed: int
) -> list[tuple[int, dict[str, Any]]]:
    """How often each example is written, and what is added to it, so that every value of a field weighs the same."""
    values: dict[int, str] = {}
    known = set[str]()
    for row, (example, place) in enumerate(zip(examples, places, strict=True)):
        if place == "train":
            values[row] = group_value(example.extra, field)
            known |= set(example.extra)
    check_values(list(values.values()), field, known=sorted(known), setting="balance")
    copies = [1] * len(values) if kind == "prompts" else even_copies(list(values.values()), seed)
    marks = even_marks(list(values.values())) if kind == "prompts" else [dict[str, Any]()] * len(values)
    written = dict(zip(values, zip(copies, marks, strict=True), strict=True))
    return [written.get(row, (1, {})) for row in range(len(places))]


def _write(
    examples: Iterable[Example],
    places: Sequence[str],
    faults: Sequence[Fault | None],
    writes: Sequence[tuple[int, dict[str, Any]]],
    folder: Path,
) -> Counter[str]:
    counts: Counter[str] = Counter()
    with ExitStack() as stack:
        names = ("train", "heldout", "set-aside")
        put = {name: stack.enter_context(row_writer(folder / f"{name}.jsonl")) for name in names}
        for example, name, fault, (times, mark) in zip(examples, places, faults, writes, strict=True):
            reason = {"set_aside_for": fault, "from": str(example.origin)} if fault else {}
            for _ in range(times):
                put[name]({**to_fields(example), **reason, **mark})
            counts[name] += times
    return counts


def _listed(left_out: Counter[Fault]) -> str:
    return ", ".join(f"{count:,} {fault}" for fault, count in left_out.most_common())
