from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.trainable import trainable_names
from tokenizers import Tokenizer
from torch import Tensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    LlamaModel,
    PreTrainedTokenizerFast,
)

from kedge.core.errors import DataError, ModelError, NumericsError, ShapeError
from kedge.core.optimiser import OptimiserSettings
from kedge.models.forward.lora import with_lora
from kedge.models.loading.aliases import PACKAGED, gguf_file
from kedge.models.loading.gguf import open_gguf, tokenizer_from
from kedge.models.loading.start import whole_folder
from kedge.models.loading.tiny import IM_END, IM_START, PAD, make_tiny, tiny_model, tiny_tokenizer
from kedge.models.reward.reward_files import build, load, padding_token, save
from kedge.models.reward.reward_model import (
    Normaliser,
    RewardFacts,
    RewardModel,
    facts_from,
    fit_normaliser,
    head_of,
    reward_tokens,
    scores,
    start_head,
)
from kedge.models.settings import LoraSettings
from kedge.models.training.learner import Learner, Objective, Sums
from kedge.models.training.train_step import trained_weights

END = 258
ROWS = ([40, 41, 42, 43, END], [50, END], [60, 61, 62, END])
TEXTS = ["Give me 12 or 735 apples.<|im_end|>", "No.<|im_end|>", "Well, perhaps.<|im_end|>"]
TWO = ("helpful", "harmless")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return make_tiny(tmp_path / "tiny-model")


def embedding_of(reward: RewardModel) -> Tensor:
    return reward.model.get_parameter("model.embed_tokens.weight").detach().clone()


def laid_out(side: str, pad: int, rows: tuple[list[int], ...] = ROWS) -> tuple[Tensor, Tensor]:
    width = max(map(len, rows)) + 2
    tokens_BT = torch.full((len(rows), width), pad)
    mask_BT = torch.zeros(len(rows), width, dtype=torch.bool)
    for b, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        tokens_BT[b, at] = torch.tensor(row)
        mask_BT[b, at] = True
    return tokens_BT, mask_BT


def by_hand(backbone: LlamaModel, head_KD: Tensor, rows: tuple[list[int], ...] = ROWS) -> Tensor:
    """Every row alone and without padding: the last hidden state times the head."""
    with torch.no_grad():
        last = [backbone(torch.tensor([row])).last_hidden_state[0, -1] for row in rows]
    return torch.stack([head_KD @ hidden_D for hidden_D in last])


def drawn_head(objectives: int, width: int, seed: int) -> Tensor:
    return torch.randn(objectives, width, generator=torch.Generator().manual_seed(seed)) / math.sqrt(width + 1)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [256, 7, END])
def test_scores_are_read_at_the_last_token_whatever_the_padding(tiny: Path, side: str, pad: int) -> None:
    reward = build(tiny, objectives=TWO, seed=11, dtype="float32")
    tokens_BT, mask_BT = laid_out(side, pad)
    expected = by_hand(tiny_model().model, drawn_head(2, 96, 11))
    scores_BK = reward.score_tokens(tokens_BT, mask_BT, normalised=False)
    torch.testing.assert_close(scores_BK, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(reward.score_tokens(tokens_BT, mask_BT.long()), expected, rtol=1e-5, atol=1e-5)


def test_the_head_is_new_and_everything_else_is_the_model_s(tiny: Path) -> None:
    torch.manual_seed(1)
    reward = build(tiny, objectives=TWO, seed=11, dtype="bfloat16")
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(1)))
    assert head_of(reward.model).weight.dtype == torch.float32
    assert torch.equal(head_of(reward.model).weight, drawn_head(2, 96, 11))
    for name, parameter in tiny_model().model.named_parameters():
        assert torch.equal(dict(reward.model.model.named_parameters())[name], parameter.bfloat16())
    assert not torch.equal(head_of(build(tiny, objectives=TWO, seed=12).model).weight, drawn_head(2, 96, 11))
    config = reward.model.config
    assert config.num_labels == 2
    assert config.id2label == {0: "helpful", 1: "harmless"}
    assert config.problem_type is None


