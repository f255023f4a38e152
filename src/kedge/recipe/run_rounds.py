"""Runs a recipe round after round, each a pipeline in `round-N/`, and judges every round when it is over."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.errors import ConfigError, ContractStop
from kedge.core.files import hash_file, write_json
from kedge.core.world import ALONE, World, once
from kedge.recipe.pipeline import OnStep, finished, open_pipeline, reported, run_pipeline
from kedge.recipe.resuming import accepted_changes
from kedge.recipe.round_rules import (
    BEST_RULE,
    Best,
    RoundResult,
    best_round,
    drift_checks,
    has_converged,
    reward_age,
)
from kedge.recipe.rounds import DRIFT, Rounds, folder_of, rounds_of
from kedge.recipe.schema import Recipe
from kedge.recipe.wiring import connect
from kedge.report.writing import write_report
from kedge.runs.folder import Run, RunTracker, runs_in, status_of
from kedge.runs.lineage import describe, locate
from kedge.runs.manifest import MANIFEST_NAME, Artefact, read_manifest
from kedge.stages.shared.context import Say
from kedge.stages.shared.interrupt import terminable

FIGURES: Final = "figures.json"
DRIFT_FILE, BEST_FILE = "drift.json", "best.json"
_AGREEMENT, _EVALUATION = "agreement.json", "evaluation.json"


def run_rounds(
    folder: Path,
    recipe: Recipe,
    *,
    is_resumed: bool,
    say: Say,
    on_step: OnStep | None = None,
    write_inputs: Callable[[], None] = lambda: None,
    world: World = ALONE,
    device: str | None = None,
) -> Path:
    """Run every round that is not over yet, in `folder`; the arguments are those of `run_pipeline`."""
    rounds = rounds_of(recipe)
    if is_resumed:
        once(world, lambda: _refuse_changes(rounds, folder))
    speak: Say = say if world.rank == 0 else lambda _: None
    with (
        terminable(),
        Run.shared(world, partial(open_pipeline, recipe, folder, is_resumed=is_resumed, say=speak)) as run,
        reported(folder, speak, world),
        finished(run, RunTracker(run)) as outputs,
    ):
        once(world, write_inputs)
        for number in range(1, rounds.settings.count + 1):
            _run_round(rounds, number, folder, say=speak, on_step=on_step, world=world, device=device)
            judged = once(world, partial(_judge, rounds, number, folder))
            outputs[:] = judged.outputs
            for line in judged.lines:
                speak(line)
            if judged.failure is not None:
                raise ContractStop(judged.failure)
            if judged.converged is not None:
                run.event("info", "rounds.converged", judged.converged)
                speak(judged.converged)
                break
    speak(f"done: {folder}")
    return folder


def _run_round(rounds: Rounds, number: int, folder: Path, *, say: Say, world: World, **options: Any) -> None:
    """One round, from where it was; nothing where it is over."""
    home = folder / folder_of(number)
    before = folder / folder_of(number - 1) / MANIFEST_NAME
    previous = once(world, lambda: hash_file(before) if number > 1 else None)
    recipe = rounds.recipe(number, previous)
    say(f"round {number} of {rounds.settings.count}")
    if once(world, lambda: _is_over(rounds, home)):
        say(f"round {number}: done before, kept")
        return
    if number > 1:
        once(world, lambda: refuse_old_reward(rounds, recipe, folder))
    has_begun = once(world, lambda: (home / MANIFEST_NAME).exists())
    try:
        run_pipeline(home, recipe, is_resumed=has_begun, say=say, world=world, **options)
    except ContractStop:
        if not once(world, lambda: _is_over(rounds, home)):
            raise
        say(f"round {number}: its gate has failed, and the rounds go on (rounds.stop.gate)")


def _refuse_changes(rounds: Rounds, folder: Path) -> None:
    """An error where the recipe, or a round that others built on, is not what it was."""
    previous = None
    for number in range(1, rounds.settings.count + 1):
        home = folder / folder_of(number)
        if not (home / MANIFEST_NAME).exists():
            return
        manifest = read_manifest(home)
        if number > 1 and manifest.previous != previous:
            raise ConfigError(
                f"{home}: it was built on another {folder_of(number - 1)} than the one that is there: "
                f"{folder / folder_of(number - 1) / MANIFEST_NAME} has changed since. Restore it, or start a new run "
                "with --set name=ANOTHER"
            )
        accepted_changes(home, rounds.recipe(number, previous))
        previous = hash_file(home / MANIFEST_NAME)


def _is_over(rounds: Rounds, home: Path) -> bool:
    """Whether a round is done, or was ended by a gate that the rounds go on after, or has gone on after."""
    if not (home / MANIFEST_NAME).exists():
        return False
    status, number = status_of(home), int(home.name.removeprefix("round-"))
    if (home.with_name(folder_of(number + 1)) / MANIFEST_NAME).exists():
        return True
    return status == "done" or (status == "stopped" and rounds.settings.stop.gate is None and _gate_failed(home))


def _gate_failed(home: Path) -> bool:
    return any(read_manifest(stage).kind == "gate" and status_of(stage) == "stopped" for stage in runs_in(home))


def _seal(home: Path) -> None:
    """Write into the manifest of a round that is over up to which judgment its labels go."""
    as_of = {
        stage.name: int(numbers["as_of"])
        for stage in runs_in(home)
        if (numbers := _read(stage / _AGREEMENT)).get("as_of") is not None
    }
    if as_of and read_manifest(home).as_of != as_of:
        with Run.open(home, for_writing=True) as run:
            run.amend(as_of=as_of)


def refuse_old_reward(rounds: Rounds, recipe: Recipe, folder: Path) -> None:
    """A reward model that was labelled on answers of a policy far from the one that it would improve is not optimised
    against: what it says of the new answers nobody has checked."""
    assert recipe.round is not None
    number, links = recipe.round.number, connect(recipe).links
    figures = _read(folder / folder_of(number - 1) / DRIFT / FIGURES)
    for name, own in links.items():
        limit: float | None = getattr(getattr(recipe.stages[name], "kl", None), "limit", None)
        begins = [link for link in own if link.field == "from" and link.home and link.stage == rounds.policy]
        rewards = [link for link in own if link.field.partition(".")[0] == "reward" and link.home]
        for link in rewards if begins else ():
            made_in = rounds.round_of(link, number)
            age = reward_age(figures, made_in=made_in, now=number)
            if age is not None and limit is not None and age > limit:
                raise ContractStop(
                    f"round {number}, {name}: the reward model {link.value} of round {made_in} is "
                    f"{age:.1f} nats of KL older than the policy that it would improve, and {name}.kl.limit is "
                    f"{limit:g}: train one on labels of this round's answers (reward: STAGE), or raise the limit"
                )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judged:
    """What a round was found to be, and what follows."""

    lines: tuple[str, ...]
    outputs: tuple[Artefact, ...]
    failure: str | None
    converged: str | None


def _judge(rounds: Rounds, number: int, folder: Path) -> _Judged:
    """Drift checks, the best round so far, and whether to go on; writes `drift.json` and `best.json`, and the page."""
    stop = rounds.settings.stop
    _seal(folder / folder_of(number))
    results = [_result(rounds, before, folder) for before in range(1, number + 1)]
    best = best_round(results)
    model = _model_of(rounds, best, folder)
    record = {"round": best.round, "stage": rounds.policy, "model": model.path if model else None, "rule": BEST_RULE}
    write_json(folder / BEST_FILE, {**record, "evidence": best.evidence, "words": best.words})
    failed = [
        check["words"] for check in _read(folder / folder_of(number) / DRIFT_FILE)["checks"] if check["has_failed"]
    ]
    drifted = f"round {number} has drifted: {'; '.join(failed)}" if failed else f"round {number}: no drift"
    failure = None
    if failed and stop.drift == "fail":
        failure = (
            f"{drifted}. Everything is saved; {best.words}. To go on all the same, raise rounds.drift.limits or set "
            "rounds.stop.drift to null, and --resume"
        )
    reason = has_converged(results, stop.gain) if stop.gain else None
    converged = f"the rounds end after round {number}: it {reason}" if reason else None
    write_report(folder, None)
    return _Judged(
        lines=(drifted, f"best: {best.words}"),
        outputs=(model,) if model else (),
        failure=failure,
        converged=converged,
    )


def _model_of(rounds: Rounds, best: Best, folder: Path) -> Artefact | None:
    """The policy of the best round as an output of all rounds; None where there is no policy, or it was never ours."""
    if rounds.policy is None:
        return None
    name = rounds.policy
    home = folder / folder_of(max(best.round, 1))
    if best.round == 0:
        begun = rounds.settings.first[rounds.policy]
        if begun is None or begun.partition(".")[0] not in rounds.whole.stages:
            return None
        name = begun.partition(".")[0]
    outputs = [output for output in read_manifest(home / name).outputs if output.kind == "model"]
    if not outputs:
        return None
    # Paths of outputs are from the folder of the run that names them; `describe` thinks of a stage's.
    described = describe("best", "model", locate(outputs[0], home / name), run_folder=home / name)
    return Artefact(name="best", kind="model", path=f"{home.name}/{name}/{described.path}", hash=described.hash)


def _result(rounds: Rounds, number: int, folder: Path) -> RoundResult:
    """What is known of a round; its checks are written into its `drift.json`."""
    home = folder / folder_of(number)
    figures = _figures(rounds, number, folder)
    checks = drift_checks(figures, rounds.settings.drift.limits)
    write_json(home / DRIFT_FILE, {**figures, "checks": [check.as_dict() for check in checks]})
    policy = cast("Mapping[str, Any]", figures.get("policy") or {})
    return RoundResult(
        number=number,
        gold=_mean(policy.get("gold")),
        previous_gold=_mean(policy.get("previous_gold")),
        win_rate=(policy.get("win_rate") or {}).get("value"),
        has_passed=not _gate_failed(home) and not any(check.has_failed for check in checks),
    )


def _mean(estimate: Any) -> float | None:
    return None if estimate is None else float(estimate["mean"])


def _figures(rounds: Rounds, number: int, folder: Path) -> dict[str, Any]:
    """What the stage `drift` has measured, with what other rounds and stages know."""
    home = folder / folder_of(number)
    figures = _read(home / DRIFT / FIGURES)
    reward = dict(figures.get("reward") or {})
    reward["heldout"] = {
        name: {**own, "then": _accuracy_then(folder / name, name) if name != folder_of(number) else None}
        for name, own in (reward.get("heldout") or {}).items()
    }
    policy = dict(figures.get("policy") or {})
    if "win_rate" not in policy and (judged := _judged_rate(rounds, home)) is not None:
        policy["win_rate"] = judged
    labels = _agreement(home)
    first = labels if number == 1 else _agreement(folder / folder_of(1))
    labels |= {f"first_{name}": value for name, value in first.items()}
    return {**figures, "policy": policy, "reward": reward, "labels": labels}


def _accuracy_then(home: Path, name: str) -> float | None:
    """What the reward model of an earlier round had on its own held-out labels."""
    held_out = (_read(home / DRIFT / FIGURES).get("reward") or {}).get("heldout") or {}
    return (held_out.get(name) or {}).get("accuracy")


def _judged_rate(rounds: Rounds, home: Path) -> dict[str, Any] | None:
    """The win rate of the policy over the round before by the judge of an evaluation whose baseline that is."""
    for stage in runs_in(home):
        if read_manifest(stage).kind != "evaluate":
            continue
        numbers = _read(stage / _EVALUATION)
        begun = {f"previous.{rounds.policy}", rounds.settings.first.get(rounds.policy or "")}
        if numbers.get("baseline") not in begun:
            continue
        by_judge = (numbers.get("judges") or {}).get(rounds.policy) or {}
        for judge in sorted(by_judge, key=lambda name: name != "majority"):
            rate = by_judge[judge]
            return {"value": rate["rate"], "low": rate["low"], "high": rate["high"], "by": judge}
    return None


def _agreement(home: Path) -> dict[str, Any]:
    """α of those who labelled (people, or a panel of judges) and κ of judges with people, with its interval, in the
    labels of a round, where they are known."""
    found: dict[str, Any] = {}
    for stage in runs_in(home):
        numbers = _read(stage / _AGREEMENT)
        for question in (numbers.get("agreement") or {}).values():
            found.setdefault("alpha", question.get("alpha", question.get("value")))
        if "kappa" not in found and numbers.get("kappa") is not None:
            kappa = numbers["kappa"]
            found |= {"kappa": kappa["value"], "kappa_low": kappa["low"], "kappa_high": kappa["high"]}
    return found


def _read(file: Path) -> dict[str, Any]:
    """A file of JSON; empty where there is none."""
    return json.loads(file.read_bytes()) if file.is_file() else {}
