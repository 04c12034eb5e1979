"""A table of Parquet files that grows while others read it.

    DIR/_manifest.json      the list of parts that make up the table; always replaced as a whole
    DIR/_parts/part=7/…     one part per write; parts that the manifest does not list are ignored
    DIR/_lock               locked by the process that writes

A batch is written into a new part first. Then the manifest is replaced by one that lists the part
and the number of the batch. After a crash before that, the part is ignored and its name is used
again. After a crash behind that, the batch is known to be in the table and is skipped when it comes
again. Parts that were replaced are deleted later, so that running queries can finish.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

import msgspec

from escrowmq.clock import Clock, SystemClock
from escrowmq.errors import PipelineFailed

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

REPLACED_RETENTION_S: Final = 600  # how long a replaced part stays for queries that still read it
_MANIFEST_NAME: Final = "_manifest.json"
_PARTS_NAME: Final = "_parts"
_VERSION: Final = 1


class TablePart(msgspec.Struct, frozen=True):
    """A directory of Parquet files with the batches `first` to `last`."""

    path: str  # below _parts
    first: int
    last: int
    bytes: int


class DroppedPart(msgspec.Struct, frozen=True):
    """A part that was replaced at `at_ms` and is not deleted yet."""

    path: str
    at_ms: int


class TableManifest(msgspec.Struct, frozen=True):
    """The content of the table, as stored in _manifest.json."""

    kind: str
    version: int = _VERSION
    next_part: int = 0
    next_batch: int = 0
    parts: list[TablePart] = []
    dropped: list[DroppedPart] = []
    state: dict[str, int] = {}  # numbers that the writing pipeline stores along with the table
    names: dict[str, list[str]] = {}  # lists of names, likewise


class ParquetTable:
    """One table in one directory.

    Raises PipelineFailed if the directory holds a table of another kind. Writing needs
    `write_lock()`; reading does not.
    """

    def __init__(self, directory: Path, kind: str, clock: Clock | None = None) -> None:
        self.directory = directory
        self._kind = kind
        self._clock = SystemClock() if clock is None else clock
        self.manifest = self._load()

    @property
    def parts_directory(self) -> Path:
        return self.directory / _PARTS_NAME

    def _load(self) -> TableManifest:
        try:
            raw = (self.directory / _MANIFEST_NAME).read_bytes()
        except FileNotFoundError:
            return TableManifest(self._kind)
        except OSError as error:
            raise PipelineFailed(f"{self.directory}: {error.strerror}") from error
        try:
            manifest = msgspec.json.decode(raw, type=TableManifest)
        except msgspec.DecodeError as error:
            raise PipelineFailed(
                f"{self.directory / _MANIFEST_NAME} cannot be read: {error}"
            ) from error
        if manifest.kind != self._kind:
            raise PipelineFailed(
                f"{self.directory} holds {manifest.kind}, not {self._kind}: use another directory"
            )
        if manifest.version != _VERSION:
            raise PipelineFailed(
                f"{self.directory} was written by a newer escrowmq: update this installation"
            )
        return manifest

    # --- reading ---------------------------------------------------------------------------------

    def read(
        self, spark: SparkSession, schema: StructType, parts: Sequence[TablePart] | None = None
    ) -> DataFrame:
        """Return the whole table as of this manifest, or only the given parts."""
        parts = self.manifest.parts if parts is None else parts
        paths = [str(self.parts_directory / part.path) for part in parts]
        if not paths:
            return spark.createDataFrame([], schema)
        reader = spark.read.schema(schema).option("basePath", str(self.parts_directory))
        return reader.parquet(*paths).select(*(f"`{name}`" for name in schema.names))

    # --- writing ---------------------------------------------------------------------------------

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """Be the only writer of this directory until the block ends.

        Raises PipelineFailed if another process is writing.
        """
        self._prepare_directory()
        with (self.directory / "_lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PipelineFailed(
                    f"{self.directory} is being written by another process: wait until it ends, "
                    f"or stop it"
                ) from error
            # Another process may have published a manifest since this object was created.
            self.manifest = self._load()
            yield

    def _prepare_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            names = {path.name for path in self.directory.iterdir()}
        except OSError as error:
            raise PipelineFailed(f"{self.directory}: {error.strerror}") from error
        if names and _MANIFEST_NAME not in names and not names <= {"_lock", _PARTS_NAME}:
            raise PipelineFailed(
                f"{self.directory} holds other files ({min(names)}): "
                f"use a new directory, or one that already holds {self._kind}"
            )
        if _MANIFEST_NAME not in names:
            self.publish()

    def append(self, batch: int, frame: DataFrame, partition_by: Sequence[str] = ()) -> bool:
        """Add a batch. Return False, and write nothing, if the table has it already."""
        if batch < self.manifest.next_batch:
            return False
        path = self.write(frame, partition_by)
        part = TablePart(path, batch, batch, _parquet_bytes(self.parts_directory / path))
        self.publish(
            parts=[*self.manifest.parts, *([part] if part.bytes else [])], next_batch=batch + 1
        )
        return True

    def write(self, frame: DataFrame, partition_by: Sequence[str] = ()) -> str:
        """Write a new part, which is in the table only after `publish()`. Return its path."""
        # The number changes with every publish. A part that a crash left has the next number,
        # so it is overwritten.
        name = f"part={self.manifest.next_part}"
        writer = frame.write.mode("overwrite").option("compression", "zstd")
        if partition_by:
            writer = writer.partitionBy(*partition_by)
        writer.parquet(str(self.parts_directory / name))
        return name

    def compact(
        self,
        spark: SparkSession,
        schema: StructType,
        arrange: Callable[[DataFrame, int], DataFrame],
        *,
        partition_by: Sequence[str] = (),
        small_bytes: int,
        min_parts: int,
    ) -> int:
        """Merge the parts below `small_bytes` if there are at least `min_parts` of them.

        `arrange` gets their rows and their size in bytes, and returns the rows as they shall be
        written. Return the number of parts that were merged.
        """
        small = [part for part in self.manifest.parts if part.bytes < small_bytes]
        if len(small) < max(2, min_parts):
            return 0
        size = sum(part.bytes for part in small)
        path = self.write(arrange(self.read(spark, schema, small), size), partition_by)
        merged = TablePart(
            path,
            min(part.first for part in small),
            max(part.last for part in small),
            _parquet_bytes(self.parts_directory / path),
        )
        replaced = {part.path for part in small}
        others = [part for part in self.manifest.parts if part.path not in replaced]
        self.publish(parts=[*others, merged])
        return len(small)

    def publish(
        self,
        *,
        parts: Sequence[TablePart] | None = None,
        next_batch: int | None = None,
        state: dict[str, int] | None = None,
        names: dict[str, list[str]] | None = None,
    ) -> None:
        """Replace the manifest, in one step. Arguments that are None keep their value."""
        old = self.manifest
        parts = old.parts if parts is None else list(parts)
        paths = {part.path for part in parts}
        now_ms = self._clock.now_ms()
        dropped = [
            *old.dropped,
            *(DroppedPart(part.path, now_ms) for part in old.parts if part.path not in paths),
        ]
        expired = [part for part in dropped if now_ms - part.at_ms >= REPLACED_RETENTION_S * 1000]
        self.manifest = msgspec.structs.replace(
            old,
            next_part=old.next_part + 1,
            next_batch=old.next_batch if next_batch is None else next_batch,
            parts=parts,
            dropped=[part for part in dropped if part not in expired],
            state=old.state if state is None else state,
            names=old.names if names is None else names,
        )
        self._save()
        for part in expired:
            shutil.rmtree(self.parts_directory / part.path, ignore_errors=True)

    def _save(self) -> None:
        new = self.directory / f"{_MANIFEST_NAME}.new"
        with new.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.manifest)))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.directory / _MANIFEST_NAME)


def part_of_directory(table: ParquetTable, path: str, batch: int) -> TablePart:
    """Return a directory below a written part as a part of its own."""
    return TablePart(path, batch, batch, _parquet_bytes(table.parts_directory / path))


def _parquet_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.parquet"))
