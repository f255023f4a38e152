"""Log-likelihoods of choices are those of transformers on the whole text, however rows are shared and packed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.core.errors import DataError
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.tokenizer import load_tokenizer, tokens_with_spans
from kedge.exams.exam import ChoiceQuestion, Template
from kedge.models.forward.heads import language_model
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny
from kedge.stages.rl.choices import Renderer, choice_replies, encode, plain_text

SHOTS = (("user", "Say A.\nAnswer:"), ("assistant", "A"))
QUESTIONS = [
    ChoiceQuestion(item="letters", turns=(*SHOTS, ("user", "1 + 1?\nA. 2\nB. 3\nAnswer:")), choices=("A", "B")),
    ChoiceQuestion(item="four", turns=(("user", "Which?\nAnswer:"),), choices=("A", "B", "C", "D")),
    ChoiceQuestion(item="cloze", turns=(("user", "Why? Because\tof é 12\nAnswer:"),), choices=("x", "yes it is", "né")),
    ChoiceQuestion(item="long", turns=(("user", "word " * 80 + "end"),), choices=("one", "two words")),
]  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    place = make_tiny(tmp_path_factory.mktemp("choices") / "tiny", hidden=32, layers=2)
    return load_causal(str(place), dtype="float32", device="cpu"), load_tokenizer(place)


def whole(tokenizer: Any, text: str, start: int) -> tuple[list[int], int]:
    """The tokens of a text as the tokenizer gives them, and how many of them begin at `start` or later."""
    tokens, spans = tokens_with_spans(tokenizer, text)
    return tokens, sum(begin >= start for begin, _ in spans)


def straight(model: Any, tokens: list[int], num_read: int) -> float:
    with torch.no_grad():
        logp_TV = model(torch.tensor([tokens])).logits[0].float().log_softmax(-1)
    read = range(len(tokens) - num_read, len(tokens))
    return sum(float(logp_TV[t - 1, tokens[t]]) for t in read)


@pytest.mark.parametrize("template", ["chat", "plain"])
@pytest.mark.parametrize("rows", ["auto", 1])
def test_they_are_those_of_the_whole_text(model: Any, template: Template, rows: Any) -> None:
    weights, tokenizer = model
    renderer = Renderer(tokenizer, template)
    encoded = list(encode(QUESTIONS, renderer, TextTokenizer(tokenizer, for_many=True), window=None))
    # The tiny model reads bytes: with a blank before it, a letter is two tokens.
    assert [len(question.letters) for question in encoded] == ([2, 4, 0, 0] if template == "chat" else [0] * 4)
    language = language_model(weights)
    with language.active():
        replies = choice_replies(language, encoded, rows=rows)
    for question, reply in zip(QUESTIONS, replies, strict=True):
        prompt = renderer.text(question.turns)
        expected = [
            straight(weights, *whole(tokenizer, prompt + renderer.lead + choice, len(prompt)))
            for choice in question.choices
        ]
        assert reply.logprobs == pytest.approx(expected, abs=1e-4)


def test_one_row_of_letters_is_as_good_as_a_row_each(model: Any) -> None:
    weights, tokenizer = model
    (letters,) = encode(
        QUESTIONS[:1], Renderer(tokenizer, "chat"), TextTokenizer(tokenizer, for_many=True), window=None
    )
    (row,) = letters.rows
    each = replace(letters, rows=tuple(_ending(row, token) for token in letters.letters), num_read=(1, 1), letters=())
    language = language_model(weights)
    with language.active():
        first, second = choice_replies(language, [letters, each])
    assert first.logprobs == pytest.approx(second.logprobs, abs=1e-5)


def _ending(row: Any, token: int) -> Any:
    changed = row.copy()
    changed[-1] = token
    return changed


def test_tokens_are_those_of_the_whole_text_for_a_real_tokenizer(byte_level_tokenizer: Any) -> None:
    for template in ("chat", "plain"):
        renderer = Renderer(byte_level_tokenizer, template)
        encoded = encode(QUESTIONS, renderer, TextTokenizer(byte_level_tokenizer, for_many=True), window=None)
        for question, found in zip(QUESTIONS, encoded, strict=True):
            prompt = renderer.text(question.turns)
            texts = [prompt + renderer.lead + choice for choice in question.choices]
            wanted = [whole(byte_level_tokenizer, text, len(prompt)) for text in texts]
            if found.letters:
                rows = [[*found.rows[0][:-1].tolist(), letter] for letter in found.letters]
                assert [(row, 1) for row in rows] == wanted
            else:
                assert list(zip((row.tolist() for row in found.rows), found.num_read, strict=True)) == wanted


def test_too_many_examples_are_left_out_one_by_one_and_a_question_without_room_is_named(model: Any) -> None:
    _, tokenizer = model
    renderer, tokenise = Renderer(tokenizer, "plain"), TextTokenizer(tokenizer, for_many=True)
    question = replace(QUESTIONS[0], turns=(*SHOTS * 9, *QUESTIONS[0].turns))
    (short,) = encode(QUESTIONS[:1], renderer, tokenise, window=None)
    (fitted,) = encode([question], renderer, tokenise, window=len(short.rows[0]))
    assert fitted.rows[0].tolist() == short.rows[0].tolist()
    with pytest.raises(DataError, match=r"the question long has .* and the window of the model is 40"):
        list(encode(QUESTIONS[3:], renderer, tokenise, window=40))


def test_plain_text_has_answers_behind_their_questions() -> None:
    assert plain_text(QUESTIONS[0].turns) == "Say A.\nAnswer: A\n\n1 + 1?\nA. 2\nB. 3\nAnswer:"


@pytest.fixture(scope="module")
def byte_level_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A byte-level BPE with a chat template, as real models have."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    from kedge.core.chatml import CHATML

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|im_start|>", "<|im_end|>"]
    texts = [
        f"{role}: {content}\nAnswer: yes it is one two words"
        for question in QUESTIONS
        for role, content in question.turns
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(texts * 5, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", bos_token="<|im_start|>")
    tokenizer.chat_template = CHATML
    place = tmp_path_factory.mktemp("bpe")
    tokenizer.save_pretrained(place)
    return load_tokenizer(Path(place))
