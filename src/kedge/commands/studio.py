"""What `kedge studio` does: the pages of a project folder on this machine, and what they borrow from other commands."""

from __future__ import annotations

import json
import multiprocessing
import os
import secrets
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING, Any, Final, cast

from kedge.commands.listening import listen
from kedge.core.errors import ConfigError, KedgeError, PluginError
from kedge.core.files import write_json

if TYPE_CHECKING:
    from kedge.recipe.schema import Recipe
    from kedge.stages.shared.context import Say
    from kedge.web.studio.services import BadAnswer, FileReport, PlanPart, Question, Report, Services, Verdict

ADDRESS: Final = "127.0.0.1"
CHECK_S: Final = 600.0
"""A check that takes longer is given up: a reward function may never return."""
_CHECK_MODULES: Final = (
    "kedge.commands.check",
    "kedge.data.preflight",
    "kedge.models.loading.describe",
    "transformers",
)
"""What a check needs: imported once, in a process that every check starts from."""
_RUN: Final = (sys.executable, "-P", "-m", "kedge.cli")
"""Without the folder of the project on the path: a file `random.py` there is data, not a module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StudioSettings:
    folder: Path
    port: int | None = None
    """None is the one of the last time where it is free, so that open tabs go on; 0 is a free one."""
    runs_at_once: int = 1
    upload_gib: float = 1.0


def serve_studio(settings: StudioSettings, say: Say) -> None:
    """The pages until interrupted. Runs and chats go on without them, and are found again."""
    try:
        import uvicorn

        from kedge.report.live.connections import PatientProtocol
        from kedge.web.studio.app import make_app
        from kedge.web.studio.context import Studio
        from kedge.web.studio.guard import LocalDoor
        from kedge.web.studio.jobs import Jobs
        from kedge.web.studio.project import Project
    except ImportError as error:
        raise PluginError(f"kedge studio needs {error.name!r}: pip install 'kedge[studio]'") from error
    folder = project_folder(settings.folder)
    project = Project(folder)
    token, last_port = kept_address(project.state)
    with closing(_listening(settings.port, last_port)) as listening:
        port = listening.getsockname()[1]
        write_json(project.state / "address.json", {"token": token, "port": port})
        door = LocalDoor(
            token=token, origin=f"http://{ADDRESS}:{port}", hosts=(f"{ADDRESS}:{port}",)
        )  # fmt: skip
        studio = Studio(
            project=project,
            services=make_services(folder),
            jobs=Jobs(project.state / "jobs", cwd=folder),
            runs_at_once=settings.runs_at_once,
            upload_limit=int(settings.upload_gib * 2**30),
        )
        listening.listen()  # who opens the address at once waits a moment, and is not refused
        say(f"http://{ADDRESS}:{port}/?token={token}")
        say(f"The studio of {folder}, for this machine alone. Ctrl-C ends it; runs go on, and are found again.")
        # Its log of requests would have the token in every line.
        config = uvicorn.Config(make_app(studio, door), http=PatientProtocol, log_level="warning", access_log=False)
        uvicorn.Server(config).run(sockets=[listening])


def project_folder(folder: Path) -> Path:
    """The folder, made where it is missing; refused where it is none, or so wide that it is no project."""
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder}: this is a file; name the folder of a project")
    folder.mkdir(parents=True, exist_ok=True)
    resolved = folder.resolve()
    if resolved in (Path(resolved.anchor), Path.home()):
        raise ConfigError(f"{resolved}: everything of yours would be inside of the project; name a folder of its own")
    if not os.access(resolved, os.W_OK):
        raise ConfigError(f"{resolved}: it is read-only for this user; name a folder that you may write to")
    return resolved


def kept_address(state: Path) -> tuple[str, int]:
    """Token and port of the last time, so that an open tab goes on; a new token where there is none."""
    state.mkdir(parents=True, exist_ok=True)
    state.chmod(0o700)
    try:
        values: Mapping[str, Any] = json.loads((state / "address.json").read_bytes())
        token, port = str(values["token"]), int(values["port"])
        if len(token) >= 32 and token.isascii() and 0 < port < 65536:
            return token, port
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return secrets.token_urlsafe(24), 0


def _listening(port: int | None, last_port: int) -> socket:
    if port is None:
        try:
            return listen(ADDRESS, last_port)
        except ConfigError:
            return listen(ADDRESS, 0)
    return listen(ADDRESS, port)


def make_services(folder: Path) -> Services:
    """What the pages borrow."""
    from kedge.commands.models import built_in
    from kedge.recipe.templates import templates
    from kedge.web.studio.services import Services

    return Services(
        templates=templates,
        models=lambda: [(alias, summary) for alias, summary, _ in built_in()],
        check=Checker(folder).check,
        plan=plan_parts,
        audit=partial(_audit, folder),
        doctor=_doctor,
        report=_report,
        compare=_compare,
        run_command=_run_command,
        serve_command=lambda model, token: (*_RUN, "serve", model, "--port", "0", "--token-file", str(token)),
        add_badcase=partial(_add_badcase, folder),
        ask_people=partial(_ask_people, folder),
    )


def _run_command(recipe: str, is_resumed: bool) -> Sequence[str]:
    # It was checked a moment ago, by the page that started it; what is resumed is checked again.
    return (*_RUN, "run", recipe, *(("--resume",) if is_resumed else ("--no-check",)))


class Checker:
    """`kedge check` in a process of its own: code of the project never runs in the server, nor holds it up."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(list(_CHECK_MODULES))

    def check(self, file: Path, asks_servers: bool) -> Report:
        ours, theirs = self._context.Pipe(duplex=False)
        arguments = (theirs, str(self._folder), str(file.relative_to(self._folder)), asks_servers)
        process = self._context.Process(target=_check_in_child, args=arguments, daemon=True)
        process.start()
        theirs.close()
        try:
            if not ours.poll(CHECK_S):
                return {"error": f"the check was given up after {CHECK_S:.0f} s"}
            return ours.recv()
        except EOFError:
            return {"error": "the check ended without an answer; `kedge check` in a terminal may say why"}
        finally:
            ours.close()
            process.kill()
            process.join()


