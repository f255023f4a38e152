"""Text in pieces: the same tokens at the same places as the tokenizer gives, or no pieces at all."""

from __future__ import annotations

import pickle
import random
from itertools import pairwise

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import kedge.data.encoding.pieces
from kedge.core.chatml import CHATML
from kedge.core.errors import ModelError
from kedge.data.encoding.cuts import cutter_for
from kedge.data.encoding.pieces import TextTokenizer, id_table
from kedge.data.examples import Message
from kedge.data.template import encode_conversation
from kedge.data.tokenizer import tokens_with_spans
from kedge.models.loading.tiny import tiny_tokenizer

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
SPLITS = {
    "gpt2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "roberta": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "llama3": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_LLAMA3), "isolated"), _BYTES]),
    "o200k": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_O200K), "isolated"), _BYTES]),
}
_PARTS = (
    *"aZéßя你0 19.,;:!?\"')(*-_/<>|\n\t\r  \u00a0\u3000\u0301🙂",
    *(" the", "'s", "n't", "\n\n", "...", " 42", "<|im_end|>", "word", "Camel", " — ", ".)", "?!\n"),
)


def tokenizer(split: pre_tokenizers.PreTokenizer, *added: AddedToken) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    backend.train_from_iterator([text(seed) for seed in range(200)], trainer)
    specials = [AddedToken(name, normalized=False) for name in ("<|im_start|>", "<|im_end|>")]
    backend.add_special_tokens([*specials, *added])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>", chat_template=CHATML)


def text(seed: int) -> str:
    return "".join(random.Random(seed).choices(_PARTS, k=60))


