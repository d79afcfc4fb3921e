"""The CPU attention backend against a naive per-row oracle."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_jetspec.platforms.cpu import attention
from sglang_jetspec.platforms.cpu.attention_plan import group_by_length

SLOTS, WIDTH, ROWS = 4096, 1200, 16


class Layer(SimpleNamespace):
    """A layer's attributes; hashable, as a module is."""

    __hash__ = object.__hash__


class FakePool(MHATokenToKVPool):
    """SGLang's pool interface over one layer's buffers."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.keys = torch.randn(SLOTS, kv_heads, head_dim, dtype=dtype)
        self.values = torch.randn(SLOTS, kv_heads, head_dim, dtype=dtype)

    def set_kv_buffer(self, layer, loc_info, cache_k, cache_v):
        self.keys[loc_info.loc] = cache_k
        self.values[loc_info.loc] = cache_v

    def get_key_buffer(self, layer_id):
        return self.keys

    def get_value_buffer(self, layer_id):
        return self.values


class Case:
    """A batch of requests with random slots, and the backend under test."""

    def __init__(self, prefixes, heads=(6, 2), head_dim=16, dtype=torch.float32, seed=0):
        torch.manual_seed(seed)
        self.heads, self.kv_heads = heads
        self.head_dim, self.dtype = head_dim, dtype
        self.prefixes = torch.tensor(prefixes)
        self.batch = len(prefixes)
        self.pool = FakePool(self.kv_heads, head_dim, dtype)
        self.req_to_token = torch.randint(0, SLOTS, (ROWS, WIDTH), dtype=torch.int32)
        self.requests = torch.randperm(ROWS)[: self.batch]
        runner = SimpleNamespace(
            device="cpu",
            use_mla_backend=False,
            model_config=SimpleNamespace(is_encoder_decoder=False),
            req_to_token_pool=SimpleNamespace(req_to_token=self.req_to_token),
            token_to_kv_pool=self.pool,
        )
        self.backend = attention.CpuAttentionBackend(runner)

    def layer(self, attn_type=AttentionType.DECODER, window=-1, logit_cap=0.0):
        return Layer(
            layer_id=0,
            tp_q_head_num=self.heads,
            tp_k_head_num=self.kv_heads,
            qk_head_dim=self.head_dim,
            v_head_dim=self.head_dim,
            scaling=self.head_dim**-0.5,
            sliding_window_size=window,
            logit_cap=logit_cap,
            logit_capping_method="tanh",
            pos_encoding_mode="NONE",
            xai_temperature_len=-1,
            is_cross_attention=False,
            attn_type=attn_type,
        )

    def new_rows(self, lengths):
        """Random q, k, v and distinct slots for `lengths[i]` new rows of each request."""
        total = sum(lengths)
        q = torch.randn(total, self.heads * self.head_dim, dtype=self.dtype)
        k = torch.randn(total, self.kv_heads, self.head_dim, dtype=self.dtype)
        v = torch.randn(total, self.kv_heads, self.head_dim, dtype=self.dtype)
        return q, k, v, torch.randperm(SLOTS - 1)[:total] + 1

    def oracle(self, row_of, q, k, v, layer, visible):
        """Attention of each row over its request's prefix KV and the batch's visible new rows.

        row_of[t]: the request of row t; visible[t]: [(new row, position)] it may attend, as
        (indices, positions); prefix keys are always visible. In double precision.
        """
        group = self.heads // self.kv_heads
        out = torch.zeros(q.shape[0], self.heads, self.head_dim, dtype=torch.float64)
        for t, request in enumerate(row_of):
            prefix = int(self.prefixes[request])
            slots = self.req_to_token[self.requests[request], :prefix].long()
            rows, positions, own = visible[t]
            keys = torch.cat((self.before_k[slots], k[rows])).double()
            values = torch.cat((self.before_v[slots], v[rows])).double()
            where = torch.cat((torch.arange(prefix), torch.tensor(positions)))
            for head in range(self.heads):
                query = q[t].view(self.heads, -1)[head].double()
                scores = keys[:, head // group] @ query * layer.scaling
                if layer.logit_cap:
                    scores = layer.logit_cap * torch.tanh(scores / layer.logit_cap)
                if layer.sliding_window_size >= 0:
                    scores[where < own - layer.sliding_window_size] = -torch.inf
                out[t, head] = scores.softmax(0) @ values[:, head // group]
        return out.flatten(1)

    def run(self, mode, q, k, v, loc, layer, **fields):
        self.before_k, self.before_v = self.pool.keys.clone(), self.pool.values.clone()
        batch = SimpleNamespace(
            forward_mode=mode, req_pool_indices=self.requests, out_cache_loc=loc, **fields
        )
        self.backend.init_forward_metadata(batch)
        return self.backend.forward(q, k, v, layer, batch)


def protect(case, loc):
    """Keep the new rows' slots out of every prefix, as SGLang's allocator does."""
    taken = torch.isin(case.req_to_token, loc.int())
    others = torch.tensor([s for s in range(1, SLOTS) if s not in set(loc.tolist())][:1])
    case.req_to_token[taken] = others.int()


def close(actual, expected, dtype=torch.float32):
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(actual.double(), expected, atol=tolerance, rtol=tolerance)


def decode(case, layer):
    q, k, v, loc = case.new_rows([1] * case.batch)
    protect(case, loc)
    case.req_to_token[case.requests, case.prefixes] = loc.int()
    actual = case.run(
        ForwardMode.DECODE, q, k, v, loc, layer, seq_lens=case.prefixes + 1, positions=case.prefixes
    )
    visible = [([i], [int(p)], int(p)) for i, p in enumerate(case.prefixes)]
    return actual, case.oracle(range(case.batch), q, k, v, layer, visible)


@pytest.mark.parametrize("prefixes", [[0], [7], [5, 5, 5], [1, 33, 4, 90], [1000, 3, 900, 10]])
@pytest.mark.parametrize("heads", [(6, 2), (4, 4), (5, 1)])
def test_decode(prefixes, heads):
    case = Case(prefixes, heads)
    close(*decode(case, case.layer()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decode_in_half_precision(dtype):
    case = Case([40, 3], dtype=dtype)
    close(*decode(case, case.layer()), dtype)


@pytest.mark.parametrize("window", [0, 3, 500])
def test_decode_with_a_sliding_window(window):
    case = Case([1, 33, 700])
    close(*decode(case, case.layer(window=window)))


def test_decode_with_a_logit_cap():
    case = Case([1, 33])
    close(*decode(case, case.layer(logit_cap=0.5)))


def test_prefix_in_a_wider_dtype_than_the_queries_is_cast():
    case = Case([9], dtype=torch.float32)
    q, k, v, loc = case.new_rows([1])
    protect(case, loc)
    case.req_to_token[case.requests, case.prefixes] = loc.int()
    out = case.run(
        ForwardMode.DECODE,
        q.bfloat16(),
        k,
        v,
        loc,
        case.layer(),
        seq_lens=case.prefixes + 1,
        positions=case.prefixes,
    )
    assert out.dtype is torch.bfloat16
    expected = case.oracle([0], q.bfloat16(), k, v, case.layer(), [([0], [9], 9)])
    close(out, expected, torch.bfloat16)


def extend(case, lengths, layer, bidirectional=False):
    q, k, v, loc = case.new_rows(lengths)
    protect(case, loc)
    start, row_of, visible = 0, [], []
    for request, length in enumerate(lengths):
        prefix = int(case.prefixes[request])
        columns = slice(prefix, prefix + length)
        case.req_to_token[case.requests[request], columns] = loc[start : start + length].int()
        for i in range(length):
            last = length if bidirectional else i + 1
            rows = list(range(start, start + last))
            visible.append((rows, [prefix + j for j in range(last)], prefix + i))
            row_of.append(request)
        start += length
    actual = case.run(
        ForwardMode.EXTEND,
        q,
        k,
        v,
        loc,
        layer,
        extend_prefix_lens=case.prefixes,
        extend_seq_lens=torch.tensor(lengths),
    )
    return actual, case.oracle(row_of, q, k, v, layer, visible)


@pytest.mark.parametrize(
    ("prefixes", "lengths"),
    [([0], [1]), ([0, 0], [9, 30]), ([12, 0, 3], [1, 5, 17]), ([40], [600]), ([0], [530])],
)
@pytest.mark.parametrize("window", [-1, 6])
def test_extend_with_prefixes(prefixes, lengths, window):
    case = Case(prefixes, heads=(3, 1), head_dim=8)
    close(*extend(case, lengths, case.layer(window=window)))


def test_extend_is_bidirectional_for_encoder_layers():
    case = Case([4, 0])
    layer = case.layer(AttentionType.ENCODER_ONLY)
    close(*extend(case, [5, 7], layer, bidirectional=True))


def test_extend_with_a_logit_cap():
    case = Case([4, 0])
    close(*extend(case, [5, 7], case.layer(logit_cap=0.7)))


def random_tree(n, generator):
    """Ancestors-or-self [n, n] and depths of a random tree whose parents precede their children."""
    ancestors, depths = torch.eye(n, dtype=torch.bool), [0] * n
    for node in range(1, n):
        parent = int(torch.randint(0, node, (), generator=generator))
        ancestors[node] |= ancestors[parent]
        depths[node] = depths[parent] + 1
    return ancestors, torch.tensor(depths)


def verify(case, n, layer, tree=True, bidirectional=False, slots=None, hand_over_mask=True):
    """Verify random trees (or the causal block); returns what came out and the oracle's rows."""
    generator = torch.Generator().manual_seed(n)
    q, k, v, loc = case.new_rows([n] * case.batch)
    if slots is not None:
        loc = slots(loc)
    protect(case, loc)
    chain = torch.ones(n, n, dtype=torch.bool).tril(), torch.arange(n)
    drawn = [random_tree(n, generator) if tree else chain for _ in range(case.batch)]
    masks = torch.stack([mask for mask, _ in drawn])
    positions = torch.cat([p + depths for p, (_, depths) in zip(case.prefixes, drawn, strict=True)])
    visible, row_of = [], []
    for request in range(case.batch):
        for i in range(n):
            allowed = torch.ones(n, dtype=torch.bool) if bidirectional else masks[request, i]
            rows = (allowed.nonzero().flatten() + request * n).tolist()
            visible.append((rows, positions[rows].tolist(), int(positions[request * n + i])))
            row_of.append(request)
    actual = case.run(
        ForwardMode.TARGET_VERIFY,
        q,
        k,
        v,
        loc,
        layer,
        seq_lens=case.prefixes,
        positions=positions,
        spec_info=SimpleNamespace(custom_mask=masks if tree and hand_over_mask else None),
    )
    return actual, case.oracle(row_of, q, k, v, layer, visible)


