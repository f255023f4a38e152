"""Every objective against the plain way: transformers on padded rows with an attention mask, and the loss written out.

In float32, with all weights and with adapters: the loss and the gradient of a step agree to 1e-5 of their size, and how
a step is cut into passes changes neither by more than 1e-6.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import torch
from tests.models.training.preference_cases import METHODS
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, pad

from kedge.algorithms.ppo import policy_loss, value_loss
from kedge.core.batches import pad_rows, pad_tokens
from kedge.core.optimiser import OptimiserSettings
from kedge.core.records import Experience, Rollouts, ValueTargets
from kedge.data.batching import (
    LabelledAnswers,
    RankedAnswers,
    TokenSequence,
    answer_batches,
    comparison_batches,
    padded_batches,
    token_batch,
)
from kedge.models.forward.backbones import backbone_of
from kedge.models.forward.heads import language_model
from kedge.models.forward.lora import with_lora
from kedge.models.loading.tiny import make_tiny, tiny_model
from kedge.models.reward.reward_files import build
from kedge.models.reward.reward_model import RewardModel, head_of, scores
from kedge.models.roles.actor_critic import Critic, Policy
from kedge.models.settings import LoraSettings
from kedge.models.training.learner import Learner
from kedge.models.training.objectives import RankingLoss, imitation, preference
from kedge.models.training.passes import Passes
from kedge.models.training.preference_methods import CPO, DPO, IPO, KTO, ORPO, TDPO, AnyMethod, SimPO
from kedge.models.training.preference_objectives import as_it_is, preference_objective
from kedge.models.training.train_step import TrainStep, trained_weights
from kedge.models.training.weighted_objective import WeightedAnswers, weighted_likelihood

PAD, ANCHOR, TEMPERATURE = 256, 0.375, 0.7
STEP = OptimiserSettings(lr=1e-9, clip=1e9)
Gradients = dict[str, Tensor]
Cut = dict[str, int]
CUTS: list[Cut] = [{"rows": 100}, {"rows": 2}, {"tokens": 25}]


class Step(NamedTuple):
    loss: float
    gradients: Gradients


def gradients_of(model: nn.Module) -> Gradients:
    return {name: weight.grad.clone() for name, weight in model.named_parameters() if weight.grad is not None}


def expect_close(step: Step, expected: Step, share: float) -> None:
    """Within this share of the loss, and of the largest entry of the gradient of each weight."""
    assert step.loss == pytest.approx(expected.loss, rel=share)
    reached = {name for name, gradient in expected.gradients.items() if gradient.any()}
    assert reached
    assert reached == {name for name, gradient in step.gradients.items() if gradient.any()}
    for name in reached:
        gap = (step.gradients[name] - expected.gradients[name]).abs().max()
        assert gap <= share * max(expected.gradients[name].abs().max().item(), 1e-2), name


def expect_the_plain_step(learn: Callable[[Cut], Step], plain: Callable[[], Step]) -> None:
    steps = [learn(cut) for cut in CUTS]
    expect_close(steps[0], plain(), 1e-5)
    for step in steps[1:]:
        expect_close(step, steps[0], 2e-6)


def adapted(model: Any) -> Any:
    """With adapters that are no longer zero."""
    model = with_lora(model, LoraSettings(rank=4), name="policy", seed=2)
    rng = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if ".lora_B." in name:
                weight.copy_(0.05 * torch.randn(weight.shape, generator=rng))
    return model.eval()


@pytest.fixture(params=["full", pytest.param("lora", marks=pytest.mark.slow)])
def model(request: pytest.FixtureRequest) -> Any:
    plain = tiny_model(hidden=32, layers=2)
    return plain if request.param == "full" else adapted(plain)


def learnt(model: Any, objective: Callable[[Any], Any], batches: Sequence[Any]) -> Step:
    """Loss and gradient of one step of a copy of the model."""
    model = deepcopy(model)
    policy = language_model(model)
    learner = Learner(trained_weights(model), policy.backbone, objective(policy), STEP, total_steps=9)
    metrics = learner.update(lambda _: batches)
    return Step(metrics["loss"], gradients_of(model))


def plainly(model: nn.Module, loss_of: Callable[[Any], Tensor]) -> Step:
    model = deepcopy(model)
    loss = loss_of(model)
    loss.backward()
    return Step(loss.item(), gradients_of(model))


def log_softmaxes(model: Any, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> tuple[Tensor, ...]:
    """`logp_BTV` of what token t is drawn from, the tokens, and where they count."""
    tokens_BT, mask_BT = pad_tokens([sequence.tokens for sequence in sequences], pad=PAD)
    logits_BTV = model(input_ids=tokens_BT, attention_mask=mask_BT.long()).logits / temperature
    counted_BT = pad_rows([[False, *sequence.counted[1:]] for sequence in sequences], False)
    return pad(logits_BTV[:, :-1].log_softmax(-1), (0, 0, 1, 0)), tokens_BT, counted_BT


def logprobs(model: Any, sequences: Sequence[TokenSequence], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """The sum of each answer's log-probs, and its number of tokens."""
    logp_BTV, tokens_BT, counted_BT = log_softmaxes(model, sequences, temperature)
    return (logp_BTV.gather(2, tokens_BT[..., None])[..., 0] * counted_BT).sum(dim=1), counted_BT.sum(dim=1)


