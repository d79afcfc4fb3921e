"""What a forward's attention needs from the batch: slots to gather and masks, planned once.

Shapes: B requests, n rows per request, L keys (padded), S prefix length.
"""

from dataclasses import dataclass, field

import torch

# Requests whose contexts differ by more than this many keys, and by more than half, are attended
# in separate calls: a call costs about as much as gathering this many keys of one request.
GROUP_SLACK = 256


class Slots:
    """KV slots to read, [b, L] int64: an index to gather by, or a slice where they are in a row."""

    def __init__(self, slots: torch.Tensor) -> None:
        self.shape = slots.shape
        self.index = slots.flatten()
        self.span: slice | None = None
        if slots.shape[0] == 1 and slots.shape[1] > 0:
            start, end = int(slots[0, 0]), int(slots[0, -1]) + 1
            if end - start == slots.shape[1] and bool((self.index.diff() == 1).all()):
                self.span = slice(start, end)

    def read(self, buffer: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The rows of a layer's buffer [slots, H, D], as [b, H, L, D] in `dtype`."""
        if self.span is not None:
            rows = buffer[self.span].unsqueeze(0)
        else:
            rows = (
                buffer.flatten(1).index_select(0, self.index).view(*self.shape, *buffer.shape[1:])
            )
        rows = rows.transpose(1, 2)
        return rows if rows.dtype is dtype else rows.to(dtype)


@dataclass
class PaddedGroup:
    """Requests attended together in one call, padded to the longest.

    rows: [b] int64 indices into the batch, or None when the group is the whole batch.
    slots: [b, L] KV slots, 0 where padded. visible: [b, n, L] bool, or None when every key is
    visible to every row. query_positions: [b, n]; key_positions: [b, L] (sliding windows only).
    bidirectional: like `visible` for ENCODER_ONLY layers.
    """

    rows: torch.Tensor | None
    slots: Slots
    visible: torch.Tensor | None
    bidirectional: torch.Tensor | None
    query_positions: torch.Tensor
    key_positions: torch.Tensor
    bias: dict[tuple[object, ...], torch.Tensor | None] = field(default_factory=dict)


@dataclass
class DecodePlan:
    """One row per request."""

    groups: list[PaddedGroup]


@dataclass
class VerifyPlan:
    """`rows_per_request` rows per request, their K/V at the end of each group's slots."""

    groups: list[PaddedGroup]
    rows_per_request: int


@dataclass
class ExtendSegment:
    """One request of a prefill batch: `length` new rows from `start` after `prefix` cached keys."""

    start: int
    length: int
    prefix: int
    slots: Slots


@dataclass
class ExtendPlan:
    segments: list[ExtendSegment]


def plan_decode(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor
) -> DecodePlan:
    """Plan one query row per request over its `seq_lens` keys, the new token's included.

    req_to_token: [rows, width] int32; req_pool_indices, seq_lens: [B] int.
    """
    groups = []
    for rows in group_by_length(seq_lens.tolist()):
        requests, lengths = _select(req_pool_indices, rows), _select(seq_lens, rows)
        slots, inside = _prefix_slots(req_to_token, requests, lengths)
        visible = None if inside is None else inside.unsqueeze(1)
        positions = torch.arange(slots.shape[1]).expand_as(slots)
        groups.append(
            PaddedGroup(rows, Slots(slots), visible, visible, (lengths - 1).unsqueeze(1), positions)
        )
    return DecodePlan(groups)


def plan_verify(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    positions: torch.Tensor,
    custom_mask: torch.Tensor | None,
) -> VerifyPlan:
    """Plan n = len(out_cache_loc) / B rows per request behind a prefix of `seq_lens` keys.

    out_cache_loc, positions: [B*n] int; custom_mask: bool of B*n*n entries, or None for causal.
    Raises ValueError for a mask of another size.
    """
    batch = seq_lens.shape[0]
    n = out_cache_loc.shape[0] // batch
    block, positions = out_cache_loc.view(batch, n), positions.view(batch, n)
    tree = _block_mask(custom_mask, batch, n)
    groups = []
    for rows in group_by_length(seq_lens.tolist()):
        requests, lengths = _select(req_pool_indices, rows), _select(seq_lens, rows)
        slots, inside = _prefix_slots(req_to_token, requests, lengths)
        block_positions = _select(positions, rows)
        prefix = torch.ones_like(slots, dtype=torch.bool) if inside is None else inside
        prefix = prefix.unsqueeze(1).expand(-1, n, -1)
        key_positions = torch.arange(slots.shape[1]).expand_as(slots)
        groups.append(
            PaddedGroup(
                rows,
                Slots(torch.cat((slots, _select(block, rows)), dim=1)),
                torch.cat((prefix, _select(tree, rows)), dim=2),
                None
                if inside is None
                else torch.cat((prefix, torch.ones_like(_select(tree, rows))), dim=2),
                block_positions,
                torch.cat((key_positions, block_positions), dim=1),
            )
        )
    return VerifyPlan(groups, n)


def plan_extend(
    req_to_token: torch.Tensor,
    req_pool_indices: torch.Tensor,
    prefix_lens: torch.Tensor,
    extend_lens: torch.Tensor,
) -> ExtendPlan:
    """Plan `extend_lens[i]` new rows behind `prefix_lens[i]` cached keys, request after request."""
    segments, start = [], 0
    for row, prefix, length in zip(
        req_pool_indices.tolist(), prefix_lens.tolist(), extend_lens.tolist(), strict=True
    ):
        slots = req_to_token[row, : prefix + length].to(torch.int64).unsqueeze(0)
        segments.append(ExtendSegment(start, length, prefix, Slots(slots)))
        start += length
    return ExtendPlan(segments)


def group_by_length(lengths: list[int]) -> list[torch.Tensor | None]:
    """Split a batch so that padding to the longest of a group wastes little.

    Returns index tensors [b] int64 (longest requests first), or [None] for one group of all.
    """
    order = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)
    groups: list[list[int]] = []
    for row in order:
        longest = lengths[groups[-1][0]] if groups else 0
        if not groups or longest - lengths[row] > max(GROUP_SLACK, longest // 2):
            groups.append([])
        groups[-1].append(row)
    if len(groups) == 1:
        return [None]
    return [torch.tensor(sorted(group)) for group in groups]


def _select(tensor: torch.Tensor, rows: torch.Tensor | None) -> torch.Tensor:
    return tensor if rows is None else tensor[rows]


def _prefix_slots(
    req_to_token: torch.Tensor, requests: torch.Tensor, lengths: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Slots [b, max length] int64, 0 where padded, and where they are live (None: everywhere)."""
    longest = int(lengths.max())
    slots = req_to_token[requests, :longest].to(torch.int64)
    if int(lengths.min()) == longest:
        return slots, None
    inside = torch.arange(longest) < lengths.unsqueeze(1)
    return slots.masked_fill_(~inside, 0), inside


def _block_mask(custom_mask: torch.Tensor | None, batch: int, n: int) -> torch.Tensor:
    """The rows' mutual visibility, bool [B, n, n]."""
    if custom_mask is None:
        return torch.ones(n, n, dtype=torch.bool).tril().expand(batch, n, n)
    if custom_mask.dtype != torch.bool or custom_mask.numel() != batch * n * n:
        raise ValueError(
            f"spec_info.custom_mask is {custom_mask.dtype} with {custom_mask.numel()} entries; "
            f"this batch needs bool with {batch}*{n}*{n} (block rows only, no prefix columns)."
        )
    return custom_mask.view(batch, n, n)
