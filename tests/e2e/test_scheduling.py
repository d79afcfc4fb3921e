"""What the scheduler does with requests changes neither their tokens nor their speed-up."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from features import Feature, bodies
from harness import CROWDED, PAGED, generate_all, tree, wait_until_idle
from workloads import SCALE, WORKLOADS, acceptance_length

SERVER_16 = tree(16, 4, 7)
PAGED_SETUPS = [SERVER_16, PAGED]


def servers(setups):
    return pytest.mark.parametrize("server", setups, indirect=True, ids=lambda s: s.name)


def ids(answers):
    return [answer["output_ids"] for answer in answers]


@servers(PAGED_SETUPS)
def test_a_prefix_hit_keeps_the_acceptance_length(server):
    """The head's KV comes along with the target's, for prompts and for turns that go on."""
    first = [
        {"input_ids": list(prompt), "sampling_params": {"temperature": 0, "max_new_tokens": 64}}
        for prompt in WORKLOADS["long"].prompts()
    ] + bodies(8, 81, [{"max_new_tokens": 64, "ignore_eos": True}])
    wait_until_idle(server)
    cold = Feature(lambda: first, batch=1).ask(server)
    warm = Feature(lambda: first, batch=1).ask(server)
    assert ids(warm) == ids(cold)
    assert sum(answer["meta_info"]["cached_tokens"] for answer in warm) > 0
    assert acceptance_length(warm) >= 0.95 * acceptance_length(cold)

    turns = [
        {**body, "input_ids": body["input_ids"] + answer["output_ids"][:-1]}
        for body, answer in zip(first[-8:], cold[-8:], strict=True)
    ]
    hit = Feature(lambda: turns, batch=1).ask(server)
    wait_until_idle(server)
    missed = Feature(lambda: turns, batch=4).ask(server)
    assert ids(hit) == ids(missed)
    cached = [sum(a["meta_info"]["cached_tokens"] for a in side) for side in (hit, missed)]
    assert cached[0] > cached[1]
    assert acceptance_length(hit) >= 0.95 * acceptance_length(missed)


@servers(PAGED_SETUPS)
def test_waves_of_any_size_get_the_same_tokens_and_rounds(server, plain):
    """Batch sizes that grow and shrink, as they do around a graph's capacity on a GPU."""
    prompt_ids = WORKLOADS["batched"].prompts()
    expected = ids(plain.answers["batched"])
    start, lengths = 0, {}
    for wave in [1, 3, 5, 9] * 2 * SCALE:
        answers = generate_all(server, prompt_ids[start : start + wave], wave, max_new_tokens=64)
        assert ids(answers) == expected[start : start + wave]
        for index, answer in enumerate(answers, start):
            lengths.setdefault(index, []).append(acceptance_length([answer]))
        start = (start + wave) % 18
    again = [values for values in lengths.values() if len(values) > 1]
    assert again
    for values in again:
        assert max(values) <= 1.03 * min(values)


@servers([SERVER_16])
def test_greedy_output_is_stable_from_run_to_run(server, plain):
    """Ten runs alone, and in batches of 4 and 16: as stable as plain decoding, which is exact."""
    prompt_ids = WORKLOADS["batched"].prompts()[:16]
    expected = ids(plain.answers["batched"])[:16]
    for _ in range(10):
        assert ids(generate_all(server, prompt_ids[:1], 1, max_new_tokens=64)) == expected[:1]
    for batch in (4, 16):
        assert ids(generate_all(server, prompt_ids, batch, max_new_tokens=64)) == expected


@servers([SERVER_16])
def test_parallel_samples_of_one_prompt(server, plain):
    prompt = list(WORKLOADS["single"].prompts()[0])
    answers = server.generate(prompt, n=4, max_new_tokens=64)
    assert ids(answers) == ids(plain.answers["single"][:1]) * 4
    free = server.generate(prompt, n=4, temperature=1.0, max_new_tokens=32, ignore_eos=True)
    assert [len(answer["output_ids"]) for answer in free] == [32] * 4
    assert len({tuple(answer["output_ids"]) for answer in free}) > 1
    chat = server.chat([{"role": "user", "content": "1+1"}], n=3, max_tokens=16)
    assert len({choice["message"]["content"] for choice in chat["choices"]}) == 1
    assert len(chat["choices"]) == 3


