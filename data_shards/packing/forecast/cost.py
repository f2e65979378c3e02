"""Reckon what a packing takes before it starts: requests, bytes, time, space and money. Pure arithmetic.

Times and, where images are encoded, sizes are extrapolated from a trial of a few images (`trial`). Requests are those
of a packing in which nothing fails: retries cost more.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from shardvit.data_shards.errors import UserError
from shardvit.data_shards.text import counted, show_bytes, show_duration

# What one can type a price of: per 1,000 requests, GB, GB and month, or hour of a core.
PRICES = ("get", "put", "list", "egress", "storage", "core_hour")
_GB, _HOUR = 1e9, 3600.0


@dataclass(frozen=True)
class StoreRequests:
    """As stores charge them: HEAD as GET, and the start and end of an upload in parts as PUT."""

    list: int = 0  # of up to 1,000 names
    get: int = 0
    put: int = 0

    def __add__(self, other: StoreRequests) -> StoreRequests:
        return StoreRequests(self.list + other.list, self.get + other.get, self.put + other.put)


@dataclass(frozen=True)
class Trial:
    """What some images took: means of those tried."""

    images: int
    cpu_seconds: float = 0.0  # of an image
    error_seconds: float = 0.0  # standard error of that
    growth: float = 1.0  # bytes in the tar / bytes at the source, both in whole blocks
    unreadable: int = 0


@dataclass(frozen=True)
class SplitCost:
    """One split as planned."""

    split: str
    images: int
    shards: int
    bytes: int  # of tars and indexes
    largest_bytes: int  # of a tar


@dataclass(frozen=True)
class PackCost:
    """What a packing takes; money is by the prices typed, in their currency."""

    source: str
    classes: int
    splits: tuple[SplitCost, ...]
    source_bytes: int
    remote_bytes: int  # read from stores
    requests: StoreRequests
    destination: Literal["disk", "store"]
    scratch_bytes: int  # meanwhile, on this machine
    trial: Trial
    workers: int
    bytes_per_second: float | None  # of the network; None: not typed
    prices: Mapping[str, float]

    @property
    def images(self) -> int:
        return sum(each.images for each in self.splits)

    @property
    def bytes(self) -> int:
        return sum(each.bytes for each in self.splits)

    @property
    def sent_bytes(self) -> int:
        return self.bytes if self.destination == "store" else 0

    @property
    def core_hours(self) -> float | None:
        """None: no image could be tried."""
        return self.images * self.trial.cpu_seconds / _HOUR if self.trial.images else None

    @property
    def network_hours(self) -> float:
        """0 if no bandwidth was typed."""
        return (self.remote_bytes + self.sent_bytes) / self.bytes_per_second / _HOUR if self.bytes_per_second else 0.0

    @property
    def hours(self) -> float | None:
        """On all workers, or of the network if that is slower."""
        return None if self.core_hours is None else max(self.core_hours / self.workers, self.network_hours)

    @property
    def money(self) -> dict[str, float]:
        amounts = {name: count / 1000 for name, count in asdict(self.requests).items()}
        amounts |= {"egress": self.remote_bytes / _GB, "storage": self.sent_bytes / _GB}
        amounts["core_hour"] = self.core_hours or 0.0
        return {name: price * amounts[name] for name, price in self.prices.items()}

    def as_json(self) -> dict[str, object]:
        computed = ("images", "bytes", "sent_bytes", "core_hours", "network_hours", "hours", "money")
        return asdict(self) | {name: getattr(self, name) for name in computed}

    def lines(self) -> list[str]:
        """Format for the terminal."""
        of = f"{counted(self.images, 'image')} of {counted(self.classes, 'class')}, {show_bytes(self.source_bytes)}"
        rows = {}
        for each in self.splits:
            size = f"{show_bytes(each.bytes)} in {counted(each.shards, 'shard')}"
            rows[each.split] = f"{counted(each.images, 'image')}, {size} of up to {show_bytes(each.largest_bytes)}"
        on_disk = self.bytes - self.sent_bytes
        rows["disk"] = f"{show_bytes(on_disk)} for OUT, {show_bytes(self.scratch_bytes)} meanwhile"
        if self.remote_bytes or self.sent_bytes:
            ask = self.requests
            rows["requests"] = f"{ask.list:,} LIST, {ask.get:,} GET and HEAD, {ask.put:,} PUT and POST"
            time = f", {show_duration(self.network_hours * _HOUR)}" if self.network_hours else ""
            rows["network"] = f"{show_bytes(self.remote_bytes)} read, {show_bytes(self.sent_bytes)} written{time}"
        if self.core_hours is None or self.hours is None:
            rows["time"] = "unknown: no image can be read before the source is decompressed"
        else:
            each = f"{1000 * self.trial.cpu_seconds:.2f} ± {1000 * self.trial.error_seconds:.2f} ms an image"
            rows["cores"] = f"{self.core_hours:,.3f} hours, {each} by a trial of {self.trial.images}"
            rows["time"] = f"{show_duration(self.hours * _HOUR)} on {counted(self.workers, 'core')}"
        if self.trial.unreadable:
            rows["damaged"] = f"{self.trial.unreadable} of {self.trial.images} images tried"
        if self.money:
            paid = ", ".join(f"{name} {amount:,.2f}" for name, amount in self.money.items())
            rows["money"] = f"{sum(self.money.values()):,.2f} ({paid})"
        first = f"{self.source}: {of}; nothing was written"
        return [first, *(f"  {name:<10} {text}" for name, text in rows.items())]


def parse_prices(text: str | None) -> dict[str, float]:
    """Read `get=0.0004,put=0.005`; UserError for an unknown name or no amount."""
    found: dict[str, float] = {}
    for part in text.split(",") if text else ():
        name, _, amount = (each.strip() for each in part.partition("="))
        if name not in PRICES or not re.fullmatch(r"(\d+\.?\d*|\.\d+)(e-?\d+)?", amount):
            raise UserError(f"--price: {part!r}: give NAME=AMOUNT, where NAME is one of {', '.join(PRICES)}")
        found[name] = float(amount)
    return found


def parse_bandwidth(text: str | None) -> float | None:
    """Read `10Gbit` or `500Mbit` (a second) as bytes a second; UserError for anything else."""
    if text is None:
        return None
    found = re.fullmatch(r"(\d+(?:\.\d+)?) ?([MG])bit(?:/s)?", text, re.IGNORECASE)
    if not found or not float(found[1]):
        raise UserError(f"--bandwidth: {text!r}: give it a second, such as 10Gbit or 500Mbit")
    return float(found[1]) * {"M": 1e6, "G": 1e9}[found[2].upper()] / 8
