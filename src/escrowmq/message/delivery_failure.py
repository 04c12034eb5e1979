"""Why a delivery failed: what a consumer reports, and what a retry or dead letter keeps of it.

    exception --> FailureReport --> fields of CONSUMER_SEND_MSG_BACK --> broker --> properties

A consumer that sends a message back reports the type and text of its error, its host and how often
it has tried. The broker believes none of it more than it has to: texts are shortened and freed of
control characters again, the attempts are at least those that it has counted, and time and address
are its own. It writes the result into properties that only a broker may write (`BROKER_NAMES`).

Apache RocketMQ does not know the fields. There the client sends a dead letter itself, with the same
values in properties of its own (`CLIENT_NAMES`), which anybody could have written. An EscrowMQ
broker turns these into its own when a consumer sends a copy to the retry topic.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from escrowmq.message import names
from escrowmq.message.properties import encode_properties

ERROR_TYPE_BYTES_MAX: Final = 255
ERROR_TEXT_BYTES_MAX: Final = 1_024
HOST_BYTES_MAX: Final = 255
UNKNOWN_ERROR: Final = "unknown"  # what is shown if the consumer said nothing

_INT32_MAX: Final = (1 << 31) - 1
# Control characters, the separators of lines and paragraphs of Unicode, and the characters that
# reverse the direction of the text behind them.
_UNPRINTABLE: Final = re.compile(
    "[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e\\u2066-\\u2069]+"
)


@dataclass(frozen=True, slots=True)
class FailureReport:
    """What a consumer says about a delivery that failed. All texts are short and printable."""

    error_type: str = ""  # of an exception: its class; empty if it is not known
    error_text: str = ""
    host: str = ""  # the name of the consumer's machine
    attempts: int = 0  # deliveries so far, with those that no broker has counted

    @classmethod
    def cleaned(
        cls,
        error_type: str | None,
        error_text: str | None,
        host: str | None = None,
        attempts: int | None = None,
    ) -> FailureReport:
        """Return a report of any texts: shortened, in one line, valid UTF-8."""
        return cls(
            shorten(error_type or "", ERROR_TYPE_BYTES_MAX),
            shorten(error_text or "", ERROR_TEXT_BYTES_MAX),
            shorten(host or "", HOST_BYTES_MAX),
            min(max(attempts or 0, 0), _INT32_MAX),
        )

    @property
    def has_cause(self) -> bool:
        return bool(self.error_type or self.error_text)

    @property
    def cause(self) -> str:
        """Return type and text in one line, such as `ValueError: no such account`."""
        return _one_line(self.error_type, self.error_text)


NO_REPORT: Final = FailureReport()


@dataclass(frozen=True, slots=True)
class DeliveryFailure:
    """The failure that a retry or a dead letter is the result of.

    `address`, `failed_ms` and the least value of `attempts` are the broker's. Type, text and host
    are what the consumer reported. If `is_from_client`, the broker was Apache RocketMQ, and all of
    it is what the sender of the message says.
    """

    error_type: str = UNKNOWN_ERROR
    error_text: str = ""
    host: str = ""
    address: str = ""  # ip:port of the consumer's connection
    failed_ms: int = 0  # milliseconds since 1970; 0 if not known
    attempts: int = 0  # deliveries that failed; 0 if not known
    is_from_client: bool = False

    @property
    def cause(self) -> str:
        """Return type and text in one line; "unknown" if the consumer reported nothing."""
        return _one_line(self.error_type, self.error_text)


def _one_line(error_type: str, error_text: str) -> str:
    if error_type and error_text:
        return f"{error_type}: {error_text}"
    return error_text or error_type


def shorten(text: str, bytes_max: int) -> str:
    """Return a text in one line of at most `bytes_max` bytes of UTF-8.

    Control characters become spaces. Text that is not valid Unicode gets question marks.
    """
    # Nothing behind so many characters is kept, so a text of megabytes is not searched.
    head = text[: 4 * bytes_max]
    line = _UNPRINTABLE.sub(" ", head).strip()
    encoded = line.encode("utf-8", "replace")
    if len(encoded) > bytes_max:
        encoded = encoded[: bytes_max - len("…".encode())]
        return encoded.decode("utf-8", "ignore") + "…"
    return encoded.decode()


# --- properties ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _PropertyNames:
    error_type: str
    error_text: str
    host: str
    address: str
    failed_ms: str
    attempts: str


def _property_names(prefix: str) -> _PropertyNames:
    suffixes = ("TYPE", "TEXT", "HOST", "ADDRESS", "TIME", "ATTEMPTS")
    return _PropertyNames(*(prefix + suffix for suffix in suffixes))


BROKER_NAMES: Final = _property_names(names.CAUSE_PREFIX)
CLIENT_NAMES: Final = _property_names(names.CLIENT_CAUSE_PREFIX)


def failure_of(properties: Mapping[str, str]) -> DeliveryFailure | None:
    """Return the failure that the properties of a message tell of; None if there is none."""
    for own in (BROKER_NAMES, CLIENT_NAMES):
        if own.failed_ms in properties:
            return DeliveryFailure(
                error_type=_shown(properties, own.error_type, ERROR_TYPE_BYTES_MAX)
                or ("" if own.error_text in properties else UNKNOWN_ERROR),
                error_text=_shown(properties, own.error_text, ERROR_TEXT_BYTES_MAX),
                host=_shown(properties, own.host, HOST_BYTES_MAX),
                address=_shown(properties, own.address, HOST_BYTES_MAX),
                failed_ms=_number(properties.get(own.failed_ms)),
                attempts=_number(properties.get(own.attempts)),
                is_from_client=own is CLIENT_NAMES,
            )
    return None


def client_properties(report: FailureReport, *, now_ms: int) -> dict[str, str]:
    """Return the properties of a dead letter that a client sends itself."""
    return _properties(CLIENT_NAMES, report, address="", failed_ms=now_ms)


def report_of_client(properties: Mapping[str, str]) -> FailureReport:
    """Return what a client wrote into a copy that it sends to the retry topic."""
    return FailureReport.cleaned(
        properties.get(CLIENT_NAMES.error_type),
        properties.get(CLIENT_NAMES.error_text),
        properties.get(CLIENT_NAMES.host),
        _number(properties.get(CLIENT_NAMES.attempts)),
    )


def broker_properties(
    report: FailureReport,
    earlier: Mapping[str, str],
    *,
    address: str,
    attempts: int,
    now_ms: int,
    bytes_max: int,
) -> dict[str, str]:
    """Return the properties that a broker adds to a retry or a dead letter.

    Without a cause in the report, that of the `earlier` properties stays, with its time, host and
    address: they are those of a record that this broker stored for the same group. Attempts are
    always those of now. Properties that do not fit into `bytes_max` bytes are left out, the text
    first.
    """
    attempts = max(attempts, report.attempts)
    kept = {name: earlier[name] for name in _names(BROKER_NAMES) if earlier.get(name)}
    if report.has_cause or not kept.keys() & {BROKER_NAMES.error_type, BROKER_NAMES.error_text}:
        kept = _properties(BROKER_NAMES, report, address=address, failed_ms=now_ms)
    kept[BROKER_NAMES.attempts] = str(attempts)
    for dispensable in (BROKER_NAMES.error_text, BROKER_NAMES.host, BROKER_NAMES.error_type):
        if len(encode_properties(kept)) <= bytes_max:
            return kept
        kept.pop(dispensable, None)
    return kept if len(encode_properties(kept)) <= bytes_max else {}


def without_failure(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties without those of a failure, whoever wrote them."""
    removed = {*_names(BROKER_NAMES), *_names(CLIENT_NAMES)}
    return {name: value for name, value in properties.items() if name not in removed}


def _properties(
    own: _PropertyNames, report: FailureReport, *, address: str, failed_ms: int
) -> dict[str, str]:
    values = {
        own.error_type: report.error_type,
        own.error_text: report.error_text,
        own.host: report.host,
        own.address: shorten(address, HOST_BYTES_MAX),
        own.failed_ms: str(failed_ms),
        own.attempts: str(report.attempts),
    }
    return {name: value for name, value in values.items() if value}


def _names(own: _PropertyNames) -> tuple[str, ...]:
    return (own.error_type, own.error_text, own.host, own.address, own.failed_ms, own.attempts)


def _shown(properties: Mapping[str, str], name: str, bytes_max: int) -> str:
    return shorten(properties.get(name, ""), bytes_max)


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isdecimal() and len(text) <= 18 else 0
