"""What only a real disk can show: a full file system, locks of other processes, sparse files.

The full file system is a small tmpfs that a child process mounts in its own mount namespace, so
it disappears with the process. Where such a mount is not permitted, the test is skipped.
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

UNSHARE = ["unshare", "--user", "--map-root-user", "--mount"]
MOUNT_COMMAND = 'mount -t tmpfs -o size=64k none "$0" && '

FILL_PROGRAM = """
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
print("readable", file.read_at(0, position) == b"x" * position, disk.exists("d/small"))
file.close()
disk.remove("d/log")
del file
replace_file(disk, "d/small", b"y" * 100)
print("writable again")
"""

LOCK_PROGRAM = """
import sys
from escrowmq.store.disk import RealDisk

lock = RealDisk(sys.argv[1]).lock("d/lock", b"child")
print("ready", flush=True)
sys.stdin.read()
"""

# The Java broker takes a POSIX lock on the first byte.
JAVA_LOCK_PROGRAM = """
import fcntl, sys

file = open(sys.argv[1] + "/d/lock", "r+b")
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 0)
print("ready", flush=True)
sys.stdin.read()
"""

WAIT_PROGRAM = """
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
    probe = [*UNSHARE, "sh", "-c", MOUNT_COMMAND + "true", str(path)]
    return subprocess.run(probe, capture_output=True, check=False).returncode == 0


@contextmanager
def child_process(
    program: str, root: Path, *, close_fds: bool = True
) -> Iterator[subprocess.Popen[str]]:
    """Run a program until the block ends. It has printed "ready" when the block begins."""
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
        pytest.skip("mounting a tmpfs in a private mount namespace is not permitted here")
    script = MOUNT_COMMAND + 'exec "$1" -c "$2" "$0"'
    completed = subprocess.run(
        [*UNSHARE, "sh", "-c", script, str(tmp_path), sys.executable, FILL_PROGRAM],
        capture_output=True,
        text=True,
        check=False,
    )
    assert completed.stderr == ""
    assert completed.stdout.splitlines() == [
        "full at 65536 of 65536 free 0",
        "replace refused",
        "readable True False",
        "writable again",
    ]


def test_an_unwritten_file_takes_no_space(disk: RealDisk, tmp_path: Path) -> None:
    file = disk.create("log", 1 << 30)
    file.write_at(1 << 29, b"x")
    assert (tmp_path / "log").stat().st_size == 1 << 30
    assert (tmp_path / "log").stat().st_blocks * 512 <= 1 << 20


def test_a_lock_of_another_process_is_respected_until_the_process_is_killed(
    disk: RealDisk, tmp_path: Path
) -> None:
    with child_process(LOCK_PROGRAM, tmp_path) as holder:
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
    with child_process(JAVA_LOCK_PROGRAM, tmp_path), pytest.raises(StoreLocked):
        disk.lock("d/lock", b"ours")


def test_the_java_broker_cannot_take_our_lock(disk: RealDisk, tmp_path: Path) -> None:
    lock = disk.lock("d/lock", b"ours")
    completed = subprocess.run(
        [sys.executable, "-c", JAVA_LOCK_PROGRAM, str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    lock.release()
    assert "BlockingIOError" in completed.stderr


def test_a_child_process_does_not_inherit_the_lock(disk: RealDisk, tmp_path: Path) -> None:
    lock = disk.lock("d/lock", b"")
    with child_process(WAIT_PROGRAM, tmp_path, close_fds=False):
        lock.release()
        disk.lock("d/lock", b"again").release()


def test_an_error_names_the_file_and_the_cause(disk: RealDisk) -> None:
    with pytest.raises(StoreFailed, match="opening d/a: No such file or directory"):
        disk.open("d/a")
