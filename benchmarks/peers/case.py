"""One piece of PPO work, the same for every side: shapes, weights on disk, prompts, stop tokens.

A side runs in a process of its own (`measure`) and prints its result as one line of JSON.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

PAD, EOS = 256, 258
"""Ids of the tokenizer that lies beside the weights."""
FIRST_WORD = 300
"""Prompts and stop tokens are drawn from here on, so that none of them is a special token."""
TRUNK, LORA = "reward-trunk", "reward-lora"
DType = Literal["bfloat16", "float32"]

SHAPES: dict[str, dict[str, Any]] = {
    "0.5b": {
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "vocab_size": 151_936,
    },
    "1.5b": {
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_hidden_layers": 28,
        "num_attention_heads": 12,
        "vocab_size": 151_936,
    },
    "cpu": {
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 4096,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 1024,
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    home: str
    """The folder of the weights."""
    shape: str
    rows: int
    prompt_tokens: int
    new_tokens: int
    is_unequal: bool
    epochs: int
    minibatches: int
    updates: int
    """The first one warms up and does not count."""
    micro_batch: int
    roles: str = "separate"
    threads: int | None = None
    trl_rollout: int | None = None
    """Rows that TRL generates and judges at once (its default is 64); all when None."""
    compile: bool = False
    """Compile the layers of Kedge's roles."""
    trunk_layers: int | None = None
    """Lower layers that Kedge's roles share on a trunk; the lower half when None."""
    old_logprobs: Literal["recomputed", "sampled"] = "recomputed"
    """Where the old log-probs of Kedge's PPO come from."""
    profile: int = 0
    """How many of the largest costs are listed; 0 does not profile."""

    @property
    def device(self) -> str:
        return "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> DType:
        return "bfloat16" if self.device == "cuda" else "float32"

    def prompts(self) -> list[list[int]]:
        """The prompts of all updates, one update after the other."""
        generator = torch.Generator().manual_seed(11)
        shape = (self.rows * self.updates, self.prompt_tokens)
        return torch.randint(FIRST_WORD, SHAPES[self.shape]["vocab_size"], shape, generator=generator).tolist()

    def stop_ids(self) -> list[int]:
        """None for equal lengths. Else so many that samples of random weights, which are nearly uniform, end after
        `new_tokens` / 4 on average, which makes the lengths geometric."""
        if not self.is_unequal:
            return []
        vocabulary = SHAPES[self.shape]["vocab_size"]
        count = min(vocabulary * 4 // self.new_tokens, vocabulary - FIRST_WORD)
        return list(range(FIRST_WORD, FIRST_WORD + count))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The result of one side."""

    laps: Sequence[Mapping[str, float]]
    """Seconds of `generate`, `judge`, `update` and of the whole as `step`, for every update that counts; under `cpu/`
    the processor time of the same."""
    tokens: Sequence[int]
    """Real tokens of prompts and answers, for every update that counts."""
    peak_gib: float
    """Peak memory of the GPU's allocator, or of the process where there is no GPU."""
    new_lengths: Sequence[int] = ()
    """Lengths of the answers of one update."""
    gaps: Mapping[str, float] = field(default_factory=dict[str, float])
    """How far log-probs of generator and trainer are from each other and from float32."""
    costs: Sequence[tuple[str, int, float]] = ()
    """Name, calls and seconds of the largest costs of one update."""

    def tokens_per_second(self) -> float:
        return sum(self.tokens) / sum(lap["step"] for lap in self.laps)

    def seconds(self, phase: str) -> float:
        return sum(lap[phase] for lap in self.laps) / len(self.laps)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutOfMemory:
    """A side ran out of memory in this phase."""

    phase: str


def config_of(shape: str) -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        **SHAPES[shape],
        num_key_value_heads=2,
        tie_word_embeddings=True,
        max_position_embeddings=4096,
        architectures=["Qwen2ForCausalLM"],
        eos_token_id=EOS,
        pad_token_id=PAD,
        bos_token_id=None,
    )


def write_models(home: Path, shape: str, dtype: DType, *, with_lora: bool = False) -> None:
    """Write a random policy, and reward models on it: a full one, and with `with_lora` one as an adapter."""
    from transformers import Qwen2ForCausalLM

    from kedge.models.loading.tiny import tiny_tokenizer
    from kedge.models.reward.ensemble import lora_members
    from kedge.models.reward.reward_files import build, save
    from kedge.models.settings import LoraSettings

    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        policy = Qwen2ForCausalLM(config_of(shape)).to(getattr(torch, dtype))
    policy.save_pretrained(home / "policy")
    del policy
    torch.cuda.empty_cache()  # this process waits while the sides run, and needs none of it
    tiny_tokenizer().save_pretrained(home / "policy")
    built = build(home / "policy", seed=1, dtype=dtype)
    save(built, home / TRUNK)
    if with_lora:
        (member,) = lora_members(built, LoraSettings(), count=1, seed=1)
        save(member, home / LORA)


def measure(side: str, case: Case) -> Measured | OutOfMemory:
    """Run one side (`kedge_side`, `trl_side`) in a process of its own, so that neither finds the other's memory."""
    here = str(Path(__file__).parent.parent)
    paths = os.pathsep.join([here, *filter(None, [os.environ.get("PYTHONPATH")])])
    threads = {"OMP_NUM_THREADS": str(case.threads)} if case.threads else {}
    child = subprocess.run(
        [sys.executable, "-m", f"peers.{side}", json.dumps(asdict(case))],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | threads | {"PYTHONPATH": paths},
    )
    if child.returncode:
        raise SystemExit(f"{side} failed:\n{child.stderr[-3000:]}")
    fields = json.loads(child.stdout.splitlines()[-1])
    return OutOfMemory(**fields) if "phase" in fields else Measured(**fields)


def print_result(result: Measured | OutOfMemory) -> None:
    """On the side's last line, where `measure` reads it."""
    print(f"\n{json.dumps(asdict(result))}", flush=True)


def case_from_arguments() -> Case:
    """The case that `measure` passes to a side; sets its number of threads."""
    case = Case(**json.loads(sys.argv[1]))
    if case.threads:
        torch.set_num_threads(case.threads)
    return case


class Stopwatch:
    """Seconds of each phase, update by update; the GPU is synchronised at every border between phases."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._lap: dict[str, float] = {}
        self.laps: list[dict[str, float]] = []
        self._start = self._mark = self._now()

    def mark(self) -> None:
        """A phase begins here; the time since the last one belongs to none."""
        self._mark = self._now()

    def close(self, phase: str) -> None:
        """The phase ends here, and the next one begins."""
        now = self._now()
        self._lap |= _between(phase, self._mark, now)
        self._mark = now

    def end(self) -> None:
        """The update is over, and the next one begins."""
        self.laps.append(self._lap | _between("step", self._start, self._mark))
        self._lap, self._start = {}, self._mark

    def _now(self) -> tuple[float, float]:
        if self._device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter(), time.process_time()


def _between(phase: str, start: tuple[float, float], end: tuple[float, float]) -> dict[str, float]:
    return {phase: end[0] - start[0], f"cpu/{phase}": end[1] - start[1]}


def peak_gib(device: str) -> float:
    if device == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
