"""Reward sources before training: functions are called once, servers asked once, models and answers looked at.

What several stages use alike is looked at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, TypeVar

from kedge.commands.checks.records import Asked, Checked, Outcome, fatal
from kedge.commands.checks.reward_models import check_reward_model
from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, KedgeError
from kedge.core.findings import Finding
from kedge.core.stage import PromptUse
from kedge.core.suggest import did_you_mean
from kedge.core.urls import redacted
from kedge.data.examples import Prompt
from kedge.rewards.context import RewardContext
from kedge.rewards.settings import (
    CallableSource,
    FunctionSource,
    HttpSource,
    JudgeEndpoint,
    JudgeSource,
    MixSource,
    ModelSource,
    NumericSource,
    PairwiseJudge,
    RewardSourceSettings,
    TextSettings,
    UnitTestsSource,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from kedge.recipe.schema import Recipe
    from kedge.recipe.wiring import Link
    from kedge.rewards.pairwise import Panelist

ASK_S: Final = 10.0
"""Longest wait for the reply of a server that is only asked whether it is there."""
_SERVER_FIX: Final = (
    "start the server, or mend the URL, the model's name or the key; --offline leaves servers out of the check"
)
_NEEDS_SOLUTION: Final = ("exact", "numeric", "math")
_DUMMY_TEXT: Final = "This is an answer."
_DUMMY_PROMPT: Final = (("user", "Is this a question?"),)


@dataclass(slots=True, kw_only=True)
class RewardChecks:
    """Looks at the reward sources of a recipe's stages; keeps what it found by what was looked at."""

    recipe: Recipe
    offline: bool
    _outcomes: dict[str, Outcome] = field(default_factory=dict[str, Outcome])

    def check(
        self,
        stage: str,
        use: PromptUse,
        links: Sequence[Link],
        asked: Asked,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> Iterator[tuple[Checked, list[Finding]]]:
        """Every source that scores the answers of a stage, and every judge that compares them."""
        for name, settings in use.rewards.items():
            for place, mix in gated_by_prompts(settings, name):
                yield _risky(stage, place, name, mix, asked)
            for place, leaf in leaves(settings, name):
                outcome = self._outcome(leaf, place, links, asked, use, tokenizer)
                where = f"{stage}.{place}"
                checked = Checked(
                    what=outcome.what, subject=outcome.subject, result=outcome.result, used_by=(f"{stage}.{name}",)
                )
                yield checked, [replace(finding, where=where) for finding in outcome.findings]
        for place, judge in (use.judges or {}).items():
            outcome = self._judge(judge, asked)
            checked = Checked(
                what=outcome.what, subject=outcome.subject, result=outcome.result, used_by=(f"{stage}.{place}",)
            )
            yield checked, [replace(finding, where=f"{stage}.{place}") for finding in outcome.findings]

    def _judge(self, judge: JudgeEndpoint, asked: Asked) -> Outcome:
        key = f"pairwise {judge.model_dump_json()}"
        if key not in self._outcomes:
            context = RewardContext(folder=self.recipe.file.parent, seed=self.recipe.settings.seed)
            self._outcomes[key] = (
                _pairwise(judge, context, asked, offline=self.offline)
                if isinstance(judge, PairwiseJudge)
                else _writer(judge, offline=self.offline)
            )
        return self._outcomes[key]

    def _outcome(
        self,
        leaf: TextSettings | ModelSource,
        place: str,
        links: Sequence[Link],
        asked: Asked,
        use: PromptUse,
        tokenizer: PreTrainedTokenizerBase | None,
    ) -> Outcome:
        if isinstance(leaf, ModelSource):
            link = next(link for link in links if link.field == place)
            return check_reward_model(leaf, link, self.recipe, asked, use, tokenizer)
        key = f"{leaf.model_dump_json()} {id(asked.prompts)} {use.max_unscored}"
        if key not in self._outcomes:
            self._outcomes[key] = self._text(leaf, asked, use)
        return self._outcomes[key]

    def _text(self, leaf: TextSettings, asked: Asked, use: PromptUse) -> Outcome:
        folder = self.recipe.file.parent
        context = RewardContext(folder=folder, seed=self.recipe.settings.seed, fields=asked.fields)
        match leaf:
            case FunctionSource():
                return _function(leaf, context, asked)
            case CallableSource():
                return _callable(leaf, context)
            case HttpSource() | JudgeSource():
                return _server(leaf, context, asked, offline=self.offline)
            case _:
                return _checkable(leaf, context, asked, use)


def leaves(settings: RewardSourceSettings | str, field: str) -> Iterator[tuple[str, TextSettings | ModelSource]]:
    """The sources that a reward is made of, each with the field that names it in the recipe."""
    match settings:
        case str():
            yield field, ModelSource.model_validate({"kind": "model", "from": settings})
        case ModelSource():
            yield f"{field}.from", settings
        case MixSource():
            for name, part in settings.parts.items():
                yield from leaves(part, f"{field}.parts.{name}")
        case _:
            yield field, settings


def gated_by_prompts(settings: RewardSourceSettings | str, field: str) -> Iterator[tuple[str, MixSource]]:
    """The mixes whose gate is closed for some prompts, each with the field that names it in the recipe."""
    if isinstance(settings, MixSource):
        if settings.risky is not None:
            yield field, settings
        for name, part in settings.parts.items():
            yield from gated_by_prompts(part, f"{field}.parts.{name}")


def _risky(stage: str, place: str, name: str, mix: MixSource, asked: Asked) -> tuple[Checked, list[Finding]]:
    """For how many prompts the gate is closed; fatal where the field is unknown, or is no yes or no."""
    from kedge.rewards.build import is_risky

    field, prompts = mix.risky or "", asked.prompts or ()
    checked = Checked(what="gate", subject=f"risky: {field}", result="not known yet", used_by=(f"{stage}.{name}",))
    where = f"{stage}.{place}.risky"
    if asked.prompts is None:
        return checked, []
    try:
        risky = sum(is_risky(prompt.extra, field) for prompt in prompts)
    except KedgeError as error:
        return replace(checked, result="cannot be used"), [replace(fatal("reward.risky", str(error)), where=where)]
    if asked.fields is not None and field not in asked.fields:
        known = ", ".join(sorted(asked.fields)) or "none"
        message = f"no prompt has the field '{field}'{did_you_mean(field, asked.fields)}; their fields are: {known}"
        fix = "mark the prompts for which the gate shall decide with true, or leave `risky` out"
        return replace(checked, result="unknown field"), [replace(fatal("reward.risky", message, fix), where=where)]
    return replace(checked, result=f"true for {risky:,} of {len(prompts):,} prompts looked at"), []


def dummies(asked: Asked) -> list[Answer]:
    """Two made-up answers to the first prompt: its solution where one is known, and a sentence."""
    prompt = next(iter(asked.prompts or ()), None)
    conversation = tuple((message.role, message.content) for message in prompt.prompt) if prompt else _DUMMY_PROMPT
    solution, extra = (prompt.answer, prompt.extra) if prompt else (None, {})
    texts = (solution or "Yes.", _DUMMY_TEXT)
    return [Answer(prompt=conversation, text=text, is_finished=True, solution=solution, extra=extra) for text in texts]


def _function(leaf: FunctionSource, context: RewardContext, asked: Asked) -> Outcome:
    from kedge.rewards.probe import probe

    outcome = probe(leaf, dummies(asked), folder=context.folder, fields=asked.fields)
    shared = Outcome(what="function", subject=leaf.path, result="cannot be used")
    if outcome.failure:
        fix = "mend the function: it was imported and called once, on two made-up answers"
        return replace(shared, findings=(fatal("reward.function", outcome.failure, fix),))
    scores = ", ".join("none" if score is None else f"{score:g}" for score in outcome.scores)
    findings: list[Finding] = []
    if None in outcome.scores:
        message = f"{leaf.path} gave no score to a made-up answer: {'; '.join(outcome.reasons)}"
        findings.append(Finding(level="warning", code="reward.function_unscored", message=message))
    return replace(shared, result=f"called once: {scores}", findings=tuple(findings))


def _callable(leaf: CallableSource, context: RewardContext) -> Outcome:
    """Its parameters alone: it lives in the script's process, which a child does not have."""
    return _built(leaf, context, what="function", subject=leaf.name, result="its parameters can be filled")


def _built(leaf: TextSettings, context: RewardContext, *, what: str, subject: str, result: str) -> Outcome:
    from kedge.rewards.build import text_source

    try:
        text_source(leaf, context)
    except KedgeError as error:
        return Outcome(
            what=what, subject=subject, result="cannot be used", findings=(fatal("reward.unusable", str(error)),)
        )
    return Outcome(what=what, subject=subject, result=result)


def _server(leaf: HttpSource | JudgeSource, context: RewardContext, asked: Asked, *, offline: bool) -> Outcome:
    """Ask the server to score one made-up answer, without retries."""
    from kedge.rewards.build import text_source
    from kedge.rewards.failures import results_of

    shown = redacted(leaf.url)
    shared = Outcome(what="server" if isinstance(leaf, HttpSource) else "judge", subject=shown, result="")
    if offline:
        return replace(shared, result="not asked (--offline)")
    once = leaf.model_copy(update={"retries": 0, "timeout_s": min(leaf.timeout_s, ASK_S)})
    try:
        (result,) = results_of(text_source(once, context), dummies(asked)[:1], name=leaf.kind)
    except KedgeError as error:
        return replace(shared, result="cannot be used", findings=(fatal("reward.server", str(error)),))
    if result.is_scored:
        return replace(shared, result=f"asked once: {result.score:g}")
    reason = redacted(result.reason).partition(" (tried ")[0]
    message = f"{shown} was asked to score one made-up answer and gave no score: {reason}"
    fix = "start the server, or mend the URL or the key; --offline leaves servers out of the check"
    if reason == "the server gave no score":
        return replace(
            shared,
            result="asked once: no score",
            findings=(Finding(level="warning", code="reward.server_unscored", message=message),),
        )
    return replace(shared, result="no usable reply", findings=(fatal("reward.server", message, fix),))


def _writer(endpoint: JudgeEndpoint, *, offline: bool) -> Outcome:
    """Ask a model that is to write for one word, without retries; its reply is not kept."""
    from kedge.rewards.client import Call, CallFailed
    from kedge.rewards.judge_protocol import chat_body, content_of
    from kedge.rewards.paid import PaidCalls

    shown = redacted(endpoint.url)
    shared = Outcome(what="writer", subject=f"{endpoint.model} at {shown}", result="")
    once = endpoint.model_copy(update={"retries": 0, "timeout_s": min(endpoint.timeout_s, ASK_S), "max_tokens": 8})
    try:
        calls = PaidCalls(once, None, budget=once.budget, rate=None, seed=0)
        if offline:
            return replace(shared, result="not asked (--offline)")
        (reply,) = calls.ask([Call(body=chat_body(once, "Reply with one word."), read=content_of)])
    except KedgeError as error:
        return replace(shared, result="cannot be used", findings=(fatal("writer.unusable", str(error)),))
    if isinstance(reply, CallFailed):
        message = f"{shown} was asked for one word and gave none: {redacted(str(reply)).partition(' (tried ')[0]}"
        return replace(shared, result="no usable reply", findings=(fatal("writer.server", message, _SERVER_FIX),))
    return replace(shared, result="asked once: it writes")


def _pairwise(judge: PairwiseJudge, context: RewardContext, asked: Asked, *, offline: bool) -> Outcome:
    """Ask a judge to compare two made-up answers, in both orders, without retries; its replies are not kept."""
    from kedge.rewards.pairwise import Panelist

    return ask_judge(asked_once(judge), lambda once: Panelist(once, context), asked, offline=offline)


JudgeT = TypeVar("JudgeT", bound=PairwiseJudge)


def asked_once(judge: JudgeT) -> JudgeT:
    """The judge without retries, and without a budget: a question or two are not counted in it."""
    changes = {"retries": 0, "timeout_s": min(judge.timeout_s, ASK_S), "budget": None, "rate": None}
    return judge.model_copy(update=changes)


def ask_judge(judge: JudgeT, opened: Callable[[JudgeT], Panelist], asked: Asked, *, offline: bool) -> Outcome:
    """Ask a judge to compare two made-up answers, in both orders; `opened` refuses one that cannot be asked."""
    from kedge.rewards.pairwise import TwoAnswers

    shown = redacted(judge.url)
    shared = Outcome(what="judge", subject=f"{judge.label} at {shown}", result="")
    first, second = dummies(asked)
    try:
        panelist = opened(judge)
        if offline:
            return replace(shared, result="not asked (--offline)")
        pair = TwoAnswers(prompt=first.prompt, first=first.text, second=second.text, principle="Which is clearer?")
        (result,) = panelist.compare([pair])
    except KedgeError as error:
        return replace(shared, result="cannot be used", findings=(fatal("judge.unusable", str(error)),))
    if result.reason:
        reason = redacted(result.reason).partition(" (tried ")[0]
        message = f"{shown} was asked to compare two made-up answers and did not: {reason}"
        return replace(shared, result="no usable reply", findings=(fatal("judge.server", message, _SERVER_FIX),))
    if result.as_a is None or result.as_b is None:
        message = f"{judge.label} was asked to compare two made-up answers, and its reply names no winner"
        finding = Finding(
            level="warning",
            code="judge.unreadable",
            message=message,
            fix="allow longer replies (max_tokens), or take a model that follows the request",
        )
        return replace(shared, result="asked once: names no winner", findings=(finding,))
    agreed = "the same in both orders" if result.as_a == result.as_b else "another one in the other order"
    return replace(shared, result=f"asked once: names a winner, {agreed}")


def _checkable(leaf: TextSettings, context: RewardContext, asked: Asked, use: PromptUse) -> Outcome:
    """A source that checks answers against something known, which the prompts must bring along."""
    built = (
        _walled(leaf)
        if isinstance(leaf, UnitTestsSource)
        else _built(leaf, context, what="source", subject=leaf.kind, result="ready")
    )
    if built.findings or asked.prompts is None:
        return built
    prompts = asked.prompts
    needed, reason_of = _needed(leaf)
    if reason_of is None or not prompts:
        return built
    lacking = [(prompt, reason) for prompt in prompts if (reason := reason_of(prompt))]
    looked_at = f"{len(prompts):,}" if len(prompts) == asked.total else f"first {len(prompts):,} of {asked.total:,}"
    ready = f"{built.result}; " if isinstance(leaf, UnitTestsSource) else ""
    result = f"{ready}{len(prompts) - len(lacking):,} of {looked_at} prompts have {needed}"
    if not lacking:
        return replace(built, result=result)
    first, reason = lacking[0]
    share = len(lacking) / len(prompts)
    is_fatal = share > use.max_unscored
    message = (
        f"{{kind: {leaf.kind}}} needs {needed}, and {len(lacking):,} of the {looked_at} prompts do not have it: "
        f"{reason} (first {first.origin})"
    )
    allowed = f"; failures.max_share allows {use.max_unscored:.0%} without a score" if is_fatal else ""
    finding = Finding(
        level="fatal" if is_fatal else "warning",
        code="reward.no_answers",
        message=message + allowed,
        fix=f"give each prompt {needed}, or score the answers by another source",
    )
    return replace(built, result=result, findings=(finding,))


def _walled(leaf: UnitTestsSource) -> Outcome:
    """Which walls stand around the code of answers here; fatal where it must not run."""
    from kedge.rewards.isolation import choose, describe

    try:
        layer = choose(leaf.isolation, leaf.network)
    except ConfigError as error:
        finding = fatal("reward.isolation", str(error))
        return Outcome(what="source", subject=leaf.kind, result="the code of answers cannot run", findings=(finding,))
    return Outcome(what="source", subject=leaf.kind, result=describe(layer, leaf.network))


def _needed(leaf: TextSettings) -> tuple[str, Callable[[Prompt], str] | None]:
    """What a source needs of every prompt, in words, and a function that says what a prompt lacks of it."""
    match leaf:
        case NumericSource():
            from kedge.rewards.extraction import last_number

            def lacks_number(prompt: Prompt) -> str:
                if prompt.answer is None:
                    return "no `answer`"
                return "" if last_number(prompt.answer) is not None else f"no number in {prompt.answer[:40]!r}"

            return "an `answer` with a number", lacks_number
        case UnitTestsSource():
            from kedge.rewards.unit_tests import read_tests

            def lacks_tests(prompt: Prompt) -> str:
                tests = read_tests(prompt.extra.get(leaf.tests))
                return tests if isinstance(tests, str) else ""

            return f"tests in the field `{leaf.tests}`", lacks_tests
        case _ if leaf.kind in _NEEDS_SOLUTION:
            return "an `answer`", lambda prompt: "no `answer`" if prompt.answer is None else ""
        case _:
            return "", None
