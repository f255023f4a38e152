"""What every tracker promises (`kedge.core.protocols.Tracker`), as tests that a plugin subclasses.

    class TestMyTracker(TrackerContract):
        def make(self, folder):
            return MyTracker(folder)

        def logged(self, folder):
            return [(row.step, row.name, row.value) for row in read_back(folder)]

Left out: what becomes of events, because trackers differ in which of them they show and where.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_args

from kedge.core.findings import Finding, Level
from kedge.core.protocols import Metrics, Tracker

LoggedValue = tuple[int, str, float]
"""Step, name and value of a metric."""

LEVELS: tuple[Level, ...] = get_args(Level)


def example_event(level: Level = "warning", *, step: int | None = 3, message: str = "KL is 7.1 nats") -> dict[str, Any]:
    evidence = {"kl": 7.1, "share": math.nan, "metrics": ["kl/mean"], "limits": {"kl": None}}
    return {"level": level, "code": "kl.over_target", "message": message, "step": step, "evidence": evidence}


class TrackerContract:
    """The tests. A subclass gives `make` and `logged`; pytest makes a new instance of it for each test."""

    def make(self, folder: Path) -> Tracker:
        """A new tracker, which may write below `folder`."""
        raise NotImplementedError

    def logged(self, folder: Path) -> Iterable[LoggedValue]:
        """All metrics that the tracker has received so far; called after it was closed."""
        raise NotImplementedError

    def test_metrics_arrive_under_their_names_and_steps(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.log({"reward/mean": 0.5, "kl/mean": -0.25}, step=1)
        tracker.log({"reward/mean": 0.75, "length/max": 64}, step=2)
        tracker.close()
        expected = [(1, "kl/mean", -0.25), (1, "reward/mean", 0.5), (2, "length/max", 64.0), (2, "reward/mean", 0.75)]
        assert self._sorted(tmp_path) == expected, "metrics are missing, changed, or under another name or step"

    def test_a_step_may_be_logged_in_parts(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.log({"train/loss": 1.5}, step=4)
        tracker.log({"heldout/loss": 2.0}, step=4)
        tracker.close()
        assert self._sorted(tmp_path) == [(4, "heldout/loss", 2.0), (4, "train/loss", 1.5)], "a part of step 4 is lost"

    def test_steps_may_go_back(self, tmp_path: Path) -> None:
        """A run that breaks its KL budget goes back to a checkpoint and logs the steps after it again."""
        tracker = self.make(tmp_path)
        for step, loss in ((5, 1.0), (6, 2.0), (5, 4.0)):
            tracker.log({"train/loss": loss}, step=step)
        tracker.close()
        assert (5, "train/loss", 4.0) in self._sorted(tmp_path), "the second value of step 5 is lost"

    def test_no_metrics_are_no_error(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.log({}, step=1)
        tracker.close()
        assert self._sorted(tmp_path) == [], "metrics arrived that were never logged"

    def test_numbers_that_are_not_finite_raise_nothing_and_take_no_others_along(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        for step, value in enumerate((math.nan, math.inf, -math.inf), start=1):
            tracker.log({"policy/loss": value, "reward/mean": 0.5}, step=step)
        tracker.close()
        finite = [(step, name, value) for step, name, value in self._sorted(tmp_path) if name == "reward/mean"]
        assert finite == [(step, "reward/mean", 0.5) for step in (1, 2, 3)], "finite metrics beside a NaN are lost"

    def test_events_of_all_levels_are_taken(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        for level in LEVELS:
            tracker.event(example_event(level))
            tracker.event(example_event(level, step=None))
            tracker.event({"level": level, "code": "run.resumed", "message": "neither a step nor evidence"})
            tracker.event(Finding(level=level, code="pairs.identical", message="a finding", fix="drop them").as_dict())
        tracker.close()

    def test_messages_may_be_long_and_hold_any_text(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        for message in ("", "two\nlines\tand a tab", "żółć 日本語 🙂 \u202e", "**bold** <b> {x} %s \\", "long " * 5000):
            tracker.event(example_event(message=message))
        tracker.close()

    def test_what_it_is_given_stays_as_it_was(self, tmp_path: Path) -> None:
        metrics: dict[str, float] = {"reward/mean": 0.5, "kl/mean": -0.25}
        event = example_event()
        given: list[Mapping[str, Any]] = [metrics, event]
        before = repr(deepcopy(given))  # NaN is not equal to itself
        tracker = self.make(tmp_path)
        tracker.log(metrics, step=1)
        tracker.event(event)
        tracker.close()
        assert repr(given) == before, "the tracker changed the metrics or the event of its caller"

    def test_any_mapping_will_do(self, tmp_path: Path) -> None:
        metrics: Metrics = MappingProxyType({"reward/mean": 0.5})
        event = example_event()
        tracker = self.make(tmp_path)
        tracker.log(metrics, step=1)
        tracker.event(MappingProxyType({**event, "evidence": MappingProxyType(event["evidence"])}))
        tracker.close()
        assert self._sorted(tmp_path) == [(1, "reward/mean", 0.5)], "metrics of a read-only mapping are lost"

    def test_later_changes_of_the_caller_do_not_reach_it(self, tmp_path: Path) -> None:
        """A tracker that writes in the background needs a copy: callers may use the same dict again."""
        metrics: dict[str, float] = {"reward/mean": 0.5}
        tracker = self.make(tmp_path)
        tracker.log(metrics, step=1)
        metrics |= {"reward/mean": 9.0, "kl/mean": 9.0}
        tracker.close()
        assert self._sorted(tmp_path) == [(1, "reward/mean", 0.5)], "the tracker kept the dict instead of its values"

    def test_it_answers_nothing(self, tmp_path: Path) -> None:
        """A tracker never decides anything: a loop reads nothing from it."""
        tracker: Any = self.make(tmp_path)
        answers = (tracker.log({"reward/mean": 0.5}, step=1), tracker.event(example_event()), tracker.close())
        assert answers == (None, None, None), "log, event and close return None"

    def test_closing_twice_is_harmless(self, tmp_path: Path) -> None:
        tracker = self.make(tmp_path)
        tracker.log({"reward/mean": 0.5}, step=1)
        tracker.event(example_event("fatal"))
        tracker.close()
        tracker.close()
        assert self._sorted(tmp_path) == [(1, "reward/mean", 0.5)], "closing again changed what was logged"

    def test_a_tracker_that_was_not_used_can_be_closed(self, tmp_path: Path) -> None:
        self.make(tmp_path).close()
        assert self._sorted(tmp_path) == [], "metrics arrived that were never logged"

    def _sorted(self, folder: Path) -> list[LoggedValue]:
        return sorted(self.logged(folder), key=lambda row: row[:2])
