"""Run a few tests of our client against Apache RocketMQ, with one broker for all of them."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tests.e2e.client.test_broadcast import (
    test_every_broadcast_member_gets_all_messages_and_continues_from_its_file as broadcasts,
)
from tests.e2e.client.test_consumer import test_a_group_gets_every_message_once as shares
from tests.e2e.client.test_lite_consumer import test_queues_are_pulled_by_hand as pulls
from tests.e2e.client.test_orderly import (
    test_a_queue_stays_in_order_although_a_message_fails as keeps_order,
)
from tests.e2e.client.test_push_consumer import (
    test_a_message_comes_again_after_an_exception as retries,
)
from tests.interop.test_client_suite import new_broker
from tests.interop.test_client_suite import test_the_broker_applies_an_sql_filter as filters

pytestmark = [pytest.mark.apache, pytest.mark.slow]


async def test_the_client_works_with_apache_rocketmq(tmp_path: Path) -> None:
    with new_broker("5.5.0", tmp_path / "broker") as apache:
        for scenario in (shares, retries, keeps_order, broadcasts, pulls, filters):
            needs_directory = "tmp_path" in inspect.signature(scenario).parameters
            await scenario(apache, *([tmp_path] if needs_directory else []))
