"""Run PostgreSQL and MariaDB servers as processes on loopback, each in its own directory.

    with Postgres() as server:
        engine = create_engine(server.new_database())

Neither server runs as root. If the tests do, the servers run as the user that Debian's package
creates.
"""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from abc import abstractmethod
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import ClassVar, Self

import psycopg
import pymysql

from tests.support.ports import free_ports
from tests.support.waiting import wait_until

START_S = 180.0
STOP_S = 30.0


class DatabaseServer:
    """A server that runs inside a `with` block. Its files are deleted at the end."""

    user: ClassVar[str]  # the server's user if the tests run as root
    programs: ClassVar[tuple[str, ...]]
    folders: ClassVar[tuple[str, ...]] = ()  # folders to search before the path

    def __init__(self) -> None:
        self._numbers = count()
        self._process: subprocess.Popen[bytes] | None = None
        self.directory = Path(tempfile.mkdtemp(prefix="escrowmq-db-"))
        self.port = free_ports(1)[0]

    @classmethod
    def unavailable_reason(cls) -> str:
        """Return why the server cannot be started on this machine, or an empty text."""
        for name in cls.programs:
            if cls._find(name) is None:
                return f"{name} is not installed: `make databases`"
        if os.geteuid() == 0:
            try:
                pwd.getpwnam(cls.user)
            except KeyError:
                return f"there is no user {cls.user} to run {cls.programs[0]}: `make databases`"
        return ""

    @classmethod
    def _find(cls, name: str) -> str | None:
        paths = [path for folder in cls.folders for path in Path("/").glob(f"{folder}/{name}")]
        return str(max(paths)) if paths else shutil.which(name)

    def __enter__(self) -> Self:
        if os.geteuid() == 0:
            shutil.chown(self.directory, self.user)
        try:
            self._initialize()
            self._process = self._start(self._command())
            wait_until(self._is_ready, self._log, timeout_s=START_S)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    @abstractmethod
    def _initialize(self) -> None: ...
    @abstractmethod
    def _command(self) -> list[str]: ...
    @abstractmethod
    def execute(self, sql: str) -> None: ...
    @abstractmethod
    def new_database(self) -> str: ...

    def _start(self, command: list[str]) -> subprocess.Popen[bytes]:
        program = self._find(command[0])
        assert program is not None
        with (self.directory / "log").open("ab") as log:
            return subprocess.Popen(
                [program, *command[1:]],
                stdout=log,
                stderr=log,
                cwd=self.directory,
                user=self.user if os.geteuid() == 0 else None,
                env={"PATH": os.environ["PATH"], "LC_ALL": "C", "HOME": str(self.directory)},
            )

    def _run(self, command: list[str]) -> None:
        code = self._start(command).wait(START_S)
        assert code == 0, self._log()

    def _is_ready(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log()
        try:
            self.execute("SELECT 1")
        except (psycopg.OperationalError, pymysql.err.OperationalError):
            return False
        return True

    def _log(self) -> str:
        return (self.directory / "log").read_text()

    def _end(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT if self.user == "postgres" else signal.SIGKILL)
            try:
                self._process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _new_name(self) -> str:
        name = f"bank{next(self._numbers)}"
        self.execute(f"CREATE DATABASE {name}")
        return name


class Postgres(DatabaseServer):
    """A PostgreSQL server. `durable` turns fsync on, which benchmarks need and tests do not."""

    user = "postgres"
    programs = ("initdb", "postgres")
    folders = ("usr/lib/postgresql/*/bin",)

    def __init__(self, *, durable: bool = False) -> None:
        super().__init__()
        self._durable = durable

    def _initialize(self) -> None:
        options = ["--auth=trust", "--username=escrow", "--no-sync", "--encoding=UTF8"]
        self._run(["initdb", "-D", str(self.directory / "data"), *options])

    def _command(self) -> list[str]:
        settings = {
            "listen_addresses": "127.0.0.1",
            "port": self.port,
            "unix_socket_directories": "",
            "max_connections": 100,
            "shared_buffers": "32MB",
            "fsync": "on" if self._durable else "off",
        }
        arguments = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return ["postgres", "-D", str(self.directory / "data"), *arguments]

    def execute(self, sql: str) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as connection:
            connection.execute(sql.encode())

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user=escrow dbname=postgres connect_timeout=5"

    def new_database(self) -> str:
        return f"postgresql+psycopg://escrow@127.0.0.1:{self.port}/{self._new_name()}"


class MariaDB(DatabaseServer):
    """A MariaDB server."""

    user = "mysql"
    programs = ("mariadb-install-db", "mariadbd")
    folders = ("usr/sbin", "usr/bin")

    def _initialize(self) -> None:
        data_directory = f"--datadir={self.directory / 'data'}"
        options = ["--no-defaults", "--auth-root-authentication-method=normal", "--skip-test-db"]
        self._run(["mariadb-install-db", *options, data_directory])

    def _command(self) -> list[str]:
        return [
            "mariadbd",
            "--no-defaults",
            f"--datadir={self.directory / 'data'}",
            "--bind-address=127.0.0.1",
            f"--port={self.port}",
            f"--socket={self.directory / 'socket'}",
            f"--pid-file={self.directory / 'pid'}",
            "--innodb-buffer-pool-size=32M",
        ]

    def execute(self, sql: str) -> None:
        connection = pymysql.connect(host="127.0.0.1", port=self.port, user="root")
        try:
            connection.cursor().execute(sql)
        finally:
            connection.close()

    def new_database(self) -> str:
        return f"mysql+pymysql://root@127.0.0.1:{self.port}/{self._new_name()}?charset=utf8mb4"
