"""The reference is asked once: kept with the run, shared between runs of the same content, checked when it is read."""

from __future__ import annotations

from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from kedge.core.errors import CheckpointError
from kedge.core.world import ALONE
from kedge.data.batching import TokenSequence
from kedge.models.forward.heads import LanguageModel
from kedge.models.forward.lora import with_lora
from kedge.models.loading.hashing import module_hash
from kedge.models.loading.tiny import tiny_model
from kedge.models.settings import LoraSettings
from kedge.models.training import passes
from kedge.models.training.preference_objectives import adapters_off
from kedge.stages.preference.reference import NAME, reference_logprobs, tokens_hash


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KEDGE_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def count(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many forward passes were made, one entry each."""
    made: list[int] = []
    real = LanguageModel.logprobs

    def counted(model: LanguageModel, tokens_BT: Tensor, *masks: Tensor) -> Tensor:
        made.append(len(tokens_BT))
        return real(model, tokens_BT, *masks)

    monkeypatch.setattr(LanguageModel, "logprobs", counted)
    return made


def sequences() -> list[TokenSequence]:
    rng = Random(1)
    made = [[rng.randrange(256) for _ in range(length)] for length in (7, 30, 12, 3, 30)]
    return [TokenSequence(tokens=one, counted=[at >= 2 for at in range(len(one))]) for one in made]


def ask(
    folder: Path, model: Any, wanted: list[TokenSequence] | None = None, warned: list[str] | None = None
) -> list[float]:
    messages: list[str] = [] if warned is None else warned
    context: Any = SimpleNamespace(
        event=lambda level, code, message: messages.append(f"{level} {code}: {message}"),
        once=lambda action: action(),
        world=ALONE,
    )
    return reference_logprobs(
        context,
        adapters_off(model),
        wanted or sequences(),
        file=folder / NAME,
        pad=256,
    )


def model(seed: int = 0) -> PreTrainedModel:
    return cast(PreTrainedModel, tiny_model(seed=seed, hidden=32, layers=1))


def shared(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache/reference-logprobs").iterdir())


def test_the_numbers_are_those_of_plain_transformers_in_the_order_asked(tmp_path: Path) -> None:
    found = ask(tmp_path / "run", model())
    for value, one in zip(found, sequences(), strict=True):
        logp_TV = model()(torch.tensor([one.tokens])).logits[0].log_softmax(-1)
        expected = sum(logp_TV[t - 1, one.tokens[t]].item() for t in range(2, len(one.tokens)))
        assert value == pytest.approx(expected, rel=1e-5)


def test_it_is_asked_once_for_a_run_and_once_for_all_runs_of_the_same_content(count: list[int], tmp_path: Path) -> None:
    first = tmp_path / "first"
    found = ask(first, model())
    assert count == [5]
    assert ask(first, model()) == found
    assert ask(tmp_path / "second", model()) == found
    assert count == [5]
    for file in (tmp_path / "first" / NAME, tmp_path / "second" / NAME, *shared(tmp_path)):
        assert load_file(file)["logp_S"].tolist() == found
    assert len(shared(tmp_path)) == 1


def test_long_data_is_asked_in_parts(count: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "CPU_WITHOUT_GRADIENTS", 60)
    in_parts = ask(tmp_path / "run", model())
    assert count == [2, 3]  # 30 tokens each; then 12, 7 and 3
    logp_TV = model()(torch.tensor([sequences()[2].tokens])).logits[0].log_softmax(-1)
    expected = sum(logp_TV[t - 1, sequences()[2].tokens[t]].item() for t in range(2, 12))
    assert in_parts[2] == pytest.approx(expected, rel=1e-5)


def test_other_weights_and_other_data_are_other_files(tmp_path: Path) -> None:
    ask(tmp_path / "a", model())
    ask(tmp_path / "b", model(seed=1))
    ask(tmp_path / "c", model(), sequences()[::-1])
    assert len(shared(tmp_path)) == 3


def test_the_reference_of_adapters_is_the_base_and_shares_its_file(count: list[int], tmp_path: Path) -> None:
    found = ask(tmp_path / "plain", model())
    adapted = with_lora(model(), LoraSettings(rank=2), name="policy", seed=1)
    with torch.no_grad():
        for name, one in adapted.named_parameters():
            if ".lora_B." in name:
                one.normal_()
    assert module_hash(adapted) == module_hash(model())
    assert ask(tmp_path / "adapted", adapted) == found
    assert count == [5]


def test_a_resumed_run_with_another_reference_is_refused(tmp_path: Path) -> None:
    run = tmp_path / "run"
    ask(run, model())
    with pytest.raises(CheckpointError, match="these log-probs are of other weights than the run has now"):
        ask(run, model(seed=1))
    with pytest.raises(CheckpointError, match="these log-probs are of other weights and tokens than"):
        ask(run, model(seed=1), sequences()[:3])


@pytest.mark.parametrize("how", ["a changed number", "cut off"])
def test_a_damaged_file_is_told_and_made_again(how: str, count: list[int], tmp_path: Path) -> None:
    run = tmp_path / "run"
    found = ask(run, model())
    files, warned = (tmp_path / "run" / NAME, *shared(tmp_path)), list[str]()
    for file in files:
        content = bytearray(file.read_bytes())
        content[-3] ^= 1
        file.write_bytes(content if how == "a changed number" else content[:-10])
    assert ask(run, model(), warned=warned) == found
    assert count == [5, 5]
    assert [one.partition(":")[0] for one in warned] == ["warning preference.reference_damaged"] * 2
    assert [str(file) in one for file, one in zip(files, warned, strict=True)] == [True, True]
    assert ask(run, model()) == found
    assert count == [5, 5]


def test_every_token_and_every_mask_is_in_the_hash() -> None:
    plain = tokens_hash(sequences())
    changed = [
        [*sequences()[:-1], TokenSequence(tokens=[*sequences()[-1].tokens[:-1], 7], counted=sequences()[-1].counted)],
        [TokenSequence(tokens=one.tokens, counted=[True] * len(one.tokens)) for one in sequences()],
        sequences()[::-1],
        # The same tokens, cut elsewhere.
        [
            TokenSequence(tokens=[*sequences()[0].tokens, *sequences()[1].tokens[:1]], counted=[False] * 8),
            TokenSequence(tokens=sequences()[1].tokens[1:], counted=[False] * 29),
        ],
    ]
    hashes = {tokens_hash(one) for one in changed} | {plain}
    assert len(hashes) == 5
    nudged = model()
    with torch.no_grad():
        next(nudged.parameters())[3, 5] += 1e-6
    assert module_hash(nudged) != module_hash(model())
