"""What may go wrong while servers on shared GPUs wake up, get weights, answer and sleep: at every call, in every way.

`attempt(case)` gives None where Kedge held, else what went wrong.
"""

from __future__ import annotations

import copy
import sys
import tempfile
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import torch
from fake_vllm import Engine
from vllm_parts import Events, base, learn, mismatch, parts_of, prompts

from kedge.core.errors import GeneratorError
from kedge.core.records import Rollouts
from kedge.models.forward.lora import with_lora
from kedge.models.loading.load import load_causal
from kedge.models.settings import LoraSettings
from kedge.rollout.vllm.engines import Engines
from kedge.rollout.vllm.generator import Queue, VllmGenerator, trials_of
from kedge.rollout.vllm.settings import VllmSettings

WORDS = "CUDA out of memory, said the worker"
MERGED = ("/collective_rpc", "/reset_prefix_cache", "/update_weight_version", "/weight_info")
ADAPTER = ("/v1/load_lora_adapter", "/v1/models")
AROUND = ("/wake_up weights", "/wake_up kv_cache", "/is_sleeping", "score", "answer", "/sleep")
HANGS = ("/wake_up weights", "/collective_rpc", "answer", "/sleep")


@dataclass(frozen=True, slots=True)
class Case:
    sync: str
    call: str
    fault: str
    """`die`: killed in the middle of it; `hang`: no reply; `refuse`: an error in the server's own words."""

    def __str__(self) -> str:
        return f"{self.sync}, {self.call}, {self.fault}"


CASES = [
    *(Case("merged", call, fault) for call in (*MERGED, *AROUND) for fault in ("die", "refuse")),
    *(Case("adapter", call, fault) for call in (*ADAPTER, "score", "/sleep") for fault in ("die", "refuse")),
    *(Case("merged", call, "hang") for call in HANGS),
]


_home = tempfile.TemporaryDirectory(prefix="kedge-faults-")


@cache
def model_folder() -> Path:
    return base(Path(_home.name))


@cache
def loaded() -> Any:
    return load_causal(str(model_folder()), dtype="float32")


class ServerHere:
    """A server in this process, which can be started again."""

    can_start = True

    def __init__(self) -> None:
        self._engines = list[Engine]()
        self.start()

    @property
    def engine(self) -> Engine:
        return self._engines[-1]

    @property
    def num_started(self) -> int:
        return len(self._engines)

    def start(self) -> None:
        self._engines.append(Engine(model_folder()))
        self.url = self.engine.url
        threading.Thread(target=self.engine.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    def wait(self) -> None: ...

    def tail(self) -> str:
        return "the last line of its log"

    def close(self) -> None:
        self.engine.shutdown()
        self.engine.server_close()


def open_shared(
    folder: Path, *, sync: str = "merged", **settings: Any
) -> tuple[VllmGenerator, ServerHere, Any, Events]:
    """A generator whose server sleeps while nobody asks, that server, the policy, and what is reported."""
    model, events = copy.deepcopy(loaded()), Events()
    if sync == "adapter":
        with_lora(model, LoraSettings(rank=2, targets=("down_proj", "k_proj")), name="policy", seed=1)
    values = {"python": "python", "gpus": "shared", "sync": sync, "mismatch": 1e-4, **settings}
    chosen, parts = VllmSettings.model_validate(values), parts_of(folder, model, source=str(model_folder()))
    server, trials = ServerHere(), trials_of(chosen, parts, events)
    engines = Engines([server], chosen, events, trials=trials)
    return VllmGenerator(Queue(engines), parts, parts.sampling, chosen), server, model, events


@cache
def expected(sync: str) -> torch.Tensor:
    """The answers of a server that nothing happens to."""
    with tempfile.TemporaryDirectory() as folder:
        generator, _, model, _ = open_shared(Path(folder), sync=sync)
        generator.load_weights(learn(model), 1)
        tokens_BT = generator.generate(prompts(1), seed=5).tokens_BT
        generator.close()
    return tokens_BT


def attempt(case: Case) -> str | None:
    with tempfile.TemporaryDirectory() as folder:
        timeout_s = 0.4 if case.fault == "hang" else 30.0
        generator, server, model, events = open_shared(Path(folder), sync=case.sync, timeout_s=timeout_s)
        server.engine.faults[case.call] = (500, {"error": {"message": WORDS}}) if case.fault == "refuse" else case.fault
        generator.load_weights(learn(model), 1)
        try:
            rollouts = generator.generate(prompts(1), seed=5)
        except GeneratorError as error:
            return _complaint(case, str(error), server)
        finally:
            generator.close()
        if case.fault == "refuse":
            return "an error of the server was passed over"
        return _difference(case, rollouts, model, server, events)


def _complaint(case: Case, words: str, server: ServerHere) -> str | None:
    """What is wrong with ending the run by this error, if anything."""
    if case.fault == "die":
        return f"a dead server ended the run: {words}"
    if case.fault == "hang" and case.call != "/sleep":
        return f"a server that could be started again ended the run: {words}"
    if case.call == "/sleep" and not ("does not sleep" in words and server.tail() in words):
        return f"it is not said that the server does not sleep, with its log: {words}"
    return None if case.fault == "hang" or WORDS in words else f"the server's own words are missing: {words}"


def _difference(case: Case, rollouts: Rollouts, model: Any, server: ServerHere, events: Events) -> str | None:
    """What is wrong with the answers after a restart, if anything."""
    if not torch.equal(rollouts.tokens_BT, expected(case.sync)):
        return "the answers are others than without the fault"
    if mismatch(model, rollouts) > 1e-5:
        return "the answers are of other weights"
    if case.call == "/sleep":  # it died in its sleep, and is started again when it is needed
        return None if server.num_started == 1 else "it was started while what learns needs the memory"
    if server.num_started != 2 or events.codes.count("vllm.restarted") != 1:
        return f"started {server.num_started} times, reported {events.codes}"
    return None if server.engine.asleep == {"weights", "kv_cache"} else "it is awake while what learns needs the memory"
