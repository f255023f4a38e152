"""Which models a board is about: the same weights are one model, whatever they were called in which folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kedge.commands.board.places import Place
from kedge.core.errors import ConfigError
from kedge.core.files import hash_folder
from kedge.core.suggest import did_you_mean
from kedge.gate.verdict import GatedModel
from kedge.runs.lineage import locate
from kedge.stages.gate.models import contents_of

Order = tuple[int, int, int]


@dataclass(eq=False, slots=True)
class Known:
    """One model with everything that it is known by."""

    name: str
    run_name: str
    origin: str
    order: Order
    kind: str = ""
    hashes: set[str] = field(default_factory=set[str])
    folder: Path | None = None
    """Of the weights, where a stage of the board made them."""
    is_measured: bool = False
    label: str = ""
    weights: str = ""
    """The hash of its weights alone, where somebody has written it down."""


class Models:
    """Models as they are met. Hashes tell them apart; where a folder has none, the run and the name do."""

    def __init__(self) -> None:
        self._models: list[Known] = []
        self._by_name: dict[tuple[Path, str], Known] = {}
        self._by_place: dict[tuple[Path, str], Known] = {}

    def add_made(self, place: Place) -> None:
        """The models that a stage has made."""
        manifest = place.manifest
        for output in manifest.outputs if manifest else ():
            if output.kind == "model":
                assert manifest is not None
                name = manifest.stage or place.folder.name
                made = self._find({output.hash}) or self._new(name, place, (place.run, place.number, 0))
                made.hashes.add(output.hash)
                made.kind, made.folder = manifest.kind, locate(output, place.folder)
                made.name, made.origin = name, str(place.folder)
                self._by_name.setdefault((_home(place), name), made)

    def add_asked(self, place: Place, names: Iterable[str]) -> None:
        """The models that an exam or an evaluation has asked, as the folder calls them."""
        contents = contents_of(place.folder)
        for name in names:
            hashes = {digest for digest in contents.get(name, ()) if digest}
            model = self._find(hashes) if hashes else None
            model = model or self._named(place, name, hashes) or self._new(name, place, self._outside(place))
            model.hashes |= hashes
            model.weights = model.weights or contents.get(name, ("", ""))[1]
            model.is_measured = True
            self._by_place[place.folder, name] = model
            self._by_name.setdefault((_home(place), name), model)

    def add_gated(self, place: Place, gated: GatedModel) -> Known:
        """A model that a verdict is about."""
        hashes = {gated.content, gated.weights}
        model = self._find(hashes) or self._new(gated.name, place, self._outside(place))
        model.hashes |= hashes
        model.weights = gated.weights
        model.is_measured = True
        return model

    def asked(self, place: Place, name: str) -> Known:
        return self._by_place[place.folder, name]

    def with_hash(self, *hashes: str) -> Known | None:
        return self._find({digest for digest in hashes if digest})

    def measured(self) -> list[Known]:
        """In the order of runs and stages, those from outside before those that were made of them; labels differ."""
        models = sorted((model for model in self._models if model.is_measured), key=lambda model: model.order)
        for model, label in zip(models, _labels(models), strict=True):
            model.label = label
        return models

    def unmeasured(self) -> list[str]:
        return [model.origin for model in self._models if not model.is_measured]

    def _outside(self, place: Place) -> Order:
        return (place.run, 0, len(self._models))

    def _new(self, name: str, place: Place, order: Order) -> Known:
        model = Known(name=name, run_name=place.run_name, origin=str(place.folder), order=order)
        self._models.append(model)
        return model

    def _find(self, hashes: set[str]) -> Known | None:
        """The model with one of these hashes. Two that turn out to be one are joined."""
        matching = [model for model in self._models if model.hashes & hashes]
        if len(matching) > 1:
            matching.sort(key=lambda model: (not model.kind, model.order))
            for other in matching[1:]:
                self._join(matching[0], other)
        return matching[0] if matching else None

    def _join(self, model: Known, other: Known) -> None:
        self._models.remove(other)
        model.hashes |= other.hashes
        model.is_measured |= other.is_measured
        model.weights = model.weights or other.weights
        for names in (self._by_name, self._by_place):
            for key, value in names.items():
                if value is other:
                    names[key] = model

    def _named(self, place: Place, name: str, hashes: set[str]) -> Known | None:
        """By name, where nothing says that it is another: without hashes, or with the hash of the stage's weights."""
        same = self._by_name.get((_home(place), name))
        if same is not None and (not hashes or not same.hashes):
            return same
        for model in self._models:
            if hashes and model.name == name.partition(".")[0] and model.folder and model.folder.is_dir():
                weights = hash_folder(model.folder, suffixes=(".safetensors",))
                model.hashes.add(weights)
                if weights in hashes:
                    return model
        return None


def _home(place: Place) -> Path:
    """Where names mean the same: the pipeline, or the folder itself."""
    return (place.folder.parent if place.manifest else place.folder).resolve()


def _labels(models: Sequence[Known]) -> list[str]:
    """The shortest names that differ: of the stage, with its run, with its hash."""
    labels = [model.name for model in models]
    longer = [f"{model.run_name}/{model.name}" for model in models]
    longest = [f"{name} ({model.weights[:8] or model.origin})" for name, model in zip(longer, models, strict=True)]
    for forms in (longer, longest):
        labels = [label if labels.count(label) == 1 else form for label, form in zip(list(labels), forms, strict=True)]
    return [label if labels.count(label) == 1 else f"{label} #{place}" for place, label in enumerate(labels, start=1)]


def choose_baseline(models: Sequence[Known], wanted: str | None, proposed: Sequence[Known]) -> Known | None:
    """The one that was named; else the one that verdicts, then evaluations, compare with; else the first."""
    if wanted is not None:
        matching = [
            model for model in models if wanted in (model.label, model.origin, f"{model.run_name}/{model.name}")
        ]
        matching = matching or [model for model in models if model.name == wanted]
        if len(matching) == 1:
            return matching[0]
        labels = [model.label for model in models]
        if matching:
            raise ConfigError(f"--baseline {wanted}: several models are called so; name one of {', '.join(labels)}")
        raise ConfigError(
            f"--baseline {wanted}: no model of the board{did_you_mean(wanted, labels)}; there are {', '.join(labels)}"
        )
    candidates = [model for model in proposed if model in models] or list(models)
    return max(candidates, key=candidates.count, default=None)
