"""Conversations without the marks of their templates, whoever wrote them."""

from __future__ import annotations

import pytest

from kedge.report.chat import Turn, answer_text, in_one_line, turns
from kedge.report.pages import conversation

TEMPLATES = {
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHow much?<|im_end|>\n<|im_start|>assistant\n",
    "llama 3": "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHow much?<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n",
    "zephyr": "<|system|>\nBe brief.</s>\n<|user|>\nHow much?</s>\n<|assistant|>\n",
    "gemma": "<bos><start_of_turn>system\nBe brief.<end_of_turn>\n<start_of_turn>user\nHow much?<end_of_turn>\n"
    "<start_of_turn>model\n",
}


@pytest.mark.parametrize("template", TEMPLATES)
def test_marks_of_templates_become_turns(template: str) -> None:
    assert turns(TEMPLATES[template]) == (Turn(role="system", text="Be brief."), Turn(role="user", text="How much?"))
    assert in_one_line(TEMPLATES[template]) == "system: Be brief. user: How much?"


@pytest.mark.parametrize("text", ["a < b and c > d", "", "user\nhow?", "1 <| 2 |> 3", "[INSTANT]"])
def test_other_text_stays_as_it_is(text: str) -> None:
    assert "".join(turn.text for turn in turns(text)) == text
    assert answer_text(text) == text


def test_a_model_that_plays_both_sides_is_shown() -> None:
    answer = "Ten.<|im_end|>\n<|im_start|>user\nAnd now?<|im_end|>"
    assert answer_text(answer) == "Ten.⟨im_end⟩\n⟨im_start⟩user\nAnd now?"


def test_turns_are_escaped() -> None:
    page = conversation([Turn(role="user", text="<script>alert(1)</script>")])
    assert "<script>" not in page
