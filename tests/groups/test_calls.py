"""Calls of a driver to the workers of a group: one order, numbers, errors, hangs, and records on their way."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from tests.groups.threads import ThreadWorkers

from kedge.core.errors import DataError, GroupLost, ProcessError, ProcessLost
from kedge.core.records import Experience, Prompts, Rollouts
from kedge.runtime.groups import Group, ThreadedRuntime
from kedge.runtime.local import Clock
from kedge.runtime.worker import Note, Reply, RoleWorker, packed, unpacked
from kedge.testing.contracts.roles import assert_same_state, example_experience, example_rollouts


class Part:
    """Notes what it was asked, and does what a test asks for."""

    def __init__(self) -> None:
        self.asked: list[Any] = []

    def note(self, value: Any) -> Any:
        self.asked.append(value)
        return value

    def do(self, action: Callable[[], Any]) -> Any:
        return action()


def group_of(*parts: Part, timeout_s: float = 30.0, workers: Any = None, stacks: Path | None = None) -> Group:
    serving = [
        RoleWorker({"part": part}, rank=rank, stacks=stacks, timeout_s=timeout_s) for rank, part in enumerate(parts)
    ]
    own = (workers or ThreadWorkers)(serving)
    return Group("learner", own, timeout_s=timeout_s, notes=SimpleQueue[Note](), stacks=stacks or Path("stacks"))


class Dawdling(ThreadWorkers):
    """Calls take their time on the way, and the way to each worker another one."""

    def call(self, rank: int, *arguments: Any) -> tuple[Future[Reply], Any]:
        time.sleep(random.random() / 2000)
        return super().call(rank, *arguments)


class WithoutLock:
    """A group that hands out calls without waiting for others to do so."""

    def __enter__(self) -> None: ...
    def __exit__(self, *_: object) -> None: ...


def gather_from_threads(group: Group, count: int) -> list[BaseException]:
    """So many calls from four threads at once; what they raised."""
    runtime, errors = ThreadedRuntime(Clock()), list[BaseException]()

    def ask(thread: int) -> None:
        for number in range(count // 8):
            try:
                first, second = runtime.gather(
                    lambda: group.ask("part", "note", (thread, number, "a")),  # noqa: B023
                    lambda: group.ask("part", "note", (thread, number, "b")),  # noqa: B023
                )
                assert (first, second) == ((thread, number, "a"), (thread, number, "b"))
            except BaseException as error:
                errors.append(error)

    threads = [threading.Thread(target=ask, args=(thread,)) for thread in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


def test_a_thousand_gathered_calls_from_four_threads_come_to_all_workers_in_one_order() -> None:
    parts = [Part(), Part(), Part()]
    assert gather_from_threads(group_of(*parts, workers=Dawdling), 1000) == []
    assert len(parts[0].asked) == 1000
    assert parts[0].asked == parts[1].asked == parts[2].asked


def test_without_the_lock_workers_refuse_calls_that_are_out_of_order() -> None:
    group = group_of(Part(), Part(), workers=Dawdling)
    group._lock = WithoutLock()  # type: ignore[assignment]
    errors = gather_from_threads(group, 400)
    assert any("is due: the calls of a group have one order" in str(error) for error in errors), errors[:3]


def test_a_worker_refuses_a_gap_and_all_that_follows() -> None:
    part = Part()
    worker = RoleWorker({"part": part}, rank=1)

    def call(number: int) -> BaseException | None:
        return worker.call(number, "part", "note", ((number,), {}))[0].error

    assert call(0) is None
    refused = call(2)
    assert isinstance(refused, ProcessError)
    assert (
        str(refused) == "call 2 (part.note) came to process 1 where call 1 is due: the calls of a group have one order"
    )
    assert call(3) is not None
    assert call(1) is None
    assert part.asked == [0, 1]


def test_independent_groups_are_asked_at_the_same_time() -> None:
    meeting = threading.Barrier(2, timeout=20)  # passed only where both are there
    first, second = group_of(Part()), group_of(Part())
    clock = Clock()
    runtime = ThreadedRuntime(clock)
    runtime.gather(lambda: first.ask("part", "do", meeting.wait), lambda: second.ask("part", "do", meeting.wait))
    assert "judge" in clock.take()
    runtime.gather(lambda: first.ask("part", "note", 1), phase="update")
    assert "judge" not in clock.take()


def test_the_error_of_a_worker_has_its_own_words_and_the_group_goes_on_where_all_have_it() -> None:
    def refuse() -> None:
        raise DataError("row 3 has no answer")

    group = group_of(Part(), Part())
    with pytest.raises(DataError, match=r"^row 3 has no answer$"):
        group.ask("part", "do", refuse)
    assert group.ask("part", "note", 5) == 5


def test_an_error_of_one_worker_alone_ends_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = iter((True, False))

    def fail_once() -> None:
        if next(calls):
            raise ValueError("planted")

    group = group_of(Part(), Part())
    with pytest.raises(ValueError, match="planted") as raised:
        group.ask("part", "do", fail_once)
    assert "in fail_once" in raised.value.__notes__[0], "where it came from is lost"
    assert group.is_over
    with pytest.raises(ValueError, match="planted"):
        group.ask("part", "note", 1)


def test_workers_that_compute_unlike_metrics_are_refused() -> None:
    numbers = iter((0.25, 0.5))
    group = group_of(Part(), Part())
    with pytest.raises(ProcessError, match=r"part.do gave \{'loss': 0\..*what differs between them changes the model"):
        group.ask("part", "do", lambda: {"loss": next(numbers)})


def test_a_lost_worker_is_told_before_what_the_others_say_of_it() -> None:
    group = group_of(Part(), Part())
    group.workers._falls.append(("part", "do"))  # type: ignore[attr-defined]
    with pytest.raises(GroupLost, match=r"process \d of group learner was lost \(SIGKILL\)"):
        group.ask("part", "do", lambda: None)
    assert group.is_over


def test_a_worker_that_cannot_reach_the_others_is_a_lost_group() -> None:
    def cut() -> None:
        raise ProcessLost("process 0 cannot reach the others any more: reset by peer")

    with pytest.raises(GroupLost, match="cannot reach the others any more"):
        group_of(Part()).ask("part", "do", cut)


def test_who_hangs_is_named_and_leaves_its_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kedge.runtime.groups._STACKS_S", 0.2)
    is_over = threading.Event()

    def hang_here() -> None:
        is_over.wait(20)

    group = group_of(Part(), timeout_s=0.3, stacks=tmp_path / "stacks")
    with pytest.raises(ProcessError, match=r"group learner: process 0 did not answer part.do within 0.3 s; .*stacks"):
        group.ask("part", "do", hang_here)
    is_over.set()
    assert "in hang_here" in (tmp_path / "stacks/rank-0.txt").read_text()


def test_a_call_that_waits_for_another_does_not_hang() -> None:
    group = group_of(Part(), timeout_s=0.5)
    calls = [group.submit("part", "do", lambda: time.sleep(0.3)) for _ in range(3)]
    for call in calls:
        call.wait()


def test_a_gathering_waits_for_all_calls_and_tells_the_lost_group_first() -> None:
    done = list[int]()

    def slow() -> None:
        time.sleep(0.2)
        done.append(1)

    def fail() -> None:
        raise DataError("planted")

    def lose() -> None:
        raise GroupLost("critic", 0, "SIGKILL")

    with pytest.raises(GroupLost):
        ThreadedRuntime(Clock()).gather(fail, lose, slow)
    assert done == [1]


def test_records_and_states_arrive_as_they_were() -> None:
    rollouts = example_rollouts()
    experience = example_experience(rollouts)
    prompts = Prompts(tokens=((1, 2), (3,)), group=(0, 1), answer=(0, 0))
    state = {
        "weights": {"a": torch.arange(3.0), "half": torch.tensor([1.5, -2.0], dtype=torch.bfloat16)},
        "moments": [torch.zeros(0), torch.tensor(7, dtype=torch.int32), (torch.tensor([True, False]), None, "text", 3)],
    }
    arrived = unpacked(packed(((experience, prompts, state), {"per": "token"})))
    (back, asked, again), named = arrived
    assert isinstance(back, Experience)
    assert isinstance(back.rollouts, Rollouts)
    assert torch.equal(back.rollouts.tokens_BT, rollouts.tokens_BT)
    assert back.rollouts.version == rollouts.version
    assert torch.equal(back.advantages_BT, experience.advantages_BT)
    assert back.weight_BT is None
    assert asked == prompts
    assert named == {"per": "token"}
    assert_same_state(again, state, "state")
    back.advantages_BT.zero_()  # what arrives may be written to, and is nobody else's
    assert experience.advantages_BT.any()


def test_the_result_of_one_group_goes_to_another_without_the_driver() -> None:
    first, second = group_of(Part()), group_of(Part())
    call = first.submit("part", "note", {"weight": torch.ones(2)})
    call.wait()
    assert torch.equal(second.ask("part", "note", carried=call.handle)["weight"], torch.ones(2))


def test_a_future_is_served_while_the_driver_goes_on() -> None:
    group, gate = group_of(Part()), threading.Event()
    future = group.future(group.submit("part", "do", lambda: gate.wait(20)))
    assert not future.done()
    gate.set()
    assert future.result() is True


def test_events_and_seconds_of_process_0_come_with_the_reply() -> None:
    notes = [Note(level="info", code="x", message="words", evidence={})]
    worker = RoleWorker({"part": Part()}, notes=notes)
    told = SimpleQueue[Note]()
    group = Group("judge", ThreadWorkers([worker]), timeout_s=5.0, notes=told)
    group.ask("part", "do", lambda: time.sleep(0.05))
    assert told.get_nowait().message == "words"
    assert told.empty()
    assert group.take_busy() >= 0.05
    assert group.take_busy() == 0.0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(group.ask, "part", "note", 2).result() == 2
