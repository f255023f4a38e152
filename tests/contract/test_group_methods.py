"""The contract of critic-free methods (`kedge.testing.contracts.group_methods`) on ours, and proof that it catches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
from pydantic import Field
from torch import Tensor

from kedge.algorithms.group.grpo import GRPO, group_relative_advantages
from kedge.algorithms.group.method import Credit, GroupMethod
from kedge.algorithms.group.reinforce import REINFORCE
from kedge.algorithms.group.remax import REMAX
from kedge.core.loss import ItemLoss, mean
from kedge.core.plugins import names
from kedge.core.records import Experience
from kedge.core.settings import Section
from kedge.stages.group.settings import find_method
from kedge.testing.contracts.group_methods import GroupMethodContract

TESTS = [name for name in dir(GroupMethodContract) if name.startswith("test_")]


@pytest.mark.parametrize("test", TESTS)
@pytest.mark.parametrize("name", names("algorithms"))
def test_our_methods_keep_the_contract(name: str, test: str) -> None:
    hold(find_method(name), test)


def hold(method: GroupMethod, test: str) -> None:
    """Run one test of the contract on a method."""
    contract = type("Contract", (GroupMethodContract,), {"method": method})
    getattr(contract(), test)()


def is_broken(method: GroupMethod, test: str) -> bool:
    try:
        hold(method, test)
    except Exception:
        return True
    return False


class NoDefault(Section):
    kind: Literal["no_default"] = "no_default"
    clip: float


class AnyKind(Section):
    kind: str = "any"
    clip: float = 0.2
    clip_high: float | None = None


class Renamed(Section):
    """Written under another name than it is read by."""

    kind: Literal["renamed"] = "renamed"
    clip: float = Field(default=0.2, validation_alias="clip", serialization_alias="Clip")
    clip_high: float | None = None


def spread(credit: Credit, advantages_B: Tensor) -> Tensor:
    return advantages_B[:, None] * credit.rollouts.response_mask_BT


def unmasked(_: Section, credit: Credit) -> Tensor:
    return credit.scores_B[:, None].expand(credit.rollouts.response_mask_BT.shape)


def by_position(_: Section, credit: Credit) -> Tensor:
    scores_GN = credit.returns_B.reshape(2, -1)
    return spread(credit, (scores_GN - scores_GN.mean(dim=1, keepdim=True)).flatten())


def by_group_number(_: Section, credit: Credit) -> Tensor:
    return group_relative_advantages(_, credit) * credit.rollouts.group_B.clamp(min=1)[:, None]


def over_batch_mean(_: Section, credit: Credit) -> Tensor:
    return spread(credit, credit.returns_B - credit.returns_B.mean())


def penalty_of_padding(_: Section, credit: Credit) -> Tensor:
    return group_relative_advantages(_, replace(credit, scores_B=credit.scores_B - credit.penalty_BT.sum(dim=1)))


def over_greedy(_: Section, credit: Credit) -> Tensor:
    return group_relative_advantages(_, credit) - spread(credit, credit.greedy_B)


def backwards(_: Section, credit: Credit) -> Tensor:
    return -group_relative_advantages(_, credit)


def ratio_of(logp_BT: Tensor, experience: Experience) -> Tensor:
    return (logp_BT - experience.old_logp_BT).exp()


def surrogate(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    """Sound: GRPO's without the clip."""
    return ItemLoss(loss_BT=-ratio_of(logp_BT, experience) * experience.advantages_BT, stats_BT={})


