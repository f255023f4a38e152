"""`kedge score`: what a reward model says about the answers in a file."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from kedge.cli.screen import counter, errors_to, out, print_findings, print_json, writing
from kedge.core.files import refuse_overwriting


def score(
    reward: Annotated[str, typer.Argument(help="A reward model, an ensemble, or the run or stage that made one.")],
    file: Annotated[str, typer.Argument(help="Pairs, rankings, thumbs or demonstrations.")],
    to: Annotated[Path | None, typer.Option("--to", help="Where to write; else FILE's stem + .scores.jsonl.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Scores as plain transformers gives them.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    report: Annotated[Path | None, typer.Option(help="Also write the reward report (HTML) on these pairs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable summary.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite files that are there (never what is read).")
    ] = False,
) -> None:
    """Score the answers in a file with a reward model."""
    from kedge.commands import score as scoring
    from kedge.commands import score_summary

    target = scoring.target_for(file, to)
    refuse_overwriting([target, report], inputs=[file, reward], force=force)
    kind = scoring.kind_to_score(file)
    if report is not None:
        score_summary.refuse_report(file, kind)
    judge = scoring.load_judge(reward, device=device)
    with writing(target):
        with counter("examples read", is_quiet=as_json) as progress:
            answers = scoring.read_answers(file, kind, judge, beside=target, progress=progress)
        start = perf_counter()
        with _bar("answers", len(answers.tokens), is_quiet=as_json) as progress:
            scores = scoring.score_answers(judge, answers, is_raw=raw, progress=progress)
        seconds = perf_counter() - start
        scoring.write_scores(target, judge, answers, scores)
    written = [target]
    if report is not None:
        with writing(report):
            written += score_summary.save_reports(report, judge, answers, scores)
    summary = score_summary.summarise(judge, answers, scores, is_raw=raw)
    if as_json:
        pace = {"tokens": answers.num_tokens, "seconds": seconds}
        print_json({**summary.as_dict(), **pace, "written": [str(path) for path in written]})
        return
    print_findings(out(), summary.findings)
    pace = f"{answers.num_tokens:,} tokens in {seconds:.1f} s, {answers.num_tokens / seconds:,.0f} a second"
    for line in (*score_summary.in_words(summary), pace, *(f"wrote {path}" for path in written)):
        out().print(line, markup=False, soft_wrap=True)


@contextmanager
def _bar(noun: str, total: int, *, is_quiet: bool) -> Generator[Callable[[int], None]]:
    """How much of a known total is done, how fast, and how long the rest will take; nothing without a terminal."""
    console = errors_to()
    columns = BarColumn(), MofNCompleteColumn(), TextColumn(f"{noun} [dim]{{task.fields[rate]}}"), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True, disable=is_quiet or not console.is_terminal) as bar:
        task = bar.add_task(noun, total=total, rate="")

        def show(done: int) -> None:
            elapsed = bar.tasks[0].elapsed
            bar.update(task, completed=done, rate=f"{done / elapsed:,.0f}/s" if elapsed else "")

        yield show
