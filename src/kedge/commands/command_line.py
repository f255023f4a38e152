"""How `kedge` is called from this shell: commands that are printed work as printed."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path


def kedge_command() -> str:
    """`kedge` where the shell finds that of this environment; else its path, relative where it is in this folder."""
    script = Path(sys.executable).parent / "kedge"
    command = shutil.which("kedge")
    if command is not None and Path(command).absolute() == script:
        return "kedge"
    if not script.is_file():
        return f"{_shown(Path(sys.executable))} -m kedge.cli"
    return _shown(script)


def _shown(path: Path) -> str:
    here = Path(os.getcwd())
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
