"""JetSpec++ in the server: the same text, with blocks that were refined and foreseen."""

import law
import pytest
from harness import FORESIGHT, FURTHER_FORESIGHT, generate_all, wait_until_idle
from test_sampling_law import COMPARISONS
from workloads import WORKLOADS, acceptance_length

SETUPS = [FORESIGHT, *FURTHER_FORESIGHT]
foresight_server = pytest.mark.parametrize(
    "server", [FORESIGHT], indirect=True, ids=lambda s: s.name
)
all_servers = pytest.mark.parametrize("server", SETUPS, indirect=True, ids=lambda s: s.name)
# Tokens a round that the fixture reaches at least; without passes and outcomes it reaches 4.4.
LEAST = {"J1R1B4": 6.0, "J3R3B8": 7.0, "J3R1B4": 6.0, "J3R0B0": 5.0, "J0R0B1": 4.0, "J0R0B0": 4.0}


def ids(answers):
    return [answer["output_ids"] for answer in answers]


@all_servers
def test_every_id_equals_plain_decoding(server, setup, plain):
    for name in ("single", "lengths", "context_limit", "long"):
        answers = WORKLOADS[name].ask(server)
        assert ids(answers) == ids(plain.answers[name]), f"{name}, cold cache"
    warm = WORKLOADS["single"].ask(server)
    assert ids(warm) == ids(plain.answers["single"])
    assert acceptance_length(warm) > LEAST[setup.name.split("-")[0]]


@all_servers
@pytest.mark.parametrize("settings", ["temperature 1", "top_p 0.8"])
def test_token_pairs_have_the_plain_law(server, plain, settings):
    ours = law.draw(server, law.SETTINGS[settings])
    for first in range(law.TOKENS - 1):
        assert law.same_law(ours, plain.draws[settings], first) > 1e-3 / COMPARISONS


@foresight_server
def test_neighbours_do_not_change_a_requests_rounds(server):
    """Noise, refinement and outcomes of a request are its own."""
    prompts = WORKLOADS["batched"].prompts()[:16]
    sides = []
    for batch in (1, 8):
        wait_until_idle(server)
        sides.append(generate_all(server, prompts, batch, max_new_tokens=64, ignore_eos=True))
    alone, together = ([answer["meta_info"]["spec_verify_ct"] for answer in side] for side in sides)
    assert ids(sides[0]) == ids(sides[1])
    # The overlap schedule counts a round past the end for some.
    assert all(abs(a - b) <= 1 for a, b in zip(alone, together, strict=True))
