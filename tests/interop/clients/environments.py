"""Where the clients live: made on first use, kept in a cache, safe to delete at any time.

Several clients call themselves `rocketmq`, so each has its own folder. Versions are pinned: what
is tested is one release of a client, not whatever is newest. ESCROWMQ_CLIENTS_CACHE says where
the folders are, `~/.cache/escrowmq-clients` if nobody says.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.interop import jars

HERE = Path(__file__).parent
JAVA = HERE / "java"
SPRING = HERE / "spring"
GO = HERE / "go"
MAKE_S = 600


class Unavailable(Exception):
    """This machine cannot run that client; the text says why."""


def java(version: str, main: str = "Driver") -> list[str]:
    """Apache's own client, or its tools: the command that runs our driver against its jars."""
    if reason := jars.find():
        raise Unavailable(reason)
    return _java_driver(f"java-{version}", JAVA / f"{main}.java", lambda: jars.fetch(version))


def spring(version: str) -> list[str]:
    """Return the command that runs our driver of the Spring Boot starter."""
    driver = SPRING / "SpringDriver.java"
    return _java_driver(f"spring-{version}", driver, lambda: jars.fetch_spring_starter(version))


def _java_driver(name: str, driver: Path, fetch_jars: Callable[[], Path]) -> list[str]:
    compiler = shutil.which("javac")
    if compiler is None:
        raise Unavailable("Java is missing or cannot compile (no `javac` on the path)")
    try:
        lib = fetch_jars()
    except jars.Unavailable as error:
        raise Unavailable(str(error)) from error
    source = hashlib.sha256(driver.read_bytes()).hexdigest()[:16]

    def compile_driver(home: Path) -> None:
        options = ["-nowarn", "-encoding", "UTF-8", "-cp", f"{lib}/*", "-d", str(home)]
        try:
            _run([compiler, *options, str(driver)])
        except Unavailable as error:  # our own fault, and no reason to skip anything
            raise AssertionError(f"the driver does not compile: {error}") from error

    home = _made(f"{name}-{source}", compile_driver)
    quick = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m"]
    return ["java", *quick, "-cp", f"{lib}/*{os.pathsep}{home}", driver.stem]


def python(name: str, wanted: Sequence[str], library_of: str = "") -> list[str]:
    """A virtual environment; `library_of` is a package whose shared library is added to it."""

    def make(home: Path) -> None:
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
        pip.append("--disable-pip-version-check")
        _run([*pip, *wanted])
        if library_of:
            _run([*pip, "--no-deps", "--target", str(home / "donor"), library_of])
            [site] = home.glob("lib/python*/site-packages")
            shutil.copy(home / "donor" / "rocketmq" / "librocketmq.so", site / "rocketmq")
            shutil.rmtree(home / "donor")

    release = "{}.{}".format(*sys.version_info)
    recipe = _digest(release, *wanted, library_of)
    home = _made(f"python-{name}-{recipe}", make)
    return [str(home / "bin" / "python")]


def node(name: str, package: str) -> tuple[list[str], dict[str, str]]:
    """The command and its variables; no script of a package is run while it is installed."""
    interpreter, npm = shutil.which("node"), shutil.which("npm")
    if interpreter is None or npm is None:
        raise Unavailable("Node.js is missing (no `node` and `npm` on the path)")

    def make(home: Path) -> None:
        home.mkdir()
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(home)]
        _run([npm, "install", *options, package])

    home = _made(f"node-{name}-{_digest(package)}", make)
    return [interpreter], {"NODE_PATH": str(home / "node_modules")}


def go() -> list[str]:
    """Return the command that runs our driver of the Go client, compiled with its pinned modules."""
    compiler = shutil.which("go")
    if compiler is None:
        raise Unavailable("Go is missing (no `go` on the path)")
    sources = [GO / name for name in ("go.mod", "go.sum", "driver.go")]

    def compile_driver(home: Path) -> None:
        home.mkdir()
        _run([compiler, "-C", str(GO), "mod", "download"])
        try:
            _run([compiler, "-C", str(GO), "build", "-mod=readonly", "-o", str(home / "driver")])
        except Unavailable as error:  # our own fault, and no reason to skip anything
            raise AssertionError(f"the driver does not compile: {error}") from error

    home = _made(f"go-{_digest(*(source.read_text() for source in sources))}", compile_driver)
    return [str(home / "driver")]


def _made(name: str, make: Callable[[Path], None]) -> Path:
    """The folder `name` of the cache. A folder is whole or not there at all."""
    cache = Path(
        os.environ.get("ESCROWMQ_CLIENTS_CACHE") or Path.home() / ".cache" / "escrowmq-clients"
    ).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    home, mark = cache / name, cache / f"{name}.complete"
    with _locked(cache / f"{name}.lock"):
        if not mark.exists():
            shutil.rmtree(home, ignore_errors=True)  # half made by someone who was stopped
            make(home)
            mark.touch()
    return home


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str]) -> None:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=MAKE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{Path(command[0]).name} could not be run: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{' '.join(command[:4])} … failed: {done.stdout.strip()[-600:]}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
