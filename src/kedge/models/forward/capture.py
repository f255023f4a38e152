"""All layers of a decoder but the last as CUDA graphs, so that a pass costs the host two launches instead of thousands.

A small model's layers take a GPU less time than it takes the host to launch them. Packed rows are padded to one of a
few token counts, with a pair of graphs for each: forward, and backward with the gradients of the layers' weights.
Weights are read where they are, so that an update in place needs no new graph. All graphs share one pool of memory:
what is kept for a backward pass must not meet another graph before it, so a second forward pass in between runs
uncaptured. Dropout and recomputed activations run uncaptured too.
Shape letters: N tokens of packed rows, D width, S sequences.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from logging import getLogger
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._utils import _unflatten_dense_tensors  # pyright: ignore[reportPrivateUsage]: many views at once

from kedge.models.forward.layers import PackedLayer
from kedge.models.forward.lora import LoraLinear
from kedge.models.forward.packing import Bucket, Layout, Spans, bucket_of, nearest

Rotation = tuple[Tensor, Tensor]
"""Cosines and sines of the positions."""

_torch: Any = torch
"""Its operations on lists of tensors have no public names."""
_log = getLogger(__name__)

_WORTH_CAPTURING = 5e12
_WITHOUT_GRADIENTS = 0.6
"""Tokens times weights of a pass, above which the GPU is slower than the host (on an H200 the host takes 100 ms for 30
layers and back, a fifth without gradients, the GPU then a third): there graphs would only hold memory."""
_ASKS_THE_HOST = "Linear8bitLt"
"""bitsandbytes' layer of 8 bits, which waits for its outliers: a capture that ends half-way ends all others too."""
_OFTEN_FULL = 2
"""So many times memory may run out in a capture, which holds every gradient twice, before layers go on without."""


