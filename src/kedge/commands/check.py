"""`kedge check`: everything that can be known of a recipe before training, in one report.

The recipe and its wiring are checked by loading it. Here the models, the data and how the two fit are looked at.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import BaseModel

from kedge.commands.audit import audit_all, max_broken_of
from kedge.core.errors import ConfigError, KedgeError
from kedge.core.findings import Finding, has_fatal
from kedge.core.stage import DATA_KINDS, WeightedFile
from kedge.recipe.data_inputs import read_options
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import Link, connect
from kedge.rewards.isolation import choose, describe
from kedge.rewards.settings import UnitTestsSource
from kedge.stages.shared import batch_arithmetic as words
from kedge.stages.shared.tokenizer import tokenizer_for

if TYPE_CHECKING:
    from rich.text import Text
    from transformers import PreTrainedTokenizerBase

    from kedge.data.examples import Example, Kind
    from kedge.models.loading.describe import ModelFacts

SAMPLE = 4096
"""Examples of a file that are tokenised: enough for shares, and quick."""


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

    @property
    def findings(self) -> list[Finding]:
        parts = (*(model.findings for model in self.models), *(stage.findings for stage in self.stages), self.data)
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
            "findings": [finding.as_dict() for finding in self.findings],
        }


def check_recipe(recipe: Recipe, *, progress: Callable[[int], None] | None = None) -> RecipeReport:
    """Look at the models, the data of every stage, and all files together."""
    plan = connect(recipe)
    template = recipe.chat_template
    models = {name: check_model(name, template) for name in _outside_models(plan.links.values())}
    default = models.get(recipe.settings.model) or check_model(recipe.settings.model, template)
    stages: list[StageReport] = []
    readable: set[str] = set()
    for name in plan.order:
        links = plan.links[name]
        base = next((models[link.source()] for link in links if link.source() in models), default)
        stages.append(_check_stage(name, recipe, links, base, readable))
    return RecipeReport(
        file=recipe.file,
        name=recipe.settings.name,
        models=tuple({**models, recipe.settings.model: default}.values()),
        stages=tuple(stages),
        data=tuple(audit_all(recipe, plan, readable, progress)),
    )


def refuse_unfit(recipe: Recipe, *, progress: Callable[[int], None] | None = None) -> None:
    """Raise with every fatal finding of `kedge check`, before a run makes a folder."""
    report = check_recipe(recipe, progress=progress)
    told = [
        *(f"model {model.name}: {one.message}" for model in report.models for one in model.findings if _is_fatal(one)),
        *(f"{one.where}: {one.message}" for stage in report.stages for one in stage.findings if _is_fatal(one)),
        *(one.message for one in report.data if _is_fatal(one)),
    ]
    if told:
        listed = "\n".join(f"  {line}" for line in dict.fromkeys(told))
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
    found = [link.source() for links in all_links for link in links if not link.is_data and not link.stage]
    return list(dict.fromkeys(found))


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
    name: str, recipe: Recipe, links: Sequence[Link], model: ModelReport, readable: set[str]
) -> StageReport:
    stage, settings = recipe.kinds[name], recipe.stages[name]
    lines = list(stage.explain(settings))
    findings = list(stage.check(settings))
    window = stage.window(settings)
    limit = model.facts.window if model.facts else None
    if window and limit and window > limit:
        findings.append(
            Finding(
                level="fatal",
                code="stage.window",
                message=f"{window} tokens are asked for, but {model.name} has a window of {limit}",
                where=name,
                fix=f"ask for at most {limit}",
            )
        )
    for link in links:
        if link.stage:
            lines.append(f"{link.field}: what {link.stage} makes ({link.output})")
        elif link.is_data:
            line, found = _check_data(name, link, model, window or limit, max_broken_of(settings), readable)
            lines.append(line)
            findings.extend(found)
    for field, source in _code_sources(settings):
        line, found = _check_isolation(f"{name}.{field}", source)
        lines.append(f"{field}: {line}")
        findings.extend(found)
    kind = str(settings.model_dump()["kind"])
    return StageReport(
        name=name, kind=kind, can_run=stage.run is not None, lines=tuple(lines), findings=tuple(findings)
    )


def _code_sources(section: BaseModel, at: str = "") -> Iterator[tuple[str, UnitTestsSource]]:
    """Every reward source of a stage that runs the code of answers, with its field."""
    if isinstance(section, UnitTestsSource):
        yield at, section
    for name in type(section).model_fields:
        value = getattr(section, name)
        field = f"{at}.{name}" if at else name
        if isinstance(value, BaseModel):
            yield from _code_sources(value, field)
        elif isinstance(value, dict):
            for key, part in cast("dict[str, Any]", value).items():
                if isinstance(part, BaseModel):
                    yield from _code_sources(part, f"{field}.{key}")


def _check_isolation(where: str, source: UnitTestsSource) -> tuple[str, list[Finding]]:
    """Which walls stand around the code of answers here; fatal where it must not run."""
    try:
        layer = choose(source.isolation, source.network)
    except ConfigError as error:
        finding = Finding(level="fatal", code="reward.isolation", message=str(error), where=where)
        return "the code of answers cannot run here", [finding]
    return f"the code of answers runs with {describe(layer, source.network)}", []


def _check_data(
    stage: str, link: Link, model: ModelReport, window: int | None, max_broken: float, readable: set[str]
) -> tuple[str, list[Finding]]:
    """Read one file to its end as what the stage wants it for, and try a part of it on the tokenizer."""
    from kedge.data.preflight_examples import preflight_examples
    from kedge.data.reading import read

    source = link.source()
    try:
        reading = read(source, kind=_wanted_kind(link), max_broken=max_broken, **read_options(link))
        sample: list[Example] = []
        for example in reading:
            if len(sample) < SAMPLE:
                sample.append(example)
    except KedgeError as error:
        where = f"{stage}.{link.field}"
        return f"{link.field}: unreadable", [
            Finding(level="fatal", code="data.unusable", message=str(error), where=where)
        ]
    readable.add(source)
    line = f"{link.field}: {reading.count:,} {reading.kind} in {Path(source).name}"
    if reading.format.layout is not None:
        line += f", read as {reading.format.name}"
    if isinstance(link.reading, WeightedFile) and link.reading.weight is not None:
        line += f", weight {link.reading.weight:g}"
    if reading.num_without:
        line += f", {words.count(reading.num_without, 'row')} without one (ties, say)"
    if reading.num_broken:
        line += f", {words.count(reading.num_broken, 'broken line')} left out (kedge data check lists them)"
    if model.tokenizer is None or window is None:
        return line, []
    return line, preflight_examples(model.tokenizer, sample, window=window)


def _wanted_kind(link: Link) -> Kind | None:
    """The one kind that is wanted; the file's own, when several or any will do."""
    wanted = [kind for kind in link.kinds if kind in DATA_KINDS and kind != "records"]
    if len(wanted) == 1:
        return cast("Kind", wanted[0])
    from kedge.data.reading import recognised

    found = recognised(link.source(), None, columns=read_options(link)["columns"]).kind
    return found if not wanted or found in wanted else cast("Kind", wanted[0])
