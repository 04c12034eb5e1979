"""Every setting, by each of its names. Made from the dataclasses of the groups."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Final

from escrowmq.config import groups
from escrowmq.config.kinds import Kind
from escrowmq.config.logs import LogConfig
from escrowmq.config.overload import OverloadConfig
from escrowmq.config.security import SecurityConfig
from escrowmq.config.transactions import TransactionConfig
from escrowmq.rocketmq_keys import FORMER_KEYS, ROCKETMQ_KEYS

ENVIRONMENT_PREFIX: Final = "ESCROWMQ_"
_OURS: Final = "escrow"
_WORDS: Final = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    group: str
    name: str  # in Python and TOML
    conf: str  # in RocketMQ's files and TOML
    kind: Kind
    default: object
    unit: str
    help: str

    @property
    def environment(self) -> str:
        """`listenPort` is ESCROWMQ_LISTEN_PORT, `escrowNamesrvPort` ESCROWMQ_NAMESRV_PORT."""
        words = _WORDS.sub("_", self.conf.removeprefix(_OURS)).replace(".", "_")
        return f"{ENVIRONMENT_PREFIX}{words.upper()}"

    @property
    def is_ours(self) -> bool:
        return self.conf.startswith(_OURS)


GROUPS: Final = {
    "broker": groups.BrokerConfig,
    "network": groups.NetworkConfig,
    "store": groups.StoreConfig,
    "consume": groups.ConsumeConfig,
    "delay": groups.DelayConfig,
    "transaction": TransactionConfig,
    "namesrv": groups.NamesrvConfig,
    "metrics": groups.MetricsConfig,
    "security": SecurityConfig,
    "log": LogConfig,
    "overload": OverloadConfig,
}

SETTINGS: Final = tuple(
    Setting(group=group, name=item.name, default=item.default, **item.metadata)
    for group, members in GROUPS.items()
    for item in fields(members)
)
BY_CONF: Final = {setting.conf: setting for setting in SETTINGS}
BY_NAME: Final = {setting.name: setting for setting in SETTINGS}
BY_ENVIRONMENT: Final = {setting.environment: setting for setting in SETTINGS}

# What a file asks for in vain with these is worth more words than "ignored".
_IN_VAIN: Final = {
    **dict.fromkeys(
        ("enableDLegerCommitLog", "enableControllerMode", "inSyncReplicas", "haListenPort"),
        "; nothing is replicated",
    ),
    "storePathCommitLog": "; the log is under storePathRootDir",
}


def ignored(key: str) -> str | None:
    """What to say of a key that RocketMQ has, or once had, and we do not; None of any other."""
    if key in BY_CONF:
        return None
    if key in FORMER_KEYS:
        return (
            f"{key} is ignored, as RocketMQ 4.9 and 5 ignore it{nearest(key, BY_CONF, cutoff=0.9)}"
        )
    if key in ROCKETMQ_KEYS:
        what = f"{key} is a setting of RocketMQ that EscrowMQ does not have; it is ignored"
        return what + _IN_VAIN.get(key, "")
    return None


def nearest(key: str, known: Iterable[str], *, cutoff: float = 0.7) -> str:
    """`; did you mean …?`, or nothing. Upper and lower case are the same here."""
    by_lower = {name.lower(): name for name in known}
    near = difflib.get_close_matches(key.lower()[:100], by_lower, n=1, cutoff=cutoff)
    return f"; did you mean {by_lower[near[0]]}?" if near else ""
