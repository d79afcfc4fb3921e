"""SGLang's decode graph runner with our classes, on the CPU: its buffers, buckets and padding are
real, and calling the captured attention again stands in for replaying a graph.
"""

from contextlib import nullcontext
from dataclasses import fields
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import (
    FlashInferAttnBackend,
    FlashInferIndicesUpdaterPrefill,
)
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator
from sglang.srt.model_executor.cuda_graph_buffer_registry import build_decode_registry
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.model_executor.runner_utils.buffers import DecodeInputBuffers
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.draft_worker_common import make_draft_block_spec_info

from sglang_jetspec.algorithm import JetSpecAlgorithm
from sglang_jetspec.backends.draft_graph import GraphedTrees, TreeDrafter
from sglang_jetspec.backends.graph_runner import (
    RoundGraphRunner,
    VerifyGraphRunner,
    flashinfer_graph_tokens,
    plan_on_host,
)
from sglang_jetspec.backends.tree_mask import verify_mask
from sglang_jetspec.backends.triton_tree import TreeAttentionBackend
from sglang_jetspec.config import Options
from sglang_jetspec.kernels.tree_attention import naive
from sglang_jetspec.spec_inputs import JetSpecVerifyInput
from sglang_jetspec.steps import TorchSteps
from sglang_jetspec.trees.bitmask import pack_ancestors

NODES, MAX_BATCH, FILL = 5, 4, 1
ROUNDS = 492  # as many as the JetSpec++ paper compares
HEADS, KV_HEADS, HEAD, SLOTS = 4, 2, 16, 400


class Pool:
    def __init__(self):
        self.buffers = tuple(torch.randn(SLOTS, KV_HEADS, HEAD) for _ in range(2))

    def get_kv_buffer(self, layer_id):
        return self.buffers


@pytest.fixture
def backend():
    torch.manual_seed(0)
    made = object.__new__(TreeAttentionBackend)
    vars(made).update(
        device="cpu",
        token_to_kv_pool=Pool(),
        req_to_token_pool=SimpleNamespace(size=MAX_BATCH),
        req_to_token=torch.randint(1, SLOTS, (6, 60), dtype=torch.int32),
        dllm_attention=None,
        forward_metadata=None,
        _graph_words=None,
        _blocks={},
    )
    return made


@pytest.fixture
def runner(backend):
    with get_parallel().override(moe_ep_size=1):
        yield prepared(backend)


def prepared(backend, kind=VerifyGraphRunner):
    """A runner at the point where SGLang's constructor captures."""
    translator = KVIndexTranslator(
        req_to_token=backend.req_to_token,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device="cpu",
    )
    backend.kv_index_translator = translator
    made = object.__new__(kind)
    buffers = DecodeInputBuffers.create(
        device="cpu",
        max_bs=MAX_BATCH,
        max_num_token=MAX_BATCH * NODES,
        hidden_size=8,
        next_token_logits_buffer=torch.zeros(MAX_BATCH * NODES, 10),
        dtype=torch.float32,
        num_dp_ranks=1,
        pp_size=1,
        is_encoder_decoder=False,
        require_mlp_tp_gather=False,
        seq_len_fill_value=FILL,
        encoder_len_fill_value=0,
        num_tokens_per_req=NODES,
        cache_loc_dtype=torch.int64,
        enable_mamba_track=False,
        aux_hidden_states_width=16,
    )
    registry = build_decode_registry(
        device="cpu",
        max_bs=MAX_BATCH,
        max_num_token=MAX_BATCH * NODES,
        seq_len_fill_value=FILL,
        cache_loc_dtype=torch.int64,
        source=buffers,
    )
    off = dict.fromkeys(
        (
            *("ragged_verify_mode", "dllm_uses_input_embeds", "require_mlp_tp_gather"),
            *("require_attn_tp_gather", "require_mlp_sync", "enable_two_batch_overlap"),
            *("enable_pdmux", "is_encoder_decoder", "disable_padding", "record_nolora_graph"),
            *("_target_metadata_glue", "_draft_metadata_glue", "_skips_prefilled_inputs"),
            *("enable_prefill_cp", "_skip_glued_replay_view"),
        ),
        False,
    )
    none = dict.fromkeys(
        (
            *("dllm_input_preparation", "attention_graph_variants", "_metadata_glue"),
            *("_early_verify_metadata", "in_graph_metadata_prep_done"),
        )
    )
    vars(made).update(
        **off,
        **none,
        device="cpu",
        pp_size=1,
        num_dp_ranks=1,
        attn_backend=backend,
        buffers=buffers,
        buffer_registry=registry,
        captured_req_width=NODES,
        capture_bs=[1, 2, MAX_BATCH],
        max_bs=MAX_BATCH,
        seq_len_fill_value=FILL,
        capture_forward_mode=ForwardMode.TARGET_VERIFY,
        capture_hidden_mode=CaptureHiddenMode.NULL,
        deepep_adapter=SimpleNamespace(replay=lambda: None),
        model_runner=SimpleNamespace(
            is_draft_worker=False,
            lora_manager=None,
            hisparse_coordinator=None,
            kv_index_translator=translator,
            spec_algorithm=JetSpecAlgorithm("JETSPEC", lambda args: object),
            attn_tp_sequence_sharded=lambda tokens: False,
        ),
    )
    backend.init_cuda_graph_state(MAX_BATCH, MAX_BATCH * NODES)
    return made


