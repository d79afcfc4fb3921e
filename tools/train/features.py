"""Target states of training tokens: kept on disk and memory-mapped, or computed when asked for.

Per token: the states after the tapped layers, concatenated, and the last layer's state after the
final norm, from which the target's next-token distribution follows.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from sglang_jetspec.tools.train.data import Example

BATCH_TOKENS = 4096
SAMPLED_EXAMPLES = 32


class States(NamedTuple):
    """Features of the tokens of one example."""

    taps: Tensor  # [tokens, T*H] bf16
    finals: Tensor  # [tokens, H] bf16, after the target's final norm


class Features(Protocol):
    """Target states of a list of examples."""

    examples: list[Example]

    def fetch(self, indices: Sequence[int]) -> list[States]:
        """States of every token of these examples, on the CPU."""

    def sample_taps(self, count: int) -> Tensor:
        """[count, T*H] tapped states of tokens drawn with torch's global generator."""


@dataclass(frozen=True)
class FeatureStore:
    """Memory-mapped features of a list of examples, stored one after the other."""

    folder: Path
    examples: list[Example]
    tap_width: int  # T * H
    hidden_size: int

    def fetch(self, indices: Sequence[int]) -> list[States]:
        """See `Features`."""
        spans = [slice(self.offsets[i], self.offsets[i + 1]) for i in indices]
        return [States(self.taps[span], self.finals[span]) for span in spans]

    def sample_taps(self, count: int) -> Tensor:
        """See `Features`."""
        return self.taps[torch.randint(self.offsets[-1], (count,))]

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


@dataclass(frozen=True)
class OnlineFeatures:
    """Features computed by `model`, a causal language model, each time they are asked for."""

    model: nn.Module
    layer_ids: tuple[int, ...]
    examples: list[Example]

    def fetch(self, indices: Sequence[int]) -> list[States]:
        """See `Features`."""
        return target_states(self.model, self.layer_ids, [self.examples[i] for i in indices])

    def sample_taps(self, count: int) -> Tensor:
        """See `Features`; the tokens are those of a few examples."""
        some = torch.randperm(len(self.examples))[:SAMPLED_EXAMPLES].tolist()
        taps = torch.cat([states.taps for i in some for states in self.fetch([i])])
        return taps[torch.randint(len(taps), (count,))]


@torch.no_grad()
def target_states(
    model: nn.Module, layer_ids: Sequence[int], examples: Sequence[Example]
) -> list[States]:
    """States of every token of `examples` in one forward pass.

    A tap id l means the state after layer l, counted from 0.
    """
    rows = [torch.tensor(example.token_ids) for example in examples]
    # Right padding under causal attention leaves every real position untouched.
    ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
    output = model.model(input_ids=ids.to(model.device), use_cache=False, output_hidden_states=True)
    taps = torch.cat([output.hidden_states[layer + 1] for layer in layer_ids], dim=-1)
    taps, finals = (
        taps.to("cpu", torch.bfloat16),
        output.last_hidden_state.to("cpu", torch.bfloat16),
    )
    return [States(taps[i, : len(row)], finals[i, : len(row)]) for i, row in enumerate(rows)]


def capture_features(
    model: nn.Module,
    layer_ids: tuple[int, ...],
    examples: list[Example],
    folder: Path,
    share: slice = slice(None),
    wait: Callable[[], None] = lambda: None,
) -> FeatureStore:
    """Run `model` over `examples` unless `folder` already holds their features.

    `share` selects the batches that this process captures; `wait` returns once the others have
    captured theirs. A capture that was interrupted goes on where it stopped. Raises ValueError when
    `folder` holds features of other examples or taps.
    """
    hidden = model.config.hidden_size
    store = FeatureStore(folder, examples, hidden * len(layer_ids), hidden)
    index = json.dumps({"target_layer_ids": layer_ids, "examples": digest(examples)})
    complete = folder / "index.json"  # its presence means that the capture is complete
    started = folder / "started.json"
    folder.mkdir(parents=True, exist_ok=True)
    for marker in (complete, started):
        if marker.exists() and marker.read_text() != index:
            raise ValueError(
                f"{folder} holds features of other examples or taps; delete it or give another "
                f"--features-dir"
            )
    if complete.exists():
        return store
    wait()
    started.write_text(index)
    groups = _groups(examples)[share]
    done = folder / f"captured-{share.start or 0}-of-{share.step or 1}"
    first = int(done.read_text()) if done.exists() else 0
    tokens = [sum(len(examples[i].token_ids) for i in group) for group in groups]
    with tqdm(
        total=sum(tokens),
        initial=sum(tokens[:first]),
        desc="Capturing features",
        unit="token",
        disable=bool(share.start),
    ) as bar:
        for number in range(first, len(groups)):
            states = target_states(model, layer_ids, [examples[i] for i in groups[number]])
            for i, (taps, finals) in zip(groups[number], states, strict=True):
                span = slice(store.offsets[i], store.offsets[i + 1])
                store.taps[span], store.finals[span] = taps, finals
            done.write_text(str(number + 1))
            bar.update(tokens[number])
    wait()
    complete.write_text(index)
    return store


def digest(examples: Sequence[Example]) -> str:
    """SHA-256 of what the examples hold, in their order."""
    hashed = hashlib.sha256()
    for example in examples:
        hashed.update(json.dumps(asdict(example)).encode())
    return hashed.hexdigest()


def _groups(examples: list[Example]) -> list[list[int]]:
    """Indices grouped by similar length, at most BATCH_TOKENS padded tokens a group."""
    groups: list[list[int]] = []
    for i in sorted(range(len(examples)), key=lambda i: -len(examples[i].token_ids)):
        widest = len(examples[groups[-1][0]].token_ids) if groups else BATCH_TOKENS
        if not groups or widest * (len(groups[-1]) + 1) > BATCH_TOKENS:
            groups.append([])
        groups[-1].append(i)
    return groups
