"""Mask layouts against loops."""

from types import SimpleNamespace

import numpy as np
import torch

from sglang_jetspec.backends.tree_mask import flat_tree_mask, verify_mask
from sglang_jetspec.kernels.tree_attention.naive import sees
from sglang_jetspec.trees.bitmask import block_words, pack_ancestors, suffix_block_mask

NODES = 5
PREFIX = torch.tensor([3, 0, 7])
ANCESTORS = torch.rand(3, NODES, NODES, generator=torch.Generator().manual_seed(0)) < 0.5
BATCH = SimpleNamespace(
    seq_lens=PREFIX,
    seq_lens_cpu=PREFIX,
    reqs=[SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=n + 12)) for n in PREFIX.tolist()],
)


def flat_by_loop():
    expected = []
    for b, length in enumerate(PREFIX.tolist()):
        for i in range(NODES):
            expected += [True] * length + ANCESTORS[b, i].tolist()
    return expected


def test_rows_see_the_prefix_and_their_ancestors():
    flat = flat_tree_mask(ANCESTORS, PREFIX, int(PREFIX.sum()))
    assert flat.tolist() == flat_by_loop()


def test_an_upper_bound_of_lengths_only_adds_true_behind():
    flat = flat_tree_mask(ANCESTORS, PREFIX, 100, padding=6)
    expected = flat_by_loop()
    assert flat[: len(expected)].tolist() == expected
    assert flat[len(expected) :].all()
    assert len(flat) == NODES * (100 + 3 * NODES + 6)


def test_each_backend_gets_its_layout():
    rows = verify_mask(SimpleNamespace(tree_mask_layout="rows"), ANCESTORS, BATCH, 0, 64)
    assert rows is ANCESTORS
    words = verify_mask(SimpleNamespace(tree_mask_layout="words"), ANCESTORS, BATCH, 2, 64)
    assert torch.equal(words, pack_ancestors(ANCESTORS))
    flat = verify_mask(SimpleNamespace(), ANCESTORS, BATCH, 2, 64)
    assert flat.tolist() == flat_by_loop() + [True] * (2 * NODES * (1 + NODES))


def test_without_host_lengths_what_is_allocated_bounds_the_mask():
    batch = SimpleNamespace(seq_lens=PREFIX, seq_lens_cpu=None, reqs=BATCH.reqs)
    flat = verify_mask(SimpleNamespace(), ANCESTORS, batch, 0, 14)
    assert len(flat) == NODES * (14 + 12 + 14 + 3 * NODES)  # 15 and 19 tokens, 14 of context
    assert flat[: len(flat_by_loop())].tolist() == flat_by_loop()


def test_words_hold_bit_j_of_word_w_for_column_32_w_plus_j():
    for columns in (1, 31, 32, 33, 64, 256):
        visible = torch.rand(2, 3, columns, generator=torch.Generator().manual_seed(columns)) < 0.5
        words = pack_ancestors(visible)
        assert words.dtype == torch.int32
        assert words.shape == (2, 3, -(-columns // 32))
        packed = np.packbits(visible.numpy(), axis=-1, bitorder="little")
        as_bytes = words.numpy().view(np.uint8)
        assert (as_bytes[..., : packed.shape[-1]] == packed).all()
        assert not as_bytes[..., packed.shape[-1] :].any()
        assert torch.equal(sees(words, columns), visible)


def test_block_words_are_causal_or_open():
    assert sees(block_words(3, True, "cpu"), 3).int().tolist() == [
        [[1, 0, 0], [1, 1, 0], [1, 1, 1]]
    ]
    assert sees(block_words(33, False, "cpu"), 33).all()


def test_blocks_of_a_foresight_batch_see_their_share_of_the_suffix():
    mask = suffix_block_mask(torch.tensor([[1, 3]]), rows=2, suffix=3)
    assert mask.int().tolist() == [
        [
            [1, 0, 0, 1, 0, 0, 0],
            [1, 0, 0, 1, 1, 0, 0],
            [1, 1, 1, 0, 0, 1, 0],
            [1, 1, 1, 0, 0, 1, 1],
        ]
    ]
