"""What Kedge does with architectures of transformers: tiny models of random weights, compared with plain transformers.

    python tests/models/architectures.py    # the table of docs/architectures.md

Two SFT steps give the loss of transformers and torch's AdamW, or the model is refused with words; a reward model and
the four roles of PPO are built, and PPO samples.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import kedge
from kedge.core.errors import ContractStop, KedgeError
from kedge.models.forward.reader import reader_of
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import tiny_tokenizer

_TOKENS = {"vocab_size": 259, "bos_token_id": None, "eos_token_id": 258, "pad_token_id": 256}
_SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_SMALL = {**_TOKENS, **_SIZES, "num_key_value_heads": 2, "max_position_embeddings": 128}
_LLAMA = {**_SMALL, "head_dim": 8}
_GPT = {**_TOKENS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_DEEPSEEK = {
    **_SMALL, "num_key_value_heads": 4, "moe_intermediate_size": 16, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8,
}  # fmt: skip
_OPT = {**_SMALL, "ffn_dim": 64}
_LR = 1e-3
_TALKS = [
    [{"role": "user", "content": f"question {n}"}, {"role": "assistant", "content": f"answer {n} " * (1 + n)}]
    for n in range(4)
]


@dataclass(frozen=True, slots=True)
class Case:
    """A model of transformers and what becomes of it."""

    name: str
    rows: str
    """How rows run in training: `packed`, `padded`, or why not."""
    reward: str = "yes"
    sampling: str = "yes"
    settings: dict[str, Any] = field(default_factory=lambda: _LLAMA)
    model_type: str = ""

    def __str__(self) -> str:
        return self.name


_BIAS, _CHANGED = "no: bias of the head", "no: changes its logits"
_NO_CLASS = "no: transformers has no class"
_OWN = "no: attention of its own"
CASES = (
    Case("Llama", "packed, last layer in part", model_type="llama"),
    Case("Qwen 2", "packed, last layer in part", model_type="qwen2"),
    Case("Qwen 3", "packed, last layer in part", model_type="qwen3"),
    Case("Mistral", "packed, last layer in part", model_type="mistral", settings={**_LLAMA, "sliding_window": None}),
    Case("Mistral, sliding window", "padded", model_type="mistral", settings={**_LLAMA, "sliding_window": 128}),
    Case("Mixtral", "packed", model_type="mixtral", settings={**_LLAMA, "num_local_experts": 4}),
    Case("Qwen 3 MoE", "packed", model_type="qwen3_moe",
         settings={**_LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    Case("Qwen 2 MoE", "packed", model_type="qwen2_moe",
         settings={**_LLAMA, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
                   "shared_expert_intermediate_size": 16}),
    Case("OLMoE", "packed", _NO_CLASS, model_type="olmoe",
         settings={**_LLAMA, "num_experts": 8, "num_experts_per_tok": 2}),
    Case("DeepSeek V3", "packed", model_type="deepseek_v3", settings=_DEEPSEEK),
    Case("Llama 4 (text)", "packed", _NO_CLASS, model_type="llama4_text",
         settings={**_LLAMA, "num_local_experts": 4, "num_experts_per_tok": 1, "intermediate_size_mlp": 64,
                   "attention_chunk_size": 128}),
    Case("Gemma", "packed", model_type="gemma"),
    Case("Gemma 2", _CHANGED, "yes", _CHANGED, model_type="gemma2"),
    Case("Gemma 3 (text)", "padded", model_type="gemma3_text", settings={**_LLAMA, "sliding_window": 128}),
    Case("Phi", _BIAS, "yes", _BIAS, model_type="phi"),
    Case("Phi-3", "packed", model_type="phi3"),
    Case("OLMo", "packed", model_type="olmo"),
    Case("OLMo 2", "packed", model_type="olmo2"),
    Case("SmolLM 3", "packed", model_type="smollm3"),
    Case("StarCoder 2", "packed", model_type="starcoder2"),
    Case("GLM 4", "packed", model_type="glm4"),
    Case("ERNIE 4.5", "packed", _NO_CLASS, model_type="ernie4_5"),
    Case("Granite", "padded", _NO_CLASS, model_type="granite"),
    Case("Granite, logits_scaling", _CHANGED, _NO_CLASS, _CHANGED, {**_LLAMA, "logits_scaling": 8.0}, "granite"),
    Case("Cohere", _CHANGED, _NO_CLASS, _CHANGED, model_type="cohere"),
    Case("Nemotron", "padded", model_type="nemotron"),
    Case("Persimmon", "packed", model_type="persimmon"),
    Case("GPT-NeoX", "packed", model_type="gpt_neox"),
    Case("GPT-2", "packed", model_type="gpt2", settings=_GPT),
    Case("GPT-BigCode", "packed", model_type="gpt_bigcode", settings=_GPT),
    Case("GPT-J", _BIAS, "yes", _BIAS, {**_GPT, "rotary_dim": 4}, "gptj"),
    Case("GPT-Neo", "padded", "yes", _OWN,
         {**_TOKENS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
          "window_size": 16, "max_position_embeddings": 128}, "gpt_neo"),
    Case("OPT", "padded", model_type="opt", settings={**_OPT, "word_embed_proj_dim": 32}),
    Case("OPT, narrow embeddings", "padded", model_type="opt", settings={**_OPT, "word_embed_proj_dim": 16}),
    Case("Falcon", "padded", "yes", _OWN, _SMALL, "falcon"),
    Case("Falcon, ALiBi", "padded", "yes", _OWN, {**_SMALL, "alibi": True}, "falcon"),
    Case("StableLM", "padded", "yes", _OWN, model_type="stablelm"),
    Case("BLOOM", "padded", "yes", _OWN, {**_TOKENS, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "bloom"),
    Case("MPT", "padded", "yes", _OWN,
         {**_TOKENS, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": 128}, "mpt"),
    Case("XGLM", "padded", _NO_CLASS, _OWN,
         {**_TOKENS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 64}, "xglm"),
    Case("Mamba", "padded", _NO_CLASS, _OWN, {**_TOKENS, "hidden_size": 32, "num_hidden_layers": 2}, "mamba"),
    Case("MiniMax", "padded", "yes", "no: layers without attention", {**_LLAMA, "num_local_experts": 4}, "minimax"),
    Case("LFM 2", "padded", _NO_CLASS, "no: layers without attention",
         {**_LLAMA, "layer_types": ["conv", "full_attention"]}, "lfm2"),
    Case("gpt-oss", "padded", "yes", "no: attention sinks",
         {**_LLAMA, "num_local_experts": 4, "sliding_window": 128}, "gpt_oss"),
    Case("Falcon-H1", _CHANGED, _NO_CLASS, _CHANGED,
         {**_LLAMA, "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1,
          "lm_head_multiplier": 0.5}, "falcon_h1"),
    Case("xLSTM", _CHANGED, _NO_CLASS, _CHANGED,
         {**_TOKENS, "hidden_size": 32, "num_blocks": 2, "num_heads": 4}, "xlstm"),
    Case("BERT", "no: tokens see later ones", "no: no decoder", "no: tokens see later ones", _SMALL, "bert"),
)  # fmt: skip
_WORDS = {
    "without bias": _BIAS,
    "changes its logits": _CHANGED,
    "cannot be loaded as a sequence-classification": _NO_CLASS,
    "does not let its attention be chosen": _OWN,
    "that are no attention": "no: layers without attention",
    "attention sinks": "no: attention sinks",
    "see those after them": "no: tokens see later ones",
    "made from decoders": "no: no decoder",
}


@dataclass(frozen=True, slots=True)
class Outcome:
    rows: str
    reward: str
    sampling: str
    distance: float
    """The largest difference of a loss of SFT to that of transformers; 0 where it was refused."""
    mismatch: float
    """Of log-probs of the generator and of the policy that learns (`policy/mismatch`)."""


def outcome(case: Case, home: Path) -> Outcome:
    """What becomes of a model of the case; an error of no words of ours is raised."""
    folder = write_model(case, home / "model")
    rows, distance = _said(lambda: _sft(folder, home / "sft"))
    reward, _ = _said(lambda: _reward(folder, home / "reward"))
    sampling, mismatch = _said(lambda: _ppo(folder, home / "ppo"))
    return Outcome(rows, reward, sampling, distance, mismatch)


def write_model(case: Case, folder: Path) -> Path:
    """A folder as users bring it, without dropout, which draws differently in another order."""
    config = AutoConfig.for_model(case.model_type, **case.settings)
    for name, value in vars(config).copy().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            for weight in model.parameters():
                weight.add_(torch.randn_like(weight) * 0.05)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def _said(run: Any) -> tuple[str, float]:
    try:
        return run()
    except KedgeError as error:
        return next((word for part, word in _WORDS.items() if part in str(error)), str(error)), 0.0


def _sft(folder: Path, run: Path) -> tuple[str, float]:
    optimiser = {"lr": _LR, "schedule": "constant", "warmup": 0}
    data = [{"messages": talk} for talk in _TALKS]
    stage = kedge.SFT(
        model=str(folder), data=data, batch=4, epochs=2, samples=0, max_length=128, device="cpu", optimiser=optimiser
    )
    losses = [step["train/loss"] for step in stage.run(run).metrics()]
    distance = max(abs(ours - plain) for ours, plain in zip(losses, plain_losses(folder), strict=True))
    reader = reader_of(load_causal(folder, dtype="float32").get_decoder())
    partial = ", last layer in part" if reader.has_partial_last_layer else ""
    return (f"packed{partial}" if reader.is_packed else "padded"), distance


def plain_losses(folder: Path) -> list[float]:
    """Two steps by transformers and torch alone, a row at a time."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), tiny_tokenizer()
    rows: list[Any] = [
        tokenizer.apply_chat_template(talk, return_dict=True, return_assistant_tokens_mask=True) for talk in _TALKS
    ]
    optimiser = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.0)
    losses: list[float] = []
    for _ in range(2):
        parts = [_token_losses(model, row["input_ids"], row["assistant_masks"]) for row in rows]
        loss = torch.cat(parts).mean()
        optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.item())
    return losses


