"""The audit itself: scan every file once, check each alone, then check them against each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kedge.core.errors import ConfigError
from kedge.data.auditing.cross_file import between_training_files, contamination, leakage
from kedge.data.auditing.excerpts import offenders
from kedge.data.auditing.minhash import PERMUTATIONS, SHINGLE, Sketches
from kedge.data.auditing.ngrams import GRAM, EvaluationGrams, GramCollector, Overlap
from kedge.data.auditing.result import Audit, Part, worst_first
from kedge.data.auditing.scan import Checks, Distinct, Measure, Scan, Scanner
from kedge.data.auditing.single_file import audit_file
from kedge.data.auditing.text_matching import KNOWN_SPECIAL_TOKENS, TRANSCRIPT_MARKERS, LiteralFinder
from kedge.data.reading import read

Source = str | Path
Progress = Callable[[int], None]

_PROGRESS_EVERY = 1000


def audit(
    files: Sequence[Source],
    *,
    heldout: Sequence[Source] = (),
    evaluation: Sequence[Source] = (),
    measure: Measure | None = None,
    window: int | None = None,
    special_tokens: Sequence[str] = (),
    near_threshold: float = 0.8,
    seed: int = 0,
    max_broken: float = 0.01,
    columns: Mapping[str, Any] | None = None,
    columns_of: Mapping[str, Mapping[str, Any]] | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Check training files for what would spoil training or the numbers measured after it.

    `measure` counts the tokens of messages, `window` is how many the model takes, `special_tokens` are the model's
    own. Broken rows are counted, not fatal until their share passes `max_broken`. `columns` says which column plays
    which part in the training and held-out files, `columns_of` in a file of its own. `progress` is called now and then
    with the number of items read so far, over all files.
    """
    _check(files, near_threshold, measure, window)
    checks = _checks(measure, window, special_tokens, seed)
    named = columns_of or {}
    counter = ProgressCounter(progress)
    evaluation_scans, grams = _scan_evaluation(evaluation, checks, counter)
    heldout_scans = [
        scan_file(source, "heldout", checks, counter, columns=named.get(str(source), columns)) for source in heldout
    ]
    overlaps = [Overlap(grams) if grams else None for _ in files]
    train = [
        scan_file(source, "train", checks, counter, overlap=overlap, columns=named.get(str(source), columns))
        for source, overlap in zip(files, overlaps, strict=True)
    ]
    scans = [*train, *heldout_scans, *(scan for scan, _ in evaluation_scans)]
    audited = [audit_file(scan, threshold=near_threshold, max_broken=max_broken, window=window) for scan in scans]
    findings = [located for _, of_file in audited for located in of_file]
    findings += [*leakage(train, heldout_scans, threshold=near_threshold), *between_training_files(train)]
    if grams:
        pairs = [(scan, overlap) for scan, overlap in zip(train, overlaps, strict=True) if overlap]
        findings += contamination(pairs, evaluation_scans, grams)
    return Audit(
        files=tuple(statistics for statistics, _ in audited),
        findings=worst_first(located.finding for located in findings),
        offenders=offenders(findings),
        settings={
            "near_threshold": near_threshold,
            "permutations": PERMUTATIONS,
            "shingle_words": SHINGLE,
            "gram_words": GRAM,
            "seed": seed,
            "window": window,
            "max_broken": max_broken,
        },
    )


def _checks(measure: Measure | None, window: int | None, special_tokens: Sequence[str], seed: int) -> Checks:
    return Checks(
        measure=measure,
        window=window,
        known_tokens=LiteralFinder([token for token in KNOWN_SPECIAL_TOKENS if token not in special_tokens]),
        model_tokens=LiteralFinder(special_tokens),
        transcript_markers=LiteralFinder(TRANSCRIPT_MARKERS),
        seed=seed,
    )


def _scan_evaluation(
    evaluation: Sequence[Source], checks: Checks, counter: ProgressCounter
) -> tuple[list[tuple[Scan, int]], EvaluationGrams | None]:
    """The scans of the evaluation files, each with the number of its first prompt, and the 13-grams of all of them."""
    collector = GramCollector()
    scans = list[tuple[Scan, int]]()
    for source in evaluation:
        first = collector.first_owner = sum(len(scan.prompts.rows) for scan, _ in scans)
        scans.append((scan_file(source, "evaluation", checks, counter, grams=collector), first))
    return scans, collector.index() if evaluation else None


class ProgressCounter:
    """Counts items over all files and reports the number to `progress` now and then."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._count = 0

    def step(self) -> None:
        self._count += 1
        if self._progress is not None and self._count % _PROGRESS_EVERY == 0:
            self._progress(self._count)

    def report(self) -> None:
        if self._progress is not None:
            self._progress(self._count)


def scan_file(
    source: Source,
    part: Part,
    checks: Checks,
    counter: ProgressCounter,
    *,
    overlap: Overlap | None = None,
    grams: GramCollector | None = None,
    columns: Mapping[str, Any] | None = None,
) -> Scan:
    """Read one file to its end."""
    # An audit reports broken rows, however many: the reader must not stop at them. On evaluation files nothing is
    # trained, so that a verdict in them may go unread.
    reading = read(source, max_broken=1.0, columns=columns, is_strict=part != "evaluation")
    scan = Scan(
        source=source,
        part=part,
        prompts=Distinct(sketches=Sketches(seed=checks.seed)),
        conversations=Distinct(sketches=Sketches(seed=checks.seed)),
        format=str(reading.format),
        note=reading.format.note,
    )
    scanner = Scanner(scan, checks, overlap=overlap, grams=grams)
    for example in reading:
        scanner.add(example)
        counter.step()
    counter.report()
    scan.broken = reading.num_broken
    scan.without = reading.num_without
    scan.broken_places = [f"{broken.origin} ({broken.reason})" for broken in reading.broken]
    return scan


def _check(files: Sequence[Source], near_threshold: float, measure: Measure | None, window: int | None) -> None:
    if not files:
        raise ConfigError("no file to audit: give at least one training file")
    if not 0.3 <= near_threshold <= 1:
        raise ConfigError(f"near_threshold is {near_threshold}; it is a similarity from 0.3 to 1 (0.8 is usual)")
    if window is not None and measure is None:
        raise ConfigError(f"window is {window}, but without a tokenizer nothing can be measured against it: name one")
    if window is not None and window < 1:
        raise ConfigError(f"window is {window}; it must be at least 1 token")
