"""Answers over HTTP: OpenAI's wire format field by field, and numbers that are the model's own."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from running import NAME, Served
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HI = [{"role": "user", "content": "Hi"}]


def chat(server: Served, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/chat/completions", **({"model": NAME, "messages": HI, "max_tokens": 8} | fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


def complete(server: Served, **fields: Any) -> dict[str, Any]:
    reply = server.post("/v1/completions", **({"model": NAME, "prompt": "Once upon", "max_tokens": 8} | fields))
    assert reply.status_code == 200, reply.text
    return reply.json()


def own_logprobs(folder: Path, tokens: list[int]) -> torch.Tensor:
    """`logp_TV` that plain transformers gives after each token."""
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0].log_softmax(-1)


def test_a_chat_completion_has_every_field_of_openai_s(server: Served) -> None:
    reply = chat(server, seed=3, temperature=0.7, top_p=0.9, top_k=50, user="me", stream=False, presence_penalty=0.0)
    assert set(reply) == {"id", "object", "created", "model", "system_fingerprint", "seed", "choices", "usage"}
    assert reply["id"].startswith("chatcmpl-")
    assert (reply["object"], reply["model"], reply["seed"]) == ("chat.completion", NAME, 3)
    assert reply["system_fingerprint"] == "kedge-cpu-float32"
    (choice,) = reply["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason"}
    assert (choice["index"], choice["logprobs"]) == (0, None)
    assert set(choice["message"]) == {"role", "content", "refusal"}
    assert choice["message"]["role"] == "assistant"
    assert choice["finish_reason"] == "length"
    # <|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n, a token a byte
    assert reply["usage"] == {"prompt_tokens": 21, "completion_tokens": 8, "total_tokens": 29}


def test_the_same_seed_gives_the_same_answer_and_another_another(server: Served) -> None:
    texts = [chat(server, seed=seed, max_tokens=16)["choices"][0]["message"]["content"] for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    drawn = chat(server, max_tokens=16)
    assert chat(server, max_tokens=16, seed=drawn["seed"])["choices"] == drawn["choices"]


def test_n_answers_are_unlike_and_the_first_is_the_one_asked_alone(server: Served) -> None:
    several = chat(server, n=3, seed=3)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in several["choices"]]
    assert len(set(texts)) == 3
    assert texts[0] == chat(server, seed=3)["choices"][0]["message"]["content"]
    assert several["usage"] == {"prompt_tokens": 21, "completion_tokens": 24, "total_tokens": 45}


def test_temperature_zero_takes_the_likeliest_tokens(server: Served, model_folder: Path) -> None:
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model_folder)
    tokens: list[int] = tokenizer("Once upon")["input_ids"]
    for _ in range(4):
        tokens.append(int(own_logprobs(model_folder, tokens)[-1].argmax()))
    replies = [complete(server, temperature=0, max_tokens=4, seed=seed)["choices"][0]["text"] for seed in (1, 2)]
    assert replies == [tokenizer.decode(tokens[9:])] * 2


def test_chat_logprobs_are_the_model_s_own(server: Served, model_folder: Path) -> None:
    reply = chat(server, seed=3, temperature=0.5, logprobs=True, top_logprobs=3, n=2)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(model_folder)
    prompt: list[int] = tokenizer.apply_chat_template(HI, add_generation_prompt=True)["input_ids"]
    for choice in reply["choices"]:
        content = choice["logprobs"]["content"]
        assert len(content) == 8
        assert choice["logprobs"]["refusal"] is None
        sampled = prompt.copy()
        for entry in content:
            assert set(entry) == {"token", "logprob", "bytes", "top_logprobs"}
            logp_V = own_logprobs(model_folder, sampled)[-1]
            best = logp_V.topk(3)
            assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(
                best.values.tolist(), abs=1e-5
            )
            # the token is found again by its log-probability: texts of parts of characters are all alike
            token = int((logp_V - entry["logprob"]).abs().argmin())
            assert entry["logprob"] == pytest.approx(float(logp_V[token]), abs=1e-5)
            assert entry["token"] == tokenizer.decode([token])
            assert entry["bytes"] == (None if "\ufffd" in entry["token"] else list(entry["token"].encode()))
            sampled.append(token)
        assert tokenizer.decode(sampled[len(prompt) :]) == choice["message"]["content"]


def test_an_echo_has_the_logprobs_of_the_prompt(server: Served, model_folder: Path) -> None:
    reply = complete(server, prompt="Once upon", echo=True, logprobs=2, max_tokens=0)
    (choice,) = reply["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason"}
    assert choice["text"] == "Once upon"
    logprobs = choice["logprobs"]
    assert logprobs["tokens"] == list("Once upon")
    assert logprobs["text_offset"] == list(range(9))
    tokens = list(b"Once upon")
    logp_TV = own_logprobs(model_folder, tokens)
    expected = [float(logp_TV[place, token]) for place, token in enumerate(tokens[1:])]
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["token_logprobs"][1:] == pytest.approx(expected, abs=1e-5)
    assert logprobs["top_logprobs"][0] is None
    for place, top in enumerate(logprobs["top_logprobs"][1:]):
        assert max(top.values()) == pytest.approx(float(logp_TV[place].max()), abs=1e-5)
    assert reply["usage"] == {"prompt_tokens": 9, "completion_tokens": 0, "total_tokens": 9}


def test_prompts_may_be_texts_or_tokens_and_several(server: Served) -> None:
    alone = [complete(server, prompt=text, seed=1)["choices"][0]["text"] for text in ("One", "Two")]
    together = complete(server, prompt=["One", "Two"], seed=1)
    assert [choice["text"] for choice in together["choices"]] == alone
    assert complete(server, prompt=list(b"One"), seed=1)["choices"][0]["text"] == alone[0]
    in_tokens = complete(server, prompt=[list(b"One"), list(b"Two")], seed=1)["choices"]
    assert [choice["text"] for choice in in_tokens] == alone


def test_an_answer_ends_before_its_stop_string(server: Served) -> None:
    whole = complete(server, seed=1, max_tokens=32)["choices"][0]["text"]
    stop = next(letter for letter in whole[3:] if letter.isascii() and letter not in whole[:3])
    reply = complete(server, seed=1, max_tokens=32, stop=[stop, "never there"], logprobs=0)
    (choice,) = reply["choices"]
    assert choice["text"] == whole[: whole.index(stop)]
    assert choice["finish_reason"] == "stop"
    assert stop not in choice["logprobs"]["tokens"]
    assert reply["usage"]["completion_tokens"] == len(choice["logprobs"]["tokens"]) + 1


def test_many_at_once_are_all_answered_as_if_asked_alone(server: Served) -> None:
    def ask(number: int) -> tuple[str, float]:
        # unlike temperatures and lengths of prompts, so that batches of several kinds wait for each other
        fields = {"prompt": f"Tell {'me ' * (number % 5)}{number}", "temperature": (0.5, 1.0)[number % 2]}
        reply = complete(server, **fields, seed=number % 3, max_tokens=6, logprobs=0)
        (choice,) = reply["choices"]
        return choice["text"], math.fsum(choice["logprobs"]["token_logprobs"])

    with ThreadPoolExecutor(32) as threads:
        together = list(threads.map(ask, range(32)))
    alone = [ask(number) for number in range(32)]
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert [sums for _, sums in together] == pytest.approx([sums for _, sums in alone], abs=1e-4)
    assert server.client.get("/health").json() == {"status": "ok", "rows_waiting": 0}


def test_models_are_listed(server: Served) -> None:
    reply = server.client.get("/v1/models").json()
    assert reply["object"] == "list"
    (model,) = reply["data"]
    assert set(model) == {"id", "object", "created", "owned_by"}
    assert (model["id"], model["object"], model["owned_by"]) == (NAME, "model", "kedge")
    assert server.client.get(f"/v1/models/{NAME}").json() == model
