"""What every critic-free method (`kedge.algorithms.group.method.GroupMethod`) promises, as tests to subclass.

    class TestMyMethod(GroupMethodContract):
        method = MY_METHOD

Values are float64. What stands outside the response is finite here, as it is in training. Left out: whether the numbers
are those of a paper, which needs examples worked out by hand.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import ClassVar, get_args

import torch
from torch import Tensor
from torch.testing import assert_close

from kedge.algorithms.group.method import Credit, GroupMethod, KLDefaults
from kedge.core.loss import mean
from kedge.core.optimiser import Per
from kedge.core.records import Experience, Rollouts, take, trimmed
from kedge.core.settings import Section

_PROMPT, _WIDTH = 2, 8
_LENGTHS = (5, 2, 3, 6, 1, 4)
_GROUPS = (7, 3, 7, 3, 3, 7)
"""Answers to two prompts, not beside each other."""
_SCORES = (0.5, -1.0, 2.0, 1.5, 0.25, -0.75)


def example_rollouts() -> Rollouts:
    """Six answers to two prompts; the longest answer has a hole, as answers of several turns have."""
    index_T, length_B = torch.arange(_WIDTH), torch.tensor(_LENGTHS)
    attention_BT = index_T < length_B[:, None] + _PROMPT
    response_BT = attention_BT & (index_T >= _PROMPT)
    response_BT[3, 4] = False
    return Rollouts(
        tokens_BT=torch.arange(len(_LENGTHS) * _WIDTH).reshape(len(_LENGTHS), _WIDTH),
        attention_mask_BT=attention_BT,
        response_mask_BT=response_BT,
        behaviour_logp_BT=-1.0 * attention_BT,
        group_B=torch.tensor(_GROUPS),
        finished_B=torch.ones(len(_LENGTHS), dtype=torch.bool),
        version=0,
    )


def example_credit() -> Credit:
    rollouts = example_rollouts()
    return Credit(
        rollouts=rollouts,
        scores_B=torch.tensor(_SCORES, dtype=torch.float64),
        greedy_B=(rollouts.group_B == 3).double(),
        penalty_BT=0.1 * _numbers(seed=1) * rollouts.response_mask_BT,
        baseline=0.2,
    )


def example_experience(advantages_BT: Tensor) -> Experience:
    mask_BT = advantages_BT != 0
    old_logp_BT = (-1.0 + 0.5 * _numbers(seed=2)) * mask_BT
    return Experience(
        rollouts=example_rollouts(),
        old_logp_BT=old_logp_BT,
        ref_logp_BT=(old_logp_BT - 0.1) * mask_BT,
        advantages_BT=advantages_BT,
    )


def _numbers(*, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(_LENGTHS), _WIDTH, generator=generator, dtype=torch.float64)


class GroupMethodContract:
    """The tests. A subclass gives `method`; `settings` are its defaults unless a subclass says otherwise."""

    method: ClassVar[GroupMethod]

    def settings(self) -> Section:
        return self.method.settings()

    def test_settings_have_one_kind_and_defaults(self) -> None:
        kind = self.method.settings.model_fields.get("kind")
        assert kind is not None, "the settings need a field `kind`, which names the method"
        names = get_args(kind.annotation)
        assert len(names) == 1, f"`kind` must have one value, such as Literal['mine'], found {kind.annotation}"
        assert kind.default == names[0], f"`kind` must have its one value {names[0]!r} as the default"
        required = [name for name, info in self.method.settings.model_fields.items() if info.is_required()]
        assert not required, f"`method: {names[0]}` is enough in a recipe, but these have no default: {required}"

    def test_settings_are_read_again_from_a_manifest(self) -> None:
        settings = self.settings()
        written = settings.model_dump(mode="json", by_alias=True)
        assert type(settings).model_validate(written) == settings, "the settings of a run cannot be read again"

    def test_traits_are_fit_for_the_stage(self) -> None:
        traits = self.method.traits
        unknown = set(traits.kl) - set(KLDefaults.__annotations__)
        assert not unknown, f"traits.kl: {', '.join(unknown)} cannot be set by a method"
        assert traits.answers >= (2 if traits.needs_groups else 1), "a method that needs groups needs 2 answers or more"
        assert traits.minibatches >= 1, "there is one optimiser step or more to a batch"
        assert not (traits.is_on_policy and traits.minibatches > 1), "without a ratio, only one step is on-policy"
        assert self.method.per in get_args(Per), f"per must be one of {get_args(Per)}"

    def test_advantages_are_one_number_per_token_and_zero_outside_the_response(self) -> None:
        credit = example_credit()
        advantages_BT = self._advantages(credit)
        mask_BT = credit.rollouts.response_mask_BT
        assert advantages_BT.shape == mask_BT.shape, "advantages_BT must have the shape of the tokens"
        assert advantages_BT.isfinite().all(), "advantages must be finite"
        assert not advantages_BT[~mask_BT].any(), "advantages must be 0 outside the response"
        assert advantages_BT[mask_BT].any(), "scores differ, yet no token has an advantage"

    def test_advantages_do_not_depend_on_the_order_of_rows(self) -> None:
        credit, order_B = example_credit(), torch.tensor([4, 0, 3, 5, 1, 2])
        assert_close(self._advantages(take(credit, order_B)), self._advantages(credit)[order_B])

    def test_group_ids_are_only_names(self) -> None:
        credit = example_credit()
        group_B = torch.where(credit.rollouts.group_B == 7, -4, 90)
        renamed = replace(credit, rollouts=replace(credit.rollouts, group_B=group_B))
        assert_close(self._advantages(renamed), self._advantages(credit))

    def test_a_better_answer_to_the_same_prompt_has_a_larger_advantage(self) -> None:
        credit = _without_penalty(example_credit())
        first_B = self._advantages(credit)[:, _PROMPT]
        for better, worse in combinations(sorted(range(len(_SCORES)), key=lambda row: -_SCORES[row]), 2):
            if _GROUPS[better] == _GROUPS[worse]:
                assert first_B[better] >= first_B[worse], f"score {_SCORES[better]} is worth less than {_SCORES[worse]}"
        assert first_B[2] > first_B[5], "the best answer of a group is worth no more than the worst"

    def test_a_group_of_equal_scores_teaches_nothing(self) -> None:
        if not self.method.traits.needs_groups:
            return
        credit = _without_penalty(example_credit())
        is_equal_B = credit.rollouts.group_B == 7
        equal = replace(credit, scores_B=torch.where(is_equal_B, 0.1, credit.scores_B))
        advantages_BT = self._advantages(equal)[is_equal_B]
        assert_close(advantages_BT, torch.zeros_like(advantages_BT), rtol=0, atol=1e-6)

    def test_advantages_do_not_read_outside_the_response(self) -> None:
        credit = example_credit()
        outside_BT = ~credit.rollouts.response_mask_BT
        garbage = replace(
            credit,
            penalty_BT=torch.where(outside_BT, 7.0, credit.penalty_BT),
            rollouts=replace(credit.rollouts, behaviour_logp_BT=-1.0 - 5.0 * outside_BT),
        )
        assert_close(self._advantages(garbage), self._advantages(credit))

    def test_the_greedy_score_is_read_where_traits_say_so_and_nowhere_else(self) -> None:
        credit = example_credit()
        moved_BT = self._advantages(replace(credit, greedy_B=credit.greedy_B - 3.0))
        is_read = not torch.equal(moved_BT, self._advantages(credit))
        assert is_read == self.method.traits.needs_greedy, (
            "the method reads greedy_B, so its traits must say needs_greedy"
            if is_read
            else "traits say needs_greedy, but greedy_B changes nothing"
        )

    def test_the_loss_is_one_number_per_token(self) -> None:
        experience = example_experience(_signs())
        item = self.method.loss(self.settings(), _moved(experience).requires_grad_(), experience)
        mask_BT = experience.rollouts.response_mask_BT
        assert item.loss_BT.shape == mask_BT.shape, "loss_BT has the shape of the tokens: nothing is averaged here"
        assert item.loss_BT[mask_BT].isfinite().all(), "the loss must be finite"
        for name, stat_BT in item.stats_BT.items():
            assert stat_BT.shape == mask_BT.shape, f"stats_BT[{name!r}] must have the shape of the loss"
            assert not stat_BT.requires_grad, f"stats_BT[{name!r}] must be detached"

    def test_the_loss_does_not_read_outside_the_response(self) -> None:
        experience = example_experience(_signs())
        outside_BT = ~experience.rollouts.response_mask_BT
        garbage = replace(
            experience,
            old_logp_BT=experience.old_logp_BT - 3.0 * outside_BT,
            ref_logp_BT=experience.ref_logp_BT - 4.0 * outside_BT,
            advantages_BT=experience.advantages_BT + 5.0 * outside_BT,
        )
        logp_BT = _moved(experience)
        assert_close(self._step(logp_BT - 2.0 * outside_BT, garbage), self._step(logp_BT, experience))

    def test_a_row_has_the_same_loss_whatever_rows_and_padding_are_beside_it(self) -> None:
        """A step is cut into micro-batches of rows, each as wide as its longest row."""
        experience, rows = example_experience(_signs()), torch.tensor([1, 4])
        width = _PROMPT + max(_LENGTHS[1], _LENGTHS[4])
        part = trimmed(take(experience, rows), width)
        logp_BT = _moved(experience)
        mask_BT = part.rollouts.response_mask_BT
        alone_BT = self.method.loss(self.settings(), logp_BT[rows, :width], part).loss_BT
        among_BT = self.method.loss(self.settings(), logp_BT, experience).loss_BT[rows, :width]
        assert_close(alone_BT[mask_BT], among_BT[mask_BT])

    def test_a_step_makes_good_answers_likelier_and_bad_ones_less_likely(self) -> None:
        """At a ratio of 1 the gradient of every method is a policy gradient."""
        experience = example_experience(_signs())
        _, gradient_BT = self._step(experience.old_logp_BT, experience)
        mask_BT = experience.rollouts.response_mask_BT
        up_BT = (-gradient_BT * experience.advantages_BT)[mask_BT]
        assert (up_BT > 0).all(), "the loss must fall where tokens of positive advantage become likelier"
        assert not gradient_BT[~mask_BT].any(), "tokens outside the response must have no gradient"

    def test_there_is_a_ratio_unless_traits_say_on_policy(self) -> None:
        experience = example_experience(_signs())
        logp_BT = _moved(experience)
        elsewhere = replace(experience, old_logp_BT=experience.old_logp_BT - 0.3)
        steps = zip(self._step(logp_BT, experience), self._step(logp_BT, elsewhere), strict=True)
        has_ratio = not all(torch.equal(here, there) for here, there in steps)
        assert has_ratio != self.method.traits.is_on_policy, (
            "the loss depends on old_logp_BT, so traits must not say is_on_policy"
            if has_ratio
            else "the loss does not depend on old_logp_BT, so traits must say is_on_policy"
        )

    def _advantages(self, credit: Credit) -> Tensor:
        return self.method.advantages(self.settings(), credit)

    def _step(self, logp_BT: Tensor, experience: Experience) -> tuple[Tensor, Tensor]:
        """The loss of a step on these rows, and its gradient by token."""
        leaf_BT = logp_BT.detach().clone().requires_grad_()
        item = self.method.loss(self.settings(), leaf_BT, experience)
        loss = mean(item, experience.rollouts.response_mask_BT, per=self.method.per)
        (gradient_BT,) = torch.autograd.grad(loss, leaf_BT)
        return loss.detach(), gradient_BT


def _without_penalty(credit: Credit) -> Credit:
    return replace(credit, penalty_BT=torch.zeros_like(credit.penalty_BT))


def _signs() -> Tensor:
    """Advantages of half the answers are 1, of the others -1."""
    sign_B = torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    return sign_B[:, None] * example_rollouts().response_mask_BT


def _moved(experience: Experience) -> Tensor:
    """Log-probs of a policy that has moved a little from the one that was sampled."""
    return experience.old_logp_BT + 0.05 * _numbers(seed=3) * experience.rollouts.response_mask_BT
