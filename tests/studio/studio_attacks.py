"""Requests and recipes that lead out of the project folder, or come from elsewhere: each must be refused.

The project has links that lead out. `attempt` sends one case to a new studio, and says what went wrong: an answer that
is not a refusal, a word of the files outside in it, a file outside that is changed, or a process that was started.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from studio_site import DEMO, HOST, ORIGIN, RECIPE, TOKEN, StudioSite, make_site

SECRET = "the word outside of the project"
Where = Literal["request", "upload", "setting", "new", "name"]


@dataclass(frozen=True)
class Case:
    """`text` is what is tried at `where`: a setting `a.b: value` of a recipe, a file's name, a name in an address."""

    name: str
    where: Where
    text: str = ""
    at: str = ""
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
    method: str = "POST"
    size: int = 10


_PATHS = (
    "../outside/secret.jsonl",
    "data/../../outside/secret.jsonl",
    "data\\..\\..\\outside\\secret.jsonl",
    "OUTSIDE/secret.jsonl",
    "~/secret.jsonl",
    "~root/secret.jsonl",
    "//host/share",
    "\\\\host\\share",
    "C:\\secret.jsonl",
    "C:/secret.jsonl",
    "file:///etc/passwd",
    "link.jsonl",
    "linked/secret.jsonl",
    "loop.jsonl",
    "data/\0x",
    "data/x\ny",
    "a" * 5000,
    "\ud800.jsonl",
)
_SETTINGS = (
    ("data of a stage", "stages.sft.data"),
    ("the model", "model"),
    ("the model of a stage", "stages.sft.from"),
    ("the chat template", "chat_template"),
    ("what it extends", "extends"),
)
_NAMES = (
    "../x.jsonl", "a/b.jsonl", "a\\b.jsonl", "/etc/x.jsonl", "..", ".", "", " ", ".hidden.jsonl", "~x.jsonl",
    "-r.jsonl",
    "CON.jsonl", "nul.jsonl", "com1.csv", "LPT9.json", "aux.jsonl.gz", "x.jsonl.", "x.jsonl ", " x.jsonl", "x:y.jsonl",
    "a*.jsonl", "a?.jsonl", 'a".jsonl', "a<b>.jsonl", "a|b.jsonl", "a\0.jsonl", "a\n.jsonl", "a\x7f.jsonl",
    "\u202egnp.jsonl", "x.py", "x.yaml", "x.sh", "x.html", "x", "x.jsonl.exe", "a" * 300 + ".jsonl", "\ud800.jsonl",
    "demos.jsonl",
)  # fmt: skip

_ADDRESSES = (
    "/run?name=", "/report?name=", "/run/doctor?name=", "/recipe?file=", "/curves/chart?run=", "/compare?run="
)  # fmt: skip

CASES = (
    *(Case(f"{what}: {path[:40]!r}", "setting", path, at=at) for what, at in _SETTINGS for path in _PATHS),
    Case("a reward function outside", "setting", "../outside/evil.py:score", at="stages.ppo.reward.path"),
    Case("a reward function by a link", "setting", "linked/evil.py:score", at="stages.ppo.reward.path"),
    Case("a reward function by its full path", "setting", "OUTSIDE/evil.py:score", at="stages.ppo.reward.path"),
    Case("a program for alerts", "setting", "touch x", at="alerts.commands.command"),
    Case("a recipe that extends one that leads out", "setting", "bad-base.yaml", at="extends"),
    Case("a tracker that writes elsewhere", "setting", "../outside", at="trackers.tensorboard.folder"),
    Case("a stage that is called like a text", "setting", "../outside/secret.jsonl", at="stages.stop.data"),
    Case("an address that leads up", "setting", "http://x/../../outside/secret.jsonl", at="stages.sft.data"),
    Case("data in a list", "setting", "../outside/secret.jsonl", at="stages.sft.data.list"),
    *(Case(f"upload {name[:30]!r}", "upload", name) for name in _NAMES),
    Case("an upload beyond the limit", "upload", "large.jsonl", size=5000),
    Case("an upload of nothing", "upload", "none.jsonl", size=0),
    *(Case(f"a new run called {name!r}", "new", name, at="name") for name in ("../x", "a/b", "", ".x", "a.b", "x\0")),
    *(Case(f"a new run of the model {path[:40]!r}", "new", path, at="model") for path in _PATHS[:13]),
    Case("a new run of no template", "new", "../../x", at="template"),
    *(
        Case(f"{path} of {name[:40]!r}", "name", name, at=path)
        for path in _ADDRESSES
        for name in ("../outside", "evil", "OUTSIDE", "..", "linked.yaml", "../outside/secret.jsonl", "x\0", "%2e%2e/x")
    ),
    *(Case(f"audit of {path[:40]!r}", "name", path, at="/data/audit") for path in _PATHS),
    *(Case(f"chat with {path[:40]!r}", "name", path, at="/chat/open") for path in (*_PATHS[:13], "--help", "linked")),
    Case("no token", "request", headers={"x-kedge-token": ""}),
    Case("a wrong token", "request", headers={"x-kedge-token": "x" * 32}),
    Case("another origin", "request", headers={"origin": "https://evil.example"}),
    Case("null as origin", "request", headers={"origin": "null"}),
    Case("our origin on another port", "request", headers={"origin": "http://127.0.0.1:80"}),
    Case("localhost as origin", "request", headers={"origin": "http://localhost:8123"}),
    Case("another site as the browser says", "request", headers={"sec-fetch-site": "cross-site"}),
    Case("another host", "request", headers={"host": "evil.example"}),
    Case("our host on another port", "request", headers={"host": "127.0.0.1:80"}),
    Case("a form", "request", headers={"content-type": "application/x-www-form-urlencoded"}),
    Case("text that is JSON", "request", headers={"content-type": "text/plain"}),
    Case("a form of parts", "request", headers={"content-type": "multipart/form-data; boundary=x"}),
    Case("a start by GET", "request", method="GET"),
    Case("a start by PUT", "request", method="PUT"),
    Case("a start by DELETE", "request", method="DELETE"),
)  # fmt: skip


