"""Two ranks on the CPU platform, over gloo: they answer what one rank answers."""

import pytest
from harness import generate_all, tree
from workloads import WORKLOADS

PROMPTS = 50
TWO_RANKS = tree(16, 4, 7, "--tp-size", "2")
two_ranks = pytest.mark.parametrize("server", [TWO_RANKS], indirect=True, ids=lambda s: s.name)


@two_ranks
def test_every_id_equals_one_rank_without_speculation(server, plain):
    workload = WORKLOADS["batched"]
    answers = generate_all(server, workload.prompts()[:PROMPTS], 4, **workload.sampling)
    expected = plain.answers["batched"][:PROMPTS]
    assert [a["output_ids"] for a in answers] == [a["output_ids"] for a in expected]


@two_ranks
def test_ranks_draft_together(server):
    """Halved vocabularies that were ranked alone would draft little that is accepted."""
    workload = WORKLOADS["single"]
    answers = generate_all(server, workload.prompts()[:10], 2, **workload.sampling)
    tokens = sum(a["meta_info"]["completion_tokens"] for a in answers)
    assert tokens / sum(a["meta_info"]["spec_verify_ct"] for a in answers) >= 2.0


@two_ranks
def test_ranks_agree_on_draws(server):
    """Each rank has a random state of its own: without rank 0's decisions they would part ways."""
    workload = WORKLOADS["single"]
    answers = generate_all(
        server, workload.prompts()[:8], 4, max_new_tokens=32, temperature=1.0, ignore_eos=True
    )
    assert [len(a["output_ids"]) for a in answers] == [32] * 8
    assert len({tuple(a["output_ids"]) for a in answers}) > 4
