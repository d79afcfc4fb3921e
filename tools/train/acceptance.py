"""Acceptance length of a head on the target's own answers, without running a server.

An answer fixes the text, so every round can be played against it: the head drafts at each position
of the answer, and a round starting there commits what the text confirms. For an answer that was
sampled this is the acceptance of a server that verifies drafts against the target's samples.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from sglang_jetspec.heads.drafting import corrected_tree, top_rows
from sglang_jetspec.heads.format import HeadConfig
from sglang_jetspec.heads.reference import JetSpecHead
from sglang_jetspec.tools.train.block_inputs import block_inputs
from sglang_jetspec.tools.train.features import Features
from sglang_jetspec.tools.train.target import FrozenTarget
from sglang_jetspec.trees import BestFirst, DraftTree, TreeBuilder, max_nodes
from sglang_jetspec.verification import accept

EXACT = BestFirst()


@dataclass(frozen=True)
class TreeShape:
    """`nodes` counts the root; width 1 is a chain. name: of the builder, in tables."""

    nodes: int
    width: int
    builder: TreeBuilder = EXACT
    name: str = "tree"

    @property
    def label(self) -> str:
        """Short name for tables."""
        return f"chain{self.nodes - 1}" if self.width == 1 else f"{self.name}{self.nodes}"


@dataclass(frozen=True)
class Candidates:
    """The head's best tokens at every answer position of one example."""

    anchors: Tensor  # [A] int64 positions
    tokens: Tensor  # [A,D,W] int64 target ids
    logprobs: Tensor  # [A,D,W] fp32
    entropies: Tensor | None = None  # [A,D] fp32 nats, where a tree's builder needs them

    @property
    def depth(self) -> int:
        return self.tokens.shape[1]

    def trees(
        self, roots: Tensor, width: int, nodes: int, builder: TreeBuilder = EXACT
    ) -> DraftTree:
        """The trees of `nodes` rows behind `roots` [A]."""
        tokens, logprobs = self.tokens[..., :width], self.logprobs[..., :width]
        return builder(roots, tokens, logprobs, nodes, entropies=self.entropies)


def check_sequential(head: HeadConfig, builder: TreeBuilder) -> None:
    """Raises ValueError unless a head whose rows depend on their path can draft such trees."""
    if not isinstance(builder, BestFirst):
        raise ValueError(
            f"a {head.kind} head's rows depend on their path; compare it by best_first, which is "
            "exact for it"
        )


@dataclass(frozen=True)
class SequentialCandidates:
    """A block's rows at every answer position, of a head whose rows depend on the path."""

    anchors: Tensor  # [A] int64 positions
    rows: Tensor  # [A,D,H]
    head: JetSpecHead
    target: FrozenTarget
    token_ids: Tensor | None = None  # [Vd] of a draft vocabulary

    @property
    def depth(self) -> int:
        return self.rows.shape[1]

    @torch.inference_mode()
    def trees(
        self, roots: Tensor, width: int, nodes: int, builder: TreeBuilder = EXACT
    ) -> DraftTree:
        """See `Candidates`; ValueError for a builder that wants rows all parents share."""
        check_sequential(self.head.config, builder)
        device, dtype = self.rows.device, self.rows.dtype
        tree = corrected_tree(
            roots.to(device),
            self.rows,
            F.linear(self.rows, self.target.draft_lm_head.to(dtype)),
            self.head.correction,
            lambda ids: F.embedding(ids, self.target.embedding).to(dtype),
            width,
            nodes,
            self.token_ids,
        )
        return DraftTree(**{name: value.cpu() for name, value in vars(tree).items()})


