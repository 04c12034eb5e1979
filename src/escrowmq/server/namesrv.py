"""The name server on its port, and the registration of a broker with name servers.

serve_name_server()   the name server and its key-value file, DATA/namesrv/kvConfig.json
Registrar             keeps a broker registered with one name server; it retries for ever
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import msgspec

from escrowmq.auth.acl import Permission
from escrowmq.broker.broker import Broker
from escrowmq.client.connection import ClientConnection
from escrowmq.client_memory import ClientMemory, MemoryUse
from escrowmq.clock import Clock, SteadyClock
from escrowmq.config import Config
from escrowmq.errors import (
    BrokenBody,
    ConfigError,
    EscrowError,
    RequestRefused,
    StoreError,
    StoreFailed,
    TableFull,
)
from escrowmq.message.topic_config import DataVersion, TopicConfig
from escrowmq.metrics import Registry
from escrowmq.namesrv.name_server import KvConfig, NameServer, encode_kv_config_in_slices
from escrowmq.namesrv.registration import (
    BrokerDescription,
    RegistrationRequest,
    registration_request,
    unregistration_request,
)
from escrowmq.namesrv.route_table import RouteTable
from escrowmq.parsing import parse_lenient_json
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.connection import SignFunction
from escrowmq.remoting.headers import NoFields
from escrowmq.remoting.requests import Request, request_for_response
from escrowmq.remoting.responses import encode_error
from escrowmq.server.connection_limits import MemoryWatermark
from escrowmq.server.live_config import LiveConfig
from escrowmq.server.metrics import remoting_metrics
from escrowmq.server.remoting_server import (
    ConnectionWrapper,
    RemotingServer,
    bind,
    bound_port,
    reachable_host,
)
from escrowmq.server.security import (
    AccessControl,
    client_context,
    outgoing_signer,
    own_namesrv_context,
)
from escrowmq.server.server_connection import ServerConnection
from escrowmq.server.tasks import background_tasks, repeat
from escrowmq.sliced_work import SlicedWork, run_to_end
from escrowmq.store.disk import Disk, RealDisk, read_file, replace_file

log = logging.getLogger(__name__)

# --- the name server -----------------------------------------------------------------------------

KV_CONFIG_PATH: Final = "namesrv/kvConfig.json"
SWEEP_INTERVAL_S: Final = 1.0
_KV_CHANGES: Final = frozenset({RequestCode.PUT_KV_CONFIG, RequestCode.DELETE_KV_CONFIG})
_UNSAVED_CHANGE_BYTES: Final = (
    2_000  # what waits for a save: a response, a callback and its request
)

# Called with None when a change is durable, or with an error when it was undone.
SavedCallback = Callable[[StoreError | None], None]


class KvConfigFile:
    """The key-value config of a name server, in a file.

    A change is durable before it is responded to. The whole file is written each time, so it is
    encoded in slices and written in a thread; changes that are made meanwhile are saved together
    afterwards. If the disk refuses a write, every change since the last save is undone, and their
    clients get an error.

    Use it only in the event loop that was running when it was created.
    """

    def __init__(self, disk: Disk) -> None:
        """Raises ConfigError if the file exists and cannot be read."""
        self._disk = disk
        data = read_file(disk, KV_CONFIG_PATH)
        try:
            content = parse_lenient_json(data) if data else {}
        except BrokenBody as error:
            raise ConfigError(f"{KV_CONFIG_PATH}: {error}") from error
        self.settings = KvConfig.load(content)
        self._saved_content = self.settings.dump()
        # How work goes on in slices; the server is created later.
        self.add_background_work: Callable[[SlicedWork], None] = run_to_end
        self._loop = asyncio.get_running_loop()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="escrowmq-kv-config")
        self._waiting: list[SavedCallback] = []  # for the next save
        self._saving: list[SavedCallback] = []  # for the one that is under way
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    def when_saved(self, callback: SavedCallback) -> None:
        """Save what has changed. Call `callback` with None when it is durable, or with an error."""
        self._waiting.append(callback)
        if self._is_idle.is_set():
            self._is_idle.clear()
            self.add_background_work(self._save())

    async def close(self) -> None:
        """Complete the saves that have been requested, and end the thread."""
        await self._is_idle.wait()
        self._thread.shutdown()

    def _save(self) -> SlicedWork:
        self._saving, self._waiting = self._waiting, []
        try:
            content = self.settings.dump()
            pieces = yield from encode_kv_config_in_slices(content)
            running = self._loop.run_in_executor(self._thread, self._write, pieces)
        except Exception as error:  # no memory, perhaps: nobody may wait for ever
            self._finish(error)
            return
        running.add_done_callback(lambda done: self._written(content, done))

    def _write(self, pieces: list[bytes]) -> None:
        # Long pieces of bytes are joined without the lock of the interpreter.
        replace_file(self._disk, KV_CONFIG_PATH, b"".join(pieces))

    def _written(self, content: dict[str, Any], done: asyncio.Future[None]) -> None:
        error = done.exception()
        if error is None:
            self._saved_content = content
        self._finish(error)

    def _finish(self, error: BaseException | None) -> None:
        callbacks, self._saving = self._saving, []
        failure = None
        if error is not None:
            log.warning("key-value settings not saved, the changes are undone: %s", error)
            failure = error if isinstance(error, StoreError) else StoreFailed(str(error))
            # Also those that were made meanwhile: they may depend on the others.
            callbacks += self._waiting
            self._waiting = []
            self.settings.restore(self._saved_content)
        for callback in callbacks:
            callback(failure)
        if self._waiting:
            self.add_background_work(self._save())
        else:
            self._is_idle.set()


class _NameServerHandler:
    """Access control and persistence around the name server."""

    def __init__(
        self,
        namesrv: NameServer,
        access: AccessControl,
        kv_config_file: KvConfigFile,
        memory: ClientMemory,
    ) -> None:
        self._namesrv = namesrv
        self._access = access
        self._kv_config_file = kv_config_file
        self._memory = memory
        # How work goes on in slices that no request waits for; the server is created later.
        self.add_background_work: Callable[[SlicedWork], None] = run_to_end

    def handle(
        self, connection: ServerConnection, request: Request[Any], now_ms: int
    ) -> SlicedWork | None:
        validator = self._access.validator
        if validator is not None:
            try:
                validator.check(
                    request, connection.address, self._required_permissions, now_ms=now_ms
                )
            except RequestRefused as error:
                connection.write(encode_error(request, error))
                return None
        if request.head.code in _KV_CHANGES:
            self._change_kv_config(connection, request, now_ms)
            return None
        return self._respond(connection, request, now_ms)

    def _respond(
        self, connection: ServerConnection, request: Request[Any], now_ms: int
    ) -> SlicedWork:
        response = yield from self._namesrv.handle_in_slices(request, connection, now_ms=now_ms)
        connection.write(response)

    def _change_kv_config(
        self, connection: ServerConnection, request: Request[Any], now_ms: int
    ) -> None:
        """Change a setting, and respond when the change is durable."""
        try:
            # A disk may hang, and the responses wait for it.
            self._memory.reserve(connection, MemoryUse.RESULTS, _UNSAVED_CHANGE_BYTES)
        except TableFull as error:
            refusal = RequestRefused(ResponseCode.SYSTEM_BUSY, str(error))
            connection.write(encode_error(request, refusal))
            return
        revision = self._namesrv.kv_config.revision
        response = self._namesrv.handle(request, connection, now_ms=now_ms)
        waiting_request = request_for_response(request, NoFields())

        def respond(error: StoreError | None) -> None:
            self._memory.release(connection, MemoryUse.RESULTS, _UNSAVED_CHANGE_BYTES)
            if error is not None:
                refusal = RequestRefused(ResponseCode.SYSTEM_ERROR, f"not saved: {error}")
                connection.write(encode_error(waiting_request, refusal))
            else:
                connection.write(response)

        if self._namesrv.kv_config.revision == revision:
            respond(None)  # it was refused, or there was nothing to delete
        else:
            self._kv_config_file.when_saved(respond)

    def _required_permissions(self, request: Request[Any]) -> tuple[Permission, ...]:
        if self._namesrv.is_public(request.head.code):
            return ()
        return self._access.administrator_permissions()

    def end_turn(self, now_ms: int) -> bool:
        return False

    def channel_closed(self, connection: ServerConnection) -> None:
        self._namesrv.channel_closed(connection)
        self.remove_stale_routes()

    def remove_stale_routes(self) -> None:
        """Remove what brokers that went had registered, in slices."""
        if self._namesrv.routes.has_stale_routes:
            self.add_background_work(self._namesrv.routes.remove_stale_routes())


@contextlib.asynccontextmanager
async def serve_name_server(
    clock: Clock,
    access: AccessControl,
    registry: Registry,
    live_config: LiveConfig,
    failed: asyncio.Event,
    watermark: MemoryWatermark,
    wrap_connection: ConnectionWrapper | None = None,
) -> AsyncIterator[str]:
    """Run a name server on its port; yield its address. Set `failed` if it cannot go on.

    If the block raises, the port and its connections are closed at once, without responses.
    """
    config = live_config.config
    kv_config_file = KvConfigFile(RealDisk(config.store.root_dir))
    host = config.network.bind_address
    listening_socket = bind(host, config.namesrv.namesrv_port)
    port = bound_port(listening_socket)
    name_server = NameServer(
        routes=RouteTable(memory=watermark.memory),
        kv_config=kv_config_file.settings,
        config={"listenPort": f"{port}", "bindAddress": host},
    )
    clock = SteadyClock(clock)  # brokers must not expire when the wall clock jumps
    handler = _NameServerHandler(name_server, access, kv_config_file, watermark.memory)
    server = RemotingServer(
        handler,
        clock,
        config.network,
        tls=access.tls,
        requires_tls=config.security.requires_tls,
        keeps_headers=access.validator is not None,
        watermark=watermark,
        wrap_connection=wrap_connection,
    )
    handler.add_background_work = server.add_background_work
    kv_config_file.add_background_work = server.add_background_work
    await server.listen(listening_socket)
    registry.add(remoting_metrics(server, "namesrv"))
    live_config.add_listener(lambda changed: server.change_config(changed.network))
    log.info("name server listens address=%s:%d", host, port)

    def expire() -> None:
        for connection in name_server.tick(now_ms=clock.now_ms()):
            connection.close()  # type: ignore[attr-defined]  # a ServerConnection
        handler.remove_stale_routes()

    scan_interval_s = config.namesrv.broker_scan_interval_s
    try:
        async with background_tasks(
            failed,
            repeat("limits of connections", server.sweep_connections, SWEEP_INTERVAL_S),
            repeat("expiry of brokers", expire, scan_interval_s),
        ):
            yield f"{reachable_host(host)}:{port}"
    except BaseException:
        await server.abort()
        raise
    server.stop_reading()
    await kv_config_file.close()
    await server.close()


# --- registration of a broker --------------------------------------------------------------------

RESPONSE_TIMEOUT_S = 5.0
RETRY_INTERVAL_S = 1.0


class Registrar:
    """Keep a broker registered with one name server.

    It registers at an interval and whenever a topic changes, and reconnects after errors. `topics`
    returns the current topics and their version. A cancelled `run()` unregisters the broker.
    """

    def __init__(
        self,
        address: str,
        description: BrokerDescription,
        topics: Callable[[], tuple[list[TopicConfig], DataVersion]],
        *,
        interval_s: float,
        sign: SignFunction | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._sign = sign
        self._tls = tls
        self._address = address
        self._description = description
        self._topics = topics
        self._interval_s = interval_s
        self._topics_changed = asyncio.Event()
        self.registered = asyncio.Event()  # set after the first registration

    def topics_changed(self) -> None:
        """Register again now, not only at the next interval."""
        self._topics_changed.set()

    async def run(self) -> None:
        while True:
            try:
                connection = await ClientConnection.connect(
                    self._address, _ignore_request, sign=self._sign, ssl_context=self._tls
                )
                try:
                    await self._keep_registered(connection)
                finally:
                    connection.close()
            except EscrowError as error:
                log.warning("not registered, will retry name_server=%s: %s", self._address, error)
                await asyncio.sleep(RETRY_INTERVAL_S)

    async def _keep_registered(self, connection: ClientConnection) -> None:
        try:
            while True:
                self._topics_changed.clear()
                topics, version = self._topics()
                await _call(connection, registration_request(self._description, topics, version))
                if not self.registered.is_set():
                    log.info("registered name_server=%s", self._address)
                    self.registered.set()
                # Not wait_for: in Python 3.11 it loses a cancellation that comes with the result.
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._interval_s):
                        await self._topics_changed.wait()
        except asyncio.CancelledError:
            with contextlib.suppress(EscrowError):
                await _call(connection, unregistration_request(self._description))
            raise


async def _call(connection: ClientConnection, request: RegistrationRequest) -> None:
    await connection.call_checked(
        request.code, request.fields, request.body, timeout_s=RESPONSE_TIMEOUT_S
    )


def _ignore_request(connection: ClientConnection, request: Request[Any]) -> None:
    """Ignore what a name server of RocketMQ sends to brokers that may become masters."""


def new_registrars(
    config: Config,
    broker: Broker,
    address: str,
    namesrv_addresses: list[str],
    own_signer: SignFunction | None,
) -> list[Registrar]:
    """Return a registrar for each name server.

    `namesrv_addresses` are those of this process, which accept `own_signer`; the configured ones
    come after them.
    """
    host, _, port = address.rpartition(":")
    description = BrokerDescription(
        cluster=config.broker.cluster_name,
        name=config.broker.broker_name,
        address=address,
        ha_address=f"{host}:{int(port) + 1}",
    )
    security = config.security
    own_tls = other_tls = None
    if security.requires_tls:
        own_tls = own_namesrv_context(security)
    if security.tls_outgoing:
        other_tls = client_context(security)
    return [
        Registrar(
            namesrv_address,
            description,
            lambda: _topic_configs(broker),
            interval_s=config.broker.register_interval_s,
            sign=own_signer if namesrv_address in namesrv_addresses else outgoing_signer(config),
            tls=own_tls if namesrv_address in namesrv_addresses else other_tls,
        )
        for namesrv_address in dict.fromkeys([*namesrv_addresses, *config.broker.namesrv_addresses])
    ]


def _topic_configs(broker: Broker) -> tuple[list[TopicConfig], DataVersion]:
    # Attributes mean nothing to a name server, and there can be many topics.
    topics = [
        msgspec.structs.replace(topic, attributes={}, other=msgspec.UNSET)
        for topic in broker.topics.configs().values()
    ]
    return topics, broker.topics.version