@settings(max_examples=60, deadline=None)
@given(
    prefixes=st.lists(st.sampled_from([1, 2, 17, 64, 700]), min_size=1, max_size=5),
    n=st.sampled_from([1, 2, 7, 8, 16, 33]),
    heads=st.sampled_from([(6, 2), (4, 4), (5, 1)]),
    window=st.sampled_from([-1, 0, 5, 70]),
    seed=st.integers(0, 1000),
)
def test_verify_trees(prefixes, n, heads, window, seed):
    case = Case(prefixes, heads, head_dim=8, seed=seed)
    close(*verify(case, n, case.layer(window=window)))


@pytest.mark.parametrize("prefixes", [[30], [30, 30], [3, 700, 41]])
def test_verify_without_a_mask_is_causal_inside_the_block(prefixes):
    case = Case(prefixes)
    close(*verify(case, 8, case.layer(), tree=False))


@pytest.mark.parametrize("prefixes", [[30], [30, 30], [3, 700, 41]])
@pytest.mark.parametrize("window", [-1, 6, 40])
def test_verify_is_bidirectional_for_encoder_layers(prefixes, window):
    case = Case(prefixes)
    layer = case.layer(AttentionType.ENCODER_ONLY, window=window)
    close(*verify(case, 8, layer, tree=False, bidirectional=True))


