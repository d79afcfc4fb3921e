"""Draft heads in plain torch: the trainer's module and the oracle for served heads.

Shape letters: B sequences, C context positions, A anchors (blocks) a sequence, R = A * block_size
block rows, T taps, H hidden, V vocabulary. Parameter names are the published tensor names, for
all kinds: the sequential part of DSpark and Domino heads is `correction`.

A block is [anchor, mask, mask, ...] at positions n, n+1, ...; its rows see the fused target states
at positions < n through every layer's K/V projections, and their own block. Row i >= 1 predicts the
token at position n + i ("in place" alignment; JetSpec paper, section on the causal draft head).
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor, nn

from sglang_jetspec.heads.correction import Correction, adopt
from sglang_jetspec.heads.format import (
    DRAFT_TOKEN_IDS,
    TARGET_COPIES,
    WEIGHTS_PATTERN,
    HeadConfig,
    check_tensors,
    load_head_config,
    make_correction,
)


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last dimension, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        normed = F.rms_norm(x.float(), (x.shape[-1],), self.weight.float(), self.eps)
        return normed.to(x.dtype)


class DraftAttention(nn.Module):
    """Queries from block rows; keys and values from fused context states and block rows."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        q_size = config.num_attention_heads * self.head_dim
        kv_size = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, q_size, bias=False)
        self.k_proj = nn.Linear(hidden, kv_size, bias=False)
        self.v_proj = nn.Linear(hidden, kv_size, bias=False)
        self.o_proj = nn.Linear(q_size, hidden, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, rows: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        """rows [B,R,H], context [B,C,H], rotary over C + R keys, mask [B,R,C+R] -> [B,R,H]."""
        row_count = rows.shape[1]
        keyed = torch.cat([context, rows], dim=1)
        q = self.q_norm(self._split(self.q_proj(rows))).transpose(1, 2)
        k = self.k_norm(self._split(self.k_proj(keyed))).transpose(1, 2)
        v = self._split(self.v_proj(keyed)).transpose(1, 2)
        cos, sin = rotary
        q = rotate(q, cos[:, -row_count:], sin[:, -row_count:])
        k = rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))

    def _split(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))


class DraftMLP(nn.Module):
    """SiLU-gated feed-forward."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Pre-norm decoder layer; the context enters un-normed by `input_layernorm`."""

    def __init__(self, config: HeadConfig, dropout: float) -> None:
        super().__init__()
        self.dropout = nn.Dropout(dropout)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = DraftAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = DraftMLP(config)

    def forward(
        self, rows: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        attended = self.self_attn(self.input_layernorm(rows), context, rotary, mask)
        rows = rows + self.dropout(attended)
        return rows + self.dropout(self.mlp(self.post_attention_layernorm(rows)))


class JetSpecHead(nn.Module):
    """The draft head without embedding and LM head, which are the target's.

    `dropout` of each layer's two contributions acts in training mode only.
    """

    correction: Correction | None = None

    def __init__(self, config: HeadConfig, dropout: float = 0.0) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.config = config
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DraftLayer(config, dropout) for _ in range(config.num_hidden_layers)
        )
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        if (correction := make_correction(config)) is not None:
            adopt(self, correction)

    def fuse(self, taps: Tensor) -> Tensor:
        """Concatenated tapped states [..., T*H] -> fused context states [..., H]."""
        return self.hidden_norm(self.fc(taps))

    def forward(self, embedded: Tensor, anchors: Tensor, context: Tensor) -> Tensor:
        """Hidden states [B,R,H], ready for the target's LM head, of A blocks a sequence.

        embedded [B,R,H]: target embeddings of the blocks' ids, see `block_ids`.
        anchors [B,A] int64: position of each block's first row.
        context [B,C,H]: fused states of positions 0..C-1; a block sees those before its anchor,
        so rows of C past a sequence's end are padding as long as no anchor lies beyond them.
        """
        size = embedded.shape[1] // anchors.shape[1]
        count = context.shape[1]
        mask = block_mask(anchors, size, count, self.config.causal)
        steps = torch.arange(size, device=anchors.device)
        return self.attend(embedded, (anchors[:, :, None] + steps).flatten(1), context, mask)

    def attend(self, embedded: Tensor, positions: Tensor, context: Tensor, mask: Tensor) -> Tensor:
        """`forward` for block rows at any `positions` [B,R] under any `mask` [B,R,C+R]."""
        before = torch.arange(context.shape[1], device=positions.device)
        rotary = rotary_table(
            torch.cat([before.expand(len(positions), -1), positions], dim=1),
            self.config.head_dim,
            self.config.rope_theta,
        )
        for layer in self.layers:
            embedded = layer(embedded, context, rotary, mask)
        return self.norm(embedded)


def load_reference_head(
    folder: Path, causal: bool | None = None, dtype: torch.dtype = torch.float32
) -> tuple[JetSpecHead, Tensor | None]:
    """The head in `folder` and its `draft_token_ids` [Vd] int32, None for the whole vocabulary.

    Raises HeadError when config and tensors do not fit each other.
    """
    config = load_head_config(folder, causal)
    check_tensors(folder, config)
    weights: dict[str, Tensor] = {}
    for path in sorted(Path(folder).glob(WEIGHTS_PATTERN)):
        weights |= load_file(path)
    weights = {name: weight for name, weight in weights.items() if name not in TARGET_COPIES}
    draft_token_ids = weights.pop(DRAFT_TOKEN_IDS, None)
    head = JetSpecHead(config)
    head.load_state_dict(weights)
    return head.to(dtype).eval(), draft_token_ids


def block_ids(anchor_tokens: Tensor, block_size: int, mask_token_id: int) -> Tensor:
    """[B,A] anchor tokens -> [B, A*block_size] ids: each anchor followed by masks."""
    ids = anchor_tokens.new_full((*anchor_tokens.shape, block_size), mask_token_id)
    ids[..., 0] = anchor_tokens
    return ids.flatten(1)


def block_mask(anchors: Tensor, block_size: int, context: int, causal: bool) -> Tensor:
    """Visibility [B, R, context + R] (True = may attend) of blocks at `anchors` [B,A].

    Context is visible strictly before the block's own anchor *position*; other blocks never are.
    """
    batch, blocks = anchors.shape
    device = anchors.device
    before = torch.arange(context, device=device) < anchors[:, :, None]  # [B,A,C]
    own = torch.ones(block_size, block_size, dtype=torch.bool, device=device)
    if causal:
        own = own.tril()
    same_block = torch.eye(blocks, dtype=torch.bool, device=device)
    within = (same_block[:, None, :, None] & own[None, :, None, :]).flatten(2).flatten(0, 1)
    return torch.cat(
        [before.repeat_interleave(block_size, dim=1), within.expand(batch, -1, -1)], dim=-1
    )


def rotary_table(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """cos and sin [B, P, head_dim] fp32 of absolute `positions` [B, P]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device) / head_dim
    angles = positions[..., None].float() / theta**exponents
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of x [B, heads, P, head_dim], half-split layout, in fp32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x.float() * cos[:, None] + turned * sin[:, None]).to(x.dtype)
