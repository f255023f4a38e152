"""The data of a stage before training: files are read to their end, prompts are counted in tokens.

A file is read once as each kind that is wanted of it, and prompts are tokenised once for each model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedge.commands.audit import max_broken_of
from kedge.commands.checks.records import Asked, Checked
from kedge.core.errors import KedgeError
from kedge.core.findings import Finding
from kedge.core.stage import DATA_KINDS, PromptUse, TooLong, WeightedFile
from kedge.data.examples import Prompt
from kedge.recipe.data_inputs import read_options
from kedge.stages.shared import batch_arithmetic as words

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kedge.data.examples import Example, Kind
    from kedge.data.long_prompts import LongPrompts
    from kedge.recipe.wiring import Link

SAMPLE = 4096
"""Examples of a file that are kept for trying them on the tokenizer: enough for shares, and quick."""
MEASURED_PROMPTS = 20_000
"""Prompts of a file that are tokenised and looked at one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One data file, read to its end; the first examples of it are kept."""

    count: int
    kind: Kind
    layout: str
    """The name of the foreign layout that it has; empty where it has Kedge's own."""
    num_without: int
    """Rows that hold no example of the kind, as ties hold no pair."""
    num_broken: int
    examples: list[Example]


@dataclass(slots=True)
class DataFiles:
    """The data files of a recipe; each is read once as each kind that is wanted of it."""

    readable: set[str] = field(default_factory=set[str])
    _read: dict[tuple[str, Kind | None, float, str], _File] = field(default_factory=dict[Any, _File])
    _lengths: dict[tuple[int, int, int, str], tuple[list[int], LongPrompts]] = field(
        default_factory=dict[Any, "tuple[list[int], LongPrompts]"]
    )

    def read(self, link: Link, max_broken: float) -> _File:
        from kedge.data.reading import read

        source, options = link.source(), read_options(link)
        key = (source, _wanted_kind(link), max_broken, repr(options))
        if key not in self._read:
            reading = read(source, kind=key[1], max_broken=max_broken, **options)
            kept: list[Example] = []
            for example in reading:
                if len(kept) < (MEASURED_PROMPTS if isinstance(example, Prompt) else SAMPLE):
                    kept.append(example)
            self._read[key] = _File(
                count=reading.count,
                kind=reading.kind,
                layout=reading.format.name if reading.format.layout is not None else "",
                num_without=reading.num_without,
                num_broken=reading.num_broken,
                examples=kept,
            )
        self.readable.add(source)
        return self._read[key]

    def lengths(
        self, file: _File, tokenizer: PreTrainedTokenizerBase, limit: int, limit_name: str
    ) -> tuple[list[int], LongPrompts]:
        """The tokens of each prompt of a file, and those over the limit."""
        from kedge.data.long_prompts import measure_prompts

        key = (id(file), id(tokenizer), limit, limit_name)
        if key not in self._lengths:
            prompts = cast("list[Prompt]", file.examples)
            tokens, long = measure_prompts(tokenizer, prompts, max_tokens=limit, limit_name=limit_name)
            self._lengths[key] = ([len(row) for row in tokens], long)
        return self._lengths[key]


def check_data(
    stage: str,
    link: Link,
    tokenizer: PreTrainedTokenizerBase | None,
    window: int | None,
    *,
    files: DataFiles,
    max_broken: float,
    is_asked: bool,
    too_long: TooLong | None = None,
) -> tuple[str, list[Finding]]:
    """Read one file to its end as what the stage wants it for, and try a part of it on the tokenizer.

    Of prompts that are asked (`is_asked`) the length is left to `check_prompts`, which looks at all of them.
    """
    from kedge.data.preflight_examples import preflight_examples

    try:
        file = files.read(link, max_broken)
    except KedgeError as error:
        where = f"{stage}.{link.field}"
        return f"{link.field}: unreadable", [
            Finding(level="fatal", code="data.unusable", message=str(error), where=where)
        ]
    line = f"{link.field}: {file.count:,} {file.kind} in {Path(link.source()).name}"
    if file.layout:
        line += f", read as {file.layout}"
    if isinstance(link.reading, WeightedFile) and link.reading.weight is not None:
        line += f", weight {link.reading.weight:g}"
    if file.num_without:
        line += f", {words.count(file.num_without, 'row')} without one (ties, say)"
    if file.num_broken:
        line += f", {words.count(file.num_broken, 'broken line')} left out (kedge data check lists them)"
    if tokenizer is None or window is None:
        return line, []
    findings = preflight_examples(tokenizer, file.examples[:SAMPLE], window=window, too_long=too_long)
    return line, [finding for finding in findings if not (is_asked and finding.code == "examples.prompt_too_long")]


