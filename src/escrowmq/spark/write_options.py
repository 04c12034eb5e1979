"""The options of writing, and which of them go together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from escrowmq.errors import BadOption
from escrowmq.spark.access import Access, access_of
from escrowmq.spark.options import CONNECTION, SERVERS, Option, choose, full, one_of, whole

EXACTLY_ONCE: Final = "exactly-once"
AT_LEAST_ONCE: Final = "at-least-once"
_NAME_MAX: Final = 200
_BATCH_BYTES_MAX: Final = 3 << 20  # a broker takes 4 MiB in one message


def _guarantee(text: str) -> str:
    return one_of(EXACTLY_ONCE, AT_LEAST_ONCE)(text.replace("_", "-"))


def _name(text: str) -> str:
    if len(text.strip()) > _NAME_MAX or not text.isprintable():
        raise ValueError(f"at most {_NAME_MAX} printable characters")
    return full(text)


TOPIC: Final = Option("topic", full, "", "Where rows go that have no topic of their own.")
GUARANTEE: Final = Option(
    "guarantee",
    _guarantee,
    "",  # the best that the brokers can do
    f"{EXACTLY_ONCE} (if the brokers can) or {AT_LEAST_ONCE}.",
    ("delivery",),
)
TRANSACTIONAL_ID: Final = Option(
    "transactional.id",
    _name,
    "",
    "The sink's name; else the query's id, or a random one for a batch.",
)
EPOCH: Final[Option[int | None]] = Option(
    "epoch",
    whole(0),
    None,
    "Number of a batch write: with transactional.id, a repeated one writes nothing.",
)
GROUP: Final = Option("group", full, "escrowmq-spark", "Producer group.", ("producerGroup",))
TIMEOUT: Final = Option(
    "timeout", whole(1, 86_400), 60, "Seconds to keep trying when a broker does not answer."
)
BATCH_BYTES: Final = Option(
    "batchBytes", whole(1, _BATCH_BYTES_MAX), 256 << 10, "Bytes of messages that travel together."
)
IN_FLIGHT_BYTES: Final = Option(
    "inFlightBytes",
    whole(1, 2**31),
    8 << 20,
    "Bytes that may be on their way to one broker, unanswered.",
)

WRITE: Final[tuple[Option[Any], ...]] = (
    *CONNECTION,
    *(TOPIC, GUARANTEE, TRANSACTIONAL_ID, EPOCH, GROUP, TIMEOUT, BATCH_BYTES, IN_FLIGHT_BYTES),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    """What was chosen, as the tasks use it."""

    servers: str
    access: Access = Access()  # noqa: RUF009  # it is frozen
    topic: str = TOPIC.default
    guarantee: str = GUARANTEE.default
    transactional_id: str = TRANSACTIONAL_ID.default
    epoch: int | None = EPOCH.default
    group: str = GROUP.default
    timeout_s: float = TIMEOUT.default
    batch_bytes: int = BATCH_BYTES.default
    in_flight_bytes: int = IN_FLIGHT_BYTES.default


def write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Raises BadOption, which says what to write instead."""
    if any(name.lower() == "path" for name in given):
        raise BadOption(
            "the sink has no path: name the topic with .option('topic', …), then save() or start()"
        )
    chosen = choose(given, WRITE)
    if not chosen[SERVERS]:
        raise BadOption(
            "option servers is missing: the name servers, like .option('servers', '127.0.0.1:9876')"
        )
    found = WriteOptions(
        servers=chosen[SERVERS],
        access=access_of(chosen),
        topic=chosen[TOPIC],
        guarantee=chosen[GUARANTEE],
        transactional_id=chosen[TRANSACTIONAL_ID],
        epoch=chosen[EPOCH],
        group=chosen[GROUP],
        timeout_s=chosen[TIMEOUT],
        batch_bytes=chosen[BATCH_BYTES],
        in_flight_bytes=chosen[IN_FLIGHT_BYTES],
    )
    _refuse_half_a_name(found, streaming=streaming)
    return found


def _refuse_half_a_name(options: WriteOptions, *, streaming: bool) -> None:
    if streaming and options.epoch is not None:
        raise BadOption(
            "option epoch is for batch writes: a stream counts its epochs itself, leave it out"
        )
    if not streaming and bool(options.transactional_id) != (options.epoch is not None):
        raise BadOption(
            "a batch write that may be repeated needs both transactional.id (the job's name) and "
            "epoch (a number that grows with every run, like 20240131); without either of them it "
            "is atomic, and a second run writes everything again"
        )
