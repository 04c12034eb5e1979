"""What each part of the server is told of the configuration, in one place."""

from __future__ import annotations

from importlib.metadata import version

from escrowmq.broker.broker import BrokerRules
from escrowmq.broker.delayed_messages import DelayRules
from escrowmq.broker.flow_control import FlowControlRules
from escrowmq.broker.metadata import TopicTableRules
from escrowmq.broker.processors.pull import PullRules
from escrowmq.broker.processors.send import SendRules
from escrowmq.broker.transactions.end import TransactionRules
from escrowmq.config import Config, TlsMode
from escrowmq.escrow.checks import CoordinatorRules
from escrowmq.message.topic_config import PERM_WRITE
from escrowmq.server.remoting_server import ServerLimits, ServerSecurity
from escrowmq.server.security import AccessControl


def server_limits(config: Config) -> ServerLimits:
    return ServerLimits(
        connections_max=config.network.connections_max,
        idle_max_s=config.network.idle_max_s,
        unsent_bytes_max=config.network.in_flight_bytes_max,
        connection_unsent_bytes_max=min(1 << 20, config.network.connection_in_flight_bytes_max),
    )


def server_security(config: Config, access: AccessControl) -> ServerSecurity:
    return ServerSecurity(
        tls=access.tls,
        enforces_tls=config.security.tls_mode is TlsMode.ENFORCING,
        keeps_headers=access.validator is not None,
    )


def broker_rules(config: Config, host: bytes) -> BrokerRules:
    about = config.broker
    return BrokerRules(
        topics=TopicTableRules(
            cluster=about.cluster_name,
            broker_name=about.broker_name,
            auto_create=about.creates_topics,
            template_queue_count=about.topic_queues,
            has_cluster_topic=about.has_cluster_topic,
            has_broker_topic=about.has_broker_topic,
        ),
        sends=SendRules(
            cluster=about.cluster_name,
            store_host=host,
            region=about.region_id,
            trace_on=about.trace_on,
            message_bytes_max=config.store.message_bytes_max,
            is_writable=bool(about.broker_permission & PERM_WRITE),
        ),
        pulls=PullRules(
            perm=about.broker_permission,
            long_polling=config.consume.long_polling,
            short_hold_ms=config.consume.short_poll_ms,
            count_max=config.consume.pull_messages_max,
            bytes_max=config.consume.pull_bytes_max,
            held_pulls_max=config.consume.waiting_pulls_max,
            allows_sql=config.consume.filters_by_sql,
        ),
        delays=DelayRules(
            levels_ms=config.delay.delay_levels_ms,
            timer_max_ms=config.delay.timer_delay_max_s * 1000,
            has_timers=config.delay.timer_enabled,
        ),
        transactions=TransactionRules(
            coordinator=escrow_rules(config), rejects_transactions=config.transaction.refuses_halves
        ),
        flow_control=overload_rules(config),
        auto_create_groups=about.creates_groups,
        stores_replies=about.stores_replies,
        version=f"EscrowMQ_{version('escrowmq')}",
    )


def overload_rules(config: Config) -> FlowControlRules:
    about = config.overload
    return FlowControlRules(
        unflushed_bytes_max=about.unflushed_bytes_max,
        connection_sends_max=about.connection_sends_max,
        connection_send_bytes_max=about.connection_send_bytes_max,
        topic_sends_max=about.topic_sends_max,
        topic_send_bytes_max=about.topic_send_bytes_max,
    )


def escrow_rules(config: Config) -> CoordinatorRules:
    about = config.transaction
    return CoordinatorRules(
        immunity_ms=about.immunity_ms,
        interval_ms=about.check_interval_ms,
        checks_max=about.checks_max,
        age_max_ms=config.store.reserved_hours * 3_600_000,
        backoff=about.check_backoff_percent / 100,
        open_count_max=about.open_max,
        open_bytes_max=about.open_bytes_max,
        group_open_count_max=about.group_open_max,
        group_open_bytes_max=about.group_open_bytes_max,
        intervals_ms=dict(about.check_intervals_ms),
        immunities_ms=dict(about.immunities_ms),
    )
