"""Data in, a cleaned training part and a held-out part out."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kedge.data.prepare import prepare
from kedge.stages.data.settings import DataSettings
from kedge.stages.shared.context import Context


def run(context: Context, settings: DataSettings) -> Mapping[str, Path]:
    return context.once(
        lambda: prepare(
            context.inputs("files"),
            context.folder / "data",
            heldout=settings.heldout,
            drop=settings.drop,
            decontaminate=context.inputs("decontaminate"),
            balance=settings.balance,
            max_broken=settings.max_broken,
            seed=context.split_seed,
            report=context.event,
        )
    )
