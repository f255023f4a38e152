"""Datasets of the Hugging Face hub into rows, through the local cache of `datasets`. No code of a dataset is run."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.core.errors import DataError
from kedge.data.columnar import batch_rows, choose_split
from kedge.data.decode import Row

_NAME = r"[A-Za-z0-9][\w.-]*"
_HUB_ID = re.compile(
    rf"(?:hub:)?(?P<org>{_NAME})/(?P<name>{_NAME})(?:/(?P<config>{_NAME}))?"
    rf"(?:@(?P<revision>{_NAME}))?(?::(?P<split>{_NAME}))?"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HubId:
    org: str
    name: str
    config: str
    revision: str
    split: str

    @classmethod
    def parse(cls, text: str) -> HubId | None:
        """
        >>> HubId.parse("hub:openai/gsm8k/main:test")
        HubId(org='openai', name='gsm8k', config='main', revision='', split='test')
        """
        match = _HUB_ID.fullmatch(text)
        return cls(**{key: value or "" for key, value in match.groupdict().items()}) if match else None

    def __str__(self) -> str:
        config = f"/{self.config}" if self.config else ""
        revision = f"@{self.revision}" if self.revision else ""
        return f"hub:{self.org}/{self.name}{config}{revision}"


def hub_rows(source: HubId) -> Iterator[Row]:
    loaded = _load(source)
    split = choose_split(list(loaded), source.split, str(source))
    yield from batch_rows(loaded[split].with_format("arrow").iter(batch_size=1024), f"{source}:{split}")


def hub_files(source: HubId) -> list[Path]:
    """The files in the local cache that hold the rows of a dataset."""
    loaded = _load(source)
    split = choose_split(list(loaded), source.split, str(source))
    return [Path(entry["filename"]) for entry in loaded[split].cache_files]


def _load(source: HubId) -> Any:
    import datasets

    try:
        return datasets.load_dataset(
            f"{source.org}/{source.name}", source.config or None, revision=source.revision or None
        )
    except Exception as error:  # the library's errors and those of its transports share no base
        reason = str(error).strip().partition("\n")[0]
        raise DataError(
            f"{source}: the dataset cannot be fetched from the hub ({type(error).__name__}: {reason}). Check the name "
            "and the connection (is HF_HUB_OFFLINE set?), log in where it is gated, or download it and give the path."
        ) from error
