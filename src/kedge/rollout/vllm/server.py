"""A vLLM server that Kedge starts in an environment of its own: its command line, its log, its end."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from kedge.core.errors import GeneratorError
from kedge.rollout.vllm import keeper
from kedge.rollout.vllm.http import MODEL, Api

_LOOK_S: Final = 0.2
_LAST_LINES: Final = 15
_OURS: Final = (
    "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK",
    "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS", "TORCHELASTIC_USE_AGENT_STORE", "TORCHELASTIC_RESTART_COUNT",
    "TORCHELASTIC_RUN_ID", "KEDGE_LAUNCHED",
)  # fmt: skip
"""What the environment says of Kedge's own interpreter and processes, and must not of the server's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSpec:
    """How one server is started."""

    python: str
    model: str
    dtype: str
    max_tokens: int | None
    """Of a prompt and its answer together."""
    logprobs_mode: str
    tensor_parallel: int
    devices: tuple[str, ...]
    """GPUs by their names in CUDA_VISIBLE_DEVICES; none is the CPU."""
    extra: Mapping[str, str | int | float | bool]
    log: Path
    start_s: float
    timeout_s: float
    options: Mapping[str, str | int | float | bool] = field(default_factory=dict[str, str | int | float | bool])
    """What else Kedge asks of the server: to be able to sleep, to take adapters."""

    def command(self, port: int) -> list[str]:
        options: dict[str, str | int | float | bool] = {
            "model": self.model,
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": port,
            "dtype": self.dtype,
            "logprobs-mode": self.logprobs_mode,
            "generation-config": "vllm",  # what a model recommends for chatting must not change what is sampled
            "tensor-parallel-size": self.tensor_parallel,
            **({"max-model-len": self.max_tokens} if self.max_tokens else {}),
            **self.options,
            **{name.lstrip("-").replace("_", "-"): value for name, value in self.extra.items()},
        }
        return [self.python, "-m", "vllm.entrypoints.openai.api_server", *_arguments(options)]

    def environment(self) -> dict[str, str]:
        own = {name: value for name, value in os.environ.items() if name not in _OURS}
        own |= {"VLLM_SERVER_DEV_MODE": "1", "VLLM_NO_USAGE_STATS": "1"}
        if self.options.get("enable-lora"):
            own |= {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "True"}
        if self.devices:
            return own | {"CUDA_VISIBLE_DEVICES": ",".join(self.devices)}
        return {"VLLM_CPU_KVCACHE_SPACE": "2"} | own  # GiB; by default it takes half of the memory


class StartedServer:
    """A server and its keeper. `close` ends both; so does the end of this process, however it comes."""

    can_start = True

    def __init__(self, spec: ServerSpec) -> None:
        self._spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start it, or start it again on another port; `wait` until it answers."""
        self.close()
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._spec.log.parent.mkdir(parents=True, exist_ok=True)
        with self._spec.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", str(keeper.__file__), *self._spec.command(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=self._spec.environment(),
                start_new_session=True,
            )

    def wait(self) -> None:
        """Until it is ready; an error has the last lines of its log."""
        api, deadline = Api(self.url, timeout_s=self._spec.timeout_s), time.monotonic() + self._spec.start_s
        while not api.is_healthy():
            if not self.is_running:
                raise GeneratorError(
                    f"vLLM ended while it started; its log, {self._spec.log}, ends with:\n{self.tail()}"
                )
            if time.monotonic() > deadline:
                self.close()
                raise GeneratorError(
                    f"vLLM was not ready within {self._spec.start_s:g} s (generator.start_s); its log, "
                    f"{self._spec.log}, ends with:\n{self.tail()}"
                )
            time.sleep(_LOOK_S)

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def tail(self) -> str:
        with suppress(OSError):
            lines = self._spec.log.read_text(encoding="utf-8", errors="replace").splitlines()
            return "\n".join(lines[-_LAST_LINES:])
        return ""

    def close(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        with suppress(OSError):
            process.stdin.close()  # by which the keeper knows
        try:
            process.wait(keeper.PATIENCE_S + 5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _arguments(options: Mapping[str, str | int | float | bool]) -> list[str]:
    """
    >>> _arguments({"port": 8000, "enforce-eager": True, "enable-prefix-caching": False})
    ['--port', '8000', '--enforce-eager', '--no-enable-prefix-caching']
    """
    arguments: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            arguments.append(f"--{name}" if value else f"--no-{name}")
        else:
            arguments += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
    return arguments


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