@servers([CROWDED])
def test_priority_goes_first_and_changes_no_token(server, plain):
    prompt_ids = WORKLOADS["batched"].prompts()[:48]
    expected = ids(plain.answers["batched"])
    finished = []

    def ask(index, priority):
        body = {
            "input_ids": list(prompt_ids[index]),
            "sampling_params": {"temperature": 0, "max_new_tokens": 64},
            "priority": priority,
        }
        answer = server.post("/generate", body).json()
        finished.append(priority)
        return answer

    with ThreadPoolExecutor(48) as pool:
        waiting = [pool.submit(ask, index, 0) for index in range(40)]
        time.sleep(0.3)
        urgent = [pool.submit(ask, index, 10) for index in range(40, 48)]
        answers = [future.result() for future in waiting + urgent]
    assert ids(answers) == expected[:48]
    # The pool holds about ten requests; urgent ones that came last do not wait for forty.
    assert max(index for index, priority in enumerate(finished) if priority) < 40


@servers(PAGED_SETUPS)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_loses_nothing(server, plain, mode):
    prompt_ids = WORKLOADS["batched"].prompts()[:12]
    answers = []
    asking = threading.Thread(
        target=lambda: answers.extend(generate_all(server, prompt_ids, 12, max_new_tokens=64))
    )
    asking.start()
    time.sleep(0.15)
    assert server.post("/pause_generation", {"mode": mode}).status_code == 200
    time.sleep(0.5)
    paused = len(answers)
    assert server.post("/continue_generation", {}).status_code == 200
    asking.join(timeout=120)
    assert paused == 0
    assert ids(answers) == ids(plain.answers["batched"])[:12]


@servers([SERVER_16])
def test_the_cache_is_not_flushed_under_a_running_request(server, plain):
    prompt = list(WORKLOADS["single"].prompts()[0])
    asking = threading.Thread(
        target=server.generate, args=(prompt,), kwargs={"max_new_tokens": 400, "ignore_eos": True}
    )
    asking.start()
    time.sleep(0.2)
    assert server.client.post("/flush_cache").status_code != 200
    asking.join(timeout=120)
    wait_until_idle(server)
    answer = server.generate(prompt, max_new_tokens=64)
    assert answer["meta_info"]["cached_tokens"] == 0
    assert answer["output_ids"] == plain.answers["single"][0]["output_ids"]


@servers(PAGED_SETUPS)
def test_mixed_requests_that_stop_anywhere_lose_no_slot(server):
    """Stop strings, stop ids, lengths and aborts; the module's end counts the slots."""
    settings = [
        {"max_new_tokens": 5},
        {"stop": ["."]},
        {"stop": ["e", "it"], "no_stop_trim": True},
        {"ignore_eos": True, "max_new_tokens": 97},
        {"temperature": 1.2, "stop_token_ids": [20, 21, 22, 23]},
        {"max_new_tokens": 200, "ignore_eos": True},
    ]
    asked = bodies(60 * SCALE, 82, settings)
    for index, body in enumerate(asked):
        body["rid"] = f"mixed-{time.monotonic_ns()}-{index:05}"  # /abort_request takes prefixes

    def ask(index):
        if index % 6 == 5:  # the long ones
            abort = {"rid": asked[index]["rid"]}
            threading.Timer(0.1, server.post, ("/abort_request", abort)).start()
        return server.post("/generate", asked[index])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(len(asked))))
    kinds = {"length": 0, "stop": 0, "abort": 0}
    for answer in answers:
        assert answer.status_code == 200, answer.text
        kinds[answer.json()["meta_info"]["finish_reason"]["type"]] += 1
    assert min(kinds.values()) > 0, kinds
    wait_until_idle(server)


@servers([SERVER_16])
def test_a_slot_keeps_nothing_of_its_last_request(server, plain):
    """Requests with every kind of state, then plain ones in the same slots."""
    laden = [
        {"frequency_penalty": 2.0, "min_new_tokens": 40},
        {"temperature": 1.0, "sampling_seed": 3, "top_k": 4},
        {"regex": "[a-z]{10,40}"},
        {"logit_bias": {"30": 50.0}, "presence_penalty": 1.5},
    ]
    expected = ids(plain.answers["batched"])[:16]
    for _ in range(2):
        Feature(lambda: bodies(16, 84, laden), batch=16).ask(server)
        plain_ids = WORKLOADS["batched"].prompts()[:16]
        assert ids(generate_all(server, plain_ids, 16, max_new_tokens=64)) == expected
