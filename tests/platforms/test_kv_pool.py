"""The CPU pool's storage: writes, moves, and what it must not switch on."""

from types import SimpleNamespace

import pytest
import torch

from sglang_jetspec.platforms.cpu.kv_pool import CpuMHATokenToKVPool


@pytest.fixture
def pool():
    torch.manual_seed(0)
    pool = CpuMHATokenToKVPool(
        size=12,
        page_size=1,
        dtype=torch.float32,
        head_num=2,
        head_dim=4,
        layer_num=3,
        device="cpu",
        enable_memory_saver=False,
        enable_kv_cache_copy=True,  # what any speculative algorithm asks for; Triton in the base
    )
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.normal_()
    return pool


def test_writes_reach_one_layer_only(pool):
    before = pool.kv_buffer.clone()
    keys, values = torch.randn(2, 2, 2, 4)
    slots = torch.tensor([5, 9])
    pool.set_kv_buffer(SimpleNamespace(layer_id=1), slots, keys, values)
    assert torch.equal(pool.get_key_buffer(1)[slots], keys)
    assert torch.equal(pool.get_value_buffer(1)[slots], values)
    assert torch.equal(pool.kv_buffer[:, [0, 2]], before[:, [0, 2]])


def test_another_dtype_is_cast_on_writing(pool):
    keys, values = torch.randn(2, 1, 2, 4).bfloat16()
    slots = torch.tensor([5])
    pool.set_kv_buffer(SimpleNamespace(layer_id=0), slots, keys, values)
    assert torch.equal(pool.get_key_buffer(0)[slots], keys.float())


def test_overlapping_moves_read_before_they_write(pool):
    source, target = torch.tensor([3, 4, 7]), torch.tensor([2, 3, 4])
    before = pool.kv_buffer.clone()
    pool.move_kv_cache(target, source)
    assert torch.equal(pool.kv_buffer[:, :, target], before[:, :, source])
    untouched = [slot for slot in range(13) if slot not in target.tolist()]
    assert torch.equal(pool.kv_buffer[:, :, untouched], before[:, :, untouched])