def _check_in_child(answer: Connection, folder: str, recipe: str, asks_servers: bool) -> None:
    from kedge.commands.check import check_recipe
    from kedge.commands.plan.words import plan_panel
    from kedge.recipe.schema import load_recipe

    os.chdir(folder)
    try:
        loaded = load_recipe(Path(recipe))
        report = check_recipe(loaded, offline=not asks_servers)
        planned = plan_panel(loaded) if report.is_fit else []
        answer.send(json.loads(json.dumps({**report.as_dict(), "plan": planned}, default=str)))
    except KedgeError as error:
        answer.send({"error": str(error)})
    except Exception as error:  # whatever it is, the page must say something
        traceback.print_exc()
        answer.send({"error": f"the check failed: {type(error).__name__}: {error}"})


def plan_parts(recipe: Recipe, report: Report) -> Sequence[PlanPart]:
    """The panel beside the form: what the run will take, by `kedge plan` on this machine, and what it will do, by
    `kedge check`."""
    from kedge.web.studio.services import PlanPart

    del recipe
    models: Sequence[Mapping[str, Any]] = report.get("models", ())
    stages: Mapping[str, Mapping[str, Any]] = report.get("stages", {})
    checked: Sequence[Mapping[str, Any]] = report.get("checked", ())
    planned: Sequence[tuple[str, Sequence[str]]] = report.get("plan", ())

    def parts() -> Iterator[tuple[str, Sequence[str]]]:
        yield from planned
        yield from ((f"model {model['name']}", [str(model["is"])]) for model in models)
        yield from ((f"{name} ({stage['kind']})", stage["lines"]) for name, stage in stages.items())
        yield "placement", report.get("placement", ())
        yield "rounds", report.get("rounds", ())
        yield "looked at", [f"{row['what']} {row['subject']}: {row['result']}" for row in checked]

    return [PlanPart(title=title, lines=tuple(lines)) for title, lines in parts() if lines]


