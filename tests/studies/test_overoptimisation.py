"""The study of overoptimisation: its numbers against counting and closed forms, its page, its recipes, all of it."""

from __future__ import annotations

import doctest
import json
import math
import shutil
import sys
import xml.etree.ElementTree as ElementTree
from itertools import combinations
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks" / "studies"))

import overoptimisation as study_module
import overoptimisation_curves as curves
import overoptimisation_data as data
import overoptimisation_figure as figure
import overoptimisation_jobs as jobs_module
import overoptimisation_page as page
import overoptimisation_plan as plan
from common import Clock, Options, SeedFile, parse
from kedge.core.stats import best_of_kl
from kedge.models.settings import UncertaintyWeighted
from kedge.recipe.schema import load_recipe
from kedge.runs.folder import Run as Folder
from kedge.runs.manifest import Status, new_manifest


@pytest.mark.parametrize("module", [curves, figure, page, plan])
def test_the_examples_hold(module: Any) -> None:
    tried = doctest.testmod(module)
    assert tried.attempted
    assert not tried.failed


def test_the_best_of_n_is_that_of_every_choice_of_n_answers() -> None:
    rng = np.random.default_rng(0)
    chooser_PN, judged_PN = rng.normal(size=(2, 6)), rng.normal(size=(2, 6))
    gain_PS = curves.gains(chooser_PN, judged_PN, [1, 2, 3])
    deviation = curves.Scale.of(judged_PN).deviation
    for prompt in range(2):
        for at, n in enumerate([1, 2, 3]):
            picked = [max(rows, key=lambda row: chooser_PN[prompt, row]) for rows in combinations(range(6), n)]
            expected = np.mean([judged_PN[prompt, row] for row in picked]) - judged_PN[prompt].mean()
            assert gain_PS[prompt, at] == pytest.approx(expected / deviation)


def test_an_answer_without_a_score_is_never_chosen_and_counts_in_no_mean() -> None:
    chooser_PN, judged_PN = np.array([[1.0, 2.0, np.nan, 0.0]]), np.array([[1.0, 3.0, 50.0, np.nan]])
    both = curves.all_scored({"gold": judged_PN[None], "single": chooser_PN[None]})
    assert [scores_MPN.tolist() for scores_MPN in both.values()] == [[[[1.0, 3.0]]], [[[1.0, 2.0]]]]
    gain_PS = curves.gains(chooser_PN, judged_PN, [1, 2])
    deviation = curves.Scale.of(judged_PN).deviation
    assert gain_PS[0] * deviation == pytest.approx([0.0, 1.0])


def scores(seed: int, *, prompts: int = 24, answers: int = 128) -> dict[str, np.ndarray]:
    """Gold, two single proxies and an ensemble: a proxy is gold and an error of its own."""
    rng = np.random.default_rng(seed)
    gold_PN = rng.normal(size=(prompts, answers)) * 2 + rng.normal(size=(prompts, 1)) * 5

    def proxy(share: float, members: int = 1) -> np.ndarray:
        errors_MPN = rng.normal(size=(members, prompts, answers))
        return share * (gold_PN - gold_PN.mean(axis=1, keepdims=True)) / 2 + math.sqrt(1 - share**2) * errors_MPN

    return {
        "gold": gold_PN[None],
        "single-100": proxy(0.3),
        "single-1000": proxy(0.6),
        "ensemble-1000": proxy(0.6, members=4),
    }


def test_more_labels_and_more_members_gain_more_gold() -> None:
    results = curves.best_of_n_results(scores(1), [1000], most=128, seed=1)
    few, many, mean = (results["curves"][name]["gold"][-1] for name in ("single-100", "single-1000", "mean-1000"))
    # The expected best of 128 normal numbers is 2.59 deviations, of which a proxy sees its correlation with gold.
    assert few == pytest.approx(0.3 * 2.59, abs=0.35)
    assert many == pytest.approx(0.6 * 2.59, abs=0.35)
    assert mean > many
    over = results["versus"]["mean-1000 over one member"]["128"]
    assert 0 < over["low"] < over["value"] < over["high"]
    assert results["curves"]["single-1000"]["proxy"][-1] == pytest.approx(2.59, abs=0.2)
    assert results["curves"]["single-1000"]["kl"][-1] == pytest.approx(best_of_kl(128), abs=1e-4)
    assert results["gold itself"]["at_n"]["128"]["value"] > results["curves"]["mean-1000"]["at_n"]["128"]["value"]
    assert set(results["scales"]) == {"gold", *results["curves"]}
    assert max(results["tied"].values()) == 0.0


