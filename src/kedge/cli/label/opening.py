"""The store that a command means, and lines on the screen."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kedge.cli.screen import out, writing
from kedge.core.errors import PluginError

if TYPE_CHECKING:
    from kedge.label.database import Store

DATABASE = "KEDGE_LABEL_DB"
Database = Annotated[
    str, typer.Option("--db", help=f"The store: a file, or postgresql://…; else ${DATABASE}, else labels.db here.")
]
NO_ADDRESS = ""


@contextmanager
def opened(address: str, *, create: bool = False) -> Generator[Store]:
    try:
        from kedge.label.database import open_store
    except ModuleNotFoundError as error:
        raise PluginError(f"labels need {error.name}: pip install 'kedge[label]'") from error
    place = address or os.environ.get(DATABASE) or "labels.db"
    with writing(Path(place)):
        store = open_store(place, create=create)
    try:
        yield store
    finally:
        store.close()


def say(line: str) -> None:
    out().print(line, markup=False, soft_wrap=True)