@cache
def _world() -> tuple[Path, StudioSite]:
    """What is outside, and one studio for all cases: making one takes longer than a request."""
    home = TemporaryDirectory()
    atexit.register(home.cleanup)
    outside = _outside(Path(home.name) / "outside")
    site = make_site(Path(home.name) / "project")
    _links(site.folder, outside)
    return outside, site


def attempt(case: Case) -> str | None:
    """None where it is refused, and nothing outside was read, written or run."""
    outside, site = _world()
    before = _listing(outside), _listing(site.folder / "data")
    answer = _SENT[case.where](site, case, case.text.replace("OUTSIDE", str(outside)))
    if site.commands or site.studio.jobs.all():
        return f"{case.name}: something was started"
    if SECRET in answer:
        return f"{case.name}: the answer quotes a file outside"
    if (_listing(outside), _listing(site.folder / "data")) != before:
        return f"{case.name}: files were changed"
    return answer if answer.startswith(case.name) else None


def _outside(folder: Path) -> Path:
    folder.mkdir()
    (folder / "secret.jsonl").write_text(DEMO.replace("b", SECRET))
    (folder / "evil.py").write_text("def score(answer):\n    return 1.0\n")
    (folder / "recipe.yaml").write_text(f"# {SECRET}\n{RECIPE}")
    (folder / "run").mkdir()
    (folder / "run" / "run.json").write_text(json.dumps({"name": SECRET}))
    return folder


def _links(project: Path, outside: Path) -> None:
    (project / "runs").mkdir()
    (project / "link.jsonl").symlink_to(outside / "secret.jsonl")
    (project / "linked").symlink_to(outside)
    (project / "linked.yaml").symlink_to(outside / "recipe.yaml")
    (project / "loop.jsonl").symlink_to(project / "loop.jsonl")
    (project / "runs" / "evil").symlink_to(outside / "run")
    (project / "bad-base.yaml").write_text("model: ../outside\n")


def _listing(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def _refusal(case: Case, status: int, text: str) -> str:
    return text if status >= 400 else f"{case.name}: answered {status}: {text[:200]}"


def _send_request(site: StudioSite, case: Case, text: str) -> str:
    """A start of a good recipe, changed as the case says."""
    base = site.recipe()
    sent = {"host": HOST, "origin": ORIGIN, "x-kedge-token": TOKEN, "content-type": "application/json", **case.headers}
    body = json.dumps({"file": "first.yaml", "base": base})
    answer = site.client.request(case.method, "/run/start", content=body, headers=sent)
    return _refusal(case, answer.status_code, answer.text)


def _send_upload(site: StudioSite, case: Case, text: str) -> str:
    try:
        answer = site.upload(text, b"x" * case.size)
    except UnicodeEncodeError:
        return ""  # no address can hold it
    return _refusal(case, answer.status_code, answer.text)


def _send_setting(site: StudioSite, case: Case, text: str) -> str:
    """A recipe with the text at a setting: neither checked nor started, with a reason at a field or at the top."""
    values: dict[str, Any] = {"kedge": 1, "name": "first", "model": "tiny"}
    values["stages"] = {"sft": {"kind": "sft", "data": "data/demos.jsonl"}}
    if "ppo" in case.at:
        ppo = {"kind": "ppo", "prompts": "data/demos.jsonl", "reward": {"kind": "function", "path": text}}
        values["stages"]["ppo"] = ppo
    elif case.at == "alerts.commands.command":
        values["alerts"] = {"commands": [{"command": ["touch", "x"]}]}
    elif case.at == "stages.sft.data.list":
        values["stages"]["sft"]["data"] = ["data/demos.jsonl", text]
    else:
        here = values
        if case.at.startswith("stages.stop"):
            values["stages"]["stop"] = {"kind": "sft"}
        *path, last = case.at.split(".")
        for key in path:
            here = here.setdefault(key, {})
        here[last] = text
    try:
        base = site.recipe(json.dumps(values))
    except UnicodeEncodeError:
        return ""
    for path in ("/recipe/check", "/run/start"):
        answer = site.post(path, {"file": "first.yaml", "base": base})
        told = answer.json()
        if answer.status_code == 200 and not told.get("problems") and not told.get("top"):
            return f"{case.name}: {path} answered {answer.text[:200]}"
    return answer.text


def _send_new(site: StudioSite, case: Case, text: str) -> str:
    body = {"template": "tiny", "name": "second", "model": "", case.at: text}
    answer = site.post("/new", body)
    if answer.status_code == 200 and case.at not in answer.json().get("problems", {}):
        return f"{case.name}: answered {answer.text[:200]}"
    return answer.text


def _send_name(site: StudioSite, case: Case, text: str) -> str:
    if case.at == "/data/audit":
        answer = site.post("/data/audit", {"file": text})
    elif case.at == "/chat/open":
        answer = site.post("/chat/open", {"first": text})
    else:
        path, _, name = case.at.partition("?")
        answer = site.get(path, **{name.rstrip("="): text})
    return _refusal(case, answer.status_code, answer.text)


_SENT = {
    "request": _send_request,
    "upload": _send_upload,
    "setting": _send_setting,
    "new": _send_new,
    "name": _send_name,
}
