"""Generators as plugins: what a `kedge.generators` entry point is, and how a stage opens the one its recipe names.

Free of torch, so that a recipe is checked without it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any, Literal, Protocol

from kedge.core import plugins
from kedge.core.findings import Finding
from kedge.core.plugin_sections import kind_of
from kedge.core.settings import Section
from kedge.models.settings import LoraSettings
from kedge.rollout.settings import SamplingSettings, StreamSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from kedge.core.findings import Level
    from kedge.core.protocols import Generator
    from kedge.core.world import World


class Report(Protocol):
    """Writes an event into the run."""

    def __call__(self, level: Level, code: str, message: str, **evidence: Any) -> None: ...


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
    source: str = ""
    """The model that the policy started from: a folder, or a name."""
    folder: Path = Path()
    """Where a generator may keep files: the folder of the stage."""
    longest: int | None = None
    """The most tokens of a prompt and its answer together."""
    probe: Sequence[int] = ()
    """A text of the run's data, by which weights are compared."""
    report: Report | None = None
    world: World | None = None
    """The processes that run the stage together; None is this one alone. Every process asks for all rows: a generator
    either gives the same answers on each, or shares the rows (`kedge.rollout.shared`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorUse:
    """What a stage asks of its generator, so that it is checked before anything is started."""

    sampling: SamplingSettings
    base_bits: int
    """Bits a weight of a frozen base; 16 where nothing is quantised."""
    is_mismatch_measured: bool
    """Whether the trainer computes the log-probs of the answers once more."""
    lora: LoraSettings | None = None
    """The adapter that the policy is; None where all of its weights learn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GeneratorKind:
    """A `kedge.generators` plugin. `make(settings, parts)` returns a `kedge.core.protocols.Generator`; it may be given
    by its name `package.module:function`, so that a recipe is checked without importing it."""

    settings: type[Section]
    """Its own settings, with a field `kind` that holds its name."""
    make: Callable[[Any, GeneratorParts], Generator] | str
    check: Callable[[Any, GeneratorUse], Iterable[Finding]] = lambda settings, use: ()
    """What is wrong with the settings for what the stage asks; free of torch."""


class LocalSettings(StreamSettings):
    """Samples in this process, with the policy's own weights."""

    kind: Literal["local"] = "local"


LOCAL = GeneratorKind(settings=LocalSettings, make="kedge.rollout.local:make")


def check_generator(settings: Section, use: GeneratorUse) -> Iterable[Finding]:
    """What the plugin behind `settings` finds wrong with them."""
    kind: GeneratorKind = plugins.find("generators", kind_of(settings))
    return kind.check(settings, use)


def open_generator(settings: Section, parts: GeneratorParts) -> Generator:
    """The generator that `settings`, checked by its plugin, asks for."""
    kind: GeneratorKind = plugins.find("generators", kind_of(settings))
    make = resolve_name(kind.make) if isinstance(kind.make, str) else kind.make
    return make(settings, parts)


def with_sampling(generator: Generator, sampling: SamplingSettings) -> Generator | None:
    """The same generator with the same weights, sampling in another way; None for one that cannot."""
    method: Callable[[SamplingSettings], Generator] | None = getattr(generator, "with_sampling", None)
    return method(sampling) if method else None


def max_mismatch(generator: Generator) -> float | None:
    """Nats a token above which a generator's weights cannot be those of the trainer; None where that cannot be."""
    return getattr(generator, "max_mismatch", None)


def close_generator(generator: Generator) -> None:
    """End what a generator has started."""
    close: Callable[[], None] | None = getattr(generator, "close", None)
    if close:
        close()
