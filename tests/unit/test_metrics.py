"""Metrics in the text format of Prometheus."""

from __future__ import annotations

import math

import pytest

from escrowmq.metrics import Collector, Counter, Distribution, Family, Gauge, Histogram, Registry
from tests.support.scraping import parse


def text_of(*families: Family, **labels: str) -> str:
    registry = Registry(labels)
    registry.add(lambda: families)
    return "".join(registry.lines())


def test_a_gauge_and_a_counter_have_a_heading_each() -> None:
    assert text_of(
        Gauge("connections", "Open connections.", [({}, 3)]),
        Counter("sends_total", "Sends.", [({"topic": "a"}, 1), ({"topic": "b"}, 2.5)]),
    ) == (
        "# HELP connections Open connections.\n"
        "# TYPE connections gauge\n"
        "connections 3\n"
        "# HELP sends_total Sends.\n"
        "# TYPE sends_total counter\n"
        'sends_total{topic="a"} 1\n'
        'sends_total{topic="b"} 2.5\n'
    )


def test_every_sample_has_the_labels_of_the_registry() -> None:
    text = text_of(
        Gauge("a", "A.", [({}, 1), ({"x": "y"}, 2)]),
        Histogram("h", "H.", [({}, Distribution((1,)))]),
        node="n",
    )
    samples = parse(text).samples
    assert len(samples) == 2 + 4
    assert all(labels["node"] == "n" for _, labels, _ in samples)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ('say "hi"', r"say \"hi\""),
        ("a\\b", r"a\\b"),
        ("a\nb", r"a\nb"),
        ("a\\nb", r"a\\nb"),
        ("é☃, }", "é☃, }"),
    ],
)
def test_labels_are_escaped_and_parsed_to_the_same_value(value: str, text: str) -> None:
    page = text_of(Gauge("a", "A.", [({"label": value, "next": "1"}, 1)]))
    assert f'a{{label="{text}",next="1"}} 1\n' in page
    assert parse(page).labels("a") == [{"label": value, "next": "1"}]


def test_a_help_text_stays_on_its_line() -> None:
    text = text_of(Gauge("a", 'One\nand \\ "two".', [({}, 1)]))
    assert text.startswith('# HELP a One\\nand \\\\ "two".\n# TYPE')


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (2**63, "9223372036854775808"),
        (True, "1"),
        (0.1, "0.1"),
        (1e-09, "1e-09"),
        (math.inf, "+Inf"),
        (-math.inf, "-Inf"),
        (math.nan, "NaN"),
    ],
)
def test_numbers_are_written_in_the_format_of_prometheus(value: float, text: str) -> None:
    assert text_of(Gauge("a", "A.", [({}, value)])).splitlines()[-1] == f"a {text}"


def test_the_buckets_of_a_histogram_are_cumulative_and_end_with_all() -> None:
    distribution = Distribution((1, 2.5, 10))
    for value in (0, 1, 1.1, 2.5, 11, 1000):
        distribution.observe(value)
    distribution.observe(10, times=3)
    assert text_of(Histogram("h", "H.", [({"a": "b"}, distribution)])).splitlines()[2:] == [
        'h_bucket{a="b",le="1"} 2',
        'h_bucket{a="b",le="2.5"} 4',
        'h_bucket{a="b",le="10"} 7',
        'h_bucket{a="b",le="+Inf"} 9',
        'h_sum{a="b"} 1045.6',
        'h_count{a="b"} 9',
    ]
    assert distribution.count == 9


def test_an_empty_histogram_has_all_its_buckets() -> None:
    assert text_of(Histogram("h", "H.", [({}, Distribution((1,)))])).splitlines()[2:] == [
        'h_bucket{le="1"} 0',
        'h_bucket{le="+Inf"} 0',
        "h_sum 0",
        "h_count 0",
    ]


def test_families_with_the_same_name_are_joined_under_one_heading() -> None:
    registry = Registry()
    collectors: list[Collector] = [
        lambda: [Gauge("a", "A.", [({"p": "1"}, 1)]), Gauge("b", "B.", [({}, 0)])],
        lambda: [Gauge("a", "Another.", [({"p": "2"}, 2)])],
    ]
    for collector in collectors:
        registry.add(collector)
    assert "".join(registry.lines()).splitlines() == [
        *("# HELP a A.", "# TYPE a gauge", 'a{p="1"} 1', 'a{p="2"} 2'),
        *("# HELP b B.", "# TYPE b gauge", "b 0"),
    ]


def test_families_of_different_types_with_the_same_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two kinds"):
        text_of(Gauge("a", "A.", []), Counter("a", "A.", []))


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "é", "a\n"])
def test_a_name_that_is_invalid_in_prometheus_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="is not a valid name"):
        text_of(Gauge(name, "A.", [({}, 1)]))
    with pytest.raises(ValueError, match="is not a valid name"):
        text_of(Gauge("a", "A.", [({name: "x"}, 1)]))


def test_collectors_are_called_for_each_page() -> None:
    registry, values = Registry(), iter((1, 2))
    registry.add(lambda: [Gauge("a", "A.", [({}, next(values))])])
    assert "".join(registry.lines()).endswith("a 1\n")
    assert "".join(registry.lines()).endswith("a 2\n")
