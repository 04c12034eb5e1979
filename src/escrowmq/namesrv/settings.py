"""Keys and values that operators keep on a name server, by namespace.

One namespace has a meaning here: ORDER_TOPIC_CONFIG says how many queues each broker has of a
topic whose order must survive a broker that is away ("brokerA:4;brokerB:4"). It is told to
whoever asks for the topic's route, and to every broker that registers.

`dump` gives what RocketMQ writes into kvConfig.json. `revision` moves with every change, so that
the owner of the file knows when to write it.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec

from escrowmq.errors import ConfigError
from escrowmq.namesrv.bounds import check_name, refuse

ORDER_NAMESPACE: Final = "ORDER_TOPIC_CONFIG"
SETTINGS_MAX: Final = 100_000
VALUE_LENGTH_MAX: Final = 65_536


class _KvConfig(msgspec.Struct, rename="camel"):
    config_table: dict[str, dict[str, str]] = {}


class Settings:
    def __init__(self, *, settings_max: int = SETTINGS_MAX) -> None:
        self._settings_max = settings_max
        self._table: dict[str, dict[str, str]] = {}
        self.revision = 0

    @classmethod
    def load(cls, content: dict[str, Any], *, settings_max: int = SETTINGS_MAX) -> Settings:
        """Raises ConfigError if this is not what `dump` gives."""
        try:
            read = msgspec.convert(content, _KvConfig)
        except msgspec.ValidationError as error:
            raise ConfigError(f"kvConfig.json: {error}") from error
        settings = cls(settings_max=settings_max)
        settings._table = {name: dict(table) for name, table in read.config_table.items()}
        return settings

    def dump(self) -> dict[str, Any]:
        return {"configTable": {name: dict(table) for name, table in self._table.items()}}

    def put(self, namespace: str, key: str, value: str) -> None:
        check_name("namespace", namespace)
        check_name("key", key)
        if len(value) > VALUE_LENGTH_MAX:
            raise refuse(f"value has {len(value)} characters, the limit is {VALUE_LENGTH_MAX}")
        if self.get(namespace, key) is None and self.count >= self._settings_max:
            raise refuse(f"{self._settings_max} settings are kept, which is the limit")
        self._table.setdefault(namespace, {})[key] = value
        self.revision += 1

    def delete(self, namespace: str, key: str) -> bool:
        table = self._table.get(namespace, {})
        if key not in table:
            return False
        del table[key]
        if not table:
            del self._table[namespace]
        self.revision += 1
        return True

    def get(self, namespace: str, key: str) -> str | None:
        return self._table.get(namespace, {}).get(key)

    def namespace(self, namespace: str) -> dict[str, str] | None:
        table = self._table.get(namespace)
        return None if table is None else dict(table)

    @property
    def count(self) -> int:
        return sum(map(len, self._table.values()))