def check_prompts(
    stage: str,
    use: PromptUse,
    links: Sequence[Link],
    tokenizer: PreTrainedTokenizerBase | None,
    window: int | None,
    files: DataFiles,
) -> tuple[Asked, list[Checked], list[Finding]]:
    """The prompts of a stage in tokens: how long the longest is, and how many are too long, file by file."""
    asking = [link for link in links if link.field == use.field]
    if not asking or any(link.stage or link.source() not in files.readable for link in asking):
        return Asked(prompts=None, total=0, longest=None), [], []
    prompts: list[Prompt] = []  # of one file, the list itself: what was looked at is known by it
    rows: list[Checked] = []
    findings: list[Finding] = []
    total, longest = 0, list[int]()
    for link in asking:
        file = files.read(link, max_broken_of())
        examples = cast("list[Prompt]", file.examples)
        prompts = examples if len(asking) == 1 else [*prompts, *examples]
        total += file.count
        for row, length, complaints in _measured(stage, use, link, tokenizer, window, files, file):
            rows += row
            longest += length
            findings += complaints
    longest_here = max(longest) if longest and len(longest) == len(asking) else None
    return Asked(prompts=prompts, total=total, longest=longest_here), rows, findings


def _measured(
    stage: str,
    use: PromptUse,
    link: Link,
    tokenizer: PreTrainedTokenizerBase | None,
    window: int | None,
    files: DataFiles,
    file: _File,
) -> Iterator[tuple[list[Checked], list[int], list[Finding]]]:
    """The prompts of one file: a row of the table, the longest that is asked, and what is wrong with them."""
    from kedge.data.long_prompts import tighter_limit

    where = f"{stage}.{use.field}"
    if not file.examples:
        message = f"{link.source()}: no prompts in it; look at it with kedge data check"
        yield [], [], [Finding(level="fatal", code="data.unusable", message=message, where=where)]
        return
    if tokenizer is None:
        return
    limit, limit_name = tighter_limit(window, use.max_tokens, use.max_new_tokens)
    try:
        lengths, long = files.lengths(file, tokenizer, limit, limit_name)
    except KedgeError as error:
        yield [], [], [Finding(level="fatal", code="prompts.unusable", message=str(error), where=where)]
        return
    num_looked_at = len(file.examples)
    looked_at = f"{file.count:,}" if num_looked_at == file.count else f"first {num_looked_at:,} of {file.count:,}"
    row = Checked(
        what="prompts",
        subject=Path(link.source()).name,
        result=f"{looked_at}; longest {max(lengths):,} of {limit:,} tokens",
        used_by=(where,),
    )
    yield [row], [min(max(lengths), limit)], list(_long_findings(stage, use, long, num_looked_at))


def _long_findings(stage: str, use: PromptUse, long: LongPrompts, looked_at: int) -> Iterator[Finding]:
    if not long:
        return
    none_is_left = use.too_long == "drop" and len(long.places) == looked_at
    ending = {"refuse": "", "drop": ": left out (too_long: drop)", "cut": ": they lose their beginning (too_long: cut)"}
    yield Finding(
        level="fatal" if use.too_long == "refuse" or none_is_left else "warning",
        code="prompts.too_long",
        message=f"{long.in_words()}{ending[use.too_long]}{', and none is left' if none_is_left else ''}",
        where=f"{stage}.{use.field}",
        fix=long.fix if use.too_long == "refuse" or none_is_left else "",
    )


def _wanted_kind(link: Link) -> Kind | None:
    """The one kind that is wanted; the file's own, when several or any will do."""
    wanted = [kind for kind in link.kinds if kind in DATA_KINDS and kind != "records"]
    if len(wanted) == 1:
        return cast("Kind", wanted[0])
    from kedge.data.reading import recognised

    found = recognised(link.source(), None, columns=read_options(link)["columns"]).kind
    return found if not wanted or found in wanted else cast("Kind", wanted[0])
