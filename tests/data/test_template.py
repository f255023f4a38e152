from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kedge.core.chatml import CHATML as TEMPLATE
from kedge.core.errors import DataError, ModelError
from kedge.data.converting import to_fields
from kedge.data.examples import Demonstration, Message, Messages, Origin
from kedge.data.formats import parse, recognise
from kedge.data.messages import as_messages, with_tools
from kedge.data.template import (
    CHATML,
    PLAIN,
    Encoded,
    apply_template,
    encode_conversation,
    encode_prompt,
    render,
    show_masks,
    stop_ids,
    template_hash,
)
from kedge.models.loading.tiny import tiny_tokenizer

TALK: Messages = (
    Message("system", "Be brief."),
    Message("user", "Hi é"),
    Message("assistant", "Yo 🙂"),
    Message("user", "Bye"),
    Message("assistant", "So long"),
)
TALK_TEXT = (
    "<|im_start|>system\nBe brief.<|im_end|>\n"
    "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\nYo 🙂<|im_end|>\n"
    "<|im_start|>user\nBye<|im_end|>\n<|im_start|>assistant\nSo long<|im_end|>\n"
)
UNMARKED = CHATML.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def speaking(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def by_bytes(text: str) -> list[int]:
    """Tiny's token ids, found without its tokenizer."""
    for name, byte in (("<|im_start|>", "\x01"), ("<|im_end|>", "\x02")):
        text = text.replace(name, byte)
    return [{1: 257, 2: 258}.get(byte, byte) for byte in text.encode()]


def trained_runs(tokenizer: PreTrainedTokenizerFast, encoded: Encoded) -> list[str]:
    marked = [token if on else 256 for token, on in zip(encoded.tokens, encoded.assistant_mask, strict=True)]
    return [run for run in tokenizer.decode(marked).split("<|pad|>") if run]


def test_tiny_speaks_the_built_in_chatml() -> None:
    assert TEMPLATE == CHATML


def test_render() -> None:
    tokenizer = tiny_tokenizer()
    assert render(tokenizer, TALK, add_generation_prompt=False) == TALK_TEXT
    assert render(tokenizer, TALK[1:2], add_generation_prompt=True) == (
        "<|im_start|>user\nHi é<|im_end|>\n<|im_start|>assistant\n"
    )


def test_golden_tokens_of_a_prompt() -> None:
    # <|im_start|> u s e r \n H i <|im_end|> \n <|im_start|> a s s i s t a n t \n
    assert encode_prompt(tiny_tokenizer(), (Message("user", "Hi"),)) == [
        *(257, 117, 115, 101, 114, 10, 72, 105, 258, 10),
        *(257, 97, 115, 115, 105, 115, 116, 97, 110, 116, 10),
    ]


@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marked", "unmarked"])
def test_mask_at_every_index(template: str) -> None:
    encoded = encode_conversation(speaking(template), TALK)
    assert encoded.tokens == by_bytes(TALK_TEXT)
    answers = ["Yo 🙂<|im_end|>", "So long<|im_end|>"]
    expected: list[bool] = []
    rest = TALK_TEXT
    for answer in answers:
        before, _, rest = rest.partition(answer)
        expected += [False] * len(by_bytes(before)) + [True] * len(by_bytes(answer))
    expected += [False] * len(by_bytes(rest))
    assert encoded.assistant_mask == expected
    assert trained_runs(speaking(template), encoded) == answers


@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marked", "unmarked"])
def test_earlier_answers_can_be_context_only(template: str) -> None:
    tokenizer = speaking(template)
    assert trained_runs(tokenizer, encode_conversation(tokenizer, TALK, trained_from=3)) == ["So long<|im_end|>"]
    assert trained_runs(tokenizer, encode_conversation(tokenizer, TALK, trained_from=5)) == []


def test_an_answer_that_ends_in_a_wide_character_is_trained_to_its_last_byte() -> None:
    # marks around the content alone, so that the last marked character takes four tokens
    template = CHATML.replace(" + '<|im_end|>' }}{% endgeneration %}", " }}{% endgeneration %}{{ '<|im_end|>' }}")
    tokenizer = speaking(template)
    encoded = encode_conversation(tokenizer, TALK)
    assert trained_runs(tokenizer, encoded) == ["Yo 🙂", "So long"]


def test_a_prompt_is_the_beginning_of_its_conversation() -> None:
    tokenizer = tiny_tokenizer()
    prompt, whole = encode_prompt(tokenizer, TALK[:2]), encode_conversation(tokenizer, TALK[:3])
    assert whole.tokens[: len(prompt)] == prompt
    assert whole.assistant_mask.index(True) == len(prompt)


def test_no_start_token_is_added() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|pad|> $A", special_tokens=[("<|pad|>", 256)]
    )
    assert tokenizer("a")["input_ids"] == [256, 97]
    assert encode_conversation(tokenizer, TALK).tokens == by_bytes(TALK_TEXT)
    assert 256 not in encode_prompt(tokenizer, TALK[:2])


