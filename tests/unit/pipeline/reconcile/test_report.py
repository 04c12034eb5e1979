"""The HTML report: verdict first, nothing from elsewhere, nothing of the data taken for markup."""

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

ROW = {
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


class _Balance(HTMLParser):
    """Tags that are opened and not closed."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_a_report_is_whole_and_needs_nothing_else() -> None:
    page = render_html(summary(stranded=1), [ROW])
    balance = _Balance()
    balance.feed(page)
    assert balance.open == []
    assert not re.search(r"https?:|\bsrc=|\bhref=|url\(|@import|<script", page)
    assert page.count("<svg") == 3
    assert "&lt;script&gt;" in page
    assert "bank &amp; co" in page


def test_the_verdict_comes_before_everything_else() -> None:
    page = render_html(summary(stranded=2), [ROW])
    assert page.index("2 differences between ledger and databases.") < page.index("<section>")
    assert "the first 1 of 2" in page
    assert 'class="good">Ledger and databases agree.' in render_html(summary(), [])
    assert verdict_text(summary(still_open=1)).startswith("1 difference between")


def test_a_report_of_nothing_says_so() -> None:
    empty = ReconcileSummary(1_790_000_000_000, 0, differences=dict.fromkeys(DIFFERENCE_KINDS, 0))
    page = render_html(empty, [])
    assert "no transaction in this time" in page
    assert page.count("nothing to show") == 3


def test_bars_reach_as_high_as_their_numbers() -> None:
    chart = bar_chart(["a", "b"], {"committed": [50, 100], "open": [0, 0]}, "t")
    heights = [float(found) for found in re.findall(r'height="([\d.]+)"', chart)]
    assert len(heights) == 2
    assert abs(heights[1] - 2 * heights[0]) < 0.2
    assert [round_up_to_scale(value) for value in (1, 3, 11, 21, 600)] == [1, 5, 20, 50, 1000]
