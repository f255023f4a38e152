"""`kedge check`: everything that can be known of a recipe before training, in one report.

The recipe and its wiring are checked by loading it. Here the models, the data and how the two fit are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from kedge.commands.audit import audit_all, max_broken_of
from kedge.commands.checks.data import DataFiles, check_data, check_prompts
from kedge.commands.checks.groups import group_findings, group_lines
from kedge.commands.checks.labels import label_judges, label_lines
from kedge.commands.checks.machine import (
    device_findings,
    disk_bytes,
    disk_findings,
    generator_findings,
    gpus_of,
    placement_findings,
    placement_lines,
    role_lines,
)
from kedge.commands.checks.offload import bits_findings, offload_lines
from kedge.commands.checks.records import Checked, merged
from kedge.commands.checks.rewards import RewardChecks
from kedge.commands.checks.rounds import later_findings, round_lines
from kedge.core.errors import ConfigError, KedgeError
from kedge.core.files import free_bytes, readable_bytes
from kedge.core.findings import Finding, has_fatal
from kedge.core.stage import PromptUse
from kedge.feedback.constitution import read_constitution
from kedge.gate.planned import unasked
from kedge.gate.rules import load_rules
from kedge.recipe.data_inputs import read_options
from kedge.recipe.rounds import rounds_of
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Link, connect
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from kedge.models.loading.describe import ModelFacts

RUNS = Path("runs")
"""Where runs go unless another folder is named."""


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
    placement: tuple[str, ...] = ()
    """Who computes what, where several processes do."""
    rounds: tuple[str, ...] = ()
    """What is done how often, where the recipe has rounds."""

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
            "models": [
                {"name": model.name, "is": model.in_words(), "findings": _as_dicts(model.findings)}
                for model in self.models
            ],
            "stages": {
                stage.name: {"kind": stage.kind, "lines": list(stage.lines), "findings": _as_dicts(stage.findings)}
                for stage in self.stages
            },
            "placement": list(self.placement),
            **({"rounds": list(self.rounds)} if self.rounds else {}),
            "checked": [asdict(row) for row in self.checked],
            "findings": _as_dicts(self.findings),
        }


def _as_dicts(findings: Iterable[Finding]) -> list[dict[str, Any]]:
    return [finding.as_dict() for finding in findings]


def check_recipe(
    recipe: Recipe,
    *,
    progress: Callable[[int], None] | None = None,
    offline: bool = False,
    runs: Path = RUNS,
) -> RecipeReport:
    """Look at the models, the data and the rewards of every stage, all files together, and the machine.

    `offline` asks no reward server; `runs` is the folder whose disk the checkpoints will be on. Of a recipe with rounds
    the first is looked at, and of the others what differs.
    """
    if recipe.settings.rounds is None:
        return _check_pipeline(recipe, progress=progress, offline=offline, runs=runs, times=1)
    rounds = rounds_of(recipe)
    times = rounds.settings.count
    report = _check_pipeline(rounds.recipe(1), progress=progress, offline=offline, runs=runs, times=times)
    stages = [
        replace(stage, findings=(*stage.findings, *later_findings(stage.name, rounds))) for stage in report.stages
    ]
    return replace(report, stages=tuple(stages), rounds=tuple(round_lines(rounds)))


def _check_pipeline(
    recipe: Recipe, *, progress: Callable[[int], None] | None, offline: bool, runs: Path, times: int
) -> RecipeReport:
    """The report on a recipe that is run so many times."""
    plan = connect(recipe)
    template = recipe.chat_template
    models = {name: check_model(name, template) for name in _outside_models(plan.links.values())}
    default = models.get(recipe.settings.model) or check_model(recipe.settings.model, template)
    files, rewards = DataFiles(), RewardChecks(recipe=recipe, offline=offline)
    stages: list[StageReport] = []
    checked: list[Checked] = []
    bases: dict[str, ModelFacts] = {}
    members = {name: _reward_members(recipe, plan.links[name]) for name in plan.order}
    for name in plan.order:
        links = plan.links[name]
        base = next((models[link.source()] for link in links if link.source() in models), default)
        if base.facts:
            bases[name] = base.facts
        report, rows = _check_stage(name, recipe, links, base, files, rewards)
        judges = list(label_judges(name, recipe, offline=offline))
        report = replace(
            report,
            lines=(*report.lines, *label_lines(name, recipe, plan)),
            findings=(*report.findings, *(finding for _, found in judges for finding in found)),
        )
        stages.append(report)
        checked.extend((*rows, *(row for row, _ in judges)))
    needed = times * disk_bytes(recipe, bases)
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
        machine=(
            *device_findings(recipe.settings.device),
            *placement_findings(recipe),
            *bits_findings(recipe),
            *group_findings(recipe),
            *disk_findings(needed, runs),
        ),
        checked=(*merged(checked), *((disk,) if needed else ())),
        placement=(*placement_lines(recipe, bases, members), *group_lines(recipe, bases, members)),
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


def masked_examples(recipe: Recipe, count: int, *, in_colour: bool) -> Iterator[tuple[str, Text]]:
    """The first conversations of every `sft` stage, with the tokens that are trained highlighted or in brackets."""
    from kedge.data.reading import read
    from kedge.data.template import encode_conversation, show_masks

    tokenizer = tokenizer_for(recipe.settings.model, recipe.chat_template)
    for name, links in connect(recipe).links.items():
        for link in links:
            if link.kinds != ("demonstrations",) or link.stage or link.field != "data":
                continue
            reading = read(link.source(), kind="demonstrations", **read_options(link))
            for example in islice(reading, count):
                messages = cast(Any, example).messages
                encoded = encode_conversation(tokenizer, messages)
                yield f"{name}: {example.origin}", show_masks(tokenizer, encoded, in_colour=in_colour)


def _outside_models(all_links: Iterable[Sequence[Link]]) -> list[str]:
    """Models of files and hubs that generate; reward models are looked at where they score."""
    sources = [link.source() for links in all_links for link in links if not link.stage and link.kinds == ("model",)]
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
    name: str, recipe: Recipe, links: Sequence[Link], model: ModelReport, files: DataFiles, rewards: RewardChecks
) -> tuple[StageReport, list[Checked]]:
    stage, settings = recipe.kinds[name], recipe.stages[name]
    lines = list(stage.explain(settings))
    if model.facts:
        members, on_gpu = _reward_members(recipe, links), gpus_of(recipe.settings.device) is not None
        lines.extend(role_lines(settings, model.facts, reward_members=members, on_gpu=on_gpu))
        lines.extend(offload_lines(settings, model.facts, reward_members=members, on_gpu=on_gpu))
    findings = list(stage.check(settings))
    if model.facts:
        findings.extend(generator_findings(settings, model.facts))
    use = stage.prompts(settings)
    window = stage.window(settings)
    limit = model.facts.window if model.facts else None
    findings.extend(_window_findings(name, window, model, use))
    for link in links:
        if link.stage:
            lines.append(f"{link.field}: what {link.stage} makes ({link.output})")
        elif link.is_data:
            line, found = check_data(
                name,
                link,
                model.tokenizer,
                window or limit,
                files=files,
                max_broken=max_broken_of(settings),
                is_asked=use is not None and link.field == use.field,
                too_long=getattr(settings, "too_long", None) if window else None,
            )
            lines.append(line)
            findings.extend(found)
    findings.extend(_rules_findings(name, recipe, links))
    rows: list[Checked] = []
    if use is not None:
        asked, row, found = check_prompts(name, use, links, model.tokenizer, limit, files)
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


def _rules_findings(name: str, recipe: Recipe, links: Sequence[Link]) -> Iterator[Finding]:
    """What is wrong with a constitution; what a gate could not decide, told before anything is trained: its file of
    rules, and exams that nobody takes."""
    sources = [link for link in links if link.field == "from"]
    for link in links:
        if link.kinds != ("rules",):
            continue
        is_constitution = link.field.rpartition(".")[2] == "constitution"
        try:
            if is_constitution:
                read_constitution(link.source())
                continue
            rules = load_rules(Path(link.source()))
            asked = [recipe.stages[source.stage] for source in sources if source.stage]
            if len(asked) == len(sources) and (missing := unasked(rules, asked, recipe.file.parent)):
                raise rules.problems(missing)
        except KedgeError as error:
            code = "constitution.unusable" if is_constitution else "gate.rules"
            yield Finding(level="fatal", code=code, message=str(error), where=name)


def _reward_members(recipe: Recipe, links: Sequence[Link]) -> int:
    """How many reward models the stages of this recipe make for these inputs."""
    makers = {link.stage for link in links if link.stage and "reward_model" in link.kinds}
    return sum(int(getattr(recipe.stages[stage], "members", 0)) for stage in makers)


def _window_findings(name: str, window: int | None, model: ModelReport, use: PromptUse | None) -> Iterator[Finding]:
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
