"""Run by the Python that has vLLM: its greedy answers to a conversation, from a folder as it is, as JSON.

python vllm_child.py FOLDER < {"messages": [[{"role": …, "content": …}], …], "new": 16}
"""

from __future__ import annotations

import json
import sys


def main() -> None:
    from vllm import LLM, SamplingParams

    asked = json.load(sys.stdin)
    model = LLM(sys.argv[1], enforce_eager=True, max_model_len=256, gpu_memory_utilization=0.2)
    sampling = SamplingParams(temperature=0.0, max_tokens=asked["new"], ignore_eos=True)
    outputs = model.chat(asked["messages"], sampling, use_tqdm=False)
    answers = [{"prompt": list(out.prompt_token_ids), "answer": list(out.outputs[0].token_ids)} for out in outputs]
    print("\nANSWERS " + json.dumps(answers))


if __name__ == "__main__":
    main()
