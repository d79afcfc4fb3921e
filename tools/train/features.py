"""Target states of every training token, captured once and memory-mapped afterwards.

Per token: the states after the tapped layers, concatenated, and the last layer's state after the
final norm, from which the target's next-token distribution follows.
"""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM

from sglang_jetspec.tools.train.data import Example

BATCH_TOKENS = 4096


@dataclass(frozen=True)
class FeatureStore:
    """Memory-mapped features of a list of examples, stored one after the other."""

    folder: Path
    examples: list[Example]
    tap_width: int  # T * H
    hidden_size: int

    @cached_property
    def offsets(self) -> list[int]:
        """First row of every example, and the number of rows as the last entry."""
        starts = [0]
        for example in self.examples:
            starts.append(starts[-1] + len(example.token_ids))
        return starts

    @cached_property
    def taps(self) -> Tensor:
        """[tokens, T * H] bf16."""
        return self._map("taps.bin", self.tap_width)

    @cached_property
    def finals(self) -> Tensor:
        """[tokens, H] bf16, after the target's final norm."""
        return self._map("finals.bin", self.hidden_size)

    def _map(self, name: str, width: int) -> Tensor:
        rows = self.offsets[-1]
        flat = torch.from_file(
            str(self.folder / name), shared=True, size=rows * width, dtype=torch.bfloat16
        )
        return flat.view(rows, width)


def capture_features(
    target: Path,
    target_layer_ids: tuple[int, ...],
    examples: list[Example],
    folder: Path,
    device: str = "cpu",
) -> FeatureStore:
    """Run the target on `device` over `examples` unless `folder` already holds their features.

    A tap id l means the state after layer l, counted from 0. Raises ValueError when `folder` holds
    features of other examples or taps.
    """
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.bfloat16).model
    model = model.to(device).eval()
    hidden = model.config.hidden_size
    store = FeatureStore(folder, examples, hidden * len(target_layer_ids), hidden)
    index = {
        "target_layer_ids": list(target_layer_ids),
        "hidden_size": hidden,
        "examples": [asdict(example) for example in examples],
    }
    marker = folder / "index.json"  # written last: its presence means that the capture is complete
    if marker.exists():
        if json.loads(marker.read_text()) != index:
            raise ValueError(
                f"{folder} holds features of other examples or taps; give another --out"
            )
        return store
    folder.mkdir(parents=True, exist_ok=True)
    with tqdm(total=store.offsets[-1], desc="Capturing features", unit="token") as progress:
        for batch in _batches(examples):
            _capture_batch(model, target_layer_ids, store, batch)
            progress.update(sum(len(examples[i].token_ids) for i in batch))
    marker.write_text(json.dumps(index))
    return store


def _batches(examples: list[Example]) -> list[list[int]]:
    """Indices grouped by similar length, at most BATCH_TOKENS padded tokens a group."""
    groups: list[list[int]] = []
    for i in sorted(range(len(examples)), key=lambda i: -len(examples[i].token_ids)):
        widest = len(examples[groups[-1][0]].token_ids) if groups else BATCH_TOKENS
        if not groups or widest * (len(groups[-1]) + 1) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(i)
    return groups


@torch.inference_mode()
def _capture_batch(
    model: torch.nn.Module, layer_ids: tuple[int, ...], store: FeatureStore, batch: list[int]
) -> None:
    rows = [torch.tensor(store.examples[i].token_ids) for i in batch]
    # Right padding under causal attention leaves every real position untouched.
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    output = model(input_ids=ids.to(model.device), use_cache=False, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[layer + 1] for layer in layer_ids], dim=-1)
    for row, i in enumerate(batch):
        length, start = len(rows[row]), store.offsets[i]
        store.taps[start : start + length] = taps[row, :length]
        store.finals[start : start + length] = output.last_hidden_state[row, :length]
