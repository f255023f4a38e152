"""From settings to scores: a reward model gives the same number on tokens, on text and in plain transformers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from kedge.core.errors import ConfigError
from kedge.core.records import Rollouts
from kedge.core.world import ALONE
from kedge.data.template import apply_template, template_hash
from kedge.models.loading.tiny import IM_END, make_tiny, tiny_tokenizer
from kedge.models.reward.ensemble import Ensemble, save_ensemble
from kedge.models.reward.reward_files import build, save
from kedge.models.reward.reward_model import RewardModel
from kedge.models.settings import MeanOfMembers, Truncate
from kedge.rewards.failures import FailureCounter, Reward
from kedge.rewards.rollouts import PromptRecord
from kedge.rewards.settings import FailureSettings, ModelSource, RewardSourceSettings
from kedge.stages.rl.judge import judge_of
from kedge.stages.rl.reward import ModelOnTokens, closed, last_tokens, open_reward, tokenizer_hash
from kedge.stages.shared.context import Context

SETTINGS: TypeAdapter[Any] = TypeAdapter(RewardSourceSettings)
CASES = [
    PromptRecord(prompt=(("user", "Which day?"),)),
    PromptRecord(prompt=(("system", "Be brief."), ("user", "Is it red?"))),
]
ANSWERS = [("It ships Friday.", True), ("It may be red, or bl", False)]
END = 258


@pytest.fixture(scope="module")
def models() -> tuple[RewardModel, RewardModel]:
    return reward_model(seed=3), reward_model(seed=8)


def reward_model(*, seed: int, max_length: int = 192, truncate: Truncate = "left") -> RewardModel:
    made = build(make_tiny(), seed=seed, dtype="float32")
    facts = replace(made.facts, template_hash=template_hash(made.tokenizer), max_length=max_length, truncate=truncate)
    return replace(made, facts=facts)


def sampled(tokenizer: PreTrainedTokenizerBase) -> Rollouts:
    """The answers as a policy with this tokenizer would have sampled them: the first ended, the second was cut off."""
    rows: list[tuple[list[int], list[int]]] = []
    for case, (text, is_finished) in zip(CASES, ANSWERS, strict=True):
        messages = [{"role": role, "content": content} for role, content in case.prompt]
        opening: Any = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        answer = tokenizer(text, add_special_tokens=False)["input_ids"] + ([END] if is_finished else [])
        rows.append((tokenizer(opening, add_special_tokens=False)["input_ids"], answer))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens_BT = torch.full((2, width), 256)
    attention_BT, response_BT = torch.zeros(2, width).bool(), torch.zeros(2, width).bool()
    for b, (prompt, answer) in enumerate(rows):
        length = len(prompt) + len(answer)
        tokens_BT[b, :length] = torch.tensor(prompt + answer)
        attention_BT[b, :length], response_BT[b, len(prompt) : length] = True, True
    return Rollouts(
        tokens_BT=tokens_BT,
        attention_mask_BT=attention_BT,
        response_mask_BT=response_BT,
        behaviour_logp_BT=torch.zeros(2, width),
        group_B=torch.tensor([0, 1]),
        finished_B=torch.tensor([is_finished for _, is_finished in ANSWERS]),
        version=0,
    )


def by_transformers(folder: Path, *, last: int = 10_000) -> list[float]:
    """The logits of each whole conversation in the reward model's own template, one text at a time."""
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(folder)
    model: Any = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    found: list[float] = []
    for case, (text, _) in zip(CASES, ANSWERS, strict=True):
        messages = [{"role": role, "content": content} for role, content in case.prompt]
        messages.append({"role": "assistant", "content": text})
        rendered = tokenizer.apply_chat_template(messages, tokenize=False).rstrip("\n")
        tokens = tokenizer(rendered, add_special_tokens=False)["input_ids"][-last:]
        with torch.no_grad():
            found.append(model(input_ids=torch.tensor([tokens])).logits[0, 0].item())
    return found


class Told:
    """A stage's context: inputs by field, and what was said."""

    def __init__(self, inputs: Mapping[str, str], folder: Path) -> None:
        self.events: list[tuple[str, str, str]] = []
        self.context = cast(
            Context,
            SimpleNamespace(
                input=inputs.__getitem__,
                event=self._event,
                folder=folder / "run",
                recipe_folder=folder,
                seed=7,
                world=ALONE,
            ),
        )

    def _event(self, level: str, code: str, message: str, **_: Any) -> None:
        self.events.append((level, code, message))


