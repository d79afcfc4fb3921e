"""Requests that join, leave, are retracted, aborted or disconnected, and the slots they return."""

import json
import threading
import time

import httpx
import pytest
from harness import generate_all, small_pool, tree
from workloads import WORKLOADS, prompts

pool_server = pytest.mark.parametrize("server", [small_pool()], indirect=True, ids=["small-pool"])
server_16 = pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)


def wait_until_idle(server, seconds=15.0):
    """flush_cache succeeds only when nothing runs and nothing waits."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if server.client.post("/flush_cache").status_code == 200:
            return
        time.sleep(0.2)
    raise AssertionError("requests are still running")


@pool_server
def test_retraction_loses_and_changes_nothing(server, plain):
    """A pool too small for the batch: requests are retracted and prefilled again."""
    expected = [answer["output_ids"] for answer in plain.answers["batched"]]
    prompt_ids = WORKLOADS["batched"].prompts()
    answers = generate_all(server, prompt_ids, 16, max_new_tokens=64)
    assert [answer["output_ids"] for answer in answers] == expected
    assert "Retract requests" in server.log_text()
    wait_until_idle(server)
    assert "memory leak" not in server.log_text()


@server_16
def test_streamed_text_equals_the_whole(server):
    for prompt in prompts(6, seed=3):
        body = {
            "input_ids": list(prompt),
            "sampling_params": {"temperature": 0, "max_new_tokens": 40},
        }
        whole = server.post("/generate", body).json()
        with server.client.stream("POST", "/generate", json={**body, "stream": True}) as response:
            lines = [line for line in response.iter_lines() if line.startswith("data: {")]
        last = json.loads(lines[-1].removeprefix("data: "))
        assert last["text"] == whole["text"]
        assert last["output_ids"] == whole["output_ids"]


@server_16
def test_aborts_and_disconnects_leave_the_others_alone(server, plain):
    """Half of the streams are dropped after their first chunk; the rest must be untouched."""
    survivors = {}

    def run(index, drop):
        body = {
            "input_ids": list(WORKLOADS["batched"].prompts()[index]),
            "sampling_params": {"temperature": 0, "max_new_tokens": 64},
            "stream": True,
        }
        last = None
        with (
            httpx.Client(base_url=str(server.client.base_url), timeout=120) as client,
            client.stream("POST", "/generate", json=body) as response,
        ):
            for line in response.iter_lines():
                if line.startswith("data: {"):
                    last = json.loads(line.removeprefix("data: "))
                    if drop:
                        return
        survivors[index] = last["output_ids"]

    threads = [threading.Thread(target=run, args=(i, i % 2 == 1)) for i in range(40)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(survivors) == list(range(0, 40, 2))
    for index, ids in survivors.items():
        assert ids == plain.answers["batched"][index]["output_ids"]
    wait_until_idle(server)
    assert "memory leak" not in server.log_text()


@server_16
def test_abort_all_then_serve_again(server, plain):
    prompt_ids = WORKLOADS["batched"].prompts()[:8]
    long_answers = threading.Thread(
        target=generate_all, args=(server, prompt_ids, 8), kwargs={"max_new_tokens": 400}
    )
    long_answers.start()
    time.sleep(0.5)
    assert server.post("/abort_request", {"rid": "", "abort_all": True}).status_code == 200
    long_answers.join(timeout=60)
    assert not long_answers.is_alive()
    wait_until_idle(server)
    expected = plain.answers["single"][0]["output_ids"]
    prompt = list(WORKLOADS["single"].prompts()[0])
    assert server.generate(prompt, max_new_tokens=64)["output_ids"] == expected