def test_what_follows_the_end_of_turn_is_not_trained() -> None:
    tokenizer = speaking(UNMARKED.replace("{{ '\n' }}", "{{ '\n---\n' }}"))
    assert trained_runs(tokenizer, encode_conversation(tokenizer, TALK)) == ["Yo 🙂<|im_end|>", "So long<|im_end|>"]


def test_control_text_inside_an_answer_does_not_end_it() -> None:
    tokenizer = speaking(UNMARKED)
    conversation = (Message("user", "Quote it"), Message("assistant", "<|im_end|> ends"))
    assert trained_runs(tokenizer, encode_conversation(tokenizer, conversation)) == ["<|im_end|> ends<|im_end|>"]


def test_without_answers_nothing_is_trained() -> None:
    assert not any(encode_conversation(tiny_tokenizer(), TALK[:2]).assistant_mask)


def test_trimmed_spaces_are_accepted() -> None:
    tokenizer = speaking(UNMARKED.replace("message['content']", "(message['content'] | trim)"))
    talk = (Message("user", " Hi\n"), Message("assistant", "  Yo "))
    assert trained_runs(tokenizer, encode_conversation(tokenizer, talk)) == ["Yo<|im_end|>"]


def test_dropped_thoughts_are_an_error() -> None:
    # the way of Qwen3: thoughts stay in the last answer only
    strip = "(message['content'].split('</think>')[-1] if not loop.last else message['content'])"
    talk = (*TALK[:2], Message("assistant", "<think>hm</think>Yo"), *TALK[3:])
    for template in (UNMARKED, CHATML):
        with pytest.raises(ModelError, match=r"drops or changes message 3 \(assistant: '<think>hm</think>Yo'\)"):
            encode_conversation(speaking(template.replace("message['content']", strip)), talk)


def test_dropped_system_message_is_an_error() -> None:
    template = UNMARKED.replace("in messages", "in messages if message['role'] != 'system'")
    with pytest.raises(ModelError, match=r"drops or changes message 1 \(system: 'Be brief\.'\)"):
        encode_conversation(speaking(template), TALK)


def test_a_turn_that_is_written_differently_later_is_an_error() -> None:
    template = UNMARKED.replace("{{ '\n' }}", "{{ '!' if loop.last else '\n' }}")
    with pytest.raises(
        ModelError, match=r"up to the opening of message 3 it gives '!<\|im_start\|>.*' where .* has '\\n<\|im_start"
    ):
        encode_conversation(speaking(template), TALK)
    only_answers = "{{ '!' if loop.last and message['role'] == 'assistant' else '\n' }}"
    with pytest.raises(
        ModelError, match=r"up to message 3 it gives '!' where the whole conversation has '\\n<\|im_start"
    ):
        encode_conversation(speaking(UNMARKED.replace("{{ '\n' }}", only_answers)), TALK)


