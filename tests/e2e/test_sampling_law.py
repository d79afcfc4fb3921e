"""Sampled output has the law of the server without speculation."""

import law
import pytest
from harness import tree

COMPARISONS = len(law.SETTINGS) * (law.TOKENS - 1)


@pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)
@pytest.mark.parametrize("settings", law.SETTINGS)
def test_token_pairs_have_the_plain_law(server, plain, settings):
    ours = law.draw(server, law.SETTINGS[settings])
    for first in range(law.TOKENS - 1):
        # A chance of 0.001 for the whole family to fail while the laws are equal.
        assert law.same_law(ours, plain.draws[settings], first) > 1e-3 / COMPARISONS
