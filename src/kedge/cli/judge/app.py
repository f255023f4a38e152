"""`kedge judge`: judges, before they label."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kedge.cli.screen import counter, errors_to, out, print_json, writing
from kedge.core.errors import ConfigError
from kedge.core.files import refuse_overwriting

app = typer.Typer(name="judge", help="Judges, before they label: may this one be trusted?", no_args_is_help=True)


@app.callback()
def _judge() -> None:  # pyright: ignore[reportUnusedFunction]  # typer calls it: a single command stays a command
    pass


@app.command()
def trust(
    judge: Annotated[Path | None, typer.Argument(help="The judge, a YAML file with url, model and what else.")] = None,
    on: Annotated[
        Path | None, typer.Option("--on", help="People's verdicts: prompt, first, second, verdicts a row.")
    ] = None,
    verdicts: Annotated[
        Path | None, typer.Option("--verdicts", help="Stored verdicts (id, verdict) in the place of a judge.")
    ] = None,
    to: Annotated[Path, typer.Option("--to", help="Where to write the report; its page stands beside it.")] = Path(
        "trust.json"
    ),
    repeat: Annotated[int, typer.Option(min=0, max=20, help="How often the judge is asked the same again.")] = 1,
    family: Annotated[
        str | None, typer.Option(help="A part of the names of models of the judge's own family, e.g. llama.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of the requests; another one asks everything anew.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="The report as JSON.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite a report that is there.")] = False,
) -> None:
    """Measure a judge beside people and decide by a contract whether it may label; exit code 3 where it may not."""
    from kedge.commands.judge import table
    from kedge.commands.judge import trust as trusting

    if on is None or (judge is None) == (verdicts is None):
        raise ConfigError("kedge judge trust JUDGE.yaml --on HUMAN.jsonl, or --verdicts FILE --on HUMAN.jsonl")
    page = to.with_suffix(".html")
    inputs = [file for file in (judge, on, verdicts) if file is not None]
    refuse_overwriting([to, page], inputs=inputs, force=force)
    console = errors_to() if as_json else out()

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    with writing(to):
        if verdicts is not None:
            report = trusting.trust_stored(verdicts, on, family=family, seed=seed, say=say)
        else:
            assert judge is not None
            with counter("comparisons") as progress:
                report = trusting.trust_asked(
                    judge, on, repeat=repeat, family=family, seed=seed, say=say, progress=progress
                )
        trusting.write_files(report, to, page)
    if as_json:
        print_json(trusting.facts(report))
    else:
        for line in table.text_lines(report):
            say(line)
        say(f"wrote {to} and {page}")
    trusting.refuse(report, to)
