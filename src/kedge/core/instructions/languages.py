"""The language of a text by langdetect (the extra `exams`), the same at every call and on every machine."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from kedge.core.errors import PluginError

_SEED = 0
"""langdetect draws n-grams at random; one seed a text makes it repeatable."""


def require_langdetect(use: str) -> None:
    """An error, before anything is asked, where langdetect is not installed."""
    if importlib.util.find_spec("langdetect") is None:
        raise PluginError(f"{use} needs 'langdetect': pip install 'kedge[exams]'")


def language_of(text: str) -> str | None:
    """The ISO 639-1 code of the likeliest language; None where a text has no letters to tell it by."""
    factory = _detectors()
    from langdetect.lang_detect_exception import LangDetectException

    detector = factory.create()
    detector.append(text)
    try:
        return str(detector.detect())
    except LangDetectException:
        return None


@cache
def _detectors() -> Any:
    """A factory of our own: langdetect's own one is shared with whoever else imports it, and so is its seed."""
    require_langdetect("the language of an answer")
    from langdetect.detector_factory import PROFILES_DIRECTORY, DetectorFactory

    # In the order of their names: that of the folder differs between disks, and the order of sums with it.
    files = sorted(file for file in Path(PROFILES_DIRECTORY).iterdir() if not file.name.startswith("."))
    factory = DetectorFactory()
    factory.set_seed(_SEED)
    factory.load_json_profile([file.read_text(encoding="utf-8") for file in files])
    return factory