def _audit(folder: Path, file: Path) -> FileReport:
    from kedge.commands.data import check_files
    from kedge.web.studio.services import FileReport

    audit = check_files([str(file)])
    about = audit.files[0] if audit.files else None
    shortened = _shortener(folder)
    return FileReport(
        file=file.relative_to(folder).as_posix(),
        kind=(about.kind or "") if about else "",
        rows=about.items if about else 0,
        findings=tuple(shortened(finding) for finding in audit.findings),
    )


def _shortener(folder: Path) -> Callable[[Any], Any]:
    from dataclasses import replace

    prefix = f"{folder}{os.sep}"
    return lambda finding: replace(
        finding, **{name: getattr(finding, name).replace(prefix, "") for name in ("message", "where", "fix")}
    )


def _doctor(run: Path) -> Sequence[Verdict]:
    from kedge.commands.doctor import examine, recipe_diff
    from kedge.web.studio.services import Verdict

    return [
        Verdict(
            stage=examined.stage,
            is_healthy=examined.diagnosis.is_healthy,
            verdict=examined.diagnosis.verdict,
            diff=tuple(recipe_diff(examined.stage, examined.diagnosis.changes)),
        )
        for examined in examine(run)
    ]


def _report(run: Path) -> str:
    from kedge.report.writing import report_page

    return report_page(run)


def _compare(runs: Sequence[Path]) -> str:
    from kedge.commands.compare import compare_runs
    from kedge.report.compare.page import render_comparison

    if len(runs) < 2:
        raise ConfigError("choose two runs or more to compare")
    return render_comparison(compare_runs(runs).entries)


def _add_badcase(folder: Path, bad: BadAnswer) -> str:
    """Add an answer of the chat to the project's badcases; it is kept with its chat's answers, which it names."""
    from kedge.commands.gate import add_case, typed_check

    check = typed_check(bad.check, bad.value)
    answers = folder / ".kedge-studio" / "answers.jsonl"
    answers.parent.mkdir(parents=True, exist_ok=True)
    identity = secrets.token_hex(6)
    row = {"id": identity, "model": bad.model, "prompt": list(bad.prompt), "answer": bad.answer}
    with answers.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row, ensure_ascii=False) + "\n")
    case, _ = add_case(
        folder / "badcases",
        answers,
        identity,
        why=bad.why,
        check=check,
        severity="block",
        samples=3,
        needed=None,
        siblings=(),
    )
    return case.id


_ASKED = "studio"
"""The project of labels that questions of the chat go into."""
_GUIDELINE = """\
Which answer would you rather have got? Think of what was asked: is it answered, is it right, is it no longer than it
need be? Of a single answer: would you have been content with it?
"""


def _ask_people(folder: Path, question: Question) -> str:
    """Put answers of the chat to people, in a project of the store of this folder; both are made where there are none.

    A question that was put before is not put again."""
    from kedge.data.examples import Message

    try:
        from kedge.label.database import open_store
        from kedge.label.incoming import Draft, DraftAnswer
        from kedge.label.items import add_items
        from kedge.label.projects import all_names, find_project, new_project
    except ModuleNotFoundError as error:
        raise PluginError(f"labels need {error.name}: pip install 'kedge[label]'") from error
    prompt = tuple(Message(cast(Any, message["role"]), message["content"]) for message in question.prompt)
    answers = tuple(
        DraftAnswer(text=(Message("assistant", text),), model=model) for model, text in question.answers.items()
    )
    store = open_store(str(folder / "labels.db"), create=True)
    try:
        is_there = _ASKED in all_names(store)
        project = find_project(store, _ASKED) if is_there else new_project(store, _ASKED, ("pair", "thumb"), _GUIDELINE)
        add_items(store, project, [Draft(prompt=prompt, answers=answers)], origin="chat")
    finally:
        store.close()
    return project.name
