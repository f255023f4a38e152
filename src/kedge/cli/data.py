"""`kedge data`: check, convert and split data files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import counter, out, print_json, writing

app = typer.Typer(name="data", help="Check, convert and split data files.", no_args_is_help=True)

Files = Annotated[list[str], typer.Argument(help="JSONL, JSON, Parquet (gzip too), a datasets folder, or a hub id.")]
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
    html: Annotated[Path | None, typer.Option(help="Write a page with everything.")] = None,
    as_json: AsJson = False,
) -> None:
    """Audit files: lengths, duplicates, contradictions, length bias, leakage. Exit 2 on fatal findings."""
    from kedge.commands.data import check_files, render, save_html

    with counter("examples read", is_quiet=as_json) as progress:
        audit = check_files(
            files,
            heldout=heldout or (),
            evaluation=evaluation or (),
            model=model,
            window=window,
            max_broken=max_broken,
            near_threshold=near,
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
) -> None:
    """Write a file in the canonical form, or as another kind of examples."""
    from kedge.commands.data import convert_file

    with writing(to or Path()):
        done = convert_file(file, to, kind=kind, max_broken=max_broken)
    _say(f"read {done.num_rows:,} rows of {file} as {done.format}")
    _say(f"wrote {done.num_examples:,} {done.kind} to {done.out}")
    if done.num_without:
        _say(f"{done.num_without:,} rows hold no {done.kind} (disliked answers, say)")
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
) -> None:
    """Split files into train and held-out parts that share no prompt."""
    from kedge.commands.data import split_files

    with writing(to):
        done = split_files(files, to, heldout=heldout, seed=seed, by=by, max_broken=max_broken)
    noun = "prompts" if by == "prompt" else f"values of {by}"
    _say(f"{done.num_keys:,} {noun}, {done.num_heldout_keys:,} of them held out (seed {seed})")
    for one in done.files:
        _say(f"{one.train}: {one.num_train:,}")
        _say(f"{one.heldout}: {one.num_heldout:,}")
        if one.num_broken:
            _say(
                f"{one.num_broken:,} broken rows of {one.source} are set aside, with line and reason, in *.broken.jsonl"
            )


def _say(text: str) -> None:
    """Plain: square brackets in the names of files are not markup."""
    out().print(text, markup=False, soft_wrap=True)
