"""What every generator promises: an answer to each prompt row, with its log-probs under the weights that sampled it.

The same seed gives the same answers; batches are served in the order in which they were submitted, and new weights wait
for those before them. Shape letters: B rows, T token positions.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.testing import assert_close

from kedge.core.records import Prompts, repeated

if TYPE_CHECKING:
    from torch import Tensor

    from kedge.core.protocols import Generator
    from kedge.core.records import Rollouts

_SEED = 11
_ROUNDING = 1e-5
"""A log-prob of a certain token may be this far above 0."""


class GeneratorContract:
    """Generators (`kedge.core.protocols.Generator`). Name the facts below, and say how one is made.

    Choose a small model, and so many stop tokens that of 12 answers some end by themselves and some are cut off.
    """

    vocabulary: int
    """Token ids below this one may stand in a prompt."""
    stop_ids: Collection[int]
    """Tokens that end an answer."""
    max_new_tokens: int
    """An answer is cut off at so many tokens."""

    def make(self) -> Generator:
        """A generator with the same weights each time."""
        raise NotImplementedError("say how your generator is made: def make(self) -> Generator")

    def new_weights(self) -> Mapping[str, Tensor]:
        """Weights with which the generator made last samples other answers. One that samples with the trainer's own
        module changes that module here and returns nothing."""
        raise NotImplementedError("give other weights: def new_weights(self) -> Mapping[str, Tensor]")

    def prompts(self) -> Prompts:
        """Four prompts of unequal length, three answers to each."""
        usable = [token for token in range(self.vocabulary) if token not in self.stop_ids]
        lengths = (1, 4, 2, 7)
        tokens = [[usable[(31 * row + 7 * at) % len(usable)] for at in range(size)] for row, size in enumerate(lengths)]
        return repeated(tokens, ids=[40, 3, 17, 8], answers=3)

    def generate(self, generator: Generator, prompts: Prompts, seed: int = _SEED) -> Rollouts:
        """One batch, waited for."""
        return generator.submit(prompts, seed).result()

    def test_rows_are_the_prompts_in_their_order_followed_by_an_answer(self) -> None:
        prompts = self.prompts()
        rollouts = self.generate(self.make(), prompts)
        rows, width = rollouts.tokens_BT.shape
        assert rows == len(prompts.tokens), f"{rows} rows for {len(prompts.tokens)} prompts"
        assert rollouts.group_B.tolist() == list(prompts.group), "the groups are not those of the prompts"
        index_T = torch.arange(width)
        for row, prompt in enumerate(prompts.tokens):
            real_T, sampled_T = rollouts.attention_mask_BT[row].cpu(), rollouts.response_mask_BT[row].cpu()
            length = int(real_T.sum())
            assert torch.equal(real_T, index_T < length), f"row {row}: padding is not on the right: {real_T.tolist()}"
            begins = rollouts.tokens_BT[row, : len(prompt)].tolist()
            assert begins == list(prompt), f"row {row} begins with {begins}, its prompt is {list(prompt)}"
            is_answer_T = (index_T >= len(prompt)) & real_T
            assert torch.equal(sampled_T, is_answer_T), (
                f"row {row}: response_mask is not on all that follows the prompt"
            )

    def test_answers_have_at_least_one_token_and_at_most_the_limit(self) -> None:
        lengths = [len(answer) for answer in _answers(self.generate(self.make(), self.prompts()))]
        assert min(lengths) >= 1, f"an answer has no token: lengths {lengths}"
        assert max(lengths) <= self.max_new_tokens, f"the limit is {self.max_new_tokens} tokens: lengths {lengths}"

    def test_log_probs_are_finite_and_never_above_0(self) -> None:
        rollouts = self.generate(self.make(), self.prompts())
        logp_BT = rollouts.behaviour_logp_BT
        assert logp_BT.isfinite().all(), "a log-prob is not finite; outside of answers it is 0"
        sampled = logp_BT[rollouts.response_mask_BT]
        assert (sampled <= _ROUNDING).all(), f"a probability is above 1: log-prob {sampled.max().item():g}"
        assert (sampled < -_ROUNDING).any(), "every sampled token has probability 1"

    def test_an_answer_is_finished_where_a_stop_token_ended_it(self) -> None:
        rollouts = self.generate(self.make(), self.prompts())
        answers, finished = _answers(rollouts), rollouts.finished_B.tolist()
        for row, (answer, is_finished) in enumerate(zip(answers, finished, strict=True)):
            ends = answer[-1] in self.stop_ids
            assert is_finished == ends, f"row {row}: finished is {is_finished}, and its last token is {answer[-1]}"
            assert ends or len(answer) == self.max_new_tokens, f"row {row} was cut off after {len(answer)} tokens"
            early = [token for token in answer[:-1] if token in self.stop_ids]
            assert not early, f"row {row} goes on after the stop token {early[:1]}"
        advice = "choose a model, stop_ids and max_new_tokens with which some answers end and some are cut off"
        assert set(finished) == {True, False}, f"finished is {finished[0]} for all rows; {advice}"

    def test_the_same_seed_samples_the_same_answers_and_another_seed_others(self) -> None:
        generator, prompts = self.make(), self.prompts()
        first = self.generate(generator, prompts)
        self._assert_same(self.generate(generator, prompts), first, "the same seed a second time")
        self._assert_same(self.generate(self.make(), prompts), first, "the same seed, a new generator")
        other = self.generate(generator, prompts, _SEED + 1)
        assert _answers(other) != _answers(first), "another seed samples the same answers"

    def test_answers_to_one_prompt_are_drawn_independently(self) -> None:
        prompts = self.prompts()
        answers = _answers(self.generate(self.make(), prompts))
        by_group = {
            group: [answer for answer, own in zip(answers, prompts.group, strict=True) if own == group]
            for group in set(prompts.group)
        }
        differs = any(len(set(map(tuple, own))) > 1 for own in by_group.values())
        assert differs, "all answers to a prompt are the same: the answer index has no part in the sampling"

    def test_rollouts_can_be_trained_on(self) -> None:
        rollouts = self.generate(self.make(), self.prompts())
        assert not rollouts.behaviour_logp_BT.requires_grad, "the log-probs are part of a graph: detach them"
        assert not rollouts.tokens_BT.is_inference(), "made in inference mode, which autograd cannot use: use no_grad"

    def test_batches_come_in_the_order_in_which_they_were_submitted(self) -> None:
        generator, prompts = self.make(), self.prompts()
        batches = [_rows(prompts, rows) for rows in ([0, 1, 2], [5, 3], [9, 10, 11, 6])]
        futures = [generator.submit(batch, _SEED) for batch in batches]
        groups = [future.result().group_B.tolist() for future in futures]
        assert groups == [list(batch.group) for batch in batches], f"the groups of three batches are {groups}"

    def test_new_weights_and_their_version_hold_for_what_is_submitted_after_them(self) -> None:
        generator, prompts = self.make(), self.prompts()
        before = self.generate(generator, prompts)
        generator.load_weights(self.new_weights(), before.version + 5)
        after = self.generate(generator, prompts)
        assert after.version == before.version + 5, f"version {after.version}, loaded was {before.version + 5}"
        is_same = _answers(after) == _answers(before) and torch.equal(after.behaviour_logp_BT, before.behaviour_logp_BT)
        assert not is_same, "the answers are those of the old weights"

    def test_a_batch_that_was_submitted_before_new_weights_is_sampled_with_the_old_ones(self) -> None:
        generator, prompts = self.make(), self.prompts()
        first = self.generate(generator, prompts)
        under_way = generator.submit(prompts, _SEED)
        generator.load_weights(self.new_weights(), first.version + 1)
        later = generator.submit(prompts, _SEED)
        versions = (under_way.result().version, later.result().version)
        assert versions == (first.version, first.version + 1), f"versions {versions}; the first was {first.version}"
        self._assert_same(under_way.result(), first, "a batch that new weights were loaded behind")

    def _assert_same(self, rollouts: Rollouts, expected: Rollouts, what: str) -> None:
        assert _answers(rollouts) == _answers(expected), f"{what}: other answers"
        sampled = rollouts.behaviour_logp_BT[rollouts.response_mask_BT]
        expected_sampled = expected.behaviour_logp_BT[expected.response_mask_BT]
        assert_close(sampled, expected_sampled, rtol=1e-4, atol=1e-4, msg=lambda found: f"{what}: log-probs: {found}")


class BatchInvariantGeneratorContract(GeneratorContract):
    """Generators whose answer to a row depends on the seed, the row's group and its answer index alone."""

    def test_a_row_has_the_same_answer_in_any_batch(self) -> None:
        generator, prompts = self.make(), self.prompts()
        answers = _answers(self.generate(generator, prompts))
        shuffled = [7, 2, 9, 0, 5, 4, 1, 8, 3, 6, 11, 10]
        for rows in (shuffled, shuffled[:5], [3], [11]):
            found = _answers(self.generate(generator, _rows(prompts, rows)))
            assert found == [answers[row] for row in rows], f"rows {rows} have other answers than in the whole batch"


def _answers(rollouts: Rollouts) -> list[list[int]]:
    rows = zip(rollouts.tokens_BT, rollouts.response_mask_BT, strict=True)
    return [tokens_T[sampled_T].tolist() for tokens_T, sampled_T in rows]


def _rows(prompts: Prompts, rows: Sequence[int]) -> Prompts:
    return Prompts(
        tokens=tuple(prompts.tokens[row] for row in rows),
        group=tuple(prompts.group[row] for row in rows),
        answer=tuple(prompts.answer[row] for row in rows),
    )
