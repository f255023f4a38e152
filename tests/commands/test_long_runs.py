"""The commands that read runs: lean on long ones, and without torch on any."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "long_runs.py"


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("long_runs", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["long_runs"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_reading_a_run_needs_no_torch() -> None:
    modules = "kedge.commands.watch, kedge.commands.doctor, kedge.commands.compare, kedge.report.writing"
    code = f"import sys, {modules}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.slow
def test_a_long_run_takes_little_memory(benchmark: ModuleType, tmp_path: Path) -> None:
    """20,000 steps: as one dict a step they alone would take 170 MB."""
    run = benchmark.write_run(tmp_path / "long", 20_000)
    for command in ("report", "doctor", "watch", "compare"):
        result = benchmark.measure([command, str(run)])
        assert result.exit_code == 0
        assert not result.imports_torch
        assert result.peak_mb < 150, command
