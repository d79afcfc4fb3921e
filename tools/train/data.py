"""Prompts and answers as token sequences.

Prompts: JSON lines `{id, prompt}` or `{id, turns: [...]}`, optionally with `system`, `source`,
`license` and a corpus reply, `answer` (one turn) or `answers` (one a turn); other keys are ignored.
Answers: JSON lines `{id, turn, answer_ids, finished}`, the target's own token ids for that turn of
the prompt; `turn` counts from 0 and may be left out for single turns.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Prompt:
    """One task: what the user says, turn by turn."""

    id: str
    turns: tuple[str, ...]
    system: str | None = None
    source: str = ""
    license: str | None = None
    replies: tuple[str, ...] = ()  # corpus replies, one a turn or none at all


@dataclass(frozen=True)
class Answer:
    """`finished` tells whether `ids` ended by itself, its end-of-turn token included."""

    ids: list[int]
    finished: bool

    def text(self, tokenizer: PreTrainedTokenizerBase) -> str:
        """What later turns of the conversation show of this answer."""
        return str(tokenizer.decode(self.ids, skip_special_tokens=True))


@dataclass(frozen=True)
class Example:
    """One answered turn: `token_ids` = chat-templated conversation so far, then the answer."""

    id: str
    source: str
    token_ids: list[int]
    prompt_length: int
    finished: bool  # the answer ended by itself, so nothing follows its last token


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file; ValueError on a line that holds none."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: {row!r} is no object")
            yield row


def drop_partial_line(path: Path) -> None:
    """Cut off what a killed writer left after the last complete line of `path`, if it exists."""
    if path.exists():
        data = path.read_bytes()
        if not data.endswith(b"\n"):
            with path.open("rb+") as file:
                file.truncate(data.rfind(b"\n") + 1)


def read_prompts(path: Path, licenses: Sequence[str] | None = None) -> list[Prompt]:
    """Prompts of `path`; with `licenses`, only those under one of them.

    Raises ValueError for a row without text, for an id that occurs twice and when nothing is left.
    """
    prompts: dict[str, Prompt] = {}
    for number, row in enumerate(read_jsonl(path), start=1):
        if licenses is not None and row.get("license") not in licenses:
            continue
        prompt = _prompt(row, f"{path}, line {number}")
        if prompt.id in prompts:
            raise ValueError(f"{path}, line {number}: id {prompt.id!r} occurs twice")
        prompts[prompt.id] = prompt
    if not prompts:
        among = "" if licenses is None else f" has one of the licences {', '.join(licenses)}"
        raise ValueError(f"no prompt in {path}{among}")
    return list(prompts.values())


def _prompt(row: dict[str, Any], where: str) -> Prompt:
    turns = row.get("turns") or [row.get("prompt")]
    if "id" not in row or not all(isinstance(turn, str) and turn for turn in turns):
        raise ValueError(f"{where}: needs `id` and either `prompt` (text) or `turns` (texts)")
    replies = row.get("answers") or [row.get("answer")]
    has_replies = len(replies) == len(turns) and all(isinstance(r, str) for r in replies)
    return Prompt(
        id=str(row["id"]),
        turns=tuple(turns),
        system=row.get("system"),
        source=row.get("source") or row.get("task") or "",
        license=row.get("license"),
        replies=tuple(replies) if has_replies else (),
    )


def chat_token_ids(
    tokenizer: PreTrainedTokenizerBase, prompt: Prompt, earlier: Sequence[str] = ()
) -> list[int]:
    """Ids of the conversation up to the turn after the `earlier` answers.

    Thinking is off (as the published heads were trained); the generation prompt is included.
    """
    messages = [{"role": "system", "content": prompt.system}] if prompt.system else []
    for turn, text in enumerate(prompt.turns[: len(earlier) + 1]):
        messages.append({"role": "user", "content": text})
        if turn < len(earlier):
            messages.append({"role": "assistant", "content": earlier[turn]})
    ids: list[int] = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, enable_thinking=False, return_dict=False
    )
    return ids


def read_answers(path: Path) -> dict[tuple[str, int], Answer]:
    """Answers of `path` by prompt id and turn; none when it does not exist.

    Raises ValueError for a row that lacks a key.
    """
    answers = {}
    for number, row in enumerate(read_jsonl(path) if path.exists() else (), start=1):
        missing = {"id", "answer_ids", "finished"} - row.keys()
        if missing:
            raise ValueError(f"{path}, line {number}: lacks {', '.join(sorted(missing))}")
        key = str(row["id"]), row.get("turn", 0)
        answers[key] = Answer(row["answer_ids"], row["finished"])
    return answers


def next_turn(
    prompt: Prompt,
    known: Mapping[tuple[str, int], Answer],
    tokenizer: PreTrainedTokenizerBase,
    max_prompt_tokens: int,
) -> tuple[int, list[int]] | None:
    """The first turn that `known` has no answer to and its token ids; None at the end.

    A conversation also ends at an answer that was cut off and at a turn that is too long.
    """
    earlier: list[str] = []
    for turn in range(len(prompt.turns)):
        answer = known.get((prompt.id, turn))
        if answer is None:
            ids = chat_token_ids(tokenizer, prompt, earlier)
            return (turn, ids) if len(ids) <= max_prompt_tokens else None
        if not answer.finished:
            return None
        earlier.append(answer.text(tokenizer))
    return None


def load_examples(
    prompts: Sequence[Prompt],
    answers: Path,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> list[Example]:
    """Join regenerated answers with their prompts, in the answers' order.

    Raises ValueError when an answer's earlier turns are missing or nothing is left.
    """
    by_id = {prompt.id: prompt for prompt in prompts}
    known = read_answers(answers)
    examples = []
    for (key, turn), answer in known.items():
        if key not in by_id or not answer.ids:
            continue
        missing = [earlier for earlier in range(turn) if (key, earlier) not in known]
        if missing:
            raise ValueError(f"{answers}: {key!r} has turn {turn} but not turn {missing[0]}")
        earlier = [known[key, before].text(tokenizer) for before in range(turn)]
        examples.append(_example(by_id[key], earlier, answer, tokenizer, max_tokens))
    return _some(examples, f"no answer in {answers} belongs to one of the prompts")


def corpus_examples(
    prompts: Sequence[Prompt], tokenizer: PreTrainedTokenizerBase, max_tokens: int
) -> list[Example]:
    """Examples whose answers are the prompts' own `answer` or `answers`.

    Raises ValueError when no prompt has any.
    """
    examples = []
    for prompt in prompts:
        for turn, reply in enumerate(prompt.replies):
            ids = tokenizer.encode(reply, add_special_tokens=False)
            answer = Answer([*ids, tokenizer.eos_token_id], finished=True)
            earlier = prompt.replies[:turn]
            examples.append(_example(prompt, earlier, answer, tokenizer, max_tokens))
    return _some(examples, "no prompt has an `answer` or as many `answers` as `turns`")


def _example(
    prompt: Prompt,
    earlier: Sequence[str],
    answer: Answer,
    tokenizer: PreTrainedTokenizerBase,
    max_tokens: int,
) -> Example:
    context = chat_token_ids(tokenizer, prompt, earlier)
    ids = [*context, *answer.ids]
    return Example(
        id=prompt.id,
        source=prompt.source,
        token_ids=ids[:max_tokens],
        prompt_length=len(context),
        finished=answer.finished and len(ids) <= max_tokens,
    )


def _some(examples: list[Example], otherwise: str) -> list[Example]:
    # A block needs an anchor in the answer and a token after it.
    kept = [e for e in examples if len(e.token_ids) - e.prompt_length >= 2]
    if not kept:
        raise ValueError(otherwise)
    return kept


def is_held_out(example_id: str, share: float, salt: str = "jetspec") -> bool:
    """Whether a task belongs to the held-out `share`; depends on its id alone."""
    digest = hashlib.sha256(f"{salt}:{example_id}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def draft_vocabulary(
    examples: Iterable[Example], size: int, always: Iterable[int] = ()
) -> list[int]:
    """The `size` most frequent answer tokens and the ids in `always`, ascending.

    Ties go to the lower id. Fewer than `size` ids come back when the answers use fewer.
    """
    counts: Counter[int] = Counter()
    for example in examples:
        counts.update(example.token_ids[example.prompt_length :])
    kept = set(always)
    for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        if len(kept) >= size:
            break
        kept.add(token)
    return sorted(kept)
