"""SQL92 filters, as RocketMQ has them: an expression over a message's properties, compiled once.

    text --tokens.py--> tokens --parse.py--> tree (tree.py) --compile.py--> a chain of closures

A property is a string or missing. What an expression means with missing properties and with
strings where numbers are expected is RocketMQ's, oddities included; values.py and compile.py
say which. A message whose properties cannot be compared as the expression wants does not match.
"""

from __future__ import annotations

from escrowmq.consume.sql92.compiler import CompiledFilter, compile_filter

__all__ = ["CompiledFilter", "compile_filter"]
