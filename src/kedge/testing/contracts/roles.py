"""What every way to build the roles promises (`kedge.models.roles.build`), as tests that a plugin subclasses.

    class TestMyRoles(RolesContract):
        def build(self, spec):
            return my_roles(spec)

Models are tiny and on the CPU. Left out: which weights are shared, memory, and reward models that share weights.
Shape letters: B sequences, T token positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Phi3Config, Phi3ForCausalLM

from kedge.core.errors import CheckpointError
from kedge.core.loss import ItemLoss
from kedge.core.optimiser import OptimiserSettings
from kedge.core.records import Experience, Rollouts, ValueTargets
from kedge.models.loading.start import save_causal
from kedge.models.loading.tiny import make_tiny, tiny_tokenizer
from kedge.models.roles.actor_critic import NoCritic, RoleSet
from kedge.models.roles.build import RoleSpec
from kedge.models.settings import LoraSettings

LENGTHS, PROMPTS, WIDTH = (9, 5, 12, 7, 12, 4), (3, 2, 1, 4, 6, 2), 12
"""Tokens and prompt tokens of the example rows, and the width that they are padded to."""
PAD = 256


class RolesContract:
    """The tests. A subclass gives `build`; pytest makes a new instance of it for each test."""

    def build(self, spec: RoleSpec) -> RoleSet:
        """New roles for `spec`: no weight of theirs is shared with roles that were built before."""
        raise NotImplementedError

    def test_before_the_first_step_policy_and_reference_are_the_base(self, tmp_path: Path) -> None:
        spec, rollouts = example_spec(tiny_base(tmp_path)), example_rollouts()
        roles = self.build(spec)
        policy_BT, reference_BT = roles.policy.logprobs(rollouts), roles.reference.logprobs(rollouts)
        assert torch.equal(policy_BT, reference_BT), "the ratio to the reference is not exactly 1 before the first step"
        expected_BT = transformers_logprobs(Path(spec.base), rollouts, spec.temperature)
        assert_close(policy_BT, expected_BT, rtol=1e-4, atol=1e-5)

    def test_outside_of_the_response_everything_is_zero(self, tmp_path: Path) -> None:
        rollouts = example_rollouts()
        roles = self.build(example_spec(tiny_base(tmp_path)))
        update_both(roles, rollouts)  # values start at zero
        for name, x_BT in answers_of(roles, rollouts).items():
            assert x_BT.dtype == torch.float32, f"{name}: {x_BT.dtype}, expected float32"
            assert torch.equal(x_BT != 0, rollouts.response_mask_BT), f"{name}: not zero exactly outside the response"

    def test_the_policy_learns_alone(self, tmp_path: Path) -> None:
        rollouts = example_rollouts()
        roles = self.build(example_spec(tiny_base(tmp_path)))
        update_critic(roles, rollouts)
        before = answers_of(roles, rollouts)
        first = update_policy(roles, rollouts)
        after = answers_of(roles, rollouts)
        assert {"loss", "grad_norm", "lr"} <= first.keys()
        assert not torch.equal(after["policy"], before["policy"]), "an update changed nothing"
        assert torch.equal(after["reference"], before["reference"]), "an update of the policy changed the reference"
        assert torch.equal(after["critic"], before["critic"]), "an update of the policy changed the critic"
        assert update_policy(roles, rollouts)["loss"] < first["loss"], "the loss of the policy went up"

    def test_the_critic_learns_alone(self, tmp_path: Path) -> None:
        rollouts = example_rollouts()
        roles = self.build(example_spec(tiny_base(tmp_path)))
        before = answers_of(roles, rollouts)
        first, second = (update_critic(roles, rollouts) for _ in range(2))
        after = answers_of(roles, rollouts)
        assert second["loss"] < first["loss"], "the loss of the critic went up"
        assert torch.equal(after["policy"], before["policy"]), "an update of the critic changed the policy"
        assert torch.equal(after["reference"], before["reference"]), "an update of the critic changed the reference"

    def test_weights_are_what_was_learnt(self, tmp_path: Path) -> None:
        """A generator loads them after each iteration; with them, the model that it started with is the policy."""
        spec, rollouts = example_spec(tiny_base(tmp_path)), example_rollouts()
        roles, fresh = self.build(spec), self.build(spec)
        before = {name: weight.clone() for name, weight in roles.policy.weights().items()}
        update_policy(roles, rollouts)
        weights = roles.policy.weights()
        assert before, "no weight of the policy is trained"
        assert weights.keys() == before.keys(), "the names of the weights changed"
        assert {weight.dtype for weight in weights.values()} == {torch.float32}, "weights are not in full precision"
        assert any(not torch.equal(weights[name], before[name]) for name in before), "an update changed no weight"
        parameters = dict(fresh.model.named_parameters())
        assert weights.keys() <= parameters.keys(), "the names are not those of the parameters of `model`"
        with torch.no_grad():
            for name, weight in weights.items():
                parameters[name].copy_(weight)
        assert torch.equal(fresh.policy.logprobs(rollouts), roles.policy.logprobs(rollouts)), "weights are missing"

    def test_a_state_brings_everything_back(self, tmp_path: Path) -> None:
        spec, rollouts = replace(example_spec(tiny_base(tmp_path)), ema=0.5), example_rollouts()
        roles, resumed = self.build(spec), self.build(spec)
        for _ in range(2):
            update_both(roles, rollouts)
        resumed.load(deepcopy(roles.state()))
        assert_same_state(resumed.state(), roles.state())
        for each in (roles, resumed):
            update_both(each, rollouts)
        assert_same_state(resumed.state(), roles.state())
        expected = answers_of(roles, rollouts)
        for name, x_BT in answers_of(resumed, rollouts).items():
            assert torch.equal(x_BT, expected[name]), f"{name}: a resumed run is not the run that it continues"

    def test_what_is_saved_is_the_policy(self, tmp_path: Path) -> None:
        spec, rollouts = example_spec(tiny_base(tmp_path)), example_rollouts()
        roles = self.build(spec)
        update_both(roles, rollouts)
        weights = {name: weight.clone() for name, weight in roles.policy.weights().items()}
        folder = save_causal(roles.model, tiny_tokenizer(), tmp_path / "saved", weights=roles.policy.final_weights())
        expected_BT = roles.policy.logprobs(rollouts)
        assert_close(transformers_logprobs(folder, rollouts, spec.temperature), expected_BT, rtol=1e-4, atol=1e-5)
        assert (folder / "tokenizer.json").is_file(), "the tokenizer was not saved"
        for name, weight in roles.policy.weights().items():
            assert torch.equal(weight, weights[name]), f"{name}: saving changed the policy"

    def test_without_a_critic_there_is_none(self, tmp_path: Path) -> None:
        spec, rollouts = example_spec(tiny_base(tmp_path)), example_rollouts()
        roles = self.build(replace(spec, critic=None))
        assert isinstance(roles.critic, NoCritic)
        assert not roles.critic.values(rollouts).any()
        assert "critic" not in [row.role for row in roles.memory], "memory is counted for a critic that is not there"
        with_critic = self.build(spec)
        for each in (roles, with_critic):
            update_policy(each, rollouts)
        assert torch.equal(roles.policy.logprobs(rollouts), with_critic.policy.logprobs(rollouts))

    def test_dropout_is_off(self, tmp_path: Path) -> None:
        """Two computations of a log-prob must agree: ratios and the KL to the reference are made of their difference.

        Roles are put into training mode by `recompute`.
        """
        rollouts = example_rollouts()
        without, with_dropout = (
            self.build(
                replace(
                    example_spec(dropout_model(tmp_path / f"dropout-{share}", share)),
                    lora=LoraSettings(rank=4, alpha=8, dropout=share),
                    recompute=True,
                )
            )
            for share in (0.0, 0.5)
        )
        for roles in (without, with_dropout):
            roles.model.train()
            update_both(roles, rollouts)
        expected = answers_of(without, rollouts)
        for name, x_BT in answers_of(with_dropout, rollouts).items():
            assert torch.equal(x_BT, expected[name]), f"{name}: dropout is on"

    def test_micro_batches_do_not_change_the_update(self, tmp_path: Path) -> None:
        spec, rollouts = example_spec(tiny_base(tmp_path)), example_rollouts()
        whole, cut = self.build(replace(spec, rows=16)), self.build(replace(spec, rows=1))
        for each in (whole, cut):
            update_both(each, rollouts)
        expected = answers_of(whole, rollouts)
        for name, x_BT in answers_of(cut, rollouts).items():
            assert_close(x_BT, expected[name], rtol=1e-4, atol=1e-5, msg=lambda text, role=name: f"{role}: {text}")

    def test_the_reference_is_known_by_its_weights(self, tmp_path: Path) -> None:
        spec, rollouts = example_spec(tiny_base(tmp_path)), example_rollouts()
        roles = self.build(spec)
        first = roles.reference_hash
        update_both(roles, rollouts)
        assert roles.reference_hash == self.build(spec).reference_hash == first, "the same base, another hash"
        other = self.build(replace(spec, base=str(tiny_base(tmp_path, seed=3))))
        assert other.reference_hash != first, "another base, the same hash"
        try:
            other.load(roles.state())
        except CheckpointError:
            return
        raise AssertionError("a state was loaded whose reference is another one")


def tiny_base(folder: Path, seed: int = 2) -> Path:
    """A tiny model of two layers, made below `folder`."""
    return make_tiny(folder / f"base-{seed}", seed=seed, hidden=32, layers=2)


def example_spec(base: Path) -> RoleSpec:
    """Roles on the CPU with a learning rate that one step shows."""
    optimiser = OptimiserSettings(lr=3e-3, eps=1e-5, schedule="constant", warmup=0.0)
    return RoleSpec(
        base=str(base),
        reward=None,
        objective=None,
        critic_from_reward=False,
        device="cpu",
        dtype="float32",
        lora=LoraSettings(rank=4, alpha=8),
        trunk_layers=1,
        actor=optimiser,
        critic=optimiser,
        actor_steps=100,
        critic_steps=100,
        temperature=0.7,
        rows=4,
        recompute=False,
        ema=None,
        imitation=None,
        seed=3,
    )


def example_rollouts() -> Rollouts:
    """Rows of unequal lengths; the response of the fifth one has a gap, as with several turns."""
    rng = torch.Generator().manual_seed(4)
    position_T = torch.arange(WIDTH)
    attention_BT = position_T < torch.tensor(LENGTHS)[:, None]
    response_BT = attention_BT & (position_T >= torch.tensor(PROMPTS)[:, None])
    response_BT[4, 8:10] = False
    rows = len(LENGTHS)
    return Rollouts(
        tokens_BT=torch.randint(32, 120, (rows, WIDTH), generator=rng).masked_fill(~attention_BT, PAD),
        attention_mask_BT=attention_BT,
        response_mask_BT=response_BT,
        behaviour_logp_BT=torch.zeros(rows, WIDTH),
        group_B=torch.arange(rows),
        finished_B=torch.ones(rows, dtype=torch.bool),
        version=0,
    )


def dropout_model(folder: Path, share: float) -> Path:
    """A tiny model with dropout after its attention and its MLP, as few decoders have; same weights for any `share`."""
    config = Phi3Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        resid_pdrop=share,
        attention_dropout=share,
        pad_token_id=PAD,
        bos_token_id=None,
        eos_token_id=258,
        dtype="float32",
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        Phi3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def example_experience(rollouts: Rollouts) -> Experience:
    """Advantages from -1 to 2, different at every token."""
    zeros_BT = torch.zeros(rollouts.tokens_BT.shape)
    advantages_BT = torch.linspace(-1, 2, zeros_BT.numel()).reshape(zeros_BT.shape)
    return Experience(rollouts=rollouts, old_logp_BT=zeros_BT, ref_logp_BT=zeros_BT, advantages_BT=advantages_BT)


def example_targets(rollouts: Rollouts) -> ValueTargets:
    """Returns from -1 to 2, different at every token."""
    experience = example_experience(rollouts)
    return ValueTargets(rollouts=rollouts, old_values_BT=experience.old_logp_BT, returns_BT=experience.advantages_BT)


def weighted_likelihood(logp_BT: Tensor, entropy_BT: Tensor, experience: Experience) -> ItemLoss:
    """Raises tokens by their advantages, and the entropy a little: no two tokens or rows have the same gradient."""
    return ItemLoss(loss_BT=-logp_BT * experience.advantages_BT - 0.1 * entropy_BT, stats_BT={})


def squared_error(values_BT: Tensor, targets: ValueTargets) -> ItemLoss:
    return ItemLoss(loss_BT=(values_BT - targets.returns_BT).square(), stats_BT={})


def update_policy(roles: RoleSet, rollouts: Rollouts) -> Mapping[str, float]:
    return roles.policy.update(example_experience(rollouts), weighted_likelihood, per="token")


def update_critic(roles: RoleSet, rollouts: Rollouts) -> Mapping[str, float]:
    return roles.critic.update(example_targets(rollouts), squared_error, per="token")


def update_both(roles: RoleSet, rollouts: Rollouts) -> None:
    """One step of each. The critic's second one is the first that reaches its backbone: its head starts at zero."""
    update_policy(roles, rollouts)
    for _ in range(2):
        update_critic(roles, rollouts)


