"""Settings of the log lines that the server writes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from escrowmq.config.groups import _Group, _setting
from escrowmq.config.kinds import OneOf


class LogLevel(enum.Enum):
    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


class LogFormat(enum.Enum):
    TEXT = "TEXT"
    JSON = "JSON"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig(_Group):
    """What the server writes to standard error."""

    log_level: LogLevel = _setting(  # noqa: RUF009  # it is a field()
        LogLevel.INFO, OneOf(LogLevel), "escrowLogLevel", "", "Lines below this are not written."
    )
    log_format: LogFormat = _setting(  # noqa: RUF009  # it is a field()
        LogFormat.TEXT,
        OneOf(LogFormat),
        "escrowLogFormat",
        "",
        "Lines for people, or one JSON object each.",
    )
