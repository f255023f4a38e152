"""Scores of many texts by the members of a reward model."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kedge.core.batches import pad_tokens
from kedge.core.records import send
from kedge.core.world import ALONE, World
from kedge.data.tokenizer import padding_id
from kedge.models.reward.ensemble import Member
from kedge.models.training.passes import InferenceSize


def score_sequences(
    members: Sequence[Member],
    sequences: Sequence[Sequence[int]],
    *,
    normalised: bool = True,
    progress: Callable[[int], None] = lambda _: None,
    world: World = ALONE,
) -> Tensor:
    """`scores_MNK` of N token sequences in their order, computed longest first in batches of similar length; the
    processes of `world` share them."""
    pad, device = padding_id(members[0].tokenizer), members[0].device
    scored = set[int]()  # rows, since a pass that does not fit is done again

    def score(rows: list[int]) -> Tensor:
        tokens_BT, mask_BT = pad_tokens([sequences[row] for row in rows], pad=pad)
        tokens_BT = send(tokens_BT, device)
        scores_MBK = torch.stack([member.score_tokens(tokens_BT, mask_BT, normalised=normalised) for member in members])
        scored.update(rows)
        progress(len(scored))
        return scores_MBK.transpose(0, 1)

    lengths = [len(sequence) for sequence in sequences]
    return InferenceSize(device, world=world).by_length(lengths, score).transpose(0, 1).cpu()
