"""Answers depend on what they should and on nothing else, from the cache or not."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kedge.commands.sample import asked_prompts, find_model, refuse_target, rows_of, sampling_from
from kedge.core.errors import ConfigError, DataError, ModelError
from kedge.core.records import Rollouts
from kedge.data.examples import Message, Messages
from kedge.models.forward.heads import language_model
from kedge.models.loading.tiny import IM_END, make_tiny, tiny_model, tiny_tokenizer
from kedge.rollout.settings import SamplingSettings
from kedge.stages.rl import answering
from kedge.stages.rl.answering import Answering, answer
from kedge.stages.rl.divergence import log_ratios
from kedge.stages.rl.judge import find_judge
from kedge.stages.shared.device import checked_device

PROMPTS: list[Messages] = [
    (Message("user", "Which day?"),),
    (Message("system", "Be brief."), Message("user", "Is it red, or is it blue?")),
    (Message("user", "Hi"), Message("assistant", "Yo"), Message("user", "How much?")),
]
SAMPLING = SamplingSettings(temperature=0.7, max_new_tokens=9)


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Answering:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))
    folder = make_tiny(tmp_path / "model", seed=5, hidden=32)
    return Answering(model=str(folder), sampling=SAMPLING, answers=2, seed=11, device="cpu", dtype="float32")


@pytest.fixture
def generated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many rows were sampled, call by call."""
    seen: list[int] = []
    sample = answering._sampled  # pyright: ignore[reportPrivateUsage]

    def counted(*arguments: Any) -> Rollouts:
        rollouts = sample(*arguments)
        seen.append(len(rollouts.tokens_BT))
        return rollouts

    monkeypatch.setattr(answering, "_sampled", counted)
    return seen


def fields(rollouts: Rollouts) -> list[Any]:
    names = ("tokens_BT", "attention_mask_BT", "response_mask_BT", "behaviour_logp_BT", "group_B", "finished_B")
    return [getattr(rollouts, name).tolist() for name in names]


def test_the_second_time_answers_are_read_to_the_last_bit(asked: Answering, generated: list[int]) -> None:
    first, second = answer(asked, PROMPTS), answer(asked, PROMPTS)
    assert generated == [6]
    assert (first.is_cached, second.is_cached) == (False, True)
    assert fields(first.rollouts) == fields(second.rollouts)
    assert first.rollouts.group_B.tolist() == [0, 0, 1, 1, 2, 2]
    assert len(set(first.texts())) == 6


def test_without_the_cache_the_same_answers_are_sampled(asked: Answering, generated: list[int], tmp_path: Path) -> None:
    first = answer(asked, PROMPTS)
    shutil.rmtree(tmp_path / "cache")
    again = answer(replace(asked, rows=2), PROMPTS)
    assert generated == [6, 6]
    assert fields(again.rollouts)[0] == fields(first.rollouts)[0]
    torch.testing.assert_close(again.rollouts.behaviour_logp_BT, first.rollouts.behaviour_logp_BT, rtol=1e-4, atol=1e-5)


