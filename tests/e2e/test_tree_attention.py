"""`jetspec_triton` in whole servers: prefill, draft blocks and trees, in Triton's interpreter."""

import pytest
from harness import tree

from sglang_jetspec.backends.registry import TREE_ATTENTION

# The interpreter takes about a second a round; the plain loop over layers is for `jetspec_cpu`.
SETUP = tree(
    *(8, 4, 5, "--attention-backend", TREE_ATTENTION),
    TRITON_INTERPRET="1",
    SGLANG_JETSPEC_CPU_OPS="native",
)
TOKENS = 24


@pytest.mark.parametrize("server", [SETUP], indirect=True, ids=[SETUP.name])
def test_greedy_answers_are_those_of_plain_decoding(server, plain):
    from workloads import prompts

    wanted = plain.answers["single"][:2]
    drafted = 0
    for prompt, answer in zip(prompts(40), wanted, strict=False):
        got = server.generate(list(prompt), max_new_tokens=TOKENS)
        assert got["output_ids"] == answer["output_ids"][:TOKENS]
        drafted += got["meta_info"]["completion_tokens"] - got["meta_info"]["spec_verify_ct"]
    assert drafted > 5
