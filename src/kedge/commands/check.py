"""`kedge check`: everything that can be known of a recipe before training, in one report.

The recipe and its wiring are checked by loading it. Here the models, the data and how the two fit are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedge.commands.audit import audit_all, max_broken_of
from kedge.commands.check_machine import device_findings, disk_bytes, disk_findings
from kedge.commands.check_rewards import Asked, Checked, RewardChecks, merged
from kedge.core.errors import ConfigError, KedgeError
from kedge.core.files import free_bytes, readable_bytes
from kedge.core.findings import Finding, has_fatal
from kedge.core.stage import DATA_KINDS, PromptUse
from kedge.data.examples import Prompt
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Link, connect
from kedge.stages.shared import batch_arithmetic as words
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from kedge.data.examples import Example, Kind
    from kedge.data.long_prompts import LongPrompts
    from kedge.models.loading.describe import ModelFacts

SAMPLE = 4096
"""Examples of a file that are kept for trying them on the tokenizer: enough for shares, and quick."""
RUNS = Path("runs")
MEASURED_PROMPTS = 20_000
"""Prompts of a file that are tokenised and looked at one by one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReport:
    """`facts` are absent when the model could not be looked at; the findings say why."""

    name: str
    facts: ModelFacts | None
    tokenizer: PreTrainedTokenizerBase | None
    findings: tuple[Finding, ...]

    def in_words(self) -> str:
        """Size, window and type in one line."""
        if self.facts is None:
            return "cannot be used"
        facts = self.facts
        window = f"window {facts.window:,}" if facts.window else "no stated window"
        parameters = f"{facts.parameters / 1e6:,.1f} M" if facts.parameters >= 1e6 else f"{facts.parameters:,}"
        size = f"{parameters} parameters, {facts.weights_bytes / 2**20:,.1f} MiB in {facts.dtype}"
        return f"{facts.architecture}, {size}, {window}, vocabulary {facts.vocab_size:,}"


