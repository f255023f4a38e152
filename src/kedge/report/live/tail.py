"""New lines of a journal since the last look: only what was appended is read, however long the file is.

A resumed run replaces its journals by shorter ones; a reader is told, and starts again. Half a line waits.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kedge.core.errors import RunError
from kedge.runs import exact_json


@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    records: list[dict[str, Any]]
    is_rewound: bool
    """What was read before no longer holds: the records are all that there are."""


class Tail:
    """Where in one file a reader is."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._file: tuple[int, int] | None = None
        """Device and number of the file that the offset is about."""

    def read(self) -> News:
        try:
            with self.path.open("rb") as file:
                about = os.fstat(file.fileno())
                identity = (about.st_dev, about.st_ino)
                is_rewound = self._file is not None and (identity != self._file or about.st_size < self._offset)
                if is_rewound:
                    self._offset = 0
                self._file = identity
                file.seek(self._offset)
                found = file.read()
        except FileNotFoundError:
            is_rewound, self._file, self._offset = self._file is not None, None, 0
            return News(records=[], is_rewound=is_rewound)
        end = found.rfind(b"\n") + 1
        records = [self._parsed(line) for line in found[:end].splitlines()]
        self._offset += end
        return News(records=records, is_rewound=is_rewound)

    def _parsed(self, line: bytes) -> dict[str, Any]:
        try:
            return dict(exact_json.loads(line))
        except (ValueError, TypeError) as error:
            raise RunError(f"{self.path}: a line is not a JSON object ({error}). Found: {line[:80]!r}.") from error
