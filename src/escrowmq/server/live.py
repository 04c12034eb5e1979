"""Settings that take effect without a restart: SIGHUP reads the sources again, and `online.py`
changes single ones for an operator.

What may change while the server runs is in LIVE. Another setting that has changed is named in the
log and stays as it was until the next start. A file that cannot be read changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Final

from escrowmq.config import SETTINGS, Config, Resolved
from escrowmq.errors import ConfigError

log = logging.getLogger(__name__)

LIVE: Final = frozenset(
    {
        "escrowLogLevel",
        "escrowLogFormat",
        "escrowConnectionsMax",
        "escrowInFlightBytesMax",
        "escrowConnectionInFlightBytesMax",
        "escrowUnflushedBytesMax",
        "escrowConnectionSendsMax",
        "escrowConnectionSendBytesMax",
        "escrowTopicSendsMax",
        "escrowTopicSendBytesMax",
        "longPollingEnable",
        "shortPollingTimeMills",
        "maxTransferCountOnMessageInMemory",
        "maxTransferBytesOnMessageInMemory",
        "enablePropertyFilter",
        "fileReservedTime",
        "deleteWhen",
        "diskMaxUsedSpaceRatio",
        "diskSpaceCleanForciblyRatio",
        "diskSpaceWarningLevelRatio",
        "autoCreateTopicEnable",
        "autoCreateSubscriptionGroup",
        "brokerPermission",
        "maxMessageSize",
        "rejectTransactionMessage",
        "transactionTimeOut",
        "transactionCheckMax",
        "transactionCheckInterval",
        "escrowCheckBackoffPercent",
        "escrowTimeOuts",
        "escrowCheckIntervals",
        "escrowOpenMax",
        "escrowOpenPerGroupMax",
        "escrowOpenBytesMax",
        "escrowOpenBytesPerGroupMax",
    }
)


class LiveSettings:
    """`reread` gives what the sources say now; None if they cannot be asked again."""

    def __init__(self, config: Config, reread: Callable[[], Resolved] | None = None) -> None:
        self.config = config
        self._reread = reread
        self._appliers: list[Callable[[Config], None]] = []

    def add(self, apply: Callable[[Config], None]) -> None:
        """Called with what holds from now on, after each change."""
        self._appliers.append(apply)

    def read_again(self) -> None:
        if self._reread is None:
            return
        try:
            said = self._reread().config
        except ConfigError as error:
            log.error("configuration not read, nothing has changed: %s", error)
            return
        config, changed = self._merged(said)
        if not changed:
            log.info("configuration read again, nothing to change")
            return
        self.change(config)

    def change(self, config: Config) -> None:
        """It holds from now on, for everybody who lives by it."""
        self.config = config
        for apply in self._appliers:
            apply(config)

    def _merged(self, said: Config) -> tuple[Config, bool]:
        merged, changed = self.config, False
        for setting in SETTINGS:
            group = getattr(merged, setting.group)
            before, now = (getattr(g, setting.name) for g in (group, getattr(said, setting.group)))
            if before == now:
                continue
            old, new = setting.kind.show(before), setting.kind.show(now)
            if setting.conf not in LIVE:
                log.warning("%s stays %s: %s needs a restart", setting.conf, old, new)
                continue
            log.warning("%s is %s from now on, was %s", setting.conf, new, old)
            merged = replace(merged, **{setting.group: replace(group, **{setting.name: now})})
            changed = True
        return merged, changed
