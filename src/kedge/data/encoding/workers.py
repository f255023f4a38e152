"""The processes that turn examples into tokens, and what they say to each other.

A worker reads from its standard input: first an encoder, then lists of examples, and answers each list with a record
batch. It ends when its input does, so that none outlives a run that was killed. Workers are started anew rather than
forked or by `multiprocessing`: a fork of a process with threads may hang, and a script of a user would be run again.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, islice
from queue import SimpleQueue
from typing import IO, Any, ClassVar, Protocol, TypeVar, cast

import pyarrow as pa

from kedge.core.errors import KedgeError
from kedge.data.encoding.store import Columns, record_batch

ItemT_contra = TypeVar("ItemT_contra", contravariant=True)
ItemT = TypeVar("ItemT")

CHUNK_ITEMS = 512
"""Examples that go to a worker at once: the more, the more words they share."""
ALONE_ITEMS = 4096
"""So many examples are encoded before workers are started, which takes seconds."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Why there is no row of an example, and where it stands."""

    reason: str
    where: str
    length: int = 0
    """In tokens, of one that is too long."""


class RowEncoder(Protocol[ItemT_contra]):
    """From examples to the row that is kept of each, or to the reason why none is. It can be pickled."""

    columns: ClassVar[Columns]

    def __call__(self, items: Sequence[ItemT_contra], /) -> Sequence[Mapping[str, Any] | LeftOut]: ...


@dataclass(slots=True)
class EncodedBatch:
    """The rows of one list of examples, and those that have none."""

    rows: pa.RecordBatch
    left_out: list[LeftOut]


def encode_batch(encoder: RowEncoder[ItemT], items: Sequence[ItemT]) -> EncodedBatch:
    results = encoder(items)
    rows = [row for row in results if not isinstance(row, LeftOut)]
    return EncodedBatch(
        rows=record_batch(rows, encoder.columns), left_out=[row for row in results if isinstance(row, LeftOut)]
    )


def encode_all(
    items: Iterable[ItemT], encoder: RowEncoder[ItemT], *, num_workers: int | None = None
) -> Iterator[EncodedBatch]:
    """All examples in their order; many of them by as many processes as there are cores.

    The error that comes first in the order of the examples is raised, as if one process had read them.
    """
    workers = num_cores() if num_workers is None else num_workers
    chunks = _chunks(items)
    for chunk in islice(chunks, ALONE_ITEMS // CHUNK_ITEMS):
        yield encode_batch(encoder, chunk)
    first = next(chunks, None)
    if first is None:
        return
    rest = chain([first], chunks)
    if workers == 1:
        yield from (encode_batch(encoder, chunk) for chunk in rest)
    else:
        yield from _by_workers(rest, encoder, workers)


def num_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _chunks(items: Iterable[ItemT]) -> Iterator[list[ItemT]]:
    iterator = iter(items)
    while chunk := list(islice(iterator, CHUNK_ITEMS)):
        yield chunk


def _by_workers(chunks: Iterable[list[ItemT]], encoder: RowEncoder[ItemT], count: int) -> Iterator[EncodedBatch]:
    with ExitStack() as stack:
        free: SimpleQueue[_Worker] = SimpleQueue()
        for _ in range(count):
            free.put(stack.enter_context(_Worker(encoder)))
        pool = stack.enter_context(ThreadPoolExecutor(count))

        def ask(chunk: list[ItemT]) -> EncodedBatch:
            worker = free.get()
            try:
                return worker.encode(chunk)
            finally:
                free.put(worker)

        in_flight: deque[Future[EncodedBatch]] = deque()
        stack.callback(lambda: [future.cancel() for future in in_flight])
        problem: Exception | None = None
        reading = iter(chunks)
        while True:
            try:
                chunk = next(reading, None)
            except Exception as error:  # what was read before it comes first
                chunk, problem = None, error
            if chunk is None:
                break
            in_flight.append(pool.submit(ask, chunk))
            if len(in_flight) > 2 * count:
                yield in_flight.popleft().result()
        while in_flight:
            yield in_flight.popleft().result()
        if problem is not None:
            raise problem


class _Worker:
    """A process that encodes; as a context it is ended when it is left."""

    def __init__(self, encoder: RowEncoder[Any]) -> None:
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        # Not with -m: the module would be there twice then, under two names.
        command = [sys.executable, "-c", f"from {__name__} import work; work()"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=_with_own_path(environment)
        )
        self._encoder: RowEncoder[Any] | None = encoder

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def encode(self, items: Sequence[Any]) -> EncodedBatch:
        stdin, stdout = cast("IO[bytes]", self._process.stdin), cast("IO[bytes]", self._process.stdout)
        try:
            if self._encoder is not None:
                pickle.dump(self._encoder, stdin, protocol=5)
                self._encoder = None
            pickle.dump(items, stdin, protocol=5)
            stdin.flush()
            answer = pickle.load(stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError) as error:
            code = self._process.wait()
            how = f"was killed (signal {-code}; was memory short?)" if code < 0 else f"ended with exit code {code}"
            raise KedgeError(f"a process that turns text into tokens {how}; try again") from error
        if isinstance(answer, Exception):
            raise answer
        return EncodedBatch(rows=answer[0], left_out=answer[1])


def _with_own_path(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment with the paths that this process imports from: parts of users may be among them."""
    return {**environment, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    """What a worker does until its input ends."""
    encoder: RowEncoder[Any] = pickle.load(stdin)
    gc.freeze()  # what is there now stays: the collector need not walk through it again and again
    while True:
        try:
            items = pickle.load(stdin)
        except EOFError:
            return
        try:
            batch = encode_batch(encoder, items)
            answer: Any = (batch.rows, batch.left_out)
        except Exception as error:
            answer = error
        pickle.dump(answer, stdout, protocol=5)
        stdout.flush()


def work() -> None:
    """The whole of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks; its end is theirs
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints must not come between the answers
    serve(sys.stdin.buffer, answers)
