"""Let a target answer training prompts itself; a head learns from such answers only.

    python -m sglang_jetspec.tools.regenerate --target DIR --prompts FILE --out FILE

Reads JSON lines `{id, prompt}` or `{id, turns}`, appends `{id, turn, source, license, temperature,
finished, answer_ids}`. What --out already answers is left out, so it can be killed at any time.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import tyro
from tqdm.auto import tqdm
from transformers import AutoTokenizer

from sglang_jetspec.tools.train.answers import TargetEngine
from sglang_jetspec.tools.train.data import (
    Answer,
    Prompt,
    drop_partial_line,
    next_turn,
    read_answers,
    read_prompts,
)
from sglang_jetspec.tools.train.generation import Generation


class RegenerateConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Answer training prompts with the target."""

    target: str
    """Hugging Face folder or hub id of the target."""
    prompts: Path
    """JSON lines with `id` and `prompt` or `turns`."""
    out: Path
    """JSON lines to append answers to."""
    limit: int | None = None
    """Answer at most the first this many prompts."""
    licenses: tuple[str, ...] | None = None
    """Use only prompts whose `license` is one of these."""
    generation: Generation = msgspec.field(default_factory=Generation)


def regenerate(target: str, prompts: Sequence[Prompt], out: Path, generation: Generation) -> int:
    """Append answers to `out` until every prompt has one for each turn; returns how many are new.

    A conversation also ends at an answer that was cut off or a turn that is too long.
    """
    drop_partial_line(out)
    known = read_answers(out)
    tokenizer = AutoTokenizer.from_pretrained(target)
    longest = generation.max_prompt_tokens
    open_prompts = [p for p in prompts if next_turn(p, known, tokenizer, longest)]
    if not open_prompts:
        return 0
    out.parent.mkdir(parents=True, exist_ok=True)
    turns = sum(len(prompt.turns) for prompt in open_prompts)
    new = 0
    with (
        TargetEngine(target, generation) as engine,
        out.open("a", encoding="utf-8") as file,
        tqdm(total=turns, desc="Answering", unit="turn") as bar,
    ):

        def write(prompt: Prompt, turn: int, answer: Answer) -> None:
            nonlocal new
            row = {"id": prompt.id, "turn": turn, "source": prompt.source}
            row |= {"license": prompt.license, "temperature": generation.temperature}
            row |= {"finished": answer.finished, "answer_ids": answer.ids}
            file.write(json.dumps(row) + "\n")
            file.flush()
            new += 1
            bar.update()

        engine.answer(open_prompts, known, write)
    return new


def main() -> None:
    """Answer and print the number of new rows as one JSON line."""
    config = tyro.cli(RegenerateConfig)
    prompts = read_prompts(config.prompts, config.licenses)[: config.limit]
    new = regenerate(config.target, prompts, config.out, config.generation)
    print(json.dumps({"answers": new, "out": str(config.out)}))


if __name__ == "__main__":
    main()
