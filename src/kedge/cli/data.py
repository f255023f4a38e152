"""`kedge data`: check, convert, split and make data files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import counter, out, print_json, writing
from kedge.core.files import refuse_overwriting

app = typer.Typer(name="data", help="Check, convert, split and make data files.", no_args_is_help=True)

Files = Annotated[
    list[str], typer.Argument(help="JSONL, JSON, CSV, TSV, Parquet (gzip too), a datasets folder, or a hub id.")
]
Named = Annotated[
    list[str] | None,
    typer.Option("--column", help="PART=COLUMN, as in prompt=question; may be repeated.", metavar="PART=COLUMN"),
]
Ignored = Annotated[list[str] | None, typer.Option("--ignore", help="A column that does not count; may be repeated.")]
Force = Annotated[bool, typer.Option("--force", help="Overwrite files that are there (never what is read).")]
AsJson = Annotated[bool, typer.Option("--json", help="Machine-readable.")]
MaxBroken = Annotated[float, typer.Option(min=0, max=1, help="Largest share of unreadable lines.")]


@app.command()
def check(
    files: Files,
    heldout: Annotated[list[str] | None, typer.Option(help="Held-out files: no prompt may be shared.")] = None,
    evaluation: Annotated[list[str] | None, typer.Option(help="Evaluation files: 13-gram overlap is counted.")] = None,
    model: Annotated[str | None, typer.Option(help="Count this model's tokens, check its template.")] = None,
    window: Annotated[int | None, typer.Option(min=1, help="Longest item in tokens (with --model).")] = None,
    near: Annotated[float, typer.Option(help="Similarity that counts as a near duplicate.")] = 0.8,
    max_broken: MaxBroken = 0.01,
    column: Named = None,
    ignore: Ignored = None,
    html: Annotated[Path | None, typer.Option(help="Write a page with everything.")] = None,
    as_json: AsJson = False,
    force: Force = False,
) -> None:
    """Audit files: lengths, duplicates, contradictions, length bias, leakage. Exit 2 on fatal findings."""
    from kedge.commands.data import check_files, named_columns, render, save_html

    refuse_overwriting([html], inputs=[*files, *(heldout or ()), *(evaluation or ())], force=force)
    with counter("examples read", is_quiet=as_json) as progress:
        audit = check_files(
            files,
            heldout=heldout or (),
            evaluation=evaluation or (),
            model=model,
            window=window,
            max_broken=max_broken,
            near_threshold=near,
            columns=named_columns(column or (), ignore or ()),
            progress=progress,
        )
    if html is not None:
        with writing(html):
            save_html(audit, html)
    if as_json:
        print_json(audit.as_dict())
    else:
        out().print(render(audit))
        if html is not None:
            _say(f"wrote {html}")
    if audit.is_fatal:
        raise typer.Exit(2)


@app.command()
def convert(
    file: Annotated[str, typer.Argument(help="What to read.")],
    to: Annotated[Path | None, typer.Option("--to", help="Where to write: .jsonl, .jsonl.gz or .parquet.")] = None,
    kind: Annotated[str | None, typer.Option(help="pairs, rankings, thumbs, demonstrations or prompts.")] = None,
    max_broken: MaxBroken = 0.01,
    column: Named = None,
    ignore: Ignored = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Read at most so many rows.")] = None,
    force: Force = False,
) -> None:
    """Write a file in the canonical form, or as another kind of examples."""
    from kedge.commands.data import convert_file, named_columns

    columns = named_columns(column or (), ignore or ())
    with writing(to or Path()):
        done = convert_file(file, to, kind=kind, max_broken=max_broken, columns=columns, limit=limit, force=force)
    _say(f"read {done.num_rows:,} rows of {file} as {done.format}")
    if done.format.note:
        _say(f"note: {done.format.note}")
    _say(f"wrote {done.num_examples:,} {done.kind} to {done.out}")
    if done.num_without:
        _say(f"{done.num_without:,} rows hold no {done.kind} (ties and disliked answers, say)")
    if done.num_broken:
        _say(f"broken rows set aside beside it in *.broken.jsonl, with line and reason: {done.num_broken:,}")


@app.command()
def split(
    files: Files,
    to: Annotated[Path, typer.Option("--to", help="Folder to write to.")] = Path(),
    heldout: Annotated[float, typer.Option(help="Share of the prompts that is held out.")] = 0.1,
    by: Annotated[str, typer.Option(help="`prompt`, or a field whose equal values stay together.")] = "prompt",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    max_broken: MaxBroken = 0.01,
    column: Named = None,
    ignore: Ignored = None,
    force: Force = False,
) -> None:
    """Split files into train and held-out parts that share no prompt."""
    from kedge.commands.data import named_columns, split_files

    columns = named_columns(column or (), ignore or ())
    with writing(to):
        done = split_files(
            files, to, heldout=heldout, seed=seed, by=by, max_broken=max_broken, columns=columns, force=force
        )
    noun = "prompts" if by == "prompt" else f"values of {by}"
    _say(f"{done.num_keys:,} {noun}, {done.num_heldout_keys:,} of them held out (seed {seed})")
    for part in done.files:
        _say(f"{part.train}: {part.num_train:,}")
        _say(f"{part.heldout}: {part.num_heldout:,}")
        if part.num_broken:
            aside = "are set aside, with line and reason, in *.broken.jsonl"
            _say(f"{part.num_broken:,} broken rows of {part.source} {aside}")


@app.command()
def instructions(
    to: Annotated[Path, typer.Option("--to", help="Where to write: .jsonl or .jsonl.gz.")],
    count: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 2000,
    seed: Annotated[int, typer.Option(min=0)] = 1,
    kind: Annotated[
        list[str] | None,
        typer.Option(help="trained, untrained, all, or a kind like punctuation:no_comma; may be repeated."),
    ] = None,
    heldout: Annotated[bool, typer.Option("--heldout", help="Requests about subjects kept out of training.")] = False,
    force: Force = False,
) -> None:
    """Write prompts with instructions that a rule can check, for the reward `instructions` (docs/rewards.md)."""
    from kedge.commands.data import make_instructions

    refuse_overwriting([to], force=force)
    with writing(to):
        kinds = make_instructions(to, count, seed=seed, kinds=kind or ["trained"], is_heldout=heldout)
    _say(f"wrote {count:,} prompts with {len(kinds)} kinds of instructions to {to}")


def _say(text: str) -> None:
    """Plain: square brackets in the names of files are not markup."""
    out().print(text, markup=False, soft_wrap=True)
