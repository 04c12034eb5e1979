"""Tables that fit into the terminal, aligned fields, and widths in terminal cells."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from rich.cells import cell_len

from escrowmq.cli.output import TableColumn, field_lines, printable, table_lines, truncate

COLUMNS = (
    TableColumn("ID"),
    TableColumn("TOPIC", can_shrink=True),
    TableColumn("GROUP", can_shrink=True),
    TableColumn("LAG", is_number=True),
)
ROWS = [
    ("0123456789", "a-topic-with-a-long-name", "short", "7"),
    ("1", "t", "a-group-with-a-name", "1234"),
]


def test_a_table_without_a_terminal_is_not_truncated() -> None:
    assert list(table_lines(COLUMNS, ROWS, None)) == [
        "ID          TOPIC                     GROUP                 LAG",
        "0123456789  a-topic-with-a-long-name  short                   7",
        "1           t                         a-group-with-a-name  1234",
    ]


def test_the_widest_columns_shrink_first() -> None:
    assert list(table_lines(COLUMNS, ROWS, 50)) == [
        "ID          TOPIC            GROUP             LAG",
        "0123456789  a-topic-with-a…  short               7",
        "1           t                a-group-with-a…  1234",
    ]


def test_ids_and_numbers_are_never_truncated() -> None:
    lines = list(table_lines(COLUMNS, ROWS, 10))
    assert lines[1].startswith("0123456789  a-topic…  short")
    assert lines[2].endswith("a-group…  1234")


def test_a_table_without_rows_has_no_heading() -> None:
    assert list(table_lines(COLUMNS, [], 80)) == []


def test_the_first_rows_are_printed_before_all_rows_are_read() -> None:
    def endless() -> Iterator[tuple[str, ...]]:
        while True:
            yield ROWS[1]

    lines = table_lines(COLUMNS, endless(), 80)
    assert next(lines).startswith("ID")
    assert next(lines).startswith("1 ")


@pytest.mark.parametrize("width", [None, 40, 30])
def test_chinese_text_is_aligned_with_ascii_text(width: int | None) -> None:
    columns = (
        TableColumn("TOPIC", can_shrink=True),
        TableColumn("GROUP", can_shrink=True),
        TableColumn("LAG", is_number=True),
    )
    rows = [
        ("订单创建事件主题", "付款服务消费组", "7"),
        ("orders-created", "payments", "12345"),
        ("订单-orders", "付款", "0"),
    ]
    heading, *lines = table_lines(columns, rows, width)
    group_column = cell_len(heading[: heading.index("GROUP")])
    for line, (_, group, _) in zip(lines, rows, strict=True):
        begin = line.index("  " + group[:2]) + 2
        assert cell_len(line[:begin]) == group_column
        assert cell_len(line) == cell_len(heading)
        assert width is None or cell_len(line) <= width


def test_a_wide_character_that_does_not_fit_is_not_cut_in_half() -> None:
    assert truncate("订单创建", 8) == "订单创建"
    assert truncate("订单创建", 6) == "订单 …"  # the third character would take cells 5 and 6
    assert cell_len(truncate("订单创建", 6)) == 6


def test_the_values_of_fields_are_aligned() -> None:
    assert list(field_lines([("a", "1"), ("long", ""), ("b", "2")])) == [
        "a     1",
        "long  -",
        "b     2",
    ]
    assert list(field_lines([("主题", "x"), ("topic", "y")])) == ["主题   x", "topic  y"]


def test_control_characters_are_escaped() -> None:
    assert printable("a\x1b[2Jb\n") == "a\\x1b[2Jb\\n"
    assert printable("订单") == "订单"
