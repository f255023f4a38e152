"""Lets the tests import the modules beside them, and those that make the folders of exams and evaluations."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "gate"))
