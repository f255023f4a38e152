"""People who label, as a recipe names them, and the store that they work in."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from kedge.core.errors import PluginError
from kedge.core.settings import Section
from kedge.core.stage import MayChange

if TYPE_CHECKING:
    from kedge.label.database import Store

DATABASE = "KEDGE_LABEL_DB"


class PeopleProject(Section):
    """A project of `kedge label`, and where its store is."""

    project: str = Field(min_length=1)
    """The name of the project."""
    db: Annotated[str | None, MayChange()] = None
    """The store: a file beside the recipe, or `postgresql://…`; `$KEDGE_LABEL_DB`, else labels.db, when absent."""

    def address(self, folder: Path) -> str:
        """Where the store is; a file is meant from the folder of the recipe."""
        place = self.db or os.environ.get(DATABASE) or "labels.db"
        return place if "://" in place else str(folder / place)


@contextmanager
def open_people(address: str, *, create: bool = False) -> Generator[Store]:
    """The store, while it is used; what is not installed for it is named."""
    try:
        from kedge.label.database import open_store
    except ModuleNotFoundError as error:
        raise PluginError(f"labels need {error.name}: pip install 'kedge[label]'") from error
    store = open_store(address, create=create)
    try:
        yield store
    finally:
        store.close()
