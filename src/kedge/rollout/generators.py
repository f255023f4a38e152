"""Generators as plugins: what a `kedge.generators` entry point is, and how a stage opens the one its recipe names.

Free of torch, so that a recipe is checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal

from kedge.core import plugins
from kedge.core.plugin_sections import kind_of
from kedge.core.settings import Section
from kedge.rollout.settings import SamplingSettings, StreamSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kedge.core.protocols import Generator
    from kedge.core.world import World


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorParts:
    """What a generator is made from."""

    model: PreTrainedModel
    """The policy in this process; with adapters, the base that carries them."""
    sampling: SamplingSettings
    stop_ids: Collection[int]
    """Tokens that end an answer."""
    pad: int
    max_rows: int
    """Answers to sample at once; it changes speed and memory, never an answer."""
    decode: Callable[[list[int]], str]
    """From the tokens of an answer to the text in which stop strings are looked for."""
    world: World | None = None
    """The processes that run the stage together; None is this one alone. Every process asks for all rows: a generator
    either gives the same answers on each, or shares the rows (`kedge.rollout.shared`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorKind:
    """A `kedge.generators` plugin. `make(settings, parts)` returns a `kedge.core.protocols.Generator`; it may be given
    by its name `package.module:function`, so that a recipe is checked without importing it."""

    settings: type[Section]
    """Its own settings, with a field `kind` that holds its name."""
    make: Callable[[Any, GeneratorParts], Generator] | str


class LocalSettings(StreamSettings):
    """Samples in this process, with the policy's own weights."""

    kind: Literal["local"] = "local"


LOCAL = GeneratorKind(settings=LocalSettings, make="kedge.rollout.local:make")


def open_generator(settings: Section, parts: GeneratorParts) -> Generator:
    """The generator that `settings`, checked by its plugin, asks for."""
    kind: GeneratorKind = plugins.find("generators", kind_of(settings))
    make = resolve_name(kind.make) if isinstance(kind.make, str) else kind.make
    return make(settings, parts)