def sequences(seed: int, *lengths: tuple[int, int]) -> list[TokenSequence]:
    """Prompts and answers of these lengths; the second answer has a hole, as one of several turns."""
    rng = Random(seed)
    made: list[TokenSequence] = []
    for number, (prompt, answer) in enumerate(lengths):
        counted = [False] * prompt + [number != 1 or at != 1 for at in range(answer)]
        made.append(TokenSequence(tokens=[rng.randrange(256) for _ in counted], counted=counted))
    return made


ROWS = sequences(1, (4, 9), (1, 12), (7, 5), (2, 1), (5, 7), (3, 3), (1, 2), (6, 4))


def test_imitation(model: Any) -> None:
    def loss(plain: Any) -> Tensor:
        logp_B, count_B = logprobs(plain, ROWS)
        return -logp_B.sum() / count_B.sum()

    expect_the_plain_step(
        lambda cut: learnt(model, imitation, padded_batches(ROWS, pad=PAD, **cut)), lambda: plainly(model, loss)
    )


def test_weighted_likelihood(model: Any) -> None:
    weight_B, item_B = torch.tensor([0.5, -0.3, 1.2, 0.0, 0.5, 0.1, -1.0, 0.5]), torch.arange(8) % 3 == 0

    def batches(cut: Cut) -> list[WeightedAnswers]:
        size = cut.get("rows", 3)
        parts = (slice(at, at + size) for at in range(0, 8, size))
        return [
            WeightedAnswers(
                tokens_BT=batch.tokens_BT,
                attention_mask_BT=batch.attention_mask_BT,
                response_mask_BT=batch.counted_BT,
                weight_B=weight_B[part],
                item_B=item_B[part],
            )
            for part in parts
            for batch in [token_batch(ROWS[part], pad=PAD)]
        ]

    def loss(plain: Any) -> Tensor:
        logp_B, _ = logprobs(plain, ROWS, TEMPERATURE)
        return -(weight_B * logp_B).sum() / item_B.sum()

    expect_the_plain_step(
        lambda cut: learnt(model, partial(weighted_likelihood, temperature=TEMPERATURE), batches(cut)),
        lambda: plainly(model, loss),
    )


# Preferences


def labelled(method: AnyMethod) -> list[LabelledAnswers]:
    """Pairs of neighbours, or for KTO single answers; the reference is near a random model: no loss saturates."""
    ref = [-5.5 * sum(row.counted) + number % 4 / 2 for number, row in enumerate(ROWS)]
    size = 1 if isinstance(method, KTO) else 2
    return [
        LabelledAnswers(
            sequences=tuple(ROWS[at : at + size]),
            is_good=(at % 3 == 0,) if size == 1 else (True, False),
            ref_logp=tuple(ref[at : at + size]),
        )
        for at in range(0, 8, size)
    ]


