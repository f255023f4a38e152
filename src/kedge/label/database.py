"""Opening a store: SQLite or PostgreSQL behind one address, migrations, and transactions that may be tried again.

SQLite: one writer at a time (`BEGIN IMMEDIATE`), readers beside it (WAL), every commit on disk before it is answered.
"""

from __future__ import annotations

import random
import secrets
import sqlite3
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from alembic.config import Config
from alembic.runtime.environment import EnvironmentContext
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, NoSuchModuleError, OperationalError

from kedge.core.errors import ConfigError, DataError, PluginError
from kedge.core.suggest import did_you_mean
from kedge.label.grouping import GroupCommit
from kedge.label.tables import METADATA

MIGRATIONS = Path(__file__).parent / "migrations"
_BUSY_SECONDS = 30
_TRIES = 8
_AGAIN = ("40001", "40P01")
"""What PostgreSQL says where a transaction lost against another one: it may be tried again."""

Result = TypeVar("Result")


class Randomness(Protocol):
    """Where ids, sides and gold come from."""

    def getrandbits(self, k: int, /) -> int: ...
    def random(self) -> float: ...
    def shuffle(self, x: list[Any], /) -> None: ...


def _now() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Store:
    """An open store. `now` gives milliseconds; both it and `randomness` are given in tests."""

    engine: Engine
    now: Callable[[], int] = _now
    randomness: Randomness = field(default_factory=secrets.SystemRandom)
    _group: GroupCommit = field(default_factory=GroupCommit, repr=False)

    @property
    def is_sqlite(self) -> bool:
        return self.engine.dialect.name == "sqlite"

    def read(self, work: Callable[[Connection], Result]) -> Result:
        """One view of the store, whatever is written meanwhile."""
        with self.engine.connect() as connection:
            if not self.is_sqlite:
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            with connection.begin():
                return work(connection)

    def write(self, work: Callable[[Connection], Result]) -> Result:
        """All of `work` or nothing of it. SQLite has one writer: those who wait share a transaction."""
        return self.append(work) if self.is_sqlite else self._transact(work)

    def append(self, work: Callable[[Connection], Result]) -> Result:
        """The same for works that number rows, of which one at a time can be under way on PostgreSQL too."""
        return self._group.run(work, self._transact)

    def _transact(self, work: Callable[[Connection], Result]) -> Result:
        """One transaction, tried again where another one was in the way."""
        for attempt in range(_TRIES):
            try:
                with self.engine.connect() as connection:
                    connection = connection.execution_options(kedge_writes=True)
                    with connection.begin():
                        return work(connection)
            except DBAPIError as error:
                if attempt == _TRIES - 1 or not _may_try_again(error):
                    raise
                time.sleep(0.01 * (attempt + 1) * (1 + random.random()))
        raise AssertionError("unreachable")

    def token(self, bits: int = 128) -> str:
        return f"{self.randomness.getrandbits(bits):0{bits // 4}x}"

    def close(self) -> None:
        self.engine.dispose()


def _may_try_again(error: DBAPIError) -> bool:
    if isinstance(error.orig, sqlite3.OperationalError):
        return "locked" in str(error.orig) or "busy" in str(error.orig)
    return getattr(error.orig, "sqlstate", None) in _AGAIN


def open_store(
    address: str,
    *,
    create: bool = False,
    now: Callable[[], int] | None = None,
    randomness: Randomness | None = None,
) -> Store:
    """The store at an address: `sqlite:///labels.db`, a path, or `postgresql://…`; brought to the present version.

    A SQLite file that is not there is made with `create` only.
    """
    url = _url(address)
    if url.get_backend_name() == "sqlite" and not create and not Path(url.database or "").is_file():
        raise DataError(
            f"{url.database}: there is no store of labels here. `kedge label new NAME` makes one; --db names another"
        )
    engine = _engine(url)
    try:
        _migrate(engine, url)
    except OperationalError as error:
        engine.dispose()
        reason = str(error.orig).strip().partition("\n")[0]
        raise DataError(f"{shown(url)}: the store cannot be opened: {reason}") from error
    except (DBAPIError, DataError) as error:
        engine.dispose()
        if isinstance(error, DataError):
            raise
        reason = str(error.orig).strip().partition("\n")[0]
        raise DataError(f"{shown(url)}: this is no store of labels: {reason}") from error
    return Store(engine, now or _now, randomness or secrets.SystemRandom())