class CapturedLayers(nn.Module):
    """In the place of `layers` in a decoder: computes them one after the other, by a graph where that can be done."""

    def __init__(self, layers: Sequence[PackedLayer]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._first: Any = layers[0].layer
        self._weights = list(self.layers.parameters())
        self._num_weights = sum(weight.numel() for weight in self._weights)
        self._adapted = [module for module in self.layers.modules() if isinstance(module, LoraLinear)]
        self._graphs: dict[Hashable, dict[Bucket, _Graphs | None]] = {}
        """By what they compute, then by size; None where that cannot be captured."""
        self._flat: dict[Hashable, _FlatGradients] = {}
        self._num_full = 0

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Rotation, layout: Layout | None = None, **others: Any
    ) -> Tensor:
        """(1, N, D) to (1, N, D)."""
        graphs = self._graphs_for(hidden_states, position_embeddings, layout) if layout is not None else None
        if graphs is None or layout is None:
            return self._run(hidden_states, position_embeddings, layout, **others)
        graphs.fill(hidden_states[0].detach(), position_embeddings, layout)
        weights = graphs.backward.weights if graphs.backward else ()
        return _Replay.apply(graphs, hidden_states[0], *weights)[None]

    def _run(self, hidden_states: Tensor, rotation: Rotation, layout: Layout | None, **others: Any) -> Tensor:
        for layer in self.layers:
            hidden_states = layer(hidden_states, position_embeddings=rotation, layout=layout, **others)
        return hidden_states

    def _graphs_for(self, hidden_states: Tensor, rotation: Rotation, layout: Layout) -> _Graphs | None:
        """The graphs for such rows, captured when they are first needed; None where there can be none."""
        most = _WORTH_CAPTURING * (1 if torch.is_grad_enabled() else _WITHOUT_GRADIENTS)
        is_large = hidden_states.shape[1] * self._num_weights > most
        pool = _pool(hidden_states.device)
        pool.users.add(self)
        if is_large or pool.is_kept_for_backward or pool.has_failed or self._num_full >= _OFTEN_FULL:
            return None
        bucket = bucket_of(hidden_states.shape[1], len(layout.lengths), layout.rows.longest)
        same = self._graphs.setdefault((hidden_states.requires_grad, torch.is_grad_enabled(), self._identity()), {})
        near = nearest(same, bucket)
        if near is None:
            other = next(iter(same.values()), None)
            near, same[bucket] = bucket, self._captured(bucket, hidden_states, rotation, layout, other)
        return same[near]

    def _note_full(self) -> None:
        self._num_full += 1
        if self._num_full == _OFTEN_FULL:
            _log.warning("layers run without CUDA graphs, which is slow: there is not enough memory for them")

    def drop_graphs(self) -> None:
        """Give their memory back; they are captured again when they are needed."""
        self._graphs.clear()
        self._flat.clear()

    def reads(self, weights: Collection[int]) -> bool:
        """Whether any of these weights, by their `id`, is one of the layers'."""
        return any(id(weight) in weights for weight in self._weights)

    def _identity(self) -> Hashable:
        """Where the weights are, which of them learn, which adapters are added and whether something is dropped or
        recomputed: another graph for another answer."""
        places, learning = map(Tensor.data_ptr, self._weights), map(attrgetter("requires_grad"), self._weights)
        mode = self._first.training, getattr(self._first, "gradient_checkpointing", False)
        return tuple(places), tuple(learning), tuple(map(attrgetter("active"), self._adapted)), mode

    def _captured(
        self, bucket: Bucket, hidden_states: Tensor, rotation: Rotation, layout: Layout, other: _Graphs | None
    ) -> _Graphs | None:
        """`other` computes the same for another size."""
        pool = _pool(hidden_states.device)
        if any(_is_random_or_recomputed(module) for module in self.layers.modules() if module.training):
            return None
        if len({weight.dtype for weight in self._weights if weight.requires_grad}) > 1:
            return None
        if any(type(module).__name__ == _ASKS_THE_HOST for module in self.layers.modules()):
            return None
        try:
            inputs = _inputs(bucket, hidden_states, rotation, layout)
            return self._capture(inputs, layout, pool, other)
        except torch.OutOfMemoryError:
            self._note_full()
            raise
        except RuntimeError as error:  # a module that asks the host something
            pool.has_failed = True  # what was captured half-way is still in the pool
            _log.warning("layers run without CUDA graphs, which is slow: %s", str(error).partition("\n")[0])
            return None

    def _capture(self, inputs: _Inputs, layout: Layout, pool: _Pool, other: _Graphs | None) -> _Graphs:
        """Capture the layers, backward too where something learns.

        The first time they run once before, which compiles their kernels and shows which weights are reached.
        """
        padded = replace(layout, rows=Spans(ends_S1=inputs.ends_S1, longest=inputs.bucket.longest, is_even=False))

        def run() -> Tensor:
            hidden_1ND = inputs.hidden_ND[None]
            return self._run(hidden_1ND, inputs.rotation, padded, attention_mask=None, use_cache=False)[0]

        forward = torch.cuda.CUDAGraph()
        with _twins(self.layers) as twins:
            learning = [x for x in (inputs.hidden_ND, *twins) if x.requires_grad]
            if other is None:
                with _on(pool.stream):
                    output_ND = run()
                    reached = _reached(output_ND, learning) if output_ND.requires_grad and learning else []
            else:
                known = {id(weight) for weight in other.backward.weights} if other.backward else set[int]()
                reached = [x for x in learning if x is inputs.hidden_ND or id(twins[x]) in known]
            torch.cuda.empty_cache()  # a capture cannot take what is cached
            with _capturing(forward, pool):
                output_ND = run()
            weights: list[Tensor] = [twins[x] for x in reached if x is not inputs.hidden_ND]
            backward = self._capture_backward(inputs, output_ND, reached, weights, pool) if reached else None
        return _Graphs(inputs=inputs, pool=pool, forward=forward, output_ND=output_ND.detach(), backward=backward)

    def _capture_backward(
        self, inputs: _Inputs, output_ND: Tensor, reached: list[Tensor], weights: list[Tensor], pool: _Pool
    ) -> _Backward:
        """`weights` are those that are `reached`, as the model has them."""
        places = tuple(weight.data_ptr() for weight in weights)
        flat = self._flat.get(places) or _FlatGradients(weights)
        self._flat[places] = flat
        output_gradient_ND = torch.zeros_like(output_ND)
        input_gradient_ND = torch.zeros_like(inputs.hidden_ND) if len(reached) > len(weights) else None
        results = [*([] if input_gradient_ND is None else [input_gradient_ND]), *flat.parts]
        graph = torch.cuda.CUDAGraph()
        with _capturing(graph, pool):
            _torch._foreach_copy_(results, list(torch.autograd.grad(output_ND, reached, output_gradient_ND)))
        return _Backward(
            graph=graph,
            weights=weights,
            output_gradient_ND=output_gradient_ND,
            input_gradient_ND=input_gradient_ND,
            flat=flat,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Inputs:
    """What the graphs of a bucket read, at fixed addresses."""

    bucket: Bucket
    hidden_ND: Tensor
    rotation: Rotation
    ends_S1: Tensor
    numbers_S: Tensor
    """0, 1, …: to make the ends of the sequences of padding."""


def _inputs(bucket: Bucket, hidden_states: Tensor, rotation: Rotation, layout: Layout) -> _Inputs:
    hidden_ND = hidden_states.new_zeros(bucket.tokens, hidden_states.shape[2])
    numbers_S = torch.arange(bucket.sequences + 1, dtype=torch.int32, device=hidden_ND.device)
    inputs = _Inputs(
        bucket=bucket,
        hidden_ND=hidden_ND.requires_grad_(hidden_states.requires_grad),
        rotation=cast(Rotation, tuple(x.new_zeros(1, bucket.tokens, x.shape[2]) for x in rotation)),
        ends_S1=torch.zeros_like(numbers_S),
        numbers_S=numbers_S,
    )
    _fill_ends(inputs, layout)
    return inputs


@torch.no_grad()
def _fill_ends(inputs: _Inputs, layout: Layout) -> None:
    """The ends of the sequences, then those of the padding, cut at `longest`; what is left over is empty sequences."""
    count, (tokens, _, longest) = len(layout.rows.ends_S1), inputs.bucket
    inputs.ends_S1[:count].copy_(layout.rows.ends_S1)
    padding_S = inputs.numbers_S[1 : len(inputs.ends_S1) - count + 1] * longest + len(layout.place_N)
    inputs.ends_S1[count:].copy_(padding_S.clamp(max=tokens))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backward:
    graph: torch.cuda.CUDAGraph
    weights: list[Tensor]
    """Those that it gives gradients of."""
    output_gradient_ND: Tensor
    input_gradient_ND: Tensor | None
    flat: _FlatGradients


@dataclass(frozen=True, slots=True, kw_only=True)
class _Graphs:
    inputs: _Inputs
    pool: _Pool
    forward: torch.cuda.CUDAGraph
    output_ND: Tensor
    backward: _Backward | None

    @torch.no_grad()
    def fill(self, hidden_ND: Tensor, rotation: Rotation, layout: Layout) -> None:
        """Copy the inputs of a pass to where the graphs read them."""
        tokens = len(hidden_ND)
        self.inputs.hidden_ND[:tokens].copy_(hidden_ND)
        self.inputs.hidden_ND[tokens:].zero_()
        for held, given in zip(self.inputs.rotation, rotation, strict=True):
            held[:, :tokens].copy_(given)
        _fill_ends(self.inputs, layout)


class _FlatGradients:
    """The gradients of many weights of one type in one block of memory, which a single launch copies."""

    def __init__(self, weights: Sequence[Tensor]) -> None:
        self._block = weights[0].new_empty(sum(weight.numel() for weight in weights))
        self.parts = _unflatten_dense_tensors(self._block, weights)

    def copied(self) -> Sequence[Tensor]:
        """The gradients in memory of their own: the next pass writes to the same block."""
        return _unflatten_dense_tensors(self._block.clone(), self.parts)


class _Replay(torch.autograd.Function):
    """The captured layers as one operation: its inputs are in place when it is called."""

    @staticmethod
    def forward(ctx: Any, graphs: _Graphs, hidden_ND: Tensor, *weights: Tensor) -> Tensor:
        del weights
        graphs.forward.replay()
        if graphs.backward:
            ctx.graphs, ctx.kept = graphs, _Kept()
            graphs.pool.kept = weakref.ref(ctx.kept)
        return graphs.output_ND[: len(hidden_ND)]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graphs: _Graphs = ctx.graphs
        backward = cast(_Backward, graphs.backward)
        tokens = len(gradients[0])
        backward.output_gradient_ND[:tokens].copy_(gradients[0])
        backward.output_gradient_ND[tokens:].zero_()
        backward.graph.replay()
        graphs.pool.kept = None
        of_input = backward.input_gradient_ND
        return None, None if of_input is None else of_input[:tokens].clone(), *backward.flat.copied()


class _Kept:
    """Lives as long as a pass waits for its backward."""


@dataclass(slots=True)
class _Pool:
    """What all graphs of a device share: their memory, and the stream on which they are captured."""

    stream: torch.cuda.Stream
    graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = field(default_factory=weakref.WeakSet[torch.cuda.CUDAGraph])
    has_failed: bool = False
    """Whether a capture ended half-way: there are no more of them then."""
    kept: weakref.ref[_Kept] | None = None
    users: weakref.WeakSet[CapturedLayers] = field(default_factory=lambda: weakref.WeakSet[CapturedLayers]())

    @property
    def handle(self) -> Any:
        """Of the memory of the graphs that are there; None, for memory anew, where the last of them has gone."""
        graph = next(iter(self.graphs), None)
        return None if graph is None else graph.pool()

    @property
    def is_kept_for_backward(self) -> bool:
        return self.kept is not None and self.kept() is not None


_POOLS: dict[torch.device, _Pool] = {}


def _pool(device: torch.device) -> _Pool:
    if device not in _POOLS:
        _POOLS[device] = _Pool(stream=torch.cuda.Stream(device))
    return _POOLS[device]


def release_graphs(device: torch.device) -> None:
    """Drop all graphs of a device. What a pass computes outside of them cannot have their memory, and those of large
    passes would keep it while passes are made smaller."""
    if device in _POOLS:
        for layers in list(_POOLS[device].users):
            layers.drop_graphs()


def release_graphs_over(weights: Sequence[Tensor]) -> None:
    """Drop the graphs of layers with any of these weights, whose memory is about to go; those that still run end
    first."""
    places = {id(weight) for weight in weights}
    for device, pool in _POOLS.items():
        users = [layers for layers in list(pool.users) if layers.reads(places)]
        if users:
            torch.cuda.synchronize(device)
        for layers in users:
            layers.drop_graphs()


@contextmanager
def _twins(layers: nn.Module) -> Generator[dict[Tensor, nn.Parameter]]:
    """Inside of the block every weight that learns is replaced by a twin over the same memory; weights by their twins.

    Autograd waits for the stream on which a weight was first used, as long as something of that pass is alive: in a
    capture, where only one stream may be waited for, that would be an error.
    """
    places = [
        (module, name, weight)
        for module in layers.modules()
        for name, weight in module.named_parameters(recurse=False)
        if weight.requires_grad
    ]
    twins: dict[Tensor, nn.Parameter] = {}
    for module, name, weight in places:
        twin = nn.Parameter(weight.detach())
        module.register_parameter(name, twin)
        twins[twin] = weight
    try:
        yield twins
    finally:
        for module, name, weight in places:
            module.register_parameter(name, weight)


def _reached(output_ND: Tensor, learning: Sequence[Tensor]) -> list[Tensor]:
    """Those that the output depends on; adapters that are not active do not count."""
    gradients = torch.autograd.grad(output_ND, list(learning), torch.zeros_like(output_ND), allow_unused=True)
    pairs = zip(learning, cast(Sequence[Tensor | None], gradients), strict=True)
    return [x for x, gradient in pairs if gradient is not None]


@contextmanager
def _capturing(graph: torch.cuda.CUDAGraph, pool: _Pool) -> Generator[None]:
    """By default CUDA would end the capture for what other threads do, and for a kernel that is loaded meanwhile."""
    with torch.cuda.graph(graph, pool=pool.handle, stream=pool.stream, capture_error_mode="relaxed"):
        yield
    pool.graphs.add(graph)


@contextmanager
def _on(stream: torch.cuda.Stream) -> Generator[None]:
    """The block runs there, after what is under way, and before what comes later."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


def _is_random_or_recomputed(module: nn.Module) -> bool:
    shares = [value for name, value in vars(module).items() if "dropout" in name]
    numbers = [x for share in shares for x in (share.values() if isinstance(share, dict) else (share,))]
    drops = any(isinstance(number, float) and number > 0 for number in numbers)
    return (
        drops or (isinstance(module, nn.Dropout) and module.p > 0) or getattr(module, "gradient_checkpointing", False)
    )