def test_answers_come_in_parts_that_make_no_difference(asked: Answering, tmp_path: Path) -> None:
    whole = answer(asked, PROMPTS)
    shutil.rmtree(tmp_path / "cache")
    seen: list[int] = []
    parts = answer(replace(asked, rows=1), [*PROMPTS, *PROMPTS], progress=seen.append)
    assert seen == [8, 12]
    assert parts.tokens()[:6] == whole.tokens()
    assert parts.rollouts.group_B.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert parts.rollouts.attention_mask_BT.sum(dim=1)[:6].tolist() == [
        len(answering.encode_prompt(tiny_tokenizer(), PROMPTS[row // 2])) + sampled
        for row, sampled in enumerate(whole.rollouts.response_mask_BT.sum(dim=1).tolist())
    ]


def test_a_row_does_not_depend_on_the_rows_after_it(asked: Answering) -> None:
    alone, among = answer(replace(asked, answers=1), PROMPTS[:1]), answer(asked, PROMPTS)
    assert alone.tokens()[0] == among.tokens()[0]


@pytest.mark.parametrize("what", ["seed", "sampling", "prompts", "answers", "template", "weights"])
def test_whatever_changes_an_answer_is_asked_again(
    asked: Answering, generated: list[int], tmp_path: Path, what: str
) -> None:
    answer(asked, PROMPTS)
    other: Callable[[], Any] = {
        "seed": lambda: answer(replace(asked, seed=12), PROMPTS),
        "sampling": lambda: answer(replace(asked, sampling=SAMPLING.model_copy(update={"top_k": 5})), PROMPTS),
        "prompts": lambda: answer(asked, [*PROMPTS[:2], (Message("user", "How many?"),)]),
        "answers": lambda: answer(replace(asked, answers=3), PROMPTS),
        "template": lambda: answer(replace(asked, chat_template="plain"), PROMPTS),
        "weights": lambda: answer(replace(asked, model=str(make_tiny(tmp_path / "b", seed=6, hidden=32))), PROMPTS),
    }[what]
    assert not other().is_cached
    assert len(generated) == 2


def identity(asked: Answering, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    rows = answering.repeated([[1]], ids=[0], answers=1)
    found = answering._identity(asked, tokenizer, rows)  # pyright: ignore[reportPrivateUsage]
    assert found is not None
    return found


def test_the_type_of_the_weights_and_the_end_of_a_turn_count_even_where_prompts_are_the_same(asked: Answering) -> None:
    own, other = tiny_tokenizer(), tiny_tokenizer()
    other.chat_template = f"{own.chat_template}{{{{ '' }}}}"
    before = identity(asked, own)
    half, ended = identity(replace(asked, dtype="float16"), own), identity(asked, other)
    assert {name for name in before if before[name] != half[name]} == {"dtype"}
    assert {name for name in before if before[name] != ended[name]} == {"template"}


def test_a_model_moved_to_another_folder_is_the_same_model(
    asked: Answering, generated: list[int], tmp_path: Path
) -> None:
    answer(asked, PROMPTS)
    shutil.copytree(asked.model, tmp_path / "copy")
    assert answer(replace(asked, model=str(tmp_path / "copy")), PROMPTS).is_cached
    assert generated == [6]


def test_what_was_said_is_without_the_token_that_ended_it(asked: Answering) -> None:
    longer = SAMPLING.model_copy(update={"max_new_tokens": 40, "temperature": 1.0})
    answered = answer(replace(asked, answers=60, sampling=longer), PROMPTS[:1])
    rollouts = answered.rollouts
    finished = [row for row, is_finished in enumerate(rollouts.finished_B.tolist()) if is_finished]
    assert 0 < len(finished) < 60  # some ended by themselves, some were cut off
    for row, tokens in enumerate(answered.tokens()):
        sampled = rollouts.tokens_BT[row][rollouts.response_mask_BT[row]].tolist()
        assert list(tokens) == (sampled[:-1] if row in finished else sampled)
        assert 258 not in tokens
    assert all(IM_END not in text for text in answered.texts())


def test_a_prompt_without_room_for_an_answer_is_named(asked: Answering) -> None:
    with pytest.raises(DataError, match=r"leave no room for an answer of 9 tokens.*row 2 \(group 1\): 1039"):
        answer(asked, [PROMPTS[0], (Message("user", "x" * 1020),)])


def ratios(other: PreTrainedModel, rollouts: Rollouts, temperature: float) -> Tensor:
    model = language_model(other)
    with model.active():
        return log_ratios(model, rollouts, temperature=temperature)


def test_the_log_ratio_is_that_of_two_plain_forward_passes(asked: Answering) -> None:
    rollouts = answer(asked, PROMPTS).rollouts
    own, other = tiny_model(seed=5, hidden=32), tiny_model(seed=6, hidden=32)
    expected = [
        sum(logprobs(own, row, mask)) - sum(logprobs(other, row, mask))
        for row, mask in zip(rollouts.tokens_BT, rollouts.response_mask_BT, strict=True)
    ]
    assert ratios(other, rollouts, 0.7).tolist() == pytest.approx(expected, rel=1e-3, abs=1e-4)
    assert ratios(own, rollouts, 0.7).tolist() == pytest.approx([0.0] * 6, abs=1e-4)


def test_the_log_ratio_does_not_depend_on_how_many_rows_are_read_at_once(
    asked: Answering, monkeypatch: pytest.MonkeyPatch
) -> None:
    rollouts, other = answer(asked, PROMPTS).rollouts, tiny_model(seed=6, hidden=32)
    together = ratios(other, rollouts, 1.0)
    monkeypatch.setattr("kedge.models.training.passes.CPU_WITHOUT_GRADIENTS", 100)
    torch.testing.assert_close(ratios(other, rollouts, 1.0), together, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def logprobs(model: Any, tokens_T: torch.Tensor, response_T: torch.Tensor) -> list[float]:
    logits_TV = model(input_ids=tokens_T[None]).logits[0].double() / 0.7
    logp_TV = logits_TV.log_softmax(-1)
    return [float(logp_TV[at - 1, tokens_T[at]]) for at in response_T.nonzero()[:, 0].tolist()]


def test_rows_can_be_asked_for_again(asked: Answering) -> None:
    answered = answer(asked, PROMPTS)
    rows = list(rows_of(answered, PROMPTS, model="mine", answers=2, seed=11))
    assert [row["id"] for row in rows] == ["0-0", "0-1", "1-0", "1-1", "2-0", "2-1"]
    assert rows[3]["prompt"][-1] == {"role": "user", "content": "Is it red, or is it blue?"}
    assert [row["answer"] for row in rows] == answered.texts()
    assert [row["length"] for row in rows] == [len(tokens) for tokens in answered.tokens()]
    assert {(row["seed"], row["model"]) for row in rows} == {(11, "mine")}


def folder_of(place: Path, architecture: str) -> None:
    (place / "model").mkdir(parents=True)
    (place / "model/config.json").write_text(json.dumps({"architectures": [architecture]}))


def test_a_run_stands_for_the_model_it_made(tmp_path: Path) -> None:
    folder_of(tmp_path / "run/sft", "LlamaForCausalLM")
    folder_of(tmp_path / "run/reward", "LlamaForSequenceClassification")
    assert find_model(str(tmp_path / "run/sft")) == str(tmp_path / "run/sft/model")
    assert find_model(str(tmp_path / "run")) == str(tmp_path / "run/sft/model")
    assert find_model("tiny") == "tiny"
    assert find_model(str(tmp_path / "run/sft/model")) == str(tmp_path / "run/sft/model")
    with pytest.raises(ModelError, match="no language model here"):
        find_model(str(tmp_path / "run/reward"))
    folder_of(tmp_path / "run/ppo", "GPT2LMHeadModel")
    with pytest.raises(ModelError, match=r"holds 2 models; name one: .*ppo, .*sft"):
        find_model(str(tmp_path / "run"))


def test_a_run_stands_for_the_reward_model_it_made(tmp_path: Path) -> None:
    run = tmp_path / "run"
    folder_of(run / "sft", "LlamaForCausalLM")
    with pytest.raises(ModelError, match="no reward model here"):
        find_judge(str(run))
    folder_of(run / "reward", "LlamaForSequenceClassification")
    expected = run / "reward/model"
    assert find_judge(str(run)) == find_judge(str(run / "reward")) == expected
    assert find_judge(str(expected)) == str(expected)
    assert find_judge("org/hub-model") == "org/hub-model"
    folder_of(run / "second", "LlamaForSequenceClassification")
    with pytest.raises(ModelError, match=r"holds 2 reward models; name one: .*reward, .*second"):
        find_judge(str(run))


def test_prompts_come_from_the_command_line_and_from_files(tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "Why?", "chosen": "So.", "rejected": "No."}\n')
    assert asked_prompts(["Hi"], str(file)) == [(Message("user", "Hi"),), (Message("user", "Why?"),)]
    file.write_text('{"prompt": "Why?"}\n{"prompt": 3}\n{"prompt": "How?"}\n')
    with pytest.raises(DataError, match=r"pairs.jsonl:2"):
        asked_prompts([], str(file))
    with pytest.raises(ConfigError, match="nothing to answer: give --prompt TEXT"):
        asked_prompts([], None)


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (
            lambda: sampling_from({"temperature": 0.0}),
            "--temperature: Input should be greater than or equal to",
        ),
        (lambda: sampling_from({"max_new_tokens": 0, "top_p": 2.0}), "--top-p: .*; --max-new-tokens: "),
        (lambda: checked_device("gpu"), "--device gpu: there is no such device"),
        (lambda: refuse_target(Path("a.txt")), "--to a.txt: the name must end in .jsonl"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_loaded(act: Callable[[], Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        act()


def test_options_that_were_not_given_are_those_of_the_settings() -> None:
    found = sampling_from({"top_k": None, "stop": ["a", "b"], "temperature": 0.5})
    assert (found.top_k, found.stop, found.temperature, found.max_new_tokens) == (None, ("a", "b"), 0.5, 256)
