"""Fetch jars from Maven Central, those of Apache RocketMQ and others, and cache them."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

PARTS = {
    "5.5.0": ("namesrv", "broker", "client", "tools", "example", "proxy"),
    "4.9.7": ("namesrv", "broker", "client", "tools"),  # its example jar is not on Central
}
VERSIONS = tuple(PARTS)
JAVA_RELEASE_MIN = 8
FETCH_TIMEOUT_S = 900


class Unavailable(Exception):
    """This machine cannot run a program that a test needs; the message has the reason."""


class Artifact(NamedTuple):
    """The coordinates of a jar at Maven Central."""

    group: str
    name: str
    version: str
    alone: bool = False  # without its dependencies


def unavailable_reason() -> str | None:
    """Return why Apache RocketMQ cannot run here, or None if it can."""
    java = shutil.which("java")
    if java is None:
        return "Java is missing (no `java` on the path)"
    release = java_release(java)
    if release < JAVA_RELEASE_MIN:
        return f"Java {JAVA_RELEASE_MIN} or newer is needed, found {release}"
    if shutil.which("mvn") is None and not all(_is_complete(version) for version in VERSIONS):
        return "Maven is missing (no `mvn` on the path) and the jars are not in the cache"
    return None


def fetch(version: str) -> Path:
    """Return the directory with the jars of a release. Raises Unavailable."""
    _check_available()
    artifacts = [
        Artifact("org.apache.rocketmq", f"rocketmq-{part}", version) for part in PARTS[version]
    ]
    return fetch_all(f"RocketMQ {version}", artifacts, _cache() / version)


def _check_available() -> None:
    if reason := unavailable_reason():
        raise Unavailable(reason)


def fetch_all(title: str, artifacts: Sequence[Artifact], home: Path) -> Path:
    """Return the directory in `home` with these jars; fetch them if needed. Raises Unavailable.

    `title` names them in the exception.
    """
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:  # two test workers may fetch the same release
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _complete_marker(home).exists():
            _copy_jars(title, artifacts, home)
    return home / "lib"


def _copy_jars(title: str, artifacts: Sequence[Artifact], home: Path) -> None:
    pom = home / "pom.xml"
    pom.write_text(_pom(artifacts))
    goal = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
    _maven(["-f", str(pom), goal, f"-DoutputDirectory={home / 'lib'}"], title)
    _complete_marker(home).touch()


def _maven(arguments: list[str], title: str) -> None:
    command = ["mvn", "-q", "-B", *arguments]
    try:
        result = subprocess.run(
            command, capture_output=True, text=True, timeout=FETCH_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{title} could not be fetched: {error}") from error
    if result.returncode != 0:
        raise Unavailable(f"{title} could not be fetched: {result.stdout[-600:]}")


def _pom(artifacts: Sequence[Artifact]) -> str:
    exclude_dependencies = (
        "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId>"
        "</exclusion></exclusions>"
    )
    dependencies = (
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version>{exclude_dependencies if alone else ''}</dependency>"
        for group, name, version, alone in artifacts
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>interop</groupId><artifactId>interop</artifactId><version>1</version>"
        f"<dependencies>{''.join(dependencies)}</dependencies></project>"
    )


def _cache() -> Path:
    return Path(os.environ.get("ROCKETMQ_CACHE") or Path.home() / ".cache" / "apache-rocketmq")


def _complete_marker(home: Path) -> Path:
    return home / "lib" / ".complete"


def _is_complete(version: str) -> bool:
    return _complete_marker(_cache() / version).exists()


@functools.cache
def java_release(java: str) -> int:
    """Return the major version of Java, or 0 if it is unknown."""
    output = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    match = re.search(r'version "(?:1\.)?(\d+)', output)  # "1.8.0_402" and "17.0.15"
    return int(match[1]) if match else 0


def fetch_jar(coordinates: str) -> Path:
    """Return the jar with the coordinates group:artifact:version. Raises Unavailable.

    Its dependencies are not fetched.
    """
    _check_available()
    _, name, version = coordinates.split(":")
    home = _cache() / "libraries"
    jar = home / f"{name}-{version}.jar"
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not jar.exists():
            goal = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
            _maven([goal, f"-Dartifact={coordinates}", f"-DoutputDirectory={home}"], coordinates)
    return jar
