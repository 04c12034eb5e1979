"""Merging the pages of several brokers into one."""

from __future__ import annotations

from escrowmq.metrics import Counter, Gauge, Registry, Samples
from escrowmq.server.supervisor import MergedMetrics
from tests.support.scraping import parse


def page(node: str, *samples: Samples) -> list[str]:
    registry = Registry({"node_id": node})
    registry.add(lambda: samples)
    return list(registry.lines())


def test_samples_of_one_family_are_merged_under_one_heading() -> None:
    pages = MergedMetrics()
    both: list[Samples] = [
        Gauge("a", "A.").value(1),
        Counter("b_total", "B.", ("topic",)).value(2, "t"),
    ]
    pages.add(page("one", *both))
    pages.add(page("two", *both, Gauge("c", "C.").value(3)))
    found = parse("".join(pages.lines()))  # which refuses a heading that comes twice
    assert found.values("a") == [1, 1]
    assert found.value("b_total", node_id="two", topic="t") == 2
    assert found.value("c") == 3


def test_a_family_without_samples_keeps_its_heading() -> None:
    pages = MergedMetrics()
    pages.add(page("one", Gauge("a", "A.").samples([])))
    assert "".join(pages.lines()) == "# HELP a A.\n# TYPE a gauge\n"
