"""What a finished request and Prometheus say about speculation.

SGLang takes the drafts of a request to be ``spec_verify_ct * (N - 1)``. A tree may have fewer nodes
than its budget, so the worker reports every round's live nodes (SGLang's ``cap_lens``), and the
hooks here count drafts from those.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_jetspec.foresight.meters import Totals

PREFIX = "jetspec:"


def drafted_tokens(recv_obj: Any, i: int) -> int:
    """Nodes drafted for request i of a batch of outputs, roots not counted."""
    return int(recv_obj.spec_num_cap_tokens[i] - recv_obj.spec_verify_ct[i])


def correct_drafts(_: None, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Hook after SGLang wrote a finished request's ``spec_*`` entries: the true drafted count."""
    if not _speculated(recv_obj, i):
        return
    drafted = drafted_tokens(recv_obj, i)
    meta_info["spec_num_proposed_drafts"] = drafted
    meta_info["spec_accept_rate"] = (
        recv_obj.spec_num_correct_drafts[i] / drafted if drafted > 0 else 0.0
    )


def count_finished(_: None, manager: Any, state: Any, recv_obj: Any, i: int) -> None:
    """Hook after SGLang updated its own series, in the same process and with the same labels."""
    if not state.finished or not _speculated(recv_obj, i):
        return
    labels = manager.metrics_collector.labels
    drafted, accepted, per_position = counters(tuple(labels))
    drafted.labels(**labels).inc(drafted_tokens(recv_obj, i))
    accepted.labels(**labels).inc(recv_obj.spec_num_correct_drafts[i])
    for position, count in enumerate(accepted_at(recv_obj.spec_correct_drafts_histogram[i]), 1):
        per_position.labels(**labels, position=str(position)).inc(count)


def accepted_at(histogram: list[int]) -> list[int]:
    """Rounds that accepted at least 1, 2, ... drafts, of rounds by number of accepted drafts.

    >>> accepted_at([3, 2, 0, 1])
    [3, 1, 1]
    """
    return [sum(histogram[position:]) for position in range(1, len(histogram))]


@cache
def counters(labels: tuple[str, ...]) -> tuple[Any, Any, Any]:
    """The three series; made on first use, when SGLang has set Prometheus up."""
    from prometheus_client import Counter

    return (
        Counter(PREFIX + "draft_tokens_total", "Tree nodes drafted, roots not counted.", labels),
        Counter(PREFIX + "accepted_tokens_total", "Drafted tokens accepted.", labels),
        Counter(
            PREFIX + "accepted_tokens_per_position_total",
            "Drafted tokens accepted at a depth of the tree, 1 being the root's children.",
            (*labels, "position"),
        ),
    )


def publish_foresight(totals: Totals) -> None:
    """Add a scheduler's JetSpec++ counts to Prometheus, where the server has it switched on."""
    from sglang.srt.runtime_context import get_observability, get_serving

    if not get_observability().enable_metrics:
        return
    series = foresight_counters()
    name = get_serving().served_model_name
    for field, value in vars(totals).items():
        series[field].labels(model_name=name).inc(value)


@cache
def foresight_counters() -> dict[str, Any]:
    """The series by field of `Totals`."""
    from prometheus_client import Counter

    described = {
        "waited": "Request rounds for which foreseen blocks waited.",
        "hits": "Request rounds whose block was foreseen.",
        "faults": "Rounds whose work ahead was lost.",
        "exposed_seconds": "Host time of drafting that nothing hid (CPU).",
        "ahead_seconds": "Host time of drafting ahead (CPU).",
        "round_seconds": "Host time of rounds (CPU).",
    }
    return {
        field: Counter(f"{PREFIX}foresight_{field}_total", text, ("model_name",))
        for field, text in described.items()
    }


def _speculated(recv_obj: Any, i: int) -> bool:
    """Whether request i went through a JETSPEC round; other algorithms report no live nodes."""
    from sglang.srt.runtime_context import get_spec

    if get_spec().speculative_algorithm != "JETSPEC":
        return False
    rounds = getattr(recv_obj, "spec_verify_ct", None)
    return bool(rounds) and rounds[i] > 0
