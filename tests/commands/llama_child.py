"""Run by the Python that has llama-cpp-python: what it makes of a GGUF file, as JSON.

python llama_child.py FILE < {"texts": […], "prompts": [[token, …], …], "new": 24, "rows": [[token, …], …]}
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import numpy as np


def main() -> None:
    import llama_cpp

    asked: dict[str, Any] = json.load(sys.stdin)
    model = llama_cpp.Llama(sys.argv[1], n_ctx=512, n_threads=1, logits_all=True, verbose=False, seed=0)
    answer = {
        "tokens": [model.tokenize(text.encode(), add_bos=False, special=True) for text in asked["texts"]],
        "greedy": [greedy(model, prompt, asked["new"]) for prompt in asked["prompts"]],
        "logprobs": [logprobs(model, row) for row in asked["rows"]],
        "template": model.metadata.get("tokenizer.chat_template"),
        "eos": model.token_eos(),
    }
    json.dump(answer, sys.stdout)


def greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    model.reset()
    model.eval(prompt)
    answer: list[int] = []
    while len(answer) < new:
        token = int(np.argmax(model.scores[model.n_tokens - 1]))
        answer.append(token)
        model.eval([token])
    return answer


def logprobs(model: Any, row: list[int]) -> list[float]:
    """Of the row's tokens but the first."""
    model.reset()
    model.eval(row)
    found: list[float] = []
    for place, token in enumerate(row[1:]):
        logits = np.asarray(model.scores[place], dtype=np.float64)
        top = float(logits.max())
        found.append(float(logits[token]) - top - math.log(float(np.exp(logits - top).sum())))
    return found


if __name__ == "__main__":
    main()
