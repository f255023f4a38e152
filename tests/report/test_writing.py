"""Reports and watching as commands use them: folders found or refused, files written whole."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from kedge.cli.pages.watch import watch
from kedge.cli.report import report
from kedge.commands import watch as watching
from kedge.core.errors import ConfigError, PluginError
from kedge.report.writing import run_folder, write_report
from kedge.runs.folder import Run
from kedge.runs.manifest import new_manifest
from kedge.testing.streams import PPO_SETTINGS, fill


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished PPO run below runs/."""
    folder = tmp_path / "runs" / "small"
    with Run.create(folder, manifest=new_manifest(name="small", kind="ppo", seed=1, settings=PPO_SETTINGS)) as made:
        fill(made, 12)
        made.finish("done")
    return folder


def invoke(command: object, *arguments: str) -> str:
    app = typer.Typer()
    app.command()(command)  # type: ignore[type-var]
    done = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_report_is_written_beside_the_run_or_where_it_is_asked_for(run: Path, tmp_path: Path) -> None:
    assert write_report(run, None) == run / "report.html"
    page = (run / "report.html").read_text(encoding="utf-8")
    assert page.rstrip().endswith("</html>")
    assert "<title>small · Kedge</title>" in page
    target = tmp_path / "new" / "page.html"
    assert f"wrote {target}" in invoke(report, str(run), "--out", str(target)).replace("\n", "")
    assert target.read_text(encoding="utf-8") == page


def test_open_shows_the_file(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()
    monkeypatch.setattr("webbrowser.open", opened.append)
    invoke(report, str(run), "--open")
    assert opened == [(run / "report.html").resolve().as_uri()]


def test_folders_that_are_no_run_are_refused_with_a_way_out(run: Path) -> None:
    with pytest.raises(ConfigError, match=r"runs is not a run but holds 1: name one of small"):
        run_folder(run.parent)
    with pytest.raises(ConfigError, match=r"there is no such folder \(did you mean 'small'\?\)"):
        run_folder(run.with_name("smal"))
    (run.parent / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"it has no run\.json"):
        run_folder(run.parent / "empty")


def test_watch_without_a_terminal_writes_lines_and_ends_with_the_run(run: Path) -> None:
    lines = invoke(watch, str(run)).splitlines()
    assert len(lines) == 13
    assert lines[0].startswith(f"{run} step 1: reward ")
    assert lines[-1].startswith(f"{run} done: step 12 of 100")


def test_following_goes_on_until_nothing_runs(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Run.open(run, for_writing=True)
    writer.reopen()
    shown, slept = list[object](), list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        if len(slept) == 1:
            writer.log({"reward/mean": 5.0}, 13)
        if len(slept) == 3:
            writer.finish("done")
            writer.close()

    monkeypatch.setattr("time.sleep", sleep)
    watching.follow(watching.open_feeds([run]), shown.append)
    assert len(slept) == 3
    assert len(shown) == 3  # at the start, after step 13 and at the end; nothing was new in between


def test_a_run_that_wrote_nothing_is_shown_all_the_same(tmp_path: Path) -> None:
    manifest = new_manifest(name="x", kind="ppo", seed=1, settings=PPO_SETTINGS)
    with Run.create(tmp_path / "x", manifest=manifest) as made:
        made.finish("failed")
    shown = list[object]()
    watching.follow(watching.open_feeds([tmp_path / "x"]), shown.append)
    assert len(shown) == 1


def test_a_port_that_is_taken_is_named(run: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=f"--port {port}: "):
            watching.serve(watching.open_feeds([run]), port=port, say=print)


def test_a_missing_web_package_names_the_command(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    with pytest.raises(PluginError, match=r"pip install 'kedge\[web\]'"):
        watching.serve(watching.open_feeds([run]), port=0, say=print)


def test_a_damaged_run_beside_is_no_reason_to_say_nothing(run: Path) -> None:
    (run.parent / "broken").mkdir()
    (run.parent / "broken" / "run.json").write_text("{]")
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        run_folder(run.parent / "smal")
    with pytest.raises(ConfigError, match="holds 2: name one of broken, small"):
        run_folder(run.parent)
