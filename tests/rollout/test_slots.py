"""What a step does to the slots, number by number."""

from __future__ import annotations

import torch

from kedge.rollout.steps import FIELDS, advance, empty_slots


def test_rows_that_grow_take_their_token_and_others_stand_still() -> None:
    slots = empty_slots(5, 3, torch.device("cpu"))
    # token, column, drawn, key, place, alive, at: the third slot has ended, the fifth never had a row.
    columns = [[7, 4, 2, 11, 0, 1, 1], [8, 9, 3, 12, 4, 1, 1], [6, 5, 2, 13, 2, 0, 1], [5, 3, 1, 14, 1, 1, 1], [0] * 7]
    slots.state_FR.copy_(torch.tensor(columns).T)
    stop_V = torch.zeros(30, dtype=torch.bool)
    stop_V[21] = True
    logp_R = torch.tensor([-1.0, -2.0, -3.0, -4.0, -5.0])
    advance(slots, torch.tensor([20, 22, 21, 21, 23]), logp_R, stop_V, most=4)
    assert slots.state_FR.T.tolist() == [
        [20, 5, 3, 11, 0, 1, 2],
        [22, 10, 4, 12, 4, 0, 2],  # has as many tokens as it may have
        [6, 5, 2, 13, 2, 0, 2],
        [21, 4, 2, 14, 1, 0, 2],  # drew a stop token
        [0, 0, 0, 0, 0, 0, 1],
    ]
    assert slots.token_KR.tolist() == [[0, 0, 0, 0, 23], [20, 22, 21, 21, 0], [0] * 5]
    assert slots.logp_KR[1].tolist() == [-1.0, -2.0, -3.0, -4.0, 0.0]


def test_the_first_slots_are_the_same_memory() -> None:
    slots = empty_slots(4, 2, torch.device("cpu"))
    part = slots.first(2)
    for number, name in enumerate(FIELDS):
        getattr(part, f"{name}_R").fill_(number + 1)
    part.token_KR[1, 1], part.logp_KR[0, 0] = 9, -0.5
    assert slots.state_FR.tolist() == [[number + 1, number + 1, 0, 0] for number in range(len(FIELDS))]
    assert (slots.token_KR.tolist(), slots.logp_KR.tolist()) == ([[0] * 4, [0, 9, 0, 0]], [[-0.5, 0, 0, 0], [0] * 4])
