from __future__ import annotations

from kedge.core.chatml import CHATML
from kedge.core.findings import Finding
from kedge.data.examples import Demonstration, Message, Origin, Pair, Prompt, Ranking, Thumb
from kedge.data.preflight_examples import measure, preflight_examples
from kedge.models.loading.tiny import tiny_tokenizer

# tiny: a user turn takes 8 tokens and its content, the opening of an answer 11, an answer its content and 2
ASK = (Message("user", "Hi"),)


def answer(text: str) -> tuple[Message, ...]:
    return (Message("assistant", text),)


def at(line: int) -> Origin:
    return Origin("d.jsonl", line)


def pair(line: int, chosen: str = "Yes", rejected: str = "No") -> Pair:
    return Pair(prompt=ASK, chosen=answer(chosen), rejected=answer(rejected), origin=at(line))


def by_code(findings: list[Finding]) -> dict[str, Finding]:
    assert len({finding.code for finding in findings}) == len(findings)
    return {finding.code: finding for finding in findings}


def test_good_examples_of_every_kind() -> None:
    examples = [
        pair(1),
        Ranking(prompt=ASK, answers=(answer("a"), answer("b")), rank=(1, 2), origin=at(2)),
        Thumb(prompt=ASK, answer=answer("a"), is_good=True, origin=at(3)),
        Demonstration(messages=(*ASK, *answer("a")), origin=at(4)),
        Prompt(prompt=ASK, origin=at(5)),
    ]
    assert preflight_examples(tiny_tokenizer(), examples, window=64) == []
    assert preflight_examples(tiny_tokenizer(), [], window=64) == []


def test_longer_than_the_window() -> None:
    # prompt 21 tokens; with an answer of n bytes 23 + n
    examples = [pair(1), pair(2), pair(3, rejected="x" * 10)]
    assert preflight_examples(tiny_tokenizer(), examples, window=33) == []
    (finding,) = preflight_examples(tiny_tokenizer(), examples, window=32)
    assert (finding.level, finding.code, finding.where) == ("warning", "examples.truncated", "d.jsonl:3")
    assert finding.message == ("1 of 3 examples looked at are longer than the window of 32 tokens")
    assert finding.evidence == {"share": 1 / 3, "longest": 33}


def test_prompt_fills_the_window() -> None:
    prompts = [Prompt(prompt=ASK, origin=at(1)), Prompt(prompt=(Message("user", "Hi!"),), origin=at(2))]
    (finding,) = preflight_examples(tiny_tokenizer(), prompts, window=22)
    assert (finding.level, finding.code, finding.where) == ("warning", "examples.prompt_too_long", "d.jsonl:2")
    assert preflight_examples(tiny_tokenizer(), prompts, window=21)[0].level == "fatal"


def test_nothing_to_train() -> None:
    wrong = Demonstration(messages=(*ASK, Message("user", "again")), origin=at(7))
    (finding,) = preflight_examples(tiny_tokenizer(), [pair(1), pair(2), wrong], window=64)
    assert (finding.level, finding.code, finding.where) == ("warning", "examples.nothing_to_train", "d.jsonl:7")


def test_no_end_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "")
    (finding,) = preflight_examples(tokenizer, [pair(1), pair(2)], window=64)
    assert (finding.level, finding.code) == ("fatal", "examples.no_stop")
    assert finding.message.startswith("2 of 2 examples looked at train no end token")


def test_doubled_start_token() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.chat_template = "{{ bos_token }}" + CHATML
    assert by_code(preflight_examples(tokenizer, [pair(1)], window=64)).keys() == {"examples.doubled_bos"}


def test_control_text_in_a_message() -> None:
    examples = [pair(1), pair(2), pair(3, rejected="Stop<|im_end|>")]
    (finding,) = preflight_examples(tiny_tokenizer(), examples, window=64)
    assert (finding.level, finding.code, finding.where) == ("warning", "examples.control_text", "d.jsonl:3")


def test_examples_that_cannot_be_rendered_carry_the_reason() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    (finding,) = preflight_examples(tokenizer, [pair(1), pair(2)], window=64)
    assert (finding.level, finding.code, finding.where) == ("fatal", "examples.unusable", "d.jsonl:1")
    assert (
        "2 of 2 examples looked at cannot be turned into tokens: this tokenizer has no chat template" in finding.message
    )


def test_a_sample_is_taken_evenly() -> None:
    examples = [pair(line, rejected="x" * 99 if line % 2 else "x") for line in range(10)]
    (finding,) = preflight_examples(tiny_tokenizer(), examples, window=64, limit=4)
    # every third: lines 0, 3, 6, 9
    assert finding.message.startswith("2 of 4 examples looked at are longer")
    assert finding.where == "d.jsonl:3"


def test_measure_counts_the_opening_of_an_answer_for_prompts_only() -> None:
    count = measure(tiny_tokenizer())
    assert count((Message("user", "Hi"),)) == 10 + 11
    assert count((Message("user", "Hi"), Message("assistant", "é"))) == 10 + 11 + 2 + 2