@torch.inference_mode()
def draft_everywhere(
    head: JetSpecHead,
    target: FrozenTarget,
    draft_token_ids: Tensor | None,
    features: Features,
    index: int,
    width: int,
    scales: Tensor | None = None,
    blocks: int = 64,
    entropies: bool = False,
) -> Candidates | SequentialCandidates:
    """Drafts of `head` anchored at every answer token of example `index`.

    `scales` [T*H] divide the tapped states of a head in training; an exported one reads raw taps.
    """
    example, device = features.examples[index], head.fc.weight.device
    ids = torch.tensor(example.token_ids, device=device)
    anchors = torch.arange(example.prompt_length, len(ids) - 1, device=device)
    dtype = head.fc.weight.dtype
    (states,) = features.fetch([index])
    taps = states.taps if scales is None else states.taps / scales
    context = head.fuse(taps.to(device, dtype))[None]
    size, first = head.config.block_size, head.config.first_row
    drafting = slice(first, first + head.config.max_depth)
    inputs, generator = block_inputs(head.config), torch.Generator().manual_seed(index)
    token_ids = None if draft_token_ids is None else draft_token_ids.to(device)
    tokens, logprobs, spreads, sequential = [], [], [], []
    for part in anchors.split(blocks):
        rows, _ = inputs.fill(ids.cpu(), part.cpu(), generator)
        embedded = F.embedding(rows.view(1, -1).to(device), target.embedding).to(dtype)
        hidden = head(embedded, part[None], context)[0].unflatten(0, (-1, size))[:, drafting]
        if head.correction is not None:
            sequential.append(hidden)
            continue
        logits = F.linear(hidden, target.draft_lm_head.to(dtype))
        best, best_logprobs, spread = top_rows(logits, width, token_ids, entropies)
        tokens.append(best)
        logprobs.append(best_logprobs)
        spreads += [] if spread is None else [spread]
    if sequential:
        rows = torch.cat(sequential)
        return SequentialCandidates(anchors.cpu(), rows, head, target, token_ids)
    spread = torch.cat(spreads).cpu() if spreads else None
    return Candidates(anchors.cpu(), torch.cat(tokens).cpu(), torch.cat(logprobs).cpu(), spread)


def committed_per_round(
    candidates: Candidates | SequentialCandidates,
    token_ids: list[int],
    finished: bool,
    shape: TreeShape,
) -> list[int]:
    """Tokens committed by each round of decoding the answer with trees of `shape`.

    The first answer token comes from the prefill and belongs to no round. The last round is
    left out unless the answer ended by itself, as its true length is unknown.
    """
    text = torch.tensor(token_ids)
    anchors, depth = candidates.anchors, candidates.depth
    nodes = min(shape.nodes, max_nodes(shape.width, depth))
    tree = candidates.trees(text[anchors], shape.width, nodes, shape.builder)
    following = F.pad(text, (0, depth + 2), value=-1)
    choices = following[anchors[:, None] + tree.depths + 1]
    lengths = accept(tree, choices, depth).lengths.tolist()
    first, last = int(anchors[0]), len(token_ids) - 1
    rounds, position = [], first
    while position < last:
        step = min(lengths[position - first], last - position)
        if position + lengths[position - first] >= last and not finished:
            break
        rounds.append(step)
        position += step
    return rounds


def rounds_by_answer(
    head: JetSpecHead,
    target: FrozenTarget,
    draft_token_ids: Tensor | None,
    features: Features,
    indices: Iterable[int],
    shapes: Sequence[TreeShape],
    scales: Tensor | None = None,
) -> dict[str, list[list[int]]]:
    """By tree: of each of the answers `indices`, the committed tokens of its rounds."""
    rounds: dict[str, list[list[int]]] = {shape.label: [] for shape in shapes}
    width = max(shape.width for shape in shapes)
    entropies = any(shape.builder.needs_entropies for shape in shapes)
    for index in indices:
        example = features.examples[index]
        if len(example.token_ids) - example.prompt_length < 2:
            continue
        drafts = draft_everywhere(
            head, target, draft_token_ids, features, index, width, scales, entropies=entropies
        )
        for shape in shapes:
            found = committed_per_round(drafts, example.token_ids, example.finished, shape)
            rounds[shape.label].append(found)
    return rounds


def mean_lengths(rounds: dict[str, list[list[int]]]) -> dict[str, float]:
    """Committed tokens a round, bonus included, by tree over all rounds of `rounds_by_answer`."""
    steps = {tree: list(chain.from_iterable(answers)) for tree, answers in rounds.items()}
    return {tree: sum(values) / max(len(values), 1) for tree, values in steps.items()}
