"""Apache's name server without its broker, and its broker without its name server.

So that either can be put together with ours:

    with ApacheNamesrv("5.5.0", there) as names, EscrowMQ(here, role="broker",
                                                          namesrv_address=names.namesrv_address):
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from tests.interop import apache
from tests.interop.apache import PORT_ATTEMPTS, ApacheRocketMQ, ProcessFailed
from tests.interop.jars import fetch


class ApacheNamesrv(ApacheRocketMQ):
    """The name server alone."""

    def start(self) -> None:
        self._jars = fetch(self.version)
        for attempt in range(PORT_ATTEMPTS):
            self.namesrv_port, self.port = apache.free_server_ports()
            self._write_configuration()
            try:
                self._namesrv = self._start_namesrv()
                return
            except ProcessFailed as error:
                if "BindException" not in str(error) or attempt == PORT_ATTEMPTS - 1:
                    raise


class ApacheBroker(ApacheRocketMQ):
    """The broker alone; it registers with a name server that is already there."""

    def __init__(
        self,
        version: str,
        directory: Path,
        settings: Mapping[str, object] | None = None,
        *,
        namesrv_address: str,
    ) -> None:
        super().__init__(version, directory, settings)
        self._elsewhere = namesrv_address

    @property
    def namesrv_address(self) -> str:
        return self._elsewhere

    def start(self) -> None:
        self._jars = fetch(self.version)
        for attempt in range(PORT_ATTEMPTS):
            _, self.port = apache.free_server_ports()
            self._write_configuration()
            try:
                self._broker = self._start_broker()
                return
            except ProcessFailed as error:
                if "in use" not in str(error) or attempt == PORT_ATTEMPTS - 1:
                    raise
