"""The configuration of a model as plain values: no weights, and no torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

from kedge.core.errors import ModelError
from kedge.models.loading.aliases import ALIASES
from kedge.models.loading.resolve import resolve

_NAME = "config.json"


def described_at(model: str | Path) -> Path | str:
    """Where a model is described, by its configuration and tokenizer: a folder, with weights or not, or a hub id."""
    folder = Path(model).expanduser()
    return folder if model not in ALIASES and (folder / _NAME).is_file() else resolve(model)


def config_values(model: str | Path) -> tuple[dict[str, Any], str]:
    """What `config.json` of a model says, and where it was found: a folder, or an id of the hub.

    That file alone is fetched from the hub.
    """
    source = described_at(model)
    file = source / _NAME if isinstance(source, Path) else _fetched(source)
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file} cannot be read ({error}); copy or download the model again") from error
    if not isinstance(values, dict):
        raise ModelError(f"{file}: expected an object of settings, found {type(values).__name__}")
    return cast("dict[str, Any]", values), str(source)


def _fetched(hub_id: str) -> Path:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(hub_id, _NAME))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise ModelError(
            f"the configuration of '{hub_id}' cannot be had (no network, HF_HUB_OFFLINE set, or a wrong name?); "
            f"a folder with its config.json and its tokenizer is enough to plan: {reason}"
        ) from error
