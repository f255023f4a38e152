"""What `kedge models` does."""

from __future__ import annotations

from pathlib import Path


def built_in() -> list[tuple[str, str, bool]]:
    """Alias, summary, and whether it can be used without fetching anything."""
    from kedge.models.loading.aliases import SUMMARIES, is_ready

    return [(alias, summary, is_ready(alias)) for alias, summary in SUMMARIES.items()]


def fetch_model(alias: str) -> Path:
    from kedge.models.loading.aliases import fetch

    return fetch(alias)
