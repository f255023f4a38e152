"""What came of the rounds, on one page: gold against proxy, KL, accuracy on all held-out labels, drift, the best."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from kedge.report.charts import svg
from kedge.report.charts.axes import Axis
from kedge.report.charts.plot import COLOURS, Colour, Plot, Point, Series, Threshold
from kedge.report.pages import render_page
from kedge.report.rounds.records import RoundRecord, RoundsRecord
from kedge.report.run import summary
from kedge.report.words import number

_RATES: tuple[tuple[str, str, float, Colour], ...] = (
    ("win_rate", "gold or judge", -0.04, "first"),
    ("proxy_rate", "its own reward model", 0.04, "second"),
)
_NAMES: Mapping[str, str] = {
    "kl_previous": "KL to the round before (nats)",
    "kl_first": "KL to the first policy (nats)",
    "length_ratio": "length beside the round before",
    "refusal_rise": "rise of refusals",
    "distinct_ratio": "distinct-2 beside the round before",
    "win_rate": "win rate over the round before",
    "spearman": "rank correlation of reward models",
    "flips": "anchor's pairs turned round",
    "ece": "calibration error (ECE)",
    "shift": "shift of the old policy's scores (sd)",
    "alpha_drop": "α of people, less than in round 1",
    "kappa_drop": "κ of the judge, less than in round 1",
}


def render_rounds(run: RoundsRecord) -> str:
    """The whole page."""
    return render_page(
        "kedge.report.rounds",
        "page.html.j2",
        run=run,
        status_words=summary.STATUS_WORDS,
        verdict=_verdict(run),
        figures=[_drawn(plot) for plot in _plots(run.rounds)],
        table=_table(run.rounds),
        number=number,
    )


def _drawn(plot: Plot) -> Markup:
    return svg.figure(plot)


def _verdict(run: RoundsRecord) -> str:
    over = sum(bool(record.figures) for record in run.rounds)
    drifted = [f"round {record.number} has drifted" for record in run.rounds if record.failed]
    what = [f"{over} of {run.count} rounds are over", *drifted]
    if run.best:
        what.append(str(run.best["words"]))
    return "; ".join(what) + "."


def _plots(rounds: Sequence[RoundRecord]) -> Iterator[Plot]:
    over = [record for record in rounds if record.figures]
    if any(record.policy.get("win_rate") or record.policy.get("proxy_rate") for record in over):
        yield _rates(over)
    if any(record.policy.get("gold") for record in over):
        yield _gold(over)
    if any(record.policy.get("kl_first") is not None for record in over):
        yield _lines(
            over,
            {"kl_previous": "to the round before", "kl_first": "to the first policy"},
            title="How far the policy went",
            note="KL in nats a sequence, on the same prompts in every round.",
        )
    if any(record.reward.get("heldout") for record in over):
        yield _accuracies(over)


def _rates(rounds: Sequence[RoundRecord]) -> Plot:
    """Gold against proxy on one scale: both as win rates over the round before."""
    points = [
        Point(
            x=record.number + offset,
            y=rate["value"],
            low=rate["low"],
            high=rate["high"],
            title=f"round {record.number}: {rate['value']:.3f} by {who}",
            colour=colour,
        )
        for record in rounds
        for name, who, offset, colour in _RATES
        if (rate := record.policy.get(name))
    ]
    return Plot(
        title="Gold against proxy",
        note="Win rate over the policy of the round before: by gold (first colour) and by the round's own reward model "
        "(second). Where the second rises and the first does not, the reward model is being fooled.",
        x_name="round",
        points=tuple(points),
        thresholds=(Threshold(value=0.5, name="no better", kind="target"),),
        across=_across(1, rounds),
    )


def _gold(rounds: Sequence[RoundRecord]) -> Plot:
    first = rounds[0].policy.get("previous_gold")
    estimates = [(0, first)] + [(record.number, record.policy.get("gold")) for record in rounds]
    points = [
        Point(x=at, y=own["mean"], low=own["low"], high=own["high"], title=f"round {at}: {own['mean']:.3f}")
        for at, own in estimates
        if own
    ]
    return Plot(
        title="Mean of gold",
        note="What no training has seen, on the same prompts in every round; 0 is the first policy.",
        x_name="round",
        points=tuple(points),
        across=_across(0, rounds),
    )


def _across(first: int, rounds: Sequence[RoundRecord]) -> Axis:
    """Half a round more at either end: no dot lies on the frame."""
    return Axis(low=first - 0.5, high=rounds[-1].number + 0.5, is_whole=True)


def _lines(rounds: Sequence[RoundRecord], names: Mapping[str, str], *, title: str, note: str) -> Plot:
    series = [
        Series(name=words, colour=COLOURS[place], values=[record.policy.get(name) for record in rounds])
        for place, (name, words) in enumerate(names.items())
    ]
    return Plot(title=title, note=note, x_name="round", x=[record.number for record in rounds], series=tuple(series))


def _accuracies(rounds: Sequence[RoundRecord]) -> Plot:
    """A line for each set of held-out labels: one that falls is what the reward models forget."""
    sets = list(dict.fromkeys(name for record in rounds for name in record.reward.get("heldout", {})))
    series = [
        Series(
            name=name,
            colour=COLOURS[place % len(COLOURS)],
            values=[record.reward.get("heldout", {}).get(name, {}).get("accuracy") for record in rounds],
        )
        for place, name in enumerate(sets)
    ]
    return Plot(
        title="Accuracy on held-out labels",
        note="Of each round's reward model, on the held-out labels of every round so far.",
        x_name="round",
        x=[record.number for record in rounds],
        series=tuple(series),
    )


def _table(rounds: Sequence[RoundRecord]) -> list[tuple[str, str, list[tuple[str, bool]]]]:
    """A line for each check: its name, its limit, and by round the value and whether it failed."""
    over = [record for record in rounds if record.figures]
    by_round = [{check["name"]: check for check in record.figures.get("checks", ())} for record in over]
    names = list(dict.fromkeys(name for checks in by_round for name in checks))
    return [(_name(name), _limit(name, by_round), [_cell(checks.get(name)) for checks in by_round]) for name in names]


def _name(name: str) -> str:
    kind, _, held_out = name.partition(" ")
    return f"accuracy lost on {held_out}'s held-out labels" if kind == "forgetting" else _NAMES.get(name, name)


def _limit(name: str, by_round: Sequence[Mapping[str, Any]]) -> str:
    limits = [checks[name]["limit"] for checks in by_round if name in checks]
    return number(limits[-1], 2) if limits and limits[-1] is not None else number(None)


def _cell(check: Mapping[str, Any] | None) -> tuple[str, bool]:
    return (number(None), False) if check is None else (number(check["value"]), bool(check["has_failed"]))
