"""Settings: read once, checked once, never changed.

    resolved = Config.resolve(Path("broker.conf"), os.environ, {"--port": "10921"})
    resolved.config.network.listen_port

Read in this order:
  1. groups.py      the settings: name, default, bounds, RocketMQ's name, a sentence each
  2. kinds.py       what a value may be; text to value and back
  3. catalogue.py   the settings by each of their names
  4. properties.py  RocketMQ's file format, which is Java's
  5. sources.py     file, environment, flags
  6. resolve.py     which of them wins

A key that only RocketMQ has is a warning; one that nobody has is a ConfigError.
"""

from __future__ import annotations

from escrowmq.config.loading import (
    SETTINGS,
    Config,
    Origin,
    ResolvedConfig,
    ResolvedSetting,
    Setting,
    Source,
)
from escrowmq.config.settings import (
    BrokerConfig,
    BrokerRole,
    ClientAuth,
    ConsumeConfig,
    DelayConfig,
    FlushMode,
    LogConfig,
    LogFormat,
    LogLevel,
    MetricsConfig,
    MetricsExporter,
    NamesrvConfig,
    NetworkConfig,
    OverloadConfig,
    SecurityConfig,
    StoreConfig,
    TlsMode,
    TransactionConfig,
)

__all__ = [
    "SETTINGS",
    "BrokerConfig",
    "BrokerRole",
    "ClientAuth",
    "Config",
    "ConsumeConfig",
    "DelayConfig",
    "FlushMode",
    "LogConfig",
    "LogFormat",
    "LogLevel",
    "MetricsConfig",
    "MetricsExporter",
    "NamesrvConfig",
    "NetworkConfig",
    "Origin",
    "OverloadConfig",
    "ResolvedConfig",
    "ResolvedSetting",
    "SecurityConfig",
    "Setting",
    "Source",
    "StoreConfig",
    "TlsMode",
    "TransactionConfig",
]
