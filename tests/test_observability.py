"""Counts of drafted and accepted tokens, in answers and as Prometheus series."""

from types import SimpleNamespace

import pytest
import sglang.srt.runtime_context
from prometheus_client import REGISTRY

from sglang_jetspec.observability import accepted_at, correct_drafts, count_finished

LABELS = {"model_name": "tiny", "engine_type": "unified"}


@pytest.fixture(autouse=True)
def algorithm(monkeypatch):
    spec = SimpleNamespace(speculative_algorithm="JETSPEC")
    monkeypatch.setattr(sglang.srt.runtime_context, "get_spec", lambda: spec)
    return spec


def outputs():
    """Two requests: 6 rounds with 16, 16, 16, 16, 9 and 3 nodes; none yet."""
    return SimpleNamespace(
        spec_verify_ct=[6, 0],
        spec_num_cap_tokens=[76, 0],
        spec_num_correct_drafts=[7, 0],
        spec_correct_drafts_histogram=[[2, 2, 1, 1], []],
    )


def test_drafts_are_the_nodes_there_were():
    meta = {"spec_num_proposed_drafts": 90, "spec_accept_rate": 7 / 90, "spec_verify_ct": 6}
    correct_drafts(None, None, meta, outputs(), 0)
    assert meta == {
        "spec_num_proposed_drafts": 70,
        "spec_accept_rate": 7 / 70,
        "spec_verify_ct": 6,
    }


def test_requests_without_a_round_and_other_algorithms_are_left_alone(algorithm):
    meta = {}
    correct_drafts(None, None, meta, outputs(), 1)
    correct_drafts(None, None, meta, SimpleNamespace(spec_verify_ct=None), 0)
    algorithm.speculative_algorithm = "EAGLE"
    correct_drafts(None, None, meta, outputs(), 0)
    assert meta == {}


def test_rounds_of_roots_alone_have_rate_zero():
    meta = {}
    found = SimpleNamespace(
        spec_verify_ct=[2], spec_num_cap_tokens=[2], spec_num_correct_drafts=[0]
    )
    correct_drafts(None, None, meta, found, 0)
    assert meta == {"spec_num_proposed_drafts": 0, "spec_accept_rate": 0.0}


def test_accepted_at_counts_rounds_that_reach_a_depth():
    assert accepted_at([2, 2, 1, 1]) == [4, 2, 1]
    assert accepted_at([5]) == []


def value(name, **labels):
    return REGISTRY.get_sample_value(name, {**LABELS, **labels}) or 0.0


def test_series_count_finished_requests_once():
    manager = SimpleNamespace(metrics_collector=SimpleNamespace(labels=LABELS))
    for finished in (False, True):
        count_finished(None, manager, SimpleNamespace(finished=finished), outputs(), 0)
        count_finished(None, manager, SimpleNamespace(finished=finished), outputs(), 1)
    assert value("jetspec:draft_tokens_total") == 70
    assert value("jetspec:accepted_tokens_total") == 7
    per_position = [
        value("jetspec:accepted_tokens_per_position_total", position=str(i)) for i in (1, 2, 3, 4)
    ]
    assert per_position == [4, 2, 1, 0]