@dataclass(frozen=True, slots=True, kw_only=True)
class StageReport:
    name: str
    kind: str
    can_run: bool
    lines: tuple[str, ...]
    findings: tuple[Finding, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecipeReport:
    file: Path
    name: str
    models: tuple[ModelReport, ...]
    stages: tuple[StageReport, ...]
    data: tuple[Finding, ...]
    """What the audit of all files together found: duplicates, contradictions, leakage."""
    machine: tuple[Finding, ...] = ()
    """What this machine lacks: a device, room on the disk."""
    checked: tuple[Checked, ...] = ()
    """What was looked at besides, a line each: prompts, rewards, disk."""

    @property
    def findings(self) -> list[Finding]:
        of_models = (model.findings for model in self.models)
        parts = (*of_models, *(stage.findings for stage in self.stages), self.data, self.machine)
        return [finding for part in parts for finding in part]

    @property
    def is_fit(self) -> bool:
        return not has_fatal(self.findings)

    def as_dict(self) -> dict[str, Any]:
        return {
            "file": str(self.file),
            "name": self.name,
            "is_fit": self.is_fit,
            "stages": {stage.name: {"kind": stage.kind, "lines": list(stage.lines)} for stage in self.stages},
            "checked": [asdict(row) for row in self.checked],
            "findings": [finding.as_dict() for finding in self.findings],
        }


def check_recipe(
    recipe: Recipe,
    *,
    progress: Callable[[int], None] | None = None,
    offline: bool = False,
    runs: Path = RUNS,
) -> RecipeReport:
    """Look at the models, the data and the rewards of every stage, all files together, and the machine.

    `offline` asks no reward server; `runs` is the folder whose disk the checkpoints will be on.
    """
    plan = connect(recipe)
    template = recipe.chat_template
    models = {name: check_model(name, template) for name in _outside_models(plan.links.values())}
    default = models.get(recipe.settings.model) or check_model(recipe.settings.model, template)
    files, rewards = _Files(), RewardChecks(recipe=recipe, offline=offline)
    stages: list[StageReport] = []
    checked: list[Checked] = []
    bases: dict[str, ModelFacts] = {}
    for name in plan.order:
        links = plan.links[name]
        base = next((models[link.source()] for link in links if link.source() in models), default)
        if base.facts:
            bases[name] = base.facts
        report, rows = _check_stage(name, recipe, links, base, files, rewards)
        stages.append(report)
        checked.extend(rows)
    needed = disk_bytes(recipe, bases)
    disk = Checked(
        what="disk",
        subject=str(runs),
        result=f"about {readable_bytes(needed)} of {readable_bytes(free_bytes(runs))} free",
        used_by=(),
    )
    return RecipeReport(
        file=recipe.file,
        name=recipe.settings.name,
        models=tuple({**models, recipe.settings.model: default}.values()),
        stages=tuple(stages),
        data=tuple(audit_all(recipe, plan, files.readable, progress)),
        machine=(*device_findings(recipe.settings.device), *disk_findings(needed, runs)),
        checked=(*merged(checked), *((disk,) if needed else ())),
    )


def refuse_unfit(
    recipe: Recipe, *, progress: Callable[[int], None] | None = None, offline: bool = False, runs: Path = RUNS
) -> None:
    """Raise with every fatal finding of `kedge check`, before a run makes a folder."""
    report = check_recipe(recipe, progress=progress, offline=offline, runs=runs)
    of_models = [(f"model {model.name}", finding) for model in report.models for finding in model.findings]
    of_stages = [(finding.where, finding) for stage in report.stages for finding in stage.findings]
    of_machine = [(finding.where, finding) for finding in report.machine]
    fatal = [
        *(f"{place}: {finding.message}" for place, finding in (*of_models, *of_stages) if _is_fatal(finding)),
        *(finding.message for finding in report.data if _is_fatal(finding)),
        *(f"{place}: {finding.message}" for place, finding in of_machine if _is_fatal(finding)),
    ]
    if fatal:
        listed = "\n".join(f"  {line}" for line in dict.fromkeys(fatal))
        raise ConfigError(f"{recipe.file}: not fit to run, and nothing was started (kedge check tells more):\n{listed}")


def _is_fatal(finding: Finding) -> bool:
    return finding.level == "fatal"


def masked_examples(recipe: Recipe, count: int) -> Iterator[tuple[str, Text]]:
    """The first conversations of every `sft` stage, with the tokens that are trained highlighted."""
    from kedge.data.reading import read
    from kedge.data.template import encode_conversation, show_masks

    tokenizer = tokenizer_for(recipe.settings.model, recipe.chat_template)
    for name, links in connect(recipe).links.items():
        for link in links:
            if link.kinds != ("demonstrations",) or link.stage or link.field != "data":
                continue
            for example in islice(read(link.source(), kind="demonstrations"), count):
                messages = cast(Any, example).messages
                yield f"{name}: {example.origin}", show_masks(tokenizer, encode_conversation(tokenizer, messages))


def _outside_models(all_links: Iterable[Sequence[Link]]) -> list[str]:
    """Models of files and hubs that generate; reward models are looked at where they score."""
    sources = [
        link.source() for links in all_links for link in links if not link.stage and link.kinds == ("model",)
    ]
    return list(dict.fromkeys(sources))


def check_model(name: str, chat_template: str | None = None) -> ModelReport:
    from kedge.data.preflight import preflight
    from kedge.models.loading.describe import describe

    try:
        facts = describe(name, dtype="float32")  # what learns is float32
        tokenizer = tokenizer_for(name, chat_template)
        findings = preflight(tokenizer, config_vocab_size=facts.vocab_size, window=facts.window)
    except KedgeError as error:
        finding = Finding(level="fatal", code="model.unusable", message=str(error))
        return ModelReport(name=name, facts=None, tokenizer=None, findings=(finding,))
    return ModelReport(name=name, facts=facts, tokenizer=tokenizer, findings=tuple(findings))


def _check_stage(
    name: str, recipe: Recipe, links: Sequence[Link], model: ModelReport, files: _Files, rewards: RewardChecks
) -> tuple[StageReport, list[Checked]]:
    stage, settings = recipe.kinds[name], recipe.stages[name]
    lines = list(stage.explain(settings))
    findings = list(stage.check(settings))
    use = stage.prompts(settings)
    window = stage.window(settings)
    limit = model.facts.window if model.facts else None
    findings.extend(_window_findings(name, window, model, use))
    for link in links:
        if link.stage:
            lines.append(f"{link.field}: what {link.stage} makes ({link.output})")
        elif link.is_data:
            is_asked = use is not None and link.field == use.field
            line, found = _check_data(
                name, link, model, None if is_asked else window or limit, max_broken_of(settings), files
            )
            lines.append(line)
            findings.extend(found)
    rows: list[Checked] = []
    if use is not None:
        asked, row, found = _check_prompts(name, use, links, model, files)
        rows.extend(row)
        findings.extend(found)
        for checked, found in rewards.check(name, use, links, asked, model.tokenizer):
            rows.append(checked)
            findings.extend(found)
    kind = str(settings.model_dump()["kind"])
    report = StageReport(
        name=name, kind=kind, can_run=stage.run is not None, lines=tuple(lines), findings=tuple(findings)
    )
    return report, rows


def _window_findings(
    name: str, window: int | None, model: ModelReport, use: PromptUse | None
) -> Iterator[Finding]:
    limit = model.facts.window if model.facts else None
    if use is not None and limit and use.max_new_tokens >= limit:
        yield Finding(
            level="fatal",
            code="stage.window",
            message=f"answers of {use.max_new_tokens:,} tokens leave no room for a prompt: {model.name} has a window "
            f"of {limit:,}",
            where=name,
            fix="allow shorter answers (max_new_tokens)",
        )
    elif window and limit and window > limit:
        yield Finding(
            level="fatal",
            code="stage.window",
            message=f"{window} tokens are asked for, but {model.name} has a window of {limit}",
            where=name,
            fix=f"ask for at most {limit}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    """One data file, read to its end; the first examples of it are kept."""

    count: int
    kind: Kind
    num_broken: int
    examples: list[Example]


@dataclass(slots=True)
class _Files:
    """The data files of a recipe; each is read once as each kind that is wanted of it."""

    readable: set[str] = field(default_factory=set[str])
    _read: dict[tuple[str, Kind | None, float], _File] = field(default_factory=dict[Any, _File])
    _lengths: dict[tuple[int, int, int, str], tuple[list[int], LongPrompts]] = field(
        default_factory=dict[Any, "tuple[list[int], LongPrompts]"]
    )

    def read(self, link: Link, max_broken: float) -> _File:
        from kedge.data.reading import read

        source = link.source()
        key = (source, _wanted_kind(link), max_broken)
        if key not in self._read:
            reading = read(source, kind=key[1], max_broken=max_broken)
            kept: list[Example] = []
            for example in reading:
                if len(kept) < (MEASURED_PROMPTS if isinstance(example, Prompt) else SAMPLE):
                    kept.append(example)
            self._read[key] = _File(
                count=reading.count, kind=reading.kind, num_broken=reading.num_broken, examples=kept
            )
        self.readable.add(source)
        return self._read[key]

    def lengths(
        self, file: _File, tokenizer: PreTrainedTokenizerBase, limit: int, limit_name: str
    ) -> tuple[list[int], LongPrompts]:
        """The tokens of each prompt of a file, and those over the limit."""
        from kedge.data.long_prompts import measure_prompts

        key = (id(file), id(tokenizer), limit, limit_name)
        if key not in self._lengths:
            prompts = cast("list[Prompt]", file.examples)
            tokens, long = measure_prompts(tokenizer, prompts, max_tokens=limit, limit_name=limit_name)
            self._lengths[key] = ([len(row) for row in tokens], long)
        return self._lengths[key]


def _check_data(
    stage: str, link: Link, model: ModelReport, window: int | None, max_broken: float, files: _Files
) -> tuple[str, list[Finding]]:
    """Read one file to its end as what the stage wants it for, and try a part of it on the tokenizer."""
    from kedge.data.preflight_examples import preflight_examples

    try:
        file = files.read(link, max_broken)
    except KedgeError as error:
        where = f"{stage}.{link.field}"
        return f"{link.field}: unreadable", [
            Finding(level="fatal", code="data.unusable", message=str(error), where=where)
        ]
    line = f"{link.field}: {file.count:,} {file.kind} in {Path(link.source()).name}"
    if file.num_broken:
        line += f", {words.count(file.num_broken, 'broken line')} left out (kedge data check lists them)"
    limit = window or (model.facts.window if model.facts else None)
    if model.tokenizer is None or limit is None:
        return line, []
    found = preflight_examples(model.tokenizer, file.examples[:SAMPLE], window=limit)
    return line, [finding for finding in found if window or finding.code != "examples.prompt_too_long"]


def _check_prompts(
    stage: str, use: PromptUse, links: Sequence[Link], model: ModelReport, files: _Files
) -> tuple[Asked, list[Checked], list[Finding]]:
    """The prompts of a stage in tokens: how long the longest is, and how many are too long."""
    from kedge.data.long_prompts import tighter_limit

    link = next((link for link in links if link.field == use.field), None)
    unknown = Asked(prompts=None, total=0, longest=None)
    if link is None or link.stage or link.source() not in files.readable:
        return unknown, [], []
    file = files.read(link, max_broken_of())
    prompts = cast("list[Prompt]", file.examples)
    asked = Asked(prompts=prompts, total=file.count, longest=None)
    if not prompts:
        message = f"{link.source()}: no prompts in it; look at it with kedge data check"
        return asked, [], [Finding(level="fatal", code="data.unusable", message=message, where=f"{stage}.{use.field}")]
    if model.tokenizer is None or model.facts is None:
        return asked, [], []
    limit, limit_name = tighter_limit(model.facts.window, use.max_tokens, use.max_new_tokens)
    try:
        lengths, long = files.lengths(file, model.tokenizer, limit, limit_name)
    except KedgeError as error:
        finding = Finding(level="fatal", code="prompts.unusable", message=str(error), where=f"{stage}.{use.field}")
        return asked, [], [finding]
    looked_at = f"{file.count:,}" if len(prompts) == file.count else f"first {len(prompts):,} of {file.count:,}"
    row = Checked(
        what="prompts",
        subject=Path(link.source()).name,
        result=f"{looked_at}; longest {max(lengths):,} of {limit:,} tokens",
        used_by=(f"{stage}.{use.field}",),
    )
    longest = min(max(lengths), limit)
    return replace(asked, longest=longest), [row], list(_long_findings(stage, use, long, len(prompts)))


def _long_findings(stage: str, use: PromptUse, long: LongPrompts, looked_at: int) -> Iterator[Finding]:
    if not long:
        return
    none_is_left = use.too_long == "drop" and len(long.places) == looked_at
    ending = {"refuse": "", "drop": ": left out (too_long: drop)", "cut": ": they lose their beginning (too_long: cut)"}
    yield Finding(
        level="fatal" if use.too_long == "refuse" or none_is_left else "warning",
        code="prompts.too_long",
        message=f"{long.in_words()}{ending[use.too_long]}{', and none is left' if none_is_left else ''}",
        where=f"{stage}.{use.field}",
        fix=long.fix if use.too_long == "refuse" or none_is_left else "",
    )


def _wanted_kind(link: Link) -> Kind | None:
    """The one kind that is wanted; the file's own, when several or any will do."""
    wanted = [kind for kind in link.kinds if kind in DATA_KINDS and kind != "records"]
    if len(wanted) == 1:
        return cast("Kind", wanted[0])
    from kedge.data.reading import recognised

    found = recognised(link.source(), None).kind
    return found if not wanted or found in wanted else cast("Kind", wanted[0])
