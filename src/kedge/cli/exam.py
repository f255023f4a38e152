"""`kedge exam`: questions with known answers, put to models; which exams there are, and getting their files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.table import Table

from kedge.cli.flags import FlagGroup
from kedge.cli.screen import counter, out, print_json, writing
from kedge.core.errors import ConfigError
from kedge.core.files import refuse_overwriting


class _TakeByDefault(FlagGroup):
    """`kedge exam MODEL` means `kedge exam take MODEL`; a folder called like a command is named `./list`."""

    default_command = "take"

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = [self.default_command, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="exam",
    cls=_TakeByDefault,
    help="Questions with known answers: `kedge exam MODEL` takes the exams that ship; list, get.",
    no_args_is_help=True,
)


@app.command()
def take(
    models: Annotated[list[str], typer.Argument(help="Models, or the runs or stages that made them.")],
    on: Annotated[str, typer.Option("--on", help="Exams, with commas between them; `kedge exam list`.")] = "quick",
    to: Annotated[Path | None, typer.Option("--to", help="Write items.jsonl, answers.jsonl, exam.json there.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="So many items of each exam, taken evenly.")] = None,
    template: Annotated[
        Literal["chat", "plain"], typer.Option(help="Questions with the chat template, or as plain text.")
    ] = "chat",
    groups: Annotated[bool, typer.Option("--groups", help="Show the groups of each main metric.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same answers.")] = 0,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows computed at once; as many as have room.")] = None,
    chat_template: Annotated[str | None, typer.Option(help="chatml, plain or a Jinja file; else the model's.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto",
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        typer.Option(help="Type of the weights; auto: float32 on a CPU, bfloat16 on a GPU."),
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable results.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite files that are there.")] = False,
) -> None:
    """Take exams; the same model and items give the same numbers."""
    from kedge.commands import exam as exams

    names = [name.strip() for name in on.split(",") if name.strip()]
    if to is not None:
        refuse_overwriting([to / name for name in exams.FILES], inputs=[], force=force)
    exams.refuse_exams(names, limit)
    console = out()

    def say(line: str) -> None:
        if not as_json:
            console.print(line, markup=False, soft_wrap=True)

    with counter("questions", is_quiet=as_json) as progress:
        taken = exams.take(
            models,
            names,
            template=template,
            limit=limit,
            seed=seed,
            rows=rows or "auto",
            dtype=dtype,
            device=device,
            chat_template=chat_template,
            say=say,
            progress=progress,
        )
    if to is not None:
        with writing(to):
            exams.write_exams(to, taken)
    if as_json:
        print_json(taken.as_dict())
        return
    for line in exams.table_lines(taken, groups=groups):
        say(line)
    if to is not None:
        say(f"wrote {', '.join(str(to / name) for name in exams.FILES)}")


@app.command("list")
def list_exams() -> None:
    """The exams that there are, and whether their files are here."""
    from kedge.commands import exam as exams

    table = Table("exam", "items", "metrics", "licence", "what it is", box=None, pad_edge=False)
    for exam in exams.listed():
        if exam.origin == "missing":
            table.add_row(exam.name, "–", "", "", f"kedge exam get {exam.name} --from FOLDER", style="dim")
        else:
            table.add_row(exam.name, f"{exam.items:,}", ", ".join(exam.metrics), exam.licence, exam.title)
    out().print(table)


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="The exam, for example mmlu.")],
    source: Annotated[Path, typer.Option("--from", help="The folder or file that you have fetched.")],
    force: Annotated[bool, typer.Option("--force", help="Replace the files that were got before.")] = False,
) -> None:
    """Copy the files of a public exam, in any of the layouts that are known, to where `kedge exam` looks."""
    from kedge.commands import exam as exams

    if not source.exists():
        raise ConfigError(f"--from {source}: there is no such folder or file")
    fetched = exams.fetch_exam(name, source, force=force)
    for line in fetched.lines():
        out().print(line, markup=False, soft_wrap=True)
