"""Shape letters: B sequences, T token positions, D width, V vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kedge.core.batches import pad_tokens
from kedge.core.errors import ModelError
from kedge.models.forward.heads import (
    Targets,
    at_last,
    language_model,
    last_token,
    lm_head,
    logprobs_and_entropy,
    targets,
    token_logprobs,
    values_of,
)
from kedge.models.loading.tiny import tiny_model

# With one-hot hidden states, row i of the head's logits is column i of this matrix.
# state 0: probabilities 1/8, 2/8, 5/8; state 1: 1/2, 1/4, 1/4
HEAD_VD = torch.tensor([[1.0, 2.0], [2.0, 1.0], [5.0, 1.0]]).log()
ZERO, ONE = [1.0, 0.0], [0.0, 1.0]
SHORT, LONG = [72, 105, 33], [257, 65, 195, 169, 66, 258]


def reference_logprobs(row: list[int]) -> Tensor:
    """Plain transformers on the row alone, without padding: log p of every token but the first."""
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([row])).logits[0].double()
    return torch.stack([logits[t - 1].log_softmax(-1)[row[t]] for t in range(1, len(row))])


def all_of(mask_BT: Tensor) -> Targets:
    return targets(mask_BT, torch.ones_like(mask_BT))


def test_logprobs_speak_about_their_own_token() -> None:
    hidden_BTD = torch.tensor([[ZERO, ONE, ZERO, ONE]])
    tokens_BT = torch.tensor([[1, 2, 0, 1]])
    after = all_of(torch.ones(1, 4, dtype=torch.bool))
    logp_BT = token_logprobs(HEAD_VD, hidden_BTD[after.read_BT], tokens_BT, after)
    # token 1 after state 0: 5/8; token 2 after state 1: 1/2; token 3 after state 0: 2/8; the last state says nothing
    torch.testing.assert_close(logp_BT.exp(), torch.tensor([[1.0, 5 / 8, 1 / 2, 2 / 8]]))
    assert logp_BT[0, 0] == 0


def test_only_some_tokens_are_wanted() -> None:
    hidden_BTD = torch.tensor([[ZERO, ONE, ZERO, ONE], [ONE, ONE, ZERO, ZERO]], requires_grad=True)
    tokens_BT = torch.tensor([[1, 2, 0, 1], [0, 0, 1, 2]])
    only_BT = torch.tensor([[True, False, True, False], [False, True, False, True]])
    after = targets(torch.ones(2, 4, dtype=torch.bool), only_BT)
    assert after.index_N.tolist() == [2, 5, 7]
    logp_BT = token_logprobs(HEAD_VD, hidden_BTD[after.read_BT], tokens_BT, after)
    expected = [[0.0, 0.0, math.log(1 / 2), 0.0], [0.0, math.log(1 / 2), 0.0, math.log(5 / 8)]]
    torch.testing.assert_close(logp_BT, torch.tensor(expected))
    logp_BT.sum().backward()
    assert hidden_BTD.grad is not None
    reached = hidden_BTD.grad.abs().sum(-1).ne(0).int().tolist()
    assert reached == [[0, 1, 0, 0], [1, 0, 1, 0]]  # the states before the wanted tokens, and no other


def test_temperature_divides_logits() -> None:
    after = all_of(torch.ones(1, 2, dtype=torch.bool))
    logp_BT = token_logprobs(HEAD_VD, torch.tensor([ZERO]), torch.tensor([[0, 2]]), after, temperature=0.5)
    # squared and normed again: 25 / (1 + 4 + 25)
    torch.testing.assert_close(logp_BT.exp(), torch.tensor([[1.0, 25 / 30]]))


def test_entropy_is_of_the_distribution_the_token_came_from() -> None:
    after = all_of(torch.ones(1, 3, dtype=torch.bool))
    logp_BT, entropy_BT = logprobs_and_entropy(HEAD_VD, torch.tensor([ONE, ZERO]), torch.tensor([[2, 0, 1]]), after)
    torch.testing.assert_close(logp_BT.exp(), torch.tensor([[1.0, 1 / 2, 2 / 8]]))
    of_zero = -(1 / 8 * math.log(1 / 8) + 2 / 8 * math.log(2 / 8) + 5 / 8 * math.log(5 / 8))
    torch.testing.assert_close(entropy_BT, torch.tensor([[0.0, 1.5 * math.log(2), of_zero]]))


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_neither_padding_nor_other_rows_change_a_logprob(attn: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attn)
    policy = language_model(model)
    tokens_BT, mask_BT = pad_tokens([SHORT, LONG], pad=256)
    with torch.no_grad(), policy.active():
        logp_BT = policy.logprobs(tokens_BT, mask_BT, torch.ones_like(mask_BT))
    for b, row in enumerate((SHORT, LONG)):
        first, *rest = logp_BT[b][mask_BT[b]]
        assert first == 0
        torch.testing.assert_close(torch.stack(rest).double(), reference_logprobs(row), rtol=1e-5, atol=1e-5)
    assert not logp_BT[~mask_BT].any()


@pytest.fixture
def scalar_head() -> nn.Linear:
    head = nn.Linear(2, 1)
    head.load_state_dict({"weight": torch.tensor([[10.0, 1.0]]), "bias": torch.tensor([0.5])})
    return head


def test_value_is_of_the_prefix_before_the_token(scalar_head: nn.Linear) -> None:
    hidden_BTD = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 4.0], [9.0, 9.0]]])
    after = all_of(torch.tensor([[True, True, True, False]]))
    assert values_of(hidden_BTD[after.read_BT], scalar_head, after).tolist() == [[0.0, 10.5, 20.5, 0.0]]
    whole = all_of(torch.ones(1, 4, dtype=torch.bool))
    assert values_of(hidden_BTD[whole.read_BT], scalar_head, whole).tolist() == [[0.0, 10.5, 20.5, 34.5]]
    assert values_of(hidden_BTD[whole.read_BT].bfloat16(), scalar_head.bfloat16(), whole).dtype == torch.float32


def test_targets_may_be_a_choice_and_the_first_of_a_row_never_is_one() -> None:
    mask_BT = torch.tensor([[True, True, True, False], [True, False, False, False]])
    only_BT = torch.tensor([[True, False, True, True], [True, True, False, False]])
    after = targets(mask_BT, only_BT)
    assert (after.shape, after.index_N.tolist()) == ((2, 4), [2])
    assert after.read_BT.int().tolist() == [[0, 1, 0, 0], [0, 0, 0, 0]]
    assert after.of(torch.arange(8).view(2, 4)).tolist() == [2]
    assert after.spread(torch.tensor([5.0])).tolist() == [[0, 0, 5.0, 0], [0, 0, 0, 0]]


def test_the_last_token_of_rows_padded_on_the_right() -> None:
    mask_BT = torch.tensor([[True, True, False], [True, False, False], [True, True, True]])
    assert last_token(mask_BT).int().tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]]


def test_the_hidden_state_of_the_last_real_token() -> None:
    hidden_BTD = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 4.0]]]).expand(3, 3, 2)
    mask_BT = torch.tensor([[True, True, False], [False, True, True], [True, True, True]])
    assert at_last(hidden_BTD, mask_BT).tolist() == [[2.0, 0.0], [3.0, 4.0], [3.0, 4.0]]


def test_lm_head_is_the_output_matrix() -> None:
    model = tiny_model()
    assert lm_head(model) is model.lm_head.weight


def test_models_that_change_their_logits_are_refused() -> None:
    model = tiny_model()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(
        ModelError, match=r"LlamaForCausalLM changes its logits after the head \(final_logit_softcapping = 30"
    ):
        lm_head(model)


def test_head_with_bias_is_refused() -> None:
    model = tiny_model()
    model.lm_head = nn.Linear(96, 259, bias=True)
    with pytest.raises(ModelError, match="expected a linear output head without bias, found Linear"):
        lm_head(model)
