"""Numbers out of raw passes: rates, acceptance, latencies, spread, and whether texts agree.

Rates are totals (tokens / time), not means of ratios. `tok_per_s` counts the wall time of a pass,
prefill included; `decode_tok_per_s` is one request's own rate after its first token. The
acceptance length is SGLang's: completion tokens / verify rounds, the bonus token included.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from sglang_jetspec.tools.bench.arms import Arm, baseline_of
from sglang_jetspec.tools.bench.measure import Pass, Sample


def tok_per_s(passes: Sequence[Pass]) -> float:
    tokens = sum(len(sample.output_ids) for p in passes for sample in p.samples)
    return tokens / sum(p.wall_s for p in passes)


def arm_summary(passes: Sequence[Pass]) -> dict[str, Any]:
    """One arm's passes (any repeats and tasks) as plain numbers."""
    samples = [sample for p in passes for sample in p.samples]
    latencies = np.array([sample.latency_s for sample in samples])
    p50, p90 = np.percentile(latencies, [50, 90]).tolist()
    return {
        "tok_per_s": tok_per_s(passes),
        "decode_tok_per_s": _decode_rate(samples),
        "acceptance_length": _acceptance_length(samples),
        "latency_s": {"mean": float(latencies.mean()), "p50": p50, "p90": p90},
        "completion_tokens": sum(len(sample.output_ids) for sample in samples),
        "prompt_tokens": sum(sample.prompt_tokens for sample in samples),
        "requests": len(samples),
        "wall_s": sum(p.wall_s for p in passes),
    }


def _decode_rate(samples: Sequence[Sample]) -> float | None:
    timed = [s for s in samples if s.decode_s and len(s.output_ids) > 1]
    seconds = sum(s.decode_s or 0.0 for s in timed)
    return sum(len(s.output_ids) - 1 for s in timed) / seconds if timed else None


def _acceptance_length(samples: Sequence[Sample]) -> float | None:
    counted = [s for s in samples if s.verify_rounds]
    rounds = sum(s.verify_rounds or 0 for s in counted)
    return sum(len(s.output_ids) for s in counted) / rounds if rounds else None


def agreement(passes: Sequence[Pass], baseline: str) -> dict[str, Any]:
    """Per arm: the share of prompts answered with the baseline's very ids, and the earliest
    difference (position counted from the first output token). First repeat only."""
    answers: dict[str, dict[tuple[str, str], list[int]]] = {}
    for p in passes:
        if p.repeat == 0:
            here = answers.setdefault(p.arm, {})
            here.update({(s.task, s.id): s.output_ids for s in p.samples})
    report: dict[str, Any] = {}
    for arm, got in answers.items():
        if arm == baseline:
            continue
        different = {
            key: position
            for key, expected in answers[baseline].items()
            if (position := first_difference(expected, got[key])) is not None
        }
        first = min(different.items(), key=lambda item: item[1], default=None)
        report[arm] = {
            "share": 1.0 - len(different) / len(got),
            "first_difference": first
            and {"task": first[0][0], "id": first[0][1], "position": first[1]},
        }
    return report


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token where the answers differ (also by ending); None: they are equal."""
    for position, (a, b) in enumerate(zip(one, other, strict=False)):
        if a != b:
            return position
    return None if len(one) == len(other) else min(len(one), len(other))


def summarize(passes: Sequence[Pass], arms: Sequence[Arm]) -> dict[str, Any]:
    """The benchmark's result: all tasks together, and `tasks` with the same for each."""
    tasks = list(dict.fromkeys(p.task for p in passes))
    result = _compare(passes, arms)
    result["tasks"] = {
        task: _compare([p for p in passes if p.task == task], arms) for task in tasks
    }
    return result


def _compare(passes: Sequence[Pass], arms: Sequence[Arm]) -> dict[str, Any]:
    of_arm = {arm.name: [p for p in passes if p.arm == arm.name] for arm in arms}
    summaries = {name: arm_summary(own) for name, own in of_arm.items()}
    rates = {name: summary["tok_per_s"] for name, summary in summaries.items()}
    per_repeat = {name: _by_repeat(own) for name, own in of_arm.items()}
    spread: dict[str, Any] = {"tok_per_s": {name: _range(per_repeat[name]) for name in of_arm}}
    result: dict[str, Any] = {"arms": summaries, "spread": spread}
    baseline = baseline_of(rates, arms)
    if baseline is not None:
        result["baseline"] = baseline
        result["speedup"] = {name: rate / rates[baseline] for name, rate in rates.items()}
        spread["speedup"] = {
            name: _range(np.array(own) / np.array(per_repeat[baseline]))
            for name, own in per_repeat.items()
        }
        result["identical"] = agreement(passes, baseline)
    return result


def _by_repeat(passes: Sequence[Pass]) -> list[float]:
    repeats = sorted({p.repeat for p in passes})
    return [tok_per_s([p for p in passes if p.repeat == repeat]) for repeat in repeats]


def _range(values: Iterable[float]) -> list[float]:
    """[lowest, highest] over the repeats."""
    found = [float(value) for value in values]
    return [min(found), max(found)]
