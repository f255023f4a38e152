"""Settings of reward sources, one section a kind. Free of torch, so that a recipe is checked without it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal, cast, get_args

import regex
from pydantic import AfterValidator, Field, PlainSerializer, field_validator, model_validator
from pydantic.json_schema import SkipJsonSchema

from kedge.core.settings import PathText, Section
from kedge.core.stage import Input, MayChange, PartName
from kedge.core.suggest import did_you_mean
from kedge.core.urls import check_url, redacted, refuse_open_key
from kedge.models.settings import AutoSize, Combine
from kedge.rewards.callables import identity_of

Url = Annotated[str, AfterValidator(check_url), PlainSerializer(redacted)]
"""What a run writes down of it has no password and no value of its query in it."""
NamedPart = Literal["whole", "boxed", "hashes", "last_line", "fenced"]


def _compiles(pattern: str) -> str:
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(f"not a regular expression: {error}") from error
    return pattern


class Pattern(Section):
    """A group of the last match of a regular expression."""

    pattern: str = Field(min_length=1)
    group: int = Field(default=0, ge=0)
    """Which group of it; 0 is the whole match."""

    @model_validator(mode="after")
    def _is_sound(self) -> Pattern:
        if regex.compile(_compiles(self.pattern)).groups < self.group:
            raise ValueError(f"group {self.group} does not exist in the pattern {self.pattern!r}")
        return self


Extract = NamedPart | Pattern
"""Which part of an answer counts: all of it, the last \\boxed{…}, what follows the last ####, the last line that is not
empty, the last fenced block, or a pattern."""


class ModelSource(Section):
    """A reward model or an ensemble of them."""

    kind: Literal["model"]
    place: Annotated[str, Input("reward_model")] = Field(alias="from")
    """A reward stage, or a folder."""
    objective: str | None = None
    """Which of its objectives; needed where it has several."""
    combine: Combine | None = None
    """How the scores of its members become one; as it was trained to when absent. An ensemble only."""
    rows: Annotated[AutoSize, MayChange()] = "auto"
    """Answers that are scored at once: `auto` is 65,536 tokens of them on a GPU and 8,192 on a CPU. Half as many, and
    half of that, when memory runs out."""


class FunctionSource(Section):
    """A Python function of yours."""

    kind: Literal["function"]
    path: Annotated[PathText, PartName("rewards", is_code=True)] = Field(min_length=1)
    """`file.py:function`, or the name of an installed reward plugin."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Values of the function's parameters by name, or settings of the plugin."""


class CallableSource(Section):
    """A Python function that a script handed over. It lives in the script's process; what is written down identifies
    it, so that a run is not resumed with another one."""

    kind: Literal["callable"]
    function: SkipJsonSchema[Callable[..., Any]] = Field(exclude=True, repr=False)
    """The function itself, or any other object that can be called."""
    options: dict[str, Any] = Field(default_factory=dict[str, Any])
    """Values of its parameters by name."""
    name: str = ""
    """Its module and its name there."""
    source: str = ""
    """A hash of its source text."""
    importable: bool = False
    """Whether another process can import it by its name: not a lambda, nor a function inside another or of a script."""

    @model_validator(mode="before")
    @classmethod
    def _identified(cls, given: Any) -> Any:
        function = cast("dict[str, Any]", given).get("function") if isinstance(given, dict) else None
        if not callable(function):
            raise ValueError(
                "`callable` is for scripts, which hand over the function itself (kedge.PPO(reward=f)); in a recipe "
                'write {kind: function, path: "file.py:name"}'
            )
        return {**cast("dict[str, Any]", given), **identity_of(function)}


class ExactSource(Section):
    """1 where the answer is the solution, else 0."""

    kind: Literal["exact"]
    extract: Extract = "whole"
    ignore_case: bool = True
    ignore_spaces: bool = True
    """Runs of white space count as one blank; those at the ends do not count."""
    ignore_punctuation: bool = False


class NumericSource(Section):
    """1 where the last number of the answer equals the last one of the solution, else 0."""

    kind: Literal["numeric"]
    extract: Extract = "whole"
    relative: float = Field(default=1e-12, ge=0, lt=1)
    """How far off it may be, as a share of the solution."""
    absolute: float = Field(default=0.0, ge=0)
    """How far off it may be, in itself."""


class MathSource(Section):
    """1 where the answer is mathematically equal to the solution (math-verify), else 0."""

    kind: Literal["math"]
    extract: Extract = "whole"
    timeout_s: float = Field(default=5.0, gt=0)
    """For one answer."""


class RegexSource(Section):
    """1 where the pattern matches, else 0."""

    kind: Literal["regex"]
    pattern: str = Field(min_length=1)
    must: Literal["contain", "be"] = "contain"
    """Whether the answer has to contain a match, or be one from end to end."""
    timeout_s: float = Field(default=1.0, gt=0)
    """For one answer: some patterns take for ever on some texts, and such rows have no score."""

    _sound = field_validator("pattern")(_compiles)


