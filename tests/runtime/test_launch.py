"""The launcher with processes that need no torch: how they ended, whom signals reach, and who is stopped."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path

import failures
import pytest

from kedge.commands import run as commands_run
from kedge.core.errors import ConfigError
from kedge.recipe.schema import load_recipe
from kedge.runtime.launch import Ending, run_processes
from kedge.runtime.processes import Place, first_host, place_of


def launch(code: str, size: int = 2) -> Ending:
    start = "import os, signal, sys, time\nrank = int(os.environ['RANK'])\n"
    return run_processes([sys.executable, "-c", start + code], size, attempt=0)


def test_all_that_end_well_end_well() -> None:
    ending = launch("assert os.environ['WORLD_SIZE'] == '3'", size=3)
    assert (ending.code, ending.lost, ending.last_words) == (0, None, "")


def test_a_killed_process_stops_the_others_at_once_and_is_named_with_its_last_words() -> None:
    since = time.monotonic()
    ending = launch(
        "if rank:\n    print('out of memory', file=sys.stderr, flush=True)\n    os.kill(os.getpid(), 9)\ntime.sleep(60)"
    )
    assert time.monotonic() - since < 20
    assert ending.lost is not None
    assert (ending.lost.rank, ending.lost.signal, ending.lost.last_words) == (1, "SIGKILL", "out of memory")


@pytest.mark.parametrize(
    ("codes", "code", "words"),
    [
        ((3, 3), 3, ""),  # both say the same, and process 0 has said it
        ((76, 2), 2, "process 1 has failed"),  # process 0 only ended because of the other one
        ((2, 76), 2, ""),
        ((1, 2), 1, ""),
    ],
)
def test_the_exit_code_is_that_of_who_failed(codes: tuple[int, int], code: int, words: str) -> None:
    ending = launch(
        f"print(f'process {{rank}} has failed', file=sys.stderr if rank else open(os.devnull, 'w'))\n"
        f"sys.exit({codes}[rank])"
    )
    assert (ending.lost, ending.code, ending.last_words) == (None, code, words)


def test_a_signal_reaches_all_and_nobody_is_cut_off_while_it_saves(tmp_path: Path) -> None:
    code = (
        "def save(*_):\n    time.sleep(1 - rank)\n    open(f'{rank}', 'w').close()\n    sys.exit(130)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "open(f'ready-{rank}', 'w').close()\ntime.sleep(60)"
    )
    before = Path.cwd()
    os.chdir(tmp_path)

    def send() -> None:
        while not all((tmp_path / f"ready-{rank}").exists() for rank in range(2)):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        ending = launch(code)
    finally:
        os.chdir(before)
        sender.join()
    assert (ending.code, ending.lost, ending.is_asked) == (130, None, True)
    assert (tmp_path / "0").exists()
    assert (tmp_path / "1").exists()


def test_places_are_read_from_the_environment_of_the_launcher() -> None:
    assert place_of({}) is None
    assert place_of({"RANK": "0", "WORLD_SIZE": "1"}) is None
    assert place_of({"SLURM_NTASKS": "8", "SLURM_PROCID": "0"}) is None  # inside of sbatch, without srun
    torchrun = {"RANK": "3", "LOCAL_RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a", "MASTER_PORT": "5"}
    assert place_of(torchrun) == Place(rank=3, size=4, local_rank=1, address="a", port=5)
    with pytest.raises(ValueError, match="MASTER_ADDR"):
        place_of({"RANK": "0", "WORLD_SIZE": "2"})
    assert first_host("node007") == "node007"


def test_a_process_without_a_gpu_of_its_number_says_how_srun_hides_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(commands_run, "gpus_of", lambda _: 1)
    recipe = load_recipe(failures.write_recipe(tmp_path))
    with pytest.raises(ConfigError, match=r"number 1 on .* torch finds 1 GPU\(s\): .* --gpu-bind=none, not --gpus-per"):
        commands_run.run_placed(recipe, tmp_path, is_resumed=False, command=[], check=_never, run=_never, say=_never)


def _never(*_: object, **__: object) -> None:
    raise AssertionError("nothing was to be started")
