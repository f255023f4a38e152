"""Small parts that stages share: texts as tokens, chunks of a pass, and what the checks of settings say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kedge.core.errors import DataError
from kedge.core.stage import Stage
from kedge.models.loading.tiny import tiny_tokenizer
from kedge.stages.best_of_n.settings import STAGE as BEST_OF_N
from kedge.stages.evaluate.settings import STAGE as EVALUATE
from kedge.stages.reward.settings import STAGE as REWARD
from kedge.stages.rl.prompts import read_prompts
from kedge.stages.shared.chunks import token_chunks
from kedge.stages.shared.encoding import encode_demonstrations

WriteRows = Callable[..., str]


@pytest.fixture
def write_rows(tmp_path: Path) -> WriteRows:
    def write(*rows: Any) -> str:
        file = tmp_path / "rows.jsonl"
        file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
        return str(file)

    return write


def test_every_sequence_is_in_exactly_one_chunk_and_padded_chunks_keep_to_the_limit() -> None:
    lengths = [5, 1, 7, 7, 2, 12, 3]
    chunks = list(token_chunks(lengths, max_tokens=14))
    assert [index for chunk in chunks for index in chunk] == [5, 2, 3, 0, 6, 4, 1]
    assert [len(chunk) for chunk in chunks] == [1, 2, 2, 2]
    assert all(len(chunk) * max(lengths[index] for index in chunk) <= 14 for chunk in chunks)


def test_a_conversation_of_exactly_the_longest_length_is_learnt_from(write_rows: WriteRows) -> None:
    source = write_rows({"prompt": "a", "completion": "b"}, {"prompt": "a", "completion": "bc"})
    longest = len(encode_demonstrations(source, tiny_tokenizer(), max_length=1000).sequences[0].tokens)
    encoded = encode_demonstrations(source, tiny_tokenizer(), max_length=longest, samples=5)
    assert (len(encoded.sequences), encoded.num_too_long, len(encoded.prompts)) == (1, 1, 1)
    with pytest.raises(DataError, match="and 2 are longer"):
        encode_demonstrations(source, tiny_tokenizer(), max_length=longest - 1)


@pytest.mark.parametrize("samples", [0, 1, 2])
def test_so_many_prompts_are_kept_for_samples(write_rows: WriteRows, samples: int) -> None:
    rows = [{"prompt": letter, "completion": "x"} for letter in "abc"]
    encoded = encode_demonstrations(write_rows(*rows), tiny_tokenizer(), max_length=100, samples=samples)
    texts = [str(tiny_tokenizer().decode(list(tokens))) for tokens in encoded.prompts]
    assert [text.removeprefix("<|im_start|>user\n")[0] for text in texts] == ["a", "b", "c"][:samples]


def test_a_broken_prompt_is_set_aside_and_the_others_are_asked(write_rows: WriteRows, tmp_path: Path) -> None:
    aside = tmp_path / "aside.jsonl"
    source = write_rows(*({"prompt": f"good {number}"} for number in range(99)), "{not json")
    dataset = read_prompts(source, tiny_tokenizer(), batch=1, answers=1, max_tokens=50, seed=0, set_aside=aside)
    assert [prompt.prompt[-1].content for prompt in dataset.prompts] == [f"good {number}" for number in range(99)]
    assert "{not json" in aside.read_text()


@pytest.mark.parametrize(
    ("stage", "settings", "code", "where", "fix"),
    [
        (REWARD, {"kind": "reward", "data": ["a", "b"]}, "reward.objectives", "objectives", "one file for each"),
        (
            REWARD,
            {"kind": "reward", "data": "a", "lora": {"rank": 2}, "frozen_layers": 1},
            "reward.frozen_layers",
            "frozen_layers",
            "leave out",
        ),
        (
            BEST_OF_N,
            {"kind": "best_of_n", "prompts": "p", "reward": "r", "method": "rejection", "sampling": {"top_k": 1}},
            "best_of_n.greedy",
            "sampling.top_k",
            "leave top_k out",
        ),
        (
            EVALUATE,
            {"kind": "evaluate", "models": ["a", "b", "a"], "prompts": "p"},
            "evaluate.models",
            "models",
            "name each model once",
        ),
    ],
)
def test_settings_that_cannot_be_are_fatal_before_the_run_and_say_what_to_do(
    stage: Stage, settings: dict[str, Any], code: str, where: str, fix: str
) -> None:
    (finding,) = stage.check(stage.settings.model_validate(settings))
    assert (finding.level, finding.code, finding.where) == ("fatal", code, where)
    assert fix in finding.fix


@pytest.mark.parametrize(
    ("given", "is_said"),
    [({}, True), ({"reward": "r"}, False), ({"gold": "g"}, False), ({"reward": "r", "gold": "g"}, False)],
)
def test_an_evaluation_that_nobody_scores_is_told(given: dict[str, str], is_said: bool) -> None:
    settings = EVALUATE.settings.model_validate({"kind": "evaluate", "models": ["a"], "prompts": "p", **given})
    assert any("nobody scores" in line for line in EVALUATE.explain(settings)) == is_said
