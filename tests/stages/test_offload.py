"""`memory.offload` and `memory.frozen_bits` in stages: the same run to the last bit, what is refused, what is told.

On the CPU nothing is moved. Here the moves are made all the same, within the host's memory: weights whose memory is
given back cannot be computed with, and state that does not come back changes every number after it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from kedge.commands.checks.machine import role_rows
from kedge.commands.checks.offload import bits_findings, offload_lines
from kedge.core.errors import ConfigError
from kedge.core.records import Rollouts
from kedge.models.forward.host_memory import MovedWeights
from kedge.models.loading import load
from kedge.models.loading.describe import describe
from kedge.models.settings import TrainingMemory
from kedge.models.training import offload
from kedge.recipe.resuming import accepted_changes
from kedge.recipe.runner import run_recipe
from kedge.recipe.schema import load_recipe
from kedge.stages.best_of_n.settings import BestOfNSettings
from kedge.stages.group.settings import STAGE as GROUP
from kedge.stages.group.settings import GroupSettings
from kedge.stages.ppo.settings import STAGE as PPO
from kedge.stages.ppo.settings import PPOSettings
from kedge.stages.preference.settings import PreferenceSettings
from kedge.stages.reward.settings import RewardSettings
from kedge.stages.rl.divergence import rounding
from kedge.stages.sft.settings import STAGE as SFT
from kedge.stages.sft.settings import SFTSettings
from kedge.stages.shared.policy import refuse_sharded_offload
from kedge.testing import toy

RunPPO = Callable[..., Path]
Records = Callable[[Path], list[dict[str, Any]]]
Weights = Callable[[Path], dict[str, Tensor]]
ALL = ["optimiser", "reference", "reward"]
LEARN = {"lr": 1e-2, "schedule": "constant", "warmup": 0.0}
PLAIN = {"kind": "function", "path": "rules.py:plain"}
SAMPLED: dict[str, Any] = {"max_prompt_tokens": 40, "sampling": {"max_new_tokens": 6}}
CASES: dict[str, dict[str, Any]] = {
    "sft": {"kind": "sft", "batch": 3, "epochs": 2, "samples": 0, "optimiser": LEARN},
    "reward": {"kind": "reward", "batch": 8, "max_length": 192, "members": 2, "if_unfit": "go_on", "optimiser": LEARN},
    "dpo": {"kind": "preference", "batch": 8, "max_length": 192, "samples": 0, "optimiser": LEARN},
    "best_of_n": {
        "kind": "best_of_n",
        "method": {"kind": "rejection", "rounds": 2, "epochs": 1, "finished": False},
        "reward": PLAIN,
        "n": 2,
        "batch": 5,
        "optimiser": LEARN,
        **SAMPLED,
    },
    "group": {"kind": "group", "roles": "lora", "reward": PLAIN, "answers": 2, "iterations": 2, "batch": 4, **SAMPLED},
}


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> list[MovedWeights]:
    """What was asked for is moved on the CPU too; gives what came to its turns."""
    came: list[MovedWeights] = []
    come = MovedWeights._come  # pyright: ignore[reportPrivateUsage]

    def counted(moved: MovedWeights) -> None:
        came.append(moved)
        come(moved)

    monkeypatch.setattr(TrainingMemory, "offloads_on", lambda memory, device: frozenset(memory.offload))  # pyright: ignore[reportUnknownLambdaType]
    monkeypatch.setattr(MovedWeights, "_come", counted)
    monkeypatch.setattr(offload, "BUCKET", 1024)
    return came


def test_a_ppo_run_is_the_same_to_the_last_bit(
    run_ppo: RunPPO, records: Records, weights: Weights, ppo_home: Path, tmp_path: Path, turns: list[MovedWeights]
) -> None:
    judge = {"kind": "model", "from": str(ppo_home / "judge")}
    plain, moved = (
        run_ppo(
            tmp_path / str(len(words)),
            reward=judge,
            gold=judge,
            ema=0.5,
            minibatches=1,
            memory={"dtype": "bfloat16", "offload": words},
        )
        for words in ([], ALL)
    )
    for journal in ("metrics.jsonl", "samples.jsonl"):
        assert records(moved / journal) == records(plain / journal)
    assert all(torch.equal(weight, weights(plain)[name]) for name, weight in weights(moved).items())
    (event,) = [event for event in records(moved / "events.jsonl") if event["code"] == "memory.offload"]
    assert event["message"] == "optimiser, reference, reward: in the host's memory between turns"
    # In each of two iterations the reference, the reward and the gold model come once.
    assert [turns.count(role) for role in dict.fromkeys(turns)] == [2, 2, 2]


@pytest.mark.parametrize(
    "name", [name if name == "sft" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
@pytest.mark.usefixtures("turns")
def test_every_stage_that_trains_is_the_same_to_the_last_bit(
    name: str, ppo_home: Path, records: Records, tmp_path: Path
) -> None:
    plain, moved = (
        _run(tmp_path / str(len(words)), name, ppo_home, {"dtype": "bfloat16", "offload": words})
        for words in ([], ["optimiser"])
    )
    assert records(moved / "metrics.jsonl") == records(plain / "metrics.jsonl")
    files = {file.relative_to(plain): file.read_bytes() for file in (plain / "model").rglob("*.safetensors")}
    assert files
    assert {path: (moved / path).read_bytes() for path in files} == files


def _run(place: Path, name: str, home: Path, memory: dict[str, Any], **settings: Any) -> Path:
    place.mkdir(exist_ok=True)
    (place / "rules.py").write_text("def plain(answer):\n    return len(set(answer.text))\n")
    (place / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in toy.pairs(24, 3)))
    data = {"sft": str(home / "demonstrations.jsonl"), "reward": "pairs.jsonl", "dpo": "pairs.jsonl"}
    inputs = {"data": data[name]} if name in data else {"prompts": str(home / "prompts.jsonl")}
    stage = {**CASES[name], **inputs, **settings, "memory": memory}
    recipe = {"kedge": 1, "name": "short", "seed": 5, "model": str(home / "tiny"), "device": "cpu"}
    (place / "recipe.yaml").write_text(json.dumps({**recipe, "stages": {"train": stage}}))
    return run_recipe(load_recipe(place / "recipe.yaml"), place / "runs", is_resumed=False, say=print) / "train"


def test_on_a_cpu_nothing_is_moved_and_that_is_told_and_a_run_may_be_resumed_with_other_words(
    run_ppo: RunPPO, ppo_recipe: Callable[..., Path], records: Records, tmp_path: Path
) -> None:
    stage = run_ppo(tmp_path, iterations=1, memory={"offload": ["optimiser", "reference"]})
    (event,) = [event for event in records(stage / "events.jsonl") if event["code"] == "memory.offload"]
    assert event["message"] == "optimiser, reference: on a CPU there is nowhere to move it, so it stays"
    other = load_recipe(ppo_recipe(tmp_path, iterations=1, memory={"offload": []}))
    (change,) = accepted_changes(stage.parent, other)
    assert str(change) == "stages.ppo.memory.offload: was ['optimiser', 'reference'], is []"
    rounded = load_recipe(ppo_recipe(tmp_path, iterations=1, memory={"frozen_bits": 8}))
    with pytest.raises(ConfigError, match=r"stages.ppo.memory.frozen_bits: was 16, is 8"):
        accepted_changes(stage.parent, rounded)


RL: dict[str, Any] = {"reward": PLAIN, "prompts": "p.jsonl", "roles": "separate"}


@pytest.mark.parametrize(
    ("section", "settings", "words"),
    [
        (SFTSettings, {"kind": "sft", "data": "d"}, ["optimizer"]),
        (PPOSettings, {"kind": "ppo", **RL}, ["optimizer"]),
    ],
)
def test_a_wrong_word_is_answered_with_the_nearest(section: Any, settings: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValidationError, match=r"found 'optimizer' \(did you mean 'optimiser'\?\)"):
        section.model_validate({**settings, "memory": {"offload": words}})
    with pytest.raises(ValidationError, match="must be a list of optimiser"):
        section.model_validate({**settings, "memory": {"offload": "optimiser"}})


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        (SFTSettings, {"kind": "sft", "data": "d"}),
        (RewardSettings, {"kind": "reward", "data": "d"}),
        (PreferenceSettings, {"kind": "preference", "data": "d"}),
        (BestOfNSettings, {"kind": "best_of_n", "reward": "r", "prompts": "p"}),
    ],
)
def test_stages_without_standing_models_move_the_optimiser_alone(section: Any, settings: dict[str, Any]) -> None:
    with pytest.raises(
        ValidationError, match="only the stages ppo and group move their reference; here it is optimiser"
    ):
        section.model_validate({**settings, "memory": {"offload": ["reference"]}})
    parsed = section.model_validate({**settings, "memory": {"offload": ["optimiser", "optimiser"]}})
    assert parsed.memory.offload == ("optimiser",)
    assert (parsed.memory.offloads_on("cpu"), parsed.memory.offloads_on("cuda:1")) == (set(), {"optimiser"})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"roles": "lora", "memory": {"offload": ["reference"]}}, "under roles: lora it has no weights of its own"),
        ({"roles": "trunk", "memory": {"offload": ["reference"]}}, "under roles: trunk it has no weights of its own"),
        ({"memory": {"offload": ["reward"]}}, "memory.offload has reward, and no reward model scores here"),
        ({"actor": {"name": "adamw_8bit"}, "memory": {"offload": ["optimiser"]}}, "actor.name is adamw_8bit"),
        ({"roles": "lora", "memory": {"frozen_bits": 4}}, "memory.frozen_bits is 4, and under roles: lora"),
    ],
)
@pytest.mark.parametrize(("section", "stage"), [(PPOSettings, PPO), (GroupSettings, GROUP)])
def test_what_cannot_be_moved_or_rounded_is_refused(
    section: Any, stage: Any, settings: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kedge.core.optimiser.eight_bit_package", lambda: "torchao")
    kind = "ppo" if section is PPOSettings else "group"
    parsed = section.model_validate({"kind": kind, **RL, **settings})
    (finding,) = [finding for finding in stage.check(parsed) if finding.level == "fatal"]
    assert finding.where.startswith("memory.")
    assert message in finding.message
    fit = section.model_validate({"kind": kind, **RL, "reward": "rm", "memory": {"offload": ALL, "frozen_bits": 8}})
    assert [finding for finding in stage.check(fit) if finding.level == "fatal"] == []


def test_moments_in_8_bits_are_refused_in_supervised_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.core.optimiser.eight_bit_package", lambda: "torchao")
    settings = {"kind": "sft", "data": "d", "optimiser": {"name": "adamw_8bit"}, "memory": {"offload": ["optimiser"]}}
    (finding,) = SFT.check(SFTSettings.model_validate(settings))
    assert (finding.level, finding.fix) == (
        "fatal",
        "set optimiser.name to adamw, or leave optimiser out of memory.offload",
    )


def test_sharded_weights_are_not_moved() -> None:
    context: Any = SimpleNamespace(name="sft", world=SimpleNamespace(mesh=object()))
    with pytest.raises(ConfigError, match=r"stages.sft.memory.offload: sharded weights are not moved to the host"):
        refuse_sharded_offload(context, TrainingMemory(offload=("optimiser",)))
    refuse_sharded_offload(context, TrainingMemory())


@pytest.mark.usefixtures("turns")
def test_a_reward_model_on_the_policy_s_weights_is_not_moved(run_ppo: RunPPO, ppo_home: Path, tmp_path: Path) -> None:
    judge = {"kind": "model", "from": str(ppo_home / "judge-lora")}
    with pytest.raises(ConfigError, match="shares the weights of the policy: it has none of its own to move"):
        run_ppo(tmp_path, roles="lora", reward=judge, memory={"offload": ["reward"]})


def test_check_says_what_is_moved_and_what_that_saves() -> None:
    facts = describe("tiny", dtype="float32")
    ppo = PPOSettings.model_validate({"kind": "ppo", **RL, "reward": "rm", "memory": {"offload": ALL}})
    lines = list(offload_lines(ppo, facts, reward_members=2, on_gpu=True))
    count = facts.parameters
    assert lines == [
        f"optimiser: about {2 * 12 * count / 2**20:.1f} MiB of moments and float32 copies in the host's memory between "
        "updates",
        f"reference: about {2 * count / 2**10:.1f} KiB in the host's memory between its turns",
        f"reward: about {2 * 2 * count / 2**10:.1f} KiB in the host's memory between its turns",
    ]
    assert list(offload_lines(ppo, facts, reward_members=2, on_gpu=False)) == [
        "memory.offload (optimiser, reference, reward) does nothing on a CPU: there is no other memory"
    ]
    here, moved = (role_rows(ppo, facts, 2, on_gpu=on_gpu) for on_gpu in (False, True))
    assert [row.host_bytes for row in here] == [0, 0, 0, 0]
    assert [row.host_bytes for row in moved] == [8 * count, 8 * count, 4 * count, 8 * count]
    totals = [sum(row.own_bytes + row.learning_bytes + row.host_bytes for row in rows) for rows in (here, moved)]
    assert totals[0] == totals[1]
    plain = PPOSettings.model_validate({"kind": "ppo", **RL})
    assert list(offload_lines(plain, facts, reward_members=0, on_gpu=True)) == []


def test_check_refuses_few_bits_without_a_gpu(ppo_recipe: Callable[..., Path], tmp_path: Path) -> None:
    (finding,) = bits_findings(load_recipe(ppo_recipe(tmp_path, memory={"frozen_bits": 4})))
    assert (finding.level, finding.where) == ("fatal", "stages.ppo.memory.frozen_bits")
    assert finding.message.startswith("weights of 4 bits need a CUDA device, found 'cpu'")
    assert not list(bits_findings(load_recipe(ppo_recipe(tmp_path))))


def test_a_base_in_few_bits_is_fatal_where_there_is_no_gpu_for_it(tmp_path: Path) -> None:
    stages = {
        "first": {"kind": "sft", "data": "a.jsonl", "lora": {"base_bits": 4}},
        "second": {"kind": "ppo", "prompts": "a.jsonl", "reward": "rm", "roles": "lora",
                   "memory": {"lora": {"base_bits": 8}}},
        "third": {"kind": "sft", "data": "a.jsonl", "lora": {}},
    }  # fmt: skip
    (tmp_path / "few.yaml").write_text(
        json.dumps({"kedge": 1, "name": "few", "model": "tiny", "device": "cpu", "stages": stages})
    )
    findings = list(bits_findings(load_recipe(tmp_path / "few.yaml")))
    assert [(finding.level, finding.where) for finding in findings] == [
        ("fatal", "stages.first.lora.base_bits"),
        ("fatal", "stages.second.memory.lora.base_bits"),
    ]


@pytest.mark.parametrize("kind", ["ppo", "group"])
def test_a_run_with_a_rounded_reference_says_how_far_it_is_off(
    kind: str, run_ppo: RunPPO, ppo_home: Path, records: Records, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nothing rounded after all, that is 0; and it is measured before anything is learnt."""
    monkeypatch.setattr(load, "quantisation", lambda bits, device: {})  # pyright: ignore[reportUnknownLambdaType]
    memory = {"frozen_bits": 8}
    stage = (
        run_ppo(tmp_path, memory=memory)
        if kind == "ppo"
        else _run(tmp_path, "group", ppo_home, memory, roles="separate", actor=LEARN)
    )
    events = [event for event in records(stage / "events.jsonl") if event["code"] == "reference.rounded"]
    assert [(event["evidence"]["gap"], event["evidence"]["kl"]) for event in events] == [(0.0, 0.0)]
    assert "the reference has 8 bits a weight" in events[0]["message"]


