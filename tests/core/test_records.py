"""Records refuse what does not fit, and are cut by rows without losing or mixing any."""

from __future__ import annotations

import dataclasses
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kedge.core.errors import ShapeError
from kedge.core.records import (
    Experience,
    Pairs,
    Rollouts,
    Tokens,
    ValueTargets,
    cut,
    num_rows,
    shards,
    take,
    to_device,
)


def tokens(rows: int, length: int = 4, *, start: int = 0) -> Tokens:
    attention_BT = torch.ones(rows, length, dtype=torch.bool)
    response_BT = attention_BT.clone()
    response_BT[:, 0] = False
    return Tokens(
        tokens_BT=torch.arange(rows * length).reshape(rows, length) + start,
        attention_mask_BT=attention_BT,
        response_mask_BT=response_BT,
    )


def rollouts_fields(rows: int, length: int = 4) -> dict[str, Any]:
    text = tokens(rows, length)
    return {
        "tokens_BT": text.tokens_BT,
        "attention_mask_BT": text.attention_mask_BT,
        "response_mask_BT": text.response_mask_BT,
        "behaviour_logp_BT": -torch.arange(rows * length).reshape(rows, length).float(),
        "group_B": torch.arange(rows) // 2,
        "finished_B": torch.arange(rows) % 3 == 0,
        "version": 5,
    }


def experience(rows: int, length: int = 4) -> Experience:
    rollouts = Rollouts(**rollouts_fields(rows, length))
    logp_BT = rollouts.behaviour_logp_BT
    return Experience(rollouts=rollouts, old_logp_BT=logp_BT + 1, ref_logp_BT=logp_BT + 2, advantages_BT=logp_BT + 3)


def pairs(rows: int) -> Pairs:
    return Pairs(
        chosen=tokens(rows, 3),
        rejected=tokens(rows, 5, start=100),
        ref_chosen_B=torch.arange(rows).double(),
        ref_rejected_B=-2 * torch.arange(rows).double(),
    )


def flat(record: Any) -> dict[str, Any]:
    """Every leaf of a record by its dotted name, tensors as lists."""
    leaves: dict[str, Any] = {}
    for field in dataclasses.fields(record):
        value = getattr(record, field.name)
        if dataclasses.is_dataclass(value):
            leaves |= {f"{field.name}.{name}": leaf for name, leaf in flat(value).items()}
        else:
            leaves[field.name] = value.tolist() if isinstance(value, Tensor) else value
    return leaves


def rows_of(record: Any, rows: list[int]) -> dict[str, Any]:
    """The same rows, picked with plain lists."""
    return {
        name: [leaf[row] for row in rows] if isinstance(leaf, list) else leaf for name, leaf in flat(record).items()
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"tokens_BT": torch.zeros(2, 3, dtype=torch.int32)},
            "Rollouts: tokens_BT is torch.int32, expected torch.int64",
        ),
        ({"tokens_BT": torch.zeros(6).long()}, "Rollouts: tokens_BT has shape (6,), expected two axes (B, T)"),
        (
            {"attention_mask_BT": torch.ones(2, 4).bool()},
            "Rollouts: attention_mask_BT has shape (2, 4), expected (2, 3)",
        ),
        (
            {"response_mask_BT": torch.ones(2, 3).long()},
            "Rollouts: response_mask_BT is torch.int64, expected torch.bool",
        ),
        (
            {"behaviour_logp_BT": torch.zeros(2, 3, dtype=torch.bfloat16)},
            "Rollouts: behaviour_logp_BT is torch.bfloat16, expected torch.float32 or torch.float64",
        ),
        ({"behaviour_logp_BT": torch.zeros(2)}, "Rollouts: behaviour_logp_BT has shape (2,), expected (2, 3)"),
        ({"group_B": torch.zeros(3).long()}, "Rollouts: group_B has shape (3,), expected (2,)"),
        ({"group_B": torch.zeros(2)}, "Rollouts: group_B is torch.float32, expected torch.int64"),
        (
            {"finished_B": torch.zeros(2, 3)},
            "Rollouts: finished_B has shape (2, 3), expected (2,); finished_B is torch.float32, expected torch.bool",
        ),
        (
            {"group_B": torch.zeros(2), "finished_B": torch.ones(1).bool()},
            "Rollouts: group_B is torch.float32, expected torch.int64; finished_B has shape (1,), expected (2,)",
        ),
    ],
)
def test_rollouts_refuse_what_does_not_fit(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ShapeError) as error:
        Rollouts(**(rollouts_fields(2, 3) | change))
    assert str(error.value) == message


