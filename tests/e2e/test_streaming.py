"""Streamed answers add up to the whole ones."""

import json
from itertools import pairwise

import pytest
from harness import PAGED, tree
from workloads import prompts

SERVERS = pytest.mark.parametrize(
    "server", [tree(16, 4, 7), PAGED], indirect=True, ids=lambda s: s.name
)
PARSERS = pytest.mark.parametrize("server", [PAGED], indirect=True, ids=lambda s: s.name)
MESSAGES = [{"role": "user", "content": "How many 😀 are in 😀😀😀?"}]
# A server with Qwen3's reasoning parser takes an answer for a thought unless told otherwise.
NO_THOUGHT = {"chat_template_kwargs": {"enable_thinking": False}}
# Every character takes several of the fixture's tokens, so that rounds end inside characters.
EMOJI = "(😀|é|漢|👩‍🚀){6,12}"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}
CALL = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "add"}}}
THOUGHT = {"regex": r"<think>[a-z ]{5,20}</think>[A-Z][a-z ]{5,20}\."}


def events(server, path, body):
    with server.client.stream("POST", path, json={**body, "stream": True}) as response:
        assert response.status_code == 200
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@SERVERS
@pytest.mark.parametrize("interval", [1, 8, 100])
def test_streamed_text_and_ids_equal_the_whole(server, interval):
    for prompt in prompts(4, seed=3):
        sampling = {"temperature": 0, "max_new_tokens": 40, "stream_interval": interval}
        body = {"input_ids": list(prompt), "sampling_params": sampling}
        whole = server.post("/generate", body).json()
        parts = events(server, "/generate", body)
        counts = [part["meta_info"]["completion_tokens"] for part in parts]
        assert all(a < b for a, b in pairwise(counts)), "an empty part"
        for shorter, longer in pairwise(parts):
            assert longer["text"].startswith(shorter["text"])
        assert parts[-1]["text"] == whole["text"]
        assert parts[-1]["output_ids"] == whole["output_ids"]
        assert counts[-1] == len(whole["output_ids"])
        if interval == 100:
            assert len(parts) <= 2


@SERVERS
def test_a_stream_never_shows_half_a_character(server):
    for index in range(4):
        body = {
            "messages": MESSAGES * (index + 1),
            "model": "default",
            "temperature": 0.8,
            "seed": index,
            "max_tokens": 300,
            "regex": EMOJI,
            "stream_options": {"include_usage": True},
            **NO_THOUGHT,
        }
        whole = server.post("/v1/chat/completions", body | {"stream_options": None}).json()
        parts = events(server, "/v1/chat/completions", body)
        deltas = [c["delta"].get("content") or "" for part in parts for c in part["choices"]]
        text = "".join(deltas)
        assert text == whole["choices"][0]["message"]["content"]
        assert "\ufffd" not in text
        assert all("\ufffd" not in delta for delta in deltas)
        assert text.startswith(("😀", "é", "漢", "👩"))
        usage = parts[-1]["usage"]
        assert usage["completion_tokens"] == whole["usage"]["completion_tokens"]


def merged_calls(parts):
    """The tool calls of a stream's parts: name and arguments, by index."""
    calls = {}
    for part in parts:
        for choice in part["choices"]:
            for piece in choice["delta"].get("tool_calls") or ():
                call = calls.setdefault(piece["index"], {"name": "", "arguments": ""})
                for key in call:
                    call[key] += piece["function"].get(key) or ""
    return list(calls.values())


@PARSERS
def test_streamed_tool_calls_equal_the_whole(server):
    asked = {"messages": MESSAGES, "model": "default", "temperature": 0, "max_tokens": 60}
    body = asked | CALL | NO_THOUGHT
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    (call,) = message["tool_calls"]
    expected = {key: call["function"][key] for key in ("name", "arguments")}
    (streamed,) = merged_calls(events(server, "/v1/chat/completions", body))
    assert json.loads(streamed["arguments"]) == json.loads(expected["arguments"])
    assert streamed["name"] == "add"


@PARSERS
def test_a_thought_is_split_from_the_answer(server):
    body = {"messages": MESSAGES, "model": "default", "temperature": 0, "max_tokens": 80, **THOUGHT}
    whole = server.post("/v1/chat/completions", body | {"separate_reasoning": False}).json()
    thought, _, answer = whole["choices"][0]["message"]["content"].partition("</think>")
    message = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]
    assert message["reasoning_content"].strip() == thought.removeprefix("<think>").strip()
    assert message["content"].strip() == answer.strip()
    deltas = [
        c["delta"] for p in events(server, "/v1/chat/completions", body) for c in p["choices"]
    ]
    for key in ("reasoning_content", "content"):
        streamed = "".join(delta.get(key) or "" for delta in deltas)
        assert streamed.strip() == message[key].strip()
