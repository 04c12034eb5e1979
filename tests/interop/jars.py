"""Apache RocketMQ's jars and others, fetched from Maven Central once and kept in a cache."""

from __future__ import annotations

import fcntl
import functools
import os
import re
import shutil
import subprocess
from pathlib import Path

PARTS = {
    "5.5.0": ("namesrv", "broker", "client", "tools", "example", "proxy"),
    "4.9.7": ("namesrv", "broker", "client", "tools"),  # its example jar is not on Central
}
VERSIONS = tuple(PARTS)
JAVA_RELEASE_MIN = 8
FETCH_S = 900


class Unavailable(Exception):
    """This machine cannot run Apache RocketMQ; the text says why."""


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
    home = _cache() / version
    home.mkdir(parents=True, exist_ok=True)
    with (home / ".lock").open("w") as lock:  # two test workers may want the same release
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_complete(version):
            _copy_jars(version, home)
    return home / "lib"


def _copy_jars(version: str, home: Path) -> None:
    pom = home / "pom.xml"
    pom.write_text(_pom(version))
    copy = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy-dependencies"
    words = ["-f", str(pom), copy, f"-DoutputDirectory={home / 'lib'}"]
    _maven(words, f"RocketMQ {version}")
    _mark(version).touch()


def _maven(words: list[str], what: str) -> None:
    command = ["mvn", "-q", "-B", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FETCH_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{what} could not be fetched: {error}") from error
    if done.returncode != 0:
        raise Unavailable(f"{what} could not be fetched: {done.stdout[-600:]}")


def _pom(version: str) -> str:
    dependency = (
        "<dependency><groupId>org.apache.rocketmq</groupId>"
        "<artifactId>rocketmq-{part}</artifactId><version>{version}</version></dependency>"
    )
    return (
        '<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>'
        "<groupId>interop</groupId><artifactId>interop</artifactId><version>1</version>"
        "<dependencies>"
        + "".join(dependency.format(part=part, version=version) for part in PARTS[version])
        + "</dependencies></project>"
    )


def _cache() -> Path:
    return Path(os.environ.get("ROCKETMQ_CACHE") or Path.home() / ".cache" / "apache-rocketmq")


def _mark(version: str) -> Path:
    return _cache() / version / "lib" / ".complete"


def _is_complete(version: str) -> bool:
    return _mark(version).exists()


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
