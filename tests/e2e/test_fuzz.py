"""Random requests, mixes and cache states: every greedy answer equals plain decoding."""

import fuzz
import pytest
from harness import tree

from sglang_jetspec.tools.fuzz.answers import differences

AGAIN = f"""
again, and reduced: jetspec fuzz --seed {fuzz.SEED} --requests {fuzz.REQUESTS} \
--target tests/fixtures/tiny-qwen3/target --head tests/fixtures/tiny-qwen3/head"""


@pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)
def test_random_requests_are_answered_as_without_speculation(server, plain):
    answers = fuzz.ask_all(server)
    found = [
        f"group {group.number}, case {one.case}, turn {one.turn}: {one.what}"
        for group, ours, theirs in zip(fuzz.groups(), answers, plain.fuzz, strict=True)
        for one in differences(group, ours, theirs)
    ]
    assert not found, "\n".join(found) + AGAIN
    served = [a for group in answers for case in group for turn in case for a in turn]
    assert sum(answer.status == 200 for answer in served) > 0.98 * len(served)
    rounds = sum(answer.rounds for answer in served)
    assert sum(len(answer.ids) for answer in served) > 1.5 * rounds