def test_a_response_token_is_a_real_token() -> None:
    fields = rollouts_fields(2, 3)
    fields["attention_mask_BT"] = torch.tensor([[1, 1, 1], [1, 0, 0]]).bool()
    message = (
        "response_mask_BT is True on 2 token(s) where attention_mask_BT is False, "
        "first at row 1, position 1; a response token is a real token"
    )
    with pytest.raises(ShapeError) as error:
        Rollouts(**fields)
    assert str(error.value) == f"Rollouts: {message}"
    with pytest.raises(ShapeError) as error:
        Tokens(**{name: fields[name] for name in ("tokens_BT", "attention_mask_BT", "response_mask_BT")})
    assert str(error.value) == f"Tokens: {message}"


def test_float64_and_garbage_outside_the_mask_are_welcome() -> None:
    fields = rollouts_fields(2, 3)
    fields["behaviour_logp_BT"] = torch.full((2, 3), float("nan"), dtype=torch.float64)
    assert Rollouts(**fields).version == 5


@pytest.mark.parametrize("name", ["old_logp_BT", "ref_logp_BT", "advantages_BT"])
def test_experience_refuses_what_does_not_fit(name: str) -> None:
    good = experience(2)
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(good, **{name: torch.zeros(2, 3)})
    assert str(error.value) == f"Experience: {name} has shape (2, 3), expected (2, 4)"
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(good, **{name: torch.zeros(2, 4).half()})
    assert str(error.value) == f"Experience: {name} is torch.float16, expected torch.float32 or torch.float64"


@pytest.mark.parametrize("name", ["old_values_BT", "returns_BT"])
def test_value_targets_refuse_what_does_not_fit(name: str) -> None:
    rollouts = experience(2).rollouts
    good = ValueTargets(rollouts=rollouts, old_values_BT=torch.zeros(2, 4), returns_BT=torch.zeros(2, 4))
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(good, **{name: torch.zeros(4, 2)})
    assert str(error.value) == f"ValueTargets: {name} has shape (4, 2), expected (2, 4)"
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(good, **{name: torch.zeros(2, 4).long()})
    assert str(error.value) == f"ValueTargets: {name} is torch.int64, expected torch.float32 or torch.float64"


@pytest.mark.parametrize("name", ["ref_chosen_B", "ref_rejected_B"])
def test_pairs_refuse_what_does_not_fit(name: str) -> None:
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(pairs(2), **{name: torch.zeros(2, 1)})
    assert str(error.value) == f"Pairs: {name} has shape (2, 1), expected (2,)"
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(pairs(2), **{name: torch.zeros(2).bool()})
    assert str(error.value) == f"Pairs: {name} is torch.bool, expected torch.float32 or torch.float64"
    with pytest.raises(ShapeError) as error:
        dataclasses.replace(pairs(2), rejected=tokens(3))
    assert str(error.value) == "Pairs: rejected has 3 rows, expected 2 as chosen"


def test_the_margin_of_the_reference_is_chosen_minus_rejected() -> None:
    assert pairs(3).ref_margin_B.tolist() == [0.0, 3.0, 6.0]  # b - (-2 b)


def test_records_are_frozen_and_travel() -> None:
    record = experience(3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.old_logp_BT = torch.zeros(3, 4)  # pyright: ignore[reportAttributeAccessIssue]
    assert flat(pickle.loads(pickle.dumps(record))) == flat(record)


@pytest.mark.parametrize("record", [experience(5), pairs(5)])
@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (torch.tensor([3, 0, 3]), [3, 0, 3]),
        (torch.tensor([True, False, False, True, True]), [0, 3, 4]),
        (slice(1, 4), [1, 2, 3]),
        (slice(None, None, 2), [0, 2, 4]),
        (slice(2, 2), []),
    ],
)
def test_take(record: Experience | Pairs, rows: Tensor | slice, expected: list[int]) -> None:
    taken = take(record, rows)
    assert type(taken) is type(record)
    assert flat(taken) == rows_of(record, expected)
    assert num_rows(taken) == len(expected)


