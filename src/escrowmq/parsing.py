"""Read what users write and format what users read: addresses, times, durations, sizes, names.

Every option, setting and file goes through these functions, so that a text means the same
wherever it is given:

    parse_servers("10.0.0.1:9876; 10.0.0.2:9876")   a list of name servers
    parse_timestamp("2026-01-01T00:00")             UTC unless the text has an offset
    parse_duration_ms("90s")                        units ms, s, m, h, d

The `parse_*` functions raise ValueError with a text that says what is expected; the caller
turns it into the error of its own layer. Only `parse_lenient_json` raises BrokenBody, because
it reads what other programs send.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any, Final, TypeVar

import msgspec

from escrowmq.clock import UTC, Timestamp
from escrowmq.errors import BrokenBody

T = TypeVar("T")

# --- numbers -------------------------------------------------------------------------------------

# RocketMQ is written in Java: its numbers have the bounds of `int` and `long`. msgspec refuses
# others when it decodes a struct with such a field.
Int32 = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Int64 = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]


# --- addresses -----------------------------------------------------------------------------------

_SERVER_SEPARATOR: Final = re.compile(r"[;,\s]+")
_ADDRESS: Final = re.compile(r"(\[[0-9A-Fa-f:.%]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})", re.ASCII)


def parse_servers(servers: str | Iterable[str]) -> list[str]:
    """Return the addresses of a list of name servers, each as `host:port`.

    A text may separate addresses by semicolons (as RocketMQ does), commas or white space; a
    sequence may hold such texts. Raises ValueError if there is no address, or if one is not
    `host:port`.
    """
    texts = [servers] if isinstance(servers, str) or not isinstance(servers, Iterable) else servers
    texts = list(texts)
    if not all(isinstance(text, str) for text in texts):
        raise ValueError(
            "the address of a name server is a text such as '127.0.0.1:9876', or a list of them, "
            f"not {servers!r}"
        )
    addresses = [part for text in texts for part in _SERVER_SEPARATOR.split(text) if part]
    if not addresses:
        raise ValueError("the address of a name server is missing, expected host:port")
    for address in addresses:
        parse_address(address)
    return addresses


def parse_address(address: str) -> tuple[str, int]:
    """Return host and port of `host:port`. An IPv6 host is written in brackets: `[::1]:9876`.

    The host is returned without brackets. Raises ValueError.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None or not 1 <= int(match[2]) <= 65_535:
        raise ValueError(
            f"{address!r} is not an address, expected host:port such as 127.0.0.1:9876"
        )
    return match[1].strip("[]"), int(match[2])


# --- times ---------------------------------------------------------------------------------------


def parse_timestamp(text: str) -> Timestamp:
    """Return the time of an ISO 8601 text: `2026-05-01`, `2026-05-01T13:00`, `…T13:00+02:00`.

    A text without an offset is UTC, so that it means the same on every machine. Raises
    ValueError.
    """
    try:
        timestamp = Timestamp.fromisoformat(text)
    except ValueError:
        raise ValueError(
            f"{text!r} is not a time, expected one such as 2026-01-01T00:00 "
            "(UTC unless it has an offset like +02:00)"
        ) from None
    return timestamp if timestamp.tzinfo is not None else timestamp.replace(tzinfo=UTC)


