"""Statistics and findings of one file alone, from its columns. Thresholds and messages come from `rules`."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kedge.core.findings import Finding
from kedge.core.stats import wilson
from kedge.data.auditing.lengths import Column, column, histograms, lengths
from kedge.data.auditing.neighbours import clusters
from kedge.data.auditing.result import FileAudit, LongerWins, Near
from kedge.data.auditing.rules import EXAMPLES_PER_FINDING, LENGTH_BIAS_ABOVE, OUTLIER_TIMES_MEDIAN, make_finding
from kedge.data.auditing.scan import Distinct, Scan

_EVERYWHERE = (
    "empty.prompt",
    "tokens.special",
    "template.transcript",
    "text.replacement",
    "roles.assistant_first",
    "roles.repeated",
)
_BY_KIND = {
    "pairs": ("empty.chosen", "empty.rejected", "pairs.identical", "pairs.same_words", "roles.prompt_end"),
    "rankings": ("empty.answer", "pairs.identical", "pairs.same_words", "roles.prompt_end"),
    "thumbs": ("empty.answer", "roles.prompt_end"),
    "demonstrations": ("empty.answer",),
    "prompts": ("roles.prompt_end",),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """An offending row of a scan, and what it clashes with."""

    scan: Scan
    row: int
    also: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocatedFinding:
    """A finding with the first of its offenders."""

    finding: Finding
    places: tuple[Place, ...] = ()


def locate(code: str, scan: Scan, places: Sequence[Place], *, count: int, total: int, **more: Any) -> LocatedFinding:
    """The finding of a rule about one file, with the first of its offenders."""
    shown = tuple(places[:EXAMPLES_PER_FINDING])
    where = [place.scan.where(place.row) for place in shown]
    finding = make_finding(code, count=count, total=total, places=where, file=str(scan.source), **more)
    return LocatedFinding(finding=finding, places=shown)


def audit_file(
    scan: Scan, *, threshold: float, max_broken: float, window: int | None
) -> tuple[FileAudit, list[LocatedFinding]]:
    """The statistics of one file and the findings that need no other file."""
    items = len(scan.lines)
    wins = _longer_wins(scan)
    keys, sizes = np.unique(column(scan.prompt_keys), return_counts=True)
    near_prompts, prompt_clusters = _near(scan, scan.prompts, threshold)
    near_conversations, conversation_clusters = _near(scan, scan.conversations, threshold)
    has_conversations = scan.kind == "demonstrations"
    statistics = FileAudit(
        file=str(scan.source),
        part=scan.part,
        kind=scan.kind,
        format=scan.format,
        note=scan.note,
        without=scan.without,
        items=items,
        broken=scan.broken,
        prompts=len(keys),
        largest_prompt_group=int(sizes.max(initial=0)),
        lengths=tuple(lengths(scan)),
        histograms=tuple(histograms(scan)),
        longer_wins=wins,
        near_prompts=near_prompts,
        near_conversations=near_conversations if has_conversations else None,
    )
    if not items:
        return statistics, [*_broken(scan, max_broken), locate("reading.nothing", scan, (), count=1, total=1)]
    near = f" (Jaccard similarity of at least {threshold:g})"
    findings = [
        *_broken(scan, max_broken),
        *_marked(scan, window),
        *_contradictions(scan),
        *_one_sided(scan),
        *_length_bias(scan, wins),
        _outliers(scan),
        _repeats("duplicates.exact", scan, scan.item_keys),
        _repeats("duplicates.prompts", scan, scan.prompt_keys),
        _near_duplicates("duplicates.near_prompts", scan, near_prompts, prompt_clusters, near),
    ]
    if has_conversations:
        code = "duplicates.near_conversations"
        findings.append(_near_duplicates(code, scan, near_conversations, conversation_clusters, near))
    return statistics, findings


def _broken(scan: Scan, max_broken: float) -> Iterator[LocatedFinding]:
    total = len(scan.lines) + scan.broken
    finding = make_finding(
        "reading.broken",
        count=scan.broken,
        total=total,
        places=scan.broken_places,
        file=str(scan.source),
        worse_above=max_broken,
    )
    yield LocatedFinding(finding=finding)


def _marked(scan: Scan, window: int | None) -> Iterator[LocatedFinding]:
    """The rules that look at one item at a time."""
    codes = [*_EVERYWHERE, *_BY_KIND[scan.kind or "prompts"]]
    has_tokens = bool(scan.sides["prompt"].tokens) or "template.refused" in scan.marks
    codes += ["tokens.model"] if "tokens.model" in scan.marks else []
    codes += ["template.refused"] if has_tokens else []
    codes += ["length.over_window", "length.prompt_over_window"] if has_tokens and window else []
    for code in codes:
        marks = scan.marks[code]
        literals = scan.literals[code].most_common()
        yield locate(
            code,
            scan,
            [Place(scan=scan, row=row) for row in marks.rows],
            count=marks.count,
            total=scan.preferences if code.startswith("pairs.") else len(scan.lines),
            detail=": " + ", ".join(f"{text.strip()} in {count:,}" for text, count in literals[:5]) if literals else "",
            evidence={"strings": dict(literals)} if literals else None,
        )


def _contradictions(scan: Scan) -> Iterator[LocatedFinding]:
    """The same prompt and the same two answers (or the same thumb) labelled both ways."""
    if not scan.pair_keys:
        return
    keys, directions = column(scan.pair_keys), column(scan.pair_directions)
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=keys[order[0]] + np.uint64(1)))
    sizes = np.diff(starts, append=len(keys))
    agreeing = np.add.reduceat(directions[order].astype(np.int64), starts)
    is_both = (agreeing > 0) & (agreeing < sizes)
    places = list[Place]()
    for start, size in sorted(zip(starts[is_both], sizes[is_both], strict=True), key=lambda at: order[at[0]]):
        if len(places) == EXAMPLES_PER_FINDING:
            break
        group = order[start : start + size]
        other = group[directions[group] != directions[group[0]]][0]
        places.append(_clash(scan, int(scan.pair_rows[group[0]]), [int(scan.pair_rows[other])]))
    yield locate(
        "thumbs.contradictory" if scan.kind == "thumbs" else "pairs.contradictory",
        scan,
        places,
        count=int(sizes[is_both].sum()),
        total=len(keys) if scan.kind == "thumbs" else scan.preferences,
        evidence={"groups": int(is_both.sum())},
    )


def _clash(scan: Scan, row: int, others: Sequence[int]) -> Place:
    also = ", ".join(scan.where(other) for other in others[:3])
    return Place(scan=scan, row=row, also=also + (f" and {len(others) - 3:,} more" if len(others) > 3 else ""))


def _one_sided(scan: Scan) -> Iterator[LocatedFinding]:
    if scan.kind == "thumbs":
        liked, total = int(column(scan.pair_directions).sum()), len(scan.lines)
        yield locate(
            "thumbs.one_sided",
            scan,
            (),
            count=total if liked in (0, total) else 0,
            total=total,
            evidence={"liked": liked, "disliked": total - liked},
        )


def _longer_wins(scan: Scan) -> LongerWins | None:
    if not scan.preferences:
        return None
    wins, losses, ties = (scan.longer[name] for name in ("wins", "losses", "ties"))
    low, high = wilson(wins, wins + losses)
    share = wins / (wins + losses) if wins + losses else 0.5
    return LongerWins(wins=wins, losses=losses, ties=ties, share=share, low=low, high=high)


def _length_bias(scan: Scan, wins: LongerWins | None) -> Iterator[LocatedFinding]:
    """Which length wins, when the whole interval lies on one side of a half."""
    if wins is None:
        return
    is_short = wins.high < 0.5
    is_strong = wins.low > LENGTH_BIAS_ABOVE or wins.high < 1 - LENGTH_BIAS_ABOVE
    low, high = (1 - wins.high, 1 - wins.low) if is_short else (wins.low, wins.high)
    yield locate(
        "pairs.shorter_wins" if is_short else "pairs.longer_wins",
        scan,
        (),
        count=wins.losses if is_short else wins.wins if wins.low > 0.5 else 0,
        total=wins.wins + wins.losses,
        detail=f" (95 % interval {low * 100:.1f} to {high * 100:.1f} %; {wins.ties:,} ties apart)",
        worse_above=0.0 if is_strong else 1.0,
        evidence={"longer_share": wins.share, "low": wins.low, "high": wins.high, "ties": wins.ties},
    )


def _outliers(scan: Scan) -> LocatedFinding:
    sizes = column(scan.item_characters)
    rows = np.flatnonzero(sizes > OUTLIER_TIMES_MEDIAN * max(1.0, float(np.median(sizes))))
    places = [Place(scan=scan, row=int(row)) for row in rows[:EXAMPLES_PER_FINDING]]
    return locate("length.outlier", scan, places, count=len(rows), total=len(sizes))


def _repeats(code: str, scan: Scan, keys: array[int]) -> LocatedFinding:
    """Rows whose key an earlier row has."""
    values = column(keys)
    order = np.argsort(values, kind="stable")
    is_repeat = values[order][1:] == values[order][:-1]
    first = order[:-1][is_repeat]
    rows = order[1:][is_repeat]
    earliest = np.argsort(rows)[:EXAMPLES_PER_FINDING]
    places = [_clash(scan, int(rows[index]), [int(first[index])]) for index in earliest]
    return locate(code, scan, places, count=len(rows), total=len(values))


def _near(scan: Scan, distinct: Distinct, threshold: float) -> tuple[Near, list[NDArray[np.int64]]]:
    """The clusters, largest first, each as the rows of its members."""
    texts = distinct.sketches.sketched()
    labels = clusters(texts, threshold)
    order = np.argsort(labels, kind="stable")
    groups = [
        column(distinct.rows)[order[start : start + size]]
        for start, size in zip(*_runs(labels[order]), strict=True)
        if size > 1
    ]
    groups.sort(key=lambda group: (-len(group), int(group[0])))
    sizes = [len(group) for group in groups]
    return Near(texts=len(texts), clustered=sum(sizes), clusters=len(sizes), largest=tuple(sizes[:5])), groups


def _runs(values: Column) -> tuple[list[int], list[int]]:
    """Where each run of equal values starts, and how long it is."""
    starts = np.flatnonzero(np.append(True, values[1:] != values[:-1])) if len(values) else np.empty(0, dtype=np.int64)
    return starts.tolist(), np.diff(starts, append=len(values)).tolist()


def _near_duplicates(code: str, scan: Scan, near: Near, groups: list[NDArray[np.int64]], detail: str) -> LocatedFinding:
    places = [_clash(scan, int(group[0]), group[1:].tolist()) for group in groups[:EXAMPLES_PER_FINDING]]
    evidence = {"clusters": near.clusters, "largest": list(near.largest)}
    return locate(code, scan, places, count=near.clustered, total=near.texts, detail=detail, evidence=evidence)
