"""Real servers on a GPU: every attention backend, with and without graphs, and no waiting."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
from harness import PLAIN, foresight, generate_all, tree
from workloads import prompts

HERE = Path(__file__).parent
# The tiny model's heads of 32 are too small for FlashInfer; fp32 makes greedy answers exact.
EXACT = ("jetspec_triton", "triton")
ROUNDS = 492  # as many as the JetSpec++ paper compares


def gpu(setup, *args, **env):
    return replace(
        setup, args=(*setup.args, "--device", "cuda", *args), env=(*setup.env, *env.items())
    )


def answers(setup, count=40, batch=8):
    with setup.server() as server:
        return generate_all(server, prompts(count), batch, max_new_tokens=64)


@pytest.fixture(scope="module")
def plain():
    return [a["output_ids"] for a in answers(gpu(PLAIN, "--attention-backend", "triton"))]


def detector():
    path = filter(None, (str(HERE / "sync_detector"), os.environ.get("PYTHONPATH")))
    return {
        "PYTHONPATH": os.pathsep.join(path),
        "SGLANG_PLUGINS": "jetspec,jetspec_cpu,jetspec_sync_detector",
    }


@pytest.mark.parametrize("graphs", [(), ("--disable-decode-cuda-graph",)])
@pytest.mark.parametrize("backend", EXACT)
def test_greedy_answers_are_those_of_plain_decoding(plain, backend, graphs):
    setup = gpu(tree(16, 4, 7), "--attention-backend", backend, *graphs)
    assert [a["output_ids"] for a in answers(setup)] == plain


@pytest.mark.parametrize("backend", EXACT)
def test_graphs_and_eager_passes_draft_the_same(backend):
    """Equal drafts are accepted alike: the same rounds, with the same accepted counts in each."""
    setup = gpu(tree(16, 4, 7), "--attention-backend", backend)
    graphed = answers(setup, batch=1)
    eager = answers(gpu(setup, "--disable-decode-cuda-graph"), batch=1)
    assert sum(a["meta_info"]["spec_verify_ct"] for a in graphed) >= ROUNDS
    for one, other in zip(graphed, eager, strict=True):
        for field in ("spec_verify_ct", "spec_correct_drafts_histogram"):
            assert one["meta_info"][field] == other["meta_info"][field]


@pytest.mark.parametrize("backend", EXACT)
def test_a_round_waits_for_nothing(backend):
    setup = gpu(tree(16, 4, 7), "--attention-backend", backend, **detector())
    assert len(answers(setup)) == 40


def test_flashinfer_serves_trees():
    """Needs heads of 64 and bf16, so the demo pair: prefixes agree, and trees are accepted."""
    from sglang_jetspec.tools.model_pair import resolve_pair

    target, head = resolve_pair(None, None)
    model = ("--model-path", target, "--device", "cuda", "--attention-backend", "flashinfer")
    speculative = ("--speculative-algorithm", "JETSPEC", "--speculative-draft-model-path", head)
    from sglang_jetspec.tools.bench.server import Server

    ask = "Explain in three sentences why the sky is blue."
    with Server(model) as server:
        wanted = server.chat([{"role": "user", "content": ask}], max_tokens=64)
    with Server((*model, *speculative), detector()) as server:
        got = server.chat([{"role": "user", "content": ask}], max_tokens=64)
        details = server.generate(ask, max_new_tokens=64)["meta_info"]
    texts = [answer["choices"][0]["message"]["content"] for answer in (wanted, got)]
    assert texts[0][:20] == texts[1][:20]
    assert details["spec_accept_length"] > 1.3


@pytest.mark.parametrize("executor", ["serial", "stream"])
def test_foreseen_blocks_leave_the_answers_and_wait_for_nothing(plain, executor):
    setup = foresight("33", 4, SGLANG_JETSPEC_EXECUTOR=executor, **detector())
    found = answers(gpu(setup, "--attention-backend", "triton"))
    assert [a["output_ids"] for a in found] == plain
