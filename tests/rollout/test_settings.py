"""Sampling settings: what is refused, and with which words."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError

from kedge.rollout.settings import SamplingSettings


@pytest.mark.parametrize(
    "wrong",
    [{"temperature": 0}, {"top_p": 0}, {"top_p": 1.1}, {"top_k": 0}, {"max_new_tokens": 0}, {"stop": [""]}, {"top": 1}],
)
def test_settings_out_of_range_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        SamplingSettings.model_validate(wrong)


def test_a_minimum_above_the_maximum_is_refused() -> None:
    with pytest.raises(ValidationError, match="min_new_tokens 5 is above max_new_tokens 4"):
        SamplingSettings(min_new_tokens=5, max_new_tokens=4)


def test_settings_do_without_torch() -> None:
    code = "import sys, kedge.rollout.settings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
