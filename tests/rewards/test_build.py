"""From rollouts to scores: text, models on tokens and on text, mixes, and settings as a recipe writes them."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor

from kedge.core import plugins
from kedge.core.answers import Answer
from kedge.core.errors import ConfigError, DataError, RewardError
from kedge.core.protocols import RewardSource
from kedge.core.records import Rollouts, take
from kedge.models.loading.tiny import make_tiny
from kedge.models.reward.reward_files import build as build_reward
from kedge.rewards import verifiable
from kedge.rewards.build import Wiring, build, mixed
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import FailureCounter
from kedge.rewards.model import OnTokens, on_text
from kedge.rewards.rollouts import PromptRecord, answers_of
from kedge.rewards.settings import FailureSettings, MixSource, ModelSource, RewardSourceSettings

Make = Callable[..., Answer]
NAN = math.nan
SETTINGS: TypeAdapter[Any] = TypeAdapter(RewardSourceSettings)
MODEL = ModelSource.model_validate({"kind": "model", "from": "reward", "rows": 2})


@pytest.fixture
def rollouts() -> Rollouts:
    """Letters as tokens; 0 ends an answer. Row 1 was cut off, row 2 has a hole between two turns."""
    tokens_BT = torch.tensor([[81, 72, 105, 0, 0], [81, 81, 110, 111, 33], [81, 97, 58, 98, 0]])
    response_BT = torch.tensor([[0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [0, 1, 0, 1, 1]]).bool()
    return Rollouts(
        tokens_BT=tokens_BT,
        attention_mask_BT=torch.tensor([[1, 1, 1, 1, 0], [1] * 5, [1] * 5]).bool(),
        response_mask_BT=response_BT,
        behaviour_logp_BT=torch.zeros(3, 5),
        group_B=torch.tensor([4, 9, 4]),
        finished_B=torch.tensor([True, False, True]),
        version=0,
    )


def read(rollouts: Rollouts) -> list[Answer]:
    records = {
        4: PromptRecord(prompt=(("user", "greet"),), solution="Hi", extra={"n": 1}),
        9: PromptRecord(prompt=(("user", "deny"),)),
    }
    return answers_of(rollouts, prompt_of=records.__getitem__, decode=lambda tokens: "".join(map(chr, tokens)))


class Summing:
    """A reward model that adds up what it sees: objective 0 the tokens, objective 1 how many there are."""

    device = torch.device("cpu")

    def __init__(self, objectives: tuple[str, ...] = ("sum", "count")) -> None:
        self.objectives = objectives
        self.sizes: list[tuple[int, ...]] = []

    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        self.sizes.append(tuple(tokens_BT.shape))
        sums_B = (tokens_BT * attention_mask_BT).sum(dim=1)
        return torch.stack([sums_B, attention_mask_BT.sum(dim=1)], dim=1).double()[:, : len(self.objectives)]


def new_counter(max_share: float = 1.0) -> FailureCounter:
    return FailureCounter("reward", FailureSettings(max_share=max_share))


def test_answers_are_what_was_sampled_without_the_stop_token(rollouts: Rollouts) -> None:
    assert read(rollouts) == [
        Answer(prompt=(("user", "greet"),), text="Hi", is_finished=True, solution="Hi", extra={"n": 1}),
        Answer(prompt=(("user", "deny"),), text="no!", is_finished=False),
        Answer(prompt=(("user", "greet"),), text="ab", is_finished=True, solution="Hi", extra={"n": 1}),
    ]


def test_a_model_on_tokens_reads_prompt_and_answer(rollouts: Rollouts) -> None:
    scorer = Summing()
    source = OnTokens(scorer, MODEL.model_copy(update={"objective": "sum"}), new_counter())
    scores_B = source.score(rollouts)
    assert scores_B.dtype == torch.float32
    assert scores_B.tolist() == [81 + 72 + 105, 81 + 81 + 110 + 111 + 33, 81 + 97 + 58 + 98]
    assert scorer.sizes == [(2, 5), (1, 4)]
    counting = OnTokens(scorer, MODEL.model_copy(update={"objective": "count"}), new_counter())
    assert counting.score(rollouts).tolist() == [4, 5, 5]


@pytest.mark.parametrize(
    ("objective", "message"),
    [(None, "objective: none named"), ("cuont", "objective: 'cuont' (did you mean 'count'?)")],
)
def test_an_objective_has_to_be_named(objective: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        OnTokens(Summing(), MODEL.model_copy(update={"objective": objective}), new_counter())
    assert str(error.value) == f"reward: the reward model has the objectives sum, count; {message}"
    assert OnTokens(Summing(("sum",)), MODEL, new_counter())


def test_a_model_that_gives_no_number_is_counted_as_a_failure(rollouts: Rollouts) -> None:
    class Broken(Summing):
        def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
            return torch.full((tokens_BT.shape[0], 1), torch.inf).index_fill(0, torch.tensor([0]), 2.0)

    counter = new_counter()
    scores_B = OnTokens(Broken(("sum",)), MODEL, counter).score(rollouts)
    torch.testing.assert_close(scores_B, torch.tensor([2.0, 2.0, NAN]), equal_nan=True)
    assert counter.report().failed == 1


def test_a_model_on_text_renders_it_anew(answer: Make) -> None:
    def encode(answer: Answer) -> list[int]:
        if len(answer.text) > 3:
            raise DataError("longer than its window")
        return [ord(char) for char in answer.text]

    scorer = Summing(("sum",))
    results = on_text(scorer, MODEL, encode).judge([answer("a"), answer("long"), answer("bc"), answer("abc")])
    assert [result.score for result in results if result.is_scored] == [97, 98 + 99, 97 + 98 + 99]
    assert results[1].reason == "longer than its window"
    assert scorer.sizes == [(2, 3), (1, 1)]
    counting = on_text(Summing(), MODEL.model_copy(update={"objective": "count"}), encode)
    assert counting.score([answer("abc"), answer("a")]) == [3.0, 1.0]  # padding does not count


class OutOfMemory(Summing):
    """Has room for 9,000 tokens, padding included."""

    def score_tokens(self, tokens_BT: Tensor, attention_mask_BT: Tensor, *, normalised: bool = True) -> Tensor:
        if tokens_BT.numel() > 9_000:
            self.sizes.append((-1, -1))
            raise torch.OutOfMemoryError("planted")
        return super().score_tokens(tokens_BT, attention_mask_BT, normalised=normalised)


@pytest.mark.parametrize("rows", ["auto", 100])
def test_rows_of_similar_length_are_scored_together_and_come_back_in_order(rows: Any) -> None:
    """200 rows of 1 to 200 tokens, the long ones among the short: in memory at once are tokens, hardly any padding."""
    lengths = [1 + 77 * row % 200 for row in range(200)]
    mask_BT = torch.arange(200) < torch.tensor(lengths)[:, None]
    many = Rollouts(
        tokens_BT=torch.arange(200 * 200).reshape(200, 200) % 251,
        attention_mask_BT=mask_BT,
        response_mask_BT=mask_BT,
        behaviour_logp_BT=torch.zeros(200, 200),
        group_B=torch.arange(200),
        finished_B=torch.ones(200, dtype=torch.bool),
        version=0,
    )
    settings = ModelSource.model_validate({"kind": "model", "from": "reward", "objective": "sum"})
    assert settings.rows == "auto"
    settings = settings.model_copy(update={"rows": rows})
    expected_B = (many.tokens_BT * mask_BT).sum(dim=1).float()
    scorer = OutOfMemory()
    source = OnTokens(scorer, settings, new_counter())
    torch.testing.assert_close(source.score(many), expected_B, rtol=0, atol=0)
    rows_of = [row[:length].tolist() for row, length in zip(many.tokens_BT, lengths, strict=True)]
    texts = on_text(scorer, settings, lambda answer: rows_of[int(answer.text)])
    answers = [Answer(prompt=(), text=str(row), is_finished=True) for row in range(200)]
    assert texts.score(answers) == expected_B.tolist()
    sizes = [size for size in scorer.sizes if size != (-1, -1)]
    if rows == "auto":
        assert sum(num_rows * width for num_rows, width in sizes) < 1.5 * 2 * sum(lengths)  # twice as much unsorted
    assert (-1, -1) in scorer.sizes  # and the run went on


def test_a_real_reward_model(rollouts: Rollouts, tmp_path: Path) -> None:
    reward = build_reward(make_tiny(tmp_path / "model"), seed=1, dtype="float32")
    expected_B = reward.score_tokens(rollouts.tokens_BT, rollouts.attention_mask_BT)[:, 0]
    assert len(set(expected_B.tolist())) == 3
    torch.testing.assert_close(OnTokens(reward, MODEL, new_counter()).score(rollouts), expected_B, rtol=1e-4, atol=1e-6)
    texts = {"a": 0, "b": 1, "c": 2}
    rows = [row[keep].tolist() for row, keep in zip(rollouts.tokens_BT, rollouts.attention_mask_BT, strict=True)]
    source = on_text(reward, MODEL, lambda answer: rows[texts[answer.text]])
    answers = [Answer(prompt=(), text=text, is_finished=True) for text in "cab"]
    found_B = torch.tensor(source.score(answers))
    torch.testing.assert_close(found_B, expected_B[[2, 0, 1]], rtol=1e-4, atol=1e-6)


def parts(**changes: Any) -> MixSource:
    how = {"kind": "mix", "parts": {name: {"kind": "regex", "pattern": name} for name in ("right", "style")}}
    return MixSource.model_validate(how | changes)


SCORES = {"right": torch.tensor([1.0, 0.0, 1.0, NAN]), "style": torch.tensor([0.5, 3.0, NAN, 2.0])}


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (parts(), [1.5, 3.0, NAN, NAN]),
        (parts(weights={"style": -2.0}), [0.0, -6.0, NAN, NAN]),
        (parts(how="worst"), [0.5, 0.0, NAN, NAN]),
        (parts(how="gated", gate="right"), [0.5, 0.0, NAN, NAN]),
        (parts(how="gated", gate="style", threshold=0.7), [0.5, 0.0, NAN, NAN]),
        (parts(how="gated", gate="right", threshold=-1.0), [0.5, 3.0, NAN, NAN]),
    ],
)
def test_mixes(settings: MixSource, expected: list[float]) -> None:
    torch.testing.assert_close(mixed(SCORES, settings), torch.tensor(expected), equal_nan=True)


def test_a_gap_behind_a_closed_gate_does_no_harm() -> None:
    scores = {"right": torch.tensor([0.0]), "style": torch.tensor([NAN])}
    assert mixed(scores, parts(how="gated", gate="right")).tolist() == [0.0]


GATED = {
    "kind": "mix",
    "how": "gated",
    "gate": "letters",
    "threshold": 0.5,
    "risky": "unsafe",
    "parts": {"letters": {"kind": "regex", "pattern": "[a-z]"}, "digits": {"kind": "regex", "pattern": "[0-9]"}},
}


def test_a_risky_prompt_has_the_score_of_the_gate_whatever_it_is(wiring: Wiring, rollouts: Rollouts) -> None:
    def read_marked(rollouts: Rollouts) -> list[Answer]:
        return [replace(answer, extra={"unsafe": row == 0}) for row, answer in enumerate(read(rollouts))]

    reward = build(SETTINGS.validate_python(GATED), replace(wiring, read=read_marked))
    # all three have letters and none a digit: the gate is open, but closed for the first prompt
    assert reward.score(rollouts).tolist() == [1.0, 0.0, 0.0]
    unmarked = build(SETTINGS.validate_python(GATED), wiring)
    assert unmarked.score(rollouts).tolist() == [0.0, 0.0, 0.0]


def test_a_field_of_risky_prompts_that_is_unknown_or_no_yes_or_no_is_refused(
    wiring: Wiring, rollouts: Rollouts
) -> None:
    known = replace(wiring, context=replace(wiring.context, fields=frozenset({"unsaf", "n"})))
    with pytest.raises(ConfigError, match=r"no prompt has the field 'unsafe' \(did you mean 'unsaf'\?\).* n, unsaf"):
        build(SETTINGS.validate_python(GATED), known)
    numbered = build(SETTINGS.validate_python({**GATED, "risky": "n"}), wiring)
    with pytest.raises(DataError, match="the field 'n' of a prompt is 1; expected true or false"):
        numbered.score(rollouts)


class Point:
    def __init__(self, make: Callable[..., Any]) -> None:
        self.make = make

    def load(self) -> Callable[..., Any]:
        return self.make


@pytest.fixture
def wiring(context: RewardContext, monkeypatch: pytest.MonkeyPatch) -> Wiring:
    makers = {"exact": Point(verifiable.make_exact), "regex": Point(verifiable.make_regex)}
    monkeypatch.setattr(plugins, "_installed", lambda kind: makers)

    def open_model(settings: ModelSource, counter: FailureCounter) -> RewardSource:
        return OnTokens(Summing(("sum",)), settings, counter)

    failures = FailureSettings(max_share=0.5, window=4)
    return Wiring(context=context, read=read, open_model=open_model, failures=failures)


def test_a_mix_of_mixes_of_models_and_text(wiring: Wiring, rollouts: Rollouts) -> None:
    settings = SETTINGS.validate_python(
        {
            "kind": "mix",
            "weights": {"model": 0.001},
            "parts": {
                "model": {"kind": "model", "from": "reward"},
                "text": {
                    "kind": "mix",
                    "how": "worst",
                    "parts": {"right": {"kind": "exact"}, "letters": {"kind": "regex", "pattern": "[a-z]"}},
                },
            },
        }
    )
    reward = build(settings, wiring)
    scores_B = reward.score(rollouts)
    assert scores_B.dtype == torch.float32
    torch.testing.assert_close(scores_B, torch.tensor([1 + 0.258, NAN, 0.334]), equal_nan=True)
    assert [(counter.source, counter.report().failed) for counter in reward.failure_counters] == [
        ("reward.model", 0),
        ("reward.text.right", 1),
        ("reward.text.letters", 0),
    ]


def test_too_many_failures_stop_a_built_source(wiring: Wiring, rollouts: Rollouts) -> None:
    reward = build(SETTINGS.validate_python({"kind": "exact"}), wiring)
    assert reward.score(rollouts).isnan().tolist() == [False, True, False]
    unknown = take(rollouts, slice(1, 2))
    assert reward.score(unknown).isnan().tolist() == [True]
    with pytest.raises(
        RewardError, match=r"gave no score to 3 of its last 4 answers.*the prompt has no known solution"
    ):
        reward.score(unknown)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "exakt"}, "does not match any of the expected tags"),
        ({"kind": "exact", "case": True}, "Extra inputs are not permitted"),
        ({"kind": "regex", "pattern": "("}, "not a regular expression: missing )"),
        ({"kind": "exact", "extract": {"pattern": "a", "group": 1}}, "group 1 does not exist in the pattern 'a'"),
        ({"kind": "http", "url": "ftp://x"}, "expected http://HOST… or https://HOST…"),
        ({"kind": "judge", "url": "http://x", "model": "m", "lowest": 9, "highest": 1}, "lowest 9 must be below"),
        ({"kind": "mix", "parts": {}}, "at least 1 item"),
        ({"kind": "mix", "how": "gated", "parts": {"a": {"kind": "exact"}}}, "how: gated needs two parts and a gate"),
        (
            {"kind": "mix", "parts": {"style": {"kind": "exact"}}, "weights": {"stile": 1}},
            "weights: no part named 'stile' (did you mean 'style'?)",
        ),
        ({"kind": "mix", "how": "worst", "parts": {"a": {"kind": "exact"}}, "gate": "a"}, "gate is for how: gated"),
        ({"kind": "mix", "parts": {"a": {"kind": "exact"}}, "risky": "x"}, "risky is for how: gated"),
        ({"kind": "unit_tests", "timeout_s": 0}, "greater than 0"),
    ],
)
def test_settings_that_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as error:
        SETTINGS.validate_python(given)
    assert message in str(error.value)


@pytest.mark.parametrize("kind", ["exact", "numeric", "math", "json_schema", "unit_tests"])
def test_most_kinds_need_nothing_but_their_name(kind: str) -> None:
    assert SETTINGS.validate_python({"kind": kind}).kind == kind


def test_settings_and_text_sources_need_no_torch() -> None:
    modules: Sequence[str] = ("settings", "verifiable", "maths", "unit_tests", "http", "judge", "function", "failures")
    code = f"import sys, {', '.join(f'kedge.rewards.{name}' for name in modules)}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
