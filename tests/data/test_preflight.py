from __future__ import annotations

import pytest
from tokenizers import normalizers, processors
from transformers import PreTrainedTokenizerFast

from kedge.core.chatml import CHATML
from kedge.core.findings import Finding
from kedge.data.preflight import preflight
from kedge.models.loading.tiny import tiny_tokenizer

UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def speaking(template: str | None) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def only(findings: list[Finding]) -> tuple[str, str, str]:
    """Level, code and message of the one finding that there must be."""
    (finding,) = findings
    return finding.level, finding.code, finding.message


def test_nothing_to_say_about_a_good_one() -> None:
    assert preflight(tiny_tokenizer(), config_vocab_size=259, window=1024) == []
    assert preflight(speaking(UNMARKED)) == []


def test_no_pad() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    level, code, message = only(preflight(tokenizer))
    assert (level, code) == ("info", "tokenizer.no_pad")
    assert "masks come from lengths" in message


def test_pad_is_eos_says_what_is_done() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = "<|im_end|>"
    level, code, message = only(preflight(tokenizer))
    assert (level, code) == ("info", "tokenizer.pad_is_eos")
    assert "both '<|im_end|>'" in message
    assert "Kedge masks by length, so the end token is trained" in message


def test_tokens_beyond_the_embedding() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["<new>"])
    (finding,) = preflight(tokenizer, config_vocab_size=259)
    assert (finding.level, finding.code) == ("fatal", "tokenizer.beyond_embedding")
    assert finding.message == "1 token(s) have ids up to 259, but the model has 259 embeddings; first '<new>'."
    assert preflight(tokenizer, config_vocab_size=260) == []


def test_window_beyond_the_tokenizer() -> None:
    assert only(preflight(tiny_tokenizer(), window=1025)) == (
        "warning",
        "tokenizer.window",
        "The tokenizer is meant for 1024 tokens, and the window is 1025.",
    )


def test_text_that_does_not_come_back() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("4", "")
    level, code, message = only(preflight(tokenizer))
    assert (level, code) == ("warning", "tokenizer.round_trip")
    assert message == (
        "Text does not survive the tokenizer: 'In 1984, 12 + 7 = 19.' comes back as 'In 198, 12 + 7 = 19.'."
    )


def test_no_template_is_fatal() -> None:
    level, code, message = only(preflight(speaking(None)))
    assert (level, code) == ("fatal", "template.unusable")
    assert "has no chat template" in message


def test_template_that_drops_content_is_fatal() -> None:
    template = UNMARKED.replace("message['content']", "message['content'][:3]")
    level, code, message = only(preflight(speaking(template)))
    assert (level, code) == ("fatal", "template.unusable")
    assert "drops or changes message 1" in message


def test_zero_mask_is_fatal() -> None:
    template = CHATML.replace("== 'assistant'", "== 'model'")
    assert only(preflight(speaking(template)))[:2] == ("fatal", "template.zero_mask")


def test_partial_mask() -> None:
    template = CHATML.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last")
    level, code, message = only(preflight(speaking(template)))
    assert (level, code) == ("warning", "template.partial_mask")
    assert "marks 1 of 2 answers" in message
    assert "'Apple 12, pear, fig 907.'" in message


def test_end_token_left_out_of_the_marks_is_fatal() -> None:
    template = CHATML.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
    level, code, message = only(preflight(speaking(template)))
    assert (level, code) == ("fatal", "template.stop_not_trained")
    assert message == (
        "An answer is trained up to '.', and its end token '<|im_end|>' is left out: "
        "the model would never learn to stop."
    )


@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marked", "unmarked"])
def test_no_end_token_at_all_is_fatal(template: str) -> None:
    level, code, message = only(preflight(speaking(template.replace("<|im_end|>", ""))))
    assert (level, code) == ("fatal", "template.no_stop")
    assert "no end token follows" in message


def test_end_of_turn_that_is_not_the_end_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|im_start|>"
    level, code, message = only(preflight(tokenizer))
    assert (level, code) == ("warning", "template.stop_differs")
    assert "ends a turn with '<|im_end|>', but the tokenizer's end token is '<|im_start|>'" in message


def test_no_end_token_named() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    level, code, message = only(preflight(tokenizer))
    assert (level, code) == ("warning", "tokenizer.no_eos")
    assert "the template ends a turn with '<|im_end|>'" in message


def test_generation_prompt_that_is_no_prefix_is_fatal() -> None:
    template = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant:\n'")
    level, code, message = only(preflight(speaking(template)))
    assert (level, code) == ("fatal", "template.prompt_not_prefix")
    assert "<|im_start|>assistant:" in message
    unmarked = template.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    assert only(preflight(speaking(unmarked)))[:2] == ("fatal", "template.unusable")


def test_doubled_start_token() -> None:
    tokenizer = speaking("{{ bos_token }}" + CHATML)
    tokenizer.bos_token = "<|im_start|>"
    assert only(preflight(tokenizer)) == (
        "fatal",
        "template.doubled_bos",
        "The template writes the start token '<|im_start|>' twice.",
    )


def test_start_token_of_the_tokenizer_is_not_added() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", 257)]
    )
    level, code, message = only(preflight(tokenizer))
    assert (level, code) == ("info", "tokenizer.adds_bos")
    assert "Kedge tokenises rendered text as it is" in message


def test_default_system_prompt_is_quoted() -> None:
    opening = "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are kind.<|im_end|>\n' }}{% endif %}"
    (finding,) = preflight(speaking(opening + CHATML))
    assert (finding.level, finding.code) == ("info", "template.default_system")
    assert finding.message == "Without a system message the template adds its own: 'You are kind.'."


def test_date_in_the_template() -> None:
    template = "{{ '<|im_start|>date\n' + strftime_now('%Y') + '<|im_end|>\n' }}" + CHATML
    assert only(preflight(speaking(template)))[:2] == ("warning", "template.date")


def test_trimming_and_dropped_thoughts() -> None:
    trims = CHATML.replace("message['content']", "(message['content'] | trim)")
    assert only(preflight(speaking(trims)))[:2] == ("info", "template.trims")
    drops = CHATML.replace("message['content']", "message['content'].split('</think>')[-1]")
    assert only(preflight(speaking(drops)))[:2] == ("warning", "template.drops_thoughts")
