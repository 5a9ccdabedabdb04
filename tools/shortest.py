"""The shortest list of events that still shows a finding, as far as the time allows.

Delta debugging: leave out runs of events, long ones first, and keep what is left whenever something is still found.
The events behind the one that shows it are cut at once.  What is found at the end may be another thing than at the
beginning: the shorter history is worth more than the same words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

Item = TypeVar("Item")


def shortest(
    items: list[Item], find: Callable[[list[Item]], tuple[int, str] | None], *, first: str, seconds: float
) -> tuple[list[Item], str]:
    """Return fewer items that still show something, and what they show.

    Args:
        items: that show something.
        find: runs items; says how many of them were run until something was found, and what, or None.
        first: what `items` show.
        seconds: after so much time the fewest so far are returned.
    """
    end = time.monotonic() + seconds
    message, length = first, max(len(items) // 2, 1)
    while True:
        start, has_shrunk = 0, False
        while start < len(items):
            if time.monotonic() > end:
                return items, message
            tried = items[:start] + items[start + length :]
            found = find(tried)
            if found is None:
                start += length
            else:
                items, message, has_shrunk = tried[: found[0]], found[1], True
        if length == 1 and not has_shrunk:
            return items, message
        length = max(length // 2, 1)