Open = Callable[..., tuple[Reward, list[tuple[str, str, str]]]]


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    def run(
        settings: Any,
        inputs: Mapping[str, str],
        *,
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_tokens: int | None = None,
    ) -> tuple[Reward, list[tuple[str, str, str]]]:
        told = Told(inputs, tmp_path)
        reward = open_reward(
            told.context,
            settings,
            field="reward",
            tokenizer=tokenizer or tiny_tokenizer(),
            cases=CASES.__getitem__,
            failures=FailureSettings(),
            device="cpu",
            max_tokens=max_tokens,
        )
        return reward, told.events

    return run


def test_a_reward_model_reads_tokens_where_it_speaks_the_policy_s_language(
    opened: Open, models: tuple[RewardModel, RewardModel], tmp_path: Path
) -> None:
    save(models[0], tmp_path / "rm")
    reward, events = opened("reward", {"reward": str(tmp_path / "rm")})
    scores_B = reward.score(sampled(tiny_tokenizer()))
    assert events == []
    # The second answer was cut off: the end-of-turn token at which the score is read is put behind it.
    assert scores_B.tolist() == pytest.approx(by_transformers(tmp_path / "rm"), rel=1e-4, abs=1e-6)
    assert [
        (counter.source, counter.report().rows, counter.report().failed) for counter in reward.failure_counters
    ] == [("reward", 2, 0)]


@pytest.mark.parametrize("way", ["template", "tokenizer"])
def test_it_reads_text_where_it_does_not(
    opened: Open, models: tuple[RewardModel, RewardModel], tmp_path: Path, way: str
) -> None:
    save(models[0], tmp_path / "rm")
    own = tiny_tokenizer()
    if way == "template":
        tokenizer = apply_template(own, "plain")
    else:
        own.add_tokens(["Friday"])  # pyright: ignore[reportUnknownMemberType]
        tokenizer = own
    reward, events = opened("reward", {"reward": str(tmp_path / "rm")}, tokenizer=tokenizer)
    scores_B = reward.score(sampled(tokenizer))
    assert [(level, code) for level, code, _ in events] == [("info", "reward.on_text")]
    assert events[0][2].endswith(f"its {'chat template' if way == 'template' else way} is not that of the model")
    assert scores_B.tolist() == pytest.approx(by_transformers(tmp_path / "rm"), rel=1e-4, abs=1e-6)


def test_an_ensemble_says_how_far_its_members_are_apart(
    opened: Open, models: tuple[RewardModel, RewardModel], tmp_path: Path
) -> None:
    save_ensemble(Ensemble(members=models, combine=MeanOfMembers()), tmp_path / "rms")
    settings = SETTINGS.validate_python({"kind": "model", "from": "judges", "rows": 1})
    reward, _ = opened(settings, {"reward.from": str(tmp_path / "rms")})
    scores_B = reward.score(sampled(tiny_tokenizer()))
    one, other = (by_transformers(tmp_path / "rms" / name) for name in ("member-0", "member-1"))
    assert scores_B.tolist() == pytest.approx(
        [(a + b) / 2 for a, b in zip(one, other, strict=True)], rel=1e-4, abs=1e-6
    )
    spread_B = cast(Any, reward.source).disagreement_B
    assert spread_B.tolist() == pytest.approx([abs(a - b) / 2 for a, b in zip(one, other, strict=True)], rel=1e-3)
    reward.score(sampled(tiny_tokenizer()))
    assert cast(Any, reward.source).disagreement_B.shape == (2,)
    facts = cast(Any, reward.source).trust_metrics(torch.tensor([0.0, 0.0]))
    assert facts == {"reward/disagreement": pytest.approx(cast(Any, reward.source).disagreement_B.mean().item())}


