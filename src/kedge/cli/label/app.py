"""`kedge label`: people's labels, from a question to pairs for a reward model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from kedge.cli.label.opening import NO_ADDRESS, Database
from kedge.cli.label.opening import opened as _opened
from kedge.cli.label.opening import say as _say
from kedge.cli.label.serve import serve
from kedge.cli.screen import print_json, writing
from kedge.core.errors import ConfigError

app = typer.Typer(
    name="label",
    help="People's labels: projects, what is asked, how they stand, exports.",
    no_args_is_help=True,
)
app.command()(serve)
Name = Annotated[str, typer.Argument(help="The project.")]


@app.command()
def new(
    name: Name,
    questions: Annotated[str, typer.Option(help="What is asked: pair, rank, thumb, write, axes, edit; by commas.")],
    guideline: Annotated[Path, typer.Option(help="What people are to look at, a file of text or Markdown.")],
    wanted: Annotated[int, typer.Option(min=1, help="Labels an item.")] = 1,
    overlap: Annotated[float, typer.Option(min=0, max=1, help="The share of items that more people label.")] = 0.2,
    overlap_wanted: Annotated[int, typer.Option(min=1, help="Labels of those items.")] = 3,
    gold: Annotated[float, typer.Option(min=0, max=0.5, help="The share of gold items in the queue.")] = 0.08,
    practice: Annotated[int, typer.Option(min=0, max=100, help="Gold items to practise on before the first.")] = 5,
    harm: Annotated[int, typer.Option(min=0, help="Harmful items an hour, for those who take them.")] = 20,
    pay: Annotated[float, typer.Option(min=0, help="What an hour is paid.")] = 0.0,
    currency: Annotated[str, typer.Option(help="Of the pay.")] = "",
    db: Database = NO_ADDRESS,
) -> None:
    """Make a project."""
    text = _text(guideline)
    with _opened(db, create=True) as store:
        from kedge.label.projects import Settings, new_project

        settings = Settings(
            wanted=wanted,
            overlap_share=overlap,
            overlap_wanted=overlap_wanted,
            gold_share=gold,
            practice=practice,
            harm_an_hour=harm,
            pay=pay,
            currency=currency,
        )
        asked = [word.strip() for word in questions.split(",") if word.strip()]
        project = new_project(store, name, asked, text, settings)
        _say(f"{project.name}: asks {', '.join(project.questions)}. `kedge label add {name} FILE` gives it items")


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file}: not UTF-8 text (byte {error.start + 1}); save it as UTF-8") from error
    except OSError as error:
        raise ConfigError(f"--guideline {file}: {error.strerror}; name a file of text") from error


@app.command()
def guideline(
    name: Name,
    file: Annotated[Path, typer.Argument(help="The new guideline.")],
    db: Database = NO_ADDRESS,
) -> None:
    """Give a project a new version of its guideline; judgments name the one that they were made under."""
    text = _text(file)
    with _opened(db) as store:
        from kedge.label.projects import add_guideline, find_project

        version = add_guideline(store, find_project(store, name), text)
        _say(f"{name}: guideline version {version}")


@app.command()
def add(
    name: Name,
    file: Annotated[str, typer.Argument(help="Pairs, rankings, thumbs, prompts, tasks, or answers of evaluate.")],
    gold: Annotated[
        bool, typer.Option("--gold", help="The verdicts in the file are right: people are tested.")
    ] = False,
    baseline: Annotated[str | None, typer.Option(help="Of answers: the model that others are compared with.")] = None,
    db: Database = NO_ADDRESS,
) -> None:
    """Add items to a project; what it has already is not added again."""
    with _opened(db) as store:
        from kedge.label.incoming import read_items
        from kedge.label.items import add_items
        from kedge.label.projects import find_project

        project = find_project(store, name)
        ranks = "rank" in project.questions and "pair" not in project.questions
        incoming = read_items(file, gold=gold, baseline=baseline, ranks=ranks)
        added = add_items(store, project, incoming.drafts, origin=file)
    kind = " gold" if gold else ""
    _say(f"{file}: {incoming.layout}; {added.items:,}{kind} items added, {added.known:,} were there already")
    if incoming.equal:
        _say(f"{incoming.equal:,} left out: both answers are the same")


@app.command()
def status(
    name: Name,
    verify: Annotated[bool, typer.Option("--verify", help="Also look whether anybody changed the store.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    db: Database = NO_ADDRESS,
) -> None:
    """Progress, people, gold, hours, flags; exit code 1 where --verify finds a change."""
    with _opened(db) as store:
        from dataclasses import asdict

        from kedge.label.audit import tampered
        from kedge.label.projects import find_project
        from kedge.label.status import status as read_status

        now = read_status(store, find_project(store, name))
        problems = tampered(store) if verify else []
    if as_json:
        print_json(asdict(now) | ({"problems": problems} if verify else {}))
    else:
        for line in now.lines():
            _say(line)
        for line in problems or (["judgments and audit are as they were written"] if verify else []):
            _say(line)
    if problems:
        raise typer.Exit(1)


@app.command()
def export(
    name: Name,
    to: Annotated[Path, typer.Option("--out", help="The file: .jsonl, .jsonl.gz or .parquet.")],
    kind: Annotated[
        Literal["pairs", "rankings", "thumbs", "demonstrations"], typer.Option("--as", help="What is written.")
    ] = "pairs",
    as_of: Annotated[int | None, typer.Option("--as-of", min=0, help="Only judgments up to this number.")] = None,
    heldout: Annotated[bool, typer.Option("--heldout", help="The held-out items, which are left out else.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    db: Database = NO_ADDRESS,
) -> None:
    """Write the labels as data; the same --as-of gives the same bytes for ever."""
    with _opened(db) as store, writing(to):
        from kedge.label.export import export_labels
        from kedge.label.projects import find_project

        project = find_project(store, name)
        exported = export_labels(store, project, to, kind=kind, as_of=as_of, heldout=heldout, force=force)
    _say(f"{to}: {exported.rows:,} {kind} as of {exported.as_of} (hash {exported.hash})")
    for reason, count in sorted(exported.left_out.items()):
        _say(f"{count:,} left out: {reason}")


@app.command()
def invite(
    name: Name,
    email: Annotated[str, typer.Argument(help="Whom to invite.")],
    role: Annotated[str, typer.Option(help="owner, manager, annotator or auditor.")] = "annotator",
    url: Annotated[str, typer.Option(help="The public address of the pages, which the link begins with.")] = "",
    db: Database = NO_ADDRESS,
) -> None:
    """Make a link that works once, for 72 hours: to an account, another project, or a new password."""
    with _opened(db) as store:
        from kedge.label.accounts import make_invite
        from kedge.label.projects import find_project

        token = make_invite(store, find_project(store, name), email, role, again=True)
    _say(f"{url.rstrip('/')}/join#{token}")
    _say(f"Give this to {email}: it works once, for 72 hours, and is kept nowhere.")


@app.command()
def token(
    name: Name,
    email: Annotated[str, typer.Argument(help="What the machine is called, in the form of an address.")],
    db: Database = NO_ADDRESS,
) -> None:
    """Make a bearer token with which a machine labels; an earlier one of it stops working."""
    with _opened(db) as store:
        from kedge.label.projects import find_project
        from kedge.label.team.members import machine_token

        bearer = machine_token(store, find_project(store, name), email)
    _say(bearer)
    _say(f"Give it to {email} as `Authorization: Bearer …`; it is kept nowhere.")


@app.command()
def forget(
    name: Name,
    person: Annotated[str, typer.Argument(help="The address of the person.")],
    db: Database = NO_ADDRESS,
) -> None:
    """Drop the identity of a person; the labels stay."""
    with _opened(db) as store:
        from kedge.label.accounts import forget as forget_person
        from kedge.label.projects import find_project

        find_project(store, name)
        stay = forget_person(store, person)
    _say(f"{person} is forgotten; {stay:,} judgments stay, under a name that leads nowhere")