def answers_of(roles: RoleSet, rollouts: Rollouts) -> dict[str, Tensor]:
    """Log-probs of policy and reference, and the values of the critic, after what was cached is forgotten."""
    roles.forget()
    return {
        "policy": roles.policy.logprobs(rollouts),
        "reference": roles.reference.logprobs(rollouts),
        "critic": roles.critic.values(rollouts),
    }


@torch.no_grad()
def transformers_logprobs(folder: Path, rollouts: Rollouts, temperature: float) -> Tensor:
    """`logp_BT` of the response by plain transformers, each row by itself, without padding."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    logp_BT = torch.zeros(rollouts.tokens_BT.shape)
    for row, length in enumerate(rollouts.attention_mask_BT.sum(dim=1).tolist()):
        tokens_T = rollouts.tokens_BT[row, :length]
        logp_TV = (model(tokens_T[None]).logits[0].float() / temperature).log_softmax(-1)
        logp_BT[row, 1:length] = logp_TV[:-1].gather(1, tokens_T[1:, None])[:, 0]
    return logp_BT * rollouts.response_mask_BT


def assert_same_state(state: Any, expected: Any, path: str = "state") -> None:
    """Equal to the last bit, tensors in nested dicts and lists included."""
    if isinstance(expected, Mapping):
        assert state.keys() == expected.keys(), f"{path}: other keys"
        for key in expected:
            assert_same_state(state[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, list | tuple):
        assert len(state) == len(expected), f"{path}: another length"
        for index, value in enumerate(expected):
            assert_same_state(state[index], value, f"{path}[{index}]")
    elif isinstance(expected, Tensor):
        assert torch.equal(state, expected), f"{path}: other values"
    else:
        assert state == expected, f"{path}: {state}, expected {expected}"