def test_members_are_combined_as_the_source_says_and_a_single_model_has_none_to_combine(
    opened: Open, models: tuple[RewardModel, RewardModel], tmp_path: Path
) -> None:
    save_ensemble(Ensemble(members=models, combine=MeanOfMembers()), tmp_path / "rms")
    one, other = (by_transformers(tmp_path / "rms" / name) for name in ("member-0", "member-1"))
    lowest = [min(pair) for pair in zip(one, other, strict=True)]
    careful = [(a + b) / 2 - 3 * ((a - b) / 2) ** 2 for a, b in zip(one, other, strict=True)]
    for combine, expected in (
        ({"kind": "worst_case"}, lowest),
        ({"kind": "uncertainty_weighted", "coef": 3.0}, careful),
    ):
        settings = SETTINGS.validate_python({"kind": "model", "from": "judges", "combine": combine})
        reward, _ = opened(settings, {"reward.from": str(tmp_path / "rms")})
        assert reward.score(sampled(tiny_tokenizer())).tolist() == pytest.approx(expected, rel=1e-3, abs=1e-6)
    single = SETTINGS.validate_python({"kind": "model", "from": "judge", "combine": {"kind": "worst_case"}})
    with pytest.raises(ConfigError, match="is one reward model; leave `combine` out"):
        opened(single, {"reward.from": str(tmp_path / "rms" / "member-0")})


def test_the_models_of_a_mix_are_found_by_their_place_in_the_recipe(
    opened: Open, models: tuple[RewardModel, RewardModel], tmp_path: Path
) -> None:
    save(models[0], tmp_path / "rm")
    (tmp_path / "mine.py").write_text("def brief(answer):\n    return -len(answer.text)\n")
    settings = SETTINGS.validate_python(
        {
            "kind": "mix",
            "weights": {"style": 2.0},
            "parts": {
                "style": {"kind": "model", "from": "judge"},
                "brief": {"kind": "function", "path": "mine.py:brief"},
            },
        }
    )
    reward, _ = opened(settings, {"reward.parts.style.from": str(tmp_path / "rm")})
    style = by_transformers(tmp_path / "rm")
    expected = [2 * style[0] - len(ANSWERS[0][0]), 2 * style[1] - len(ANSWERS[1][0])]
    assert reward.score(sampled(tiny_tokenizer())).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)
    assert [counter.source for counter in reward.failure_counters] == ["reward.style", "reward.brief"]


def test_longer_texts_lose_their_beginning_as_in_training(opened: Open, tmp_path: Path) -> None:
    save(reward_model(seed=3, max_length=24), tmp_path / "rm")
    reward, events = opened("reward", {"reward": str(tmp_path / "rm")}, max_tokens=25)
    assert reward.score(sampled(tiny_tokenizer())).tolist() == pytest.approx(
        by_transformers(tmp_path / "rm", last=24), rel=1e-4, abs=1e-6
    )
    place = tmp_path / "rm"
    assert events == [
        (
            "warning",
            "reward.window",
            f"reward: prompt and answer may have 25 tokens, and {place} reads 24; "
            "longer texts lose their beginning, as in its training",
        )
    ]


def test_a_model_that_refuses_long_texts_is_asked_before_anything_is_sampled(opened: Open, tmp_path: Path) -> None:
    save(reward_model(seed=3, max_length=100, truncate="refuse"), tmp_path / "rm")
    inputs = {"reward": str(tmp_path / "rm")}
    with pytest.raises(ConfigError, match=r"answer may have 100 tokens, .* reads 100, .* and refuses longer"):
        opened("reward", inputs, max_tokens=100)
    reward, events = opened("reward", inputs, max_tokens=99)
    assert events == []
    expected = by_transformers(tmp_path / "rm")
    assert reward.score(sampled(tiny_tokenizer())).tolist() == pytest.approx(expected, rel=1e-4, abs=1e-6)


def test_where_lengths_are_unknown_a_refused_text_has_no_score(opened: Open, tmp_path: Path) -> None:
    # As the judge reads them, the two conversations have 46 and 69 tokens.
    save(reward_model(seed=3, max_length=68, truncate="refuse"), tmp_path / "rm")
    reward, events = opened("reward", {"reward": str(tmp_path / "rm")})
    scores = reward.score(sampled(tiny_tokenizer())).tolist()
    assert events[0][1] == "reward.on_text"
    assert scores[0] == pytest.approx(by_transformers(tmp_path / "rm")[0], rel=1e-4, abs=1e-6)
    assert math.isnan(scores[1])
    assert "69 tokens is longer than the window of 68" in next(iter(reward.failure_counters[0].report().reasons))


def rollouts(rows: Sequence[Sequence[int]], lengths: Sequence[int]) -> Rollouts:
    tokens_BT = torch.tensor(rows)
    mask_BT = torch.arange(tokens_BT.shape[1]) < torch.tensor(lengths)[:, None]
    return Rollouts(
        tokens_BT=tokens_BT,
        attention_mask_BT=mask_BT,
        response_mask_BT=mask_BT & (torch.arange(tokens_BT.shape[1]) > 0),
        behaviour_logp_BT=torch.zeros(tokens_BT.shape),
        group_B=torch.arange(len(rows)),
        finished_B=torch.ones(len(rows)).bool(),
        version=4,
    )


