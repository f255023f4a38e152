"""One door for parts, ours and others': entry points, imported at the moment they are asked for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, get_args

from kedge.core.errors import PluginError
from kedge.core.suggest import nearest

Kind = Literal["algorithms", "rewards", "generators", "trackers", "stages", "roles"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plugin:
    kind: Kind
    name: str
    package: str
    target: str


@cache
def _installed(kind: Kind) -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=f"kedge.{kind}")}


def names(kind: Kind) -> list[str]:
    return sorted(_installed(kind))


def installed() -> list[Plugin]:
    """Every part that is installed, from which package; nothing is imported."""
    return [
        Plugin(kind=kind, name=name, package=point.dist.name if point.dist else "?", target=point.value)
        for kind in KINDS
        for name, point in sorted(_installed(kind).items())
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """Where an installed part comes from: its package with the version, and the file of its module, if any."""

    package: str
    version: str
    file: Path | None


def origin(kind: Kind, name: str) -> Origin | None:
    """The origin of an installed part; None for one that is not installed."""
    point = _installed(kind).get(name)
    if point is None:
        return None
    spec = find_spec(point.module)
    return Origin(
        package=point.dist.name if point.dist else "?",
        version=point.dist.version if point.dist else "?",
        file=Path(spec.origin) if spec and spec.origin and spec.has_location else None,
    )


def find(kind: Kind, name: str) -> Any:
    """Import and return the part `name`; the message of a failure says what to install or what was meant."""
    point = _installed(kind).get(name)
    singular = kind.removesuffix("s")
    if point is None:
        close = nearest(name, names(kind))
        hint = f" Did you mean '{close}'?" if close else ""
        listed = ", ".join(names(kind)) or "none (is the package itself installed? try: pip install -e .)"
        raise PluginError(f"No {singular} named '{name}'.{hint} Installed: {listed}.")
    try:
        return point.load()
    except ModuleNotFoundError as error:
        missing = (error.name or "?").partition(".")[0]
        package = point.dist.name if point.dist else "kedge"
        raise PluginError(f"{singular} '{name}' needs '{missing}': pip install '{package}[{name}]'") from error
    except (ImportError, AttributeError) as error:
        raise PluginError(f"{singular} '{name}' ({point.value}) cannot be imported: {error}") from error