class JsonSource(Section):
    """1 where the answer is JSON (and fits the schema, if one is given), else 0."""

    kind: Literal["json_schema"]
    extract: Extract = "whole"
    fits: dict[str, Any] | None = Field(default=None, alias="schema")
    """A JSON schema; without one any JSON will do."""


class InstructionsSource(Section):
    """Checks the instructions that the prompt's record names: the kinds of IFEval."""

    kind: Literal["instructions"]
    give: Literal["share", "all"] = "share"
    """The share of the instructions that is followed, or 1 where all are."""
    loose: bool = False
    """A greeting, a last line and stars do not count."""
    min_words: int = Field(default=8, ge=0)
    """An answer of fewer words scores 0."""
    max_repetition: float = Field(default=0.3, ge=0, le=1)
    """An answer of which a larger share of the 4-grams of words was there before scores 0."""
    relevant: bool = True
    """An answer without a single word of the record's `request` scores 0, where the record has one."""


class UnitTestsSource(Section):
    """Runs the answer's code against the prompt's tests, in a sandbox."""

    kind: Literal["unit_tests"]
    extract: Extract = "fenced"
    tests: str = "tests"
    """The field of the prompt's record with the tests: Python statements, or objects with `input` and `output`."""
    give: Literal["all", "share"] = "all"
    """1 where all tests pass, or the share that passes."""
    timeout_s: float = Field(default=10.0, gt=0)
    """For one program, wall clock and processor alike."""
    memory_mb: int = Field(default=512, ge=64)
    network: Literal["none", "allowed"] = "none"
    """`none` refuses to run where the network cannot be cut."""
    isolation: Literal["auto", "bubblewrap", "namespaces", "limits"] = "auto"
    """The walls around the code. `auto` takes the strongest that works here, and says which; `limits`, which is weaker,
    it takes for other users than root alone. Where it finds none, code runs only if `limits` is written out."""
    workers: int = Field(default=4, ge=1, le=256)
    """Programs that run at once."""


class HttpSource(Section):
    """A server that scores batches of answers."""

    kind: Literal["http"]
    url: Url
    batch: int = Field(default=32, ge=1)
    """Answers in one request."""
    timeout_s: float = Field(default=30.0, gt=0)
    retries: int = Field(default=3, ge=0)
    backoff_s: float = Field(default=0.5, ge=0)
    """Wait before the first retry; it doubles each time."""
    workers: int = Field(default=4, ge=1, le=64)
    """Requests at once."""
    key_variable: str | None = None
    """Environment variable with a key, sent as a bearer token: over https, or to this machine."""

    @model_validator(mode="after")
    def _keeps_its_key(self) -> HttpSource:
        refuse_open_key(self.url, key=self.key_variable and f"the key in {self.key_variable}")
        return self


class Budget(Section):
    """The most that calls may cost, and what a token does: beyond it a run stops with exit code 3, everything kept."""

    usd: float = Field(gt=0)
    """For all calls of a stage, those of a run that is resumed included."""
    input: float = Field(ge=0)
    """USD for a million tokens of what is sent."""
    output: float = Field(ge=0)
    """USD for a million tokens of replies."""

    @model_validator(mode="before")
    @classmethod
    def _has_prices(cls, given: Any) -> Any:
        missing = [name for name in ("input", "output") if isinstance(given, dict) and name not in given]
        if missing and "usd" in given:
            raise ValueError(
                f"a budget needs the price of tokens, and there is no {' and no '.join(missing)}: USD for a million "
                "tokens that are sent and that are replied, e.g. {usd: 40, input: 0.15, output: 0.6}; a server of your "
                "own has 0"
            )
        return given


class Rate(Section):
    """The most calls and tokens a minute; calls are spread evenly."""

    requests: float | None = Field(default=None, gt=0)
    """Calls."""
    tokens: float | None = Field(default=None, gt=0)
    """Sent and replied; before a reply is there it counts as long as it may become."""


class JudgeEndpoint(Section):
    """A language model behind an OpenAI-compatible endpoint."""

    url: Url
    """Up to and including the version: `http://localhost:8000/v1`."""
    model: str = Field(min_length=1)
    """What the server calls the model."""
    temperature: float = Field(default=0.0, ge=0)
    """How replies are drawn; 0 always takes the likeliest token."""
    max_tokens: int = Field(default=512, ge=1)
    """Longest reply."""
    timeout_s: Annotated[float, MayChange()] = Field(default=60.0, gt=0)
    """Seconds to wait for a reply."""
    retries: Annotated[int, MayChange()] = Field(default=3, ge=0)
    """How often a call that failed is tried again."""
    backoff_s: Annotated[float, MayChange()] = Field(default=1.0, ge=0)
    """Wait before the first retry; it doubles each time."""
    workers: Annotated[int, MayChange()] = Field(default=8, ge=1, le=64)
    """Calls at once."""
    key_variable: str | None = None
    """Environment variable with the key, sent as a bearer token: over https, or to this machine."""
    budget: Annotated[Budget | None, MayChange()] = None
    """What the calls may cost: `{usd: 40, input: 0.15, output: 0.6}`."""
    rate: Annotated[Rate | None, MayChange()] = None
    """What the server allows: `{requests: 300, tokens: 200000}` a minute."""

    @model_validator(mode="after")
    def _keeps_its_key(self) -> JudgeEndpoint:
        refuse_open_key(self.url, key=self.key_variable and f"the key in {self.key_variable}")
        return self