@pytest.mark.parametrize("split", SPLITS)
def test_pieces_have_the_tokens_and_places_of_the_whole_text(split: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fast = tokenizer(SPLITS[split])
    assert cutter_for(fast)
    monkeypatch.setattr(kedge.data.encoding.pieces, "_MOST_PIECES", 50)  # several generations of words
    tokenise = pickle.loads(pickle.dumps(TextTokenizer(fast, for_many=True)))
    everything = id_table(range(len(fast)))
    for seed in range(1000, 1400):
        tokens, spans = tokens_with_spans(fast, text(seed))
        tokenised = tokenise(text(seed))
        assert tokenised.tokens.tolist() == tokens
        assert tokenised.places(everything) == spans
        start, end = sorted(random.Random(seed).choices(range(len(text(seed))), k=2))
        assert tokenised.mask([(start, end)]).tolist() == [start <= at < end for at, _ in spans]


@pytest.mark.parametrize("split", SPLITS)
def test_texts_that_are_cut_together_do_not_touch_each_other(split: str) -> None:
    fast = tokenizer(SPLITS[split])
    texts = [
        "",
        "ends in a space ",
        " begins with one",
        "\n",
        "line\n",
        "Next.",
        "\0",
        "<|im_end|>",
        "1. a",
        " the\u0301",
    ]
    for tokenised, own in zip(TextTokenizer(fast, for_many=True).many(texts), texts, strict=True):
        tokens, spans = tokens_with_spans(fast, own)
        assert tokenised.tokens.tolist() == tokens
        assert tokenised.places(id_table(range(len(fast)))) == spans
        assert tokenised.mask([(0, len(own))]).all()


def test_text_is_cut_where_a_tokenizer_has_words_and_nowhere_else() -> None:
    def pieces(split: str | pre_tokenizers.PreTokenizer, text: str) -> list[str]:
        cutter = cutter_for(tokenizer(SPLITS[split] if isinstance(split, str) else split))
        assert cutter is not None
        return [text[start:end] for start, end in pairwise([*cutter.cuts(text).tolist(), len(text)])]

    talk = "<|im_end|>\nIt is.\n\nSo\n1 e.g."
    opening = ["<|im_end|>"]
    assert pieces("gpt2", talk) == [*opening, "\n", "It", " is", ".\n", "\n", "So", "\n", "1", " e", ".g", "."]
    assert pieces("smollm", talk) == [*opening, "\n", "It", " is", ".\n", "\n", "So\n", "1", " e", ".g", "."]
    assert pieces("llama3", talk) == [*opening, "\n", "It", " is", ".\n\n", "So\n", "1", " e", ".g", "."]
    assert pieces("o200k", talk) == pieces("llama3", talk)
    assert pieces("roberta", talk) == [*opening, "\nIt", " is.\n\nSo\n1", " e.g."]
    words = pre_tokenizers.Split(Regex(r" ?\w+[.]?(\n+\w+)*|\s|\S"), "isolated")
    joining = pre_tokenizers.Sequence([words, _BYTES])
    assert pieces(joining, "It is.\nSo, then") == ["It", " is.\nSo", ",", " then"]


def test_a_token_over_the_end_of_a_word_is_not_cut() -> None:
    fast = tokenizer(SPLITS["gpt2"], AddedToken("Mr.", normalized=False), AddedToken("a\nb", normalized=False))
    tokenise = TextTokenizer(fast, for_many=True)
    for own in ("Dear Mr. X.", "a\nb a\nc", "<|im_end|>Mr.<|im_end|>"):
        assert tokenise(own).tokens.tolist() == tokens_with_spans(fast, own)[0]


def test_a_conversation_is_encoded_alike() -> None:
    fast = tokenizer(SPLITS["llama3"])
    tokenise = TextTokenizer(fast, for_many=True)
    for seed in range(40):
        words = ["".join(part for part in text(seed + at).split("<|im_end|>")).strip() or "?" for at in range(4)]
        messages = tuple(Message(role, word) for role, word in zip(("user", "assistant") * 2, words, strict=True))
        assert encode_conversation(fast, messages, tokenise=tokenise) == encode_conversation(fast, messages)


def test_tokenizers_that_may_join_over_a_cut_read_whole_texts() -> None:
    gpt2 = SPLITS["gpt2"]
    superwords = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\w+ \w+|\s|\S"), "isolated"), _BYTES])
    assert not cutter_for(tiny_tokenizer())  # it has no words
    assert not cutter_for(tokenizer(_BYTES))
    assert not cutter_for(tokenizer(superwords))
    assert not cutter_for(tokenizer(gpt2, AddedToken("two words", normalized=False)))
    assert not cutter_for(tokenizer(gpt2, AddedToken("<mask>", lstrip=True, normalized=False)))
    joined = tokenizer(gpt2, AddedToken("two words", normalized=False))
    tokens, _ = tokens_with_spans(joined, "these two words.")
    assert TextTokenizer(joined, for_many=True)("these two words.").tokens.tolist() == tokens


_DROPS_THOUGHTS = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ (message['content'] if loop.last else message['content'].split('</think>')[-1]) | trim }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_OPENS_LATER = (  # what opens an answer depends on whether one follows
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant:{% endif %}"
)


def test_templates_that_look_at_contents_are_rendered_for_every_conversation() -> None:
    fast = tokenizer(SPLITS["gpt2"])
    fast.chat_template = _DROPS_THOUGHTS
    tokenise = TextTokenizer(fast, for_many=True)
    ask, plain, thought = Message("user", "Hi"), Message("assistant", "Yo"), Message("assistant", "<t></think>Yo")
    for messages in (
        (ask, plain, ask, plain),
        (ask, plain, ask, thought),
        (ask, Message("assistant", "  Yo "), ask, plain),
    ):
        assert encode_conversation(fast, messages, tokenise=tokenise) == encode_conversation(fast, messages)
    with pytest.raises(ModelError, match="drops or changes message 2"):
        encode_conversation(fast, (ask, thought, ask, plain), tokenise=tokenise)


def test_a_prompt_that_is_no_prefix_is_refused_as_ever() -> None:
    fast = tokenizer(SPLITS["gpt2"])
    fast.chat_template = _OPENS_LATER
    messages = (Message("user", "Hi"), Message("assistant", "Yo"))
    for tokenise in (None, TextTokenizer(fast, for_many=True)):
        with pytest.raises(ModelError, match="writes the same messages differently once more follow"):
            encode_conversation(fast, messages, tokenise=tokenise)
