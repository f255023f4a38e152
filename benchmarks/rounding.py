"""How near generator and trainer can be in bfloat16: their roundings imitated in float32, on a model's real weights.

Each way of computing a layer is written out with its roundings and nothing else that differs: no order of sums, no
kernels. A row says how far the log-probs of sampled tokens are, on average, from those of the generator's roundings and
from exact ones. Models of the Llama family; runs on a CPU.

    python benchmarks/rounding.py smollm2-135m
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from kedge.data.tokenizer import load_tokenizer
from kedge.models.loading.load import load_causal
from kedge.models.loading.resolve import resolve

PROMPTS = (
    "Explain how a kedge anchor moves a ship.",
    "Write a short polite refusal to lend money.",
    "What is the capital of France, and why is it famous?",
    "List three ways to save energy at home.",
)
Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    return x


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16().to(x.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a way of computing rounds."""

    stream: Rounding = exact
    unit: Rounding = exact
    """The normed stream before it is multiplied by the norm's weight."""
    normed: Rounding = rounded
    late_scale: bool = False
    """Whether the stream is rounded before it is divided by its size, which products are then."""
    products: Rounding = rounded
    """Queries, keys, values, gate and up as they come from a product."""
    added: Rounding = rounded
    """What is added to the stream."""
    kept: Rounding = rounded
    """Turned queries and keys, attention, the gated product."""


WAYS = {
    "exact": Way(normed=exact, products=exact, added=exact, kept=exact),
    "generator": Way(late_scale=True, products=exact, added=exact),
    "trainer": Way(),
    "trainer, wide sums": Way(added=exact),
    "trainer, wide products": Way(added=exact, products=exact),
    "transformers": Way(stream=rounded, unit=rounded),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a folder, or a name that `kedge models` knows")
    parser.add_argument("--new-tokens", type=int, default=64)
    args = parser.parse_args()
    model: Any = load_causal(args.model, dtype="float32").eval()
    tokenizer = load_tokenizer(str(resolve(args.model)))
    for weight in model.parameters():
        weight.data = rounded(weight.data)
    found: dict[str, list[Tensor]] = {name: [] for name in WAYS}
    for number, prompt in enumerate(PROMPTS):
        messages = [{"role": "user", "content": prompt}]
        start: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        torch.manual_seed(number)
        given_1T = torch.tensor([start])
        tokens_T = model.generate(given_1T, max_new_tokens=args.new_tokens, do_sample=True, pad_token_id=0)[0]
        for name, way in WAYS.items():
            found[name].append(sampled_logprobs(model, tokens_T, len(start), way))
    logp = {name: torch.cat(parts) for name, parts in found.items()}
    print(f"{len(logp['exact'])} tokens; mean |difference of log-probs|, nats   to the generator   to exact")
    for name, logp_T in logp.items():
        distances = [(logp_T - logp[other]).abs().mean().item() for other in ("generator", "exact")]
        print(f"{name:64} {distances[0]:16.4f} {distances[1]:10.4f}")


@torch.no_grad()
def sampled_logprobs(model: Any, tokens_T: Tensor, start: int, way: Way) -> Tensor:
    """Of the tokens from `start` on."""
    decoder = model.model
    hidden_TD = decoder.embed_tokens.weight[tokens_T]
    position_1T = torch.arange(len(tokens_T))[None]
    rotation = [rounded(x[0])[:, None] for x in decoder.rotary_emb(hidden_TD[None], position_1T)]
    for layer in decoder.layers:
        hidden_TD = through(layer, hidden_TD, rotation, way)
    normed_TD, scale_T1 = norm(hidden_TD, decoder.norm, way)
    logp_TV = (linear(normed_TD, model.lm_head.weight) * scale_T1).log_softmax(-1)
    return logp_TV[start - 1 : -1].gather(1, tokens_T[start:, None])[:, 0]


def norm(stream_TD: Tensor, module: Any, way: Way) -> tuple[Tensor, Tensor]:
    """The normed stream, and what its products are still to be multiplied by."""
    scale_T1 = torch.rsqrt(stream_TD.square().mean(-1, keepdim=True) + module.variance_epsilon)
    if way.late_scale:
        return way.normed(stream_TD * module.weight), scale_T1
    return way.normed(way.unit(stream_TD * scale_T1) * module.weight), torch.ones_like(scale_T1)


def through(layer: Any, stream_TD: Tensor, rotation: list[Tensor], way: Way) -> Tensor:
    attention, mlp = layer.self_attn, layer.mlp
    normed_TD, scale_T1 = norm(stream_TD, layer.input_layernorm, way)
    query, key, value = (
        way.products(linear(normed_TD, project.weight) * scale_T1).unflatten(-1, (-1, attention.head_dim))
        for project in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    attended_TD = attend(way.kept(turned(query, *rotation)), way.kept(turned(key, *rotation)), way.kept(value), way)
    stream_TD = way.stream(stream_TD + way.added(linear(attended_TD, attention.o_proj.weight)))
    normed_TD, scale_T1 = norm(stream_TD, layer.post_attention_layernorm, way)
    gate_TF, up_TF = (
        way.products(linear(normed_TD, project.weight) * scale_T1) for project in (mlp.gate_proj, mlp.up_proj)
    )
    inner_TF = way.kept(silu(gate_TF) * up_TF)
    return way.stream(stream_TD + way.added(linear(inner_TF, mlp.down_proj.weight)))


def turned(x_THE: Tensor, cos_T1E: Tensor, sin_T1E: Tensor) -> Tensor:
    low, high = x_THE.chunk(2, dim=-1)
    return x_THE * cos_T1E + torch.cat((-high, low), dim=-1) * sin_T1E


def attend(query: Tensor, key: Tensor, value: Tensor, way: Way) -> Tensor:
    key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], 1) for x in (key, value))
    logits_HTS = torch.einsum("the,she->hts", query, key) * query.shape[-1] ** -0.5
    hidden_TS = torch.ones(len(query), len(query)).triu(1).bool()
    logits_HTS = logits_HTS.masked_fill(hidden_TS, -torch.inf)
    weights_HTS = (logits_HTS - logits_HTS.amax(-1, keepdim=True)).exp()
    summed_THE = torch.einsum("hts,she->the", way.kept(weights_HTS), value)
    return way.kept(summed_THE / weights_HTS.sum(-1).T[..., None]).flatten(1)


if __name__ == "__main__":
    main()
