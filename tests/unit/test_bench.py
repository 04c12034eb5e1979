"""Benchmark figures: medians, ratios to the better neighbour, tables, arguments."""

from __future__ import annotations

import pytest

from bench.__main__ import arguments, plan_from
from bench.figures import Figures, cpu_us, failed, pulled, ratio, sent, summary, to_the_better
from bench.generator import Load, Outcome
from bench.measure import QUICK, Plan, alternate, markdown


def outcome(
    *,
    rate: float = 1000.0,
    p99_us: float = 500.0,
    server_cpu_s: float = 1.0,
    errors: dict[str, int] | None = None,
    unanswered: int = 0,
) -> Outcome:
    return Outcome(
        seconds=10.0,
        messages=int(rate * 10),
        answers=int(rate * 10),
        rate=rate,
        answer_rate=rate,
        p50_us=100.0,
        p99_us=p99_us,
        p999_us=p99_us,
        max_us=p99_us,
        bytes_in=1,
        bytes_out=1,
        server_cpu_s=server_cpu_s,
        generator_cpu_s=2.0,
        machine_cpu_s=8.0,
        messages_in_all=int(rate * 10),
        unanswered=unanswered,
        broker_requests=0,
        errors=errors or {},
        unasked={},
    )


def figures(rate: float, p99_us: float, of_cpu_us: float) -> Figures:
    return Figures(rate=rate, answer_rate=rate, p50_us=10.0, p99_us=p99_us, cpu_us=of_cpu_us)


def test_each_figure_is_the_median_of_its_rounds() -> None:
    result = summary(
        [
            outcome(rate=1000, p99_us=900, server_cpu_s=3.0),
            outcome(rate=4000, p99_us=100, server_cpu_s=8.0),
            outcome(rate=2000, p99_us=300, server_cpu_s=1.0),
        ]
    )
    assert (result.rate, result.p99_us, result.cpu_us) == (2000, 300, 200)


def test_variants_take_turns() -> None:
    turns: list[str] = []

    def run(name: str, value: float) -> float:
        turns.append(name)
        return value

    variants = {"a": lambda: run("a", 1.0), "b": lambda: run("b", 2.0)}
    assert alternate(variants, rounds=2) == {"a": 1.0, "b": 2.0}
    assert turns == ["a", "b", "a", "b"]


def test_failures_of_all_rounds_are_added_up_and_shown_in_the_cell() -> None:
    rounds = [outcome(errors={"2": 3}), outcome(errors={"2": 4, "16": 1}, unanswered=5)]
    result = summary(rounds, {"not visible": 7})
    assert result.failures == {"code 2": 7, "code 16": 1, "unanswered": 5, "not visible": 7}
    text = "; **failed: code 16: 1, code 2: 7, not visible: 7, unanswered: 5**"
    assert failed(result) == text
    assert sent(result).endswith(text)
    assert pulled(result).endswith(text)


def test_without_failures_the_cell_does_not_mention_them() -> None:
    assert sent(summary([outcome()])) == "1,000/s, 0.10 ms, 0.50 ms, 100.0 us"


def test_if_all_rounds_failed_there_is_no_rate_but_a_reason() -> None:
    result = summary([], {"a round, no answer": 2})
    assert result.rate == 0
    assert "a round, no answer: 2" in sent(result)


def test_without_responses_the_cost_per_message_is_zero() -> None:
    assert cpu_us(outcome(rate=0)) == 0


def test_the_better_one_is_chosen_for_each_figure() -> None:
    quick, thrifty = figures(2000, 400, 20), figures(1000, 800, 10)
    assert to_the_better(figures(3000, 200, 5), [quick, thrifty]) == "rate 1.50, p99 0.50, CPU 0.50"


def test_a_neighbour_without_results_is_not_compared_with() -> None:
    broken = figures(0, 0, 0)
    assert to_the_better(figures(10, 1, 1), [broken]) == "-"
    assert to_the_better(broken, [figures(10, 1, 1)]) == "-"
    assert to_the_better(figures(10, 1, 1), [broken, figures(20, 1, 1)]).startswith("rate 0.50")
    assert ratio(1, 0) == "-"


def test_cpu_time_of_neither_server_nor_generator_belongs_to_others() -> None:
    assert outcome(server_cpu_s=1.0).others_cores == pytest.approx(0.5)


def test_a_table_is_written_as_markdown() -> None:
    assert markdown(["what", "figure"], [("send", "1/s"), ("pull", "2/s")]) == [
        "| what | figure |",
        "|---|---|",
        "| send | 1/s |",
        "| pull | 2/s |",
    ]


def test_a_load_is_converted_to_arguments_of_the_generator() -> None:
    load_arguments = Load("tx", connections=64, topic="orders", acknowledged=True).arguments()
    assert load_arguments[0] == "tx"
    options = {"--connections=64", "--depth=1", "--topic=orders", "--acknowledged"}
    assert options <= set(load_arguments)
    assert "--acknowledged" not in Load("send").arguments()


def test_arguments_change_only_their_part_of_the_plan() -> None:
    assert plan_from(arguments().parse_args([])) == Plan()
    assert plan_from(arguments().parse_args(["--quick"])) == QUICK
    changed = plan_from(arguments().parse_args(["broker", "--rounds", "7", "--log-gib", "2"]))
    assert changed == Plan(rounds=7, log_gib=2)


def test_unknown_figures_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        arguments().parse_args(["sidecars"])
    assert "no such figures: sidecars" in capsys.readouterr().err
