"""The two kinds of offset that the wire and the disk put side by side."""

from __future__ import annotations

from typing import NewType

LogOffset = NewType("LogOffset", int)  # a byte position in the commit log
QueueOffset = NewType("QueueOffset", int)  # a count of messages in one queue