def format_timestamp(timestamp_ms: int) -> str:
    """Return a time as ISO 8601 in UTC: `2026-03-01T09:00:00.000Z`.

    The milliseconds themselves are returned if they are outside of the calendar, as those of a
    damaged record may be.
    """
    try:
        timestamp = Timestamp.fromtimestamp(timestamp_ms // 1000, tz=UTC)
    except (ValueError, OverflowError, OSError):
        return f"{timestamp_ms} ms"
    return f"{timestamp:%Y-%m-%dT%H:%M:%S}.{timestamp_ms % 1000:03d}Z"


_YEAR_10000_MS: Final = 253_402_300_800_000


def format_file_timestamp(timestamp_ms: int) -> str:
    """Return a time as seventeen digits that sort: year to millisecond, in UTC.

    A time outside of 1970 to 9999 comes from a damaged record and becomes the nearest one.
    """
    timestamp_ms = min(max(timestamp_ms, 0), _YEAR_10000_MS - 1)
    timestamp = Timestamp.fromtimestamp(timestamp_ms // 1000, tz=UTC)
    return f"{timestamp:%Y%m%d%H%M%S}{timestamp_ms % 1000:03d}"


# --- durations and sizes -------------------------------------------------------------------------

_UNITS_MS: Final = {"d": 86_400_000, "h": 3_600_000, "m": 60_000, "s": 1_000, "ms": 1}
_DURATION: Final = re.compile(r"([0-9]{1,9}) ?(ms|s|m|h|d)?", re.ASCII)


def parse_duration_ms(text: str, *, default_unit: str | None = None) -> int:
    """Return the milliseconds of `500ms`, `90s`, `10m`, `2h` or `7d`.

    A number without a unit is counted in `default_unit`, and refused if there is none. Raises
    ValueError.
    """
    match = _DURATION.fullmatch(text.strip())
    unit = None if match is None else match[2] or default_unit
    if match is None or unit is None:
        raise ValueError(f"{text!r} is not a duration, expected one such as 90s, 10m, 2h or 7d")
    return int(match[1]) * _UNITS_MS[unit]


def format_duration(duration_ms: int) -> str:
    """Return a duration so that `parse_duration_ms` gives it back: `90s`, `2h`."""
    if duration_ms == 0:
        return "0s"
    unit = next(unit for unit, unit_ms in _UNITS_MS.items() if duration_ms % unit_ms == 0)
    return f"{duration_ms // _UNITS_MS[unit]}{unit}"


def format_rough_duration(duration_ms: int) -> str:
    """Return a duration rounded down for people: seconds up to two minutes, then `2m`, `5h`, `3d`.

    A negative duration is shown as `0s`.
    """
    duration_ms = max(0, duration_ms)
    for unit in ("d", "h", "m"):
        if duration_ms >= 2 * _UNITS_MS[unit]:
            return f"{duration_ms // _UNITS_MS[unit]}{unit}"
    return f"{duration_ms // 1000}s"


def format_size(byte_count: float) -> str:
    """Return a number of bytes for people: `512 B`, `1.5 KiB`, `3.0 GiB`."""
    for unit in ("B", "KiB", "MiB"):
        if byte_count < 1024:
            return f"{byte_count:.0f} {unit}" if unit == "B" else f"{byte_count:.1f} {unit}"
        byte_count /= 1024
    return f"{byte_count:.1f} GiB"


# --- names ---------------------------------------------------------------------------------------


def did_you_mean(name: str, candidates: Iterable[str], *, cutoff: float = 0.6) -> str:
    """Return `; did you mean …?` with the most similar candidate, or an empty text.

    Upper and lower case are the same here. Candidates that are less similar than `cutoff`
    (0 to 1) are not suggested.
    """
    by_lower = {candidate.lower(): candidate for candidate in candidates}
    # The comparison is quadratic, and a name may come from a request: 100 characters are enough.
    matches = get_close_matches(name.lower()[:100], by_lower, n=1, cutoff=cutoff)
    return f"; did you mean {by_lower[matches[0]]}?" if matches else ""


_UNEXPECTED: Final = re.compile(r"got an unexpected keyword argument '(\w+)'")


def suggest_arguments(cls: type[T]) -> type[T]:
    """Let the constructor suggest the argument that was meant; a class decorator."""
    init = cls.__init__
    names = tuple(inspect.signature(init).parameters)[1:]

    @functools.wraps(init)
    def explained_init(self: T, *args: Any, **options: Any) -> None:
        try:
            init(self, *args, **options)
        except TypeError as error:
            unexpected = _UNEXPECTED.search(str(error))
            if unexpected is None or unexpected[1] not in options:
                raise
            name = unexpected[1]
            expected = did_you_mean(name, names) or f"; it has {', '.join(names)}"
            raise TypeError(f"{cls.__name__} has no argument {name}{expected}") from None

    setattr(cls, "__init__", explained_init)  # noqa: B010  mypy refuses to assign to a method
    return cls


# --- JSON as Java writes it ----------------------------------------------------------------------

# A string is matched as a whole, so that nothing inside it is mistaken for a key. A string that is
# not closed is matched to the end of the text: trying again at each quote inside it would be
# quadratic.
_STRING_OR_KEY: Final = re.compile(
    r"""
      "(?:[^"\\]|\\.)*+(?:"|\\?\Z)
    | (?P<before>[{,]\s*+)(?P<key>-?\d++)(?=\s*+:)
    """,
    re.VERBOSE | re.DOTALL | re.ASCII,
)


def parse_lenient_json(data: bytes | memoryview) -> Any:
    """Return the value of a JSON text whose number keys may stand without quotes.

    Java's fastjson writes maps with number keys like this, to old clients and into
    configuration files:

        {0:"10.0.0.1:10911"}

    Objects as keys, which fastjson also writes, are not understood here. Raises BrokenBody,
    whatever is wrong with the text.
    """
    try:
        text = str(data, "utf-8")
        try:
            return msgspec.json.decode(text)
        except msgspec.DecodeError:
            return msgspec.json.decode(quote_number_keys(text))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BrokenBody(f"cannot read JSON: {error}") from error


def quote_number_keys(text: str) -> str:
    """Return the text with quotes around its number keys. The rest is not checked."""
    return _STRING_OR_KEY.sub(_quote_key, text)


def _quote_key(match: re.Match[str]) -> str:
    key = match["key"]
    return match[0] if key is None else f'{match["before"]}"{key}"'