def descends(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    return ItemLoss(loss_BT=ratio_of(logp_BT, experience) * experience.advantages_BT, stats_BT={})


def averaged(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    item = surrogate(_, logp_BT, experience)
    return ItemLoss(loss_BT=mean(item, experience.rollouts.response_mask_BT, per="token"), stats_BT={})


def whitened_in_loss(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    item = surrogate(_, logp_BT, experience)
    return ItemLoss(loss_BT=item.loss_BT / experience.advantages_BT.std(), stats_BT={})


def ratio_of_padding(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    ratio_B1 = (logp_BT - experience.old_logp_BT).mean(dim=1, keepdim=True).exp()
    return ItemLoss(loss_BT=-ratio_B1 * experience.advantages_BT, stats_BT={})


def attached(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    ratio_BT = ratio_of(logp_BT, experience)
    return ItemLoss(loss_BT=-ratio_BT * experience.advantages_BT, stats_BT={"ratio": ratio_BT})


def without_ratio(_: Section, logp_BT: Tensor, experience: Experience) -> ItemLoss:
    return ItemLoss(loss_BT=-logp_BT * experience.advantages_BT, stats_BT={})


def traits(method: GroupMethod, **changes: Any) -> GroupMethod:
    return replace(method, traits=replace(method.traits, **changes))


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (replace(GRPO, loss=surrogate), set()),
        (replace(GRPO, settings=NoDefault), set(TESTS) - {"test_traits_are_fit_for_the_stage"}),
        (replace(GRPO, settings=AnyKind), {"test_settings_have_one_kind"}),
        (replace(GRPO, settings=Renamed), {"test_settings_are_read_again"}),
        (traits(GRPO, kl={"strat": 0.1}), {"test_traits_are_fit"}),
        (traits(GRPO, answers=1), {"test_traits_are_fit"}),
        (traits(REINFORCE, minibatches=2), {"test_traits_are_fit"}),
        (replace(REINFORCE, advantages=unmasked), {"test_advantages_are_one_number"}),
        (
            replace(GRPO, advantages=by_position),
            {"test_advantages_do_not_depend_on_the_order", "test_a_group_of_equal_scores"},
        ),
        (replace(GRPO, advantages=by_group_number), {"test_group_ids"}),
        (replace(GRPO, advantages=over_batch_mean), {"test_a_group_of_equal_scores"}),
        (replace(GRPO, advantages=penalty_of_padding), {"test_advantages_do_not_read_outside"}),
        (replace(GRPO, advantages=over_greedy), {"test_the_greedy_score"}),
        (traits(REMAX, needs_greedy=False), {"test_the_greedy_score"}),
        (traits(GRPO, needs_greedy=True), {"test_the_greedy_score"}),
        (replace(GRPO, advantages=backwards), {"test_a_better_answer"}),
        (replace(GRPO, loss=descends), {"test_a_step_makes_good_answers"}),
        (
            replace(GRPO, loss=averaged),
            {
                "test_the_loss_is_one_number",
                "test_the_loss_does_not_read_outside",
                "test_a_row_has_the_same_loss",
                "test_a_step_makes_good_answers",
                "test_there_is_a_ratio",
            },
        ),
        (
            replace(GRPO, loss=whitened_in_loss),
            {"test_the_loss_does_not_read_outside", "test_a_row_has_the_same_loss"},
        ),
        (
            replace(GRPO, loss=ratio_of_padding),
            {
                "test_the_loss_does_not_read_outside",
                "test_a_row_has_the_same_loss",
                "test_a_step_makes_good_answers",
            },
        ),
        (replace(GRPO, loss=attached), {"test_the_loss_is_one_number"}),
        (replace(GRPO, loss=without_ratio), {"test_there_is_a_ratio"}),
        (traits(GRPO, is_on_policy=True), {"test_there_is_a_ratio"}),
    ],
)
def test_the_contract_catches(method: GroupMethod, expected: set[str]) -> None:
    broken = {test for test in TESTS if is_broken(method, test)}
    assert len(broken) == len(expected), broken
    assert all(any(test.startswith(start) for start in expected) for test in broken), broken


def test_a_subclass_may_give_other_settings() -> None:
    clips: list[float] = []

    def advantages(settings: Any, credit: Credit) -> Tensor:
        clips.append(settings.clip)
        return group_relative_advantages(settings, credit)

    class Contract(GroupMethodContract):
        method = replace(GRPO, advantages=advantages)

        def settings(self) -> Section:
            return GRPO.settings(clip=0.05)

    Contract().test_group_ids_are_only_names()
    assert set(clips) == {0.05}
