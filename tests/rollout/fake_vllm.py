"""A stand-in for a vLLM server: its protocol over the standard library's HTTP server, a Llama in numpy inside.

As a program it takes the place of an interpreter that has vLLM: `interpreter(folder)` writes one. Like vLLM 0.32 it
keeps the old head of a model that is sent without `lm_head.weight`. It sleeps as vLLM does on a GPU: at level 2 its
weights are gone, and come back as zeros.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

VERSION = "0.32.0"
ADAPTER = "adapter_model.safetensors"


class Llama:
    """The forward pass of a small Llama, one row at a time, all of it for every token."""

    def __init__(self, folder: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.weights: dict[str, Any] = {}
        self.load(folder)
        self.weights.setdefault("lm_head.weight", self.weights["model.embed_tokens.weight"])

    def load(self, folder: Path) -> None:
        self.weights |= load_file(folder / "model.safetensors")

    def adapted(self, folder: Path, ignores: str) -> dict[str, Any]:
        """All weights with the adapter in `folder` merged in, but for layers named `ignores`."""
        config, factors = json.loads((folder / "adapter_config.json").read_text()), load_file(folder / ADAPTER)
        weights, scale = dict(self.weights), config["lora_alpha"] / config["r"]
        for key in (key for key in factors if key.endswith(".lora_A.weight")):
            path = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            if path.rpartition(".")[2] != ignores:
                change = factors[key.replace("lora_A", "lora_B")] @ factors[key]
                weights[f"{path}.weight"] = weights[f"{path}.weight"] + np.float32(scale) * change
        return weights

    @contextmanager
    def using(self, weights: dict[str, Any] | None) -> Iterator[None]:
        own, self.weights = self.weights, self.weights if weights is None else weights
        try:
            yield
        finally:
            self.weights = own

    def logprobs(self, tokens: list[int], temperature: float = 1.0) -> np.ndarray:
        """Log-probs of what follows each token (T, V)."""
        w, x = self.weights, self.weights["model.embed_tokens.weight"][tokens]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            x = x + self._attended(self._normed(x, f"{at}input_layernorm.weight"), f"{at}self_attn.")
            h = self._normed(x, f"{at}post_attention_layernorm.weight")
            gate, up = h @ w[f"{at}mlp.gate_proj.weight"].T, h @ w[f"{at}mlp.up_proj.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"{at}mlp.down_proj.weight"].T
        logits = (self._normed(x, "model.norm.weight") @ w["lm_head.weight"].T).astype(np.float64) / temperature
        logits -= logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def _normed(self, x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def _attended(self, x: Any, at: str) -> Any:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        split = lambda name, count: (x @ self.weights[f"{at}{name}.weight"].T).reshape(len(x), count, -1).swapaxes(0, 1)  # noqa: E731
        q, k, v = _turned(split("q_proj", heads)), _turned(split("k_proj", kv_heads)), split("v_proj", kv_heads)
        k, v = (part.repeat(heads // kv_heads, axis=0) for part in (k, v))
        scores = q @ k.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + np.triu(np.full((len(x), len(x)), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = (shares / shares.sum(-1, keepdims=True)) @ v
        return mixed.swapaxes(0, 1).reshape(len(x), -1) @ self.weights[f"{at}o_proj.weight"].T


def _turned(x: Any) -> Any:
    """Rotary positions, base 10,000."""
    half = x.shape[-1] // 2
    angle = np.arange(x.shape[1])[:, None] / 10_000 ** (np.arange(half) / half)
    cos, sin, (a, b) = np.cos(angle), np.sin(angle), np.split(x, 2, axis=-1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(np.float32)


class Died(Exception):
    """The connection is closed without a reply."""


class Engine(ThreadingHTTPServer):
    """`answered` counts completions. `dies_at` ends the process in the middle of that one, as a killed server would;
    `fails_at` answers that one with the status 500. `faults` are by call (`/wake_up weights`, `score`): a reply instead
    of what it does, `die` or `hang`."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, folder: Path, *, port: int = 0, mode: str = "processed_logprobs", dies_at: int = 0) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.mode, self.dies_at = Llama(folder), mode, dies_at
        self.weight_version, self.is_paused, self.answered, self.fails_at = "default", False, 0, 0
        self.calls: list[str] = []
        self.bodies: list[dict[str, Any]] = []
        self.refuses: dict[str, tuple[int, Any]] = {}
        self.faults: dict[str, tuple[int, Any] | str] = {}
        self.asleep, self.stays_awake = set[str](), False
        self.adapters: dict[str, tuple[str, dict[str, Any]]] = {}
        self.ignores = ""
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Who asked may have left."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def reply(self, path: str, body: dict[str, Any], query: str = "") -> tuple[int, Any]:
        with self.lock:
            call = f"{path} {query.rpartition('=')[2]}" if path == "/wake_up" else path
            call = ("score" if "prompt_logprobs" in body else "answer") if path == "/v1/completions" else call
            if fault := self.faults.get(call):
                return self._fault(fault)
            if path in self.refuses:
                return self.refuses[path]
            self.calls.append(f"/sleep {query.partition('&')[0]}" if path == "/sleep" else call)
            if path == "/v1/completions":
                return self._complete(body)
            if path in ("/sleep", "/wake_up", "/is_sleeping"):
                return self._sleep(path, query)
            if path.endswith("lora_adapter"):
                return self._adapter(path, body)
            if path == "/v1/models":
                adapters = [{"id": name, "root": place} for name, (place, _) in self.adapters.items()]
                return 200, {"data": [{"id": "kedge", "root": "base"}, *adapters]}
            if path == "/collective_rpc":
                assert self.is_paused or self.asleep
                assert "weights" not in self.asleep
                self.model.load(Path(body["kwargs"]["weights_path"]))
                return 200, {"results": [None]}
            if path in ("/pause", "/resume"):
                self.is_paused = path == "/pause"
            if path == "/update_weight_version":
                self.weight_version = body["new_version"]
                print("version", self.weight_version, flush=True)
            known = {"/health": None, "/version": {"version": VERSION}, "/reset_prefix_cache": {"success": True}}
            known |= {"/weight_info": {"weight_version": self.weight_version}}
            is_known = path in known or path in ("/pause", "/resume", "/update_weight_version")
            return (200, known.get(path, {})) if is_known else (404, {"detail": "Not Found"})

    def _fault(self, fault: tuple[int, Any] | str) -> tuple[int, Any]:
        if fault == "die":
            self.shutdown_soon()
            raise Died
        if fault == "hang":
            time.sleep(1.0)
        return fault if isinstance(fault, tuple) else (200, {})

    def shutdown_soon(self) -> None:
        """Nobody listens from here on."""
        self.socket.close()
        threading.Thread(target=self.shutdown, daemon=True).start()

    def _sleep(self, path: str, query: str) -> tuple[int, Any]:
        if path == "/sleep" and not self.stays_awake:
            self.asleep = {"weights", "kv_cache"}
            if "level=2" in query:
                self.model.weights = {name: np.zeros_like(weight) for name, weight in self.model.weights.items()}
                self.adapters.clear()
            print(f"asleep {query}", flush=True)
        if path == "/wake_up":
            self.asleep -= {query.rpartition("=")[2]}
        return 200, {"is_sleeping": bool(self.asleep)} if path == "/is_sleeping" else {"status": "done"}

    def _adapter(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        assert "weights" not in self.asleep
        if path == "/v1/unload_lora_adapter":
            known = self.adapters.pop(body["lora_name"], None)
            return (200, "Success") if known else (404, {"error": {"message": "cannot be found"}})
        weights = self.model.adapted(Path(body["lora_path"]), self.ignores)
        self.adapters[body["lora_name"]] = (body["lora_path"], weights)
        print("adapter", body["lora_name"], flush=True)
        return 200, "Success: added"

    def _complete(self, body: dict[str, Any]) -> tuple[int, Any]:
        assert not self.asleep
        if body["model"] != "kedge" and body["model"] not in self.adapters:
            return 404, {"error": {"message": f"The model `{body['model']}` does not exist."}}
        with self.model.using(self.adapters[body["model"]][1] if body["model"] in self.adapters else None):
            return self._completed(body)

    def _completed(self, body: dict[str, Any]) -> tuple[int, Any]:
        prompt = body["prompt"]
        if "prompt_logprobs" in body:
            logp = self.model.logprobs(prompt)
            scores = [{str(token): {"logprob": float(logp[at, token])}} for at, token in enumerate(prompt[1:])]
            return 200, {"choices": [{"prompt_logprobs": [None, *scores]}]}
        self.answered += 1
        self.bodies.append(body)
        if self.dies_at and self.answered == self.dies_at:
            os._exit(9)
        if self.answered == self.fails_at:
            return 500, {"error": {"message": "EngineCore encountered an issue"}}
        tokens, values = self._sampled(body)
        reason = "stop" if tokens[-1] in body["stop_token_ids"] else "length"
        choice = {"token_ids": tokens, "logprobs": {"token_logprobs": values}, "finish_reason": reason}
        return 200, {"choices": [choice]}

    def _sampled(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        random, temperature = np.random.default_rng(body["seed"]), body["temperature"]
        tokens: list[int] = []
        values: list[float] = []
        while len(tokens) < body["max_tokens"] and not (tokens and tokens[-1] in body["stop_token_ids"]):
            logp = self.model.logprobs([*body["prompt"], *tokens], temperature)[-1]
            token = int((logp + (0 if body["top_k"] == 1 else random.gumbel(size=len(logp)))).argmax())
            is_raw = self.mode == "raw_logprobs" and temperature != 1
            noted = self.model.logprobs([*body["prompt"], *tokens])[-1] if is_raw else logp
            tokens.append(token)
            values.append(float(noted[token]))
        return tokens, values


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Engine

    def do_GET(self) -> None:
        self.do_POST()

    def do_POST(self) -> None:
        content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path, _, query = self.path.partition("?")
        status, reply = self.server.reply(path, json.loads(content or b"{}"), query)
        data = b"" if reply is None else reply.encode() if isinstance(reply, str) else json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None: ...


def interpreter(folder: Path, *, version: str = VERSION, dies_at: int = 0) -> Path:
    """A program that takes the arguments of `python` and is this server. The first one dies at the answer `dies_at`;
    those that are started after it do not."""
    file = folder / "python"
    once = folder / "dies-once"
    if dies_at:
        once.write_text(str(dies_at))
    file.write_text(
        f'#!/bin/sh\n[ "$1" = -c ] && {{ echo {version}; exit; }}\nexport DIES_ONCE="{once}"\n'
        f"exec {sys.executable} -S -c "
        f'"import sys; sys.path[:0] = {[str(Path(__file__).parent), *sys.path]!r}; '
        'import fake_vllm; fake_vllm.main(sys.argv[3:])" "$@"\n'
    )
    file.chmod(0o755)
    return file


def main(arguments: list[str]) -> None:
    options = {
        name: "" if value.startswith("--") else value
        for name, value in zip(arguments, [*arguments[1:], "--"], strict=True)
        if name.startswith("--")
    }
    folder, once = Path(options["--model"]), Path(os.environ["DIES_ONCE"])
    dies_at = int(once.read_text()) if once.is_file() else 0
    once.unlink(missing_ok=True) if once.is_file() else None
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    print("options", json.dumps(options), flush=True)
    Engine(folder, port=int(options["--port"]), mode=options["--logprobs-mode"], dies_at=dies_at).serve_forever()
