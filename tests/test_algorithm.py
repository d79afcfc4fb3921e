"""Start-up refusals, on the arguments SGLang would hand over."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from sglang_jetspec.algorithm import JetSpecAlgorithm, check_local_head, validate_server_args
from sglang_jetspec.config import OptionError
from sglang_jetspec.heads.format import HeadError, expected_tensors, parse_head_config

RAW = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "vocab_size": 32,
    "num_target_layers": 8,
    "block_size": 8,
    "dflash_config": {"causal_head": True, "mask_token_id": 5, "target_layer_ids": [1, 5]},
}


def write_head(folder, raw=RAW, drop=()):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(raw))
    shapes = expected_tensors(parse_head_config(raw))
    tensors = {name: torch.zeros(shape) for name, shape in shapes.items() if name not in drop}
    save_file(tensors, folder / "model.safetensors")
    return str(folder)


@pytest.fixture
def args(tmp_path):
    return SimpleNamespace(
        speculative_draft_model_path=write_head(tmp_path / "head"),
        speculative_draft_model_revision=None,
        speculative_num_draft_tokens=None,
        speculative_eagle_topk=None,
        speculative_num_steps=None,
        speculative_accept_threshold_single=1.0,
        speculative_accept_threshold_acc=1.0,
        speculative_adaptive=False,
        speculative_use_rejection_sampling=False,
        speculative_draft_window_size=None,
        speculative_token_map=None,
        enable_two_batch_overlap=False,
        enable_hierarchical_cache=False,
        enable_lora=None,
        enable_deterministic_inference=False,
        enable_dp_attention=False,
        disaggregation_mode="null",
        tokenizer_worker_num=1,
        pp_size=1,
        page_size=1,
        context_length=None,
        attention_backend="jetspec_cpu",
        prefill_attention_backend=None,
        decode_attention_backend=None,
        device="cpu",
    )


def test_plain_arguments_pass(args):
    validate_server_args(args)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculative_draft_model_path": None}, "--speculative-draft-model-path"),
        ({"pp_size": 2}, "--pp-size 2"),
        ({"enable_dp_attention": True}, "--enable-dp-attention"),
        ({"disaggregation_mode": "decode"}, "--disaggregation-mode decode"),
        ({"tokenizer_worker_num": 4}, "--tokenizer-worker-num 4"),
        ({"attention_backend": "fa3"}, "--attention-backend fa3.*flashinfer"),
        ({"decode_attention_backend": "torch_native"}, "--decode-attention-backend torch_native"),
        ({"speculative_accept_threshold_acc": 0.9}, "threshold-acc 0.9.*leave it at 1.0"),
        ({"enable_lora": True}, "--enable-lora"),
        ({"enable_deterministic_inference": True}, "sampling_seed is served without it"),
        ({"speculative_num_draft_tokens": 300}, "--speculative-num-draft-tokens=300"),
        ({"speculative_num_draft_tokens": 1}, "--speculative-num-draft-tokens=1"),
    ],
)
def test_refusals_name_the_flag(args, changes, message):
    vars(args).update(changes)
    with pytest.raises(OptionError, match=message):
        validate_server_args(args)


def test_a_sequential_part_on_several_devices_is_refused(args, tmp_path):
    raw = {**RAW, "markov_rank": 4, "enable_confidence_head": False}
    args.speculative_draft_model_path = write_head(tmp_path / "dspark", raw)
    args.tp_size = 1
    validate_server_args(args)
    args.tp_size = 2
    with pytest.raises(OptionError, match=r"--tp-size 2.*a dspark head"):
        validate_server_args(args)


def test_a_head_with_missing_tensors_is_refused(args, tmp_path):
    args.speculative_draft_model_path = write_head(tmp_path / "x", drop=("norm.weight",))
    with pytest.raises(HeadError, match=r"norm\.weight"):
        validate_server_args(args)


def test_a_folder_without_a_head_is_refused(args, tmp_path):
    args.speculative_draft_model_path = str(tmp_path)
    with pytest.raises(HeadError, match=r"config\.json"):
        validate_server_args(args)


def test_a_bad_local_head_is_named_before_sglang_reads_it(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**RAW, "block_size": None}))
    with pytest.raises(HeadError, match=rf"model-path {tmp_path}.*block_size"):
        check_local_head("JETSPEC", str(tmp_path))
    with pytest.raises(HeadError, match="/nonexistent/head"):
        check_local_head("JETSPEC", "/nonexistent/head")
    check_local_head("EAGLE", "/nonexistent/head", trust_remote_code=False)
    check_local_head(None, None)


def test_the_resolved_shape_is_written_to_sglangs_fields(args):
    vars(args).update(speculative_num_draft_tokens=16, speculative_num_steps=6)
    vars(args).update(max_running_requests=None, speculative_draft_attention_backend=None)
    JetSpecAlgorithm("JETSPEC", lambda args: object).handle_server_args(args)
    assert args.speculative_num_draft_tokens == 16
    assert args.speculative_eagle_topk == 4
    assert args.speculative_dflash_block_size == 7
    # SGLang reserves max(steps * topk, N) slots a round: N, no more.
    assert args.speculative_num_steps * args.speculative_eagle_topk <= 16
    assert args.max_running_requests == 48
    assert args.speculative_draft_attention_backend == "jetspec_cpu"


def test_tree_attention_serves_both_phases_or_none(args):
    vars(args).update(attention_backend="flashinfer", decode_attention_backend="jetspec_triton")
    with pytest.raises(OptionError, match=r"flashinfer and jetspec_triton.*both phases"):
        validate_server_args(args)
    args.prefill_attention_backend = "jetspec_triton"
    validate_server_args(args)
    vars(args).update(attention_backend="jetspec_triton", prefill_attention_backend=None)
    validate_server_args(args)


def test_decode_graphs_stay_on_a_device(args):
    from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig

    vars(args).update(device="cuda", attention_backend="flashinfer", max_running_requests=8)
    vars(args).update(
        speculative_draft_attention_backend=None,
        cuda_graph_config=CudaGraphConfig(decode=PhaseConfig(backend=Backend.FULL)),
    )
    JetSpecAlgorithm("JETSPEC", lambda args: object).handle_server_args(args)
    assert args.cuda_graph_config.decode.backend == Backend.FULL
    assert args.max_running_requests == 8