def test_n_goes_as_far_as_asked_and_as_the_prompt_with_the_fewest_scores() -> None:
    members = scores(3)
    assert curves.best_of_n_results(members, [1000], most=48, seed=1)["curves"]["single-100"]["n"][-1] == 48
    members["single-1000"][0, 5, 100:] = np.nan
    assert curves.best_of_n_results(members, [1000], most=128, seed=1)["curves"]["single-100"]["n"][-1] == 100


def test_the_ways_to_combine_are_those_of_coste() -> None:
    members = scores(2)
    results = curves.best_of_n_results(members, [1000], most=128, seed=1)
    lowest_PN = members["ensemble-1000"].min(axis=0)
    sizes = curves.sizes_up_to(128)
    gold_PS = curves.gains(lowest_PN, members["gold"][0], sizes)
    assert results["curves"]["worst-1000"]["gold"] == pytest.approx(gold_PS.mean(axis=0), abs=1e-3)
    assert curves.COMBINES["uncertainty"] == UncertaintyWeighted(coef=0.5)


def test_a_best_of_n_whose_gold_bends_has_its_peak_with_an_interval_by_prompts() -> None:
    rng = np.random.default_rng(4)
    sizes = curves.sizes_up_to(1024)
    d_S = np.sqrt([best_of_kl(n) for n in sizes])
    bend_P = rng.normal(0.4, 0.1, size=(60, 1))
    gold_PS = 1.2 * d_S - bend_P * d_S**2
    record = curves.best_of_n_curve(gold_PS, gold_PS, sizes)
    assert record["fit"]["outcome"] == "peak"
    middle, low, high = record["fit"]["peak_d"]
    assert low < 1.2 / 0.8 < high
    assert high - low < 0.5
    assert record["gold_low"][-1] < record["gold"][-1] < record["gold_high"][-1]
    assert curves.law_at(record["fit"], middle) == pytest.approx(1.2**2 / 1.6, rel=0.1)


def test_ppo_begins_at_zero_and_is_read_off_at_equal_kl() -> None:
    rng = Random(3)
    gold = [1.5 * math.sqrt(0.25 * step) - 0.1 * step + rng.gauss(0, 0.05) for step in range(60)]
    metrics = [
        {"kl/mean": 0.25 * step, "reward/mean": 5.0 + step, "length/mean": 30.0, "gold/mean": 4.0 + 2 * score}
        for step, score in enumerate(gold)
    ]
    scale = curves.Scale(mean=99.0, deviation=2.0)
    record = curves.ppo_curve([*metrics, {"kl/mean": 3.0}], scale, scale)
    assert len(record["kl"]) == 60
    assert record["gold"][0] == 0.0
    assert record["proxy"][2] == pytest.approx(1.0)
    at = record["at_kl"]["5"]
    assert at["value"] == pytest.approx(1.5 * math.sqrt(5) - 2.0, abs=0.15)
    assert at["low"] < at["value"] < at["high"]
    assert "20" not in record["at_kl"]  # the run ended at 14.75 nats


