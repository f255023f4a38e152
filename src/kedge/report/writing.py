"""`kedge report`: the folder of a run in, one page out, for running, interrupted and finished runs alike."""

from __future__ import annotations

from pathlib import Path

from kedge.core.errors import ConfigError
from kedge.core.files import write_text
from kedge.core.suggest import did_you_mean
from kedge.report.card import ExportFacts, last_values, model_card
from kedge.report.rounds.page import render_rounds
from kedge.report.rounds.records import read_rounds
from kedge.report.run.page import render_run
from kedge.report.run.run_records import read_run
from kedge.runs.folder import Run
from kedge.runs.manifest import MANIFEST_NAME, ROUNDS, read_manifest

REPORT_NAME = "report.html"


def write_report(run: Path, to: Path | None) -> Path:
    """Write the page, as a whole or not at all; returns its path."""
    page = report_page(run)
    target = to or run / REPORT_NAME
    target.parent.mkdir(parents=True, exist_ok=True)
    write_text(target, page)
    return target


def report_page(run: Path) -> str:
    """The page of a run as it is now."""
    folder = run_folder(run)
    has_rounds = read_manifest(folder).kind == ROUNDS
    return render_rounds(read_rounds(folder)) if has_rounds else render_run(read_run(folder))


def write_card(run: Run, model: Path) -> None:
    """`README.md` of a model that the run has made."""
    write_text(model / "README.md", model_card(run.manifest, last_values(run.read_metrics())))


def export_card(stage: Path, export: ExportFacts) -> str:
    """The card of a model that a stage has made and that was exported."""
    run = Run.open(stage, for_writing=False)
    return model_card(run.manifest, last_values(run.read_metrics()), export=export)


def run_folder(path: Path) -> Path:
    """The path itself where it is a run's folder; else an error that names the runs that were probably meant."""
    if (path / MANIFEST_NAME).is_file():
        return path
    if inside := _runs_below(path):
        raise ConfigError(f"{path} is not a run but holds {len(inside)}: name one of {', '.join(inside[:8])}")
    if path.exists():
        raise ConfigError(f"{path} is not a run: it has no {MANIFEST_NAME}. Name a folder below runs/.")
    nearest = did_you_mean(path.name, _runs_below(path.parent))
    raise ConfigError(f"{path}: there is no such folder{nearest}. Name a folder below runs/.")


def _runs_below(folder: Path) -> list[str]:
    """Names alone: a run whose manifest is damaged is no reason to say nothing of the others."""
    children = sorted(folder.iterdir()) if folder.is_dir() else []
    return [child.name for child in children if (child / MANIFEST_NAME).is_file()]
