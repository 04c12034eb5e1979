"""Keys and values of a name server, in a file: `namesrv/kvConfig.json` under the data directory.

Each change is durable before it is answered; if the disk refuses, that is logged, and tried again.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from escrowmq.errors import BrokenBody, ConfigError, StoreError
from escrowmq.message.fastjson import lenient_json
from escrowmq.namesrv.settings import Settings
from escrowmq.store.disk import Disk, read_file, replace_file

log = logging.getLogger(__name__)

PATH: Final = "namesrv/kvConfig.json"


class KeptSettings:
    def __init__(self, disk: Disk) -> None:
        """Raises ConfigError if the file is there and cannot be read."""
        self._disk = disk
        data = read_file(disk, PATH)
        try:
            content = lenient_json(data) if data else {}
        except BrokenBody as error:
            raise ConfigError(f"{PATH}: {error}") from error
        self.settings = Settings.load(content)
        self._saved = self.settings.revision

    def save(self) -> None:
        """If there is anything new."""
        if self.settings.revision == self._saved:
            return
        try:
            replace_file(self._disk, PATH, msgspec.json.encode(self.settings.dump()))
        except StoreError as error:
            log.warning("key-value settings not saved: %s", error)
        else:
            self._saved = self.settings.revision
