"""Seeded requests get the tokens that a server without speculation draws by their seeds."""

import pytest
from features import PENALTIES, SEED_FEATURES, Feature, bodies
from harness import CROWDED, tree
from workloads import WORKLOADS, prompts

SETUPS = [tree(16, 4, 7), tree(16, 4, 7, SGLANG_JETSPEC_CPU_OVERLAP="1")]
RUNS = 10


def servers(setups):
    return pytest.mark.parametrize("server", setups, indirect=True, ids=lambda s: s.name)


def ids(answers):
    return [answer["output_ids"] for answer in answers]


@servers(SETUPS)
@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("name", SEED_FEATURES)
def test_tokens_are_those_of_plain_decoding_in_any_batch(server, plain, name, batch):
    answers = Feature(SEED_FEATURES[name].bodies, batch).ask(server)
    assert ids(answers) == ids(plain.seeded[name])
    rounds = sum(answer["meta_info"]["spec_verify_ct"] for answer in answers)
    assert sum(map(len, ids(answers))) > 1.04 * rounds, "nothing was accepted: nothing was tested"


@servers([CROWDED])
@pytest.mark.parametrize("name", ["temperature", "penalties"])
def test_a_retracted_request_goes_on_by_its_seed(server, plain, name):
    feature = Feature(SEED_FEATURES[name].bodies, batch=16)
    assert ids(feature.ask(server)) == ids(plain.seeded[name])


@servers(SETUPS)
def test_logprobs_of_sampled_tokens_are_plain_ones(server, plain):
    for ours, theirs in zip(
        SEED_FEATURES["logprobs"].ask(server), plain.seeded["logprobs"], strict=True
    ):
        mine, other = (a["meta_info"]["output_token_logprobs"] for a in (ours, theirs))
        assert [token for _, token, _ in mine] == ours["output_ids"]
        assert [value for value, *_ in mine] == pytest.approx(
            [value for value, *_ in other], abs=1e-3
        )


@servers(SETUPS)
def test_seeded_greedy_and_unseeded_rows_share_a_batch(server, plain):
    """Each seeded request between an unseeded one and a greedy one; only the unseeded vary."""
    count = 24
    seeded = SEED_FEATURES["temperature"].bodies()[:count]
    free = bodies(count, 75, [{"temperature": 1.0}, {"temperature": 1.3, "top_k": 5}])
    greedy = [
        {"input_ids": list(ids), "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
        for ids in WORKLOADS["batched"].prompts()[:count]
    ]
    rows = zip(seeded, free, greedy, strict=True)
    asked = [body for row in rows for body in row]
    mixed = Feature(lambda: asked, batch=12)
    first, second = mixed.ask(server), mixed.ask(server)
    for answers in (first, second):
        assert ids(answers[0::3]) == ids(plain.seeded["temperature"][:count])
        assert ids(answers[2::3]) == ids(plain.answers["batched"][:count])
    assert ids(first[1::3]) != ids(second[1::3])


@servers(SETUPS)
def test_runs_of_one_seed_are_alike_and_of_others_are_not(server):
    prompt = list(prompts(1, seed=5)[0])
    common = {"temperature": 1.0, "max_new_tokens": 32, "ignore_eos": True}
    runs = [server.generate(prompt, sampling_seed=7, **common)["output_ids"] for _ in range(RUNS)]
    assert all(run == runs[0] for run in runs)
    others = [server.generate(prompt, sampling_seed=s, **common)["output_ids"] for s in range(5)]
    assert len(set(map(tuple, others))) == 5
    messages = [{"role": "user", "content": "1+1"}]
    chats = [
        server.chat(messages, temperature=1.0, seed=seed, max_tokens=16, **PENALTY)["choices"][0]
        for seed in (7, 7, 8, 9)
    ]
    texts = [chat["message"]["content"] for chat in chats]
    assert texts[0] == texts[1]
    assert len(set(texts)) > 1


PENALTY = {"frequency_penalty": PENALTIES["frequency_penalty"]}


@servers(SETUPS[:1])
@pytest.mark.parametrize(
    ("seed", "why"), [("seven", "expected i64"), (1.5, "expected i64"), (2**63, "sampling_seed")]
)
def test_what_is_no_seed_is_refused(server, seed, why):
    body = {
        "input_ids": list(prompts(1, seed=5)[0]),
        "sampling_params": {"temperature": 1.0, "sampling_seed": seed},
    }
    answer = server.post("/generate", body)
    assert answer.status_code == 400
    assert why in answer.text
