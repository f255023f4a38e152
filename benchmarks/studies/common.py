"""What the studies share: options, the JSON of a seed, intervals, tables between markers of a page, figures, costs.

A study runs one seed and writes `docs/results/NAME/seed-N.json`; then it merges all seeds that are there into the page
`docs/results/NAME.md` and the figure `docs/results/NAME.svg`. Every number of a page comes out of these files.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, Literal

import numpy as np
import torch

from kedge.api.run import StageRun
from kedge.core.files import cache_root, write_json, write_text
from kedge.core.stats import bootstrap_mean, places_of, student_quantile
from kedge.report.charts.picture import picture
from kedge.report.charts.plot import Plot
from kedge.report.words import number
from kedge.runs.manifest import environment, read_manifest

RESULTS = Path(__file__).parents[2] / "docs" / "results"
PACKAGES = ("torch", "transformers", "numpy", "triton")
Record = dict[str, Any]
Size = Literal["small", "full"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the command line of a study says."""

    study: str
    seed: int
    data: Path
    work: Path
    to: Path
    """The folder of the page, the figure, and the folder with the seeds."""
    size: Size
    only: tuple[str, ...]
    """The parts to run; all of them unless given."""
    is_merge: bool
    sets: tuple[str, ...] = ()
    """Settings that differ from the study's, as KEY=VALUE; the study says of what."""

    @property
    def seeds(self) -> Path:
        return self.to / self.study

    @property
    def seed_file(self) -> Path:
        return self.seeds / f"seed-{self.seed}.json"


