"""The options of the sink: what they are called, what they mean, and what is wrong with them."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from escrowmq.errors import ConfigError

EXACTLY_ONCE: Final = "exactly-once"
AT_LEAST_ONCE: Final = "at-least-once"

# By the name Spark hands over: lower case.
OPTIONS: Final[dict[str, str]] = {
    "servers": "name servers, HOST:PORT with semicolons between them",
    "topic": "where rows go that have no topic of their own",
    "guarantee": f"{EXACTLY_ONCE} (if the brokers can) or {AT_LEAST_ONCE}",
    "transactional.id": "the sink's name; else the query's id, or a random one for a batch",
    "epoch": "number of a batch write: with transactional.id, a repeated one writes nothing",
    "group": "producer group",
    "timeout": "seconds to keep trying when a broker does not answer",
    "batchbytes": "bytes of messages that travel together",
    "inflightbytes": "bytes that may be on their way to one broker, unanswered",
}
ALIASES: Final = {"nameserver": "servers", "producergroup": "group", "delivery": "guarantee"}
_OF_SPARK: Final = frozenset(("checkpointlocation", "queryname"))

GROUP: Final = "escrowmq-spark"
TIMEOUT_S: Final = 60
BATCH_BYTES: Final = 256 << 10
IN_FLIGHT_BYTES: Final = 8 << 20
BATCH_BYTES_MAX: Final = 3 << 20  # a broker takes 4 MiB in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteOptions:
    servers: str
    topic: str = ""
    guarantee: str = ""  # nothing: the best that the brokers can do
    transactional_id: str = ""
    epoch: int | None = None
    group: str = GROUP
    timeout_s: float = TIMEOUT_S
    batch_bytes: int = BATCH_BYTES
    in_flight_bytes: int = IN_FLIGHT_BYTES


def write_options(given: Mapping[str, str], *, streaming: bool) -> WriteOptions:
    """Raises ConfigError, which says what to write instead."""
    options: dict[str, str] = {}
    for name, value in given.items():
        lower = name.lower()
        if lower in _OF_SPARK:
            continue
        lower = ALIASES.get(lower, lower)
        if lower not in OPTIONS:
            raise ConfigError(_unknown(name))
        options[lower] = value.strip()
    if not options.get("servers"):
        raise ConfigError(
            "option servers is missing: the name servers, like .option('servers', '127.0.0.1:9876')"
        )
    found = WriteOptions(
        servers=options["servers"],
        topic=options.get("topic", ""),
        guarantee=_guarantee(options.get("guarantee", "")),
        transactional_id=_name(options.get("transactional.id", "")),
        epoch=_number(options, "epoch", 0, 2**62) if "epoch" in options else None,
        group=options.get("group") or GROUP,
        timeout_s=float(_number(options, "timeout", 1, 86_400, TIMEOUT_S)),
        batch_bytes=_number(options, "batchbytes", 1, BATCH_BYTES_MAX, BATCH_BYTES),
        in_flight_bytes=_number(options, "inflightbytes", 1, 2**31, IN_FLIGHT_BYTES),
    )
    _refuse_half_a_name(found, streaming=streaming)
    return found


def _refuse_half_a_name(options: WriteOptions, *, streaming: bool) -> None:
    if streaming and options.epoch is not None:
        raise ConfigError(
            "option epoch is for batch writes: a stream counts its epochs itself, leave it out"
        )
    if not streaming and bool(options.transactional_id) != (options.epoch is not None):
        raise ConfigError(
            "a batch write that may be repeated needs both transactional.id (the job's name) and "
            "epoch (a number that grows with every run, like 20240131); without either of them it "
            "is atomic, and a second run writes everything again"
        )


def _unknown(name: str) -> str:
    names = [*OPTIONS, *ALIASES]
    close = difflib.get_close_matches(name.lower(), names, n=1)
    if name.lower() == "path":
        return (
            "the sink has no path: name the topic with .option('topic', …), then save() or start()"
        )
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(OPTIONS)}"
    return f"the sink has no option {name}; {hint}"


def _guarantee(value: str) -> str:
    lower = value.lower().replace("_", "-")
    if lower in ("", EXACTLY_ONCE, AT_LEAST_ONCE):
        return lower
    raise ConfigError(f"guarantee is {EXACTLY_ONCE} or {AT_LEAST_ONCE}, not {value!r}")


def _name(value: str) -> str:
    if len(value) > 200 or not value.isprintable():
        raise ConfigError("transactional.id has at most 200 printable characters")
    return value


def _number(
    options: Mapping[str, str], name: str, least: int, most: int, default: int | None = None
) -> int:
    text = options.get(name, "")
    if not text and default is not None:
        return default
    try:
        value = int(text)
    except ValueError:
        raise ConfigError(f"option {name} is a whole number, not {text!r}") from None
    if not least <= value <= most:
        raise ConfigError(f"option {name} is from {least} to {most}, not {value}")
    return value
