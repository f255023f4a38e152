"""A studio without a network: a project folder, what a browser would send, and services that answer at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fastapi.testclient import TestClient
from httpx2 import Response

from kedge.core.findings import Finding
from kedge.recipe.templates import templates
from kedge.web.studio.app import make_app
from kedge.web.studio.context import Studio
from kedge.web.studio.guard import LocalDoor
from kedge.web.studio.jobs import Jobs
from kedge.web.studio.project import Project
from kedge.web.studio.services import FileReport, PlanPart, Services, Verdict

HOST = "127.0.0.1:8123"
ORIGIN = f"http://{HOST}"
TOKEN = "s3cret-token-of-this-studio"
FIT: dict[str, Any] = {"is_fit": True, "models": [], "stages": {}, "findings": [], "checked": []}
FEW = Finding(level="warning", code="x", message="so few")
RECIPE = """\
kedge: 1
name: first  # the run
model: tiny
stages:
  sft: {kind: sft, data: data/demos.jsonl, batch: 4}
"""
DEMO = json.dumps({"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}) + "\n"
SLEEPER = "import time\nprint('begun', flush=True)\ntime.sleep(60)\n"


@dataclass
class StudioSite:
    project: Project
    studio: Studio
    client: TestClient
    reports: dict[str, Any]
    """What the check says; tests change it."""
    commands: list[Sequence[str]] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.project.folder

    def get(self, path: str, **values: Any) -> Response:
        return self.client.get(path, params={**values, "token": TOKEN}, headers={"host": HOST})

    def post(self, path: str, body: Any, **headers: str) -> Response:
        sent = {"host": HOST, "origin": ORIGIN, "x-kedge-token": TOKEN, "content-type": "application/json", **headers}
        return self.client.post(path, content=json.dumps(body), headers=sent)

    def upload(self, name: str, content: bytes) -> Response:
        sent = {"host": HOST, "origin": ORIGIN, "x-kedge-token": TOKEN, "content-type": "application/octet-stream"}
        return self.client.post("/upload", params={"name": name}, content=content, headers=sent)

    def recipe(self, text: str = RECIPE, name: str = "first.yaml") -> str:
        """A recipe in the project; gives its hash."""
        from kedge.web.studio.drafts import read_draft

        (self.folder / name).write_text(text, encoding="utf-8")
        return read_draft(self.project, name).hash

    def change(self, base: str, operation: str, path: Sequence[str], text: str = "") -> dict[str, Any]:
        body = {"file": "first.yaml", "base": base, "operation": operation, "path": list(path), "text": text}
        answer = self.post("/recipe/change", body)
        assert answer.status_code == 200, answer.text
        return answer.json()


def make_site(folder: Path, *, command: Sequence[str] | None = None, upload_limit: int = 1000) -> StudioSite:
    """`command` is what a run does; otherwise it sleeps until it is stopped."""
    (folder / "data").mkdir(parents=True)
    (folder / "data" / "demos.jsonl").write_text(DEMO)
    project = Project(folder.resolve())
    reports: dict[str, Any] = dict(FIT)
    commands: list[Sequence[str]] = []

    def run_command(recipe: str, is_resumed: bool) -> Sequence[str]:
        commands.append((recipe, str(is_resumed)))
        return command or (sys.executable, "-c", SLEEPER)

    services = Services(
        templates=templates,
        models=lambda: [("tiny", "a tiny one")],
        check=lambda file, asks: reports,
        plan=lambda recipe, report: [PlanPart(title="plan", lines=("one line",))],
        audit=lambda file: FileReport(
            file=file.name, kind="demonstrations", rows=1, findings=(FEW,)
        ),
        doctor=lambda run: [Verdict(stage="sft", is_healthy=True, verdict="Healthy.", diff=())],
        report=lambda run: "<h1>report</h1>",
        compare=lambda runs: f"<h1>{len(runs)} runs</h1>",
        run_command=run_command,
        serve_command=lambda model, token: (sys.executable, "-c", SLEEPER),
        add_badcase=lambda bad: "case-1",
        ask_people=lambda question: f"asked-{len(question.answers)}",
    )  # fmt: skip
    jobs = Jobs(project.state / "jobs", cwd=project.folder)
    studio = Studio(project=project, services=services, jobs=jobs, upload_limit=upload_limit)
    client = TestClient(make_app(studio, LocalDoor(token=TOKEN, origin=ORIGIN, hosts=(HOST,))))
    return StudioSite(project=project, studio=studio, client=client, reports=reports, commands=commands)
