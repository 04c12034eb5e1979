"""SQL92 filters as RocketMQ defines them: a condition over the properties of a message.

    text  --parser.py-->  tokens, then a tree  --compiler.py-->  closures over the properties

A property is a string or missing. RocketMQ's rules, oddities included, say what an expression means
if a property is missing or is a string where a number is expected; compiler.py lists them. A
message whose properties cannot be compared as the expression demands does not match.

Read parser.py first (tokens, nodes, grammar), then compiler.py (what each node evaluates to).
"""

from __future__ import annotations

from escrowmq.consume.sql92.compiler import CompiledFilter

__all__ = ["CompiledFilter"]
