"""Requests that join, leave, are retracted, aborted or disconnected, and the slots they return."""

import json
import threading
import time

import httpx
import pytest
from harness import CROWDED, generate_all, tree, wait_until_idle
from workloads import WORKLOADS

pool_server = pytest.mark.parametrize("server", [CROWDED], indirect=True, ids=["small-pool"])
server_16 = pytest.mark.parametrize("server", [tree(16, 4, 7)], indirect=True, ids=lambda s: s.name)


@pool_server
def test_retraction_loses_and_changes_nothing(server, plain):
    """A pool too small for the batch: requests are retracted and prefilled again."""
    expected = [answer["output_ids"] for answer in plain.answers["batched"]]
    prompt_ids = WORKLOADS["batched"].prompts()
    answers = generate_all(server, prompt_ids, 16, max_new_tokens=64)
    assert [answer["output_ids"] for answer in answers] == expected
    assert "Retract requests" in server.log_text()


@server_16
def test_aborts_and_disconnects_leave_the_others_alone(server, plain):
    """40 streams: a quarter is dropped after 1 to 5 parts, a quarter aborted, 10 more come late."""
    survivors = {}
    prompt_ids = WORKLOADS["batched"].prompts()

    def run(index):
        rid = f"stream-{time.monotonic_ns()}"
        body = {
            "rid": rid,
            "input_ids": list(prompt_ids[index]),
            "sampling_params": {"temperature": 0, "max_new_tokens": 64},
            "stream": True,
        }
        last, parts = None, 0
        with (
            httpx.Client(base_url=str(server.client.base_url), timeout=120) as client,
            client.stream("POST", "/generate", json=body) as response,
        ):
            for line in response.iter_lines():
                if not line.startswith("data: {"):
                    continue
                last, parts = json.loads(line.removeprefix("data: ")), parts + 1
                if index < 40 and index % 4 == 1 and parts > index % 5:
                    return
                if index < 40 and index % 4 == 3 and parts == 1:
                    server.post("/abort_request", {"rid": rid})
        if index >= 40 or index % 2 == 0:
            survivors[index] = last["output_ids"]

    threads = [threading.Thread(target=run, args=(i,)) for i in range(50)]
    for index, thread in enumerate(threads):
        if index == 40:
            time.sleep(0.2)
        thread.start()
    for thread in threads:
        thread.join()
    gone = time.monotonic() + 3.0
    while (left := running_requests(server)) and time.monotonic() < gone:
        time.sleep(0.1)
    assert left == 0, f"{left} requests run on without a client"
    assert sorted(survivors) == [*range(0, 40, 2), *range(40, 50)]
    for index, ids in survivors.items():
        assert ids == plain.answers["batched"][index]["output_ids"]
    wait_until_idle(server)


def running_requests(server):
    return server.client.get("/v1/loads").json()["loads"][0]["num_running_reqs"]


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
