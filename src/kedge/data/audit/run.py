"""The audit itself: scan every file once, judge each alone, then judge them together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from kedge.core.errors import ConfigError
from kedge.data.audit.cross_file import between, contamination, leakage
from kedge.data.audit.excerpts import offenders
from kedge.data.audit.minhash import PERMUTATIONS, SHINGLE, Sketches
from kedge.data.audit.ngrams import GRAM, GramCollector, Overlap
from kedge.data.audit.result import Audit, Part, worst_first
from kedge.data.audit.scan import Checks, Distinct, Measure, Scan, Scanner
from kedge.data.audit.single_file import judge_file
from kedge.data.audit.text_matching import KNOWN_SPECIAL_TOKENS, TRANSCRIPT_MARKERS, Finder
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
    progress: Progress | None = None,
) -> Audit:
    """Look at training files for what would spoil training or the numbers measured after it.

    `measure` counts the tokens of messages, `window` is how many the model takes, `special_tokens` are the model's
    own. Broken rows are counted, not fatal until their share passes `max_broken`. `progress` is called now and then
    with the number of items read so far, over all files.
    """
    _check(files, near_threshold, measure, window)
    checks = Checks(
        measure=measure,
        window=window,
        known_tokens=Finder([token for token in KNOWN_SPECIAL_TOKENS if token not in special_tokens]),
        model_tokens=Finder(special_tokens),
        transcript_markers=Finder(TRANSCRIPT_MARKERS),
        seed=seed,
    )
    counter = Counter(progress)
    collector = GramCollector()
    evaluated = list[tuple[Scan, int]]()
    for source in evaluation:
        collector.first_owner = sum(len(scan.prompts.rows) for scan, _ in evaluated)
        evaluated.append((scan_file(source, "evaluation", checks, counter, grams=collector), collector.first_owner))
    grams = collector.index() if evaluation else None
    held = [scan_file(source, "heldout", checks, counter) for source in heldout]
    overlaps = [Overlap(grams) if grams else None for _ in files]
    train = [
        scan_file(source, "train", checks, counter, overlap=overlap)
        for source, overlap in zip(files, overlaps, strict=True)
    ]
    scans = [*train, *held, *(scan for scan, _ in evaluated)]
    judged = [judge_file(scan, threshold=near_threshold, max_broken=max_broken, window=window) for scan in scans]
    cases = [case for _, found in judged for case in found]
    cases += [*leakage(train, held, threshold=near_threshold), *between(train)]
    if grams:
        pairs = [(scan, overlap) for scan, overlap in zip(train, overlaps, strict=True) if overlap]
        cases += contamination(pairs, evaluated, grams)
    return Audit(
        files=tuple(facts for facts, _ in judged),
        findings=worst_first(case.finding for case in cases),
        offenders=offenders(cases),
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


class Counter:
    """Counts items over all files and tells whoever asked."""

    def __init__(self, progress: Progress | None) -> None:
        self._progress = progress
        self._count = 0

    def step(self) -> None:
        self._count += 1
        if self._progress is not None and self._count % _PROGRESS_EVERY == 0:
            self._progress(self._count)

    def tell(self) -> None:
        if self._progress is not None:
            self._progress(self._count)


def scan_file(
    source: Source,
    part: Part,
    checks: Checks,
    counter: Counter,
    *,
    overlap: Overlap | None = None,
    grams: GramCollector | None = None,
) -> Scan:
    """Read one file to its end."""
    # An audit reports broken rows, however many: the reader must not stop at them.
    reading = read(source, max_broken=1.0)
    scan = Scan(
        source=source,
        part=part,
        prompts=Distinct(sketches=Sketches(seed=checks.seed)),
        conversations=Distinct(sketches=Sketches(seed=checks.seed)),
        format=str(reading.format),
    )
    scanner = Scanner(scan, checks, overlap=overlap, grams=grams)
    for example in reading:
        scanner.add(example)
        counter.step()
    counter.tell()
    scan.broken = reading.num_broken
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
