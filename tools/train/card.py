"""The model card of an exported head, from what its run recorded."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.tools.train.config import OPERATION
from sglang_jetspec.tools.train.data import read_jsonl
from sglang_jetspec.tools.train.provenance import RUN_FILE

NAMES = {"jetspec": "JetSpec", "dflash": "DFlash", "dspark": "DSpark", "domino": "Domino"}
NOT_SHOWN = OPERATION | {"target", "prompts", "answers"}


def write_card(run_folder: Path, folder: Path, head: HeadConfig, step: int) -> None:
    """Write `folder/README.md` and copy the run's log, plot and `run.json` beside it."""
    run = json.loads((run_folder / RUN_FILE).read_text())
    log = run_folder / "log.jsonl"
    rows = [row for row in read_jsonl(log) if row["step"] <= step] if log.exists() else []
    launch = run["launches"][-1]
    settings = launch["settings"]
    target = settings["target"]
    if Path(target).exists():  # a folder's path means nothing elsewhere
        target = Path(target).name
    data = ModelCardData(
        base_model=target,
        library_name="sglang-jetspec",
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "jetspec", "draft-head", "sglang"],
    )
    title = f"{NAMES.get(head.kind, head.kind)} head for {target}"
    body = "\n".join(
        [
            f"# {title}\n",
            "A draft head for speculative decoding with SGLang: it drafts, the target verifies.\n",
            "    python -m sglang.launch_server --model-path TARGET \\",
            "        --speculative-algorithm JETSPEC --speculative-draft-model-path HEAD\n",
            "## Head\n",
            *_table(_head_facts(head).items()),
            "\n## Held-out measurements\n",
            *_measurements(rows),
            "\n## Training\n",
            f"{step} steps in {len(run['launches'])} launches; the settings are the last one's, "
            f"`{RUN_FILE}` holds all.\n",
            *_table(_settings(settings)),
            f"\n## Data\n\n{_data(run)}\n",
            "\n## Versions\n",
            *_table(launch["versions"].items()),
        ]
    )
    ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n").save(folder / "README.md")
    for name in (RUN_FILE, "log.jsonl", "curves.png"):
        if (run_folder / name).exists():
            shutil.copy(run_folder / name, folder / name)


def _table(rows: Iterable[tuple[str, Any]]) -> list[str]:
    return ["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)]


def _head_facts(head: HeadConfig) -> dict[str, Any]:
    taps = ", ".join(map(str, head.target_layer_ids))
    return {
        "kind": NAMES.get(head.kind, head.kind),
        "layers": head.num_hidden_layers,
        "hidden size": head.hidden_size,
        "reads the states after target layers": taps,
        "block": f"anchor and masks, {head.max_depth} drafts (token {head.mask_token_id})",
        "attention within a block": "causal" if head.causal else "bidirectional",
        "draft vocabulary": head.draft_vocab_size or "the target's",
    }


def _settings(settings: dict[str, Any]) -> list[tuple[str, Any]]:
    shown = {name: value for name, value in settings.items() if name not in NOT_SHOWN}
    generation = shown.pop("generation")
    return [*shown.items(), *((f"generation.{k}", v) for k, v in generation.items())]


def _measurements(rows: list[dict[str, Any]]) -> list[str]:
    """Acceptance length by step, or a sentence when nothing was held out."""
    rows = [row for row in rows if "acceptance_length" in row]
    if not rows:
        return ["None: no task was held out."]
    trees = list(rows[-1]["acceptance_length"])
    lines = [
        "Committed tokens a round, bonus included, on held-out answers of the target; `treeN` has "
        "N nodes with its root, `chainD` drafts D tokens.\n",
        f"| step | forward KL | {' | '.join(trees)} |",
        "|---" * (2 + len(trees)) + "|",
    ]
    for row in rows:
        lengths = " | ".join(f"{row['acceptance_length'][tree]:.2f}" for tree in trees)
        lines.append(f"| {row['step']} | {row.get('held_out_kl', float('nan')):.3f} | {lengths} |")
    return lines


def _data(run: dict[str, Any]) -> str:
    counts = run.get("data", {})
    return (
        f"{counts.get('train_examples', '?')} answered turns trained on, "
        f"{counts.get('held_out_examples', '?')} held out by task, "
        f"{counts.get('answer_tokens', '?')} answer tokens. "
        f"Sources: {', '.join(counts.get('sources', ())) or 'not named'}. "
        f"Licences: {', '.join(counts.get('licenses', ())) or 'not named'}."
    )
