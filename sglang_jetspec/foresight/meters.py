"""Counts and times of a server's rounds under JetSpec++.

Counts stay on the device and reach the host one reading late, so that no round waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

EVERY = 32  # rounds between readings


@dataclass
class Totals:
    """Sums since the last reading.

    waited: request rounds for which blocks waited in the cache. hits: those that found theirs.
    faults: rounds whose work ahead was lost. exposed_seconds: host time of drafting that nothing
    hid, in the round or waiting for the work ahead. ahead_seconds: host time of the work ahead.
    round_seconds: of whole rounds. On a GPU the host runs ahead, and its times say little.
    """

    waited: int = 0
    hits: int = 0
    faults: int = 0
    exposed_seconds: float = 0.0
    ahead_seconds: float = 0.0
    round_seconds: float = 0.0


Publish = Callable[[Totals], None]


class Meter:
    """Adds up rounds and hands the sums to `publish`, every `EVERY` rounds."""

    def __init__(self, device: torch.device | str, publish: Publish) -> None:
        self.publish = publish
        self.totals = Totals()
        self.rounds = 0
        self.counts = torch.zeros(2, dtype=torch.int64, device=device)
        pinned = self.counts.device.type == "cuda"
        self.read = torch.zeros(2, dtype=torch.int64, pin_memory=pinned)  # on their way to the host

    def count(self, waited: Tensor, hit: Tensor) -> None:
        """A round's requests: [B] bool each."""
        self.counts += torch.stack([waited.sum(), hit.sum()])

    def end(self) -> None:
        """A round has ended."""
        self.rounds += 1
        if self.rounds % EVERY == 0:
            self.flush()

    def flush(self) -> None:
        self.totals.waited, self.totals.hits = self.read.tolist()
        self.publish(self.totals)
        self.totals = Totals()
        # The copy is complete long before the next reading, 32 rounds later.
        self.read.copy_(self.counts, non_blocking=True)
        self.counts.zero_()
