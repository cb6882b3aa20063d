"""Many numbers in little memory: exact count, sum and extremes, quantiles within one percent."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

GROWTH = 1.01  # of one bucket to the next
SMALLEST = 1e-6
_LOG = math.log(GROWTH)


class Distribution:
    """Bucket *i* holds values from SMALLEST * GROWTH**i up to the next; what is smaller counts as SMALLEST."""

    __slots__ = ("buckets", "count", "maximum", "minimum", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.minimum = math.inf
        self.maximum = -math.inf
        self.buckets: dict[int, int] = {}

    def add(self, value: float) -> None:
        self.count += 1
        self.total += value
        self.minimum = min(self.minimum, value)
        self.maximum = max(self.maximum, value)
        bucket = int(math.log(value / SMALLEST) / _LOG) if value > SMALLEST else 0
        self.buckets[bucket] = self.buckets.get(bucket, 0) + 1

    def merge(self, other: Distribution) -> None:
        """Becomes what it would be had it seen the values of both."""
        self.count += other.count
        self.total += other.total
        self.minimum = min(self.minimum, other.minimum)
        self.maximum = max(self.maximum, other.maximum)
        for bucket, count in other.buckets.items():
            self.buckets[bucket] = self.buckets.get(bucket, 0) + count

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None

    def quantile(self, q: float) -> float | None:
        """The value that a share ``q`` of all does not exceed (nearest rank)."""
        if not self.count:
            return None
        rank = max(1, math.ceil(q * self.count))
        seen = 0
        for bucket in sorted(self.buckets):
            seen += self.buckets[bucket]
            if seen >= rank:
                middle: float = SMALLEST * GROWTH ** (bucket + 0.5)
                return min(max(middle, self.minimum), self.maximum)
        return self.maximum

    def figures(self) -> dict[str, float | int | None]:
        """What a report shows; null where there is nothing."""
        quantiles = {f"p{round(q * 100)}": self.quantile(q) for q in (0.5, 0.9, 0.95, 0.99)}
        return {"count": self.count, "mean": self.mean, **quantiles, "max": self.maximum if self.count else None}

    def to_plain(self) -> dict[str, Any]:
        """As JSON or msgpack can carry it."""
        extremes = [self.minimum, self.maximum] if self.count else None
        buckets = [[bucket, count] for bucket, count in self.buckets.items()]
        return {"count": self.count, "total": self.total, "extremes": extremes, "buckets": buckets}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Distribution:
        made = cls()
        made.count, made.total = plain["count"], plain["total"]
        if plain["extremes"] is not None:
            made.minimum, made.maximum = plain["extremes"]
        made.buckets = dict(plain["buckets"])
        return made
