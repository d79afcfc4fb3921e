"""Benchmark prompts: JSON lines with `id`, `task`, `turns` and, where there is one, `answer`.

Only the first turn is asked: a second one would depend on what an arm answered.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec


class Row(msgspec.Struct, frozen=True):
    """One line of a data file; other fields are allowed and not used."""

    id: str
    task: str
    turns: list[str]
    answer: str | None = None


class Prompt(msgspec.Struct, frozen=True):
    """A row as token ids, chat template applied."""

    id: str
    task: str
    input_ids: list[int]


class DataError(ValueError):
    """A data file cannot be used; the message names file, line and field."""


def data_files(paths: Sequence[Path]) -> list[Path]:
    """Expands folders to the *.jsonl files in them, sorted by name."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(path.glob("*.jsonl"))
            if not found:
                raise DataError(f"--data {path}: the folder holds no *.jsonl file")
            files += found
        elif path.is_file():
            files.append(path)
        else:
            raise DataError(f"--data {path}: no such file or folder")
    return files


def load_rows(path: Path, limit: int | None = None) -> list[Row]:
    """The first `limit` rows of a file, in its order; blank lines are skipped.

    Raises DataError on the first line that is not a row with at least one non-empty turn.
    """
    rows: list[Row] = []
    for number, line in enumerate(path.read_bytes().splitlines(), 1):
        if limit is not None and len(rows) >= limit:
            break
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=Row)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(
                f"{path}, line {number}: {error}; a row is "
                '{"id": text, "task": text, "turns": [text, ...]}'
            ) from error
        if not row.turns or not row.turns[0].strip():
            raise DataError(f"{path}, line {number}: turns must begin with a non-empty text")
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: no rows")
    return rows


def encode(rows: Sequence[Row], tokenizer: Any) -> list[Prompt]:
    """First turns as token ids by a Hugging Face tokenizer's chat template (thinking off where the
    template knows the switch)."""
    return [
        Prompt(
            row.id,
            row.task,
            tokenizer.apply_chat_template(
                [{"role": "user", "content": row.turns[0]}],
                add_generation_prompt=True,
                tokenize=True,
                return_dict=False,
                enable_thinking=False,
            ),
        )
        for row in rows
    ]
