# pyright: reportMissingImports=false
"""Groups of roles as actors of Ray: the one file that knows it.

A run joins the cluster of RAY_ADDRESS (`ray job submit` sets it), or starts one of its own on this machine, offline and
without a dashboard, and ends that with itself. Every process of a group is an actor in a bundle of the placement group
of its group: on one machine where one has room for all, else on as few as possible. Left out: actors that Ray restarts
by itself, which would come back without their state.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
from collections.abc import Generator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from kedge.core.errors import ConfigError, PluginError
from kedge.core.urls import redacted
from kedge.runtime.groups import Groups
from kedge.runtime.worker import GroupLayout, Reply, make_worker

_ADDRESS: Final = "RAY_ADDRESS"
_OFFLINE: Final = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # an actor without a GPU sees what the machine has
    "RAY_DEDUP_LOGS": "0",
}
_ANSWER_S: Final = 10.0
"""How long somebody may take to answer at the address of a cluster."""
_ROOM_S: Final = 60.0
"""How long a cluster may take to find room for a group, which others may be leaving."""


def missing_ray() -> str | None:
    """What to do where Ray is not installed; None where it is."""
    return None if find_spec("ray") else "placement.groups needs Ray, which is not installed: pip install 'kedge[ray]'"


@contextmanager
def ray_groups(layout: Sequence[GroupLayout], *, device: str, timeout_s: float, restarts: int) -> Generator[Groups]:
    """The groups of a run. Nothing is started before the first one is opened."""
    if (problem := missing_ray()) is not None:
        raise PluginError(problem)
    cluster = _Cluster(layout, device=device, timeout_s=timeout_s)
    groups = Groups(
        {group.name: group for group in layout},
        cluster.start,
        timeout_s=timeout_s,
        restarts=restarts,
        end=cluster.close,
    )
    try:
        yield groups
    finally:
        groups.close()


def cluster_lacks(num_processes: int, *, device: str, num_gpus: int | None, most_on_cpu: int) -> str | None:
    """Why the cluster has no room for so many processes; None where it has. Without RAY_ADDRESS it will be this
    machine, with its `num_gpus`, or, where that is None, with a CPU for each of `most_on_cpu` processes."""
    if _ADDRESS not in os.environ:
        if num_gpus is not None:
            return _lacks({"GPU": num_gpus}, num_processes, device="cuda")
        if num_processes <= most_on_cpu:
            return None
        return f"the groups have {num_processes:,} processes together, on the CPU of one machine; at most {most_on_cpu}"
    import ray

    with _connected(0, device=device):
        return _lacks(ray.cluster_resources(), num_processes, device=device)


def _lacks(resources: Mapping[str, float], num_processes: int, *, device: str) -> str | None:
    """
    >>> _lacks({"CPU": 64.0, "GPU": 4.0}, 7, device="auto")
    'the groups have 7 GPUs together, and the cluster has 4'
    >>> _lacks({"CPU": 4.0}, 7, device="cpu")
    'the groups have 7 processes together, each on a CPU, and the cluster has 4'
    """
    gpus, cpus = int(resources.get("GPU", 0)), int(resources.get("CPU", 0))
    if device == "cuda" or (device == "auto" and gpus):
        is_enough = num_processes <= gpus
        return None if is_enough else f"the groups have {num_processes} GPUs together, and the cluster has {gpus}"
    if num_processes <= cpus:
        return None
    return f"the groups have {num_processes} processes together, each on a CPU, and the cluster has {cpus}"


@contextmanager
def _connected(num_processes: int, *, device: str) -> Generator[None]:
    """Within, this process is the driver of a cluster. Signals stay with whoever has them."""
    import ray

    place = os.environ.get(_ADDRESS)
    own: dict[str, Any] = {}
    if place is None:
        cores = max(num_processes, os.cpu_count() or 1)  # actors on a CPU share its cores
        own = {"address": "local", "num_cpus": cores, "include_dashboard": False}
        own |= {"num_gpus": 0} if device == "cpu" else {}
    else:
        _refuse_unreachable(place)
    os.environ.update({name: os.environ.get(name, value) for name, value in _OFFLINE.items()})
    with _signals_kept():
        try:
            ray.init(**own, logging_level=logging.ERROR, log_to_driver=False)
        except (ConnectionError, RuntimeError, ValueError) as error:
            where = f"the cluster at {place} ({_ADDRESS}) does not take us in" if place else "Ray cannot be started"
            raise ConfigError(f"placement.groups: {where}: {error}") from error
    try:
        yield
    finally:
        with _signals_kept():
            ray.shutdown()


def _refuse_unreachable(place: str) -> None:
    """An error within seconds where nobody is at an address: Ray itself would try for many minutes."""
    if place.startswith("ray://"):
        raise ConfigError(
            f"placement.groups: {_ADDRESS} is {place}, which is for Ray Client; the driver of groups runs inside of "
            "the cluster: ray job submit -- kedge run …"
        )
    if place.startswith(("http://", "https://")):
        raise ConfigError(
            f"placement.groups: {_ADDRESS} is {redacted(place)}, where a cluster takes jobs: ray job submit -- kedge "
            "run …; a driver joins at HOST:PORT of the head (6379)"
        )
    host, colon, port = place.rpartition(":")
    if not (colon and port.isdigit()):  # auto and local are found by Ray
        return
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S):
            pass
    except OSError as error:
        raise ConfigError(f"placement.groups: nobody answers at {place} ({_ADDRESS}): {error}") from error


@contextmanager
def _signals_kept() -> Generator[None]:
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Cluster:
    """Connected when the first group is started."""

    def __init__(self, layout: Sequence[GroupLayout], *, device: str, timeout_s: float) -> None:
        self._layout, self._device, self._timeout_s = layout, device, timeout_s
        self._stack = ExitStack()
        self._lock = threading.Lock()
        self._rooms: dict[str, Any] | None = None
        """The placement group of each group."""
        self._on_gpu = False

    def start(self, layout: GroupLayout, stacks: Path) -> RayWorkers:
        with self._lock:
            room = self._room(layout)
        return RayWorkers(self._actors(layout, room, stacks))

    def close(self) -> None:
        self._stack.close()

    def _room(self, layout: GroupLayout) -> Any:
        """The bundles of a group, which outlive its actors."""
        if self._rooms is None:
            self._rooms = self._begin()
        room = self._rooms[layout.name]
        if not room.wait(timeout_seconds=_ROOM_S):
            raise ConfigError(
                f"placement.groups.{layout.name}: the cluster found no room for {layout.size} process(es) within "
                f"{_ROOM_S:g} s; others may be using it (ray status)"
            )
        return room

    def _begin(self) -> dict[str, Any]:
        """Join the cluster and ask for the bundles of all groups, the largest first: small ones would cut up machines
        that a large one needs whole."""
        import ray
        from ray.util.placement_group import placement_group

        total = sum(group.size for group in self._layout)
        self._stack.enter_context(_connected(total, device=self._device))
        resources = ray.cluster_resources()
        if (problem := _lacks(resources, total, device=self._device)) is not None:
            raise ConfigError(f"placement.groups: {problem}")
        self._on_gpu = self._device == "cuda" or (self._device == "auto" and resources.get("GPU", 0) > 0)
        bundle = {"CPU": 1.0, "GPU": 1.0} if self._on_gpu else {"CPU": 1.0}
        groups = sorted(self._layout, key=lambda group: -group.size)
        return {group.name: placement_group([bundle] * group.size, strategy="PACK") for group in groups}

    def _actors(self, layout: GroupLayout, room: Any, stacks: Path) -> list[Any]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        kind: Any = ray.remote(num_cpus=1, num_gpus=1 if self._on_gpu else 0, max_restarts=0)(_Actor)
        seats = [
            PlacementGroupSchedulingStrategy(placement_group=room, placement_group_bundle_index=rank)
            for rank in range(layout.size)
        ]
        return [
            kind.options(scheduling_strategy=seat).remote(
                layout, rank, on_gpu=self._on_gpu, timeout_s=self._timeout_s, stacks=stacks
            )
            for rank, seat in enumerate(seats)
        ]


class RayWorkers:
    """The workers of a group as actors."""

    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors
        self.size = len(actors)

    def put(self, value: Any) -> Any:
        import ray

        return ray.put(value)

    def call(self, rank: int, number: int, part: str, verb: str, args: Any, carried: Any) -> tuple[Future[Reply], Any]:
        reply, result = self._actors[rank].call.options(num_returns=2).remote(number, part, verb, args, carried)
        return reply.future(), result

    def fetch(self, handle: Any) -> Any:
        import ray

        return ray.get(handle)

    def gone(self, error: BaseException) -> str | None:
        from ray import exceptions

        if not isinstance(error, exceptions.RayActorError | exceptions.ObjectLostError):
            return None
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        return next((line for line in lines if "exit" in line.lower() or "died" in line.lower()), lines[0])[:300]

    def kill(self) -> None:
        import ray

        for actor in self._actors:
            with suppress(Exception):  # it may be gone, and so may the cluster
                ray.kill(actor, no_restart=True)


class _Actor:
    """One process of a group."""

    def __init__(self, layout: GroupLayout, rank: int, **settings: Any) -> None:
        self._worker = make_worker(layout, rank, **settings)

    def call(self, number: int, part: str, verb: str, args: Any, carried: Any) -> tuple[Reply, Any]:
        return self._worker.call(number, part, verb, args, carried)