def _token_losses(model: Any, tokens: list[int], mask: list[int]) -> torch.Tensor:
    logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, :-1]
    return F.cross_entropy(logits_TV, torch.tensor(tokens[1:]), reduction="none")[torch.tensor(mask[1:]).bool()]


def _reward(folder: Path, run: Path) -> tuple[str, float]:
    pairs = [{"prompt": f"q {n}", "chosen": "good " * (n % 4 + 1), "rejected": "bad"} for n in range(4)]
    stage = kedge.Reward(model=str(folder), data=pairs, batch=4, epochs=1, max_length=64, device="cpu")
    with suppress(ContractStop):  # three pairs teach nothing, which is said
        stage.run(run, check=False)
    return "yes", 0.0


def score(answers: list[kedge.Answer]) -> list[float]:
    return [len(answer.text) % 3 for answer in answers]


def _ppo(folder: Path, run: Path) -> tuple[str, float]:
    stage = kedge.PPO(
        model=str(folder), reward=score, prompts=[f"q {n}" for n in range(4)], roles="separate", iterations=1, batch=4,
        sampling={"max_new_tokens": 12}, device="cpu",
    )  # fmt: skip
    (step,) = stage.run(run, check=False).metrics()
    return "yes", step["policy/mismatch"]


def row_of(case: Case) -> str:
    return f"| {case.name} | {case.rows} | {case.reward} | {case.sampling} |"


if __name__ == "__main__":
    for found in CASES:
        with TemporaryDirectory() as home:
            print(row_of(found), outcome(found, Path(home)), file=sys.stderr)
        print(row_of(found))