def test_the_head_has_the_spread_of_the_paper() -> None:
    head = torch.nn.Linear(63, 4000, bias=False)
    start_head(head, seed=0)
    # 252,000 draws of std 1/8: the error of their std is about 1/8 / sqrt(504,000)
    assert abs(head.weight.std().item() - 1 / 8) < 4 * (1 / 8) / math.sqrt(504_000)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_saved_and_loaded_here(tiny: Path, tmp_path: Path, dtype: str) -> None:
    reward = build(tiny, objectives=TWO, seed=11, dtype=dtype)  # pyright: ignore[reportArgumentType]
    facts = RewardFacts(
        objectives=TWO,
        normaliser=Normaliser(mean=(0.1, -3.0), std=(2.0, 0.3)),
        template_hash="abc",
        max_length=77,
        truncate="refuse",
        score_ranges=((-2.0, 3.5), (-1.0, 0.25)),
    )
    save(replace(reward, facts=facts), tmp_path / "saved")
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["kedge_reward"] == {
        "objectives": ["helpful", "harmless"],
        "mean": [0.1, -3.0],
        "std": [2.0, 0.3],
        "template_hash": "abc",
        "max_length": 77,
        "truncate": "refuse",
        "seen": [[-2.0, 3.5], [-1.0, 0.25]],
    }
    again = load(tmp_path / "saved", dtype=dtype)  # pyright: ignore[reportArgumentType]
    assert again.facts == facts
    assert again.objectives == TWO
    assert again.device == torch.device("cpu")
    assert again.tokenizer.pad_token == PAD
    assert torch.equal(head_of(again.model).weight, drawn_head(2, 96, 11))
    raw_BK = reward.score_tokens(*laid_out("right", 256))
    assert torch.equal(again.score_tokens(*laid_out("right", 256), normalised=False), raw_BK)
    normalised = again.score_tokens(*laid_out("right", 256))
    expected = torch.stack([(raw_BK[:, 0] - 0.1) / 2.0, (raw_BK[:, 1] + 3.0) / 0.3], dim=1)
    torch.testing.assert_close(normalised, expected, rtol=1e-5, atol=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved", "tiny-model"]


def assert_plain_transformers_agrees(folder: Path, width: int, backbone: LlamaModel) -> None:
    reward = build(folder, objectives=TWO, seed=4, dtype="float32")
    saved = folder.with_name("saved")
    save(reward, saved)
    tokenizer = AutoTokenizer.from_pretrained(saved)
    model = AutoModelForSequenceClassification.from_pretrained(saved)
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    lengths = batch["attention_mask"].sum(dim=1).tolist()
    assert len(set(lengths)) == 3
    rows = tuple(ids[:length].tolist() for ids, length in zip(batch["input_ids"], lengths, strict=True))
    assert {row[-1] for row in rows} == {tokenizer.eos_token_id}
    with torch.no_grad():
        plain = model(**batch).logits
    torch.testing.assert_close(plain, by_hand(backbone, drawn_head(2, width, 4), rows), rtol=1e-5, atol=1e-5)
    ours = load(saved, dtype="float32").score_tokens(batch["input_ids"], batch["attention_mask"])
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-5)


def test_plain_transformers_gives_the_same_scores(tiny: Path) -> None:
    assert_plain_transformers_agrees(tiny, 96, tiny_model().model)


