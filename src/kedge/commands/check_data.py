"""The data of a stage before training: files are read to their end, prompts are counted in tokens.

A file is read once as each kind that is wanted of it, and prompts are tokenised once for each model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedge.commands.audit import max_broken_of
from kedge.commands.check_records import Asked, Checked
from kedge.core.errors import KedgeError
from kedge.core.findings import Finding
from kedge.core.stage import DATA_KINDS, PromptUse
from kedge.data.examples import Prompt
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
    num_broken: int
    examples: list[Example]


@dataclass(slots=True)
class DataFiles:
    """The data files of a recipe; each is read once as each kind that is wanted of it."""

    readable: set[str] = field(default_factory=set[str])
    _read: dict[tuple[str, Kind | None, float], _File] = field(default_factory=dict[Any, _File])
    _lengths: dict[tuple[int, int, int, str], tuple[list[int], LongPrompts]] = field(
        default_factory=dict[Any, "tuple[list[int], LongPrompts]"]
    )

    def read(self, link: Link, max_broken: float) -> _File:
        from kedge.data.reading import read

        source = link.source()
        key = (source, _wanted_kind(link), max_broken)
        if key not in self._read:
            reading = read(source, kind=key[1], max_broken=max_broken)
            kept: list[Example] = []
            for example in reading:
                if len(kept) < (MEASURED_PROMPTS if isinstance(example, Prompt) else SAMPLE):
                    kept.append(example)
            self._read[key] = _File(
                count=reading.count, kind=reading.kind, num_broken=reading.num_broken, examples=kept
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
    if file.num_broken:
        line += f", {words.count(file.num_broken, 'broken line')} left out (kedge data check lists them)"
    if tokenizer is None or window is None:
        return line, []
    found = preflight_examples(tokenizer, file.examples[:SAMPLE], window=window)
    return line, [finding for finding in found if not (is_asked and finding.code == "examples.prompt_too_long")]


def check_prompts(
    stage: str,
    use: PromptUse,
    links: Sequence[Link],
    tokenizer: PreTrainedTokenizerBase | None,
    window: int | None,
    files: DataFiles,
) -> tuple[Asked, list[Checked], list[Finding]]:
    """The prompts of a stage in tokens: how long the longest is, and how many are too long."""
    from kedge.data.long_prompts import tighter_limit

    link = next((link for link in links if link.field == use.field), None)
    unknown = Asked(prompts=None, total=0, longest=None)
    if link is None or link.stage or link.source() not in files.readable:
        return unknown, [], []
    file = files.read(link, max_broken_of())
    prompts = cast("list[Prompt]", file.examples)
    asked = Asked(prompts=prompts, total=file.count, longest=None)
    if not prompts:
        message = f"{link.source()}: no prompts in it; look at it with kedge data check"
        return asked, [], [Finding(level="fatal", code="data.unusable", message=message, where=f"{stage}.{use.field}")]
    if tokenizer is None:
        return asked, [], []
    limit, limit_name = tighter_limit(window, use.max_tokens, use.max_new_tokens)
    try:
        lengths, long = files.lengths(file, tokenizer, limit, limit_name)
    except KedgeError as error:
        finding = Finding(level="fatal", code="prompts.unusable", message=str(error), where=f"{stage}.{use.field}")
        return asked, [], [finding]
    looked_at = f"{file.count:,}" if len(prompts) == file.count else f"first {len(prompts):,} of {file.count:,}"
    row = Checked(
        what="prompts",
        subject=Path(link.source()).name,
        result=f"{looked_at}; longest {max(lengths):,} of {limit:,} tokens",
        used_by=(f"{stage}.{use.field}",),
    )
    longest = min(max(lengths), limit)
    return replace(asked, longest=longest), [row], list(_long_findings(stage, use, long, len(prompts)))


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

    found = recognised(link.source(), None).kind
    return found if not wanted or found in wanted else cast("Kind", wanted[0])
