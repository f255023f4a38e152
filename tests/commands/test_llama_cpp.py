"""GGUF files that were exported here, read by llama.cpp itself: the same tokens, the same greedy answers.

It needs llama-cpp-python, which compiles for a quarter of an hour, in an environment of its own: `.venv-llama` in the
repository, or the Python that KEDGE_LLAMA_PYTHON names.
"""

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
from kedge.data.template import encode_prompt, render
from kedge.data.tokenizer import load_tokenizer, tokens_of
from kedge.models.loading.fidelity import next_token_logprobs
from kedge.models.loading.load import load_causal
from kedge.models.loading.resolve import resolve

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
QUESTIONS = ("What is the capital of France?", "Add 12 and 7.", "Write one sentence about rain.")
TEXTS = (
    "In 1987 we saw 3.14159 of them; isn't it?\n\n  So it's said.",
    "Grüße — 海は静か\t\tend \r\n",
    "<|im_start|>user\nHi<|im_end|>\n",
)
NEW = 24


@pytest.fixture(scope="module")
def python() -> str:
    place = os.environ.get("KEDGE_LLAMA_PYTHON") or str(ROOT / ".venv-llama/bin/python")
    if not Path(place).exists():
        pytest.skip(
            f"no llama-cpp-python: {place} is not there (python -m venv .venv-llama; pip install llama-cpp-python)"
        )
    return place


def asked(python: str, file: Path, request: dict[str, Any]) -> dict[str, Any]:
    child = [python, str(Path(__file__).with_name("llama_child.py")), str(file)]
    done = subprocess.run(child, input=json.dumps(request), capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


@torch.no_grad()
def greedy(model: Any, prompt: list[int]) -> list[int]:
    tokens = torch.tensor([prompt])
    for _ in range(NEW):
        tokens = torch.cat([tokens, model(tokens).logits[:, -1:].argmax(-1)], dim=1)
    return tokens[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["tiny", "smollm2-135m"])
def test_llama_cpp_answers_like_the_source(name: str, python: str, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(resolve(name))
    prompts = [encode_prompt(tokenizer, (Message("user", question),)) for question in QUESTIONS]
    chats = [render(tokenizer, (Message("user", text),), add_generation_prompt=True) for text in (*QUESTIONS, TEXTS[0])]
    texts = [*TEXTS, *chats]
    model = load_causal(name, dtype="float32")
    answers = [greedy(model, prompt) for prompt in prompts]
    rows = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
    own = [
        logp_TV.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
        for logp_TV, row in zip(next_token_logprobs(model, rows), rows, strict=True)
    ]
    changes: dict[str, float] = {}
    for kind in ("f16", "q8_0"):
        exported = export(ExportRequest(model=name, to="gguf", quantise=kind, output=tmp_path / kind))  # type: ignore[arg-type]
        (file,) = exported.folder.glob("*.gguf")
        said = asked(python, file, {"texts": texts, "prompts": prompts, "new": NEW, "rows": rows})
        assert said["tokens"] == [tokens_of(tokenizer, text) for text in texts]
        assert said["eos"] == tokenizer.eos_token_id
        assert "generation %}" not in said["template"].replace("add_generation_prompt %}", "")
        theirs = [torch.tensor(logprobs) for logprobs in said["logprobs"]]
        changes[kind] = float(torch.cat([(a - b).abs() for a, b in zip(own, theirs, strict=True)]).mean())
        print(f"{name} {kind}: {changes[kind]:.5f} nats a token in llama.cpp, {exported.fidelity.mean_change:.5f} here")
        if kind == "f16":
            assert said["greedy"] == answers
    assert changes["f16"] < 0.01
    assert changes["q8_0"] < 0.2
