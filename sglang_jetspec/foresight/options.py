"""The serving options of JetSpec++."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import msgspec

from sglang_jetspec.foresight.executors import EXECUTORS
from sglang_jetspec.foresight.refine import RefinePlan
from sglang_jetspec.foresight.selection import RULES

MAX_OUTCOMES = 64


class ForesightOptions(msgspec.Struct, frozen=True):
    """How blocks are drafted.

    passes: J, refinement passes after the first. refreshes: R <= J of them read refreshed states.
    outcomes: B, blocks drafted ahead for each request; 0 drafts behind true states only.
    rule: which outcomes, one of `RULES`; None: calibrated where the head's folder has a
    calibration, else uncalibrated. max_foresight_blocks: bound of outcomes times requests, which
    larger batches keep by drafting for fewer outcomes. executor: one of `EXECUTORS`, where outcomes
    are drafted. foresight_cores: of a CPU, for the thread executor: "1" or "4,5"; the rest is left
    to verification.
    """

    passes: int = 0
    refreshes: int = 0
    outcomes: int = 0
    rule: str | None = None
    max_foresight_blocks: int = 64
    executor: str = "serial"
    foresight_cores: str | None = None

    @property
    def core_set(self) -> set[int] | None:
        """The cores by number."""
        text = self.foresight_cores
        return None if text is None else {int(core) for core in text.split(",")}

    @property
    def plan(self) -> RefinePlan:
        return RefinePlan(self.passes, self.refreshes)

    @property
    def reads_predictions(self) -> bool:
        """Whether an adapter is needed."""
        return self.refreshes > 0 or self.outcomes > 0

    def outcomes_of(self, batch: int) -> int:
        """Outcomes drafted for each of `batch` requests."""
        return min(self.outcomes, self.max_foresight_blocks // batch)


def foresight_options(given: Mapping[str, Any]) -> ForesightOptions | None:
    """Options from `given` (None: the default), or None where nothing is refined or foreseen.

    Raises ValueError, which names the option, its value and the fix.
    """
    options = ForesightOptions(**{k: v for k, v in given.items() if v is not None})
    if options.rule is not None and options.rule not in RULES:
        raise ValueError(f"rule={options.rule!r}: use one of {', '.join(sorted(RULES))}.")
    if not 0 <= options.outcomes <= MAX_OUTCOMES:
        raise ValueError(f"outcomes={options.outcomes}: use 0 to {MAX_OUTCOMES}.")
    if options.max_foresight_blocks < 1:
        raise ValueError(f"max_foresight_blocks={options.max_foresight_blocks}: use 1 or more.")
    if not 0 <= options.refreshes <= options.passes:
        raise ValueError(
            f"refreshes={options.refreshes}, passes={options.passes}: a refresh precedes a pass; "
            "use 0 <= refreshes <= passes."
        )
    if options.executor not in EXECUTORS:
        raise ValueError(f"executor={options.executor!r}: use one of {', '.join(EXECUTORS)}.")
    try:
        cores = options.core_set
    except ValueError:
        cores = set()
    if cores is not None and not (cores and cores <= os.sched_getaffinity(0)):
        raise ValueError(
            f"foresight_cores={options.foresight_cores!r}: use some of this process's, which are "
            f"{','.join(map(str, sorted(os.sched_getaffinity(0))))}."
        )
    return options if options.passes or options.outcomes else None
