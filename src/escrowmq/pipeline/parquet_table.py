"""A table that grows while others read it: directories of Parquet, and a manifest that says which
of them count.

    DIR/_manifest.json      replaced as a whole: what is in it is the table
    DIR/_parts/part=7/…     one write each; what no manifest names is rubbish of a crash
    DIR/_lock               held by whoever writes

A batch is written under a new part and then named in the manifest, together with its number. A
crash before that leaves rubbish, a crash after it a batch that is known: run again, it is skipped.
Parts that were replaced stay for a while, for those who still read them.
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

REPLACED_RETENTION_S: Final = 600  # parts that were replaced
_MANIFEST_NAME: Final = "_manifest.json"
_PARTS_NAME: Final = "_parts"
_VERSION: Final = 1


class TablePart(msgspec.Struct, frozen=True):
    path: str  # below _parts
    first: int  # batches that are in it
    last: int
    bytes: int


class DroppedPart(msgspec.Struct, frozen=True):
    path: str
    at_ms: int


class TableManifest(msgspec.Struct, frozen=True):
    kind: str
    version: int = _VERSION
    next_part: int = 0
    next_batch: int = 0
    parts: list[TablePart] = []
    dropped: list[DroppedPart] = []
    state: dict[str, int] = {}  # of the pipeline that writes it
    names: dict[str, list[str]] = {}


class ParquetTable:
    """One table in one directory. Raises PipelineFailed if the directory is something else."""

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
            found = msgspec.json.decode(raw, type=TableManifest)
        except msgspec.DecodeError as error:
            raise PipelineFailed(
                f"{self.directory / _MANIFEST_NAME} cannot be read: {error}"
            ) from error
        if found.kind != self._kind:
            raise PipelineFailed(
                f"{self.directory} holds {found.kind}, not {self._kind}: name another directory"
            )
        if found.version != _VERSION:
            raise PipelineFailed(f"{self.directory} was written by a newer escrowmq: update this")
        return found

    # --- reading ---------------------------------------------------------------------------------

    def read(
        self, spark: SparkSession, schema: StructType, parts: Sequence[TablePart] | None = None
    ) -> DataFrame:
        """All of it as it is now, or some parts."""
        wanted = self.manifest.parts if parts is None else parts
        paths = [str(self.parts_directory / part.path) for part in wanted]
        if not paths:
            return spark.createDataFrame([], schema)
        reader = spark.read.schema(schema).option("basePath", str(self.parts_directory))
        return reader.parquet(*paths).select(*(f"`{name}`" for name in schema.names))

    # --- writing ---------------------------------------------------------------------------------

    @contextmanager
    def write_lock(self) -> Iterator[None]:
        """The only writer of this directory, until the block ends."""
        self._prepare_directory()
        with (self.directory / "_lock").open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise PipelineFailed(
                    f"{self.directory} is being written by another process: wait for it, or stop it"
                ) from error
            self.manifest = self._load()
            yield

    def _prepare_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            found = {path.name for path in self.directory.iterdir()}
        except OSError as error:
            raise PipelineFailed(f"{self.directory}: {error.strerror}") from error
        if found and _MANIFEST_NAME not in found and not found <= {"_lock", _PARTS_NAME}:
            raise PipelineFailed(
                f"{self.directory} holds other files ({min(found)}): "
                f"name a new directory, or one that a {self._kind} is in"
            )
        if _MANIFEST_NAME not in found:
            self.publish()

    def append(self, batch: int, frame: DataFrame, partition_by: Sequence[str] = ()) -> bool:
        """Add a batch; False if it is there already."""
        if batch < self.manifest.next_batch:
            return False
        path = self.write(frame, partition_by)
        part = TablePart(path, batch, batch, _parquet_bytes(self.parts_directory / path))
        self.publish(
            parts=[*self.manifest.parts, *([part] if part.bytes else [])], next_batch=batch + 1
        )
        return True

    def write(self, frame: DataFrame, partition_by: Sequence[str] = ()) -> str:
        """A new part, which nobody sees yet."""
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
        """Make one part of the small ones, if there are so many. How many it were."""
        small = [part for part in self.manifest.parts if part.bytes < small_bytes]
        if len(small) < max(2, min_parts):
            return 0
        size = sum(part.bytes for part in small)
        path = self.write(arrange(self.read(spark, schema, small), size), partition_by)
        made = TablePart(
            path,
            min(part.first for part in small),
            max(part.last for part in small),
            _parquet_bytes(self.parts_directory / path),
        )
        gone = {part.path for part in small}
        self.publish(parts=[*(part for part in self.manifest.parts if part.path not in gone), made])
        return len(small)

    def publish(
        self,
        *,
        parts: Sequence[TablePart] | None = None,
        next_batch: int | None = None,
        state: dict[str, int] | None = None,
        names: dict[str, list[str]] | None = None,
    ) -> None:
        """From now on this is the table."""
        before = self.manifest
        parts = before.parts if parts is None else list(parts)
        there = {part.path for part in parts}
        now_ms = self._clock.now_ms()
        dropped = [
            *before.dropped,
            *(DroppedPart(part.path, now_ms) for part in before.parts if part.path not in there),
        ]
        old = [one for one in dropped if now_ms - one.at_ms >= REPLACED_RETENTION_S * 1000]
        self.manifest = msgspec.structs.replace(
            before,
            next_part=before.next_part + 1,
            next_batch=before.next_batch if next_batch is None else next_batch,
            parts=parts,
            dropped=[one for one in dropped if one not in old],
            state=before.state if state is None else state,
            names=before.names if names is None else names,
        )
        self._save()
        for one in old:
            shutil.rmtree(self.parts_directory / one.path, ignore_errors=True)

    def _save(self) -> None:
        new = self.directory / f"{_MANIFEST_NAME}.new"
        with new.open("wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(self.manifest)))
            file.flush()
            os.fsync(file.fileno())
        new.replace(self.directory / _MANIFEST_NAME)


def part_of_directory(table: ParquetTable, path: str, batch: int) -> TablePart:
    """A directory below a part, as a part of its own."""
    return TablePart(path, batch, batch, _parquet_bytes(table.parts_directory / path))


def _parquet_bytes(directory: Path) -> int:
    return sum(path.stat().st_size for path in directory.rglob("*.parquet"))
