"""The broker: puts the parts together and gives each request to the part that answers it.

It has no socket and starts no task. `handle` takes a request of a line, `end_turn` closes a turn of
the loop (one append for all sends of it), `tick` and `save` are called now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from escrowmq.auth.acl import Action, Permission, ResourceType
from escrowmq.auth.validator import AccessValidator
from escrowmq.broker.delayed_messages import DelayedMessages, DelayRules
from escrowmq.broker.dispatch import Channel, RequestPermissions
from escrowmq.broker.flow_control import SEND_CODES, FlowControl, FlowControlRules
from escrowmq.broker.metadata import SubscriptionGroups, TopicTable, TopicTableRules
from escrowmq.broker.processors.admin_broker import (
    BackupProcessor,
    BrokerAdmin,
    BrokerInfo,
    BrokerSettings,
    FixedSettings,
    no_op,
)
from escrowmq.broker.processors.admin_groups import ConsumerRelay, GroupAdmin, OffsetAdmin
from escrowmq.broker.processors.admin_metadata import MetadataAdmin, access_handlers
from escrowmq.broker.processors.clients import ClientProcessor
from escrowmq.broker.processors.pull import PullProcessor, PullRules
from escrowmq.broker.processors.query import QueryProcessor, reject_unsupported
from escrowmq.broker.processors.send import SendProcessor, SendRules
from escrowmq.broker.processors.send_back import ReplyProcessor, SendBackProcessor
from escrowmq.broker.statistics import BrokerCounters, Statistics, utc_day
from escrowmq.broker.transactions.admin import TransactionAdmin
from escrowmq.broker.transactions.end import EndProcessor, TransactionRules
from escrowmq.broker.transactions.group_decisions import GroupDecisions
from escrowmq.broker.turn import Turn, WhenFlushed
from escrowmq.consume.members import ConsumerGroups, ProducerGroups, QueueLocks
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import LocalProtocolError, RequestRefused, StoreError
from escrowmq.message.batch import Appendable
from escrowmq.message.keys import UniqueKeyGenerator, decode_host
from escrowmq.peer import Peer
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.store.config_files import delay_offsets_file, groups_file, offsets_file, topics_file
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

Handler = Callable[[Channel, Request[Any], int], None]
EXPIRE_INTERVAL_MS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRules:
    """What each part needs to know; made from the configuration in one place."""

    topics: TopicTableRules
    sends: SendRules
    pulls: PullRules = field(default_factory=PullRules)
    delays: DelayRules = field(default_factory=DelayRules)
    transactions: TransactionRules = field(default_factory=TransactionRules)
    flow_control: FlowControlRules = field(default_factory=FlowControlRules)
    auto_create_groups: bool = True
    stores_replies: bool = True
    version: str = "EscrowMQ"  # what operators are told


class Broker:
    def __init__(
        self,
        disk: Disk,
        store: MessageStore,
        rules: BrokerRules,
        unique_keys: UniqueKeyGenerator,
        *,
        when_flushed: WhenFlushed | None = None,
        on_topics_changed: Callable[[], None] = lambda: None,
        flush: WhenFlushed | None = None,
        counters: BrokerCounters | None = None,
        access_validator: AccessValidator | None = None,
        day_of: Callable[[int], int] = utc_day,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
    ) -> None:
        """`guard`: every request is shown to it first; without one everybody may everything.
        `wall_ms`: the time by which messages are stamped and timers go, at a time of ours."""
        self.store = store
        self.counters = BrokerCounters() if counters is None else counters
        self.statistics = Statistics(self.counters, day_of=day_of)
        self.settings: BrokerSettings = FixedSettings()  # its owner may know better
        self.topics = TopicTable(topics_file(disk), rules.topics, on_topics_changed)
        self.groups = SubscriptionGroups(groups_file(disk), auto_create=rules.auto_create_groups)
        self._offsets_file = offsets_file(disk)
        self.offsets = ConsumerOffsets(self._offsets_file.offsets())
        self._saved_offsets_version = self.offsets.version
        self.consumers: ConsumerGroups[Channel] = ConsumerGroups()
        self.producers: ProducerGroups[Channel] = ProducerGroups()
        self._locks = QueueLocks()
        self.delayed_messages = DelayedMessages(
            store, delay_offsets_file(disk), rules.delays, wall_ms
        )
        self._now_ms = 0
        self._last_expiry_ms = 0
        self._create_processors(disk, rules, unique_keys, when_flushed, wall_ms)
        self.client_processor = ClientProcessor(
            self.topics,
            self.groups,
            self.consumers,
            self.producers,
            self._locks,
            on_producer_joined=self.transactions.checker.producer_joined,
            allows_sql=rules.pulls.allows_sql,
        )
        self._stores_replies = rules.stores_replies
        self._backup_processor = BackupProcessor(disk, store, self.save, flush)
        self._create_admin_processors(disk, rules)
        self._handlers = {
            **self._client_handlers(),
            **self._admin_handlers(access_validator),
            **self._group_admin_handlers(),
        }
        self._access_validator = access_validator
        self._access_keys: dict[Peer, str] = {}  # who is a member of groups, by access key
        if access_validator is not None:
            self.transactions.checker.can_read_half = self._can_read_half
        cluster = rules.topics.cluster
        self._permissions = RequestPermissions(
            store, self.transactions.coordinator, cluster=cluster
        )

    def _create_admin_processors(self, disk: Disk, rules: BrokerRules) -> None:
        store = self.store
        self._metadata_admin = MetadataAdmin(
            store, self.topics, self.groups, self.offsets, self.save_offsets
        )
        self._broker_admin = BrokerAdmin(
            store,
            disk,
            self.statistics,
            lambda: self.settings,
            BrokerInfo(version=rules.version, cluster=rules.topics.cluster),
        )
        self._address = "{}:{}".format(*decode_host(rules.sends.store_host))

    def _create_processors(
        self,
        disk: Disk,
        rules: BrokerRules,
        unique_keys: UniqueKeyGenerator,
        when_flushed: WhenFlushed | None,
        wall_ms: Callable[[int], int],
    ) -> None:
        store = self.store
        self.pull_processor = PullProcessor(
            store,
            self.topics,
            self.groups,
            self.consumers,
            self.offsets,
            rules.pulls,
            self.counters,
        )
        self.turn = Turn(
            store,
            when_flushed=when_flushed,
            messages_arrived=self._messages_arrived,
            counters=self.counters,
            wall_ms=wall_ms,
        )
        self.transactions = EndProcessor(
            store,
            disk,
            self.turn,
            self.offsets,
            self.producers,
            rules.transactions,
            self.counters,
            redirect=self.delayed_messages.redirect,
            store_host=rules.sends.store_host,
        )
        self.group_decisions = GroupDecisions(
            store, self.turn, self.transactions, self._messages_arrived
        )
        self.send_back_processor = SendBackProcessor(
            store, self.topics, self.groups, self._locks, self.delayed_messages.redirect, self.turn
        )
        self.send_processor = SendProcessor(
            self.turn,
            self.topics,
            rules.sends,
            unique_keys,
            park=self.transactions.half_processor.park,
            park_plain=self.transactions.half_processor.park_plain,
            redirect=self.delayed_messages.redirect,
            redirect_retry=self.send_back_processor.redirect_retry,
        )
        self.flow_control = FlowControl(store, self.send_processor.send, rules.flow_control)

    def _client_handlers(self) -> dict[int, Handler]:
        code = RequestCode
        queries = QueryProcessor(self.store, self.topics, self.groups, self.offsets)
        replies = ReplyProcessor(
            self.send_processor, self.producers, stores_replies=self._stores_replies
        )
        return {
            **dict.fromkeys(SEND_CODES, self.flow_control.send_handler()),
            code.SEND_REPLY_MESSAGE: replies.send_reply,
            code.SEND_REPLY_MESSAGE_V2: replies.send_reply,
            code.PULL_MESSAGE: self.pull_processor.pull,
            code.LITE_PULL_MESSAGE: self.pull_processor.pull,
            code.CONSUMER_SEND_MSG_BACK: self.send_back_processor.send_back,
            code.END_TRANSACTION: self.transactions.end,
            code.END_TRANSACTIONS: self.group_decisions.end_transactions,
            code.REGISTER_WRITER: self.group_decisions.register_writer,
            code.DECIDE_BATCH: self.group_decisions.decide_batch,
            code.QUERY_WRITER: self.group_decisions.query_writer,
            code.PREPARE_BACKUP: self._backup_processor.prepare_backup,
            code.HEART_BEAT: self.client_processor.heartbeat,
            code.UNREGISTER_CLIENT: self.client_processor.unregister,
            code.CHECK_CLIENT_CONFIG: self.client_processor.check_config,
            code.GET_CONSUMER_LIST_BY_GROUP: self.client_processor.list_members,
            code.LOCK_BATCH_MQ: self.client_processor.lock,
            code.UNLOCK_BATCH_MQ: self.client_processor.unlock,
            code.QUERY_CONSUMER_OFFSET: queries.query_consumer_offset,
            code.UPDATE_CONSUMER_OFFSET: queries.update_consumer_offset,
            code.GET_MAX_OFFSET: queries.get_max_offset,
            code.GET_MIN_OFFSET: queries.get_min_offset,
            code.SEARCH_OFFSET_BY_TIMESTAMP: queries.search_offset,
            code.GET_EARLIEST_MSG_STORETIME: queries.get_earliest_time,
            code.QUERY_MESSAGE: queries.query_by_key,
            code.VIEW_MESSAGE_BY_ID: queries.view_by_id,
        }

    def _admin_handlers(self, access_validator: AccessValidator | None) -> dict[int, Handler]:
        """Topics, groups, the broker itself."""
        code, admin, broker = RequestCode, self._metadata_admin, self._broker_admin
        operators = TransactionAdmin(self.store, self.turn, self.transactions, self.producers)
        return {
            **access_handlers(access_validator),
            code.UPDATE_AND_CREATE_TOPIC: admin.create_topic,
            code.DELETE_TOPIC_IN_BROKER: admin.delete_topic,
            code.GET_TOPIC_CONFIG: admin.get_topic_config,
            code.GET_ALL_TOPIC_CONFIG: admin.list_topics,
            code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: admin.list_system_topics,
            code.CLEAN_UNUSED_TOPIC: admin.clean_unused_topics,
            code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: admin.create_group,
            code.DELETE_SUBSCRIPTIONGROUP: admin.delete_group,
            code.GET_SUBSCRIPTIONGROUP_CONFIG: admin.get_group_config,
            code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: admin.list_groups,
            code.GET_BROKER_CONFIG: broker.get_config,
            code.UPDATE_BROKER_CONFIG: broker.update_config,
            code.GET_BROKER_RUNTIME_INFO: broker.get_runtime_info,
            code.VIEW_BROKER_STATS_DATA: broker.get_stats,
            code.CLEAN_EXPIRED_CONSUMEQUEUE: no_op,
            code.DELETE_EXPIRED_COMMITLOG: no_op,
            code.LIST_TRANSACTIONS: operators.list_transactions,
            code.SHOW_TRANSACTION: operators.show_transaction,
            code.SETTLE_TRANSACTION: operators.settle_transaction,
            code.RESUME_TRANSACTION: operators.resume_transaction,
            code.RESUME_CHECK_HALF_MESSAGE: operators.resume_check_half,
        }

    def _group_admin_handlers(self) -> dict[int, Handler]:
        """Who is connected, and how far everybody is."""
        code, store = RequestCode, self.store
        topics, groups, offsets, consumers = self.topics, self.groups, self.offsets, self.consumers
        asked = GroupAdmin(
            store,
            topics,
            groups,
            offsets,
            consumers,
            self.producers,
            self.statistics,
            address=self._address,
        )
        places = OffsetAdmin(store, topics, groups, offsets, consumers)
        relay = ConsumerRelay(store, consumers)
        return {
            code.GET_CONSUMER_CONNECTION_LIST: asked.list_consumer_connections,
            code.GET_PRODUCER_CONNECTION_LIST: asked.list_producer_connections,
            code.GET_ALL_PRODUCER_INFO: asked.list_producers,
            code.QUERY_TOPIC_CONSUME_BY_WHO: asked.list_groups_of_topic,
            code.QUERY_TOPICS_BY_CONSUMER: asked.list_topics_of_group,
            code.QUERY_SUBSCRIPTION_BY_CONSUMER: asked.get_subscription,
            code.GET_TOPIC_STATS_INFO: asked.get_topic_stats,
            code.GET_CONSUME_STATS: asked.get_consume_stats,
            code.GET_BROKER_CONSUME_STATS: asked.get_broker_consume_stats,
            code.QUERY_CONSUME_TIME_SPAN: asked.get_consume_time_spans,
            code.INVOKE_BROKER_TO_RESET_OFFSET: places.reset_offsets,
            code.CLONE_GROUP_OFFSET: places.clone_offsets,
            code.QUERY_CONSUME_QUEUE: places.list_queue_entries,
            code.GET_CONSUMER_RUNNING_INFO: relay.get_running_info,
            code.CONSUME_MESSAGE_DIRECTLY: relay.consume_directly,
        }

    def _messages_arrived(self, records: Sequence[Appendable]) -> None:
        self.pull_processor.messages_arrived(records, self._now_ms)

    def handle(self, channel: Channel, request: Request[Any], now_ms: int) -> None:
        self._now_ms = now_ms
        code = request.head.code
        handler = self._handlers.get(code, reject_unsupported)
        self.counters.requests[code] += 1
        try:
            if self._access_validator is not None:
                key = self._access_validator.check(
                    request, channel.address, self._permissions.required
                )
                if code == RequestCode.HEART_BEAT:
                    self._access_keys[channel] = key
            handler(channel, request, now_ms)
        except RequestRefused as error:
            self.counters.refused[code, error.code] += 1
            channel.respond(request, code=error.code, remark=error.remark)
        except LocalProtocolError as error:  # the answer would be longer than a frame can be
            self.counters.refused[code, ResponseCode.SYSTEM_ERROR] += 1
            too_long = RequestRefused(ResponseCode.SYSTEM_ERROR, f"cannot be answered: {error}")
            channel.respond(request, code=too_long.code, remark=too_long.remark)
        except Exception:
            # A bug of ours must cost one request, not the broker. Nothing was written by it:
            # only end_turn writes.
            log.exception("request failed code=%d peer=%s", code, channel.address)
            self.counters.refused[code, ResponseCode.SYSTEM_ERROR] += 1
            failed = RequestRefused(ResponseCode.SYSTEM_ERROR, "internal error, see the log")
            channel.respond(request, code=failed.code, remark=failed.remark)

    def _can_read_half(self, channel: Peer, topic: str) -> bool:
        """Whether a member of a producer group may be asked about a half, and so see it."""
        assert self._access_validator is not None
        key = self._access_keys.get(channel)
        need = Permission(ResourceType.TOPIC, topic, Action.PUB)
        return key is not None and self._access_validator.is_permitted(key, channel.address, need)

    def end_turn(self, now_ms: int) -> bool:
        """Append and answer. Whether there is more to do in a turn that should come soon."""
        self._now_ms = now_ms
        if self.topics.is_dirty or self.groups.is_dirty:
            # Before anybody is told: a message whose topic a crash forgets cannot be read.
            try:
                self._save_tables()
            except StoreError as error:
                log.warning("topics or groups not saved: %s", error)
                self.turn.fail_all(error)
                return False
        self.transactions.checker.end_turn(now_ms)
        self.group_decisions.end_turn(now_ms)
        self.turn.append_all(now_ms)
        self._update_send_handler()
        return self.group_decisions.has_pending_pieces

    def _update_send_handler(self) -> None:
        accept = self.flow_control.send_handler()
        if accept != self._handlers[RequestCode.SEND_MESSAGE_V2]:
            self._handlers.update(dict.fromkeys(SEND_CODES, accept))

    def _save_tables(self) -> None:
        if self.topics.is_dirty:
            self.topics.save()
        if self.groups.is_dirty:
            self.groups.save()

    def change_rules(self, rules: BrokerRules) -> None:
        """Of sends, pulls, transactions and what is made by itself, while everything runs."""
        self.topics.change_rules(rules.topics, now_ms=self._now_ms)
        self.groups.auto_create = rules.auto_create_groups
        self.send_processor.change_rules(rules.sends)
        self.pull_processor.rules = rules.pulls
        self.transactions.change_rules(rules.transactions)
        self.flow_control.change_rules(rules.flow_control)
        self._update_send_handler()

    def channel_closed(self, channel: Channel) -> None:
        self._access_keys.pop(channel, None)
        self.pull_processor.channel_closed(channel)
        self.client_processor.channel_closed(channel)
        self.transactions.channel_closed(channel)
        self.flow_control.channel_closed(channel)

    def tick(self, now_ms: int) -> None:
        """Some ten times a second: pulls whose time is over, messages whose time has come."""
        self._now_ms = now_ms
        self.pull_processor.expire(now_ms)
        self.transactions.tick(now_ms)
        self.group_decisions.tick()
        self._metadata_admin.tick(now_ms)
        self._broker_admin.tick(now_ms)
        self._update_send_handler()
        due = self.delayed_messages.find_due(now_ms)
        if due.records:
            self.turn.add_records(
                due.records,
                on_stored=lambda _: self.delayed_messages.mark_delivered(due),
                waits_for_flush=False,
            )
        if now_ms - self._last_expiry_ms >= EXPIRE_INTERVAL_MS:
            self._last_expiry_ms = now_ms
            self.client_processor.expire(now_ms)
            self.flow_control.purge_idle(now_ms)
            self.counters.purge(self.topics.configs(), self.groups.configs())

    def save(self) -> None:
        """Bring what is not in the log to its files."""
        self.save_offsets()
        self.save_delayed_messages()

    def save_delayed_messages(self) -> None:
        if self.delayed_messages.is_dirty:
            self.delayed_messages.save()

    def save_offsets(self) -> None:
        self._save_tables()
        self.transactions.save()
        if self.offsets.version != self._saved_offsets_version:
            self._saved_offsets_version = self.offsets.version
            self._offsets_file.save(offsetTable=self.offsets.dump())
