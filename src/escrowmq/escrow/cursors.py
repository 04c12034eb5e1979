"""How far RocketMQ would have to read, if it took the directory over.

Its two cursors, kept as offsets of the group CID_RMQ_SYS_TRANS: the first half that is open, and
the first op that says something about that half or a later one. Everything before them is over.
"""

from __future__ import annotations

from array import array


class Cursors:
    def __init__(self, half: int = 0, op: int = 0) -> None:
        self.half = half
        self.op = op
        self._halves_of_ops: array[int] = array("q")  # of the ops from `op` on, in order
        self._passed = 0  # of those, at the front: the array is cut now and then

    def op_written(self, op_offset: int, half_offset: int) -> None:
        """In the order of the op queue. An op over several halves counts with the last of them."""
        waiting = len(self._halves_of_ops) - self._passed
        unseen = op_offset - self.op - waiting  # ops that nobody could read: they settle nothing
        if not waiting:
            self.op += unseen
        elif unseen:
            self._halves_of_ops.extend([-1] * unseen)
        self._halves_of_ops.append(half_offset)

    def advance(self, first_open: int) -> None:
        self.half = max(self.half, first_open)
        halves = self._halves_of_ops
        while self._passed < len(halves) and halves[self._passed] < self.half:
            self._passed += 1
            self.op += 1
        if self._passed > 65_536 or self._passed == len(halves):
            del halves[: self._passed]
            self._passed = 0
