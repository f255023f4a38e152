"""The data that a stage reads: the files of its inputs as they are, or joined into one with columns named and weights.

A joined file lies in the stage's folder as `inputs/FIELD.jsonl`, in canonical form: resuming, checks and reports find
it as they find any other file.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from kedge.core.stage import DATA_KINDS, WeightedFile
from kedge.recipe.wiring import EARLIER, Link

FOLDER = "inputs"
ROUND_WEIGHT = "round_weight"
"""The field of joined labels that says what each of them counts; only where labels of earlier rounds count less."""


def read_options(link: Link) -> dict[str, Any]:
    """What `kedge.data.reading.read` is told about the file of a link."""
    if link.reading is None:
        return {"columns": None, "limit": None}
    return {"columns": link.reading.columns, "limit": link.reading.limit}


def files_to_read(links: Sequence[Link], sources: Sequence[str], home: Path, *, seed: int) -> Mapping[str, list[str]]:
    """By field, what the stage in the folder `home` reads; `sources` are the files and models behind the links."""
    by_field: dict[str, list[tuple[Link, str]]] = {}
    for link, source in zip(links, sources, strict=True):
        by_field.setdefault(link.field, []).append((link, source))
    if EARLIER in by_field or any(link.weight is not None for link in links):
        earlier = by_field.pop(EARLIER, [])
        held_out = [source for _, source in (*by_field.get("heldout", ()), *earlier)]
        labels = _labels_of_rounds(by_field.pop("data"), held_out, home)
    else:
        labels = {}
    return {**labels, **{field: _files(field, entries, home, seed=seed) for field, entries in by_field.items()}}


def _labels_of_rounds(
    entries: Sequence[tuple[Link, str]], held_out: Sequence[str], home: Path
) -> Mapping[str, list[str]]:
    """The labels of this round joined with those of earlier ones, a file for each objective.

    A prompt that is held out in any round is trained on in none: what measures forgetting must not have been learnt.
    """
    groups: list[list[tuple[Link, str]]] = []
    for link, source in entries:
        if link.weight is None:
            groups.append([])
        groups[-1].append((link, source))
    names = ["data"] if len(groups) == 1 else [f"data-{number}" for number in range(1, len(groups) + 1)]
    targets = [home / FOLDER / f"{name}.jsonl" for name in names]
    for target, group in zip(targets, groups, strict=True):
        if not target.exists():
            _join_rounds(group, held_out, target)
    return {"data": [str(target) for target in targets]}


def _join_rounds(group: Sequence[tuple[Link, str]], held_out: Sequence[str], target: Path) -> None:
    from kedge.data.converting import to_fields
    from kedge.data.reading import prompt_key, read
    from kedge.data.writing import row_writer

    is_weighted = any(link.weight not in (None, 1.0) for link, _ in group)
    kept_out = {prompt_key(example) for source in held_out for example in read(source)}
    with row_writer(target) as write:
        for link, source in group:
            weight = {ROUND_WEIGHT: 1.0 if link.weight is None else link.weight} if is_weighted else {}
            for example in read(source, **read_options(link)):
                if prompt_key(example) not in kept_out:
                    write({**to_fields(example), **weight})


def _files(field: str, entries: Sequence[tuple[Link, str]], home: Path, *, seed: int) -> list[str]:
    first = entries[0][0]
    if not first.is_data:
        return [source for _, source in entries]
    if first.is_one_of_several and len(entries) > 1:
        names = [f"{field}-{number}" for number in range(1, len(entries) + 1)]
        return [
            file for name, entry in zip(names, entries, strict=True) for file in _files(name, [entry], home, seed=seed)
        ]
    if len(entries) == 1 and first.reading is None:
        return [entries[0][1]]
    target = home / FOLDER / f"{field}.jsonl"
    if not target.exists():  # a resumed run reads what it began with
        _join(entries, target, seed=seed)
    return [str(target)]


def _join(entries: Sequence[tuple[Link, str]], target: Path, *, seed: int) -> None:
    from kedge.data.examples import Kind
    from kedge.data.mixing import Part, mix

    wanted = [kind for kind in entries[0][0].kinds if kind in DATA_KINDS and kind != "records"]
    parts = [
        Part(
            source=source,
            weight=link.reading.weight if isinstance(link.reading, WeightedFile) else None,
            **read_options(link),
        )
        for link, source in entries
    ]
    mix(parts, target, kind=cast("Kind", wanted[0]) if len(wanted) == 1 else None, seed=seed)