def test_conversation_that_starts_with_the_assistant() -> None:
    talk = (Message("assistant", "Welcome"), *TALK[1:3])
    assert trained_runs(tiny_tokenizer(), encode_conversation(tiny_tokenizer(), talk)) == [
        "Welcome<|im_end|>",
        "Yo 🙂<|im_end|>",
    ]
    with pytest.raises(
        DataError, match=r"starts with the assistant, and without .* put a user or system message first"
    ):
        encode_conversation(speaking(UNMARKED), talk)


def test_marks_on_some_turns_only() -> None:
    template = CHATML.replace("message['role'] == 'assistant'", "message['role'] == 'assistant' and loop.last")
    tokenizer = speaking(template)
    assert trained_runs(tokenizer, encode_conversation(tokenizer, TALK)) == ["So long<|im_end|>"]
    with pytest.raises(ModelError, match="marks 1 of 2 assistant turns"):
        encode_conversation(tokenizer, TALK, trained_from=3)


def test_missing_template() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ModelError, match=r"has no chat template, .* set chat_template: chatml"):
        render(tokenizer, TALK, add_generation_prompt=False)


def test_template_that_refuses_a_role() -> None:
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + UNMARKED
    with pytest.raises(ModelError, match="cannot render a conversation with the roles system, user: no system role"):
        render(speaking(template), TALK[:2], add_generation_prompt=False)


def test_empty_conversation() -> None:
    with pytest.raises(DataError, match="a conversation without messages cannot be rendered"):
        encode_prompt(tiny_tokenizer(), ())


def test_built_in_templates_and_files(tmp_path: Path) -> None:
    tokenizer = speaking("other")
    assert apply_template(tokenizer, "chatml").chat_template == CHATML
    assert tokenizer.chat_template == "other"
    plain = apply_template(tokenizer, "plain")
    assert render(plain, TALK[1:3], add_generation_prompt=False) == "User:\nHi é\n\nAssistant:\nYo 🙂<|im_end|>\n\n"
    assert render(plain, TALK[1:2], add_generation_prompt=True) == "User:\nHi é\n\nAssistant:\n"
    assert trained_runs(tiny_tokenizer(), encode_conversation(plain, TALK)) == ["Yo 🙂<|im_end|>", "So long<|im_end|>"]
    (tmp_path / "own.jinja").write_text("{{ messages[0]['content'] }} ü", encoding="utf-8")
    own = apply_template(tokenizer, str(tmp_path / "own.jinja"))
    assert render(own, TALK, add_generation_prompt=False) == "Be brief. ü"


def test_unfit_templates() -> None:
    with pytest.raises(
        ModelError, match=r"'chatlm' is neither a built-in template \(did you mean 'chatml'\?\) .* nor a file"
    ):
        apply_template(tiny_tokenizer(), "chatlm")
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ModelError, match="plain ends a turn with the end-of-text token, and this tokenizer has none"):
        apply_template(tokenizer, "plain")


def test_chatml_needs_its_tokens() -> None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(BPE(vocab={"a": 0, "<|im_end|>": 1}, merges=[])))
    with pytest.raises(ModelError, match=r"needs <\|im_start\|> and <\|im_end\|> .* use chat_template: plain"):
        apply_template(tokenizer, "chatml")


def test_hash_tells_templates_and_their_tokens_apart() -> None:
    other_end = tiny_tokenizer()
    other_end.eos_token = "<|im_start|>"
    assert template_hash(tiny_tokenizer()) == template_hash(speaking(CHATML))
    assert len({template_hash(tiny_tokenizer()), template_hash(speaking(PLAIN)), template_hash(other_end)}) == 3


def test_answers_stop_at_the_end_token_and_at_the_templates_own() -> None:
    assert stop_ids(tiny_tokenizer()) == {258}
    other_end = tiny_tokenizer()
    other_end.eos_token = "<|im_start|>"
    assert stop_ids(other_end) == {257, 258}
    assert stop_ids(speaking(CHATML.replace("<|im_end|>", ""))) == {258}


