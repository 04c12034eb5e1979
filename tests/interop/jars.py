"""Apache RocketMQ's jars and others, fetched from Maven Central once and kept in a cache."""

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
FETCH_S = 900


class Unavailable(Exception):
    """This machine cannot run what was asked for; the text says why."""


class Artifact(NamedTuple):
    """As Maven Central names it."""

    group: str
    name: str
    version: str
    alone: bool = False  # without what it depends on


def find() -> str | None:
    """Why Apache RocketMQ cannot run here, or None if Java and Maven are at hand."""
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
    """The folder with the jars of one release, copied into the cache if they are not there yet."""
    parts = [
        Artifact("org.apache.rocketmq", f"rocketmq-{part}", version) for part in PARTS[version]
    ]
    return fetch_all(f"RocketMQ {version}", parts, _cache() / version)


def fetch_spring_starter(version: str) -> Path:
    """Return the folder with the Spring Boot starter and what it depends on. Raises Unavailable."""
    starter = Artifact("org.apache.rocketmq", "rocketmq-spring-boot-starter", version)
    return fetch_all(f"The starter {version}", [starter], _cache() / f"spring-{version}")


def fetch_all(what: str, artifacts: Sequence[Artifact], home: Path) -> Path:
    """A folder in `home` with these, copied there if they are not yet. Raises Unavailable."""
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:  # two test workers may want the same release
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _mark(home).exists():
            _copy_jars(what, artifacts, home)
    return home / "lib"


def _copy_jars(what: str, artifacts: Sequence[Artifact], home: Path) -> None:
    pom = home / "pom.xml"
    pom.write_text(_pom(artifacts))
    copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
    words = ["-f", str(pom), copy, f"-DoutputDirectory={home / 'lib'}"]
    _maven(words, what)
    _mark(home).touch()


def _maven(words: list[str], what: str) -> None:
    command = ["mvn", "-q", "-B", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what} could not be fetched: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{what} could not be fetched: {done.stdout[-600:]}")


def _pom(artifacts: Sequence[Artifact]) -> str:
    nothing_else = (
        "<exclusions><exclusion><groupId>*</groupId><artifactId>*</artifactId>"
        "</exclusion></exclusions>"
    )
    dependencies = (
        f"<dependency><groupId>{group}</groupId><artifactId>{name}</artifactId>"
        f"<version>{version}</version>{nothing_else if alone else ''}</dependency>"
        for group, name, version, alone in artifacts
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>interop</groupId><artifactId>interop</artifactId><version>1</version>"
        f"<dependencies>{''.join(dependencies)}</dependencies></project>"
    )


def _cache() -> Path:
    return Path(os.environ.get("ROCKETMQ_CACHE") or Path.home() / ".cache" / "apache-rocketmq")


def _mark(home: Path) -> Path:
    return home / "lib" / ".complete"


def _is_complete(version: str) -> bool:
    return _mark(_cache() / version).exists()


@functools.cache
def java_release(java: str) -> int:
    told = subprocess.run([java, "-version"], capture_output=True, text=True, check=False).stderr
    found = re.search(r'version "(?:1\.)?(\d+)', told)  # "1.8.0_402" and "17.0.15"
    return int(found[1]) if found else 0


def library(artifact: str) -> Path:
    """One jar by group:artifact:version, alone."""
    _, name, version = artifact.split(":")
    home = _cache() / "libraries"
    found = home / f"{name}-{version}.jar"
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not found.exists():
            copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
            _maven([copy, f"-Dartifact={artifact}", f"-DoutputDirectory={home}"], artifact)
    return found