def test_a_prefill_with_a_window_on_both_sides_is_refused():
    case = Case([4])
    with pytest.raises(ValueError, match="sliding_window_size with ENCODER_ONLY"):
        extend(case, [5], case.layer(AttentionType.ENCODER_ONLY, window=4), bidirectional=True)


def test_a_tree_verified_without_its_mask_differs():
    """Negative control of the comparison above."""
    case = Case([30])
    actual, expected = verify(case, 8, case.layer(), hand_over_mask=False)
    assert (actual.double() - expected).abs().max() > 1e-2


def test_verify_rows_in_the_padding_slot_leave_the_others_exact():
    """Near the context limit, surplus (dead) rows all carry slot 0."""

    def last_rows_to_padding(loc):
        loc = loc.clone()
        loc[-3:] = 0
        return loc

    case = Case([30])
    layer = case.layer()
    actual, expected = verify(case, 8, layer, tree=False, slots=last_rows_to_padding)
    close(actual[:5], expected[:5])


def test_new_rows_reach_the_cache_at_their_slots():
    case = Case([9, 12])
    q, k, v, loc = case.new_rows([4, 4])
    protect(case, loc)
    case.run(
        ForwardMode.TARGET_VERIFY,
        q,
        k,
        v,
        loc,
        case.layer(),
        seq_lens=case.prefixes,
        positions=torch.arange(8),
        spec_info=SimpleNamespace(custom_mask=None),
    )
    assert torch.equal(case.pool.keys[loc], k)
    assert torch.equal(case.pool.values[loc], v)


