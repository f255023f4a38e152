"""docs/gallery.md from what is kept: the figures and reports of runs in docs/gallery, and the seeds of the studies.

Every number of the page comes from there, and a test makes the page again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from platform import platform, system

import gallery_runs
import methods
from common import RESULTS, Record, fill, machine, table
from kedge.core.files import write_json, write_text
from kedge.recipe.templates import templates

DOCS = RESULTS.parent
KEPT = DOCS / "gallery"
RUNS = KEPT / "runs.json"
PAGES = {
    "cai": "constitution.md",
    "instructions": "results/verifiable.md",
    "real-demo": "quickstart.md",
    "reward-alpacaeval": "results.md",
    "reward-finegrained": "results.md",
    "reward-hh": "results.md",
    "reward-polite": "results.md",
    "rlaif": "feedback.md",
    "rounds": "rounds.md",
    "rounds-dpo": "rounds.md",
}
"""The page about a recipe, where it is not that of the last stage that trains."""
KINDS = {"best_of_n": "best-of-n.md", "group": "group.md", "ppo": "ppo.md", "preference": "preference.md"}
NEEDS = "wants real weights, a judge or your own data"


def keep(name: str, figures: Record, work: Path) -> None:
    """The figures of a run beside the others, and its reports where the page shows them."""
    KEPT.mkdir(parents=True, exist_ok=True)
    kept = read()
    kept["machine"] = {key: value for key, value in machine().items() if key != "commit"}
    kept["runs"] = {known: kept["runs"][known] for known in kept["runs"] if known != name} | {name: figures}
    write_json(RUNS, kept)
    for report in reports(name, gallery_runs.folder(work, name)):
        target = KEPT / name / report.relative_to(gallery_runs.folder(work, name))
        target.parent.mkdir(parents=True, exist_ok=True)
        write_text(target, anywhere(report.read_text(encoding="utf-8"), work))


def read() -> Record:
    return json.loads(RUNS.read_bytes()) if RUNS.is_file() else {"machine": {}, "runs": {}}


def reports(name: str, run: Path) -> Iterator[Path]:
    if name in ("demo", "rounds"):
        yield from sorted((*run.glob("report.html"), *run.glob("round-*/report.html")))


def anywhere(page: str, work: Path) -> str:
    """A report without what is true of one machine alone: where runs and cache lay, which build of its kernel."""
    here = str(work.resolve())
    cut = {f"{here}/": "", here: ".", str(Path.home()): "~", platform(): system()}
    for words, shorter in cut.items():
        page = page.replace(words, shorter)
    return page


def blocks() -> dict[str, str]:
    kept = read()
    return {
        **{name: story(name, kept["runs"][name]) for name in gallery_runs.FIRST},
        "studies": table(methods.HEAD, methods.rows(RESULTS)),
        "recipes": table(
            ("recipe", "what it is", "the last sentence of its report", "page"), rows(kept["runs"]), of="words"
        ),
        "machine": where(kept["machine"]),
    }


def story(name: str, figures: Record) -> str:
    """The commands, and what the report says."""
    commands = "\n".join(f"    {command}" for command in gallery_runs.typed(name))
    said = "\n".join(f"- {sentence}" for sentence in figures["outcomes"])
    return f"{commands}\n\n{said}\n- It took {figures['seconds']} seconds of one core."


def rows(runs: Record) -> Iterator[tuple[str, str, str, str]]:
    for name, summary in templates().items():
        came_out = runs[name]["outcomes"][-1] if name in runs else "–" if name in gallery_runs.names() else NEEDS
        yield f"`{name}`", summary, came_out, f"[{page_of(name)}]({page_of(name)})"


def page_of(recipe: str) -> str:
    text = (gallery_runs.RECIPES / f"{recipe}.yaml").read_text(encoding="utf-8")
    trained = [KINDS[kind] for kind in re.findall(r"^ +kind: (\w+)", text, re.MULTILINE) if kind in KINDS]
    return PAGES.get(recipe) or (trained[-1] if trained else "reward.md")


def where(about: Record) -> str:
    return "Runs of this page: " + ", ".join(f"{name} {value}" for name, value in about.items()) + "."


def write() -> None:
    page = DOCS / "gallery.md"
    write_text(page, fill(page.read_text(encoding="utf-8"), blocks()))