def shown(url: URL) -> str:
    """The address without its password."""
    return url.render_as_string(hide_password=True)


def _url(address: str) -> URL:
    if "://" not in address:
        return URL.create("sqlite", database=address)
    try:
        url = make_url(address)
    except ArgumentError as error:
        # The address may hold a password: it is not repeated.
        raise ConfigError("--db: not an address; write sqlite:///labels.db or postgresql://user@host/name") from error
    name = url.get_backend_name()
    if name in ("postgresql", "postgres"):
        return url.set(drivername="postgresql+psycopg")
    if name != "sqlite":
        raise ConfigError(
            f"--db {name}://…: sqlite and postgresql are known{did_you_mean(name, ['sqlite', 'postgresql'])}"
        )
    if not url.database or url.database == ":memory:":
        raise ConfigError("--db: a store in memory is lost when the command ends; name a file: sqlite:///labels.db")
    return url


def _engine(url: URL) -> Engine:
    try:
        if url.get_backend_name() == "sqlite":
            if (parent := Path(url.database or "").parent) and not parent.is_dir():
                raise DataError(f"{url.database}: the folder {parent} is not there; make it first")
            engine = create_engine(url, connect_args={"timeout": _BUSY_SECONDS}, pool_size=8, max_overflow=-1)
            event.listen(engine, "connect", _prepare_sqlite)
            event.listen(engine, "begin", _begin_sqlite)
            return engine
        return create_engine(url, pool_size=16, max_overflow=16, pool_timeout=60)
    except (ModuleNotFoundError, NoSuchModuleError) as error:
        raise PluginError("PostgreSQL needs its driver: pip install 'kedge[postgres]'") from error


def _prepare_sqlite(connection: Any, _: Any) -> None:
    connection.isolation_level = None  # the driver's own BEGIN would come too late, and be no IMMEDIATE
    cursor = connection.cursor()
    # FULL: what was acknowledged outlives a power cut. Deleted content is overwritten: `forget` means it.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "foreign_keys=ON", "secure_delete=ON", "cache_size=-65536"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    writes = connection.get_execution_options().get("kedge_writes", False)
    connection.exec_driver_sql("BEGIN IMMEDIATE" if writes else "BEGIN")


def _migrate(engine: Engine, url: URL) -> None:
    """Bring the tables to the present version, one process at a time; a newer store is refused."""
    script = ScriptDirectory(MIGRATIONS)
    head = script.get_current_head()
    with engine.connect() as connection, connection.begin():
        revision = MigrationContext.configure(connection).get_current_revision()
    if revision == head:
        return
    with engine.connect() as connection:
        connection = connection.execution_options(kedge_writes=True)
        with connection.begin():
            if engine.dialect.name != "sqlite":
                connection.execute(text("SELECT pg_advisory_xact_lock(5023412)"))
            revision = MigrationContext.configure(connection).get_current_revision()
            if revision not in (None, *(known.revision for known in script.walk_revisions())):
                raise DataError(
                    f"{shown(url)}: written by a newer Kedge (tables of version {revision}; this one knows {head}). "
                    "Update Kedge, or name another store with --db"
                )
            _upgrade(connection, script)


def _upgrade(connection: Connection, script: ScriptDirectory) -> None:
    def steps(revision: Any, _: MigrationContext) -> Any:
        return script._upgrade_revs("head", revision)  # pyright: ignore[reportPrivateUsage]  # alembic's own recipe

    with EnvironmentContext(Config(), script, fn=steps) as environment:
        environment.configure(connection=connection, target_metadata=METADATA)
        environment.run_migrations()