def answers(count: int) -> tuple[list[dict[str, Any]], list[float]]:
    rng = Random(1)
    rows = [
        {"prompt": [{"role": "user", "content": str(at // 2)}], "answer": f"answer {at}"} for at in range(2 * count)
    ]
    return rows, [rng.gauss(0, 1) for _ in rows]


def test_labels_are_gold_s_but_for_a_share_and_the_first_ones_stay_the_same() -> None:
    rows, gold = answers(2000)
    clean, noisy = (data.label_pairs(rows, gold, noise=noise, seed=5) for noise in (0.0, 0.25))
    of = {row["answer"]: score for row, score in zip(rows, gold, strict=True)}
    assert all(of[pair["chosen"]] > of[pair["rejected"]] for pair in clean)
    wrong = [a["chosen"] != b["chosen"] for a, b in zip(clean, noisy, strict=True)]
    assert np.mean(wrong) == pytest.approx(0.25, abs=0.03)
    assert data.label_pairs(rows[:400], gold[:400], noise=0.25, seed=5) == noisy[:200]
    assert data.label_pairs(rows, gold, noise=0.25, seed=6) != noisy


def test_pairs_that_say_nothing_are_left_out() -> None:
    rows, gold = answers(4)
    rows[0]["answer"], rows[3]["answer"], gold[4] = " ", rows[2]["answer"], gold[5]
    gold[6] = math.nan
    assert data.label_pairs(rows, gold, noise=0.0, seed=1) == []


def options(folder: Path, *more: str) -> Options:
    return parse("overoptimisation", study_module.PARTS, "", ["--to", str(folder), "--work", str(folder / "w"), *more])


def test_every_recipe_of_the_full_size_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    everything = property(lambda study: [name for name, _, _ in study.proxies])
    monkeypatch.setattr(jobs_module.Study, "trained", everything)
    chosen = options(tmp_path)
    study = study_module.Study(options=chosen, plan=plan.FULL, say=Clock(lambda _: None), results=SeedFile(chosen))
    jobs = [*study_module.gold_jobs(study), *study_module.proxy_jobs(study), *study_module.ppo_jobs(study)]
    assert len(jobs) == 2 + 5 + 7
    for name, _, stages in jobs:
        file = tmp_path / f"{name}.yaml"
        file.write_text(json.dumps({"kedge": 1, "name": name, "seed": 1, "model": "tiny", "stages": stages}))
        assert list(load_recipe(file).stages) == list(stages)


def test_a_run_that_fails_does_not_take_the_others_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    chosen = options(tmp_path)
    study = study_module.Study(options=chosen, plan=plan.SMALL, say=Clock(said.append), results=SeedFile(chosen))

    def run(folder: Path, name: str, *, at_once: int) -> None:
        assert json.loads((folder / f"{name}.yaml").read_text())["seed"] == 4
        if name == "bad":
            raise RuntimeError("out of memory")

    monkeypatch.setattr(jobs_module, "run_here", run)
    monkeypatch.setattr(jobs_module, "stage_cost", lambda *_: {"seconds": 2.0, "peak_gib": None})
    jobs = [(name, tmp_path, {"ppo": {}}) for name in ("bad", "good")]
    assert study_module.run_jobs(study, jobs, seed=4) == {"good": {"seconds": 2.0, "peak_gib": None}}
    assert any("bad failed: out of memory" in line for line in said)
    with pytest.raises(RuntimeError, match="all of bad failed"):
        study_module.run_jobs(study, jobs[:1], seed=4)


def write_seed(folder: Path, seed: int, parts: dict[str, Any]) -> None:
    chosen = options(folder, "--seed", str(seed))
    results = SeedFile(chosen)
    for name, values in parts.items():
        results.put(name, values)


def ppo_part(seed: int) -> dict[str, Any]:
    rng = Random(seed)
    runs = {}
    for name, alpha in (("single-100", 0.6), ("single-1000", 1.0), ("mean-1000", 1.2)):
        metrics = [
            {
                "kl/mean": 0.5 * step,
                "reward/mean": 0.1 * step,
                "length/mean": 20.0,
                "gold/mean": alpha * math.sqrt(0.5 * step) - 0.1 * step + rng.gauss(0, 0.05),
            }
            for step in range(60)
        ]
        scale = curves.Scale(mean=0.0, deviation=1.0)
        runs[name] = curves.ppo_curve(metrics, scale, scale)
    return {"curves": runs, "cost": {"ppo-single-100": {"seconds": 9.0, "peak_gib": 3.5}}, "seconds": 30.0 + seed}


def test_the_page_has_the_numbers_of_all_seeds_and_what_is_not_there_is_said(tmp_path: Path) -> None:
    for seed in (1, 2):
        best = curves.best_of_n_results(scores(seed), [1000], most=128, seed=seed)
        parts = {"best_of_n": best | {"seconds": 40.0}}
        write_seed(tmp_path, seed, parts | ({"ppo": ppo_part(seed)} if seed == 1 else {}))
    page.merge(options(tmp_path))
    text = (tmp_path / "overoptimisation.md").read_text()
    assert text.count(page.NOTHING) == 3  # setup, gold and proxies
    assert "- PPO, 1,000 labels: gold peak (1 of 1); peak of the law at d = " in text
    assert "](overoptimisation.svg)" in text
    lines = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("|")]
    rows = {cells[1]: cells[2:] for cells in lines}
    values = [json.loads((tmp_path / "overoptimisation" / f"seed-{seed}.json").read_text()) for seed in (1, 2)]
    at = [seed["parts"]["best_of_n"]["curves"]["mean-1000"]["at_n"]["16"]["value"] for seed in values]
    assert f"| mean, 1,000 labels | {np.mean(at):.2f} [" in text
    difference = float(rows["PPO: mean, 1,000 labels over 1,000 labels"][0].split()[0])
    assert difference == pytest.approx(0.2 * math.sqrt(2), abs=0.15)  # at 2 nats
    assert rows["ppo"][:2] == ["31", "3.5"]
    golds = [{"seed": n, "parts": {"gold": {"seconds": took, "cost": {}}}} for n, took in ((1, 160.0), (2, 0.1))]
    assert page.cost_table(golds).splitlines()[-1] == "| gold, once for all seeds | 160 | – |"
    drawing = ElementTree.fromstring((tmp_path / "overoptimisation.svg").read_text())
    assert len(drawing.findall("{http://www.w3.org/2000/svg}g")) == 4
    drawn = (tmp_path / "overoptimisation.svg").read_text()
    assert 'class="curve first fit"' in drawn  # the proxy is dashed, the law is faint
    assert 'class="curve first faint"' in drawn
    again = text
    page.merge(options(tmp_path))
    assert (tmp_path / "overoptimisation.md").read_text() == again


def test_a_peak_over_seeds_has_the_errors_of_the_fits_too_and_runs_that_were_broken_off_are_told() -> None:
    fits: list[dict[str, Any]] = [
        {"outcome": "peak", "has_fallen": True, "peak_d": [2.0, 1.5, 2.5], **dict.fromkeys(["collapse_d", "r2"])}
        for _ in range(2)
    ]
    seeds = [{"seed": n, "parts": {"ppo": {"curves": {"single-100": {"fit": fit}}}}} for n, fit in enumerate(fits)]
    assert page.outcomes(seeds, "ppo")[0].endswith("peak of the law at d = 2.00 [1.50, 2.50].")
    fits[1]["peak_d"] = [2.0, 1.5, None]
    assert page.outcomes(seeds, "ppo")[0].endswith("peak of the law at d = 2.00 [1.50, ∞].")
    for seed, whole in zip(seeds, (True, False), strict=True):
        run = {"kl": [0.0] * 9, "gold": [0.0] * 9, "is_whole": whole}
        seed["parts"]["ppo"]["curves"] = {"single-100": run}
    assert page.ppo_table(seeds).endswith("Broken off before their end: 100 labels (seed 1, 9 iterations).")


def test_without_seeds_nothing_is_written(tmp_path: Path) -> None:
    page.merge(options(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_proxy_that_is_not_there_takes_no_other_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options(tmp_path)
    study = study_module.Study(options=chosen, plan=plan.FULL, say=Clock(lambda _: None), results=SeedFile(chosen))
    monkeypatch.setattr(jobs_module, "is_done", lambda run: run.name in ("single-300", "single-1000"))
    assert [name for name, _, _ in study_module.ppo_jobs(study)] == ["ppo-single-300", "ppo-single-1000"]
    members = scores(1)
    del members["ensemble-1000"]
    monkeypatch.setattr(study_module, "scores_of_answers", lambda _: members)
    assert set(study_module.part_best_of_n(study)["curves"]) == {"single-100", "single-1000"}


def test_scores_are_kept_whole_and_made_anew_for_other_proxies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = options(tmp_path)
    chosen.work.mkdir()
    study = study_module.Study(options=chosen, plan=plan.SMALL, say=Clock(lambda _: None), results=SeedFile(chosen))
    names = ["single-12"]
    monkeypatch.setattr(jobs_module.Study, "trained", property(lambda _: names))
    made: list[int] = []

    def scored(_study: Any, _name: str, answers: list[Any], judges: list[Path]) -> list[np.ndarray]:
        made.append(len(judges))
        return [np.full((1, len(answers)), float(place)) for place in range(len(judges))]

    monkeypatch.setattr(study_module, "sampled", lambda *_, answers, **__: [{}] * answers * 4)
    monkeypatch.setattr(study_module, "scored", scored)
    (chosen.work / "best-of-n.part.npz").write_bytes(b"half")
    first, again = study_module.scores_of_answers(study), study_module.scores_of_answers(study)
    assert made == [2]
    assert all(np.array_equal(first[name], again[name]) for name in ("gold", "single-12"))
    assert first["single-12"].shape == (1, 4, plan.SMALL.answers)
    names.append("single-24")
    assert set(study_module.scores_of_answers(study)) == {"gold", "single-12", "single-24"}
    assert made == [2, 3]


def write_ppo_run(run: Path, *, steps: int, status: Status) -> None:
    """A run of one stage with gold at each of so many steps."""
    for folder in (run, run / "ppo"):
        manifest = new_manifest(name=folder.name, kind="pipeline", seed=1, settings={})
        with Folder.create(folder, manifest=manifest) as opened:
            for step in range(steps if folder.parent == run else 0):
                gold = {"kl/mean": 0.5 * step, "reward/mean": 0.1 * step, "length/mean": 20.0, "gold/mean": 0.2 * step}
                opened.log(gold, step)
            opened.finish(status)


def test_runs_that_are_broken_off_beside_one_that_has_ended_are_kept_as_far_as_they_came(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = options(tmp_path)
    chosen.work.mkdir()
    study = study_module.Study(options=chosen, plan=plan.SMALL, say=Clock(lambda _: None), results=SeedFile(chosen))
    names = ["single-12", "single-24"]
    monkeypatch.setattr(jobs_module.Study, "trained", property(lambda _: names))
    study.results.put("best_of_n", {"scales": {key: {"mean": 0.0, "deviation": 1.0} for key in ["gold", *names]}})

    def run(folder: Path, name: str, *, at_once: int) -> None:
        if name == "ppo-single-24":
            raise KeyboardInterrupt
        write_ppo_run(folder / "ppo-single-24", steps=11, status="interrupted")
        write_ppo_run(folder / name, steps=13, status="done")

    monkeypatch.setattr(jobs_module, "run_here", run)
    with pytest.raises(KeyboardInterrupt):
        study_module.part_ppo(study)
    part = json.loads(chosen.seed_file.read_text())["parts"]["ppo"]
    whole = {name: (curve["is_whole"], len(curve["kl"])) for name, curve in part["curves"].items()}
    assert whole == {"single-12": (True, 13), "single-24": (False, 11)}
    assert list(part["cost"]) == ["ppo-single-12"]


def test_a_call_that_leaves_a_run_behind_says_so_and_the_next_one_goes_on_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_ppo_run(tmp_path / "w" / "single-12", steps=0, status="done")
    write_ppo_run(tmp_path / "w" / "ensemble-24", steps=0, status="failed")
    (tmp_path / "w" / "single-24").mkdir()  # killed as it began
    monkeypatch.setattr(study_module, "RUNS", dict.fromkeys(study_module.PARTS, lambda _: {}))
    small = ["--size", "small", "--only"]
    assert study_module.run_parts(options(tmp_path, *small, "labels"))
    assert not study_module.run_parts(options(tmp_path, *small, "proxies"))
    assert [jobs_module.has_begun(tmp_path / "w" / name) for name in ("single-24", "ensemble-24")] == [False, True]
    for name in ("single-24", "ensemble-24"):
        shutil.rmtree(tmp_path / "w" / name)
        write_ppo_run(tmp_path / "w" / name, steps=0, status="done")
    assert study_module.run_parts(options(tmp_path, *small, "proxies"))


@pytest.mark.slow
def test_the_small_size_runs_to_its_end_and_again_from_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["--size", "small", "--to", str(tmp_path), "--work", str(tmp_path / "w"), "--seed", "3"]
    assert study_module.main(arguments) == 0
    record = json.loads((tmp_path / "overoptimisation" / "seed-3.json").read_text())
    assert list(record["parts"]) == list(study_module.PARTS)
    names = {"single-12", "single-24", "mean-24", "worst-24", "uncertainty-24"}
    assert set(record["parts"]["ppo"]["curves"]) == names == set(record["parts"]["best_of_n"]["curves"])
    assert len(record["parts"]["ppo"]["curves"]["worst-24"]["kl"]) == plan.SMALL.iterations
    assert page.NOTHING not in (tmp_path / "overoptimisation.md").read_text()
    trained = (tmp_path / "w" / "single-24" / "proxy" / "run.json").stat().st_mtime_ns
    monkeypatch.setattr(study_module, "sampled", lambda *_, **__: pytest.fail("what is there is sampled again"))
    assert study_module.main(arguments) == 0
    assert (tmp_path / "w" / "single-24" / "proxy" / "run.json").stat().st_mtime_ns == trained
    again = json.loads((tmp_path / "overoptimisation" / "seed-3.json").read_text())
    assert again["parts"] == record["parts"]
