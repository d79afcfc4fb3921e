"""The smallest group that still shows a difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from sglang_jetspec.tools.fuzz.cases import Body, Case, Group

KEPT = ("temperature", "top_k", "max_new_tokens")  # without them a request is another kind


def shrink(group: Group, differs: Callable[[Group], bool], attempts: int = 200) -> Group:
    """Takes away requests, second turns, features, tokens, as long as ``differs`` holds.

    differs: asks both servers. attempts: how often it may be called.
    """
    while attempts > 0:
        for smaller in _smaller(group):
            attempts -= 1
            if differs(smaller):
                group = smaller
                break
            if attempts == 0:
                return group
        else:
            return group
    return group


def _smaller(group: Group) -> Iterator[Group]:
    """Groups with one thing less, the largest things first."""
    cases = group.cases
    half = len(cases) // 2
    for kept in (cases[:half], cases[half:]) if half > 1 else ():
        yield msgspec.structs.replace(group, cases=kept)
    for i in range(len(cases)) if len(cases) > 1 else ():
        yield msgspec.structs.replace(group, cases=cases[:i] + cases[i + 1 :])
    for i, case in enumerate(cases):
        for simpler in _simpler(case):
            yield msgspec.structs.replace(group, cases=[*cases[:i], simpler, *cases[i + 1 :]])


def _simpler(case: Case) -> Iterator[Case]:
    if case.follow_up is not None:
        yield Case(case.body)
        for body in _simpler_bodies(case.follow_up):
            yield Case(case.body, body)
    for body in _simpler_bodies(case.body):
        yield Case(body, case.follow_up)


def _simpler_bodies(body: Body) -> Iterator[Body]:
    sampling = body["sampling_params"]
    for name in body:
        if name not in ("input_ids", "sampling_params", "custom_logit_processor"):
            yield {key: value for key, value in body.items() if key != name}
    if "custom_logit_processor" in body:
        fewer = {k: v for k, v in sampling.items() if k != "custom_params"}
        others = {k: v for k, v in body.items() if k != "custom_logit_processor"}
        yield {**others, "sampling_params": fewer}
    for name in sampling:
        if name not in (*KEPT, "custom_params"):
            yield {**body, "sampling_params": {k: v for k, v in sampling.items() if k != name}}
    prompt, wanted = body["input_ids"], sampling["max_new_tokens"] or 64
    if len(prompt) > 1:
        yield {**body, "input_ids": prompt[len(prompt) // 2 :]}
    shorter = max(wanted // 2, sampling.get("min_new_tokens", 0), 1)
    if shorter < wanted:
        yield {**body, "sampling_params": {**sampling, "max_new_tokens": shorter}}
