"""One training stage on real preferences, the same for Kedge and TRL: data and weights on disk, what is measured."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

StageName = Literal["sft", "reward", "dpo", "grpo", "ppo"]
Way = Literal["full", "lora", "trunk"]
"""How weights are trained; a trunk is for PPO alone, and Kedge's alone."""
STAGES: tuple[StageName, ...] = ("sft", "reward", "dpo", "grpo", "ppo")
RANK, ALPHA = 16, 32
NEW_TOKENS = 128
RESULT = "RESULT "
"""Begins a line with the figures of a stage."""
GROUP = 8
"""Answers to a prompt in GRPO."""

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    "135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "0.5b": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5b": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7b": {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28},
}
KEYS = {"tiny": 2, "135m": 3, "0.5b": 2, "1.5b": 2, "7b": 4}
LARGE_VOCABULARY = 151_936


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCase:
    home: str
    stage: StageName
    way: Way
    shape: str
    batch: int
    """Conversations, pairs or prompts a step; answers for GRPO."""
    steps: int
    skipped: int
    """Steps at the beginning that warm up and do not count."""
    max_length: int
    micro_batch: int
    """Rows that TRL computes at once; Kedge chooses."""
    base_bits: int = 16
    """Of the frozen base under adapters; Kedge's side alone, as is `recompute`."""
    recompute: bool = False
    new_tokens: int = NEW_TOKENS

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    def file(self, name: str) -> str:
        return str(Path(self.home) / name)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasured:
    step_s: float
    """Median seconds of an optimiser step (an iteration for GRPO and PPO), of those that count."""
    first_step_s: float
    """From the start of the stage to the end of its first step."""
    peak_gib: float
    tokens_a_step: float
    """Real tokens of a step; 0 where the side does not count them."""
    saving_s: float | None = None
    """From the last step to the end of the stage, its model saved; None where the side saves nothing."""


def stages_of(way: Way, stages: Sequence[StageName]) -> list[StageName]:
    """Those of the stages that can train in a way.

    >>> stages_of("trunk", STAGES)
    ['ppo']
    """
    return [stage for stage in stages if way != "trunk" or stage == "ppo"]


def write_inputs(home: Path, pairs: Path, tokenizer: str, shape: str, *, with_reward: bool) -> None:
    """The data in the form that each side reads, and random weights of the shape with a real tokenizer beside them."""
    write_data(home, pairs)
    write_policy(home / "policy", tokenizer, shape)
    if with_reward:
        from kedge.models.reward.reward_files import build, save

        save(
            build(home / "policy", seed=1, dtype="bfloat16" if torch.cuda.is_available() else "float32"),
            home / "reward",
        )


def write_data(home: Path, pairs: Path, count: int | None = None) -> None:
    """The data alone; of `count` pairs where that is given."""
    from kedge.data.examples import Pair
    from kedge.data.reading import read

    examples = [example for example in read(pairs, limit=count) if isinstance(example, Pair)]
    _write(
        home / "pairs.jsonl",
        ({"prompt": _plain(x.prompt), "chosen": _plain(x.chosen), "rejected": _plain(x.rejected)} for x in examples),
    )
    _write(home / "demonstrations.jsonl", ({"messages": [*_plain(x.prompt), *_plain(x.chosen)]} for x in examples))
    _write(home / "completions.jsonl", ({"prompt": _plain(x.prompt), "completion": _plain(x.chosen)} for x in examples))
    _write(home / "prompts.jsonl", ({"prompt": _plain(x.prompt)} for x in examples))
    (home / "rules.py").write_text("def length(answer):\n    return float(len(answer.text))\n")


def config_of(words: Any, shape: str) -> Any:
    """The configuration of a shape, with the tokens of a tokenizer."""
    from transformers import LlamaConfig, Qwen2Config

    ids = {"eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id, "bos_token_id": words.bos_token_id}
    sizes: dict[str, Any] = {**SHAPES[shape], "num_key_value_heads": KEYS[shape], **ids}
    sizes["tie_word_embeddings"] = shape != "7b"
    is_llama = shape in ("tiny", "135m")
    vocabulary = len(words) if is_llama else LARGE_VOCABULARY
    return (LlamaConfig if is_llama else Qwen2Config)(**sizes, vocab_size=vocabulary, max_position_embeddings=8192)


def write_policy(folder: Path, tokenizer: str, shape: str) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    words = AutoTokenizer.from_pretrained(tokenizer)
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = AutoModelForCausalLM.from_config(config_of(words, shape))
    model.to(torch.bfloat16).save_pretrained(folder)
    words.save_pretrained(folder)
    del model
    torch.cuda.empty_cache()  # this process waits while the sides run, and needs none of it


def _plain(messages: Iterable[Any]) -> list[dict[str, str]]:
    return [{"role": message.role, "content": message.content} for message in messages]


def _write(path: Path, records: Iterable[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.writelines(f"{json.dumps(record)}\n" for record in records)


def median(numbers: Sequence[float]) -> float:
    ordered = sorted(numbers)
    return ordered[len(ordered) // 2]
