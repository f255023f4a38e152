"""Frozen weights in host memory between their turns: the same bits when they come back, and no memory meanwhile."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import ModelError
from kedge.models.forward import host_memory
from kedge.models.forward.heads import language_model
from kedge.models.forward.host_memory import MovedWeights, host_bytes, host_copies
from kedge.models.forward.reader import compile_layers
from kedge.models.loading.tiny import tiny_model

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
TOKENS_BT = torch.arange(60).view(5, 12)


def held_bytes(model: PreTrainedModel) -> int:
    """What the weights of a model take on their device."""
    return sum(weight.untyped_storage().nbytes() for weight in model.parameters())


@torch.no_grad()
def logprobs(model: PreTrainedModel) -> Tensor:
    mask_BT, reader = torch.ones_like(TOKENS_BT, dtype=torch.bool), language_model(model)
    with reader.active():
        return reader.logprobs(TOKENS_BT, mask_BT, mask_BT).cpu()


@pytest.mark.parametrize("device", DEVICES)
def test_weights_come_back_to_the_last_bit_and_take_no_memory_between_turns(device: str) -> None:
    model = tiny_model(hidden=32, layers=2).to(device).requires_grad_(False)
    full, expected_BT = held_bytes(model), logprobs(model)
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    moved = MovedWeights([model])
    assert (moved.num_bytes, held_bytes(model)) == (full, 0)
    for _ in range(2):
        with moved.turn():
            assert held_bytes(model) == full
            assert all(torch.equal(weight, before[name]) for name, weight in model.named_parameters())
            assert torch.equal(logprobs(model), expected_BT)
        assert held_bytes(model) == 0


def test_a_model_that_is_asked_out_of_turn_fails_instead_of_computing_with_garbage() -> None:
    model = tiny_model(hidden=32, layers=1)
    moved = MovedWeights([model])
    with pytest.raises(RuntimeError):
        model(TOKENS_BT)
    with moved.turn():
        model(TOKENS_BT)


def test_a_turn_within_a_turn_and_one_that_fails_leave_the_memory_free() -> None:
    model = tiny_model(hidden=32, layers=1)
    moved = MovedWeights([model])
    with moved.turn():
        with moved.turn():
            pass
        assert held_bytes(model) == moved.num_bytes  # the outer turn goes on
    assert held_bytes(model) == 0

    def fail() -> None:
        with moved.turn():
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert held_bytes(model) == 0


def test_a_weight_that_two_models_share_is_moved_once() -> None:
    first, second = tiny_model(hidden=32, layers=1), tiny_model(hidden=32, layers=1)
    second.set_input_embeddings(first.get_input_embeddings())
    shared = first.get_input_embeddings().weight.nbytes
    assert MovedWeights([first, second]).num_bytes == held_of(first) + held_of(second) - shared


def held_of(model: PreTrainedModel) -> int:
    return sum(weight.nbytes for weight in model.parameters())


def test_a_device_without_room_for_them_is_told_in_words(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = MovedWeights([tiny_model(hidden=32, layers=1)])

    def full(_: torch.UntypedStorage) -> Tensor:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(host_memory, "_bytes_of", full)
    with pytest.raises(ModelError, match=r"out of memory for 0.00 GiB of frozen weights that come back from the host"):
        moved.turn().__enter__()


def test_host_memory_is_packed_into_few_blocks_that_do_not_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "_BLOCK_BYTES", 1024)
    sizes = [100, 700, 1, 2000, 300, 64]
    parts = host_bytes(sizes, pinned=False)
    assert [len(part) for part in parts] == sizes
    for number, part in enumerate(parts):
        part.fill_(number + 1)
    assert [part.unique().tolist() for part in parts] == [[number + 1] for number in range(len(sizes))]
    # 2000 has its own; 704 + 320 fill one; 128 + 64 + 64 are left.
    blocks = {part.untyped_storage().data_ptr(): part.untyped_storage().nbytes() for part in parts}
    assert sorted(blocks.values()) == [256, 1024, 2048]


def test_copies_have_the_values_in_float32() -> None:
    tensors = [torch.randn(3, 4).bfloat16(), torch.randn(5)]
    for copy, tensor in zip(host_copies(tensors), tensors, strict=True):
        assert copy.dtype == torch.float32
        assert torch.equal(copy, tensor.float())


@pytest.mark.gpu
def test_graphs_over_moved_weights_are_captured_anew_and_compute_the_same() -> None:
    plain = tiny_model(hidden=64, layers=3).to("cuda", torch.bfloat16).requires_grad_(False)
    compile_layers(plain)
    mask_BT, reader = torch.ones_like(TOKENS_BT, dtype=torch.bool), language_model(plain)

    def ask() -> Tensor:
        with torch.no_grad(), reader.active():
            return reader.logprobs(TOKENS_BT, mask_BT, mask_BT).cpu()

    expected_BT = ask()
    moved = MovedWeights([plain])
    taken = list[Tensor]()
    for _ in range(3):
        taken.append(torch.ones(1 << 20, device="cuda"))  # what was theirs is another's now
        with moved.turn():
            assert torch.equal(ask(), expected_BT)
    assert all(bool((block == 1).all()) for block in taken)


@pytest.mark.gpu
def test_on_a_gpu_the_memory_is_free_for_others_between_turns() -> None:
    model = tiny_model(hidden=512, layers=4).to("cuda").requires_grad_(False)
    before = torch.cuda.memory_allocated()
    moved = MovedWeights([model])
    assert before - torch.cuda.memory_allocated() >= moved.num_bytes
    with moved.turn():
        assert torch.cuda.memory_allocated() >= before - (1 << 20)
