"""The broker: creates the processors and passes each request to the one that handles it.

It has no socket and starts no task; its owner calls it:

    handle()     for each request that a channel received; returns work if it takes long
    end_turn()   once per turn of the event loop: one append for everything handled in it
    tick()       whenever something is due, see next_tick_ms(), and about once a second if not
    save()       every few seconds: write to files what is not in the log
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec

from escrowmq.auth.acl import Action, Permission, ResourceType
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.delayed_messages import DelayedMessages
from escrowmq.broker.dispatch import Channel, Handler, RequestPermissions, respond_failure
from escrowmq.broker.flow_control import FlowControl
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable, creations_of_request
from escrowmq.broker.native_requests import NativeRequests
from escrowmq.broker.processors.admin_broker import (
    BackupProcessor,
    BrokerAdmin,
    BrokerInfo,
    BrokerSettings,
    FixedSettings,
)
from escrowmq.broker.processors.admin_groups import ConsumerRelay, GroupAdmin, OffsetAdmin
from escrowmq.broker.processors.admin_metadata import AccessAdmin, MetadataAdmin
from escrowmq.broker.processors.clients import ClientProcessor
from escrowmq.broker.processors.pull import PullProcessor
from escrowmq.broker.processors.query import QueryProcessor
from escrowmq.broker.processors.send import SendProcessor
from escrowmq.broker.processors.send_back import ReplyProcessor, SendBackProcessor
from escrowmq.broker.statistics import BrokerCounters, Statistics, utc_day
from escrowmq.broker.transactions.admin import TransactionAdmin
from escrowmq.broker.transactions.end import EndProcessor
from escrowmq.broker.transactions.group_decisions import GroupDecisions
from escrowmq.broker.turn import Turn, WhenFlushed
from escrowmq.client_memory import ClientMemory
from escrowmq.clock import ClockReport
from escrowmq.config import Config
from escrowmq.consume.members import ConsumerGroups, ProducerGroups, QueueLocks
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import RequestRefused, StoreError
from escrowmq.escrow.coordinator import DECISION_PIECE_BYTES
from escrowmq.escrow.half_table import new_half_table
from escrowmq.escrow.snapshot import TimeConversion
from escrowmq.limited_log import LimitedLog
from escrowmq.message.keys import UniqueKeyGenerator, decode_host
from escrowmq.message.record import LogOffset, NewRecord
from escrowmq.native import NativePath, load_native
from escrowmq.peer import Peer
from escrowmq.remoting.codes import RequestCode, ResponseCode, request_name
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import SendResponseEncoder
from escrowmq.sliced_work import SlicedWork, SliceScheduler, run_to_end
from escrowmq.store.commit_log import AppendResult
from escrowmq.store.config_files import groups_file, offsets_file, topics_file
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

EXPIRE_INTERVAL_MS: Final = 10_000
TICK_MS_MIN: Final = 10  # between two ticks, however many checks are due
IPV4_HOST_BYTES: Final = 8


class Broker:
    def __init__(
        self,
        disk: Disk,
        store: MessageStore,
        config: Config,
        unique_keys: UniqueKeyGenerator,
        *,
        store_host: bytes,
        version: str = "EscrowMQ",
        when_flushed: WhenFlushed | None = None,
        on_topics_changed: Callable[[], None] = lambda: None,
        flush: WhenFlushed | None = None,
        counters: BrokerCounters | None = None,
        access_validator: AccessValidator | None = None,
        day_of: Callable[[int], int] = utc_day,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
        past_times: TimeConversion | None = None,
        decision_piece_bytes: int = DECISION_PIECE_BYTES,
        memory: ClientMemory | None = None,
        elapsed_s: Callable[[], float] = lambda: 0.0,
        native: NativePath | None = None,
    ) -> None:
        """Create a broker on an open store.

        when_flushed: if given, responses wait for the flush (SYNC_FLUSH).
        flush: how a backup waits for a flush; without it the store is flushed in the call.
        access_validator: checks every request. Without a validator, every request is allowed.
        wall_ms: converts the broker's time, which never goes back, to the wall-clock time that
            messages are stamped with and that delayed messages are due by.
        elapsed_s: measures how long work takes, so that long work is done in slices. Without it,
            all work of a turn is done in that turn.
        past_times: converts times that an earlier process recorded to the broker's time. Without
            it they are believed.
        memory: counts what is kept for each channel. Without it, nothing is limited by bytes.
        native: the native path, or why there is none. Without it, it is used if it is installed.
        """
        self.native = load_native() if native is None else native
        self._memory = ClientMemory() if memory is None else memory
        self.store = store
        self.counters = BrokerCounters() if counters is None else counters
        self.statistics = Statistics(self.counters, day_of=day_of)
        self.settings: BrokerSettings = FixedSettings()  # the server replaces them
        self.clock_report: Callable[[], ClockReport] = ClockReport  # the server replaces it
        self._load_tables(disk, config, on_topics_changed)
        self.consumers: ConsumerGroups[Channel] = ConsumerGroups(memory=self._memory)
        self.producers: ProducerGroups[Channel] = ProducerGroups(memory=self._memory)
        self._locks = QueueLocks(memory=self._memory)
        self.flow_control = FlowControl(store, config.overload)
        self._now_ms = 0
        self._wall_ms = wall_ms
        self._last_expiry_ms = 0
        self._elapsed_s = elapsed_s
        # Long work that no single request waits for, such as waking held pulls.
        self._background_work = SliceScheduler(elapsed_s)
        self._limited_log = LimitedLog(log)
        self._store_host = store_host
        self._create_processors(
            disk, config, unique_keys, when_flushed, wall_ms, past_times, decision_piece_bytes
        )
        self._create_admin_processors(disk, config, version, flush, access_validator)
        self._tick_steps: dict[str, Callable[[int], object]] = {
            "held pulls": self.pull_processor.expire,
            "transactions": self.transactions.tick,
            "group decisions": lambda now_ms: self.group_decisions.tick(),
            "topics": self._metadata_admin.tick,
            "statistics": self._broker_admin.tick,
            "flow control": lambda now_ms: self.flow_control.update(),
            "delayed messages": self.delayed_messages.deliver,
            "expiry": self._expire,
            "background work": lambda now_ms: self._background_work.run_turn(),
        }
        self._handlers = {handler.code: handler for handler in self.handlers()}
        self._access_validator = access_validator
        # The access key of each channel's last heartbeat, for checks that are sent to it later.
        self._access_keys: dict[Peer, str] = {}
        if access_validator is not None:
            self.transactions.checker.can_read_half = self._can_read_half
        self._permissions = RequestPermissions(
            store, self.transactions.coordinator, cluster=config.broker.cluster_name
        )
        self.native_requests = self._create_native_requests(config, when_flushed)
        self._configure_native_requests(config)

    def _load_tables(
        self, disk: Disk, config: Config, on_topics_changed: Callable[[], None]
    ) -> None:
        """Load topics, groups and offsets from their files."""
        store = self.store
        self.topics = TopicTable(topics_file(disk, store.damage), config.broker, on_topics_changed)
        self.topics.restore_missing(store.queues(), store.damage)
        self.groups = SubscriptionGroups(
            groups_file(disk, store.damage),
            auto_create=config.broker.creates_groups,
            auto_groups_max=config.broker.auto_groups_max,
        )
        self._offsets_file = offsets_file(disk, store.damage)
        self.offsets = ConsumerOffsets(
            self._offsets_file.offsets(), offsets_max=config.consume.offsets_max
        )
        self._saved_offsets_version = self.offsets.version

    def _create_processors(
        self,
        disk: Disk,
        config: Config,
        unique_keys: UniqueKeyGenerator,
        when_flushed: WhenFlushed | None,
        wall_ms: Callable[[int], int],
        past_times: TimeConversion | None,
        decision_piece_bytes: int,
    ) -> None:
        store, background_work = self.store, self._background_work
        self.pull_processor = PullProcessor(
            store,
            self.topics,
            self.groups,
            self.consumers,
            self.offsets,
            config.consume,
            self.counters,
            broker_permission=config.broker.broker_permission,
            memory=self._memory,
            background_work=background_work,
            elapsed_s=self._elapsed_s,
        )
        self._create_turn(disk, config, when_flushed, wall_ms)
        redirect = self.delayed_messages.redirect
        self.transactions = EndProcessor(
            store,
            disk,
            self.turn,
            self.offsets,
            self.producers,
            config.transaction,
            self.counters,
            redirect=redirect,
            store_host=self._store_host,
            broker_name=config.broker.broker_name,
            age_max_ms=config.store.retention_ms,
            piece_bytes=decision_piece_bytes,
            times=past_times,
            halves=new_half_table(self.native),
        )
        messages_arrived = self.pull_processor.messages_arrived
        self.group_decisions = GroupDecisions(
            store, self.turn, self.transactions, messages_arrived, background_work
        )
        self.send_back_processor = SendBackProcessor(
            store,
            self.topics,
            self.groups,
            self._locks,
            redirect,
            self.turn,
            background_work,
            is_waiting=self.delayed_messages.is_waiting,
        )
        self.send_processor = SendProcessor(
            self.turn,
            self.topics,
            config.broker,
            unique_keys,
            message_bytes_max=config.store.message_bytes_max,
            park=self.transactions.half_processor.park,
            park_plain=self.transactions.half_processor.park_plain,
            redirect=redirect,
            redirect_retry=self.send_back_processor.redirect_retry,
            creations=partial(creations_of_request, self.topics, self.groups),
        )
        self._create_client_processors(config, wall_ms)

    def _create_native_requests(
        self, config: Config, when_flushed: WhenFlushed | None
    ) -> NativeRequests | None:
        if self.native.module is None or len(self._store_host) != IPV4_HOST_BYTES:
            return None
        return NativeRequests(
            self.native.module,
            self.store,
            self.topics,
            self.groups,
            self.transactions.coordinator,
            self.pull_processor,
            self.counters,
            SendResponseEncoder(
                store_host=self._store_host,
                region=config.broker.region_id,
                trace_on=config.broker.trace_on,
            ),
            added_properties=self.send_processor.added_properties,
            is_allowed=lambda: not self.flow_control.is_limiting,
            when_flushed=when_flushed,
            wall_ms=self._wall_ms,
            access_validator=self._access_validator,
        )

    def _configure_native_requests(self, config: Config) -> None:
        if self.native_requests is not None:
            self.native_requests.change_config(
                config.transaction,
                message_bytes_max=config.store.message_bytes_max,
                half_bytes_max=self.transactions.half_processor.half_bytes_max,
                is_writable=config.broker.is_writable,
            )

    def _create_turn(
        self,
        disk: Disk,
        config: Config,
        when_flushed: WhenFlushed | None,
        wall_ms: Callable[[int], int],
    ) -> None:
        self.turn = Turn(
            self.store,
            when_flushed=when_flushed,
            messages_arrived=self.pull_processor.messages_arrived,
            counters=self.counters,
            wall_ms=wall_ms,
        )
        # Before the transactions: these append to the log what a crash has cut off.
        self.delayed_messages = DelayedMessages(
            self.store,
            disk,
            config.delay,
            wall_ms,
            on_appended=self._delayed_messages_delivered,
            queue_count=self.topics.queue_count,
        )

    def _create_client_processors(self, config: Config, wall_ms: Callable[[int], int]) -> None:
        self._reply_processor = ReplyProcessor(
            self.send_processor,
            self.turn,
            self.producers,
            self.counters,
            store_host=self._store_host,
            stores_replies=config.broker.stores_replies,
            wall_ms=wall_ms,
        )
        self._query_processor = QueryProcessor(
            self.store, self.topics, self.groups, self.offsets, memory=self._memory
        )
        self.client_processor = ClientProcessor(
            self.topics,
            self.groups,
            self.consumers,
            self.producers,
            self._locks,
            on_producer_joined=self.transactions.checker.producer_joined,
            allows_sql=config.consume.filters_by_sql,
            background_work=self._background_work,
        )

    def _create_admin_processors(
        self,
        disk: Disk,
        config: Config,
        version: str,
        flush: WhenFlushed | None,
        access_validator: AccessValidator | None,
    ) -> None:
        store, topics, groups, offsets = self.store, self.topics, self.groups, self.offsets
        self._metadata_admin = MetadataAdmin(
            store, topics, groups, offsets, self._background_work, self.save_offsets
        )
        self._access_admin = AccessAdmin(access_validator)
        self._broker_admin = BrokerAdmin(
            store,
            disk,
            self.statistics,
            lambda: self.settings,
            BrokerInfo(
                version=version,
                cluster=config.broker.cluster_name,
                request_path=self.native.description,
            ),
            self.delayed_messages,
            wall_ms=self._wall_ms,
            clock_report=lambda: self.clock_report(),
        )
        self._backup_processor = BackupProcessor(disk, store, self.save, flush)
        self._transaction_admin = TransactionAdmin(
            store, self.turn, self.transactions, self.producers
        )
        self._group_admin = GroupAdmin(
            store,
            topics,
            groups,
            offsets,
            self.consumers,
            self.producers,
            self.statistics,
            address="{}:{}".format(*decode_host(self._store_host)),
            memory=self._memory,
        )
        self._offset_admin = OffsetAdmin(
            store, topics, groups, offsets, self.consumers, self.save_offsets
        )
        self._consumer_relay = ConsumerRelay(store, topics, groups, self.consumers)

    def handlers(self) -> list[Handler]:
        """Return the handlers of all processors, one for each request code."""
        return [
            *self.send_processor.handlers(),
            *self.pull_processor.handlers(),
            *self.send_back_processor.handlers(),
            *self._reply_processor.handlers(),
            *self.transactions.handlers(),
            *self.group_decisions.handlers(),
            *self.client_processor.handlers(),
            *self._query_processor.handlers(),
            *self._metadata_admin.handlers(),
            *self._access_admin.handlers(),
            *self._broker_admin.handlers(),
            *self._backup_processor.handlers(),
            *self._transaction_admin.handlers(),
            *self._group_admin.handlers(),
            *self._offset_admin.handlers(),
            *self._consumer_relay.handlers(),
        ]

    # --- requests --------------------------------------------------------------------------------

    def handle(self, channel: Channel, request: Request[Any], now_ms: int) -> SlicedWork | None:
        """Handle a request, or return the work that handles it in slices.

        Whatever it raises becomes the response to this request alone.
        """
        self._now_ms = now_ms
        code = request.head.code
        self.counters.requests[code] += 1
        handler = self._handlers.get(code, _UNSUPPORTED)
        try:
            if len(request.body) > handler.body_bytes_max:
                raise _body_too_long(request, handler)
            if self._access_validator is not None:
                check = self._check_access(
                    self._access_validator, channel, request, handler, now_ms
                )
                if handler.has_many_permissions:
                    checked = self._handle_after(check, channel, request, handler, now_ms)
                    return self._run_work(checked, channel, request, handler)
                run_to_end(check)
            if handler.is_flow_controlled and self.flow_control.is_limiting:
                work = self.flow_control.handle(handler.function, channel, request, now_ms)
            else:
                work = handler.function(channel, request, now_ms)
        except Exception as error:
            self._refuse(channel, request, handler, error)
            return None
        return None if work is None else self._run_work(work, channel, request, handler)

    def _run_work(
        self, work: SlicedWork, channel: Channel, request: Request[Any], handler: Handler
    ) -> SlicedWork:
        try:
            yield from work
        except Exception as error:
            self._refuse(channel, request, handler, error)

    def _refuse(
        self, channel: Channel, request: Request[Any], handler: Handler, error: Exception
    ) -> None:
        # A bug must cost one request, not the broker. The request has written nothing: only
        # end_turn() writes.
        refused_code = respond_failure(channel, request, error, handler.errors)
        self.counters.refused[request.head.code, refused_code] += 1

    def _handle_after(
        self,
        check: SlicedWork,
        channel: Channel,
        request: Request[Any],
        handler: Handler,
        now_ms: int,
    ) -> SlicedWork:
        """Handle a request when it is known to be allowed."""
        assert not handler.is_flow_controlled
        yield from check
        work = handler.function(channel, request, now_ms)
        if work is not None:
            yield from work

    def _check_access(
        self,
        validator: AccessValidator,
        channel: Channel,
        request: Request[Any],
        handler: Handler,
        now_ms: int,
    ) -> SlicedWork:
        """Check in slices whether a request is allowed. Raise AccessRefused."""
        access_key = yield from validator.check_in_slices(
            request,
            channel.address,
            lambda request: handler.permission(self._permissions, request),
            now_ms=now_ms,
            wall_ms=self._wall_ms(now_ms),
        )
        if access_key:
            channel.set_account(access_key)
        if handler.code == RequestCode.HEART_BEAT:
            self._access_keys[channel] = access_key

    def _can_read_half(self, channel: Peer, topic: str) -> bool:
        """Return whether a member of a producer group may be sent a check, which has the message.

        Any client can claim any producer group. The ACL decides whether it may read the half.
        """
        assert self._access_validator is not None
        access_key = self._access_keys.get(channel)
        permission = Permission(ResourceType.TOPIC, topic, Action.PUB)
        return access_key is not None and self._access_validator.is_permitted(
            access_key, channel.address, permission
        )

    def _delayed_messages_delivered(
        self, records: Sequence[NewRecord], results: Sequence[AppendResult]
    ) -> None:
        self.counters.record_append((), records, results)
        self.pull_processor.messages_arrived(records)

    # --- turns -----------------------------------------------------------------------------------

    def end_turn(self, now_ms: int) -> bool:
        """Append what the turn collected, and respond.

        Return True if another turn is needed soon.
        """
        self._now_ms = now_ms
        if self.topics.is_dirty or self.groups.is_dirty:
            # Save them before the append is acknowledged: after a crash, a message whose topic is
            # not in the table could not be read.
            try:
                self._save_tables()
            except StoreError as error:
                log.warning("topics or groups not saved, requests of this turn refused: %s", error)
                self.turn.fail_all(error)
                self.topics.revert()
                self.groups.revert()
                self._metadata_admin.respond_changes(error)
                return False
        self._metadata_admin.respond_changes(None)
        self._run_part("checks", lambda: self.transactions.checker.end_turn(now_ms))
        self._run_part("group decisions", lambda: self.group_decisions.end_turn(now_ms))
        self.turn.append_all(now_ms)
        self.flow_control.update()
        has_work = self._background_work.run_turn()
        # A repeated end is decided again after the append, and responds with the next one.
        return self.group_decisions.has_pending_pieces or has_work or self.turn.has_pending

    def _run_part(self, name: str, part: Callable[[], None]) -> None:
        """Run a part of a turn or a tick. If it fails, the other parts are still run."""
        try:
            part()
        except Exception:
            log.exception("part of the broker's work failed part=%r", name)

    def next_tick_ms(self, now_ms: int, interval_ms: int) -> int | None:
        """Return how long to wait for the next tick; None if nothing is due at a known time.

        What was not possible now is tried again after the interval.
        """
        retry_ms = now_ms + interval_ms
        must_retry = self.group_decisions.is_blocked or self._metadata_admin.has_pending_deletions
        due_times = (
            self.pull_processor.next_due_ms(),
            self.transactions.checker.next_due_ms(retry_ms),
            self.delayed_messages.next_due_ms(now_ms, retry_ms),
            retry_ms if must_retry else None,
        )
        due_ms = min((due_ms for due_ms in due_times if due_ms is not None), default=None)
        return None if due_ms is None else max(TICK_MS_MIN, due_ms - now_ms)

    def tick(self, now_ms: int) -> None:
        """Do what is due by time. See `next_tick_ms`, and call it about once a second anyway.

        The steps that do not say when they have something to do depend on that: statistics, expiry
        of members, offsets of finished transactions. So does a wall clock that was set.
        """
        self._now_ms = now_ms
        for name, step in self._tick_steps.items():
            # A bug in one step must not stop the others, and above all not the process.
            try:
                step(now_ms)
            except Exception:
                self._limited_log.exception(now_ms, "periodic work failed: %s", name)

    def _expire(self, now_ms: int) -> None:
        if now_ms - self._last_expiry_ms >= EXPIRE_INTERVAL_MS:
            self._last_expiry_ms = now_ms
            self.client_processor.expire(now_ms)
            self.flow_control.purge_idle(now_ms)
            self.counters.purge(self.topics.configs(), self.groups.configs())

    # --- segments that expire --------------------------------------------------------------------

    def oldest_needed_offset(self) -> LogOffset | None:
        """Return the log offset below which no open half and no delayed message is stored.

        None: nothing is needed. The start of the log: nothing may be deleted now.
        """
        needed = [self.transactions.oldest_needed_offset()]
        needed.append(self.delayed_messages.oldest_needed_offset())
        return min((offset for offset in needed if offset is not None), default=None)

    def move_messages_below(self, log_offset: LogOffset, now_ms: int) -> None:
        """Append open halves and delayed messages below `log_offset` again, some per call."""
        self.transactions.move_halves_below(log_offset, now_ms)
        self.delayed_messages.move_below(log_offset, now_ms)

    def channel_closed(self, channel: Channel) -> None:
        """Forget a client, in slices if it has very much."""
        self._access_keys.pop(channel, None)
        self.transactions.channel_closed(channel)
        self.flow_control.channel_closed(channel)
        self._memory.forget(channel)
        release = self._release(channel)
        if next(release, self) is None:  # most clients have little, which is forgotten at once
            self._background_work.add(release)

    def _release(self, channel: Channel) -> SlicedWork:
        """Forget the held pulls and the memberships of a closed channel, some at a time."""
        has_pulls = has_members = True
        while has_pulls or has_members:
            has_pulls = has_pulls and self.pull_processor.channel_closed(channel)
            has_members = has_members and self.client_processor.channel_closed(channel)
            if has_pulls or has_members:
                yield
        # Again: subscriptions of a group may have been counted for it while it still had members.
        self._memory.forget(channel)

    def change_config(self, config: Config) -> None:
        """Apply changed settings of sends, pulls, transactions and automatic creation."""
        self.store.change_config(config.store)
        self.topics.change_config(config.broker, now_ms=self._now_ms)
        self.groups.auto_create = config.broker.creates_groups
        self.groups.auto_groups_max = config.broker.auto_groups_max
        self.offsets.offsets_max = config.consume.offsets_max
        self.send_processor.change_config(config.broker, config.store.message_bytes_max)
        self.pull_processor.config = config.consume
        self.pull_processor.broker_permission = config.broker.broker_permission
        self.client_processor.allows_sql = config.consume.filters_by_sql
        self.transactions.change_config(config.transaction, config.store.retention_ms)
        self.flow_control.change_config(config.overload)
        self._configure_native_requests(config)

    # --- files beside the log --------------------------------------------------------------------

    def save(self) -> None:
        """Write everything that is not in the log to its files. Raise StoreError."""
        self.save_offsets()
        self.save_delayed_messages()

    def save_delayed_messages(self) -> None:
        if self.delayed_messages.needs_save:
            self.delayed_messages.save()

    def save_offsets(self) -> None:
        """Write offsets, and tables and snapshot if they have changed. Raise StoreError."""
        self._save_tables()
        self.transactions.save()
        if self.offsets.version != self._saved_offsets_version:
            version = self.offsets.version
            self._offsets_file.save(offsetTable=msgspec.Raw(self.offsets.encode()))
            self._saved_offsets_version = version  # only now: a save that failed is repeated

    def _save_tables(self) -> None:
        if self.topics.is_dirty or self.topics.is_file_uncertain:
            self.topics.save()
        if self.groups.is_dirty or self.groups.is_file_uncertain:
            self.groups.save()


def _body_too_long(request: Request[Any], handler: Handler) -> RequestRefused:
    return RequestRefused(
        ResponseCode.INVALID_PARAMETER,
        f"the body has {len(request.body)} bytes, the limit for {request_name(handler.code)} is "
        f"{handler.body_bytes_max}",
    )


def _reject_unsupported(channel: Channel, request: Request[Any], now_ms: int) -> None:
    raise RequestRefused(
        ResponseCode.REQUEST_CODE_NOT_SUPPORTED,
        f"request code {request.head.code} is not supported",
    )


_UNSUPPORTED: Final = Handler(-1, _reject_unsupported)
