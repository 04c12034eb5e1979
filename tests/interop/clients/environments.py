"""Install each client on first use, into its own directory of a cache.

Several clients are packages named `rocketmq`, so each needs its own environment. Versions are
pinned, so that a test always runs the same release. The cache is ESCROWMQ_CLIENTS_CACHE, or
`~/.cache/escrowmq-clients`; it is safe to delete.
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
from tests.interop.jars import Unavailable

HERE = Path(__file__).parent
JAVA = HERE / "java"
INSTALL_TIMEOUT_S = 600


def java(version: str, driver: str = "Driver") -> list[str]:
    """Return the command that runs one of our Java drivers with the jars of Apache's client."""
    compiler = shutil.which("javac")
    if compiler is None:
        raise Unavailable("Java can run but not compile (no `javac` on the path)")
    lib = jars.fetch(version)
    source = JAVA / f"{driver}.java"
    source_hash = hashlib.sha256(source.read_bytes()).hexdigest()[:16]

    def compile_driver(home: Path) -> None:
        options = ["-nowarn", "-encoding", "UTF-8", "-cp", f"{lib}/*", "-d", str(home)]
        try:
            _run([compiler, *options, str(source)])
        except Unavailable as error:  # an error in the driver must not skip the test
            raise AssertionError(f"{source.name} does not compile: {error}") from error

    home = _cached(f"java-{version}-{source_hash}", compile_driver)
    options = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-Xmx256m"]
    return ["java", *options, "-cp", f"{lib}/*{os.pathsep}{home}", driver]


def python(name: str, requirements: Sequence[str], library_of: str = "") -> list[str]:
    """Return the interpreter of a virtual environment with these packages.

    `library_of` is a package whose shared library is copied into the environment.
    """

    def install(home: Path) -> None:
        _run([sys.executable, "-m", "venv", str(home)])
        pip = [str(home / "bin" / "python"), "-m", "pip", "install", "-q"]
        pip.append("--disable-pip-version-check")
        _run([*pip, *requirements])
        if library_of:
            _run([*pip, "--no-deps", "--target", str(home / "donor"), library_of])
            [site] = home.glob("lib/python*/site-packages")
            shutil.copy(home / "donor" / "rocketmq" / "librocketmq.so", site / "rocketmq")
            shutil.rmtree(home / "donor")

    release = "{}.{}".format(*sys.version_info)
    digest = _digest(release, *requirements, library_of)
    home = _cached(f"python-{name}-{digest}", install)
    return [str(home / "bin" / "python")]


def node(name: str, package: str) -> tuple[list[str], dict[str, str]]:
    """Return the interpreter, and the environment variables that it needs to find the package.

    The installation runs no script of the package.
    """
    interpreter, npm = shutil.which("node"), shutil.which("npm")
    if interpreter is None or npm is None:
        raise Unavailable("Node.js is missing (no `node` and `npm` on the path)")

    def install(home: Path) -> None:
        home.mkdir()
        options = ["--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(home)]
        _run([npm, "install", *options, package])

    home = _cached(f"node-{name}-{_digest(package)}", install)
    return [interpreter], {"NODE_PATH": str(home / "node_modules")}


def _cached(name: str, install: Callable[[Path], None]) -> Path:
    """Return a directory of the cache. Installs it first unless it is complete."""
    cache = Path(
        os.environ.get("ESCROWMQ_CLIENTS_CACHE") or Path.home() / ".cache" / "escrowmq-clients"
    ).absolute()
    cache.mkdir(parents=True, exist_ok=True)
    home, marker = cache / name, cache / f"{name}.complete"
    with _locked(cache / f"{name}.lock"):
        if not marker.exists():
            shutil.rmtree(home, ignore_errors=True)  # an earlier installation was interrupted
            install(home)
            marker.touch()
    return home


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run(command: Sequence[str]) -> None:
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=INSTALL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{Path(command[0]).name} could not be run: {error}") from error
    if result.returncode != 0:
        raise Unavailable(f"{' '.join(command[:4])} … failed: {result.stdout.strip()[-600:]}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
