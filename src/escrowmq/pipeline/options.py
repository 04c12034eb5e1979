"""Options that several pipelines have on the command line."""

from __future__ import annotations

from collections.abc import Sequence

import click


def pairs(context: click.Context, param: click.Parameter, value: Sequence[str]) -> dict[str, str]:
    found = dict(one.partition("=")[::2] for one in value)
    for name, text in found.items():
        if not name or not text:
            raise click.BadParameter(f"NAME=VALUE is wanted, not {name!r}")
    return found


spark_settings = click.option(
    "--conf",
    multiple=True,
    callback=pairs,
    metavar="NAME=VALUE",
    help="A setting of Spark, as spark.jars=driver.jar or spark.driver.memory=4g.",
)
