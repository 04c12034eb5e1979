"""What each part of the server is told of the configuration, in one place."""

from __future__ import annotations

from importlib.metadata import version
from typing import Final

from escrowmq.broker.broker import BrokerRules
from escrowmq.broker.delayed_messages import DelayRules
from escrowmq.broker.flow_control import OverloadRules
from escrowmq.broker.metadata import WRITE, TopicRules
from escrowmq.broker.processors.pull import PullRules
from escrowmq.broker.processors.send import SendRules
from escrowmq.broker.transactions.end import TransactionRules
from escrowmq.config import Config, TlsMode
from escrowmq.escrow.checks import EscrowRules
from escrowmq.server.remoting_server import PortLimits, PortSecurity
from escrowmq.server.security import Access
from escrowmq.server.tasks import UpkeepSettings
from escrowmq.store.settings import StoreSettings

TICK_S: Final = 0.1


def port_limits(config: Config) -> PortLimits:
    return PortLimits(
        lines_max=config.network.connections_max,
        idle_max_s=config.network.idle_max_s,
        unsent_bytes_max=config.network.in_flight_bytes_max,
        line_unsent_bytes_max=min(1 << 20, config.network.connection_in_flight_bytes_max),
    )


def port_security(config: Config, access: Access) -> PortSecurity:
    return PortSecurity(
        tls=access.tls,
        enforces_tls=config.security.tls_mode is TlsMode.ENFORCING,
        keeps_headers=access.guard is not None,
    )


def tick_interval_s(config: Config) -> float:
    """A delayed message is late by no more than this, and what the machine adds."""
    return min(TICK_S, config.delay.timer_precision_ms / 1000)


def store_settings(config: Config) -> StoreSettings:
    kept = config.store
    return StoreSettings(
        segment_bytes=kept.segment_bytes,
        queue_file_bytes=kept.queue_file_bytes,
        index_enabled=kept.index_enabled,
        index_slots=kept.index_slots,
        index_entries=kept.index_entries,
        message_bytes_max=kept.message_bytes_max,
        sealed=kept.sealed,
        reserved_hours=kept.reserved_hours,
        delete_hours=kept.delete_hours,
        expire_ratio=kept.expire_percent / 100,
        force_expire_ratio=kept.force_expire_percent / 100,
        refuse_ratio=kept.refuse_percent / 100,
    )


def broker_rules(config: Config, host: bytes) -> BrokerRules:
    about = config.broker
    return BrokerRules(
        topics=TopicRules(
            cluster=about.cluster_name,
            broker_name=about.broker_name,
            auto_create=about.creates_topics,
            template_queues=about.topic_queues,
            has_cluster_topic=about.has_cluster_topic,
            has_broker_topic=about.has_broker_topic,
        ),
        sends=SendRules(
            cluster=about.cluster_name,
            store_host=host,
            region=about.region_id,
            trace_on=about.trace_on,
            message_bytes_max=config.store.message_bytes_max,
            writable=bool(about.broker_permission & WRITE),
        ),
        pulls=PullRules(
            perm=about.broker_permission,
            long_polling=config.consume.long_polling,
            short_hold_ms=config.consume.short_poll_ms,
            count_max=config.consume.pull_messages_max,
            bytes_max=config.consume.pull_bytes_max,
            waiting_max=config.consume.waiting_pulls_max,
            allows_sql=config.consume.filters_by_sql,
        ),
        delays=DelayRules(
            levels_ms=config.delay.delay_levels_ms,
            timer_max_ms=config.delay.timer_delay_max_s * 1000,
            has_timers=config.delay.timer_enabled,
        ),
        transactions=TransactionRules(
            escrow=escrow_rules(config), rejects=config.transaction.refuses_halves
        ),
        overload=overload_rules(config),
        auto_create_groups=about.creates_groups,
        stores_replies=about.stores_replies,
        version=f"EscrowMQ_{version('escrowmq')}",
    )


def overload_rules(config: Config) -> OverloadRules:
    about = config.overload
    return OverloadRules(
        unflushed_bytes_max=about.unflushed_bytes_max,
        connection_sends_max=about.connection_sends_max,
        connection_send_bytes_max=about.connection_send_bytes_max,
        topic_sends_max=about.topic_sends_max,
        topic_send_bytes_max=about.topic_send_bytes_max,
    )


def escrow_rules(config: Config) -> EscrowRules:
    about = config.transaction
    return EscrowRules(
        immunity_ms=about.immunity_ms,
        interval_ms=about.check_interval_ms,
        checks_max=about.checks_max,
        age_max_ms=config.store.reserved_hours * 3_600_000,
        backoff=about.check_backoff_percent / 100,
        open_max=about.open_max,
        open_bytes_max=about.open_bytes_max,
        group_open_max=about.group_open_max,
        group_open_bytes_max=about.group_open_bytes_max,
        intervals_ms=dict(about.check_intervals_ms),
        immunities_ms=dict(about.immunities_ms),
    )


def upkeep_settings(config: Config) -> UpkeepSettings:
    return UpkeepSettings(
        flush_interval_s=config.store.flush_interval_ms / 1000,
        checkpoint_interval_s=config.store.checkpoint_interval_ms / 1000,
        expire_interval_s=config.store.expire_interval_ms / 1000,
    )