def test_every_row_ends_in_the_token_at_which_it_is_scored() -> None:
    """Row 0 was cut off, row 1 ended as it should, row 2 with another stop token, row 3 was cut off early."""
    given = rollouts([[5, 6, 7, 8], [5, 6, 99, 0], [5, 6, 9, 0], [5, 6, 0, 0]], lengths=[4, 3, 3, 2])
    found = closed(given, ends=[9, 99], end=99)
    assert found.tokens_BT.tolist() == [[5, 6, 7, 8, 99], [5, 6, 99, 0, 0], [5, 6, 99, 0, 0], [5, 6, 99, 0, 0]]
    assert found.attention_mask_BT.sum(dim=1).tolist() == [5, 3, 3, 3]
    assert closed(found, ends=[9, 99], end=99) is found


def test_the_last_tokens_of_each_row() -> None:
    given = rollouts([[1, 2, 3, 4, 5], [1, 2, 0, 0, 0], [1, 2, 3, 4, 0]], lengths=[5, 2, 4])
    found = last_tokens(given, 3)
    assert found.tokens_BT[found.attention_mask_BT].tolist() == [3, 4, 5, 1, 2, 2, 3, 4]
    assert found.attention_mask_BT.tolist() == [[True] * 3, [True, True, False], [True] * 3]
    assert found.response_mask_BT.tolist() == [[True] * 3, [False, True, False], [True] * 3]
    assert last_tokens(given, 5) is given


def test_padding_does_not_make_a_tokenizer_another_one() -> None:
    own, other = tiny_tokenizer(), tiny_tokenizer()
    other.pad_token = IM_END
    assert tokenizer_hash(own) == tokenizer_hash(other)
    other.add_tokens(["Friday"])  # pyright: ignore[reportUnknownMemberType]
    assert tokenizer_hash(own) != tokenizer_hash(other)


def test_scores_outside_of_what_training_saw_are_counted(tmp_path: Path) -> None:
    """Members saw -1 to 2 and -0.5 to 3: together -1 to 3."""
    own = [build(make_tiny(tmp_path / "policy"), seed=seed, dtype="float32") for seed in (1, 2)]
    ranges = ((-1.0, 2.0), (-0.5, 3.0))
    members = tuple(
        replace(member, facts=replace(member.facts, score_ranges=(bounds,)))
        for member, bounds in zip(own, ranges, strict=True)
    )
    judge = judge_of("here", members, MeanOfMembers(), base=members[0].model)
    settings = ModelSource.model_validate({"kind": "model", "from": "here"})
    source = ModelOnTokens(judge, settings, FailureCounter("reward", FailureSettings()), ends=frozenset({258}))
    facts = source.trust_metrics(torch.tensor([-1.5, -1.0, 2.5, 3.0, 3.5]))
    assert facts == {"reward/out_of_range": pytest.approx(0.4)}


def test_how_far_members_are_apart_is_said_of_the_right_rows(tmp_path: Path) -> None:
    """Rows are scored longest first: what is said of them stays in their order, whatever is scored at once."""
    members = tuple(build(make_tiny(tmp_path / "policy"), seed=seed, dtype="float32") for seed in (1, 2))
    judge = judge_of("here", members, MeanOfMembers(), base=members[0].model)
    given = rollouts([[1, 2, 258, 0, 0], [5, 3, 9, 7, 258], [4, 258, 0, 0, 0]], lengths=[3, 5, 2])
    each_MB = torch.stack([one.score_tokens(given.tokens_BT, given.attention_mask_BT)[:, 0] for one in members])
    for rows in ("auto", 2, 1):
        settings = ModelSource.model_validate({"kind": "model", "from": "here", "rows": rows})
        source = ModelOnTokens(judge, settings, FailureCounter("reward", FailureSettings()), ends=frozenset({258}))
        torch.testing.assert_close(source.score(given), each_MB.mean(dim=0), rtol=1e-5, atol=1e-6)
        assert source.disagreement_B is not None
        torch.testing.assert_close(source.disagreement_B, each_MB.std(dim=0, correction=0), rtol=1e-5, atol=1e-6)