def plain_preference_loss(method: AnyMethod, reference: Any, plain: Any) -> Tensor:
    items = labelled(method)
    rows = [row for item in items for row in item.sequences]
    logp_BTV, tokens_BT, counted_BT = log_softmaxes(plain, rows)
    logp_S = (logp_BTV.gather(2, tokens_BT[..., None])[..., 0] * counted_BT).sum(dim=1)
    ref_S = torch.tensor([ref for item in items for ref in item.ref_logp])
    count_S, ratio_S = counted_BT.sum(dim=1), logp_S - ref_S
    if isinstance(method, KTO):
        good_S = torch.tensor([item.is_good[0] for item in items])
        above_S = method.beta * (ratio_S - ANCHOR)
        liked_S = method.desirable_weight * (1 - above_S.sigmoid())
        others_S = method.undesirable_weight * (1 - (-above_S).sigmoid())
        nll = (-logp_S / count_S)[good_S].mean()
        return torch.where(good_S, liked_S, others_S).mean() + method.sft_weight * nll
    c, r, lc, lr = logp_S[::2], logp_S[1::2], count_S[::2], count_S[1::2]
    margin = ratio_S[::2] - ratio_S[1::2]
    sft = method.sft_weight * (-c / lc).mean()
    match method:
        case DPO(loss="hinge", beta=b):
            return (1 - b * margin).clamp(min=0).mean()
        case DPO(beta=b, label_smoothing=e):
            return sft - ((1 - e) * logsigmoid(b * margin) + e * logsigmoid(-b * margin)).mean()
        case IPO(beta=b, log_probs="sum"):
            return (margin - 1 / (2 * b)).square().mean()
        case IPO(beta=b):
            mean_S = ratio_S / count_S
            return (mean_S[::2] - mean_S[1::2] - 1 / (2 * b)).square().mean()
        case ORPO(beta=b):
            pc, pr = (c / lc).exp(), (r / lr).exp()
            return sft - b * logsigmoid(((pc / (1 - pc)) / (pr / (1 - pr))).log()).mean()
        case SimPO(beta=b, gamma=g):
            return -logsigmoid(b * (c / lc - r / lr) - g).mean()
        case CPO(beta=b):
            return sft - logsigmoid(b * (c - r)).mean()
        case TDPO(beta=b, alpha=a):
            ref_BTV = log_softmaxes(reference, rows)[0].detach()
            kl_S = ((ref_BTV.exp() * (ref_BTV - logp_BTV)).sum(-1) * counted_BT).sum(dim=1)
            kc, kr = kl_S[::2], kl_S[1::2]
            return -logsigmoid(b * (margin - (kr - kc if a is None else a * (kr - kc.detach())))).mean()


@pytest.mark.parametrize("name", METHODS)
def test_preference_methods(model: Any, name: str) -> None:
    method, reference = METHODS[name], tiny_model(seed=1, hidden=32, layers=2)
    objective = partial(preference_objective, method=method, reference=as_it_is(reference))
    anchor = torch.tensor(ANCHOR)
    expect_the_plain_step(
        lambda cut: learnt(model, objective, answer_batches(labelled(method), pad=PAD, anchor=anchor, **cut)),
        lambda: plainly(model, partial(plain_preference_loss, method, reference)),
    )


# Rewards


