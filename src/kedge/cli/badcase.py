"""`kedge badcase`: answers that must never come again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kedge.cli.screen import out, print_json, writing

app = typer.Typer(
    name="badcase",
    help="Answers that must never come again: add, list, replay, close, quarantine.",
    no_args_is_help=True,
)
Folder = Annotated[Path, typer.Option("--folder", help="The folder of badcases.")]
HERE = Path("badcases")


@app.command()
def add(
    answers: Annotated[Path, typer.Argument(help="A file of answers, as evaluate or sample writes it.")],
    answer: Annotated[str, typer.Argument(help="The id of the bad answer in it.")],
    why: Annotated[str, typer.Option("--why", help="What is bad about it.")],
    check: Annotated[str, typer.Option("--check", help="What a good answer does, for example 'contains: \"4\"'.")],
    severity: Annotated[Literal["block", "warn"], typer.Option(help="What a failure does.")] = "block",
    samples: Annotated[int, typer.Option(min=1, help="Answers that are sampled at a replay.")] = 3,
    needed: Annotated[int | None, typer.Option(min=1, help="How many must be good; unless given, all.")] = None,
    sibling: Annotated[
        list[str] | None, typer.Option(help="The same question in other words, never trained on; may be repeated.")
    ] = None,
    folder: Folder = HERE,
) -> None:
    """Keep a bad answer for ever; every gate replays it."""
    from kedge.commands import gate as gating

    with writing(folder):
        case, file = gating.add_case(
            folder,
            answers,
            answer,
            why=why,
            check=check,
            severity=severity,
            samples=samples,
            needed=needed,
            siblings=sibling or (),
        )
    out().print(f"{case.id}: added to {file}", markup=False, soft_wrap=True)


@app.command("list")
def list_cases(folder: Folder = HERE) -> None:
    """All cases, with their status."""
    from kedge.commands import gate as gating

    lines = list(gating.case_lines(folder)) or [f"{folder}: no badcases"]
    for line in lines:
        out().print(line, markup=False, soft_wrap=True)


@app.command()
def replay(
    model: Annotated[str, typer.Argument(help="The model, or the run or stage that made it.")],
    case: Annotated[list[str] | None, typer.Option("--case", help="Only this case; may be repeated.")] = None,
    folder: Folder = HERE,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.")] = 256,
    chat_template: Annotated[str | None, typer.Option(help="chatml, plain or a Jinja file; else the model's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable results.")] = False,
) -> None:
    """Put the cases to a model; exit code 3 where one that blocks fails."""
    from kedge.commands import gate as gating

    results = gating.replay_on(
        model,
        folder,
        only=case or (),
        sampling=gating.Sampling(
            seed=seed, device=device, dtype=dtype, chat_template=chat_template, max_new_tokens=max_new_tokens
        ),
        say=lambda line: None if as_json else out().print(line, markup=False, soft_wrap=True),
    )
    if as_json:
        print_json([result.as_dict() for result in results])
    else:
        for line in gating.replay_lines(results):
            out().print(line, markup=False, soft_wrap=True)
    if any(result.verdict == "fail" and result.severity == "block" for result in results):
        raise typer.Exit(3)


@app.command()
def close(
    case: Annotated[str, typer.Argument(help="The case.")],
    reason: Annotated[str, typer.Option("--reason", help="Where it was fixed.")],
    folder: Folder = HERE,
) -> None:
    """Mark a case as fixed; it is replayed all the same."""
    _set(folder, case, is_fixed=True, reason=reason, until="")


@app.command()
def quarantine(
    case: Annotated[str, typer.Argument(help="The case.")],
    reason: Annotated[str, typer.Option("--reason", help="Why it does not count.")],
    until: Annotated[str, typer.Option("--until", help="The day from which it counts again, as 2027-01-31.")],
    folder: Folder = HERE,
) -> None:
    """Let a case not count until a day."""
    _set(folder, case, is_fixed=False, reason=reason, until=until)


def _set(folder: Path, case: str, *, is_fixed: bool, reason: str, until: str) -> None:
    from kedge.commands import gate as gating

    with writing(folder):
        changed = gating.set_case(folder, case, is_fixed=is_fixed, reason=reason, until=until)
    day = f" until {changed.until}" if changed.until else ""
    out().print(f"{changed.id}: {changed.status}{day}", markup=False, soft_wrap=True)
