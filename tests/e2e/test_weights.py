"""Weights that are exchanged in a running server."""

import pytest
from harness import FIXTURE, tree
from workloads import WORKLOADS, acceptance_length, use_target

server_16 = pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)


def ids(answers):
    return [answer["output_ids"] for answer in answers]


def rounds(answers):
    return [answer["meta_info"]["spec_verify_ct"] for answer in answers]


@server_16
def test_a_target_is_exchanged_and_the_head_stays(server, plain, other_target):
    """Packed weights, the shared embedding and the LM head follow; the head's own layers do not."""
    workload = WORKLOADS["single"]
    before = workload.ask(server)
    try:
        use_target(server, other_target)
        changed = workload.ask(server)
    finally:
        use_target(server, FIXTURE / "target")
    assert ids(changed) == ids(plain.changed)
    assert ids(changed) != ids(before)
    assert acceptance_length(changed) > 1.2, "the head does not draft for its target's new weights"
    server.post("/flush_cache", {})
    after = workload.ask(server)
    assert ids(after) == ids(plain.answers["single"])
    assert rounds(after) == rounds(before)


@server_16
def test_a_folder_without_weights_changes_nothing(server, plain, tmp_path):
    answer = server.post("/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert answer.status_code == 400
    prompt = list(WORKLOADS["single"].prompts()[0])
    expected = plain.answers["single"][0]["output_ids"]
    assert server.generate(prompt, max_new_tokens=64)["output_ids"] == expected
