"""Requests that cannot be served, and servers that survive them."""

import pytest
from harness import tree
from workloads import CONTEXT, WORKLOADS, prompts

SERVER = tree(16, 4, 7)
server_16 = pytest.mark.parametrize("server", [SERVER], indirect=True, ids=lambda s: s.name)
PROMPT = list(prompts(1, seed=9)[0])

REFUSED = [
    ({"return_hidden_states": True}, "return_hidden_states"),
    ({"token_indices_to_pool": [0]}, "token_indices_to_pool"),
]
FOREIGN_STOPS = {"frequency_penalty": 0.5, "stop_token_ids": [10**6, -1], "max_new_tokens": 8}
MALFORMED = [
    {"sampling_params": {"temperature": -1}},
    {"sampling_params": {"top_p": 2}},
    {"sampling_params": {"max_new_tokens": "many"}},
    {"input_ids": list(PROMPT) * CONTEXT},
    {"input_ids": []},
    {"input_ids": [10**6]},
]


@server_16
@pytest.mark.parametrize(("body", "named"), REFUSED)
def test_what_is_not_served_exactly_is_refused_by_name(server, body, named):
    answer = server.post("/generate", {"input_ids": PROMPT, **body})
    assert answer.status_code == 400
    assert named in answer.text
    assert "JETSPEC" in answer.text


@pytest.mark.parametrize(
    "server", [tree(16, 4, 7, "--grammar-backend", "outlines")], indirect=True, ids=lambda s: s.name
)
def test_a_grammar_backend_without_rollback_is_refused(server):
    body = {"input_ids": PROMPT, "sampling_params": {"regex": "[a-z]+"}}
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert "regex under --grammar-backend outlines" in answer.text
    assert server.generate(PROMPT, max_new_tokens=4)["meta_info"]["completion_tokens"] == 4


@server_16
def test_the_server_survives_malformed_requests(server, plain):
    for body in MALFORMED:
        assert server.post("/generate", {"input_ids": PROMPT, **body}).status_code >= 400, body
    assert server.generate(PROMPT, **FOREIGN_STOPS)["meta_info"]["completion_tokens"] == 8
    prompt = list(WORKLOADS["single"].prompts()[0])
    expected = plain.answers["single"][0]["output_ids"]
    assert server.generate(prompt, max_new_tokens=64)["output_ids"] == expected


@server_16
def test_speculation_counts_agree_with_each_other(server):
    for answer in WORKLOADS["single"].ask(server)[:20]:
        meta = answer["meta_info"]
        histogram = meta["spec_correct_drafts_histogram"]
        assert sum(histogram) == meta["spec_verify_ct"]
        drafts = sum(i * rounds for i, rounds in enumerate(histogram))
        assert drafts == meta["spec_num_correct_drafts"]
        length = meta["completion_tokens"] / meta["spec_verify_ct"]
        assert meta["spec_accept_length"] == pytest.approx(length)
        assert length <= 8 + 1
        assert 0.0 <= meta["spec_accept_rate"] <= 1.0
