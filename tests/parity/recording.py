"""Records tiny runs of every stage kind, so that a refactor can show that it changed no number.

    python tests/parity/recording.py record before.json     # on the revision to compare with
    python tests/parity/recording.py record after.json      # on the changed one, on the same machine
    python tests/parity/recording.py compare before.json after.json

A recording holds the metrics, events and samples of each stage, the content of the weights it saved and of the files it
wrote. Left out: times, rates, memory, folders, and anything else that differs between two runs of the same code.
Numbers of two machines differ in their last bits, so a recording is not kept in the repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

TIMED = ("time/", "tokens/per_second", "at", "seconds")
"""Names, or beginnings of names, of what no two runs share."""
STOPPED = 3
"""The exit code of a run that a contract stopped, as the last stage is."""
EVENTS_LEFT_OUT = ("run.memory",)
FILES = ("answers*.jsonl", "pairs*.jsonl", "chosen.jsonl", "best-of.json", "evaluation.json", "reward-report.json")
RULES = """
def plain(answer):
    return sum(letter < "\\x80" for letter in answer.text) / 8

def short(answer):
    return -len(answer.text) / 10
"""

LEARN = {"lr": 1e-2, "schedule": "constant", "warmup": 0.0, "eps": 1e-5}
PLAIN = {"kind": "function", "path": "rules.py:plain"}
SHORT = {"kind": "function", "path": "rules.py:short"}
SUPERVISED: dict[str, Any] = {
    "batch": 8, "micro_batch": 3, "max_length": 160, "optimiser": {"lr": 3e-3}, "checkpoints": {"every": 3},
}  # fmt: skip
SAMPLED: dict[str, Any] = {"prompts": "prompts.jsonl", "max_prompt_tokens": 120, "sampling": {"max_new_tokens": 8}}
ROLLOUTS: dict[str, Any] = {
    "from": "sft", **SAMPLED, "gold": SHORT, "memory": {"dtype": "float32", "lora": {"rank": 2}}, "iterations": 3,
    "batch": 4, "micro_batch": 3, "actor": LEARN, "logging": {"every": 2, "samples": 2}, "checkpoints": {"every": 2},
}  # fmt: skip
PPO: dict[str, Any] = {"kind": "ppo", **ROLLOUTS, "epochs": 2, "minibatches": 2, "critic": LEARN}
GROUP: dict[str, Any] = {"kind": "group", **ROLLOUTS, "reward": PLAIN, "roles": "separate"}
PREFERENCE: dict[str, Any] = {
    "kind": "preference", "from": "sft", "data": "prepare.train", "heldout": "prepare.heldout", **SUPERVISED,
    "eval": {"every": 4}, "samples": 2, "sample_tokens": 6,
}  # fmt: skip
ONLINE: dict[str, Any] = {**SAMPLED, "rounds": 2, "reward": PLAIN, "answers": 3, "finished": False, "rows": 16}
BEST_OF: dict[str, Any] = {
    "kind": "best_of_n", "from": "sft", **SAMPLED, "reward": PLAIN, "gold": SHORT, "n": 4, "batch": 8,
    "micro_batch": 3, "rows": 16, "optimiser": {"lr": 3e-3},
}  # fmt: skip

STAGES: dict[str, dict[str, Any]] = {
    "prepare": {"kind": "data", "files": ["pairs.jsonl"], "heldout": 0.2},
    "sft": {"kind": "sft", "data": "demonstrations.jsonl", "epochs": 2, **SUPERVISED},
    "sft-held": {
        "kind": "sft", "data": "demonstrations.jsonl", "heldout": "others.jsonl", "epochs": 3,
        "lora": {"rank": 2, "dropout": 0.1}, "eval": {"every": 2, "patience": 2}, "samples": 2, "sample_tokens": 6,
        **SUPERVISED,
    },
    "reward": {
        "kind": "reward", "from": "sft", "data": "prepare.train", "heldout": "prepare.heldout", "members": 3,
        "if_unfit": "go_on", "eval": {"every": 4}, **SUPERVISED,
    },
    "reward-lora": {
        "kind": "reward", "from": "sft", "data": "prepare.train", "lora": {"rank": 2}, "if_unfit": "go_on",
        "loss": {"length_control": "residual", "centre": 0.01}, **SUPERVISED,
    },
    "reward-frozen": {
        "kind": "reward", "from": "sft", "data": "prepare.train", "frozen_layers": 1, "if_unfit": "go_on",
        "loss": {"length_control": "balance"}, **SUPERVISED,
    },
    "ppo-separate": {
        **PPO, "reward": "reward", "roles": "separate", "critic_warmup": 1, "ema": 0.9,
        "kl": {"start": 0.05, "target": 2.0}, "scores": {"normalise": "standard", "clip": 3.0},
        "loss": {"imitate": {"data": "demonstrations.jsonl", "batch": 3}},
    },
    "ppo-lora": {
        **PPO, "roles": "lora", "kl": {"start": 0.1, "where": "loss", "kind": "k3"},
        "reward": {"kind": "mix", "parts": {"model": {"kind": "model", "from": "reward-lora"}, "plain": PLAIN}},
        "loss": {"policy": {"entropy": 0.01, "stop_at_kl": 0.5}},
    },
    "ppo-trunk": {**PPO, "reward": "reward-frozen", "roles": "trunk", "answers": 2},
    "grpo": {**GROUP, "method": "grpo", "answers": 3, "minibatches": 2, "max_rounds": 3},
    "grpo-lora": {**GROUP, "method": {"kind": "dapo", "clip_high": 0.3}, "answers": 3, "roles": "lora"},
    "rloo": {**GROUP, "method": "rloo", "answers": 2, "roles": "trunk", "reward": "reward-frozen"},
    "remax": {**GROUP, "method": "remax"},
    "reinforce": {**GROUP, "method": "reinforce++", "scores": {"missing_eos_penalty": 1.0}},
    "dpo": {**PREFERENCE, "method": "dpo", "lora": {"rank": 2, "dropout": 0.1}},
    "kto": {**PREFERENCE, "method": "kto"},
    "tdpo": {**PREFERENCE, "method": "tdpo"},
    "orpo": {**PREFERENCE, "method": "orpo"},
    "online": {**PREFERENCE, "method": "dpo", "data": None, "heldout": None, "online": ONLINE},
    "online-round": {
        **PREFERENCE, "method": "dpo", "lora": {"rank": 2},
        "online": {**ONLINE, "reference": "round", "offline": 0.5, "pairs": "all"},
    },
    "rejection": {**BEST_OF, "method": {"kind": "rejection", "rounds": 2, "finished": False, "share": 0.8}},
    "bond": {**BEST_OF, "method": {"kind": "bond", "steps": 4, "anchors": 6}},
    "eval": {
        "kind": "evaluate", "models": ["sft", "ppo-separate", "dpo"], "reward": "reward", "gold": SHORT,
        "prompts": "prompts.jsonl", "answers": 2, "max_new_tokens": 8, "temperature": 0.8, "rows": 16,
    },
    # The last one, for it ends the run: over its KL budget it goes back once, and then stops.
    "ppo-stop": {
        **PPO, "reward": PLAIN, "roles": "separate", "iterations": 12, "checkpoints": {"every": 1},
        "kl": {"start": 0.05, "limit": 3.0, "on_limit": "rollback", "max_rollbacks": 1},
    },
}  # fmt: skip


def record(to: Path) -> None:
    """Run the recipe in a child of its own, with one thread and a cache of its own, and write down what it made."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_inputs(home)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "KEDGE_CACHE": str(home / "cache"),
        }
        command = [sys.executable, "-m", "kedge.cli", "run", "recipe.yaml", "--runs", "runs", "--no-check"]
        ended = subprocess.run(command, cwd=home, env=environment, check=False, stdout=subprocess.DEVNULL)
        if ended.returncode != STOPPED:
            raise SystemExit(f"the recorded run ended with {ended.returncode}, expected {STOPPED}: see above")
        stages = {name: dict(facts(home, home / "runs/recorded" / name)) for name in STAGES}
    to.write_text(json.dumps(stages, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Print a row a stage; True where nothing differs."""
    columns = ("metrics", "events", "samples", "weights", "files")
    print(f"{'stage':<14}", *(f"{name:>12}" for name in columns), f"{'numbers':>9}")
    is_equal = True
    for name in dict.fromkeys((*before, *after)):
        mine, other = before.get(name, {}), after.get(name, {})
        cells: list[str] = []
        for column in columns:
            alike = mine.get(column) == other.get(column)
            is_equal &= alike
            cells.append("equal" if alike else "DIFFERENT")
        print(f"{name:<14}", *(f"{cell:>12}" for cell in cells), f"{_count(mine.get('metrics', [])):>9}")
        for column in columns:
            for line in differences(mine.get(column), other.get(column), column)[:5]:
                print(f"    {line}")
    print("all equal" if is_equal else "NOT EQUAL")
    return is_equal


def write_inputs(home: Path) -> None:
    from kedge.models.loading.tiny import make_tiny
    from kedge.testing import toy

    make_tiny(home / "tiny", hidden=32, layers=2)
    tables = {
        "demonstrations": toy.demonstrations(60, 2),
        "others": toy.demonstrations(20, 9),
        "pairs": toy.pairs(120, 3),
        "prompts": toy.prompts(16, 4),
    }
    for name, rows in tables.items():
        (home / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (home / "rules.py").write_text(RULES, encoding="utf-8")
    recipe = {"kedge": 1, "name": "recorded", "seed": 5, "model": "./tiny", "stages": STAGES}
    (home / "recipe.yaml").write_text(json.dumps(recipe), encoding="utf-8")


def facts(home: Path, stage: Path) -> Iterator[tuple[str, Any]]:
    yield "metrics", [_timeless(line) for line in _lines(stage / "metrics.jsonl")]
    events = (_timeless(line) for line in _lines(stage / "events.jsonl") if line["code"] not in EVENTS_LEFT_OUT)
    yield "events", json.loads(json.dumps(list(events)).replace(str(home), "HOME"))
    yield "samples", [_timeless(line) for line in _lines(stage / "samples.jsonl")]
    yield (
        "weights",
        {str(file.relative_to(stage)): _weights(file) for file in sorted((stage / "model").rglob("*.safetensors"))},
    )
    found = sorted(file for pattern in FILES for file in stage.glob(pattern))
    yield "files", {file.name: _content(home, file) for file in found}


def _lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _timeless(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if not name.startswith(TIMED)}


def _weights(file: Path) -> str:
    """Names, types, shapes and bits of the tensors; what else the file says of itself does not count."""
    import torch
    from safetensors.torch import load_file

    digest = blake2b(digest_size=16)
    for name, tensor in sorted(load_file(file).items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _content(home: Path, file: Path) -> str:
    """A hash of the file, without the seconds that a report tells."""
    text = file.read_text(encoding="utf-8").replace(str(home), "HOME")
    if file.name == "reward-report.json":
        report = json.loads(text)
        report["facts"].pop("training time", None)
        text = json.dumps(report, sort_keys=True)
    return blake2b(text.encode(), digest_size=16).hexdigest()


def _count(value: Any) -> int:
    """How many numbers stand in it."""
    if isinstance(value, Mapping):
        return sum(map(_count, value.values()))
    return sum(map(_count, value)) if isinstance(value, list) else isinstance(value, int | float)


def differences(mine: Any, other: Any, path: str) -> list[str]:
    if isinstance(mine, dict) and isinstance(other, dict):
        keys = dict.fromkeys((*mine, *other))
        return [line for key in keys for line in differences(mine.get(key), other.get(key), f"{path}.{key}")]
    if isinstance(mine, list) and isinstance(other, list) and len(mine) == len(other):
        return [
            line
            for at, (one, two) in enumerate(zip(mine, other, strict=True))
            for line in differences(one, two, f"{path}[{at}]")
        ]
    return [] if mine == other else [f"{path}: {mine!r} -> {other!r}"]


def main(arguments: list[str]) -> int:
    match arguments:
        case ["record", to]:
            record(Path(to))
            return 0
        case ["compare", before, after]:
            is_equal = compare(json.loads(Path(before).read_text()), json.loads(Path(after).read_text()))
            return 0 if is_equal else 1
        case _:
            print(__doc__)
            return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
