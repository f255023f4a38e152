"""Log-likelihoods of choices, through the packed path: rows without padding, logits only where something is read.

Choices of one token each (letters) are read from one row at one position. Longer ones are a row each. Letters: B rows,
T token positions, C choices, N rows that are read, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kedge.algorithms import logprobs
from kedge.core.batches import pad_rows
from kedge.core.errors import DataError, NumericsError
from kedge.core.records import send
from kedge.core.world import ALONE, World
from kedge.data.encoding.pieces import TextTokenizer
from kedge.data.examples import Message, Messages, Role
from kedge.data.template import render
from kedge.exams.exam import ChoiceQuestion, ChoiceReply, Template, Turns
from kedge.models.forward.heads import LanguageModel
from kedge.models.settings import AutoSize
from kedge.models.training.passes import InferenceSize

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Tokens = NDArray[np.int32]
_AT_ONCE = 512
"""Texts that are tokenised together."""
_TAIL = 200
"""The most characters of a prompt that are tokenised again with each of its choices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """A question as tokens: one row for all choices that differ in the last token alone, or one row for each."""

    rows: tuple[Tokens, ...]
    num_read: tuple[int, ...]
    """How many tokens at the end of each row are the choice's."""
    letters: tuple[int, ...] = ()
    """The last token of every choice, where they share a row."""
    is_cut: bool = False
    """Whether examples were left out, since they did not fit into the window."""


class Renderer:
    """Conversations as text that a choice continues."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, template: Template) -> None:
        self._tokenizer, self._template = tokenizer, template
        starts = tokenizer("")["input_ids"][:1] == [tokenizer.bos_token_id]
        self._opening = str(tokenizer.bos_token) if starts else ""

    @property
    def lead(self) -> str:
        """What stands between a prompt and its continuation."""
        return "" if self._template == "chat" else " "

    def text(self, turns: Turns) -> str:
        if self._template == "plain":
            return self._opening + plain_text(turns)
        return render(self._tokenizer, messages_of(turns), add_generation_prompt=True)


def messages_of(turns: Turns) -> Messages:
    return tuple(Message(cast(Role, role), content) for role, content in turns)


def plain_text(turns: Turns) -> str:
    """Turns end to end, as a text that a model continues: answers behind their questions, an empty line after each.

    >>> plain_text((("user", "1 + 1 ="), ("assistant", "2"), ("user", "1 + 2 =")))
    '1 + 1 = 2\\n\\n1 + 2 ='
    """
    parts: list[str] = []
    for role, content in turns:
        between = "" if not parts else " " if role == "assistant" else "\n\n"
        parts += [between, content]
    return "".join(parts)


def encode(
    questions: Sequence[ChoiceQuestion], renderer: Renderer, tokenise: TextTokenizer, *, window: int | None
) -> Iterator[Encoded]:
    """The questions as tokens, in their order. One that is longer than the window loses its first examples."""
    for start in range(0, len(questions), _AT_ONCE):
        part = questions[start : start + _AT_ONCE]
        for question, encoded in zip(part, _encode_part(part, renderer, tokenise), strict=True):
            yield _fitting(question, encoded, renderer, tokenise, window)


def _fitting(
    question: ChoiceQuestion, encoded: Encoded, renderer: Renderer, tokenise: TextTokenizer, window: int | None
) -> Encoded:
    while window is not None and max(map(len, encoded.rows)) > window:
        examples = len(question.turns) - 1
        if examples < 2:
            longest = max(map(len, encoded.rows))
            raise DataError(
                f"the question {question.item} has {longest:,} tokens, and the window of the model is {window:,}: "
                "it cannot take this exam"
            )
        question = replace(question, turns=question.turns[2:])
        (encoded,) = _encode_part([question], renderer, tokenise)
        encoded = replace(encoded, is_cut=True)
    return encoded


def _encode_part(questions: Sequence[ChoiceQuestion], renderer: Renderer, tokenise: TextTokenizer) -> Iterator[Encoded]:
    prompts = [renderer.text(question.turns) for question in questions]
    firsts = tokenise.many(
        [prompt + renderer.lead + question.choices[0] for prompt, question in zip(prompts, questions, strict=True)]
    )
    # The last line of a prompt with each choice: the tokens before it are those of the first choice's row.
    tails = [_tail(prompt) for prompt in prompts]
    texts = [
        tail + renderer.lead + choice
        for tail, question in zip(tails, questions, strict=True)
        for choice in question.choices
    ]
    endings = iter(tokenise.many(texts))
    for question, prompt, tail, first in zip(questions, prompts, tails, firsts, strict=True):
        own = [next(endings) for _ in question.choices]
        before, start = first.tokens[: max(0, len(first.tokens) - len(own[0].tokens))], len(tail)
        if not np.array_equal(np.concatenate([before, own[0].tokens]), first.tokens):
            # The tokenizer joins the last line with what stands before it: every row is read as a whole.
            own = tokenise.many([prompt + renderer.lead + choice for choice in question.choices])
            before, start = before[:0], len(prompt)
        ends = [start + len(renderer.lead) + len(choice) for choice in question.choices]
        yield _question_rows(
            question,
            [
                (np.concatenate([before, row.tokens]), int(row.mask([(start, end)]).sum()))
                for row, end in zip(own, ends, strict=True)
            ],
        )


def _tail(prompt: str) -> str:
    """The end of a prompt from its last line break on, or from a blank near its end; the whole of a short one."""
    after = prompt.rfind("\n") + 1
    if len(prompt) - after <= _TAIL:
        return prompt[after:]
    blank = prompt.rfind(" ", len(prompt) - _TAIL)
    return prompt[blank:] if blank >= 0 else prompt


def _question_rows(question: ChoiceQuestion, rows: Sequence[tuple[Tokens, int]]) -> Encoded:
    for choice, (_, count) in zip(question.choices, rows, strict=True):
        if count < 1:
            raise DataError(f"the choice {choice!r} of the question {question.item} has no token of its own")
    tokens = tuple(row for row, _ in rows)
    first = tokens[0]
    if all(count == 1 and np.array_equal(row[:-1], first[:-1]) for row, count in rows):
        return Encoded(rows=(first,), num_read=(1,), letters=tuple(int(row[-1]) for row in tokens))
    return Encoded(rows=tokens, num_read=tuple(count for _, count in rows))


@torch.no_grad()
def choice_replies(
    model: LanguageModel,
    questions: Sequence[Encoded],
    *,
    rows: AutoSize = "auto",
    world: World = ALONE,
    progress: Callable[[int], None] = lambda _: None,
) -> list[ChoiceReply]:
    """Log-probs of all choices, the longest rows first; the processes of `world` share them. `model` is active."""
    size = InferenceSize(model.device, rows, world=world)
    in_letters = [question for question in questions if question.letters]
    in_rows = [question for question in questions if not question.letters]
    letters = _letters(model, size, in_letters, progress)
    sums = _sums(model, size, in_rows, lambda done: progress(done + len(in_letters)))
    of_letters, of_rows = iter(letters), iter(sums)
    replies: list[ChoiceReply] = []
    for question in questions:
        if question.letters:
            values = next(of_letters)[: len(question.letters)]
        else:
            values = [next(of_rows) for _ in question.rows]
        replies.append(ChoiceReply(logprobs=tuple(values)))
    if not all(np.isfinite(reply.logprobs).all() for reply in replies):
        raise NumericsError("the model gives log-probabilities that are not finite; its weights may be damaged")
    return replies


def _letters(
    model: LanguageModel, size: InferenceSize, questions: Sequence[Encoded], progress: Callable[[int], None]
) -> list[list[float]]:
    """`logp_NC` of the choices at the last position of each question's row."""
    if not questions:
        return []
    most = max(len(question.letters) for question in questions)
    # Questions with fewer choices repeat their first one.
    letter_NC = np.array(
        [question.letters + question.letters[:1] * (most - len(question.letters)) for question in questions]
    )
    done = _Done(progress)

    def compute(part: list[int]) -> Tensor:
        tokens_BT, mask_BT, only_BT = _padded([questions[place].rows[0] for place in part], [1] * len(part))
        hidden_ND, _ = model.hidden(tokens_BT, mask_BT, only_BT)
        target_N = send(torch.from_numpy(letter_NC[part].reshape(-1)), model.device)
        logp_N = logprobs.token_logprobs(hidden_ND.repeat_interleave(most, dim=0), model.head(), target_N)
        done.add(part)
        return logp_N.view(len(part), most)

    return size.by_length([len(question.rows[0]) for question in questions], compute).tolist()


