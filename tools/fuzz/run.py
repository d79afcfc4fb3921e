"""`jetspec fuzz`: the same random requests to both servers, differences reduced and written."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from sglang_jetspec.tools.bench.run import terminable
from sglang_jetspec.tools.bench.server import Server
from sglang_jetspec.tools.fuzz.answers import Answer, Difference, ask, differences
from sglang_jetspec.tools.fuzz.cases import Corpus, Group, is_greedy, make_groups
from sglang_jetspec.tools.fuzz.config import FuzzConfig
from sglang_jetspec.tools.fuzz.shrink import shrink
from sglang_jetspec.tools.model_pair import resolve_pair

REDUCED = 5  # differing groups reduced; more of them rarely tell more
STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1"}  # a lost KV slot ends the server
Answers = list[list[list[Answer]]]
ServerFactory = Callable[[list[str], dict[str, str]], Server]


def reference_environment() -> dict[str, str]:
    """Environment of the server without speculation: penalties in JETSPEC's order."""
    folder = str(Path(__file__).parent / "reference")
    path = os.pathsep.join(filter(None, (folder, os.environ.get("PYTHONPATH"))))
    return {"PYTHONPATH": path, "SGLANG_PLUGINS": "jetspec,jetspec_cpu,jetspec_reference"}


def plain_args(config: FuzzConfig, target: str) -> list[str]:
    return [
        *("--model-path", target, "--dtype", "float32", "--log-level", "warning"),
        *("--context-length", str(config.context_length), "--enable-custom-logit-processor"),
        *shlex.split(config.server_args),
    ]


def jetspec_args(config: FuzzConfig, target: str, head: str) -> list[str]:
    return [
        *plain_args(config, target),
        *("--speculative-algorithm", "JETSPEC", "--speculative-draft-model-path", head),
        *("--speculative-num-draft-tokens", str(config.nodes)),
        *("--speculative-eagle-topk", str(config.width)),
        *("--speculative-num-steps", str(config.depth)),
        *shlex.split(config.jetspec_args),
    ]


def ask_all(server: Server, groups: Sequence[Group], label: str) -> list[Answers]:
    """Every group's answers, in order."""
    answers = []
    with tqdm(total=sum(map(requests, groups)), desc=label, unit="request") as bar:
        for group in groups:
            answers.append(ask(server, group))
            bar.update(requests(group))
    return answers


def requests(group: Group) -> int:
    return sum(1 + (case.follow_up is not None) for case in group.cases)


def run(config: FuzzConfig, factory: ServerFactory = Server) -> dict[str, Any]:
    """Asks both servers and returns the summary; reduces what differs."""
    target, head = resolve_pair(config.target, config.head)
    groups = load(config, target)
    plain = (plain_args(config, target), reference_environment())
    with terminable():
        with factory(*plain) as server:
            expected = ask_all(server, groups, "plain")
        with factory(jetspec_args(config, target, head), STRICT) as server:
            got = ask_all(server, groups, "JETSPEC")
            found = list(map(differences, groups, got, expected))
            bad = [index for index, different in enumerate(found) if different]
            for index in bad:
                tell(config, groups[index], found[index])
            if bad:
                with factory(*plain) as reference:
                    for index in bad[:REDUCED]:
                        reduce(config, groups, index, server, reference)
    return summary(config, groups, got, expected, found)


def load(config: FuzzConfig, target: str) -> list[Group]:
    if config.replay is not None:
        return msgspec.json.decode(config.replay.read_bytes(), type=list[Group])
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(target)
    corpus = Corpus.of(tokenizer, config.seed, config.context_length)
    return make_groups(corpus, config.seed, config.requests)


def tell(config: FuzzConfig, group: Group, found: Sequence[Difference]) -> None:
    for one in found:
        turn = ", second turn" if one.turn else ""
        print(
            f"seed {config.seed}, group {group.number}, case {one.case}{turn}: {one.what}",
            file=sys.stderr,
        )


def reduce(
    config: FuzzConfig, groups: Sequence[Group], index: int, ours: Server, theirs: Server
) -> None:
    """Writes the smallest groups that still differ, and how to ask them again."""

    def differs(group: Group) -> bool:
        return bool(differences(group, ask(ours, group), ask(theirs, group)))

    group = msgspec.structs.replace(groups[index], flush=True)
    small = [shrink(group, differs)] if differs(group) else list(groups[: index + 1])
    config.out.mkdir(parents=True, exist_ok=True)
    path = config.out / f"seed{config.seed}-group{group.number}.json"
    path.write_bytes(msgspec.json.encode(small))
    if len(small) == 1:
        print(msgspec.json.encode(small[0].cases).decode(), file=sys.stderr)
    else:
        print("differs only after the groups before it", file=sys.stderr)
    print(f"again: add --replay {path} to the same command", file=sys.stderr)


def summary(
    config: FuzzConfig,
    groups: Sequence[Group],
    got: Sequence[Answers],
    expected: Sequence[Answers],
    found: Sequence[list[Difference]],
) -> dict[str, Any]:
    """What was compared, and how much of it was accepted drafts."""
    bodies = [b for g in groups for c in g.cases for b in (c.body, c.follow_up) if b is not None]
    answers = [a for group in got for case in group for turn in case for a in turn]
    served = [answer for answer in answers if answer.status == 200]
    rounds = sum(answer.rounds for answer in served)
    return {
        "seed": config.seed,
        "requests": len(bodies),
        "greedy": sum(map(is_greedy, bodies)),
        "refused": len(answers) - len(served),
        "tokens": sum(len(answer.ids) for answer in served),
        "acceptance_length": round(sum(len(a.ids) for a in served) / max(rounds, 1), 3),
        "differences": sum(map(len, found)),
    }


def main(config: FuzzConfig) -> None:
    """Runs, prints the JSON as the last line; ends with code 1 after a difference."""
    result = run(config)
    print(json.dumps(result))
    sys.exit(1 if result["differences"] else 0)
