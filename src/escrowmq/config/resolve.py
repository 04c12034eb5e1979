"""Bring the sources together: default, then file, then environment, then flags; the last wins."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from escrowmq.config.catalogue import BY_CONF, SETTINGS, Setting
from escrowmq.config.groups import (
    BrokerConfig,
    BrokerRole,
    ConsumeConfig,
    DelayConfig,
    MetricsConfig,
    MetricsExporter,
    NamesrvConfig,
    NetworkConfig,
    StoreConfig,
)
from escrowmq.config.kinds import WILDCARDS, Hidden
from escrowmq.config.logs import LogConfig
from escrowmq.config.overload import OverloadConfig
from escrowmq.config.security import SecurityConfig
from escrowmq.config.sources import (
    Given,
    Origin,
    Reading,
    Source,
    read_environment,
    read_file,
    read_flags,
)
from escrowmq.config.transactions import TransactionConfig
from escrowmq.errors import ConfigError

_DEFAULT: Final = Origin(Source.DEFAULT, "default")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Each part of the server is given its group, not the whole."""

    broker: BrokerConfig = field(default_factory=BrokerConfig)
    network: NetworkConfig = field(default_factory=NetworkConfig)
    store: StoreConfig = field(default_factory=StoreConfig)
    consume: ConsumeConfig = field(default_factory=ConsumeConfig)
    delay: DelayConfig = field(default_factory=DelayConfig)
    transaction: TransactionConfig = field(default_factory=TransactionConfig)
    namesrv: NamesrvConfig = field(default_factory=NamesrvConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    security: SecurityConfig = field(default_factory=SecurityConfig)
    log: LogConfig = field(default_factory=LogConfig)
    overload: OverloadConfig = field(default_factory=OverloadConfig)

    @classmethod
    def resolve(
        cls,
        file: Path | None = None,
        environment: Mapping[str, str] | None = None,
        flags: Mapping[str, str] | None = None,
    ) -> Resolved:
        """ConfigError names the key, the value, where it stands and what is allowed."""
        readings = [
            read_file(file) if file is not None else Reading(),
            read_environment(environment or {}),
            read_flags(flags or {}),
        ]
        values = _Values()
        for reading in readings:
            for given in reading.given:
                values.take(given)
        values.let_addresses_follow()
        values.let_exporter_follow()
        warnings = [warning for reading in readings for warning in reading.warnings]
        return Resolved(
            config=values.config(),
            origins=values.origins,
            warnings=(*warnings, *values.warnings()),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolved:
    config: Config
    origins: Mapping[str, Origin]  # by RocketMQ's name
    warnings: tuple[str, ...]

    def entries(self) -> Iterator[Entry]:
        for setting in SETTINGS:
            value = getattr(getattr(self.config, setting.group), setting.name)
            yield Entry(setting=setting, value=value, origin=self.origins[setting.conf])


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    setting: Setting
    value: object
    origin: Origin

    @property
    def text(self) -> str:
        """As a file spells it."""
        return self.setting.kind.show(self.value)

    @property
    def is_changed(self) -> bool:
        return self.origin.source is not Source.DEFAULT


class _Values:
    """What is known so far; every source replaces what an earlier one said."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {setting.conf: setting.default for setting in SETTINGS}
        self.origins = dict.fromkeys(self._values, _DEFAULT)

    def take(self, given: Given) -> None:
        setting, text = given.setting, given.text.strip()
        try:
            value = setting.kind.parse(text)
        except ValueError as error:
            told = "***" if isinstance(setting.kind, Hidden) else repr(text)
            raise ConfigError(f"{given.origin}: {setting.conf}={told}: {error}") from None
        self._values[setting.conf] = value
        self.origins[setting.conf] = given.origin

    def let_addresses_follow(self) -> None:
        """Who says one address and not the other should still be heard.

        RocketMQ listens everywhere and guesses its own address. We are on loopback until a source
        names an address, and then the one that nobody named goes with it.
        """
        bind, told = self._values["bindAddress"], self._values["brokerIP1"]
        bind_open = self.origins["bindAddress"].source is Source.DEFAULT
        told_open = self.origins["brokerIP1"].source is Source.DEFAULT
        if bind_open and not told_open and not is_loopback(told):
            self._follow("bindAddress", "::" if ":" in told else "0.0.0.0", "brokerIP1")
        elif told_open and not bind_open:
            self._follow("brokerIP1", "" if bind in WILDCARDS else bind, "bindAddress")

    def let_exporter_follow(self) -> None:
        """Who asks for a port on the command line wants it to be served, whatever a file says."""
        if self.origins["metricsPromExporterPort"].source is Source.FLAG:
            self._follow("metricsExporterType", MetricsExporter.PROM, "metricsPromExporterPort")

    def _follow(self, conf: str, value: object, other: str) -> None:
        self._values[conf] = value
        self.origins[conf] = Origin(Source.FOLLOWS, f"follows {other}")

    def warnings(self) -> Iterator[str]:
        if self._values["brokerRole"] is BrokerRole.SYNC_MASTER:
            where = self.origins["brokerRole"]
            yield f"{where}: brokerRole=SYNC_MASTER waits for no one: nothing is replicated"

    def config(self) -> Config:
        return Config(
            broker=BrokerConfig(**self._of("broker")),
            network=NetworkConfig(**self._of("network")),
            store=StoreConfig(**self._of("store")),
            consume=ConsumeConfig(**self._of("consume")),
            delay=DelayConfig(**self._of("delay")),
            transaction=TransactionConfig(**self._of("transaction")),
            namesrv=NamesrvConfig(**self._of("namesrv")),
            metrics=MetricsConfig(**self._of("metrics")),
            security=SecurityConfig(**self._of("security")),
            log=LogConfig(**self._of("log")),
            overload=OverloadConfig(**self._of("overload")),
        )

    def _of(self, group: str) -> dict[str, Any]:
        return {
            BY_CONF[conf].name: value
            for conf, value in self._values.items()
            if BY_CONF[conf].group == group
        }


def is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return address == "localhost"
