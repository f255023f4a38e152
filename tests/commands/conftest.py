"""The cases beside these tests are a module of their own, so that others can import them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
