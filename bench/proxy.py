"""Apache RocketMQ 5.5.0 with its gRPC proxy, for clients that only speak gRPC."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench.servers import Apache
from tests.interop.apache import ChildProcess, is_listening
from tests.support.ports import free_ports

VERSION: Final = "5.5.0"


class Proxied(Apache):
    def __init__(self, directory: Path, settings: Mapping[str, object]) -> None:
        super().__init__(VERSION, directory, settings)
        self.grpc_port, self._remoting_port = free_ports(2)
        self._proxy: ChildProcess | None = None

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    def start(self) -> None:
        super().start()
        if self._proxy is not None:
            return
        settings = {
            "rocketMQClusterName": "DefaultCluster",
            "namesrvAddr": self.namesrv_address,
            "proxyMode": "CLUSTER",
            "grpcServerPort": self.grpc_port,
            "remotingListenPort": self._remoting_port,
        }
        file = self.directory / "conf" / "rmq-proxy.json"
        file.write_text(json.dumps(settings))
        main = "org.apache.rocketmq.proxy.ProxyStartup"
        proxy = self._java("proxy", "1g", main, "-pc", str(file), "-n", self.namesrv_address)
        proxy.wait_until_ready(lambda: is_listening(self.grpc_address))
        self._proxy = proxy

    def stop(self) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(super().stop)
            if self._proxy is not None:
                proxy, self._proxy = self._proxy, None
                proxy.kill()
