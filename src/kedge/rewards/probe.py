"""Calls a reward function once on made-up answers, in a child process with a time limit, before anything is trained.

Whatever the function does (it cannot be imported, raises, hangs, exits, kills its process, returns the wrong thing) is
one sentence here, with the file and the line where it can be known. Left out: functions that a script handed over,
which live in the script's process.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

from kedge.core.answers import Answer
from kedge.core.errors import KedgeError
from kedge.rewards.context import RewardContext
from kedge.rewards.failures import ScoreResult, results_of
from kedge.rewards.function import load_function, make, source
from kedge.rewards.settings import FunctionSource

TIME_LIMIT_S = 60.0
"""For importing the file and one call: a function that needs longer for two answers would take hours in a run."""
_ASK_WHERE: Final = signal.SIGUSR1
_STACK_S: Final = 0.5
"""For a function that hangs to say where it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What came of the call."""

    failure: str = ""
    """Why the function cannot be used; empty where it can."""
    scores: tuple[float | None, ...] = ()
    """What the answers scored; None where one has no score."""
    reasons: tuple[str, ...] = ()
    """Why answers have no score."""


def probe(
    settings: FunctionSource,
    answers: Sequence[Answer],
    *,
    folder: Path,
    fields: Collection[str] | None,
) -> Probe:
    """Import the function of `settings` and score `answers` with it, in a child process."""
    timeout_s = TIME_LIMIT_S
    request = {
        "path": settings.path,
        "options": settings.options,
        "folder": str(folder),
        "fields": None if fields is None else sorted(fields),
        "answers": [asdict(answer) for answer in answers],
    }
    with tempfile.TemporaryFile() as reply, tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(
            [sys.executable, "-c", f"from kedge.rewards.probe import child; child({reply.fileno()})"],
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=printed,
            pass_fds=(reply.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)},
            start_new_session=True,
        )
        try:
            process.communicate(json.dumps(request, default=str).encode(), timeout=timeout_s)
        except subprocess.TimeoutExpired:
            _ask_for_stack(process)
            _kill(process)
            where = _stack_place(_text(printed), settings.path)
            return Probe(failure=f"{settings.path} did not end within {timeout_s:g} s{where}")
        text = _text(reply)
        if not text:
            return Probe(failure=f"{settings.path} {_ending(process.returncode)}{_last_line(_text(printed))}")
    told: dict[str, Any] = json.loads(text)
    return Probe(failure=told["failure"], scores=tuple(told["scores"]), reasons=tuple(told["reasons"]))


def child(reply: int) -> None:
    """What the child process does: the request comes on standard input, the outcome goes to the file `reply`."""
    faulthandler.register(_ASK_WHERE)
    outcome = _outcome(json.loads(sys.stdin.buffer.read()))
    os.write(reply, json.dumps(asdict(outcome)).encode())
    sys.stdout.flush()
    os._exit(0)  # threads that the function started do not keep the process


def _outcome(request: dict[str, Any]) -> Probe:
    settings = FunctionSource(kind="function", path=request["path"], options=request["options"])
    fields = None if request["fields"] is None else frozenset(cast("list[str]", request["fields"]))
    context = RewardContext(folder=Path(request["folder"]), seed=0, fields=fields)
    answers = [
        Answer(
            prompt=tuple((role, content) for role, content in row["prompt"]),
            text=row["text"],
            is_finished=row["is_finished"],
            solution=row["solution"],
            extra=row["extra"],
        )
        for row in request["answers"]
    ]
    file = str(context.folder / settings.path.rpartition(":")[0])
    raised: list[str] = []
    try:
        results = _scored(settings, context, answers, raised, file)
    except KedgeError as error:
        return Probe(failure=str(error))
    except BaseException as error:
        return Probe(failure=f"{settings.path} raised {_described(error)}{_place(error, file)}")
    if raised and not any(result.is_scored for result in results):
        return Probe(failure=f"{settings.path} {raised[0]}")
    return Probe(
        scores=tuple(result.score if result.is_scored else None for result in results),
        reasons=tuple(dict.fromkeys([*raised, *(result.reason for result in results if result.reason)])),
    )


def _scored(
    settings: FunctionSource, context: RewardContext, answers: Sequence[Answer], raised: list[str], file: str
) -> list[ScoreResult]:
    _, colon, name = settings.path.rpartition(":")
    if not colon:
        return results_of(make(settings, context), answers, name=settings.path)
    function = _noting(load_function(Path(file), name), raised, file)
    text_source = source(function, name=settings.path, options=settings.options, fields=context.fields)
    return text_source.judge(answers)


def _noting(function: Callable[..., Any], raised: list[str], file: str) -> Callable[..., Any]:
    """The same function; what it raises is noted with its line, which a run counts without."""

    @functools.wraps(function)
    def noted(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except SystemExit as error:
            raised.append(f"ends the program: sys.exit({error.code!r}){_place(error, file)}")
            raise
        except Exception as error:
            raised.append(f"raised {_described(error)}{_place(error, file)}")
            raise

    return noted


def _described(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _place(error: BaseException, file: str) -> str:
    """The innermost line of the user's file that the error passed through."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return f" ({file}, line {lines[-1]})" if lines else ""


def _stack_place(printed: str, path: str) -> str:
    """The innermost line of the user's file in the stack that a function which hangs was asked for."""
    file = Path(path.rpartition(":")[0]).name
    lines = [match for match in re.findall(r'File "([^"]+)", line (\d+)', printed) if Path(match[0]).name == file]
    return f"; it was at {lines[0][0]}, line {lines[0][1]}" if file and lines else ""


def _ending(code: int) -> str:
    if code < 0:
        return f"killed its process with {signal.Signals(-code).name}"
    return f"ended its process with exit code {code}"


def _last_line(printed: str) -> str:
    lines = printed.strip().splitlines()
    return f"; the last that it printed: {lines[-1][:200]}" if lines else ""


def _text(file: Any) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def _ask_for_stack(process: subprocess.Popen[bytes]) -> None:
    """Let the process print where it is."""
    process.send_signal(_ASK_WHERE)
    with suppress(subprocess.TimeoutExpired):
        process.wait(_STACK_S)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """The process, and what it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
