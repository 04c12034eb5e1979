"""Tables as wide as the terminal: some columns give way, ids never do."""

from __future__ import annotations

from escrowmq.cli.output import TableColumn, field_lines, table_lines

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


def test_a_program_sees_everything() -> None:
    assert list(table_lines(COLUMNS, ROWS, None)) == [
        "ID          TOPIC                     GROUP                 LAG",
        "0123456789  a-topic-with-a-long-name  short                   7",
        "1           t                         a-group-with-a-name  1234",
    ]


def test_the_widest_columns_give_way_first() -> None:
    assert list(table_lines(COLUMNS, ROWS, 50)) == [
        "ID          TOPIC            GROUP             LAG",
        "0123456789  a-topic-with-a…  short               7",
        "1           t                a-group-with-a…  1234",
    ]


def test_ids_and_numbers_are_never_cut() -> None:
    lines = list(table_lines(COLUMNS, ROWS, 10))
    assert lines[1].startswith("0123456789  a-topic…  short")
    assert lines[2].endswith("a-group…  1234")


def test_nothing_has_no_heads() -> None:
    assert list(table_lines(COLUMNS, [], 80)) == []


def test_rows_are_printed_as_they_come() -> None:
    def endless() -> object:
        while True:
            yield ROWS[1]

    lines = table_lines(COLUMNS, endless(), 80)  # type: ignore[arg-type]
    assert next(lines).startswith("ID")
    assert next(lines).startswith("1 ")


def test_fields_stand_in_a_column() -> None:
    assert list(field_lines([("a", "1"), ("long", ""), ("b", "2")])) == [
        "a     1",
        "long  -",
        "b     2",
    ]
