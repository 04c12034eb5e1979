"""Properties of the real disk only: a full file system, other processes, sparse files.

The full file system is a tmpfs of a few pages that a child process mounts in a mount namespace
of its own, so nothing is left behind; where that is not permitted those tests are skipped.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from escrowmq.errors import StoreFailed, StoreLocked
from escrowmq.store.disk import RealDisk

OWN_NAMESPACE = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT = 'mount -t tmpfs -o size=64k none "$0" && '

FILL = """
import sys
from escrowmq.errors import StoreFull
from escrowmq.store.disk import RealDisk, replace_file

disk = RealDisk(sys.argv[1])
file = disk.create("d/log", 1 << 20)
for position in range(0, 1 << 20, 4096):
    try:
        file.write_at(position, b"x" * 4096)
    except StoreFull as error:
        print("full at", position, "of", disk.usage().total_bytes, "free", disk.usage().free_bytes)
        break
try:
    replace_file(disk, "d/small", b"y" * 100)
except StoreFull:
    print("replace refused")
print("readable", bytes(file.view()[:position]) == b"x" * position, disk.exists("d/small"))
file.close()
disk.remove("d/log")
del file
replace_file(disk, "d/small", b"y" * 100)
print("room again")
"""

HOLD = """
import sys
from escrowmq.store.disk import RealDisk

lock = RealDisk(sys.argv[1]).lock("d/lock", b"child")
print("ready", flush=True)
sys.stdin.read()
"""

# As the Java broker takes it: a POSIX lock on the first byte.
HOLD_AS_JAVA = """
import fcntl, sys

file = open(sys.argv[1] + "/d/lock", "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("ready", flush=True)
sys.stdin.read()
"""

WAIT = """
import sys

print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def disk(tmp_path: Path) -> RealDisk:
    return RealDisk(tmp_path)


def can_mount(path: Path) -> bool:
    if shutil.which("unshare") is None:
        return False
    probe = [*OWN_NAMESPACE, "sh", "-c", MOUNT + "true", str(path)]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@contextmanager
def child(program: str, root: Path, *, close_fds: bool = True) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        close_fds=close_fds,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


def test_a_full_disk_raises_store_full_until_there_is_space(tmp_path: Path) -> None:
    if not can_mount(tmp_path):
        pytest.skip("a tmpfs in a mount namespace of our own is not permitted here")
    script = MOUNT + 'exec "$1" -c "$2" "$0"'
    ran = subprocess.run(
        [*OWN_NAMESPACE, "sh", "-c", script, str(tmp_path), sys.executable, FILL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == [
        "full at 65536 of 65536 free 0",
        "replace refused",
        "readable True False",
        "room again",
    ]


def test_an_unwritten_file_takes_no_space(disk: RealDisk, tmp_path: Path) -> None:
    file = disk.create("log", 1 << 30)
    file.write_at(1 << 29, b"x")
    assert (tmp_path / "log").stat().st_size == 1 << 30
    assert (tmp_path / "log").stat().st_blocks * 512 <= 1 << 20


def test_another_process_cannot_take_our_lock_until_it_is_killed(
    disk: RealDisk, tmp_path: Path
) -> None:
    with child(HOLD, tmp_path) as holder:
        with pytest.raises(StoreLocked, match="d/lock"):
            disk.lock("d/lock", b"parent")
        assert (tmp_path / "d/lock").read_bytes() == b"child"
        holder.kill()
        holder.wait()
        lock = disk.lock("d/lock", b"parent")
    assert (tmp_path / "d/lock").read_bytes() == b"parent"
    lock.release()


def test_a_lock_of_the_java_broker_is_respected(disk: RealDisk, tmp_path: Path) -> None:
    disk.lock("d/lock", b"").release()
    with child(HOLD_AS_JAVA, tmp_path), pytest.raises(StoreLocked):
        disk.lock("d/lock", b"ours")


def test_the_java_broker_would_be_refused_our_lock(disk: RealDisk, tmp_path: Path) -> None:
    lock = disk.lock("d/lock", b"ours")
    refused = subprocess.run(
        [sys.executable, "-c", HOLD_AS_JAVA, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    lock.release()
    assert "BlockingIOError" in refused.stderr


def test_a_child_process_does_not_inherit_the_lock(disk: RealDisk, tmp_path: Path) -> None:
    lock = disk.lock("d/lock", b"")
    with child(WAIT, tmp_path, close_fds=False):
        lock.release()
        disk.lock("d/lock", b"again").release()


def test_an_error_names_the_file_and_the_cause(disk: RealDisk) -> None:
    with pytest.raises(StoreFailed, match="opening d/a: No such file or directory"):
        disk.open("d/a")
