"""What our graph runners change of SGLang's, without a GPU to capture on."""

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, fast_prefill_plan
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.speculative.spec_info import SpecInputType

from sglang_jetspec.backends.graph_runner import (
    RoundGraphRunner,
    VerifyGraphRunner,
    fit_graph_buffers,
    flashinfer_graph_tokens,
    install,
    plan_on_host,
)
from sglang_jetspec.spec_inputs import JetSpecVerifyInput

NODES = 9


@pytest.fixture
def runner():
    made = object.__new__(VerifyGraphRunner)
    vars(made).update(
        buffers=SimpleNamespace(custom_mask=torch.ones(4 * (1 + NODES) * NODES, dtype=torch.bool)),
        captured_req_width=NODES,
        capture_bs=[1, 2, 4],
        max_bs=4,
        attn_backend=SimpleNamespace(),
    )
    return made


def test_verify_passes_are_captured_with_a_mask(runner):
    info = runner.get_spec_info(2 * NODES)
    assert info.custom_mask is runner.buffers.custom_mask
    assert info.spec_input_type == SpecInputType.EAGLE_VERIFY
    assert info.draft_token_num == info.num_tokens_per_req == NODES
    assert info.capture_hidden_mode == CaptureHiddenMode.FULL
    assert info.topk > 1  # SGLang's chain-only shortcuts stay off


def test_tree_attention_is_captured_with_its_own_words(runner):
    words = torch.zeros(4, NODES, 1, dtype=torch.int32)
    runner.attn_backend = SimpleNamespace(
        tree_mask_layout="words", graph_mask=lambda batch: words[:batch]
    )
    mask = runner.get_spec_info(2 * NODES).custom_mask
    assert mask.shape == (2, NODES, 1)
    assert mask.data_ptr() == words.data_ptr()


def test_a_batch_is_padded_to_its_bucket_and_runs_eagerly_above_the_largest(runner, monkeypatch):
    assert [runner.padding(size) for size in range(1, 6)] == [0, 0, 1, 0, 0]
    allowed = lambda self, batch: batch.batch_size <= self.max_bs  # noqa: E731
    monkeypatch.setattr(DecodeCudaGraphRunner, "can_run_graph", allowed)
    mask = torch.ones(1, dtype=torch.bool)
    info = JetSpecVerifyInput.for_capture(mask, nodes=NODES)
    assert runner.can_run_graph(SimpleNamespace(spec_info=info, batch_size=4))
    assert not runner.can_run_graph(SimpleNamespace(spec_info=info, batch_size=5))
    chain = JetSpecVerifyInput.for_capture(None, nodes=NODES)
    assert not runner.can_run_graph(SimpleNamespace(spec_info=chain, batch_size=1))
    assert not runner.can_run_graph(SimpleNamespace(spec_info=None, batch_size=1))


@pytest.mark.parametrize("batch", [1, 8, 160])
@pytest.mark.parametrize(("rows", "context"), [(2, 512), (16, 40960), (64, 131072), (256, 1000)])
def test_flashinfer_buffers_hold_a_batch_at_full_context(batch, rows, context):
    tokens = flashinfer_graph_tokens(batch, rows, context)
    assert tokens * context >= batch * (context + rows)  # slot indices
    assert tokens * context >= batch * -(-rows * (context + rows) // 8)  # packed mask bytes
    # SGLang's own: one token of context for every row.
    assert tokens <= max(batch * rows // 4, 3 * batch) + batch


def test_graph_buffers_are_fitted_once_the_runner_asks(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 16 << 30))
    asked = []

    class Backend(FlashInferAttnBackend):
        def __init__(self):
            self.max_context_len = 40960

        def init_cuda_graph_state(self, max_bs, max_num_tokens):
            asked.append((max_bs, max_num_tokens))

    backend = Backend()
    fit_graph_buffers(backend, 64)
    backend.init_cuda_graph_state(48, 48 * 64)
    assert asked == [(48, flashinfer_graph_tokens(48, 64, 40960))]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1 << 20, 16 << 30))
    with pytest.raises(ValueError, match=r"48 requests x 64 rows x 40960.*cuda-graph-max-bs"):
        backend.init_cuda_graph_state(48, 48 * 64)


def test_sglangs_triton_backend_keeps_byte_masks_and_one_prefix_a_request(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (8 << 30, 16 << 30))
    asked = []
    monkeypatch.setattr(
        TritonAttnBackend, "init_cuda_graph_state", lambda self, *sizes: asked.append(sizes)
    )
    backend = object.__new__(TritonAttnBackend)
    backend.max_context_len = 1024
    fit_graph_buffers(backend, 64)
    backend.init_cuda_graph_state(8, 512)
    assert asked == [(8, 8)]


def test_replays_are_planned_on_the_host():
    backend = object.__new__(FlashInferAttnBackend)
    wrapper = SimpleNamespace(begin_forward="plan")
    backend.prefill_backend, backend.dispatch_reason = "fa2", None
    backend.prefill_cuda_graph_metadata = {2: [wrapper]}
    plan_on_host(backend, 2)
    assert isinstance(wrapper.begin_forward, partial)
    assert wrapper.begin_forward.func is fast_prefill_plan
    assert wrapper.begin_forward.args == (wrapper,)
    backend.dispatch_reason = "SLIDING_WINDOW"  # two wrappers, which that plan does not serve
    wrapper.begin_forward = "plan"
    plan_on_host(backend, 2)
    assert wrapper.begin_forward == "plan"


def test_installed_on_the_instances_only():
    target, draft = object.__new__(ModelRunner), object.__new__(ModelRunner)
    before = ModelRunner._decode_cuda_graph_runner_cls
    install(target, draft)
    assert target._decode_cuda_graph_runner_cls() is VerifyGraphRunner
    assert draft._decode_cuda_graph_runner_cls() is RoundGraphRunner
    assert ModelRunner._decode_cuda_graph_runner_cls is before