LAYER = SimpleNamespace(
    layer_id=0,
    head_dim=HEAD,
    scaling=HEAD**-0.5,
    sliding_window_size=-1,
    logit_cap=0.0,
    is_cross_attention=False,
    xai_temperature_len=-1,
    attn_type=AttentionType.DECODER,
)


def live_batch(runner, lengths, words):
    """A round's verify batch, as the worker builds it."""
    batch, lens = len(lengths), torch.tensor(lengths)
    positions = (lens.unsqueeze(1) + torch.arange(NODES)).flatten()
    info = JetSpecVerifyInput.from_trees(
        torch.arange(batch * NODES).view(batch, NODES),
        positions.view(batch, NODES),
        words,
        depth=3,
        seq_lens_cpu=lens,
        plan=None,
    )
    made = ForwardBatch(
        forward_mode=ForwardMode.TARGET_VERIFY,
        batch_size=batch,
        input_ids=info.draft_token,
        req_pool_indices=torch.arange(batch) + 1,
        seq_lens=lens,
        out_cache_loc=torch.arange(batch * NODES) + 1,
        seq_lens_sum=sum(lengths),
        seq_lens_cpu=lens,
        positions=positions,
        spec_info=info,
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    runner.model_runner.kv_index_translator.own_plan(made).bind(
        made, runner.model_runner.kv_index_translator
    )
    return made


def random_words(batch, generator):
    visible = torch.rand(batch, NODES, NODES, generator=generator) < 0.5
    return pack_ancestors(visible | torch.eye(NODES, dtype=torch.bool))


def test_each_bucket_replays_batches_of_every_size(runner, backend):
    captured = {}
    for size in reversed(runner.capture_bs):
        forward_batch, attention, _ = runner.capture_prepare(size)
        assert attention is backend
        assert runner.capture_hidden_mode == CaptureHiddenMode.FULL
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        captured[size] = (forward_batch, backend.forward_metadata)
    generator = torch.Generator().manual_seed(1)
    for lengths in ([7], [40, 3, 0], [9, 30], [1, 2, 3, 44], [12]):
        words = random_words(len(lengths), generator)
        batch = live_batch(runner, lengths, words)
        assert runner.can_run_graph(batch)
        runner.load_batch(batch)
        size = len(lengths) + runner.padding(len(lengths))
        assert runner._replay_graph_key.size == size
        static, plan = captured[size]
        backend.forward_metadata = plan
        q = torch.randn(size * NODES, HEADS * HEAD, generator=generator)
        k, v = (torch.randn(size * NODES, KV_HEADS, HEAD, generator=generator) for _ in range(2))
        out = backend.forward_extend(q, k, v, LAYER, static, save_kv_cache=False)
        live = len(lengths)
        expected = naive.tree_attention(
            q.view(size, NODES, HEADS, HEAD)[:live],
            k.view(size, NODES, KV_HEADS, HEAD)[:live],
            v.view(size, NODES, KV_HEADS, HEAD)[:live],
            *backend.token_to_kv_pool.buffers,
            backend.req_to_token,
            torch.arange(live) + 1,
            torch.tensor(lengths),
            words,
            scale=HEAD**-0.5,
        )
        torch.testing.assert_close(
            out.view(size, NODES, HEADS, HEAD)[:live], expected.float(), rtol=1e-5, atol=1e-6
        )
        assert out.isfinite().all()
        # What a bucket adds writes to the padding slot and reads one token.
        assert (static.out_cache_loc[live * NODES :] == 0).all()
        assert (static.seq_lens[live:] == FILL).all()


def test_above_the_largest_bucket_a_batch_runs_eagerly(runner):
    words = random_words(5, torch.Generator().manual_seed(0))
    batch = live_batch(runner, [1] * 4, words[:4])
    batch.batch_size = 5
    assert not runner.can_run_graph(batch)


CONTEXT = 60


class GraphWrapper:
    """A FlashInfer prefill wrapper of a graph, up to where its compiled planner is called."""

    is_cuda_graph_enabled, _backend, _max_total_num_rows = True, "fa2", None
    _float_workspace_buffer = _int_workspace_buffer = _pin_memory_int_workspace_buffer = None

    def __init__(self, backend, size):
        self.device = "cpu"
        self.planned = []
        self._cached_module = SimpleNamespace(plan=lambda *args: self.planned.append(args))
        self._qo_indptr_buf = torch.zeros(size + 1, dtype=torch.int32)
        self._paged_kv_indptr_buf = torch.zeros(size + 1, dtype=torch.int32)
        self._paged_kv_last_page_len_buf = torch.zeros(size, dtype=torch.int32)
        self._mask_indptr_buf = torch.zeros(size + 1, dtype=torch.int32)
        # As `init_cuda_graph_state` sizes them when our runner asks.
        tokens = flashinfer_graph_tokens(MAX_BATCH, NODES, CONTEXT) * CONTEXT
        self._paged_kv_indices_buf = torch.zeros(tokens, dtype=torch.int32)
        self._custom_mask_buf = torch.full((tokens,), 255, dtype=torch.uint8)

    def begin_forward(self, *args, **options):
        """The plan at capture, which FlashInfer makes from device arrays."""


@pytest.fixture
def flashinfer():
    torch.manual_seed(0)
    made = object.__new__(FlashInferAttnBackend)
    updater = object.__new__(FlashInferIndicesUpdaterPrefill)
    sizes = {"num_qo_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": 64}
    kinds = {"data_type": torch.bfloat16, "q_data_type": torch.bfloat16, "_swa_kv_pool": None}
    indptr = [torch.zeros(MAX_BATCH + 1, dtype=torch.int32)]
    vars(updater).update(
        **sizes,
        **kinds,
        attn_backend=made,
        prefill_wrapper_ragged=None,
        kv_indptr=indptr,
        qo_indptr=indptr,
        kv_last_page_len=torch.ones(MAX_BATCH, dtype=torch.int32),
    )
    updater.update = updater.update_single_wrapper
    vars(made).update(
        req_to_token=torch.randint(1, SLOTS, (6, CONTEXT + NODES), dtype=torch.int32),
        indices_updater_prefill=updater,
        prefill_cuda_graph_metadata={},
        prefill_backend="fa2",
        dispatch_reason=None,
        use_sliding_window_kv_pool=False,
        init_cuda_graph_state=lambda *sizes: None,
        _create_prefill_wrappers=lambda size, masked: [GraphWrapper(made, size)] * masked,
    )
    with get_parallel().override(moe_ep_size=1):
        yield prepared(made)


def packed_bits(wrapper, b, count):
    """The first ``count`` mask bits of request ``b``, as FlashInfer's kernel indexes them."""
    start = int(wrapper._mask_indptr_buf[b])
    part = wrapper._custom_mask_buf[start : start + -(-count // 8)].numpy()
    return np.unpackbits(part, count=count, bitorder="little").astype(bool)


def test_flashinfer_replays_plan_from_host_lengths_with_the_dense_mask(flashinfer):
    runner, backend = flashinfer, flashinfer.attn_backend
    for size in reversed(runner.capture_bs):
        forward_batch, _, _ = runner.capture_prepare(size)
        backend.init_forward_metadata_out_graph(forward_batch, in_capture=True)
        plan_on_host(backend, size)
    generator = torch.Generator().manual_seed(1)
    for lengths in ([7], [40, 3, 0], [9, 30], [CONTEXT] * MAX_BATCH, [12]):
        ancestors = torch.rand(len(lengths), NODES, NODES, generator=generator) < 0.5
        padding = runner.padding(len(lengths))
        held = SimpleNamespace(seq_lens=torch.tensor(lengths), seq_lens_cpu=torch.tensor(lengths))
        mask = verify_mask(backend, ancestors, held, padding, CONTEXT)
        runner.load_batch(live_batch(runner, lengths, mask))
        (wrapper,) = backend.prefill_cuda_graph_metadata[len(lengths) + padding]
        padded = lengths + [FILL] * padding
        widths = [length + NODES for length in padded]
        ends = [sum(widths[:b]) for b in range(len(widths) + 1)]
        assert wrapper._qo_indptr_buf.tolist() == [NODES * b for b in range(len(padded) + 1)]
        assert wrapper._paged_kv_indptr_buf.tolist() == ends
        table = backend.req_to_token
        rows = [*range(1, len(lengths) + 1), *[0] * padding]
        slots = torch.cat([table[row, :width] for row, width in zip(rows, widths, strict=True)])
        assert torch.equal(wrapper._paged_kv_indices_buf[: len(slots)], slots)
        for b, width in enumerate(widths):
            dense = torch.ones(NODES, width, dtype=torch.bool)
            if b < len(lengths):
                dense[:, lengths[b] :] = ancestors[b]
            seen = packed_bits(wrapper, b, dense.numel())
            assert (seen == dense.flatten().numpy()).all()
        qo_host, kv_host, kv_lens_host = wrapper.planned[-1][3:6]
        assert qo_host.tolist() == wrapper._qo_indptr_buf.tolist()
        assert kv_host.tolist() == ends
        assert kv_lens_host.tolist() == widths


class CalledAgain:
    """SGLang's graph backend, where a graph is the captured function."""

    def __init__(self):
        self.functions = {}

    def capture_one(self, key, function, **options):
        for _ in range(3):  # two warm-ups and the capture
            function()
        self.functions[key] = function

    def replay(self, key, forward_batch):
        return self.functions[key]()

    replay_session = nullcontext


class Head:
    """A head: hidden states of ids and positions, and candidates from them."""

    weight = torch.randn(8, 40, generator=torch.Generator().manual_seed(3))

    def forward_embed(self, input_ids):
        return self.weight.T[input_ids]

    def forward(self, input_ids, positions, forward_batch, input_embeds=None):
        assert input_embeds is None  # ids go in, as the model has `forward_embed`
        hidden = self.forward_embed(input_ids) + torch.sin(positions).unsqueeze(1)
        return LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)

    def draft_tree(self, roots, hidden, options, build):
        logprobs = torch.log_softmax(hidden @ self.weight, -1)
        top, ids = torch.topk(logprobs, options.width, dim=-1)
        return build(roots, ids, top, options.num_draft_tokens)


@pytest.fixture
def draft_runner(backend, monkeypatch):
    """A draft runner that has captured its buckets, trees included."""
    module = "sglang.srt.model_executor.runner.decode_cuda_graph_runner."
    graph = SimpleNamespace(debug_cuda_graph=False)
    monkeypatch.setattr(module + "get_exec", lambda: SimpleNamespace(graph=graph))
    autotune = "maybe_flashinfer_autotune_speculative_draft"
    for name in ("set_dp_buffer_len", "set_is_extend_in_batch", autotune):
        monkeypatch.setattr(module + name, lambda *args, **options: None)
    monkeypatch.setattr(RoundGraphRunner, "model_context", lambda self: nullcontext())
    monkeypatch.setattr(RoundGraphRunner, "_publish_read_done", lambda self, in_graph: None)
    record = "_record_in_graph_metadata_prep_done"
    monkeypatch.setattr(RoundGraphRunner, record, lambda self: None)
    options = Options(num_draft_tokens=9, width=3, depth=NODES - 1, tree="best_first")
    trees = GraphedTrees(TreeDrafter(Head(), TorchSteps(options, on_cpu=True), CONTEXT))
    with get_parallel().override(moe_ep_size=1):
        made = prepared(backend, RoundGraphRunner)
        made.backend = CalledAgain()
        made.tbo_plugin = SimpleNamespace(capture_one_batch_size=lambda *args, **options: None)
        made.deepep_adapter.capture = lambda **options: None
        made.is_dllm, made._metadata_prep_fork_resolved = False, True
        vars(made.model_runner).update(
            is_draft_worker=True,
            attn_backend=backend,
            model=Head(),
            canary_manager=None,
            device_timer=None,
            capture_head_hooks=[],
            capture_tail_hooks=[trees.capture],
        )
        for size in reversed(made.capture_bs):
            made.capture_one_shape(size, made.model_runner.model.forward)
        yield made, trees


def test_replayed_draft_passes_give_the_trees_of_eager_ones(draft_runner):
    runner, trees = draft_runner
    generator = torch.Generator().manual_seed(2)
    for round_ in range(ROUNDS):
        batch = 1 + round_ % MAX_BATCH
        lengths = torch.randint(1, CONTEXT + 1, (batch,), generator=generator).tolist()
        drafting = live_batch(runner, lengths, None)
        drafting.input_ids = torch.randint(40, (batch * NODES,), generator=generator)
        drafting.spec_info = make_draft_block_spec_info(draft_token_num=NODES, device="cpu")
        drafting.capture_hidden_mode = CaptureHiddenMode.NULL
        assert runner.can_run_graph(drafting)
        runner.execute(drafting)
        replayed = trees.read(batch)
        hidden = Head().forward(drafting.input_ids, drafting.positions, None).hidden_states
        eager = trees.drafter(hidden, drafting.input_ids, drafting.seq_lens)
        for field in fields(eager):
            assert torch.equal(getattr(replayed, field.name), getattr(eager, field.name))
