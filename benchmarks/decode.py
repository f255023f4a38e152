"""How close sampling on a GPU comes to the bytes it must move, for each way to run a step and several batch sizes.

Random weights of the shape of Qwen2.5-0.5B (or 1.5B) in bfloat16, prompts of equal length, answers of equal length or
of very unequal ones (one token in `--stop-every` ends an answer). The floor of a step is its weights and the filled
part of its cache, each read once, at the rate of a copy measured in the same run. A step is timed as the difference of
two calls with many and with one new token, the host's work included. `read` is the time of the prompts, `first` that
of the first call, which compiles and captures; the gap is |generator - trainer| of the answers' log-probs.

    python benchmarks/decode.py                             # on an H200: about a minute
    python benchmarks/decode.py --shape tiny --new 16 --rows 1 4 --ways eager graph --all-ways-at 4     # anywhere
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from kedge.core.records import Prompts, Rollouts, repeated
from kedge.models.forward.heads import language_model, lm_head
from kedge.models.forward.lora import base_of, with_lora
from kedge.models.settings import LoraSettings
from kedge.rollout.local import LocalGenerator
from kedge.rollout.settings import SamplingSettings

SHAPES: dict[str, dict[str, Any]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4},
}
EAGER_NEW = 24
"""New tokens of the eager way, which takes twenty times as long as the others."""


def make(shape: str, device: str) -> PreTrainedModel:
    """A model of the shape with random weights, the same in every run."""
    vocabulary = 151_936 if shape != "tiny" else 1000
    config = Qwen2Config(
        **SHAPES[shape],
        vocab_size=vocabulary,
        num_key_value_heads=2,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16 if device == "cuda" else torch.float32)
    with torch.device(device):
        model = Qwen2ForCausalLM(config).eval()
    torch.set_default_dtype(torch.float32)
    return model


def adapted(model: PreTrainedModel, rank: int) -> PreTrainedModel:
    """The model with an adapter on every layer whose B is not zero, so that it changes the outputs."""
    wrapped = with_lora(model, LoraSettings(rank=rank), name="policy", seed=0)
    with torch.no_grad():
        for name, weight in wrapped.named_parameters():
            if ".lora_B." in name:
                weight.normal_(std=1e-3)
    return base_of(wrapped)


def copy_rate(device: str) -> float:
    """Bytes a second, read and written, of a large copy on the device."""
    source = torch.ones(2**30 if device == "cuda" else 2**24, dtype=torch.bfloat16, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source), device) for _ in range(5))


def seconds(work: Any, device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def floor_seconds(model: PreTrainedModel, rollouts: Rollouts, rate: float) -> float:
    """The least time of all steps after the first token: a step reads the weights once, and the filled part of the
    cache of each row that still grows."""
    config: Any = model.config
    weights = sum(weight.nbytes for weight in model.parameters())
    column = 2 * config.num_hidden_layers * config.num_key_value_heads * 2
    column *= config.hidden_size // config.num_attention_heads
    prompt_B = (rollouts.attention_mask_BT & ~rollouts.response_mask_BT).sum(1)
    new_B = rollouts.response_mask_BT.sum(1)
    # A row with n new tokens is read n - 1 times, when it has p, p + 1, … p + n - 2 and its newest token.
    filled = (new_B - 1) * (2 * prompt_B + new_B) / 2
    return (int(new_B.max() - 1) * weights + float(filled.sum()) * column) / rate


def log_prob_gap(model: PreTrainedModel, rollouts: Rollouts) -> tuple[float, float]:
    """Mean and largest |generator - trainer| log-prob of the answers of the first rows."""
    tokens_BT, mask_BT = rollouts.tokens_BT[:16], rollouts.response_mask_BT[:16]
    trainer = language_model(model)
    with torch.no_grad(), trainer.active():
        logp_BT = trainer.logprobs(tokens_BT, rollouts.attention_mask_BT[:16].cpu(), mask_BT.cpu())
    gap = (logp_BT - rollouts.behaviour_logp_BT[:16])[mask_BT].abs()
    return gap.mean().item(), gap.max().item()


def measure(model: PreTrainedModel, way: Any, prompts: Prompts, stops: tuple[int, ...], args: Any, rate: float) -> None:
    """Print the line of one way, batch size and kind of lengths."""
    device, rows = model.device.type, len(prompts.tokens)
    new = min(args.new, EAGER_NEW) if way == "eager" and device == "cuda" else args.new
    full, first_token = (
        LocalGenerator(model, SamplingSettings(max_new_tokens=count), stop_ids=stops, pad=0, max_rows=rows, path=way)
        for count in (new, 1)
    )
    start = time.perf_counter()
    rollouts = full.generate(prompts, 1)
    first = time.perf_counter() - start
    reading = min(seconds(lambda: first_token.generate(prompts, 1), device) for _ in range(3))
    whole = min(seconds(lambda: full.generate(prompts, 1), device) for _ in range(args.repeats))
    lengths_B = rollouts.response_mask_BT.sum(1)
    steps, tokens = int(lengths_B.max()) - 1, int(lengths_B.sum())
    mean, largest = log_prob_gap(model, rollouts)
    full.release()
    share, lengths = floor_seconds(model, rollouts, rate) / (whole - reading), "unequal" if stops else "equal"
    print(
        f"{way:6} {rows:5} {lengths:8} {tokens / rows:7.0f} {(whole - reading) / steps * 1e3:8.3f} {share:7.1%}"
        f" {tokens / whole:9,.0f} {reading * 1e3:8.1f} {first:8.1f} {mean:7.4f} {largest:8.4f}",
        flush=True,
    )


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(SHAPES), default="0.5B")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32, 128, 512])
    parser.add_argument("--ways", nargs="+", choices=["eager", "graph", "fused"], default=["eager", "graph", "fused"])
    parser.add_argument("--all-ways-at", type=int, nargs="*", default=[128], help="elsewhere only the last way")
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--stop-every", type=int, default=128)
    parser.add_argument("--lora", type=int, default=0, metavar="RANK", help="decode under an adapter of this rank")
    parser.add_argument("--repeats", type=int, default=3, help="the fastest counts")
    return parser.parse_args()


def main() -> None:
    args = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, rate = make(args.shape, device), copy_rate(device)
    model = adapted(model, args.lora) if args.lora else model
    vocabulary = len(lm_head(model))
    print(f"Qwen2.5-{args.shape}, {model.dtype}, prompts of {args.prompt} tokens; a copy moves {rate / 1e12:.2f} TB/s")
    print("way     rows lengths   tokens  ms/step   floor  tokens/s  read ms  first s   |gap|  largest")
    for rows in args.rows:
        generator = torch.Generator().manual_seed(rows)
        texts = torch.randint(0, vocabulary, (rows, args.prompt), generator=generator).tolist()
        prompts = repeated(texts, ids=list(range(rows)), answers=1)
        for way in args.ways if rows in args.all_ways_at else args.ways[-1:]:
            measure(model, way, prompts, (), args, rate)
        measure(model, args.ways[-1], prompts, tuple(range(0, vocabulary, args.stop_every)), args, rate)


if __name__ == "__main__":
    main()