@pytest.mark.parametrize("rows", [torch.tensor(1), torch.tensor([[0, 1]]), torch.tensor([0.0, 1.0])])
def test_take_refuses_what_is_not_a_list_of_rows(rows: Tensor) -> None:
    with pytest.raises(ShapeError) as error:
        take(experience(3), rows)
    assert str(error.value) == (
        f"rows: found {rows.dtype} of shape {tuple(rows.shape)}, expected one axis of torch.int64 or torch.bool"
    )


@given(rows=st.integers(0, 9), n=st.integers(1, 12))
@settings(max_examples=60)
def test_shards_hold_every_row_once_in_order(rows: int, n: int) -> None:
    record = experience(rows)
    parts = shards(record, n)
    sizes = [num_rows(part) for part in parts]
    assert len(parts) == min(n, rows)
    assert sum(sizes) == rows
    assert not sizes or 1 <= min(sizes) <= max(sizes) <= min(sizes) + 1
    start = 0
    for part, size in zip(parts, sizes, strict=True):
        assert flat(part) == rows_of(record, list(range(start, start + size)))
        start += size


@pytest.mark.parametrize("n", [0, -1])
def test_shards_refuse_no_parts(n: int) -> None:
    with pytest.raises(ShapeError) as error:
        shards(experience(3), n)
    assert str(error.value) == f"n: found {n}, expected 1 shard or more"


def test_num_rows_looks_into_nested_records() -> None:
    assert num_rows(experience(3)) == 3
    assert num_rows(pairs(2)) == 2
    assert num_rows(tokens(4)) == 4
    assert num_rows(Wrapped(text=tokens(6))) == 6


def test_to_device_moves_every_tensor() -> None:
    moved = to_device(experience(2), "meta")
    assert {moved.rollouts.tokens_BT.device.type, moved.rollouts.group_B.device.type} == {"meta"}
    assert moved.old_logp_BT.device == moved.advantages_BT.device == torch.device("meta")
    assert moved.rollouts.version == 5
    assert flat(to_device(pairs(2), torch.device("cpu"))) == flat(pairs(2))


@dataclass(frozen=True, slots=True, kw_only=True)
class Labelled:
    scores_B: Tensor
    source: str | None
    weight: float
    texts: list[str] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class NoTensor:
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Wrapped:
    text: Tokens


def test_records_of_others_are_cut_too_and_plain_facts_are_kept() -> None:
    record = Labelled(scores_B=torch.tensor([1.0, 2.0]), source="judge", weight=0.5, texts=None)
    assert flat(take(record, slice(1, 2))) == {"scores_B": [2.0], "source": "judge", "weight": 0.5, "texts": None}


def test_what_cannot_be_cut_is_refused_not_kept_whole() -> None:
    record = Labelled(scores_B=torch.tensor([1.0, 2.0]), source=None, weight=0.5, texts=["a", "b"])
    with pytest.raises(ShapeError) as error:
        take(record, slice(0, 1))
    assert str(error.value) == (
        "Labelled.texts is a list, which has no rows to cut; "
        "a record holds tensors, records, and plain facts about the whole batch"
    )
    with pytest.raises(ShapeError) as error:
        num_rows(NoTensor(version=3))
    assert str(error.value) == "NoTensor holds no tensor, so it has no rows"


def test_every_item_is_in_exactly_one_pass_and_passes_keep_to_their_bounds() -> None:
    lengths = [5, 1, 7, 7, 2, 12, 3]
    by_tokens = cut(range(7), length=lengths.__getitem__, tokens=14)
    assert by_tokens == [[5], [2, 3], [0, 6, 4, 1]]
    assert cut(range(7), length=lengths.__getitem__, rows=3) == [[5, 2, 3], [0, 6, 4], [1]]
    assert cut(range(7), length=lengths.__getitem__, rows=2, tokens=14) == [[5], [2, 3], [0, 6], [4, 1]]
    assert cut(range(7), length=lengths.__getitem__) == [[5, 2, 3, 0, 6, 4, 1]]


def test_an_item_that_is_longer_than_a_pass_has_one_of_its_own() -> None:
    assert cut(["aaaa", "bbb", "c"], length=len, tokens=2) == [["aaaa"], ["bbb"], ["c"]]
    assert cut([], length=len, tokens=2) == []
