"""The native path: plain requests of a turn, from the bytes of connections to the log and back.

    chunks ─▶ PlainRequests.read ─▶ Batch ─▶ MessageStore.append_encoded ─▶ responses
                      │               └▶ responses to pulls, which wait for nothing
                      └▶ leftovers: requests that are not plain, for the Python path

Plain are the sends, half messages, ends of transactions and pulls that real clients send all the
time.
The native module reads and encodes them without an object for each (`native/` explains how). What
happens around it is decided here: whether it may be used in this turn, what is counted, when
responses leave, and what happens if the log cannot be written.

Where clients need accounts, a signed request is plain if the validator has allowed an equal one:
the same account, host and topic. The validator reports it here, and the native module, which is
told, verifies the signature.

The batch of a turn is stored before the Python path handles what is left over. A connection whose
request is not plain goes on in the Python path until the turn ends, so its requests keep their
order.

A bug in the native module raises, or panics, which is no Exception. What it costs depends on where:

    read                 speed: the Python path handles the same bytes
    encode               the requests of the batch, which are refused; nothing is stored
    apply, cancel        the broker: the table of halves may be changed in part, so the store fails
                         and the next start reads the log
    responses            the responses of the batch: its requests are answered with SYSTEM_ERROR

After a panic, the native path is not used any more.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Protocol

from escrowmq.auth.acl import Account, Action, Permission, ResourceType
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.dispatch import Channel, response_code
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable
from escrowmq.broker.processors.pull import PullProcessor
from escrowmq.broker.statistics import NORMAL, TRANSACTION, BrokerCounters
from escrowmq.broker.turn import WhenFlushed
from escrowmq.config import TransactionConfig
from escrowmq.errors import (
    CorruptRecord,
    LocalProtocolError,
    RecordNotFound,
    StoreError,
    StoreFailed,
    panic_as_exception,
)
from escrowmq.escrow.coordinator import TransactionCoordinator
from escrowmq.message.keys import encode_host
from escrowmq.remoting.codes import FLAG_ONEWAY, JSON, RequestCode, ResponseCode
from escrowmq.remoting.headers import NoFields
from escrowmq.remoting.requests import Body, Request, RequestHead
from escrowmq.remoting.responses import SendResponseEncoder
from escrowmq.store.store import MessageStore

if TYPE_CHECKING:
    from escrowmq_native import Applied, Batch

log = logging.getLogger(__name__)

# Of one connection in one turn. So many take about a millisecond; what exceeds it takes the Python
# path, which has shares and slices.
SHARE_REQUESTS_MAX: Final = 1024
BATCH_BYTES_MAX: Final = 4 << 20  # of received bytes; a turn may have several batches
# Halves of these last bytes of the log are committed without reading them again.
TAIL_BYTES: Final = 32 << 20
IPV4_BYTES: Final = 4
PORT_BYTES: Final = 4  # behind an address


class PlainChannel(Channel, Protocol):
    """A channel that accepts encoded responses."""

    def write_at_once(self, data: Body) -> None: ...
    def write_pieces(self, pieces: Sequence[Body]) -> None: ...


# Channel, its packed address, the beginning of an incomplete frame, and received bytes.
Chunk = tuple[PlainChannel, bytes, bytes, bytes]
# Index of the chunk, its remaining bytes, and whether they begin with a request that is not plain.
# If they do not, they are the beginning of an incomplete frame.
Leftover = tuple[int, bytes, bool]
# Index of the chunk, request code, opaque, whether it is one-way, log offset, queue id and queue
# offset of the message, and the transaction id of a half.
RequestOutcome = tuple[int, int, int, bool, tuple[int, int, int], bytes | None]


class NativeRequests:
    def __init__(
        self,
        module: ModuleType,
        store: MessageStore,
        topics: TopicTable,
        groups: SubscriptionGroups,
        coordinator: TransactionCoordinator,
        pulls: PullProcessor,
        counters: BrokerCounters,
        encoder: SendResponseEncoder,
        *,
        added_properties: bytes,
        is_allowed: Callable[[], bool],
        when_flushed: WhenFlushed | None,
        wall_ms: Callable[[int], int],
        access_validator: AccessValidator | None,
    ) -> None:
        """`is_allowed`: whether requests may be handled at all without the Python path."""
        self._store = store
        self._topics = topics
        self._groups = groups
        self._coordinator = coordinator
        self._counters = counters
        self._is_allowed = is_allowed
        self._when_flushed = when_flushed
        self._pulls = pulls
        self._wall_ms = wall_ms
        self._requests = module.PlainRequests(
            coordinator.halves,
            topics.sendable_queue_counts,
            store_host=encoder.store_host,
            has_crc=store.config.sealed,
            added_properties=added_properties,
            send_tail=encoder.tail,
            tail_bytes=TAIL_BYTES,
            plan_pull=pulls.plan,
            read_log=store.read_block,
            commit_offset=pulls.commit_offset,
            needs_account=access_validator is not None,
        )
        if access_validator is not None:
            access_validator.add_grant_listener(self)
        store.watch_appends(self._requests.remember_append)
        self._is_writable = False
        self._has_failed = False
        self.count = 0  # of requests that were handled here

    def change_config(
        self,
        config: TransactionConfig,
        *,
        message_bytes_max: int,
        half_bytes_max: int,
        is_writable: bool,
    ) -> None:
        """Apply limits and settings, at the start and whenever they change."""
        self._is_writable = is_writable
        self._requests.configure(
            message_bytes=message_bytes_max,
            record_bytes=self._store.unchecked_bytes_max,
            half_bytes=half_bytes_max,
            open_max=config.open_max,
            open_bytes=config.open_bytes_max,
            group_open_max=config.group_open_max,
            group_open_bytes=config.group_open_bytes_max,
            immunity_ms=None
            if config.refuses_halves
            else lambda topic, group: config.immunity_of_ms(topic, group, None),
        )

    # --- what the validator has granted: see GrantListener ---------------------------------------

    def host_trusted(self, host: str) -> None:
        packed = _pack_ipv4(host)
        if packed is not None:
            self._requests.trust_host(packed)

    def permission_granted(self, account: Account, host: str, permission: Permission) -> None:
        # A plain send, and the end of a half, need this permission on the topic and nothing else.
        packed = _pack_ipv4(host)
        is_send = (
            permission.resource_type is ResourceType.TOPIC and permission.actions == Action.PUB
        )
        if packed is not None and is_send:
            secret = account.secret_key.reveal().encode()
            self._requests.grant(account.access_key, secret, packed, permission.name)

    def grants_cleared(self) -> None:
        self._requests.clear_grants()

    # --- requests --------------------------------------------------------------------------------

    def handle(self, chunks: list[Chunk], now_ms: int) -> list[Leftover]:
        """Handle the plain requests at the beginning of each chunk. Return what is left."""
        leftovers: list[Leftover] = []
        begin = 0
        while begin < len(chunks):
            end = _batch_end(chunks, begin)
            for index, rest, is_stopped in self._handle_batch(chunks[begin:end], now_ms):
                leftovers.append((begin + index, rest, is_stopped))
            begin = end
        return leftovers

    def _handle_batch(self, chunks: list[Chunk], now_ms: int) -> Sequence[Leftover]:
        # A topic or group that was created in this turn is not saved yet: if that fails, the
        # requests that depend on it have to be refused, which the Python path does.
        is_saved = not (self._topics.is_dirty or self._groups.is_dirty)
        if self._is_writable and is_saved and not self._has_failed and self._is_allowed():
            try:
                batch: Batch = self._requests.read(
                    chunks, now_ms, SHARE_REQUESTS_MAX, self._pulls.plan_version
                )
            except BaseException as error:
                # Nothing is stored yet, and `read` has undone what it had reserved.
                self._log_failure("the native path failed and is not used any more", error)
                self._has_failed = True
            else:
                self._respond_to_pulls(batch, chunks)
                for index, access_key in batch.accounts:
                    chunks[index][0].set_account(access_key)
                if len(batch):
                    self._append(batch, chunks, now_ms)
                return batch.leftovers
        return [(index, rest + data, True) for index, (_, _, rest, data) in enumerate(chunks)]

    def _respond_to_pulls(self, batch: Batch, chunks: list[Chunk]) -> None:
        for error in batch.pull_errors():
            # The Python path answers the pull, and reports what is wrong with the store.
            if not isinstance(error, StoreError | CorruptRecord | RecordNotFound):
                log.error("the native path could not answer a pull", exc_info=error)
        for index, pieces in batch.pull_responses():
            chunks[index][0].write_pieces(pieces)
        for code, topic, group, pulls, messages, size in batch.deliveries():
            self.count += pulls
            self._counters.requests[code] += pulls
            self._counters.record_pull(topic, group, messages, size)

    def _append(self, batch: Batch, chunks: list[Chunk], now_ms: int) -> None:
        # Responses may wait for a flush, and must not keep the received bytes until then.
        channels = [chunk[0] for chunk in chunks]
        try:
            self._store.append_encoded(batch, now_ms=self._wall_ms(now_ms))
        except StoreError as error:
            self._refuse_all(batch, channels, error)
            return
        except BaseException as raised:  # a bug must not leave clients without a response
            failure = self._log_failure("append failed", raised)
            self._refuse_all(batch, channels, StoreFailed(f"internal error: {failure}"))
            return
        try:
            applied = batch.apply()
            self._coordinator.apply_native(applied)
        except BaseException as raised:
            # The records are in the log, but memory does not know what they mean: see turn.py.
            self._store.fail(self._log_failure("stored records could not be applied", raised))
            self._respond_failure(batch, channels, ResponseCode.SYSTEM_ERROR)
            return
        try:
            self._count(batch, applied)
            self._pulls.batch_arrived(batch.queues, batch)
        except BaseException as raised:
            self._log_failure("stored records not announced", raised)
        self._respond_when_durable(batch, channels, applied)

    def _log_failure(self, event: str, raised: BaseException) -> Exception:
        """Log a bug, and return it as an Exception. Use the native path no more if it panicked."""
        error = panic_as_exception(raised)
        log.error(event, exc_info=raised)
        if error is not raised:
            log.error("the native path panicked and is not used any more")
            self._has_failed = True
        return error

    def _count(self, batch: Batch, applied: Applied) -> None:
        counters = self._counters
        self.count += len(batch)
        counters.requests[RequestCode.SEND_MESSAGE_V2] += applied.send_count
        counters.requests[RequestCode.END_TRANSACTION] += applied.end_count
        counters.records_per_append.observe(batch.record_count)
        counters.stored_messages += batch.record_count
        for topic, is_half, size, count in applied.sizes:
            counters.record_message(topic, TRANSACTION if is_half else NORMAL, size, count)

    # --- responses -------------------------------------------------------------------------------

    def _respond_when_durable(
        self, batch: Batch, channels: list[PlainChannel], applied: Applied
    ) -> None:
        counters = self._counters
        start_s = counters.turn_start_s()
        plain_count = applied.send_count - applied.half_count

        def on_flushed(error: StoreError | None) -> None:
            if error is None:
                self._respond_success(batch, channels)
            else:
                self._respond_failure(batch, channels, _response_code(error))
            counters.record_send_responses(plain_count, start_s)

        if self._when_flushed is None:
            on_flushed(None)
        else:
            self._when_flushed(self._store.end, on_flushed)

    def _respond_success(self, batch: Batch, channels: list[PlainChannel]) -> None:
        try:
            responses = batch.responses()
        except BaseException as raised:
            self._log_failure("responses could not be encoded", raised)
            self._respond_failure(batch, channels, ResponseCode.SYSTEM_ERROR)
            return
        for index, data in responses:
            channels[index].write_at_once(data)

    def _respond_failure(self, batch: Batch, channels: list[PlainChannel], code: int) -> None:
        """Respond to requests whose records are in the log, but not as durable as they should."""
        for index, request_code, opaque, is_oneway, position, key in self._requests_of(batch):
            channel = channels[index]
            request = _request(request_code, opaque, is_oneway=is_oneway)
            try:
                if request_code == RequestCode.END_TRANSACTION:
                    channel.respond(request, code=code, remark="the decision was not stored")
                    continue
                if key is None:  # as the Python path counts them
                    self._counters.refused[request_code, code] += 1
                transaction_id = None if key is None else key.decode()
                channel.respond_send(request, *position, code, transaction_id)
            except Exception:
                log.exception("request not responded to peer=%s", channel.address)

    def _refuse_all(self, batch: Batch, channels: list[PlainChannel], error: StoreError) -> None:
        """Undo a batch that could not be stored, and refuse its requests."""
        try:
            batch.cancel()
        except BaseException as raised:
            # Some keys may stay reserved and some halves undecidable: only a restart helps.
            self._store.fail(self._log_failure("refused requests could not be undone", raised))
        code = _response_code(error)
        for index, request_code, opaque, is_oneway, _, key in self._requests_of(batch):
            channel = channels[index]
            remark = str(error) if key is None else "the half message was not stored"
            if request_code == RequestCode.END_TRANSACTION:
                remark = "the decision was not stored"
            self._counters.requests[request_code] += 1
            if request_code != RequestCode.END_TRANSACTION:  # as the Python path counts them
                self._counters.refused[request_code, code] += 1
            try:
                request = _request(request_code, opaque, is_oneway=is_oneway)
                channel.respond(request, code=code, remark=remark)
            except Exception:
                log.exception("request not responded to peer=%s", channel.address)

    def _requests_of(self, batch: Batch) -> Sequence[RequestOutcome]:
        try:
            return batch.requests()
        except BaseException as raised:
            # These clients have to ask again. Those of other batches must not.
            self._log_failure("requests not responded to", raised)
            return ()


def _batch_end(chunks: list[Chunk], begin: int) -> int:
    """Return the index behind the last chunk of a batch of limited size."""
    size, end = 0, begin
    while end < len(chunks) and size < BATCH_BYTES_MAX:
        size += len(chunks[end][2]) + len(chunks[end][3])
        end += 1
    return end


def _pack_ipv4(host: str) -> bytes | None:
    """Return the four bytes of an address; None if it is another one."""
    try:
        packed = encode_host(host, 0)[:-PORT_BYTES]
    except LocalProtocolError:  # with a zone, for example
        return None
    return packed if len(packed) == IPV4_BYTES else None


def _request(code: int, opaque: int, *, is_oneway: bool) -> Request[Any]:
    """Return a request from which only a response can be made."""
    flag = FLAG_ONEWAY if is_oneway else 0
    return Request(RequestHead(code=code, opaque=opaque, flag=flag, fields=NoFields()), b"", JSON)


def _response_code(error: StoreError) -> int:
    return response_code(error) or ResponseCode.SYSTEM_ERROR
