"""Acceptance length and cache hits of a JetSpec++ folder, played in plain torch, no server.

    python -m sglang_jetspec.tools.foresight.evaluate --target DIR --folder DIR --prompts FILE...

One table has the acceptance length (committed tokens a round) of every Jn-Rm with stale, predicted
and true states; one the hit rate of the outcome cache by size and selection rule; one whole rounds
with a cache, where a miss is drafted behind true states in one pass. A request's first block,
drafted behind the prompt, counts as a round but neither as hit nor as miss. Prints the tables, then
one JSON line.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import tyro
from rich.console import Console
from rich.table import Table
from scipy.stats import binomtest
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from sglang_jetspec.foresight.calibration import IDENTITY, ClassCalibration
from sglang_jetspec.foresight.folder import ADAPTER, load_foresight
from sglang_jetspec.foresight.refine import RefinePlan
from sglang_jetspec.foresight.selection import RULES, RuleSettings
from sglang_jetspec.tools.foresight.models import Models, load_models
from sglang_jetspec.tools.foresight.prompts import read_prompt_ids
from sglang_jetspec.tools.foresight.rounds import Round, RoundPlan, Session, StateKind


@dataclass(frozen=True)
class EvaluateConfig:
    """Measure refinement, adapter and outcome cache."""

    target: Path
    folder: Path
    """Head, `adapter/` and calibration. Without an adapter only plain refinement is measured."""
    prompts: tuple[Path, ...]
    """JSON lines with `prompt` or `turns`, one file a set."""
    count: int = 64
    """Prompts a set, from the start of its file."""
    max_new_tokens: int = 128
    batch_size: int = 32
    temperature: float = 0.0
    plans: tuple[str, ...] = ("J0", "J1-R0", "J1-R1", "J3-R0", "J3-R3")
    """Passes and refreshes; a trailing "n" refreshes without anchor replacement."""
    states: tuple[StateKind, ...] = ("stale", "predicted", "true")
    hit_plan: str = "J1-R1"
    """Plan whose rounds the hit rates and the cached rounds are measured on."""
    cached_outcomes: tuple[int, ...] = (4,)
    """Cache sizes of which whole rounds are played, with the calibrated rule."""
    cache_sizes: tuple[int, ...] = field(default=(1, 2, 4, 8, 16))
    stop_at_end_of_turn: bool = True
    seed: int = 1


@dataclass
class HitCount:
    """Rounds whose outcome was selected, of all rounds."""

    hits: int = 0
    rounds: int = 0

    @property
    def rate(self) -> float:
        """Hit rate."""
        return self.hits / max(self.rounds, 1)

    def interval(self) -> tuple[float, float]:
        """95 % interval (Wilson), rounds taken as independent."""
        found = binomtest(self.hits, max(self.rounds, 1)).proportion_ci(method="wilson")
        return float(found.low), float(found.high)


Hits = dict[str, dict[int, HitCount]]


def parse_plan(name: str) -> RefinePlan:
    """ "J3-R2" -> RefinePlan(3, 2); "J1" means R0; a trailing "n" refreshes without replacement."""
    passes, _, refreshes = name.removesuffix("n").partition("-")
    try:
        counts = int(passes.removeprefix("J")), int(refreshes.removeprefix("R") or 0)
    except ValueError:
        raise ValueError(f"plan {name!r}: write Jn-Rm, for example J3-R3") from None
    return RefinePlan(*counts, replace=not name.endswith("n"))


def count_hits(played: Round, sizes: Sequence[int], settings: RuleSettings, hits: Hits) -> None:
    """Add one round to every rule's and size's count."""
    evidence = played.evidence
    assert evidence is not None
    for name, rule in RULES.items():
        ranked = rule(evidence, max(sizes), settings)
        for size in sizes:
            chosen = rule(evidence, size, settings) if name == "geometric" else ranked.best(size)
            found = chosen.contains(played.lengths, played.anchors) & played.live
            count = hits.setdefault(name, {}).setdefault(size, HitCount())
            count.hits += int(found.sum())
            count.rounds += int(played.live.sum())


class Evaluation:
    """Models and prompts of a run."""

    def __init__(self, config: EvaluateConfig) -> None:
        self.config = config
        has_adapter = (config.folder / ADAPTER).is_dir()
        offered = load_foresight(config.folder, config.target.name) if has_adapter else None
        adapter = config.folder / ADAPTER if offered and offered.adapter else None
        self.models: Models = load_models(config.target, config.folder, adapter)
        self.tokenizer = AutoTokenizer.from_pretrained(config.target)
        calibration = offered.calibration if offered else None
        self.fitted: ClassCalibration = (
            calibration.of(config.temperature == 0) if calibration else IDENTITY
        )

    def arms(self) -> list[tuple[str, StateKind]]:
        """(plan, states) pairs that the folder's parts allow."""
        if self.models.foresight.adapter is not None:
            return [(plan, kind) for plan in self.config.plans for kind in self.config.states]
        plain = [name for name in self.config.plans if parse_plan(name).refreshes == 0]
        return [
            (plan, kind) for plan in plain for kind in self.config.states if kind != "predicted"
        ]

    def cached_sizes(self) -> tuple[int, ...]:
        """Cache sizes to play whole rounds with; none without an adapter."""
        return self.config.cached_outcomes if self.models.foresight.adapter is not None else ()

    def rounds(self, prompts: Path, plan: RoundPlan, name: str) -> Iterator[tuple[int, Round]]:
        """Every batch's rounds, with their number in the batch."""
        config = self.config
        ids = read_prompt_ids(prompts, self.tokenizer, config.count)
        batches = [ids[i : i + config.batch_size] for i in range(0, len(ids), config.batch_size)]
        end = self.tokenizer.eos_token_id if config.stop_at_end_of_turn else None
        for index, batch in enumerate(tqdm(batches, desc=f"{prompts.stem} {name}")):
            session = Session(self.models, plan, batch, config.max_new_tokens, config.seed + index)
            yield from enumerate(session.play(end))

    def lengths(self, prompts: Path, plan: str, kind: StateKind, hits: Hits | None) -> Tensor:
        """Committed tokens of every round [N]; adds to `hits` if given."""
        setup = RoundPlan(
            parse_plan(plan), kind, self.config.temperature, collect_evidence=hits is not None
        )
        found = []
        for _, played in self.rounds(prompts, setup, f"{plan} {kind}"):
            found.append((played.lengths + 1)[played.live])
            if hits is not None:
                count_hits(played, self.config.cache_sizes, RuleSettings(self.fitted), hits)
        return torch.cat(found).float()

    def cached(self, prompts: Path, outcomes: int) -> dict[str, float]:
        """Whole rounds with a cache: acceptance length of all, of hits and of misses; hit rate."""
        config = self.config
        plan = RoundPlan(
            parse_plan(config.hit_plan),
            "cached",
            config.temperature,
            outcomes=outcomes,
            settings=RuleSettings(self.fitted),
        )
        first, hit, miss = [], [], []
        for number, played in self.rounds(prompts, plan, f"cache of {outcomes}"):
            committed = (played.lengths + 1).float()
            if number == 0:
                first.append(committed[played.live])
                continue
            hit.append(committed[played.live & played.cached])
            miss.append(committed[played.live & ~played.cached])
        hits, misses = (sum(map(len, part)) for part in (hit, miss))
        return {
            "acceptance_length": mean([*first, *hit, *miss]),
            "hit_acceptance_length": mean(hit),
            "miss_acceptance_length": mean(miss),
            "hit_rate": round(hits / max(hits + misses, 1), 4),
        }