def ranked() -> list[RankedAnswers]:
    """Pairs either way round with margins and weights, rankings with ties, two objectives."""
    rng = Random(5)

    def answers(*lengths: int) -> list[list[int]]:
        return [[rng.randrange(256) for _ in range(length)] + [258] for length in lengths]

    return [
        RankedAnswers(answers=answers(9, 4), rank=(1, 2), margin=0.75, certainty=0.75, weight=2.0),
        RankedAnswers(answers=answers(3, 12), rank=(2, 1), margin=-0.5, certainty=0.5, weight=0.5, objective=1),
        RankedAnswers(answers=answers(2, 8, 5), rank=(3, 1, 2), weight=1.5),
        RankedAnswers(answers=answers(6, 1, 7, 4), rank=(2, 1, 2, 3), objective=1),
        RankedAnswers(answers=answers(4, 7), rank=(1, 1), weight=3.0),
    ]


def plain_ranking_loss(ranking: RankingLoss, centre: float, plain: Any) -> Tensor:
    total = torch.zeros(())
    for item in ranked():
        tokens_BT, mask_BT = pad_tokens(item.answers, pad=PAD)
        s = plain(input_ids=tokens_BT, attention_mask=mask_BT.long()).logits[:, item.objective]
        rank, at = item.rank, range(len(item.rank))
        if len(at) == 2 and rank[0] != rank[1]:
            gap = (s[0] - s[1]) * (1 if rank[0] < rank[1] else -1)
            right, wrong = logsigmoid(gap - item.margin), logsigmoid(-gap - item.margin)
            loss = -item.certainty * right - (1 - item.certainty) * wrong
        elif ranking == "all_pairs":
            pairs = [-logsigmoid(s[i] - s[j]) for i in at for j in at if rank[i] < rank[j]]
            loss = torch.stack(pairs).mean() if pairs else torch.zeros(())
        else:
            better = [[j for j in at if rank[j] >= rank[i]] for i in at]
            loss = torch.stack([s[others].logsumexp(0) - s[i] for i, others in zip(at, better, strict=True)]).sum()
        total = total + item.weight * (loss + centre * s.sum().square())
    return total / sum(item.weight for item in ranked())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", hidden=32, layers=2)


@pytest.mark.parametrize("ranking", ["plackett_luce", "all_pairs"])
@pytest.mark.parametrize("is_full", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["full", "lora"])
def test_rewards(folder: Path, is_full: bool, ranking: RankingLoss) -> None:
    def reward() -> RewardModel:
        built = build(folder, objectives=("helpful", "harmless"), seed=3, dtype="float32")
        model = built.model if is_full else adapted(built.model)
        return RewardModel(model=model, tokenizer=built.tokenizer, facts=built.facts)

    def learn(cut: Cut) -> Step:
        judge = reward()
        objective = preference(partial(scores, judge), ranking=ranking, centre=0.01)
        trained = trained_weights(judge.model, head=head_of(judge.model))
        learner = Learner(trained, judge.backbone, objective, STEP, total_steps=9)
        loss = learner.update(lambda _: comparison_batches(ranked(), pad=PAD, **cut))["loss"]
        return Step(loss, gradients_of(judge.model))

    expect_the_plain_step(learn, lambda: plainly(reward().model, partial(plain_ranking_loss, ranking, 0.01)))


# PPO


def rollouts() -> Rollouts:
    tokens_BT, mask_BT = pad_tokens([row.tokens for row in ROWS], pad=PAD)
    return Rollouts(
        tokens_BT=tokens_BT,
        attention_mask_BT=mask_BT,
        response_mask_BT=pad_rows([row.counted for row in ROWS], False),
        behaviour_logp_BT=torch.zeros(tokens_BT.shape),
        group_B=torch.arange(len(ROWS)),
        finished_B=torch.ones(len(ROWS), dtype=torch.bool),
        version=0,
    )


