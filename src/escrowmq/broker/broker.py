"""The broker: puts the parts together and gives each request to the part that answers it.

It has no socket and starts no task. `handle` takes a request of a line, `end_turn` closes a turn of
the loop (one append for all sends of it), `tick` and `save` are called now and then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from escrowmq.auth.acl import Action, Kind, Need
from escrowmq.auth.validator import Guard
from escrowmq.broker.delayed_messages import DelayRules, Delays
from escrowmq.broker.dispatch import Line, Permissions
from escrowmq.broker.flow_control import SENDS, Overload, OverloadRules
from escrowmq.broker.metadata import Groups, TopicRules, Topics
from escrowmq.broker.processors.admin_broker import (
    About,
    AdminBroker,
    Backups,
    FixedSettings,
    Settings,
    nothing_to_do,
)
from escrowmq.broker.processors.admin_groups import AdminGroups, AdminOffsets, AdminRelay
from escrowmq.broker.processors.admin_metadata import Admin, access_handlers
from escrowmq.broker.processors.clients import Clients
from escrowmq.broker.processors.pull import PullRules, Pulls
from escrowmq.broker.processors.query import Queries, unsupported
from escrowmq.broker.processors.send import SendRules, Sends
from escrowmq.broker.processors.send_back import Replies, Retries
from escrowmq.broker.statistics import Counts, Statistics, utc_day
from escrowmq.broker.transactions.admin import Operators
from escrowmq.broker.transactions.end import TransactionRules, Transactions
from escrowmq.broker.transactions.group_decisions import Decisions
from escrowmq.broker.turn import Turn, WhenFlushed
from escrowmq.consume.members import ConsumerGroups, ProducerGroups, QueueLocks
from escrowmq.consume.offsets import ConsumerOffsets
from escrowmq.errors import LocalProtocolError, RequestRefused, StoreError
from escrowmq.message.batch import ToAppend
from escrowmq.message.keys import UniqueKeys, decode_host
from escrowmq.remoting.codes import RequestCode, ResponseCode
from escrowmq.remoting.requests import Request
from escrowmq.remoting.responses import refuse
from escrowmq.store.config_files import delays_file, groups_file, offsets_file, topics_file
from escrowmq.store.disk import Disk
from escrowmq.store.store import MessageStore

log = logging.getLogger(__name__)

Handler = Callable[[Line, Request[Any], int], None]
EXPIRE_INTERVAL_MS: Final = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerRules:
    """What each part needs to know; made from the configuration in one place."""

    topics: TopicRules
    sends: SendRules
    pulls: PullRules = field(default_factory=PullRules)
    delays: DelayRules = field(default_factory=DelayRules)
    transactions: TransactionRules = field(default_factory=TransactionRules)
    overload: OverloadRules = field(default_factory=OverloadRules)
    auto_create_groups: bool = True
    stores_replies: bool = True
    version: str = "EscrowMQ"  # what operators are told


class Broker:
    def __init__(
        self,
        disk: Disk,
        store: MessageStore,
        rules: BrokerRules,
        keys: UniqueKeys,
        *,
        when_flushed: WhenFlushed | None = None,
        topics_changed: Callable[[], None] = lambda: None,
        flush: WhenFlushed | None = None,
        counts: Counts | None = None,
        guard: Guard | None = None,
        day_of: Callable[[int], int] = utc_day,
        wall_ms: Callable[[int], int] = lambda now_ms: now_ms,
    ) -> None:
        """`guard`: every request is shown to it first; without one everybody may everything.
        `wall_ms`: the time by which messages are stamped and timers go, at a time of ours."""
        self.store = store
        self.counts = Counts() if counts is None else counts
        self.statistics = Statistics(self.counts, day_of=day_of)
        self.settings: Settings = FixedSettings()  # its owner may know better
        self.topics = Topics(topics_file(disk), rules.topics, topics_changed)
        self.groups = Groups(groups_file(disk), auto_create=rules.auto_create_groups)
        self._offsets_file = offsets_file(disk)
        self.offsets = ConsumerOffsets(self._offsets_file.offsets())
        self._offsets_saved = self.offsets.version
        self.consumers = ConsumerGroups()
        self.producers = ProducerGroups()
        self._locks = QueueLocks()
        self.delays = Delays(store, delays_file(disk), rules.delays, wall_ms)
        self._now_ms = 0
        self._expired_ms = 0
        self._make_parts(disk, rules, keys, when_flushed, wall_ms)
        self.clients = Clients(
            self.topics,
            self.groups,
            self.consumers,
            self.producers,
            self._locks,
            producer_joined=self.transactions.checks.producer_joined,
            allows_sql=rules.pulls.allows_sql,
        )
        self._stores_replies = rules.stores_replies
        self._backups = Backups(disk, store, self.save, flush)
        self._make_admin(disk, rules)
        self._handlers = {**self._table(), **self._admin_table(guard), **self._operators_table()}
        self._guard = guard
        self._keys: dict[Line, str] = {}  # who is a member of groups, by access key
        if guard is not None:
            self.transactions.checks.may_see = self._may_see
        cluster = rules.topics.cluster
        self._permissions = Permissions(store, self.transactions.escrow, cluster=cluster)

    def _make_admin(self, disk: Disk, rules: BrokerRules) -> None:
        store = self.store
        self._admin = Admin(store, self.topics, self.groups, self.offsets, self.save_offsets)
        self._admin_broker = AdminBroker(
            store,
            disk,
            self.statistics,
            lambda: self.settings,
            About(version=rules.version, cluster=rules.topics.cluster),
        )
        self._address = "{}:{}".format(*decode_host(rules.sends.store_host))

    def _make_parts(
        self,
        disk: Disk,
        rules: BrokerRules,
        keys: UniqueKeys,
        when_flushed: WhenFlushed | None,
        wall_ms: Callable[[int], int],
    ) -> None:
        store = self.store
        self.pulls = Pulls(
            store, self.topics, self.groups, self.consumers, self.offsets, rules.pulls, self.counts
        )
        self.turn = Turn(
            store,
            rules.sends.answers(),
            when_flushed=when_flushed,
            arrived=self._arrived,
            counts=self.counts,
            wall_ms=wall_ms,
        )
        self.transactions = Transactions(
            store,
            disk,
            self.turn,
            self.offsets,
            self.producers,
            rules.sends.answers(),
            rules.transactions,
            self.counts,
            reroute=self.delays.reroute,
        )
        self.decisions = Decisions(store, self.turn, self.transactions, self._arrived)
        self.retries = Retries(
            store, self.topics, self.groups, self._locks, self.delays.reroute, self.turn
        )
        self.sends = Sends(
            self.turn,
            self.topics,
            rules.sends,
            keys,
            park=self.transactions.parking.park,
            park_plain=self.transactions.parking.park_plain,
            reroute=self.delays.reroute,
            retried=self.retries.retried,
        )
        self.overload = Overload(store, self.sends.accept, rules.overload)

    def _table(self) -> dict[int, Handler]:
        code = RequestCode
        queries = Queries(self.store, self.topics, self.groups, self.offsets)
        replies = Replies(self.sends, self.producers, stores=self._stores_replies)
        return {
            **dict.fromkeys(SENDS, self.overload.handler()),
            code.SEND_REPLY_MESSAGE: replies.handle,
            code.SEND_REPLY_MESSAGE_V2: replies.handle,
            code.PULL_MESSAGE: self.pulls.handle,
            code.LITE_PULL_MESSAGE: self.pulls.handle,
            code.CONSUMER_SEND_MSG_BACK: self.retries.sent_back,
            code.END_TRANSACTION: self.transactions.end,
            code.END_TRANSACTIONS: self.decisions.end_many,
            code.REGISTER_WRITER: self.decisions.register,
            code.DECIDE_BATCH: self.decisions.decide_batch,
            code.QUERY_WRITER: self.decisions.query,
            code.PREPARE_BACKUP: self._backups.prepare,
            code.HEART_BEAT: self.clients.heartbeat,
            code.UNREGISTER_CLIENT: self.clients.unregister,
            code.CHECK_CLIENT_CONFIG: self.clients.check_config,
            code.GET_CONSUMER_LIST_BY_GROUP: self.clients.members,
            code.LOCK_BATCH_MQ: self.clients.lock,
            code.UNLOCK_BATCH_MQ: self.clients.unlock,
            code.QUERY_CONSUMER_OFFSET: queries.consumer_offset,
            code.UPDATE_CONSUMER_OFFSET: queries.update_consumer_offset,
            code.GET_MAX_OFFSET: queries.max_offset,
            code.GET_MIN_OFFSET: queries.min_offset,
            code.SEARCH_OFFSET_BY_TIMESTAMP: queries.search_offset,
            code.GET_EARLIEST_MSG_STORETIME: queries.earliest_time,
            code.QUERY_MESSAGE: queries.by_key,
            code.VIEW_MESSAGE_BY_ID: queries.by_id,
        }

    def _admin_table(self, guard: Guard | None) -> dict[int, Handler]:
        """Topics, groups, the broker itself."""
        code, admin, broker = RequestCode, self._admin, self._admin_broker
        operators = Operators(self.store, self.turn, self.transactions, self.producers)
        return {
            **access_handlers(guard),
            code.UPDATE_AND_CREATE_TOPIC: admin.create_topic,
            code.DELETE_TOPIC_IN_BROKER: admin.delete_topic,
            code.GET_TOPIC_CONFIG: admin.topic_config,
            code.GET_ALL_TOPIC_CONFIG: admin.all_topics,
            code.GET_SYSTEM_TOPIC_LIST_FROM_BROKER: admin.system_topics,
            code.CLEAN_UNUSED_TOPIC: admin.clean_unused,
            code.UPDATE_AND_CREATE_SUBSCRIPTIONGROUP: admin.create_group,
            code.DELETE_SUBSCRIPTIONGROUP: admin.delete_group,
            code.GET_SUBSCRIPTIONGROUP_CONFIG: admin.group_config,
            code.GET_ALL_SUBSCRIPTIONGROUP_CONFIG: admin.all_groups,
            code.GET_BROKER_CONFIG: broker.config,
            code.UPDATE_BROKER_CONFIG: broker.change_config,
            code.GET_BROKER_RUNTIME_INFO: broker.runtime,
            code.VIEW_BROKER_STATS_DATA: broker.stats,
            code.CLEAN_EXPIRED_CONSUMEQUEUE: nothing_to_do,
            code.DELETE_EXPIRED_COMMITLOG: nothing_to_do,
            code.LIST_TRANSACTIONS: operators.list,
            code.SHOW_TRANSACTION: operators.show,
            code.SETTLE_TRANSACTION: operators.settle,
            code.RESUME_TRANSACTION: operators.resume,
            code.RESUME_CHECK_HALF_MESSAGE: operators.resume_check,
        }

    def _operators_table(self) -> dict[int, Handler]:
        """Who is connected, and how far everybody is."""
        code, store = RequestCode, self.store
        topics, groups, offsets, consumers = self.topics, self.groups, self.offsets, self.consumers
        asked = AdminGroups(
            store,
            topics,
            groups,
            offsets,
            consumers,
            self.producers,
            self.statistics,
            address=self._address,
        )
        places = AdminOffsets(store, topics, groups, offsets, consumers)
        relay = AdminRelay(store, consumers)
        return {
            code.GET_CONSUMER_CONNECTION_LIST: asked.consumer_connections,
            code.GET_PRODUCER_CONNECTION_LIST: asked.producer_connections,
            code.GET_ALL_PRODUCER_INFO: asked.all_producers,
            code.QUERY_TOPIC_CONSUME_BY_WHO: asked.groups_of_topic,
            code.QUERY_TOPICS_BY_CONSUMER: asked.topics_of_group,
            code.QUERY_SUBSCRIPTION_BY_CONSUMER: asked.subscription,
            code.GET_TOPIC_STATS_INFO: asked.topic_stats,
            code.GET_CONSUME_STATS: asked.consume_stats,
            code.GET_BROKER_CONSUME_STATS: asked.all_consume_stats,
            code.QUERY_CONSUME_TIME_SPAN: asked.time_spans,
            code.INVOKE_BROKER_TO_RESET_OFFSET: places.reset,
            code.CLONE_GROUP_OFFSET: places.clone,
            code.QUERY_CONSUME_QUEUE: places.entries,
            code.GET_CONSUMER_RUNNING_INFO: relay.running_info,
            code.CONSUME_MESSAGE_DIRECTLY: relay.consume_directly,
        }

    def _arrived(self, records: Sequence[ToAppend]) -> None:
        self.pulls.arrived(records, self._now_ms)

    def handle(self, line: Line, request: Request[Any], now_ms: int) -> None:
        self._now_ms = now_ms
        code = request.head.code
        handler = self._handlers.get(code, unsupported)
        self.counts.requests[code] += 1
        try:
            if self._guard is not None:
                key = self._guard.check(request, line.peer, self._permissions.of)
                if code == RequestCode.HEART_BEAT:
                    self._keys[line] = key
            handler(line, request, now_ms)
        except RequestRefused as error:
            self.counts.refused[code, error.code] += 1
            line.write(refuse(request, error))
        except LocalProtocolError as error:  # the answer would be longer than a frame can be
            self.counts.refused[code, ResponseCode.SYSTEM_ERROR] += 1
            too_long = RequestRefused(ResponseCode.SYSTEM_ERROR, f"cannot be answered: {error}")
            line.write(refuse(request, too_long))
        except Exception:
            # A bug of ours must cost one request, not the broker. Nothing was written by it:
            # only end_turn writes.
            log.exception("request failed code=%d peer=%s", code, line.peer)
            self.counts.refused[code, ResponseCode.SYSTEM_ERROR] += 1
            failed = RequestRefused(ResponseCode.SYSTEM_ERROR, "internal error, see the log")
            line.write(refuse(request, failed))

    def _may_see(self, line: Hashable, topic: str) -> bool:
        """Whether a member of a producer group may be asked about a half, and so see it."""
        assert self._guard is not None
        key = self._keys.get(line)  # type: ignore[call-overload]  # the escrow does not know lines
        need = Need(Kind.TOPIC, topic, Action.PUB)
        return key is not None and self._guard.may(key, line.peer, need)  # type: ignore[attr-defined]

    def end_turn(self, now_ms: int) -> bool:
        """Append and answer. Whether there is more to do in a turn that should come soon."""
        self._now_ms = now_ms
        if self.topics.dirty or self.groups.dirty:
            # Before anybody is told: a message whose topic a crash forgets cannot be read.
            try:
                self._save_tables()
            except StoreError as error:
                log.warning("topics or groups not saved: %s", error)
                self.turn.refuse(error)
                return False
        self.transactions.checks.end_turn(now_ms)
        self.decisions.end_turn(now_ms)
        self.turn.settle(now_ms)
        self._choose_sends()
        return self.decisions.has_more

    def _choose_sends(self) -> None:
        accept = self.overload.handler()
        if accept != self._handlers[RequestCode.SEND_MESSAGE_V2]:
            self._handlers.update(dict.fromkeys(SENDS, accept))

    def _save_tables(self) -> None:
        if self.topics.dirty:
            self.topics.save()
        if self.groups.dirty:
            self.groups.save()

    def change_rules(self, rules: BrokerRules) -> None:
        """Of sends, pulls, transactions and what is made by itself, while everything runs."""
        self.topics.change_rules(rules.topics, now_ms=self._now_ms)
        self.groups.auto_create = rules.auto_create_groups
        self.sends.change_rules(rules.sends)
        self.pulls.rules = rules.pulls
        self.transactions.change_rules(rules.transactions)
        self.overload.change_rules(rules.overload)
        self._choose_sends()

    def line_closed(self, line: Line) -> None:
        self._keys.pop(line, None)
        self.pulls.line_closed(line)
        self.clients.line_closed(line)
        self.transactions.line_closed(line)
        self.overload.line_closed(line)

    def tick(self, now_ms: int) -> None:
        """Some ten times a second: pulls whose time is over, messages whose time has come."""
        self._now_ms = now_ms
        self.pulls.expire(now_ms)
        self.transactions.tick(now_ms)
        self.decisions.tick()
        self._admin.tick(now_ms)
        self._admin_broker.tick(now_ms)
        self._choose_sends()
        due = self.delays.due(now_ms)
        if due.records:
            self.turn.put(due.records, stored=lambda _: self.delays.delivered(due), waits=False)
        if now_ms - self._expired_ms >= EXPIRE_INTERVAL_MS:
            self._expired_ms = now_ms
            self.clients.expire(now_ms)
            self.overload.forget(now_ms)
            self.counts.forget(self.topics.all(), self.groups.all())

    def save(self) -> None:
        """Bring what is not in the log to its files."""
        self.save_offsets()
        self.save_delays()

    def save_delays(self) -> None:
        if self.delays.dirty:
            self.delays.save()

    def save_offsets(self) -> None:
        self._save_tables()
        self.transactions.save()
        if self.offsets.version != self._offsets_saved:
            self._offsets_saved = self.offsets.version
            self._offsets_file.save(offsetTable=self.offsets.dump())