def smol_like() -> PreTrainedTokenizerFast:
    """The special tokens of SmolLM2 on the letters of `tiny`: pad and end are one token, unknown is another."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_START, "<repo_name>"], "unk_token": "<|endoftext|>"})
    plain = json.loads(tokenizer.backend_tokenizer.to_str().replace(PAD, "<file_sep>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(plain)),
        bos_token=IM_START,
        eos_token=IM_END,
        pad_token=IM_END,
        unk_token="<|endoftext|>",
        chat_template=tokenizer.chat_template,
    )


@pytest.mark.parametrize(
    "make",
    [
        smol_like,
        pytest.param(
            lambda: tokenizer_from(open_gguf(gguf_file(PACKAGED["smollm2-135m"]))), marks=pytest.mark.slow, id="smollm2"
        ),
    ],
)
def test_plain_transformers_gives_the_same_scores_where_pad_was_eos(
    tmp_path: Path, make: Callable[[], PreTrainedTokenizerFast]
) -> None:
    tokenizer = make()
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.unk_token) == (IM_END, IM_END, "<|endoftext|>")
    ids = tokenizer.get_vocab()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            pad_token_id=ids[IM_END],
            bos_token_id=ids[IM_START],
            eos_token_id=ids[IM_END],
        )
        model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "smol")
    tokenizer.save_pretrained(tmp_path / "smol")
    assert_plain_transformers_agrees(tmp_path / "smol", 16, model.model)
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.pad_token, saved.eos_token) == ("<|endoftext|>", IM_END)
    assert saved(TEXTS[0]).input_ids == tokenizer(TEXTS[0]).input_ids
    assert json.loads((tmp_path / "saved" / "config.json").read_text())["pad_token_id"] == ids["<|endoftext|>"]
    # The embedding of the end token must learn: only that of the pad token is held.
    assert load(tmp_path / "saved").model.model.embed_tokens.padding_idx == ids["<|endoftext|>"]


def test_plain_transformers_loads_a_half_precision_one(tiny: Path, tmp_path: Path) -> None:
    save(build(tiny, seed=4, dtype="bfloat16"), tmp_path / "saved", dtype="bfloat16")
    assert load_file(tmp_path / "saved" / "model.safetensors")["score.weight"].dtype == torch.float32
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    tokens_BT, mask_BT = laid_out("right", 256)
    with torch.no_grad():
        scores_BK = plain(tokens_BT, attention_mask=mask_BT.long()).logits
    assert plain.dtype == torch.bfloat16
    assert scores_BK.shape == (3, 1)
    expected = load(tmp_path / "saved", dtype="bfloat16").score_tokens(tokens_BT, mask_BT)
    assert (scores_BK.float() - expected).abs().max() < 0.05 * expected.abs().max()  # bfloat16 keeps 8 bits


def test_pad_tokens() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_START, "<|endoftext|>", "<own>"]})
    for pad, expected in (("<own>", "<own>"), (IM_END, PAD), (IM_START, PAD)):
        tokenizer.pad_token = pad
        assert padding_token(tokenizer, edge_ids={END}, vocab_size=1000) == expected


def test_pad_tokens_without_one_named_so() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = IM_END
    tokenizer.add_special_tokens({"additional_special_tokens": [IM_START, "<tool>", "<|endoftext|>", "<unk>"]})
    tokenizer.unk_token = "<unk>"
    ids = tokenizer.get_vocab()
    taken = {END, ids[PAD]}
    assert padding_token(tokenizer, edge_ids=taken, vocab_size=1000) == "<|endoftext|>"
    taken.add(ids["<|endoftext|>"])
    assert padding_token(tokenizer, edge_ids=taken, vocab_size=1000) == "<tool>"
    taken.add(ids["<tool>"])
    assert padding_token(tokenizer, edge_ids=taken, vocab_size=1000) == "<unk>"
    # Beyond the embeddings of the model; <|im_start|> is left, and is part of every rendered text.
    with pytest.raises(ModelError, match=r"pads with '<\|im_end\|>', which also ends a text, and has no other"):
        padding_token(tokenizer, edge_ids=taken, vocab_size=258)


def test_adapters_are_merged_for_saving(tiny: Path, tmp_path: Path) -> None:
    reward = build(tiny, objectives=TWO, seed=4, dtype="float32")
    base = {name: parameter.clone() for name, parameter in reward.model.model.named_parameters()}
    model = with_lora(reward.model, LoraSettings(rank=4), name="judge", seed=5)
    assert trainable_names(model)[-1] == "score.lora_head.judge.weight"
    assert sum(".lora_head." in name for name in trainable_names(model)) == 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.01)
        head_of(model).weight.mul_(2.0)
    adapted = replace(reward, model=model, adapter="judge")
    before = adapted.score_tokens(*laid_out("right", 256))
    save(adapted, tmp_path / "saved")
    assert torch.equal(adapted.score_tokens(*laid_out("right", 256)), before)
    again = load(tmp_path / "saved", dtype="float32")
    torch.testing.assert_close(again.score_tokens(*laid_out("right", 256)), before, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(head_of(again.model).weight, 2 * drawn_head(2, 96, 4))
    loaded = dict(again.model.model.named_parameters())
    assert {name for name, weight in base.items() if not torch.equal(weight, loaded[name])} == {
        name for name in base if "_proj" in name
    }


def test_scores_carry_gradient_and_are_float32_where_the_weights_are_not(tiny: Path) -> None:
    reward = build(tiny, seed=4, dtype="bfloat16")
    tokens_BT, mask_BT = laid_out("right", 256)
    with reward.backbone.active():
        scores_BK = scores(reward, tokens_BT, mask_BT)
    assert scores_BK.dtype == torch.float32
    # The head multiplies in float32: the same last hidden states, which bfloat16 products made.
    with torch.no_grad():
        hidden_BTD = reward.model.model(tokens_BT, attention_mask=mask_BT.long()).last_hidden_state
    last = torch.stack([hidden_BTD[b, len(row) - 1] for b, row in enumerate(ROWS)]).float()
    torch.testing.assert_close(scores_BK, last @ drawn_head(1, 96, 4).T, rtol=0, atol=2e-2)
    scores_BK.sum().backward()
    gradient = head_of(reward.model).weight.grad
    assert gradient is not None
    torch.testing.assert_close(gradient, last.sum(dim=0, keepdim=True), rtol=0, atol=5e-2)


@pytest.mark.parametrize("is_full", [True, False])
def test_it_learns_in_full_and_by_adapters(tiny: Path, is_full: bool) -> None:
    reward = build(tiny, seed=4, dtype="float32")
    embedding = embedding_of(reward)
    model = reward.model if is_full else with_lora(reward.model, LoraSettings(rank=4), name="judge", seed=5)
    judge = replace(reward, model=model)
    tokens_BT, mask_BT = laid_out("right", 256)

    def sums(wanted_B: Tensor) -> Sums:
        return Sums(loss=(scores(judge, tokens_BT, mask_BT)[:, 0] - wanted_B).square().sum(), facts={})

    objective = Objective(weight=len, sums=sums)
    trained = trained_weights(model, head=head_of(model))
    learner = Learner(trained, judge.backbone, objective, OptimiserSettings(lr=3e-3, warmup=0.0), total_steps=12)
    losses = [learner.update(lambda _: [torch.tensor([1.0, -1.0, 0.5])])["loss"] for _ in range(12)]
    assert losses[-1] < 0.1 * losses[0]
    assert torch.equal(embedding_of(reward), embedding) is not is_full
    model.train()
    judge.score_tokens(tokens_BT, mask_BT)
    assert model.training


def test_scores_are_constants_that_autograd_may_use(tiny: Path) -> None:
    reward = build(tiny, seed=4)
    for normalised in (True, False):
        scores_BK = reward.score_tokens(*laid_out("right", 256), normalised=normalised)
        factor = torch.tensor(2.0, requires_grad=True)
        (factor * scores_BK).sum().backward()
        torch.testing.assert_close(factor.grad, scores_BK.sum())


def test_dropout_is_off_when_scoring(tiny: Path) -> None:
    reward = build(tiny, seed=4, dtype="float32")
    model = with_lora(reward.model, LoraSettings(rank=4, dropout=0.9), name="judge", seed=5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.fill_(0.1)
    judge = replace(reward, model=model, adapter="judge")
    expected = judge.score_tokens(*laid_out("right", 256))
    model.train()
    assert torch.equal(judge.score_tokens(*laid_out("right", 256)), expected)


def test_rows_without_tokens_are_refused(tiny: Path) -> None:
    reward = build(tiny, seed=4)
    tokens_BT, mask_BT = laid_out("right", 256)
    with pytest.raises(ShapeError, match="every row a real token"):
        reward.score_tokens(tokens_BT, mask_BT & torch.tensor([[True], [False], [True]]))
    with pytest.raises(ShapeError, match=r"\(3, 7\) and attention_mask_BT \(3, 6\)"):
        reward.score_tokens(tokens_BT, mask_BT[:, 1:])


def test_what_is_not_a_reward_model(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"tiny-model is not a reward model but a LlamaForCausalLM: .* kind reward"):
        load(tiny)
    save(build(tiny, seed=4), tmp_path / "saved")
    with pytest.raises(ModelError, match=r"saved is a reward model already \(LlamaForSequenceClassification\)"):
        build(tmp_path / "saved", seed=4)
    with pytest.raises(ModelError, match="no model folder at"):
        load(tmp_path / "nothing")
    with pytest.raises(ModelError, match="hub model 'no-such-org/nothing' could not be loaded"):
        load("no-such-org/nothing")


@pytest.mark.parametrize("lost", ["score.weight", "model.layers.1.mlp.up_proj.weight"])
def test_missing_weights_are_refused(tiny: Path, tmp_path: Path, lost: str) -> None:
    save(build(tiny, seed=4), tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    weights = load_file(file)
    del weights[lost]
    save_file(weights, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match=rf"1 weight\(s\) are not in the files \(first: '{lost}'\)"):
        load(tmp_path / "saved")


def test_a_backbone_with_a_hole_is_refused(tiny: Path) -> None:
    weights = load_file(tiny / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tiny / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"1 weight\(s\) of the backbone .* \(first: 'model\.norm\.weight'\)"):
        build(tiny, seed=4)


def test_a_head_of_another_size_is_refused(tiny: Path, tmp_path: Path) -> None:
    save(build(tiny, seed=4), tmp_path / "saved")
    file = tmp_path / "saved" / "model.safetensors"
    save_file(load_file(file) | {"score.weight": torch.zeros(2, 96)}, file, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="cannot be loaded as a sequence-classification model"):
        load(tmp_path / "saved")


def test_reward_models_of_others_are_welcome(tiny: Path, tmp_path: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(tiny, num_labels=1)
    model.save_pretrained(tmp_path / "theirs")
    tiny_tokenizer().save_pretrained(tmp_path / "theirs")
    foreign = load(tmp_path / "theirs", dtype="float32")
    assert foreign.facts == RewardFacts(objectives=("reward",), normaliser=Normaliser(mean=(0.0,), std=(1.0,)))
    expected = by_hand(tiny_model().model, model.score.weight.detach())
    torch.testing.assert_close(foreign.score_tokens(*laid_out("left", 3)), expected, rtol=1e-5, atol=1e-5)


def test_objectives_have_different_names(tiny: Path) -> None:
    with pytest.raises(ModelError, match=r"one or more different names, found \['a', 'b', 'a'\]"):
        build(tiny, objectives=("a", "b", "a"), seed=4)


def test_moments() -> None:
    # first column: mean 4, deviations -3, 0, 3: variance 18/3; second: mean -1, deviations 1, 1, -2: variance 6/3
    fitted = fit_normaliser(torch.tensor([[1.0, 0.0], [4.0, 0.0], [7.0, -3.0]]))
    assert fitted.mean == (4.0, -1.0)
    assert fitted.std == pytest.approx((math.sqrt(6), math.sqrt(2)), rel=1e-12)
    facts = RewardFacts(objectives=TWO, normaliser=fitted)
    assert facts_from(json.loads(json.dumps(facts.as_dict()))) == facts


@pytest.mark.parametrize("scores_NK", [[[1.0], [1.0]], [[1.0], [math.nan]], [[1.0], [math.inf]], [[2.0]]])
def test_scores_that_have_no_moments(scores_NK: list[list[float]]) -> None:
    with pytest.raises(NumericsError, match=rf"scores of {len(scores_NK)} demonstrations cannot be normalised"):
        fit_normaliser(torch.tensor(scores_NK))


@pytest.mark.parametrize(("mean", "std"), [((0.0,), (0.0,)), ((0.0, 1.0), (1.0,)), ((math.nan,), (1.0,))])
def test_normalisers_that_cannot_be(mean: tuple[float, ...], std: tuple[float, ...]) -> None:
    with pytest.raises(NumericsError, match="needs finite means and positive stds"):
        Normaliser(mean=mean, std=std)


def test_tokens_end_where_the_score_is_read() -> None:
    chat = [1, 30, 2, 9, 1, 31, 32, 2, 9, 9]
    tokens = partial(reward_tokens, stop_ids={2, 3}, blank_ids={9})
    assert tokens(chat, max_length=99) == [1, 30, 2, 9, 1, 31, 32, 2]
    assert tokens(chat, max_length=8, truncate="refuse") == [1, 30, 2, 9, 1, 31, 32, 2]
    assert tokens(chat, max_length=3) == [31, 32, 2]
    with pytest.raises(DataError, match="a text of 8 tokens is longer than the window of 7"):
        tokens(chat, max_length=7, truncate="refuse")
    with pytest.raises(DataError, match=r"must end in an end-of-turn token \(\[2, 3\]\); .* ends in \[32, 2, 9, 9\]"):
        reward_tokens(chat, stop_ids={2, 3}, max_length=99)
    with pytest.raises(DataError, match="this one of 0 tokens"):
        tokens([], max_length=99)


def test_folders_are_whole_or_absent(tmp_path: Path) -> None:
    def half() -> None:
        with whole_folder(tmp_path / "runs" / "model") as beside:
            (beside / "config.json").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        half()
    assert list((tmp_path / "runs").iterdir()) == []
    for text in ("one", "two"):
        with whole_folder(tmp_path / "runs" / "model") as beside:
            (beside / "config.json").write_text(text)
            (beside / text).write_text("")
    assert sorted(path.name for path in (tmp_path / "runs" / "model").iterdir()) == ["config.json", "two"]
    with pytest.raises(KeyboardInterrupt):
        half()
    assert (tmp_path / "runs" / "model" / "config.json").read_text() == "two"
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["model"]


def test_other_folders_are_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("ten years")
    with pytest.raises(ModelError, match="exists and holds no model"), whole_folder(tmp_path):
        pass
    assert (tmp_path / "thesis.txt").read_text() == "ten years"