def test_a_mask_of_another_size_is_refused():
    case = Case([9])
    with pytest.raises(ValueError, match="custom_mask"):
        case.run(
            ForwardMode.TARGET_VERIFY,
            torch.zeros(4, 96),
            None,
            None,
            torch.arange(1, 5),
            case.layer(),
            seq_lens=case.prefixes,
            positions=torch.arange(4),
            spec_info=SimpleNamespace(custom_mask=torch.ones(4 * 13, dtype=torch.bool)),
        )


def test_grouping_covers_the_batch_and_bounds_the_padding():
    lengths = [3000, 10, 2900, 40, 1400, 12]
    groups = group_by_length(lengths)
    assert sorted(torch.cat(groups).tolist()) == list(range(6))
    for group in groups:
        inside = [lengths[i] for i in group.tolist()]
        assert max(inside) - min(inside) <= max(256, max(inside) // 2)
    assert group_by_length([30, 250, 7]) == [None]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"model_config": SimpleNamespace(is_encoder_decoder=True)}, "encoder-decoder"),
        ({"token_to_kv_pool": SimpleNamespace(dtype=torch.float32)}, "SimpleNamespace"),
    ],
)
def test_models_it_would_compute_wrongly_are_refused(change, message):
    runner = SimpleNamespace(
        device="cpu",
        use_mla_backend=False,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        req_to_token_pool=SimpleNamespace(req_to_token=None),
        token_to_kv_pool=FakePool(1, 8, torch.float32),
    )
    attention.CpuAttentionBackend(runner)
    for name, value in change.items():
        setattr(runner, name, value)
    with pytest.raises(ValueError, match=message):
        attention.CpuAttentionBackend(runner)


def test_an_eight_bit_cache_is_refused():
    runner = SimpleNamespace(
        use_mla_backend=False,
        model_config=SimpleNamespace(is_encoder_decoder=False),
        token_to_kv_pool=FakePool(1, 8, torch.float32),
    )
    runner.token_to_kv_pool.dtype = torch.float8_e4m3fn
    with pytest.raises(ValueError, match="kv-cache-dtype"):
        attention.CpuAttentionBackend(runner)


@pytest.mark.parametrize(
    ("change", "kwargs"),
    [
        ({"is_cross_attention": True}, {}),
        ({"logit_cap": 3.0, "logit_capping_method": "clip"}, {}),
        ({"pos_encoding_mode": "ALIBI"}, {}),
        ({"xai_temperature_len": 5}, {}),
        ({"attn_type": AttentionType.DECODER_BIDIRECTIONAL}, {}),
        ({}, {"sinks": torch.zeros(6)}),
    ],
)
def test_layer_options_it_would_ignore_are_refused(change, kwargs):
    case = Case([9])
    layer = case.layer()
    for name, value in change.items():
        setattr(layer, name, value)
    batch = SimpleNamespace(
        forward_mode=ForwardMode.DECODE,
        req_pool_indices=case.requests,
        seq_lens=case.prefixes,
        out_cache_loc=torch.tensor([1]),
    )
    case.backend.init_forward_metadata(batch)
    with pytest.raises(ValueError, match="does not serve"):
        case.backend.forward(torch.zeros(1, 96), None, None, layer, batch, **kwargs)