def parse(study: str, parts: Sequence[str], about: str, arguments: Sequence[str] | None = None) -> Options:
    """The options of a study. Results of the small size never go to docs/results: it needs --to."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--data", type=Path, default=Path("data"), help="the folder with eval/, pairs/, prompts/ …")
    parser.add_argument("--work", type=Path, help="where runs go (default: runs/studies/NAME-SEED); it may be resumed")
    parser.add_argument("--size", choices=["small", "full"], default="full", help="small: a tiny model, for tests")
    parser.add_argument("--to", type=Path, help="where page, figure and seeds go (default: docs/results)")
    parser.add_argument("--only", nargs="+", choices=parts, default=(), help="run these parts; others stay as they are")
    parser.add_argument(
        "--merge", action="store_true", help="run nothing: page and figure from the seeds that are there"
    )
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="another setting, for trials")
    given = parser.parse_args(arguments)
    if given.size == "small" and given.to is None:
        parser.error("--size small needs --to DIR: its numbers are no results")
    return Options(
        study=study,
        seed=given.seed,
        data=given.data,
        work=given.work or Path("runs") / "studies" / f"{study}-{given.seed}",
        to=given.to or RESULTS,
        size=given.size,
        only=tuple(given.only) or tuple(parts),
        is_merge=given.merge,
        sets=tuple(given.set),
    )


class SeedFile:
    """The JSON of one seed. It is written whole after every part, so a run that is killed keeps what it had.

    With `of_one_work` all parts are of the models in one work folder: those of another one are forgotten when the first
    part is put.
    """

    def __init__(self, options: Options, *, of_one_work: bool = False) -> None:
        self._file = options.seed_file
        self.values: Record = json.loads(self._file.read_text()) if self._file.is_file() else {}
        if of_one_work and self.values.get("work") != (work := name_of_work(options.work)):
            self.values = {"work": work}
        self.values |= {"study": options.study, "seed": options.seed, "size": options.size}
        self.values.setdefault("parts", {})
        self.values["made"] = made_by_part(self.values)

    def put(self, part: str, values: Mapping[str, Any]) -> None:
        """Write the numbers of a part, with the machine, the versions and the command that made them."""
        made = {"machine": machine(), "command": command(), "at": datetime.now().isoformat(timespec="seconds")}
        self.values["made"][part] = made
        self.values["parts"][part] = dict(values)
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_json(self._file, self.values)

    def has(self, part: str) -> bool:
        return part in self.values["parts"]

    def seconds(self, part: str, elapsed: float, costs: Iterable[Record] = (), *, key: str = "seconds") -> float:
        """What a part took: one that was found done, or gone on with, not less than before or than its stages."""
        stages = sum(cost["seconds"] or 0.0 for cost in costs)
        return max(elapsed, stages, self.values["parts"].get(part, {}).get(key, 0.0))


def name_of_work(folder: Path) -> str:
    """What tells a work folder from all others, wherever it lies."""
    file = folder / "name"
    if not file.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_text(file, token_hex(8))
    return file.read_text()


def made_by_part(record: Record) -> Record:
    """Machine, command and time of each part of a seed; files of before told them of all parts together."""
    whole = {key: record[key] for key in ("machine", "command", "at") if key in record}
    return {part: record.get("made", {}).get(part, whole) for part in record["parts"]}


class Clock:
    """Says lines with the seconds since the start."""

    def __init__(self, say: Callable[[str], None] = print) -> None:
        self._begin, self._say = time.perf_counter(), say

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._begin

    def __call__(self, text: str) -> None:
        self._say(f"[{self.seconds:6.1f} s] {text}")
        sys.stdout.flush()


def machine() -> Record:
    """Versions, and the device that a recipe without `device` takes."""
    has_gpu = torch.cuda.is_available()
    here = environment(device=torch.cuda.get_device_name() if has_gpu else "cpu")
    packages = {name: here.packages[name] for name in PACKAGES if name in here.packages}
    return {"device": here.device, "kedge": here.kedge, "python": here.python, **packages, "commit": here.git_commit}


def command(arguments: Sequence[str] | None = None) -> str:
    """The command line, with folders by what they are for: where they lie on one machine helps nobody.

    >>> command(["/home/me/benchmarks/studies/s.py", "--seed", "2", "--data", "/mnt/data"])
    'python benchmarks/studies/s.py --seed 2 --data DATA'
    """
    script, *rest = sys.argv if arguments is None else arguments
    words = [
        before[2:].upper() if before in ("--data", "--work", "--to") else word
        for before, word in zip(["", *rest], rest, strict=False)
    ]
    return " ".join(["python", f"benchmarks/studies/{Path(script).name}", *words])


def keep_report(options: Options, part: str, run: Path) -> None:
    """The page about a run beside the seeds, with paths from the work folder or the cache on."""
    page = (run / "report.html").read_text(encoding="utf-8")
    for place, name in ((options.work.resolve(), "work"), (options.work, "work"), (cache_root(), "cache")):
        page = page.replace(str(place), name)
    options.seeds.mkdir(parents=True, exist_ok=True)
    (options.seeds / f"{part}-seed-{options.seed}.html").write_text(page, encoding="utf-8")


def stage_cost(run: Path, stage: str) -> Record:
    """Seconds from the beginning to the end of a stage, without those in which it lay broken off, and its peak memory
    in GiB (None where it did not say)."""
    manifest, own = read_manifest(run / stage), StageRun(run / stage)
    events = list(own.events())
    seconds = None
    if manifest.finished:
        times = [_seconds(manifest.created), *(record["at"] for record in [*own.metrics(), *events])]
        resumed = [event["at"] for event in events if event["code"] == "run.resumed"]
        idle = sum(at - max(time for time in times if time < at) for at in resumed)
        seconds = _seconds(manifest.finished) - times[0] - idle
    peaks = [event["evidence"] for event in events if event["code"] == "run.memory"]
    return {"seconds": seconds, "peak_gib": peaks[-1]["memory/peak_gib"] if peaks else None}


def _seconds(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """A number with its 95 % interval."""

    value: float
    low: float
    high: float
    count: int
    """Of clusters where it was measured, of seeds where these were merged."""

    def json(self) -> Record:
        return asdict(self)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Estimate:
        return cls(value=values["value"], low=values["low"], high=values["high"], count=values["count"])

    def scaled(self, factor: float) -> Estimate:
        low, high = sorted((self.low * factor, self.high * factor))
        return Estimate(value=self.value * factor, low=low, high=high, count=self.count)


def by_cluster(values: Sequence[float], clusters: Sequence[Hashable], *, seed: int = 0) -> Estimate:
    """The mean of values, and its interval when whole clusters (the prompts) are drawn again.

    >>> by_cluster([1.0, 0.0, 1.0, 0.0], ["a", "a", "b", "b"])
    Estimate(value=0.5, low=0.5, high=0.5, count=2)
    """
    place_N = places_of(clusters)
    total_G = np.bincount(place_N, weights=np.array(values, dtype=np.float64)).astype(np.float64)
    size_G = np.bincount(place_N).astype(np.float64)
    low, high = bootstrap_mean(total_G, seed=seed, size_G=size_G)
    return Estimate(value=float(np.mean(values)), low=low, high=high, count=len(total_G))


def over_seeds(estimates: Sequence[Estimate]) -> Estimate:
    """The mean over seeds. Its interval holds both sources of chance: the seeds (Student's t) and, as all seeds answer
    the same prompts, the mean interval of one seed. One seed keeps its own interval.

    >>> over_seeds([Estimate(value=v, low=v - 3, high=v + 3, count=9) for v in (1.0, 1.0)])
    Estimate(value=1.0, low=-2.0, high=4.0, count=2)
    """
    values = np.array([estimate.value for estimate in estimates])
    mean = float(values.mean())
    if len(values) == 1:
        return Estimate(value=mean, low=estimates[0].low, high=estimates[0].high, count=1)
    by_seed = student_quantile(0.975, len(values) - 1) * float(values.std(ddof=1)) / math.sqrt(len(values))
    below = math.sqrt(float(np.mean([(e.value - e.low) ** 2 for e in estimates])))
    above = math.sqrt(float(np.mean([(e.high - e.value) ** 2 for e in estimates])))
    return Estimate(
        value=mean, low=mean - math.hypot(by_seed, below), high=mean + math.hypot(by_seed, above), count=len(values)
    )


def mean_over_seeds(values: Sequence[float]) -> Estimate:
    """The mean of plain numbers, one a seed, with Student's t-interval; a single seed has no interval but its value.

    >>> mean_over_seeds([1.0, 3.0]).value, round(mean_over_seeds([1.0, 3.0]).high, 3)
    (2.0, 14.706)
    """
    return over_seeds([Estimate(value=value, low=value, high=value, count=1) for value in values])


def read_seeds(folder: Path) -> list[Record]:
    """The JSONs of all seeds, in their order."""
    found = [json.loads(file.read_text()) for file in folder.glob("seed-*.json")]
    return sorted(found, key=lambda record: record["seed"])


def estimates(seeds: Sequence[Record], *path: str) -> list[Estimate]:
    """The estimate at a place below `parts` in each seed that has it."""
    values = (_at(record["parts"], path) for record in seeds)
    return [Estimate.of(value) for value in values if value is not None]


def numbers(seeds: Sequence[Record], *path: str) -> list[float]:
    """The number at a place below `parts` in each seed that has it."""
    values = (_at(record["parts"], path) for record in seeds)
    return [float(value) for value in values if value is not None]


def _at(values: Any, path: Iterable[str]) -> Any:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def cell(estimate: Estimate | None, digits: int = 3) -> str:
    """A number of a table with its interval.

    >>> cell(Estimate(value=0.5, low=0.25, high=0.75, count=9), 2)
    '0.50 [0.25, 0.75]'
    """
    if estimate is None:
        return number(None)
    ends = f" [{number(estimate.low, digits)}, {number(estimate.high, digits)}]" if estimate.low < estimate.high else ""
    return number(estimate.value, digits) + ends


def points(estimate: Estimate | None, *, is_signed: bool = False) -> str:
    """A share in per cent, or a difference of shares in points; no interval goes beyond what either can be, as that of
    two seeds would (Student's t with one degree of freedom).

    >>> points(Estimate(value=0.125, low=0.1, high=0.15, count=9), is_signed=True)
    '+12.5 [10.0, 15.0]'
    >>> points(Estimate(value=0.75, low=-2.0, high=4.0, count=2))
    '75.0 [0.0, 100.0]'
    """
    if estimate is None:
        return number(None)
    low, high = max(estimate.low, -1.0 if is_signed else 0.0), min(estimate.high, 1.0)
    within = Estimate(value=estimate.value, low=low, high=high, count=estimate.count)
    return ("+" if is_signed and estimate.value > 0 else "") + cell(within.scaled(100), 1)


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, of: Literal["numbers", "words"] = "numbers") -> str:
    """A Markdown table; the first column is of words, the others of numbers, unless they are of words too."""
    lines = [head, ["---", *["---:" if of == "numbers" else "---"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def provenance(seeds: Sequence[Record]) -> str:
    """A table of the seeds: device, versions, when, the command, and which parts it made; a line each where several
    commands or machines made the parts of a seed."""
    rows: dict[tuple[str, ...], tuple[str, list[str]]] = {}
    for record in seeds:
        for part, made in made_by_part(record).items():
            versions = (str(made["machine"].get(name, "–")) for name in ("device", "kedge", "torch", "transformers"))
            key = (str(record["seed"]), *versions, f"`{made['command']}`")
            at, parts = rows.get(key, ("", []))
            rows[key] = (max(at, made["at"]), [*parts, part])
    head = ["seed", "device", "kedge", "torch", "transformers", "command", "when", "parts"]
    return table(head, [(*key, at, ", ".join(parts)) for key, (at, parts) in rows.items()])


def fill(page: str, blocks: Mapping[str, str]) -> str:
    """A page with new text between the markers `<!-- NAME: made by the study -->` and `<!-- /NAME -->`.

    >>> fill("Words.\\n<!-- a: made by the study -->\\nold\\n<!-- /a -->\\nMore.", {"a": "new"})
    'Words.\\n<!-- a: made by the study -->\\n\\nnew\\n\\n<!-- /a -->\\nMore.'
    """
    for name, text in blocks.items():
        begin, end = f"<!-- {name}: made by the study -->", f"<!-- /{name} -->"
        if page.count(begin) != 1 or page.count(end) != 1:
            raise ValueError(f"the page needs {begin} and {end}, each once")
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}"
    return page


def write_page(options: Options, skeleton: str, blocks: Mapping[str, str], plots: Sequence[Plot]) -> None:
    """The page with its tables and the figure beside it; `skeleton` is the page where there is none yet."""
    options.to.mkdir(parents=True, exist_ok=True)
    page, drawing = options.to / f"{options.study}.md", options.to / f"{options.study}.svg"
    write_text(page, fill(page.read_text(encoding="utf-8") if page.is_file() else skeleton, blocks))
    write_text(drawing, picture(plots))