def drawn(seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(rollouts().tokens_BT.shape, generator=torch.Generator().manual_seed(seed))


def test_the_policy_of_ppo(model: Any) -> None:
    old_BT, advantages_BT, sampled = -5.5 + drawn(1, 0.3), drawn(2), rollouts()
    zeros_BT = torch.zeros_like(old_BT)
    experience = Experience(rollouts=sampled, old_logp_BT=old_BT, ref_logp_BT=zeros_BT, advantages_BT=advantages_BT)

    def learn(rows: Cut) -> Step:
        own = deepcopy(model)
        train_step = TrainStep(trained_weights(own).named, STEP, total_steps=9, passes=Passes(rows.get("rows", 3)))
        policy = Policy(language_model(own), train_step, temperature=TEMPERATURE)
        metrics = policy.update(
            experience,
            lambda logp_BT, _, part: policy_loss(logp_BT, part.old_logp_BT, part.advantages_BT, clip=0.2),
            per="token",
        )
        return Step(metrics["loss"], gradients_of(own))

    def loss(plain: Any) -> Tensor:
        logp_BTV, tokens_BT, mask_BT = log_softmaxes(plain, ROWS, TEMPERATURE)
        ratio_BT = (logp_BTV.gather(2, tokens_BT[..., None])[..., 0] - old_BT).exp()
        gain_BT = torch.minimum(ratio_BT * advantages_BT, ratio_BT.clamp(0.8, 1.2) * advantages_BT)
        return -gain_BT[mask_BT].mean()

    expect_the_plain_step(learn, lambda: plainly(model, loss))


def test_the_critic_of_ppo(model: Any) -> None:
    sampled = rollouts()
    targets = ValueTargets(rollouts=sampled, old_values_BT=drawn(3, 0.1), returns_BT=drawn(4))
    head = nn.Linear(32, 1)
    nn.init.normal_(head.weight, generator=torch.Generator().manual_seed(1))

    def learn(rows: Cut) -> Step:
        own, own_head = deepcopy(model), deepcopy(head)
        of_head = list(own_head.named_parameters(prefix="head"))
        passes = Passes(rows.get("rows", 3))
        train_step = TrainStep([*trained_weights(own).named, *of_head], STEP, total_steps=9, passes=passes)
        critic = Critic(backbone_of(own), own_head, train_step)
        metrics = critic.update(
            targets,
            lambda values_BT, part: value_loss(values_BT, part.old_values_BT, part.returns_BT, clip=0.2),
            per="token",
        )
        return Step(metrics["loss"], gradients_of(nn.ModuleList([own, own_head])))

    def loss(both: Any) -> Tensor:
        own, own_head = both
        decoder = own.get_decoder() if hasattr(own, "get_decoder") else own.get_base_model().get_decoder()
        output = decoder(input_ids=sampled.tokens_BT, attention_mask=sampled.attention_mask_BT.long())
        values_BT = pad(own_head(output.last_hidden_state[:, :-1])[..., 0], (1, 0))
        clipped_BT = targets.old_values_BT + (values_BT - targets.old_values_BT).clamp(-0.2, 0.2)
        free_BT, held_BT = ((x - targets.returns_BT).square() for x in (values_BT, clipped_BT))
        return torch.maximum(free_BT, held_BT)[sampled.response_mask_BT].mean() / 2

    expect_the_plain_step(learn, lambda: plainly(nn.ModuleList([model, head]), loss))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
@pytest.mark.parametrize("name", ["imitation", "dpo", "kto", "tdpo"])
def test_a_pass_does_not_wait_for_the_device(name: str) -> None:
    """Forward and backward are queued without a single read of the device."""
    own: Any = tiny_model(hidden=64, layers=2).cuda()
    trained = trained_weights(own, dtype=torch.bfloat16)
    policy = language_model(own)
    if name == "imitation":
        objective: Any = imitation(policy)
        (batch,) = padded_batches(ROWS, pad=PAD)
    else:
        reference = as_it_is(deepcopy(own).requires_grad_(False))
        objective = preference_objective(policy, METHODS[name], reference=reference)
        (batch,) = answer_batches(labelled(METHODS[name]), pad=PAD)  # pyright: ignore[reportAssignmentType]
    weights = [weight for _, weight in trained.named]
    with policy.active():
        torch.autograd.grad(objective.sums(batch).loss, weights, allow_unused=True)  # what is made once is made
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")
            torch.autograd.grad(objective.sums(batch).loss, weights, allow_unused=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
