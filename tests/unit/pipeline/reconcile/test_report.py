"""The HTML report: the verdict is first, all data is escaped, and nothing is loaded."""

from __future__ import annotations

import re
from html.parser import HTMLParser

from escrowmq.pipeline.reconcile.compare import DIFFERENCE_KINDS
from escrowmq.pipeline.reconcile.job import (
    CHECK_BUCKETS,
    LATENCY_BUCKETS_MS,
    OUTCOMES,
    ReconcileSummary,
)
from escrowmq.pipeline.reconcile.report import (
    bar_chart,
    render_html,
    round_up_to_scale,
    verdict_text,
)

DIFFERENCE = {
    "kind": "stranded",
    "transaction_id": "<script>alert(1)</script>",
    "group": "bank & co",
    "topics": "transfers",
    "at": "2026-03-01 09:00:00",
    "outcome": "stranded",
    "detail": "it waits for an operator",
}


def summary(**differences: int) -> ReconcileSummary:
    return ReconcileSummary(
        now_ms=1_790_000_000_000,
        since_ms=0,
        transactions=12,
        messages=13,
        outcomes=dict(zip(OUTCOMES, (9, 2, 1, 0), strict=True)),
        outcomes_by_check={"committed": 2, "rolled_back": 1},
        first_ms=1_789_999_000_000,
        last_ms=1_789_999_001_500,
        outcomes_over_time={name: [3, 1] for name in OUTCOMES},
        latency_counts=[1] * (len(LATENCY_BUCKETS_MS) + 1),
        check_counts=[2] * (len(CHECK_BUCKETS) + 1),
        decision_ms={"median": 12, "p95": 2010, "p99": None},
        groups=["bank"],
        differences={**dict.fromkeys(DIFFERENCE_KINDS, 0), **differences},
    )


class _OpenTags(HTMLParser):
    """A parser that collects the tags that are opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.tags.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.tags.pop() == tag


def test_report_is_complete_and_loads_nothing() -> None:
    page = render_html(summary(stranded=1), [DIFFERENCE])
    open_tags = _OpenTags()
    open_tags.feed(page)
    assert open_tags.tags == []
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|<script", page)
    assert page.count("<svg") == 3


def test_data_is_escaped_everywhere() -> None:
    hostile = summary(stranded=1)
    hostile.groups, hostile.consumers = ["<b>"], {"<i>": ["<u>"]}
    page = render_html(hostile, [dict.fromkeys(DIFFERENCE, "<script>")], title="<em>")
    assert not re.search(r"<(b|i|u|em|script)>", page)
    assert page.count("&lt;script&gt;") == len(DIFFERENCE)
    assert page.count("&lt;em&gt;") == 2  # in the title and above the verdict
    assert "bank &amp; co" in render_html(hostile, [DIFFERENCE])


def test_missing_values_are_shown_as_empty_cells() -> None:
    page = render_html(summary(stranded=1), [{**DIFFERENCE, "group": None}])
    assert "<td></td>" in page
    assert "None" not in page


def test_verdict_comes_first() -> None:
    page = render_html(summary(stranded=2), [DIFFERENCE])
    assert page.index("2 differences between ledger and databases.") < page.index("<section>")
    assert "the first 1 of 2" in page
    assert 'class="good">Ledger and databases agree.' in render_html(summary(), [])
    assert verdict_text(summary(still_open=1)).startswith("1 difference between")


def test_report_without_transactions_says_so() -> None:
    empty = ReconcileSummary(1_790_000_000_000, 0, differences=dict.fromkeys(DIFFERENCE_KINDS, 0))
    page = render_html(empty, [])
    assert "no transactions in this period" in page
    assert page.count("no data") == 3


def test_height_of_a_bar_is_proportional_to_its_value() -> None:
    chart = bar_chart(["a", "b"], {"committed": [50, 100], "open": [0, 0]}, "t")
    low, high = (bar.height for bar in chart.bars)
    assert abs(high - 2 * low) < 0.2


def test_bars_of_a_label_are_stacked() -> None:
    below, above = bar_chart(["a"], {"committed": [3], "open": [1]}, "t").bars
    assert below.y == above.y + above.height
    assert above.tooltip == "a: 1 open"


def test_scale_ends_at_a_round_number() -> None:
    assert [round_up_to_scale(value) for value in (1, 3, 11, 21, 600)] == [1, 5, 20, 50, 1000]
