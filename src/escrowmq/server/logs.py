"""Log lines: text for people, or one JSON object per line for whatever gathers them.

Our own lines are made of `name=%s` pairs, and in JSON each such pair is a field of its own:

    log.info("store open directory=%s begin=%d", ...)
    {"time": ..., "level": "INFO", "logger": ..., "message": ..., "directory": ..., "begin": ...}
"""

from __future__ import annotations

import json
import logging
import re
import sys
from typing import Any, Final

from escrowmq.clock import utc_text
from escrowmq.config.logs import LogConfig, LogFormat

_SPECIFIER: Final = re.compile(r"(?:\b(\w+)=)?%(?:%|[-+ #0]*\d*(?:\.\d+)?([sdrfgx]))")
_OWN: Final = frozenset(("time", "level", "broker", "logger", "message", "exception"))


class JsonFormatter(logging.Formatter):
    def __init__(self, broker: str) -> None:
        super().__init__()
        self._broker = broker

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": utc_text(int(record.created * 1000)),
            "level": record.levelname,
            "broker": self._broker,
            "logger": record.name,
            "message": record.getMessage(),
            **_fields(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    if not isinstance(record.args, tuple) or not isinstance(record.msg, str):
        return {}
    names = [match[1] for match in _SPECIFIER.finditer(record.msg) if match[2]]
    return {
        name: value if isinstance(value, int | float | bool) else str(value)
        for name, value in zip(names, record.args, strict=False)
        if name and name not in _OWN
    }


def set_up_logs(config: LogConfig, broker: str, *, is_one_of_many: bool = False) -> None:
    """Also again, with other settings. Lines of many brokers in one place say which they are of."""
    handler = logging.StreamHandler(sys.stderr)
    if config.log_format is LogFormat.JSON:
        handler.setFormatter(JsonFormatter(broker))
    else:
        who = f"{broker.replace('%', '%%')} " if is_one_of_many else ""
        handler.setFormatter(
            logging.Formatter(f"%(asctime)s %(levelname)s {who}%(name)s %(message)s")
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(config.log_level.value)
