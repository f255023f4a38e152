"""The decoding step as a CUDA graph for each batch size: the host launches one graph a token, and waits for nothing.

Cache and slots stay allocated, since graphs remember addresses; rows that move only exchange places. `fused` models
run on the kernels of `kernels`, others on transformers' modules with attention and sampling from there. Without CUDA
the same steps run uncaptured. Weights are read where the trainer has them, so an update in place needs no copy; of
adapters, which are small, the kernels have copies (see `adapters`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from logging import getLogger
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from kedge.rollout.adapters import active_adapters, is_adapted
from kedge.rollout.cache import RowCache, placed
from kedge.rollout.steps import PLACE, Sampler, Slots, State, empty_slots, last_hidden
from kedge.rollout.tiles import head_tile

_log = getLogger(__name__)


class GraphSteps:
    """Decodes up to `places` rows of up to `columns` tokens; the host reads the result after at most `window` steps."""

    def __init__(
        self,
        model: PreTrainedModel,
        sampler: Sampler,
        *,
        places: int,
        columns: int,
        window: int,
        is_fused: bool,
        sizes: Sequence[int] = (),
    ) -> None:
        """`sizes` are numbers of rows that will be decoded at once: their kernels are compiled together."""
        self._sizes = tuple(size for size in sizes if size <= places)
        self._model, self._sampler, self._is_fused = model, sampler, is_fused
        self.cache = RowCache(places, columns)
        self.slots = empty_slots(places, window, model.device)
        on_gpu = model.device.type == "cuda"
        self._captures = on_gpu
        self._chained = is_fused and on_gpu and torch.cuda.get_device_capability(model.device)[0] >= 9
        # `top_p` asks the host how many tokens to sort, so it cannot be part of a graph; `top_k` goes with it. Of
        # four-byte numbers a tile of the head is too large, and a tile is at least 16 deep.
        head_VD = sampler.head_VD
        has_kernel = is_fused or (on_gpu and head_VD.element_size() == 2 and head_VD.shape[1] % 16 == 0)
        self._draws_within = has_kernel and not sampler.is_limited
        self._backbone: Any = None
        self._graphs: dict[int, tuple[torch.cuda.CUDAGraph, Tensor]] = {}
        self._pool: Any = None
        self._captured_of = weights_identity(model)

    def can_decode(self, *, places: int, columns: int) -> bool:
        """Whether there is room for so many rows of so many columns, and the weights are where they were."""
        has_room = places <= self.cache.places and columns <= self.cache.columns
        return has_room and self._captured_of == weights_identity(self._model)

    def refresh(self) -> None:
        """Before the first step of a batch: take what the trainer has written since the last one."""
        if self._backbone is not None:
            self._backbone.refresh()

    def step(self, rows: int, filled: int) -> None:
        del filled
        if self._captures and rows not in self._graphs:
            self._capture(rows)
        if self._captures:
            graph, hidden_RD = self._graphs[rows]
            graph.replay()
        else:
            hidden_RD = self._until_drawn(rows)
        if not self._draws_within:
            self._sampler.draw_and_advance(self.slots.first(rows), hidden_RD)

    def relocate(self, state_FR: State, source: list[int], target: list[int]) -> None:
        state_FR[PLACE, source + target] = state_FR[PLACE, target + source]

    def _compile(self) -> None:
        """Compile the kernels of all sizes at once; after that each is found."""
        from kedge.rollout.kernels.launch import compiling

        with compiling():
            for rows in self._sizes:
                self._until_drawn(rows)
        self._sizes = ()

    def _capture(self, rows: int) -> None:
        """Run the step once to compile it, undo what it wrote, and capture it."""
        if self._is_fused and self._sizes:
            self._compile()
        state_FR = self.slots.state_FR.clone()
        warm_up = torch.cuda.Stream()
        warm_up.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(warm_up):
            self._until_drawn(rows)
        torch.cuda.current_stream().wait_stream(warm_up)
        self.slots.state_FR.copy_(state_FR)
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                hidden_RD = self._until_drawn(rows)
        except RuntimeError as error:  # a module that asks the host something, as some mixtures of experts do
            reason = str(error).partition("\n")[0]
            _log.warning("%s decodes without CUDA graphs, which is slow: %s", type(self._model).__name__, reason)
            self._captures = False
            return
        self._pool = graph.pool()
        self._graphs[rows] = graph, hidden_RD

    def _until_drawn(self, rows: int) -> Tensor:
        """The hidden states of the step; the tokens are drawn too where that can be part of a graph."""
        slots = self.slots.first(rows)
        hidden_RD = self._fused(rows) if self._is_fused else self._with_modules(slots)
        if self._draws_within:
            from kedge.rollout.kernels.sampling import draw_and_advance

            settings, head_VD = self._sampler.settings, self._sampler.head_VD
            draw_and_advance(
                slots,
                hidden_RD,
                head_VD,
                self._sampler.stop_V,
                temperature=settings.temperature,
                least=settings.min_new_tokens,
                most=settings.max_new_tokens,
                tile=head_tile(rows, head_VD.shape[1]),
                chained=self._chained,
            )
        return hidden_RD

    def _fused(self, rows: int) -> Tensor:
        from kedge.rollout.kernels.backbone import FusedBackbone

        if self._backbone is None:
            self._backbone = FusedBackbone(self._model, self.cache, self.slots, chained=self._chained)
            self._backbone.refresh()
        return self._backbone(rows)

    def _with_modules(self, slots: Slots) -> Tensor:
        self.cache.at_places(slots.place_R, slots.column_R)
        mask = placed(slots.place_R, slots.column_R)
        tokens_R1, positions_R1 = slots.token_R[:, None], slots.column_R[:, None]
        return last_hidden(self._model, self.cache, tokens_R1, positions_R1, mask)[:, 0].contiguous()


def weights_identity(model: PreTrainedModel) -> Hashable:
    """The addresses of the weights and the active adapters: a graph that was captured under others must not be used."""
    adapters = [
        (module.active, tuple(scale for _, _, scale in active_adapters(module)))
        for module in model.modules()
        if is_adapted(module)
    ]
    return tuple(weight.data_ptr() for weight in model.parameters()), tuple(adapters)
