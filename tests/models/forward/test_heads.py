"""Shape letters: B sequences, T token positions, D width, V vocabulary."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from kedge.core.errors import ModelError
from kedge.models.forward.heads import (
    at_last,
    hidden_states,
    last_token,
    lm_head,
    logprobs_and_entropy_of,
    predicted,
    predicting_positions,
    token_logprobs,
    values_of,
)
from kedge.models.loading.tiny import tiny_model

# With one-hot hidden states, row i of the head's logits is column i of this matrix.
# state 0: probabilities 1/8, 2/8, 5/8; state 1: 1/2, 1/4, 1/4
HEAD_VD = torch.tensor([[1.0, 2.0], [2.0, 1.0], [5.0, 1.0]]).log()
ZERO, ONE = [1.0, 0.0], [0.0, 1.0]
SHORT, LONG = [72, 105, 33], [257, 65, 195, 169, 66, 258]


def one_a_row(rows: list[list[int]], *, left: bool) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows)) + 2
    fill = [[256] * (width - len(row)) for row in rows]
    tokens = [pad + row if left else row + pad for row, pad in zip(rows, fill, strict=True)]
    mask = [[False] * len(pad) + [True] * len(row) for row, pad in zip(rows, fill, strict=True)]
    return torch.tensor(tokens), torch.tensor(mask if left else [row[::-1] for row in mask])


def reference_logprobs(row: list[int]) -> Tensor:
    """Plain transformers on the row alone, without padding: log p of every token but the first."""
    with torch.no_grad():
        logits = tiny_model()(torch.tensor([row])).logits[0].double()
    return torch.stack([logits[t - 1].log_softmax(-1)[row[t]] for t in range(1, len(row))])


def test_logprobs_speak_about_their_own_token() -> None:
    hidden_BTD = torch.tensor([[ZERO, ONE, ZERO, ONE]])
    tokens_BT = torch.tensor([[1, 2, 0, 1]])
    logp_BT = token_logprobs(HEAD_VD, hidden_BTD, tokens_BT, torch.ones(1, 4, dtype=torch.bool))
    # token 1 after state 0: 5/8; token 2 after state 1: 1/2; token 3 after state 0: 2/8; the last state says nothing
    torch.testing.assert_close(logp_BT.exp(), torch.tensor([[1.0, 5 / 8, 1 / 2, 2 / 8]]))
    assert logp_BT[0, 0] == 0


def test_only_some_tokens_are_wanted() -> None:
    hidden_BTD = torch.tensor([[ZERO, ONE, ZERO, ONE], [ONE, ONE, ZERO, ZERO]])
    tokens_BT = torch.tensor([[1, 2, 0, 1], [0, 0, 1, 2]])
    only_BT = torch.tensor([[True, False, True, False], [False, True, False, True]])
    logp_BT = token_logprobs(HEAD_VD, hidden_BTD, tokens_BT, torch.ones(2, 4, dtype=torch.bool), only_BT=only_BT)
    expected = [[0.0, 0.0, math.log(1 / 2), 0.0], [0.0, math.log(1 / 2), 0.0, math.log(5 / 8)]]
    torch.testing.assert_close(logp_BT, torch.tensor(expected))


def test_temperature_divides_logits() -> None:
    hidden_BTD = torch.tensor([[ZERO, ONE]])
    logp_BT = token_logprobs(
        HEAD_VD, hidden_BTD, torch.tensor([[0, 2]]), torch.ones(1, 2, dtype=torch.bool), temperature=0.5
    )
    # squared and normed again: 25 / (1 + 4 + 25)
    torch.testing.assert_close(logp_BT.exp(), torch.tensor([[1.0, 25 / 30]]))


def test_entropy_is_of_the_distribution_the_token_came_from() -> None:
    predicted_BT = torch.tensor([[False, True, True]])
    logp_BT, entropy_BT = logprobs_and_entropy_of(
        HEAD_VD, torch.tensor([ONE, ZERO]), torch.tensor([[2, 0, 1]]), predicted_BT
    )
    torch.testing.assert_close(logp_BT.exp(), torch.tensor([[1.0, 1 / 2, 2 / 8]]))
    of_zero = -(1 / 8 * math.log(1 / 8) + 2 / 8 * math.log(2 / 8) + 5 / 8 * math.log(5 / 8))
    torch.testing.assert_close(entropy_BT, torch.tensor([[0.0, 1.5 * math.log(2), of_zero]]))


@pytest.mark.parametrize("left", [True, False])
def test_padding_changes_no_logprob(left: bool) -> None:
    model = tiny_model()
    tokens_BT, mask_BT = one_a_row([SHORT, LONG], left=left)
    with torch.no_grad():
        logp_BT = token_logprobs(lm_head(model), hidden_states(model, tokens_BT, mask_BT), tokens_BT, mask_BT)
    for b, row in enumerate((SHORT, LONG)):
        first, *rest = logp_BT[b][mask_BT[b]]
        assert first == 0
        torch.testing.assert_close(torch.stack(rest).double(), reference_logprobs(row), rtol=1e-5, atol=1e-5)
    assert not logp_BT[~mask_BT].any()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_sequences_that_share_a_row_do_not_see_each_other(attn: str) -> None:
    model = tiny_model()
    model.set_attn_implementation(attn)
    tokens_BT = torch.tensor([[*LONG, *SHORT, 256], [*SHORT, *SHORT, 256, 256, 256, 256]])
    segment_BT = torch.tensor([[1] * 6 + [2] * 3 + [0], [1] * 3 + [2] * 3 + [0] * 4])
    with torch.no_grad():
        logp_BT = token_logprobs(lm_head(model), hidden_states(model, tokens_BT, segment_BT), tokens_BT, segment_BT)
    zero = torch.zeros(1, dtype=torch.float64)
    long, short = torch.cat([zero, reference_logprobs(LONG)]), torch.cat([zero, reference_logprobs(SHORT)])
    expected = [torch.cat([long, short, zero]), torch.cat([short, short, zero, zero, zero, zero])]
    torch.testing.assert_close(logp_BT.double(), torch.stack(expected), rtol=1e-5, atol=1e-5)


def test_gradient_reaches_the_states_before_wanted_tokens_only() -> None:
    hidden_BTD = torch.tensor([[ZERO, ONE, ZERO, ONE]], requires_grad=True)
    only_BT = torch.tensor([[False, False, True, False]])
    tokens_BT = torch.tensor([[1, 2, 0, 1]])
    token_logprobs(HEAD_VD, hidden_BTD, tokens_BT, torch.ones(1, 4, dtype=torch.bool), only_BT=only_BT).sum().backward()
    assert hidden_BTD.grad is not None
    assert hidden_BTD.grad.abs().sum(-1).ne(0).tolist() == [[False, True, False, False]]


@pytest.fixture
def scalar_head() -> nn.Linear:
    head = nn.Linear(2, 1)
    head.load_state_dict({"weight": torch.tensor([[10.0, 1.0]]), "bias": torch.tensor([0.5])})
    return head


def test_value_is_of_the_prefix_before_the_token(scalar_head: nn.Linear) -> None:
    hidden_BTD = torch.tensor([[[1.0, 0.0], [2.0, 0.0], [3.0, 4.0], [9.0, 9.0]]])

    def values(segment_BT: Tensor) -> list[list[float]]:
        predicted_BT = predicted(segment_BT)
        return values_of(hidden_BTD[predicting_positions(predicted_BT)], scalar_head, predicted_BT).tolist()

    assert values(torch.tensor([[True, True, True, False]])) == [[0.0, 10.5, 20.5, 0.0]]
    assert values(torch.tensor([[False, True, True, True]])) == [[0.0, 0.0, 20.5, 34.5]]
    assert values(torch.tensor([[1, 1, 2, 2]])) == [[0.0, 10.5, 0.0, 34.5]]
    one_BT = torch.tensor([[True]])
    assert values_of(hidden_BTD[0, :1].bfloat16(), scalar_head.bfloat16(), one_BT).dtype == torch.float32


def test_foretold_tokens_may_be_a_choice_and_the_first_of_a_sequence_never_is() -> None:
    segment_BT = torch.tensor([[1, 1, 1, 2, 2, 0]])
    only_BT = torch.tensor([[True, False, True, True, True, True]])
    assert predicted(segment_BT, only_BT).tolist() == [[False, False, True, False, True, False]]


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
