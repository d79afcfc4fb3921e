"""Asking a server a group of requests, and telling two servers' answers apart."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import msgspec

from sglang_jetspec.tools.bench.server import Server, ServerError
from sglang_jetspec.tools.fuzz.cases import Body, Case, Group, is_greedy

LOGPROB_TOLERANCE = 1e-3
MASKED = -1e4  # log-probabilities below are those of tokens that cannot come


class Answer(msgspec.Struct, frozen=True):
    """What a request must give, whatever serves it.

    logprobs: SGLang's entries, by kind and position. rounds, fault: of the server itself, not
    compared: its verify rounds, and what contradicts itself in the answer.
    """

    status: int
    ids: list[int]
    text: str
    finish: dict[str, Any]
    prompt_tokens: int = 0
    completion_tokens: int = 0
    logprobs: dict[str, list[Any]] = {}
    rounds: int = 0
    fault: str = ""


class Difference(msgspec.Struct, frozen=True):
    """What the two servers' answers to a request do not agree on."""

    case: int
    turn: int
    what: str


def ask(server: Server, group: Group) -> list[list[list[Answer]]]:
    """Answers by case, turn and sample; all cases are in flight together."""
    if group.flush:
        server.post("/flush_cache?timeout=30", {}).raise_for_status()
    with ThreadPoolExecutor(len(group.cases)) as pool:
        return list(pool.map(lambda case: _ask_case(server, case), group.cases))


def _ask_case(server: Server, case: Case) -> list[list[Answer]]:
    turns = [_generate(server, case.body)]
    if case.follow_up is not None:
        before = case.body["input_ids"] + turns[0][0].ids
        body = {**case.follow_up, "input_ids": before + case.follow_up["input_ids"]}
        turns.append(_generate(server, body))
    return turns


def _generate(server: Server, body: Body) -> list[Answer]:
    if body.get("stream"):
        return [_stream(server, body)]
    response = server.post("/generate", body)
    if response.status_code != 200:
        return [refusal(response.status_code, response.text)]
    found = response.json()
    return [_answer(item, body) for item in (found if isinstance(found, list) else [found])]


def _stream(server: Server, body: Body) -> Answer:
    """The last piece of a stream, with a fault where a piece does not continue the one before.

    Raises ServerError where the stream breaks off.
    """
    try:
        return _read_stream(server, body)
    except httpx.TransportError as error:
        raise ServerError(f"POST /generate, streamed: {error!r}{server.log_tail()}") from error


def _read_stream(server: Server, body: Body) -> Answer:
    last: dict[str, Any] = {"output_ids": [], "meta_info": {}}
    fault = ""
    with server.client.stream("POST", "/generate", json=body) as response:
        if response.status_code != 200:
            response.read()
            return refusal(response.status_code, response.text)
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            piece = json.loads(line.removeprefix("data: "))
            if "error" in piece:
                return refusal(400, str(piece["error"]))
            before = last["output_ids"]
            if piece["output_ids"][: len(before)] != before:
                fault = "a streamed piece takes back token ids"
            last = piece
    return _answer(last, body, fault)


def refusal(status: int, text: str) -> Answer:
    return Answer(status, [], text, {})


def _answer(found: dict[str, Any], body: Body, fault: str = "") -> Answer:
    meta = found["meta_info"]
    ids, count = found["output_ids"], meta["completion_tokens"]
    asked = body["sampling_params"]["max_new_tokens"]
    if len(ids) != count:
        fault = f"{len(ids)} token ids, completion_tokens {count}"
    elif asked is not None and count > asked:
        fault = f"{count} tokens where {asked} were asked"
    finish = dict(meta["finish_reason"])
    if finish["type"] == "abort":
        finish.pop("message", None)
        if count == 1:
            # A refused request: SGLang answers a placeholder prompt, or with no token yet (0).
            return Answer(200, [], "", finish, fault=fault)
    return Answer(
        status=200,
        ids=ids,
        text=found["text"],
        finish=finish,
        prompt_tokens=meta["prompt_tokens"],
        completion_tokens=count,
        logprobs={kind: meta[kind] for kind in meta if kind.endswith("logprobs")},
        rounds=meta.get("spec_verify_ct", 0),
        fault=fault,
    )


