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
Written = Literal[
    "pairs", "rankings", "thumbs", "demonstrations", "verdicts", "argilla", "label-studio", "csv", "datasets"
]


@app.command()
def new(
    name: Name,
    questions: Annotated[str, typer.Option(help="What is asked: pair, rank, thumb, write, axes, edit; by commas.")],
    guideline: Annotated[Path, typer.Option(help="What people are to look at, a file of text or Markdown.")],
    wanted: Annotated[int, typer.Option(min=1, help="Labels an item.")] = 1,
    overlap: Annotated[float, typer.Option(min=0, max=1, help="The share of items that more people label.")] = 0.2,
    overlap_wanted: Annotated[int, typer.Option(min=1, help="Labels of those items.")] = 3,
    gold: Annotated[float, typer.Option(min=0, max=0.5, help="The share of gold items in the queue.")] = 0.08,
    repeats: Annotated[float, typer.Option(min=0, max=0.5, help="The share of items that come again.")] = 0.03,
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
            repeat_share=repeats,
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
    file: Annotated[str, typer.Argument(help="Pairs, rankings, prompts, tasks, answers; Argilla, Label Studio.")],
    gold: Annotated[
        bool, typer.Option("--gold", help="The verdicts in the file are right: people are tested.")
    ] = False,
    baseline: Annotated[str | None, typer.Option(help="Of answers: the model that others are compared with.")] = None,
    db: Database = NO_ADDRESS,
) -> None:
    """Add items to a project; what it has already is not added again."""
    with _opened(db) as store:
        from kedge.label.exchange.files import read_foreign
        from kedge.label.exchange.records import take_in
        from kedge.label.incoming import read_items
        from kedge.label.items import add_items
        from kedge.label.projects import find_project

        project = find_project(store, name)
        foreign = None if gold else read_foreign(file)
        if foreign is not None:
            taken = take_in(store, project, foreign, origin=file)
            _say(f"{file}: {foreign.tool}; {taken.items:,} items added, {taken.known_items:,} were there already")
            _say(f"{taken.labels:,} labels of {taken.people:,} people added, {taken.known_labels:,} were there already")
            for what, count in sorted(foreign.unsaid.items()):
                _say(f"{count:,} left out: {what}")
            return
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
    whole: Annotated[bool, typer.Option("--all", help="Read all labels, not a sample and the latest ones.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    db: Database = NO_ADDRESS,
) -> None:
    """Progress, agreement, people, gold, hours and pay, what to do next; exit code 1 where --verify finds a change."""
    with _opened(db) as store:
        from dataclasses import asdict

        from kedge.label.audit import tampered
        from kedge.label.projects import find_project
        from kedge.label.status import status as read_status

        now = read_status(store, find_project(store, name), whole=whole)
        problems = tampered(store) if verify else []
    if as_json:
        print_json(asdict(now) | {"next": list(now.next_steps())} | ({"problems": problems} if verify else {}))
    else:
        for line in now.lines():
            _say(line)
        for line in problems or (["judgments and audit are as they were written"] if verify else []):
            _say(line)
    if problems:
        raise typer.Exit(1)


@app.command()
def calibrate(
    name: Name,
    to: Annotated[Path, typer.Option("--out", help="The page to talk about, Markdown.")],
    items: Annotated[int, typer.Option(min=1, max=500, help="How many items.")] = 20,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    db: Database = NO_ADDRESS,
) -> None:
    """Make a session of the worst disagreements: everybody is asked them next, and a page says who said what."""
    with _opened(db) as store, writing(to):
        from kedge.core.files import refuse_overwriting, write_text
        from kedge.label.calibrate import calibrate as make_session
        from kedge.label.projects import find_project

        refuse_overwriting([to], force=force)
        session = make_session(store, find_project(store, name), items=items)
        write_text(to, session.page + "\n")
    _say(f"{to}: {session.items:,} items; {session.labels:,} labels more are asked for, before all others")


@app.command()
def export(
    name: Name,
    to: Annotated[Path, typer.Option("--out", help="The file: .jsonl, .jsonl.gz, .parquet; .json, .csv, a folder.")],
    kind: Annotated[
        Literal[
            "pairs", "rankings", "thumbs", "demonstrations", "verdicts", "argilla", "label-studio", "csv", "datasets"
        ],
        typer.Option("--as", help="What is written."),
    ] = "pairs",
    as_of: Annotated[int | None, typer.Option("--as-of", min=0, help="Only judgments up to this number.")] = None,
    heldout: Annotated[bool, typer.Option("--heldout", help="The held-out items, which are left out else.")] = False,
    settle: Annotated[
        Literal["majority", "dawid_skene", "weighted"],
        typer.Option(help="How several people's labels become one; weighted is by gold."),
    ] = "majority",
    ties: Annotated[
        Literal["drop", "half"], typer.Option(help="Of pairs: ties are left out, or have certainty 0.5.")
    ] = "drop",
    margins: Annotated[
        Literal["small", "large"], typer.Option(help="Of steps 3, 2, 1: thirds up to 1, or 3, 2, 1.")
    ] = "small",
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
    db: Database = NO_ADDRESS,
) -> None:
    """Write the labels as data; the same --as-of gives the same bytes for ever."""
    with _opened(db) as store, writing(to):
        from kedge.label.exchange.files import TOOLS, send_out
        from kedge.label.export import Settling, export_labels
        from kedge.label.projects import find_project

        project = find_project(store, name)
        settling = Settling(settle=settle, ties=ties, margins=margins)
        if kind in TOOLS:
            sent = send_out(store, project, to, kind, as_of=as_of, heldout=heldout, settling=settling, force=force)
            _say(f"{to}: {sent.items:,} items, {sent.labels:,} labels as of {sent.as_of}")
            for what, count in sorted(sent.unsaid.items()):
                _say(f"{count:,} left out: {what}")
            _say(f"{kind} cannot say: {', '.join(sent.cannot)}")
            return
        exported = export_labels(
            store, project, to, kind=kind, as_of=as_of, heldout=heldout, settling=settling, force=force
        )
    _say(f"{to}: {exported.rows:,} {kind} as of {exported.as_of} (hash {exported.hash})")
    for reason, count in sorted(exported.left_out.items()):
        _say(f"{count:,} left out: {reason}")


@app.command()
def rates(
    name: Name,
    answers: Annotated[str, typer.Argument(help="answers.jsonl of an evaluation, which people have compared.")],
    baseline: Annotated[
        str | None, typer.Option(help="The model that others are compared with; else the first.")
    ] = None,
    settle: Annotated[
        Literal["majority", "dawid_skene", "weighted"], typer.Option(help="How several labels become one.")
    ] = "majority",
    as_json: Annotated[bool, typer.Option("--json", help="Machine-readable.")] = False,
    db: Database = NO_ADDRESS,
) -> None:
    """Win rates of models by what people said of their answers, with 95 % intervals by prompt."""
    with _opened(db) as store:
        from dataclasses import asdict

        from kedge.commands.label import people_rates, rate_lines
        from kedge.label.projects import find_project

        project = find_project(store, name)
        first, found = people_rates(store, project, answers, baseline=baseline, settle=settle)
    if as_json:
        rows = {model: {judge: asdict(rate) for judge, rate in own.items()} for model, own in found.items()}
        print_json({"baseline": first, "rates": rows})
        return
    for line in rate_lines(first, found):
        _say(line)


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
