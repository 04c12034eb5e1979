"""The configuration: declared once, read at start, checked, immutable.

    resolved = load_config(Path("broker.conf"), os.environ, {"--port": "10921"})
    resolved.config.network.listen_port

    settings.py  ──────────────┐ declarations
    broker.conf, TOML ─────────┤
    ESCROWMQ_… variables ──────┼─→ load_config() ─→ Config ─→ each part of the server
    flags of `escrowmq serve` ─┘                              gets its group

What always holds: a group contains only valid values, however it was created. A setting has one
declaration; its default, its key and its documentation appear nowhere else.

Modules in reading order:
  settings.py         every setting, in groups; derived values
  setting_types.py    the types of values: parse, check, format
  loading.py          file, environment, flags; where each value is from
  properties_file.py  Java's properties format, which RocketMQ uses
  rocketmq_keys.py    the keys of RocketMQ, to tell an unsupported one from a misspelt one
"""

from __future__ import annotations

from escrowmq.config.loading import (
    SETTINGS,
    Origin,
    ResolvedConfig,
    ResolvedSetting,
    Setting,
    Source,
    load_config,
)
from escrowmq.config.settings import (
    BrokerConfig,
    BrokerRole,
    ClientAuth,
    Config,
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
    "load_config",
]