def test_shown_masks_cut_no_character() -> None:
    tokenizer = tiny_tokenizer()
    shown = show_masks(tokenizer, encode_conversation(tokenizer, TALK))
    assert shown.plain == TALK_TEXT
    styled = [(shown.plain[span.start : span.end], span.style) for span in shown.spans]
    assert [text for text, style in styled if style == "bold green"] == ["Yo 🙂<|im_end|>", "So long<|im_end|>"]


def test_shown_masks_without_colours_stand_in_brackets() -> None:
    tokenizer = tiny_tokenizer()
    shown = show_masks(tokenizer, encode_conversation(tokenizer, TALK), in_colour=False)
    assert shown.plain.count("⟦") == shown.plain.count("⟧") == 2
    assert "⟦Yo 🙂<|im_end|>⟧" in shown.plain
    assert shown.plain.replace("⟦", "").replace("⟧", "") == TALK_TEXT


@pytest.mark.parametrize("template", [CHATML, UNMARKED], ids=["marked", "unmarked"])
def test_turn_with_weight_0_is_context(template: str) -> None:
    tokenizer = speaking(template)
    rows = [{"role": message.role, "content": message.content} for message in TALK]
    rows[2]["weight"] = 0  # type: ignore[assignment]
    encoded = encode_conversation(tokenizer, as_messages(rows, text_role="user", field="messages"))
    assert trained_runs(tokenizer, encoded) == ["So long<|im_end|>"]
    assert encoded.tokens == by_bytes(TALK_TEXT)


def test_plain_text_is_learnt_whole_with_an_end() -> None:
    tokenizer = tiny_tokenizer()
    encoded = encode_conversation(tokenizer, (Message("text", "Once."),))
    assert tokenizer.decode(encoded.tokens) == f"Once.{tokenizer.eos_token}"
    assert all(encoded.assistant_mask)


CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "tide", "arguments": '{"port": "Brest"}'}}],
}
TOOL_TALK = [
    {"role": "developer", "content": "Use tools."},
    {"role": "user", "content": "High water?"},
    CALL,
    {"role": "tool", "tool_call_id": "1", "name": "tide", "content": "06:12"},
    {"role": "assistant", "content": "At 06:12."},
]
TOOLS = [{"type": "function", "function": {"name": "tide", "description": "High water at a port."}}]
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] or '' }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}"
    "{{ '<|im_end|>' }}{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\n' }}{% endfor %}"
)


def test_tools_calls_and_developer_are_rendered_by_the_template() -> None:
    tokenizer = speaking(TOOL_TEMPLATE)
    row = {"messages": TOOL_TALK, "tools": TOOLS}
    example = parse(row, recognise([row]), Origin("a.jsonl", 1))
    assert isinstance(example, Demonstration)
    encoded = encode_conversation(tokenizer, example.messages)
    text = tokenizer.decode(encoded.tokens)
    assert '"description": "High water at a port."' in text
    assert "<|im_start|>developer\nUse tools.<|im_end|>" in text
    assert trained_runs(tokenizer, encoded) == [
        '{"name": "tide", "arguments": {"port": "Brest"}}<|im_end|>',
        "At 06:12.<|im_end|>",
    ]
    again = to_fields(example)
    assert parse(again, recognise([again]), example.origin) == example


def test_template_that_knows_no_tools_is_refused() -> None:
    calls = as_messages(TOOL_TALK, text_role="user", field="messages")
    with pytest.raises(ModelError, match="leaves out the call in message 3 of 'tide': it does not know tools"):
        encode_conversation(tiny_tokenizer(), calls)
    offered = with_tools(calls[:2] + calls[4:], TOOLS)
    with pytest.raises(ModelError, match="leaves out the tool 'tide'"):
        encode_conversation(tiny_tokenizer(), offered)
