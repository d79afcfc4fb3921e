"""`jetspec_triton` against the kernel's definition, eager and the way a CUDA graph replays it."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.base_attn_backend import SharedReadEnds
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_jetspec.backends.triton_tree import TreeAttentionBackend, TreeMetadata, _check_model
from sglang_jetspec.kernels.tree_attention import naive
from sglang_jetspec.trees.bitmask import block_words, pack_ancestors

HEADS, KV_HEADS, HEAD, SLOTS, NODES = 4, 2, 16, 400, 5


class Pool:
    """SGLang's KV pool over one layer's buffers."""

    dtype = torch.float32

    def __init__(self):
        self.buffers = tuple(torch.randn(SLOTS, KV_HEADS, HEAD) for _ in range(2))
        self.written = None

    def get_kv_buffer(self, layer_id):
        return self.buffers

    def set_kv_buffer(self, layer, loc, k, v):
        self.written = loc.loc
        for buffer, new in zip(self.buffers, (k, v), strict=True):
            buffer[loc.loc] = new


def layer(**changes):
    values = {
        "layer_id": 0,
        "head_dim": HEAD,
        "scaling": HEAD**-0.5,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
        "logit_capping_method": "tanh",
        "is_cross_attention": False,
        "xai_temperature_len": -1,
        "attn_type": AttentionType.DECODER,
    }
    return SimpleNamespace(**values | changes)


@pytest.fixture
def backend():
    torch.manual_seed(0)
    made = object.__new__(TreeAttentionBackend)
    table = torch.randint(1, SLOTS, (6, 60), dtype=torch.int32)
    vars(made).update(
        device="cpu",
        token_to_kv_pool=Pool(),
        req_to_token_pool=SimpleNamespace(size=2),
        req_to_token=table,
        forward_metadata=None,
        _graph_words=None,
        _blocks={},
    )
    return made


def batch_of(prefix, ancestors=None, rows=(3, 1)):
    lens = torch.tensor(prefix)
    return SimpleNamespace(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=len(prefix),
        seq_lens=lens,
        req_pool_indices=torch.tensor(rows[: len(prefix)]),
        positions=(lens.unsqueeze(1) + torch.arange(NODES)).flatten(),
        out_cache_loc=torch.arange(len(prefix) * NODES) + 1,
        out_cache_loc_is_physical=True,
        spec_info=SimpleNamespace(custom_mask=ancestors),
    )


def random_words(batch, seed):
    generator = torch.Generator().manual_seed(seed)
    visible = torch.rand(batch, NODES, NODES, generator=generator) < 0.5
    return pack_ancestors(visible | torch.eye(NODES, dtype=torch.bool))


def projections(batch, seed=1):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(batch * NODES, HEADS * HEAD, generator=generator)
    k, v = (torch.randn(batch * NODES, KV_HEADS, HEAD, generator=generator) for _ in range(2))
    return q, k, v


def expected(backend, projected, forward_batch, words, **options):
    q, k, v = projected
    batch = len(words)
    out = naive.tree_attention(
        q.view(batch, NODES, HEADS, HEAD),
        k.view(batch, NODES, KV_HEADS, HEAD),
        v.view(batch, NODES, KV_HEADS, HEAD),
        *backend.token_to_kv_pool.get_kv_buffer(0),
        backend.req_to_token,
        forward_batch.req_pool_indices[:batch],
        forward_batch.seq_lens[:batch],
        words,
        scale=HEAD**-0.5,
        positions=forward_batch.positions.view(-1, NODES)[:batch],
        **options,
    )
    return out.reshape(batch * NODES, -1).float()


def test_verify_reads_the_trees_and_stores_their_kv(backend):
    words, projected = random_words(2, 0), projections(2)
    forward_batch = batch_of([40, 7], words)
    backend.init_forward_metadata(forward_batch)
    out = backend.forward_extend(*projected, layer(), forward_batch)
    torch.testing.assert_close(out, expected(backend, projected, forward_batch, words))
    assert torch.equal(backend.token_to_kv_pool.written, forward_batch.out_cache_loc)
    again = backend.forward_extend(projected[0], None, None, layer(), forward_batch)
    torch.testing.assert_close(again, out)  # what was stored is read back


def test_layer_options_reach_the_kernel(backend):
    words, projected = random_words(1, 2), projections(1)
    forward_batch = batch_of([30], words)
    backend.init_forward_metadata(forward_batch)
    out = backend.forward_extend(
        *projected, layer(sliding_window_size=8, logit_cap=3.0), forward_batch
    )
    wanted = expected(backend, projected, forward_batch, words, window=8, logit_cap=3.0)
    torch.testing.assert_close(out, wanted)
    with pytest.raises(ValueError, match=r"sinks.*layer 0"):
        backend.forward_extend(*projected, layer(), forward_batch, sinks=torch.zeros(1))


@pytest.mark.parametrize("attn_type", [AttentionType.DECODER, AttentionType.ENCODER_ONLY])
def test_draft_blocks_are_causal_or_open_as_the_layer_says(backend, attn_type):
    projected = projections(2)
    forward_batch = batch_of([12, 3])
    backend.init_forward_metadata(forward_batch)
    out = backend.forward_extend(*projected, layer(attn_type=attn_type), forward_batch)
    words = block_words(NODES, attn_type is AttentionType.DECODER, "cpu").repeat(2, 1, 1)
    torch.testing.assert_close(out, expected(backend, projected, forward_batch, words))


def test_a_replay_reads_new_trees_from_the_captured_buffers(backend):
    """The batch captured stays; slots, lengths, projections and words change in place."""
    backend.init_cuda_graph_state(4, 4 * NODES)
    # The scheduler may write the request table only after the replay.
    assert backend.shared_read_ends(ForwardMode.TARGET_VERIFY) is SharedReadEnds.POST_REPLAY
    captured = batch_of([1, 1], backend.graph_mask(2), rows=(0, 0))
    backend.init_forward_metadata_out_graph(captured, in_capture=True)
    plan = backend.forward_metadata
    assert isinstance(plan, TreeMetadata)
    for seed, (lengths, rows) in enumerate([([40, 7], (3, 1)), ([0, 33], (2, 5)), ([9], (4,))]):
        live = len(lengths)
        words, projected = random_words(live, 10 + seed), projections(2, seed)
        captured.seq_lens.copy_(torch.tensor(lengths + [1] * (2 - live)))
        captured.req_pool_indices.copy_(torch.tensor(rows + (0,) * (2 - live)))
        positions = captured.seq_lens.unsqueeze(1) + torch.arange(NODES)
        captured.positions.copy_(positions.flatten())
        view = SimpleNamespace(**vars(captured) | {"spec_info": SimpleNamespace(custom_mask=words)})
        backend.init_forward_metadata_out_graph(view)
        assert backend.forward_metadata is plan
        out = backend.forward_extend(*projected, layer(), captured)
        mine = tuple(part[: live * NODES] for part in projected)
        wanted = expected(backend, mine, captured, words)
        torch.testing.assert_close(out[: live * NODES], wanted)
        assert out.isfinite().all()  # padding rows too: their KV goes to the padding slot


def test_prefill_keeps_to_sglangs_backend(backend, monkeypatch):
    calls = []
    parent = TreeAttentionBackend.__mro__[1]
    monkeypatch.setattr(parent, "init_forward_metadata", lambda self, batch: calls.append("plan"))
    monkeypatch.setattr(parent, "forward_extend", lambda self, *args, **options: "extended")
    extend = SimpleNamespace(forward_mode=ForwardMode.EXTEND)
    backend.init_forward_metadata(extend)
    assert calls == ["plan"]
    assert backend.forward_extend(None, None, None, layer(), extend) == "extended"
    with pytest.raises(ValueError, match="EXTEND"):
        backend.init_forward_metadata_out_graph(extend, in_capture=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"use_mla_backend": True}, "MLA"),
        ({"head_dim": 80}, "heads of 80"),
        ({"translating": True}, "unified KV pool"),
        ({"kv_dtype": torch.float8_e4m3fn}, "float8_e4m3fn"),
    ],
)
def test_models_it_does_not_serve_are_refused(change, message):
    values = {"use_mla_backend": False, "head_dim": 64, "translating": False}
    values |= {"kv_dtype": torch.bfloat16} | change
    head = values["head_dim"]
    runner = SimpleNamespace(
        use_mla_backend=values["use_mla_backend"],
        dtype=torch.bfloat16,
        model_config=SimpleNamespace(is_encoder_decoder=False, head_dim=head, v_head_dim=head),
        kv_index_translator=SimpleNamespace(is_translating=values["translating"]),
        token_to_kv_pool=SimpleNamespace(dtype=values["kv_dtype"]),
    )
    with pytest.raises(ValueError, match=message):
        _check_model(runner)
