"""The KV slots one round works in.

A request at committed length L owns the slots of positions L, L+1, ... in its row of the request
table. The draft pass and the verify pass both write there; what the round accepts is moved to the
front. B requests, N tree nodes, D depth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from sglang_jetspec.verification import Acceptance


@cache
def counting(count: int, device: str | torch.device) -> Tensor:
    """[count] int64: 0, 1, 2, ... Kept for good: captured graphs hold its address."""
    return torch.arange(count, device=device)


def usable_nodes(prefix_lens: Tensor, nodes: int, context_len: int) -> Tensor:
    """[B] int64 nodes a request of [B] committed lengths can still hold, 1..N."""
    return (context_len - prefix_lens).clamp(1, nodes)


@dataclass(frozen=True)
class Window:
    """slots: [B, N] int64, slot of position L + i, 0 (padding) past the usable nodes.

    Past what `usable_nodes` allows the tree is dead, and its slots are padding.
    """

    prefix_lens: Tensor
    slots: Tensor
    context_len: int

    @classmethod
    def open(
        cls,
        request_table: Tensor,
        request_rows: Tensor,
        prefix_lens: Tensor,
        nodes: int,
        context_len: int,
    ) -> Window:
        """request_table: [R, C] int32, slots by request row. request_rows, prefix_lens: [B]."""
        index = counting(nodes, prefix_lens.device)
        usable = usable_nodes(prefix_lens, nodes, context_len)
        columns = prefix_lens.unsqueeze(1) + index
        columns = columns.clamp(max=request_table.shape[1] - 1)
        slots = request_table[request_rows.unsqueeze(1), columns].long()
        return cls(prefix_lens, slots * (index < usable.unsqueeze(1)), context_len)

    def positions(self, depths: Tensor) -> Tensor:
        """[B, n] absolute positions of rows at ``depths`` below the root ([n] or [B, n])."""
        return (self.prefix_lens.unsqueeze(1) + depths).clamp(max=self.context_len - 1)


@dataclass(frozen=True)
class Commit:
    """What a round keeps, one row a committed token, in whatever order.

    rows: index of its node among the B * N verified rows. positions: absolute.
    source, slots: where its KV was written, and where it belongs.
    """

    rows: Tensor
    positions: Tensor
    source: Tensor
    slots: Tensor

    @classmethod
    def of(cls, window: Window, acceptance: Acceptance, compact: bool) -> Commit:
        """compact: drop the padding of short paths, which reads values back to the host.

        Without it, padding rows move slot 0 onto itself: harmless, and of fixed shape.
        """
        path = acceptance.path
        batch, length = path.shape
        index = counting(length, path.device)
        kept = index < acceptance.lengths.unsqueeze(1)
        nodes = path.clamp(min=0)
        rows = nodes + counting(batch, path.device).unsqueeze(1) * window.slots.shape[1]
        source = window.slots.gather(1, nodes)
        fields = (rows, window.positions(index), source, window.slots[:, :length])
        if compact:
            return cls(*(field[kept] for field in fields))
        rows, positions, source, slots = fields
        return cls(
            rows.flatten(), positions.flatten(), (source * kept).flatten(), (slots * kept).flatten()
        )

    def moved(self) -> Commit:
        """The rows whose KV is not already in place (host-synchronising)."""
        away = self.source != self.slots
        return Commit(self.rows[away], self.positions[away], self.source[away], self.slots[away])
