"""The page and the figure of the study of verifiable instructions, from the JSONs of its seeds alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from common import (
    RESULTS,
    Estimate,
    Options,
    Record,
    cell,
    estimates,
    mean_over_seeds,
    numbers,
    over_seeds,
    points,
    provenance,
    table,
    write_page,
)
from drawing import dots, lines
from kedge.data.instructions.wordings import TRAINED, UNTRAINED
from kedge.report.charts.plot import COLOURS, Plot, Point, Series

NAMES = {
    "start": "SmolLM2-135M, the start",
    "grpo": "GRPO",
    "rloo": "RLOO",
    "dapo": "DAPO",
    "ppo": "PPO",
    "rejection": "rejection sampling",
}
REPORTS = ("grpo",)
"""Methods whose report is kept beside the seeds."""
WANTED = 0.08
"""The gain of prompt-level strict IFEval that the study set out for."""


def write_results(options: Options, seeds: Sequence[Record]) -> None:
    """Fill the page and draw the figure, where there is a seed."""
    if not seeds:
        return
    parts = [part for part in NAMES if any(part in record["parts"] for record in seeds)]
    blocks = {
        "verdict": verdict(seeds, parts),
        "ifeval": ifeval_table(seeds, parts),
        "heldout": heldout_table(seeds, parts),
        "answers": answers_table(seeds, parts),
        "kinds": kinds_table(seeds, parts),
        "samples": samples_list(seeds[0]),
        "runs": runs(seeds),
    }
    page = RESULTS / f"{options.study}.md"
    write_page(options, page.read_text(encoding="utf-8"), blocks, plots(seeds, parts))


def merged(seeds: Sequence[Record], *path: str) -> Estimate | None:
    """The mean over the seeds that have a number there."""
    found = estimates(seeds, *path)
    return over_seeds(found) if found else None


def gain(seeds: Sequence[Record], part: str, *path: str) -> str:
    """In points; the start has none."""
    return points(merged(seeds, part, "gains", *path), is_signed=True)


def verdict(seeds: Sequence[Record], parts: Sequence[str]) -> str:
    """Whether each method did what was wanted: so many points more on IFEval, no loss on untrained kinds."""
    told: list[str] = []
    for part in parts[1:] if parts[:1] == ["start"] else parts:
        strict = merged(seeds, part, "gains", "ifeval", "prompt_strict")
        rest = merged(seeds, part, "gains", "ifeval", "untrained")
        if strict is None or rest is None:
            continue
        reached = "reached" if strict.value >= WANTED else "not reached"
        told.append(
            f"- **{NAMES[part]}**: {points(strict, is_signed=True)} points of IFEval's prompts followed strictly "
            f"(wanted: {100 * WANTED:.0f}; {reached}); {points(rest, is_signed=True)} points on kinds that were never "
            f"trained ({_loss(rest)})."
        )
    figure = "![IFEval before and after, by kind and by method; reward while training; gain over KL](verifiable.svg)"
    return "\n".join([f"{_seeds(seeds)}. Means with 95 % intervals, paired by prompt:", "", *told, "", figure])


def _loss(rest: Estimate) -> str:
    """
    >>> _loss(Estimate(value=0.01, low=-0.03, high=0.05, count=1))
    'no loss is shown, and one of more than 3.0 points is excluded'
    """
    if rest.high < 0:
        return "a loss"
    if rest.low > 0:
        return "a gain"
    return f"no loss is shown, and one of more than {max(0.0, -100 * rest.low):.1f} points is excluded"


def _seeds(seeds: Sequence[Record]) -> str:
    return f"{len(seeds)} seed{'s' if len(seeds) > 1 else ''} ({', '.join(str(record['seed']) for record in seeds)})"


def ifeval_table(seeds: Sequence[Record], parts: Sequence[str]) -> str:
    head = ["", "prompts, strict", "gain", "prompts, loose", "instructions, strict", "trained kinds", "untrained kinds"]
    rows = [
        [
            NAMES[part],
            points(merged(seeds, part, "exams", "ifeval", "prompt_strict")),
            gain(seeds, part, "ifeval", "prompt_strict"),
            points(merged(seeds, part, "exams", "ifeval", "prompt_loose")),
            points(merged(seeds, part, "exams", "ifeval", "instruction_strict")),
            _with_gain(seeds, part, "ifeval", "trained"),
            _with_gain(seeds, part, "ifeval", "untrained"),
        ]
        for part in parts
    ]
    return table(head, rows)


def _with_gain(seeds: Sequence[Record], part: str, *path: str) -> str:
    """A share, and its gain behind it."""
    now, change = merged(seeds, part, "exams", *path), merged(seeds, part, "gains", *path)
    if now is None:
        return points(None)
    return f"{100 * now.value:.1f}" + (f" ({points(change, is_signed=True)})" if change else "")


def heldout_table(seeds: Sequence[Record], parts: Sequence[str]) -> str:
    head = ["", "trained kinds: prompts", "gain", "instructions", "untrained kinds: prompts", "gain", "instructions"]
    rows = [
        [
            NAMES[part],
            *(
                text
                for exam in ("trained", "untrained")
                for text in (
                    points(merged(seeds, part, "exams", exam, "prompt_strict")),
                    gain(seeds, part, exam, "prompt_strict"),
                    points(merged(seeds, part, "exams", exam, "instruction_strict")),
                )
            ),
        ]
        for part in parts
    ]
    return table(head, rows)


def answers_table(seeds: Sequence[Record], parts: Sequence[str]) -> str:
    head = ["", "KL to the start, nats", "tokens", "distinct-2", "repetition", "ended", "train s", "peak GiB", "part s"]
    rows = [
        [
            NAMES[part],
            cell(merged(seeds, part, "answers", "kl"), 1) if part != "start" else "0",
            cell(merged(seeds, part, "answers", "length"), 0),
            *(_mean(seeds, part, "answers", name, digits=3) for name in ("distinct", "repetition")),
            _mean(seeds, part, "answers", "finished", digits=2),
            _mean(seeds, part, "cost", part, "seconds", digits=0),
            _mean(seeds, part, "cost", part, "peak_gib", digits=1),
            _mean(seeds, part, "wall_seconds", digits=0),
        ]
        for part in parts
    ]
    return table(head, rows)


def _mean(seeds: Sequence[Record], *path: str, digits: int) -> str:
    found = numbers(seeds, *path)
    return cell(
        Estimate(value=(mean := mean_over_seeds(found).value), low=mean, high=mean, count=1) if found else None, digits
    )


def kinds_table(seeds: Sequence[Record], parts: Sequence[str]) -> str:
    head = ["kind of IFEval", "", *(NAMES[part].partition(",")[0] for part in parts)]
    rows = [
        [
            f"`{kind}`",
            word,
            *(_share(merged(seeds, part, "exams", "kinds", kind)) for part in parts),
        ]
        for word, kinds in (("trained", TRAINED), ("untrained", UNTRAINED))
        for kind in kinds
    ]
    return table(head, rows)


def _share(estimate: Estimate | None) -> str:
    return "–" if estimate is None else f"{100 * estimate.value:.0f}"


def samples_list(record: Record) -> str:
    """Sampled answers of the start and of GRPO, or of the first method that is there, to prompts of ours."""
    part = next((name for name in NAMES if name != "start" and name in record["parts"]), None)
    if part is None:
        return "No method has been run yet."
    blocks = [f"Of seed {record['seed']}, the first held-out prompts, sampled as in training, cut at 300 letters:"]
    for sample in record["parts"][part]["samples"]:
        blocks.append(f"**{_inline(sample['prompt'])}**")
        blocks += [f"- *{NAMES.get(name, 'start')}*: {_inline(text)}" for name, text in sample["answers"].items()]
    return "\n\n".join(blocks)


def _inline(text: str) -> str:
    """A text as code in one line of Markdown, whatever signs it has."""
    short = " ⏎ ".join(line for line in text.strip().splitlines() if line.strip())
    short = short if len(short) <= 300 else f"{short[:300]}…"
    return f"`` {short.replace('``', '` `')} ``" if short else "(empty)"


def runs(seeds: Sequence[Record]) -> str:
    """Seeds, machine and versions, and what was left out of the prompts because IFEval has it."""
    overlaps = [record["parts"]["start"]["overlap"] for record in seeds if "start" in record["parts"]]
    told = [
        f"seed {record['seed']}: {overlap['left_out']} of {overlap['prompts']:,} prompts left out, because they share "
        f"{overlap['gram']} words in a row or more with a prompt of IFEval (the longest run of shared words: "
        f"{overlap['longest_shared_words']})"
        for record, overlap in zip(seeds, overlaps, strict=False)
    ]
    reports = [
        f"[{NAMES[part]}, seed {record['seed']}]({record['study']}/{part}-seed-{record['seed']}.html)"
        for record in seeds
        for part in record["parts"]
        if part in REPORTS
    ]
    linked = f"`kedge report` of the runs: {', '.join(reports)}." if reports else ""
    return "\n\n".join([provenance(seeds), f"Training prompts: {'; '.join(told)}.", linked]).strip()


def plots(seeds: Sequence[Record], parts: Sequence[str]) -> list[Plot]:
    methods = [part for part in parts if part != "start"]
    short = {part: NAMES[part].partition(" ")[0].partition(",")[0] for part in parts} | {"start": "start"}

    def shares(names: Mapping[str, tuple[str, ...]], which: Sequence[str]) -> dict[str, list[Estimate | None]]:
        return {name: [_in_points(merged(seeds, part, *path)) for part in which] for name, path in names.items()}

    ifeval = {
        "prompts, strict": ("exams", "ifeval", "prompt_strict"),
        "prompts, loose": ("exams", "ifeval", "prompt_loose"),
    }
    kinds = {"trained kinds": ("gains", "ifeval", "trained"), "untrained kinds": ("gains", "ifeval", "untrained")}
    own = {
        "trained kinds": ("gains", "trained", "prompt_strict"),
        "untrained kinds": ("gains", "untrained", "prompt_strict"),
    }
    drawn = [dots("IFEval, % of 541 prompts followed", [short[part] for part in parts], shares(ifeval, parts))]
    if methods:
        names = [short[part] for part in methods]
        drawn += [
            dots("IFEval: gain in points, instructions by kind", names, shares(kinds, methods)),
            dots("Held-out prompts of ours: gain in points", names, shares(own, methods)),
            lines("Reward while training (seed means)", "share of training, %", reward_curves(seeds, methods, short)),
            against_kl(seeds, methods, short),
        ]
    return drawn


def _in_points(estimate: Estimate | None) -> Estimate | None:
    return None if estimate is None else estimate.scaled(100)


def reward_curves(
    seeds: Sequence[Record], methods: Sequence[str], short: Mapping[str, str]
) -> dict[str, list[tuple[float, float]]]:
    """Mean reward over seeds, by how much of the training is done; methods count their steps differently."""
    curves: dict[str, list[tuple[float, float]]] = {}
    for part in methods:
        each = [record["parts"][part]["curves"]["reward"] for record in seeds if part in record["parts"]]
        length = min((len(curve) for curve in each), default=0)
        if length:
            means = [sum(curve[at][1] for curve in each) / len(each) for at in range(length)]
            curves[short[part]] = [(100 * (at + 1) / length, mean) for at, mean in enumerate(means)]
    return curves


def against_kl(seeds: Sequence[Record], methods: Sequence[str], short: Mapping[str, str]) -> Plot:
    """The gain on IFEval over the KL that it cost, a dot a method."""
    shown: list[Point] = []
    for place, part in enumerate(methods):
        kl, won = merged(seeds, part, "answers", "kl"), merged(seeds, part, "gains", "ifeval", "prompt_strict")
        if kl is None or won is None:
            continue
        won = won.scaled(100)
        shown.append(
            Point(
                x=kl.value,
                y=won.value,
                low=won.low,
                high=won.high,
                left=kl.low,
                right=kl.high,
                title=f"{NAMES[part]}: {won.value:.1f} points at {kl.value:.1f} nats",
                label=short[part],
                colour=COLOURS[place % len(COLOURS)],
            )
        )
    ends = sorted({0.0, *(end for point in shown for end in (point.left, point.right) if end is not None)})
    # A line without values gives the axis its ends.
    frame = Series(name="", colour="ink", values=[None] * len(ends), is_named=False)
    title = "IFEval strict: gain in points over KL to the start"
    return Plot(title=title, note="", x_name="nats a sequence", x=ends, series=(frame,), points=tuple(shown))
