"""Why a measured row cannot be used."""

from __future__ import annotations


class RefusedRowError(Exception):
    """A row of public measurements that the cost model cannot be held against.

    Args:
        reason: a short phrase without values, so that refusals can be counted by it.
        detail: what the row says, with its values; empty where the reason says all.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else reason)
        self.reason = reason
        self.detail = detail