def differences(
    group: Group, ours: Sequence[list[list[Answer]]], theirs: Sequence[list[list[Answer]]]
) -> list[Difference]:
    """Where ``ours`` is not what ``theirs`` is; sampled requests only have to be sound."""
    found = []
    for index, case in enumerate(group.cases):
        for turn, body in enumerate(filter(None, (case.body, case.follow_up))):
            mine, other = ours[index][turn], theirs[index][turn]
            faults = [answer.fault for answer in mine if answer.fault]
            what = faults[0] if faults else None
            if what is None and len(mine) != len(other):
                what = f"{len(mine)} answers, plain {len(other)}"
            if what is None and is_greedy(body):
                scored = has_one_score(body)
                pairs = zip(mine, other, strict=True)
                what = next(filter(None, (difference(a, b, scored) for a, b in pairs)), None)
            if what is not None:
                found.append(Difference(index, turn, what))
                break  # a second turn is another one after another answer
    return found


def has_one_score(body: Body) -> bool:
    """Whether log-probabilities of a greedy request are those of one law.

    SGLang divides logits by the temperature unless all requests in flight are greedy, and `top_k` 1
    is greedy at any temperature.
    """
    return body["sampling_params"].get("temperature", 1.0) in (0, 1)


def difference(ours: Answer, theirs: Answer, scored: bool = True) -> str | None:
    """The first thing two answers to one greedy request do not agree on, or None.

    scored: compare the values of log-probabilities, too, not only how many there are.
    """
    for name in ("status", "ids", "finish", "text", "prompt_tokens", "completion_tokens"):
        mine, other = getattr(ours, name), getattr(theirs, name)
        if ours.status != 200 and name != "status":
            return None
        if mine == other:
            continue
        if name == "ids":
            return f"{_first_token(mine, other)} (finish {ours.finish}, plain {theirs.finish})"
        return f"{name} {mine!r}, plain {other!r}"
    for kind in sorted(ours.logprobs.keys() | theirs.logprobs.keys()):
        mine, other = ours.logprobs.get(kind), theirs.logprobs.get(kind)
        if mine is None or other is None or len(mine) != len(other):
            return f"{kind}: {mine and len(mine)} entries, plain {other and len(other)}"
        for position, pair in enumerate(zip(mine, other, strict=True)):
            if scored and not _close(kind, *pair):
                return f"{kind} at {position}: {pair[0]}, plain {pair[1]}"
    return None


def _first_token(mine: list[int], other: list[int]) -> str:
    for position, pair in enumerate(zip(mine, other, strict=False)):
        if pair[0] != pair[1]:
            return f"token {position} is {pair[0]}, plain {pair[1]}"
    return f"{len(mine)} tokens, plain {len(other)}"


def _close(kind: str, mine: Any, other: Any) -> bool:
    """Whether one position's entries are alike. Of the top ones only the values are compared: two
    equal log-probabilities may change places."""
    if mine is None or other is None:
        return bool(mine == other)
    if kind.endswith("_token_logprobs"):
        mine, other = [mine], [other]
    if len(mine) != len(other):
        return False
    same_tokens = all(a[1] == b[1] for a, b in zip(mine, other, strict=True))
    near = all(_near(a[0], b[0]) for a, b in zip(mine, other, strict=True))
    return near and (same_tokens or kind.endswith("_top_logprobs"))


def _near(a: float | None, b: float | None) -> bool:
    if a is None or b is None:
        return a is b
    return abs(a - b) <= LOGPROB_TOLERANCE or (a < MASKED and b < MASKED)