def mean(parts: list[torch.Tensor]) -> float:
    """Mean of all values, NaN where there are none (prompts that end in the first round)."""
    return round(float(torch.cat(parts).mean()), 3) if parts else math.nan


def evaluate(config: EvaluateConfig) -> dict[str, object]:
    """All measurements by prompt set."""
    run = Evaluation(config)
    results: dict[str, object] = {}
    for prompts in config.prompts:
        acceptance, hits = {}, Hits()
        for plan, kind in run.arms():
            counted = hits if (plan, kind) == (config.hit_plan, "predicted") else None
            values = run.lengths(prompts, plan, kind, counted)
            error = float(values.std() / len(values) ** 0.5)
            acceptance[f"{plan} {kind}"] = [round(float(values.mean()), 3), round(error, 3)]
        results[prompts.stem] = {
            "acceptance_length": acceptance,
            "hit_rate": {
                rule: {size: [round(c.rate, 4), *c.interval()] for size, c in sizes.items()}
                for rule, sizes in hits.items()
            },
            "cached": {size: run.cached(prompts, size) for size in run.cached_sizes()},
        }
    return results


def print_tables(config: EvaluateConfig, results: dict[str, object]) -> None:
    """The tables, on stderr."""
    console = Console(stderr=True)
    for name, found in results.items():
        assert isinstance(found, dict)
        table = Table("plan", *config.states, title=f"{name}: committed tokens a round")
        for plan in config.plans:
            cells = (found["acceptance_length"].get(f"{plan} {kind}") for kind in config.states)
            table.add_row(plan, *("" if c is None else f"{c[0]:.2f} ± {c[1]:.2f}" for c in cells))
        console.print(table)
        sizes = [str(size) for size in config.cache_sizes]
        table = Table("rule", *sizes, title=f"{name}: hit rate by cache size, {config.hit_plan}")
        for rule, counts in found["hit_rate"].items():
            table.add_row(
                rule, *(f"{rate:.3f} [{a:.3f}, {b:.3f}]" for rate, a, b in counts.values())
            )
        console.print(table)
        table = Table(
            "cache of", "all", "hits", "misses", "hit rate", title=f"{name}: whole rounds"
        )
        for size, values in found["cached"].items():
            table.add_row(str(size), *(f"{value:.3f}" for value in values.values()))
        console.print(table)


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate; print tables and one JSON line."""
    config = tyro.cli(EvaluateConfig, args=argv)
    results = evaluate(config)
    print_tables(config, results)
    print(json.dumps({"folder": str(config.folder), **results}))


if __name__ == "__main__":
    main()
