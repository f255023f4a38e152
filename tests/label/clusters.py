"""A throw-away PostgreSQL: started from the installed programs, without a network, in a temporary folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import mkdtemp

ROOT = Path("/usr/lib/postgresql")


@dataclass
class Cluster:
    socket: Path
    _count: list[int] = field(default_factory=lambda: [0])

    def address(self, database: str) -> str:
        return f"postgresql://postgres@/{database}?host={self.socket}"

    def new_database(self) -> str:
        import psycopg

        self._count[0] += 1
        name = f"labels_{self._count[0]}"
        with psycopg.connect(f"host={self.socket} user=postgres dbname=postgres", autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name}")
        return self.address(name)


@contextmanager
def start_cluster(folder: str | None = None) -> Iterator[Cluster | None]:
    """The cluster while it runs, in memory unless a folder is given; None where PostgreSQL is not installed."""
    programs = sorted(ROOT.glob("*/bin/initdb"), key=lambda path: int(path.parts[-3]))
    if not programs:
        yield None
        return
    bin_folder = programs[-1].parent
    # A short path: the name of a socket is bounded.
    home = Path(mkdtemp(prefix="kedge-pg-", dir=folder or ("/dev/shm" if Path("/dev/shm").is_dir() else "/tmp")))
    # PostgreSQL refuses to run as root.
    as_user = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
    if as_user:
        shutil.chown(home, "postgres")
    data = home / "data"

    def run(*command: str) -> None:
        subprocess.run([*as_user, *command], check=True, capture_output=True, cwd=home, timeout=120)

    try:
        run(str(bin_folder / "initdb"), "-D", str(data), "-U", "postgres", "-A", "trust", "-E", "UTF8", "--no-sync")
        options = f"-c listen_addresses='' -c unix_socket_directories={home} -c max_connections=300"
        run(str(bin_folder / "pg_ctl"), "-D", str(data), "-w", "-l", str(home / "log"), "-o", options, "start")
        try:
            yield Cluster(home)
        finally:
            run(str(bin_folder / "pg_ctl"), "-D", str(data), "-w", "-m", "immediate", "stop")
    finally:
        shutil.rmtree(home, ignore_errors=True)