def _sums(
    model: LanguageModel, size: InferenceSize, questions: Sequence[Encoded], progress: Callable[[int], None]
) -> list[float]:
    """The sum of the log-probs of each row's choice."""
    rows = [row for question in questions for row in question.rows]
    num_read = [count for question in questions for count in question.num_read]
    if not rows:
        return []
    question_of = [place for place, question in enumerate(questions) for _ in question.rows]
    done = _Done(progress)

    def compute(part: list[int]) -> Tensor:
        tokens_BT, mask_BT, only_BT = _padded([rows[place] for place in part], [num_read[place] for place in part])
        logp_BT = model.logprobs(tokens_BT, mask_BT, only_BT)
        done.add([question_of[place] for place in part])
        return logp_BT.sum(dim=1)

    return size.by_length([len(row) for row in rows], compute).tolist()


class _Done:
    """Counts questions once, also where a pass that did not fit is done again."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self._progress, self._places = progress, set[int]()

    def add(self, places: Sequence[int]) -> None:
        self._places.update(places)
        self._progress(len(self._places))


def _padded(rows: Sequence[Tokens], num_read: Sequence[int]) -> tuple[Tensor, Tensor, Tensor]:
    """`tokens_BT`, which positions are tokens, and which of them are the choice's."""
    tokens_BT = pad_rows(rows, 0)  # pyright: ignore[reportArgumentType]
    length_B = np.array([len(row) for row in rows])[:, None]
    place_T = np.arange(tokens_BT.shape[1])[None, :]
    mask_BT = place_T < length_B
    only_BT = mask_BT & (place_T >= length_B - np.array(num_read)[:, None])
    return tokens_BT, torch.from_numpy(mask_BT), torch.from_numpy(only_BT)