def test_rounding_is_a_mean_of_tokens_and_a_sum_of_answers(example: Rollouts) -> None:
    policy_BT = torch.tensor([[9.0, -1.0, -2.0], [9.0, -3.0, 9.0]])
    reference_BT = torch.tensor([[0.0, -1.5, -1.0], [0.0, -3.25, 0.0]])
    gap, kl = rounding(_Role(policy_BT), _Role(reference_BT), example)
    assert gap == pytest.approx((0.5 + 1.0 + 0.25) / 3)
    assert kl == pytest.approx(((0.5 - 1.0) + 0.25) / 2)


class _Role:
    def __init__(self, logp_BT: Tensor) -> None:
        self._logp_BT = logp_BT

    def logprobs(self, rollouts: Rollouts) -> Tensor:
        del rollouts
        return self._logp_BT


@pytest.fixture
def example() -> Rollouts:
    """Two answers, of two tokens and of one."""
    attention_BT = torch.tensor([[1, 1, 1], [1, 1, 0]]).bool()
    return Rollouts(
        tokens_BT=torch.ones(2, 3, dtype=torch.long),
        attention_mask_BT=attention_BT,
        response_mask_BT=attention_BT & torch.tensor([False, True, True]),
        behaviour_logp_BT=torch.zeros(2, 3),
        group_B=torch.arange(2),
        finished_B=torch.ones(2, dtype=torch.bool),
        version=0,
    )