class JudgeSource(JudgeEndpoint):
    """A language model behind an OpenAI-compatible endpoint that grades answers."""

    kind: Literal["judge"]
    rubric: str | None = None
    """A Jinja template of the request with `prompt`, `answer`, `solution`, `extra`, `lowest`, `highest`, and `fence`,
    the mark that stands before and after what is judged (docs/rewards.md)."""
    lowest: float = 1.0
    highest: float = 10.0
    """Grades outside of these bounds are not believed."""
    logprobs: bool = False
    """The mean of all grades by the judge's log-probabilities, where it gives them, instead of the number it names."""

    @model_validator(mode="after")
    def _has_a_scale(self) -> JudgeSource:
        if self.logprobs and not all(0 <= bound <= 9 and bound == int(bound) for bound in (self.lowest, self.highest)):
            raise ValueError(
                f"logprobs needs grades of one digit, found {self.lowest:g} to {self.highest:g}: for many tokenizers "
                "10 begins with the token of 1; write lowest: 1, highest: 9"
            )
        if self.lowest >= self.highest:
            raise ValueError(f"lowest {self.lowest:g} must be below highest {self.highest:g}")
        return self


class PairwiseJudge(JudgeEndpoint):
    """A language model behind an OpenAI-compatible endpoint that says which of two answers is better."""

    kind: Literal["judge"]
    name: str | None = Field(default=None, min_length=1)
    """What results call it; the model's name, when absent."""
    rubric: str | None = None
    """A Jinja template of the request with `prompt`, `first`, `second`, `fence`, the mark that stands before and after
    what is compared (docs/evaluate.md), and under a constitution `principle`."""
    axes: list[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]*$", max_length=40)]] = Field(default_factory=list[str])
    """What else is judged in the same reply: `[helpful, honest, harmless]`."""
    cot: bool = False
    """Let the judge think step by step before its verdict."""
    logprobs: bool = False
    """Ask for log-probabilities, and read from them how sure the judge is."""

    @model_validator(mode="after")
    def _can_be_asked(self) -> PairwiseJudge:
        for axis in self.axes:
            if axis in ("better", "reason") or self.axes.count(axis) > 1:
                raise ValueError(f"axes: '{axis}' stands twice in what the judge replies; name every axis once")
        if self.cot and self.rubric is not None:
            raise ValueError("cot changes the rubric that ships; with a rubric of your own, ask for the steps in it")
        return self

    @property
    def label(self) -> str:
        return self.name or self.model


TextSettings = (
    FunctionSource
    | SkipJsonSchema[CallableSource]  # no recipe can name it
    | ExactSource
    | NumericSource
    | MathSource
    | RegexSource
    | JsonSource
    | InstructionsSource
    | UnitTestsSource
    | HttpSource
    | JudgeSource
)
TEXT_KINDS: frozenset[str] = frozenset(
    get_args(section.model_fields["kind"].annotation)[0] for section in get_args(TextSettings)
)


class MixSource(Section):
    """Several sources as one score."""

    kind: Literal["mix"]
    how: Literal["weighted", "gated", "worst"] = "weighted"
    """The weighted sum; the score of one part where it passes another (the gate), else the gate's; or the lowest."""
    parts: dict[str, RewardSourceSettings] = Field(min_length=1)
    weights: dict[str, float] = Field(default_factory=dict[str, float])
    """For `weighted`; a part that is not named has weight 1."""
    gate: str | None = None
    """For `gated`: which of the two parts is the gate."""
    threshold: float = 1.0
    """For `gated`: the least score that passes."""
    risky: str | None = Field(default=None, min_length=1)
    """For `gated`: a field of the prompts' records; where it is true, the gate's score counts whatever it is."""

    @model_validator(mode="after")
    def _fits(self) -> MixSource:
        for name in self.weights:
            if name not in self.parts:
                raise ValueError(f"weights: no part named '{name}'{did_you_mean(name, self.parts)}")
        if self.weights and self.how != "weighted":
            raise ValueError(f"weights are for how: weighted, found how: {self.how}")
        if self.how == "gated" and (self.gate not in self.parts or len(self.parts) != 2):
            raise ValueError(f"how: gated needs two parts and a gate that is one of them, found {self.gate!r}")
        if self.how != "gated" and self.gate is not None:
            raise ValueError(f"gate is for how: gated, found how: {self.how}")
        if self.how != "gated" and self.risky is not None:
            raise ValueError(f"risky is for how: gated, found how: {self.how}")
        return self


RewardSourceSettings = Annotated[TextSettings | ModelSource | MixSource, Field(discriminator="kind")]

MixSource.model_rebuild()


class FailureSettings(Section):
    """How many answers may go without a score."""

    max_share: float = Field(default=0.1, ge=0, le=1)
    """More than this share of the window stops the run."""
    window: int = Field(default=256, ge=1)
    """How many of a source's latest rows count."""
