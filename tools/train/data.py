"""Read prompts and regenerated answers into token sequences.

Prompts: JSON lines `{id, prompt, ...}`. Answers: JSON lines `{id, answer_ids, finished, license,
source, ...}`, the target's own token ids for the prompt given as one user turn.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

OPEN_LICENSES = ("MIT", "Apache-2.0", "CC-BY-4.0")


@dataclass(frozen=True)
class Example:
    """One conversation: `token_ids` = chat-templated prompt, then the answer."""

    id: str
    source: str
    token_ids: list[int]
    prompt_length: int
    finished: bool  # the answer ended by itself, so nothing follows its last token


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file."""
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error


def prompt_token_ids(tokenizer: PreTrainedTokenizerBase, prompt: str) -> list[int]:
    """Ids of `prompt` as one user turn, thinking off, generation prompt included."""
    ids: list[int] = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        enable_thinking=False,
        return_dict=False,
    )
    return ids


def load_examples(
    prompts: Path,
    answers: Path,
    tokenizer: PreTrainedTokenizerBase,
    licenses: tuple[str, ...] = OPEN_LICENSES,
) -> list[Example]:
    """Join answers with their prompts; rows under other licences are left out.

    Raises ValueError when an answer has no prompt or nothing is left.
    """
    texts = {row["id"]: row["prompt"] for row in read_jsonl(prompts)}
    examples = []
    for row in read_jsonl(answers):
        if row["license"] not in licenses or not row["answer_ids"]:
            continue
        if row["id"] not in texts:
            raise ValueError(f"answer id {row['id']!r} has no prompt in {prompts}")
        prompt = prompt_token_ids(tokenizer, texts[row["id"]])
        examples.append(
            Example(
                id=row["id"],
                source=row["source"],
                token_ids=prompt + row["answer_ids"],
                prompt_length=len(prompt),
                finished=row["finished"],
            )
        )
    if not examples:
        raise ValueError(f"no answer in {answers} has one of the licences {licenses}")
    return examples


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
