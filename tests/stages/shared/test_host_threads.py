"""Beside a GPU the host computes with one thread, and has all of them back afterwards."""

from __future__ import annotations

import pytest
import torch

from kedge.stages.shared import device


@pytest.mark.parametrize(("picked", "within"), [("cuda:1", 1), ("cpu", 3)])
def test_threads_of_the_host(picked: str, within: int, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(device, "pick_device", lambda _: picked)
    torch.set_num_threads(3)
    try:
        with device.few_host_threads("auto"):
            assert torch.get_num_threads() == within
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)
