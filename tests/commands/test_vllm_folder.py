"""A folder exported for vLLM is loaded by vLLM itself as it is: `make vllm`, then `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from kedge.commands.export.run import ExportRequest, export
from kedge.data.examples import Message
from kedge.data.template import encode_prompt
from kedge.models.loading.load import load_causal
from kedge.models.loading.tiny import make_tiny, tiny_tokenizer

PYTHON = Path(__file__).parents[2] / ".venv-vllm/bin/python"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON.exists(), reason="no vLLM here: make vllm"),
]
NEW = 12


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(NEW):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


def test_vllm_answers_like_the_source(tmp_path: Path) -> None:
    source = make_tiny(tmp_path / "model", seed=2, hidden=128)  # heads of 32, which vLLM needs on a CPU
    exported = export(ExportRequest(model=str(source), to="vllm", dtype="float32", output=tmp_path / "out"))
    questions = ["Hi", "How many are 12 and 7?"]
    messages = [[{"role": "user", "content": question}] for question in questions]
    child = [str(PYTHON), str(Path(__file__).with_name("vllm_child.py")), str(exported.folder)]
    done = subprocess.run(
        child,
        input=json.dumps({"messages": messages, "new": NEW}),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.partition("ANSWERS ")[2].splitlines()[0])
    prompts = [encode_prompt(tiny_tokenizer(), (Message("user", question),)) for question in questions]
    assert [answer["prompt"] for answer in answers] == prompts
    model = load_causal(str(source), dtype="float32")
    assert [answer["answer"] for answer in answers] == [greedy(model, prompt) for prompt in prompts]
