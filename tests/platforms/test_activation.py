"""When the CPU platform claims a host, and the defaults it sets there."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, CudaGraphConfig, PhaseConfig
from sglang.srt.platforms import _load_platform_class

from sglang_jetspec.platforms.cpu import activation
from sglang_jetspec.platforms.cpu.kv_pool import verify_cache_locs
from sglang_jetspec.platforms.cpu.platform import (
    DEFAULT_MAX_RUNNING_REQUESTS,
    DEFAULT_MAX_TOTAL_TOKENS,
    JetSpecCpuPlatform,
)


@pytest.fixture(autouse=True)
def bare_host(monkeypatch):
    """A host without accelerators and without platform variables."""
    monkeypatch.delenv("SGLANG_PLATFORM", raising=False)
    monkeypatch.delenv("SGLANG_USE_CPU_ENGINE", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(activation.importlib.util, "find_spec", lambda name: None)


def test_a_bare_host_is_served_by_a_loadable_platform():
    assert _load_platform_class(activation.activate()) is JetSpecCpuPlatform


@pytest.mark.parametrize("device", [torch.cuda, torch.xpu, torch.backends.mps])
def test_hosts_with_an_accelerator_are_left_alone(monkeypatch, device):
    monkeypatch.setattr(device, "is_available", lambda: True)
    assert activation.activate() is None


@pytest.mark.parametrize("package", ["torch_npu", "torch_musa", "habana_frameworks"])
def test_hosts_with_a_vendor_device_package_are_left_alone(monkeypatch, package):
    found = {package: object()}
    monkeypatch.setattr(activation.importlib.util, "find_spec", found.get)
    assert activation.activate() is None


def test_the_platform_variable_wins_over_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setenv("SGLANG_PLATFORM", "jetspec_cpu")
    assert activation.activate() == activation.PLATFORM_CLASS


def test_sglangs_own_cpu_engine_is_left_alone(monkeypatch):
    monkeypatch.setenv("SGLANG_USE_CPU_ENGINE", "1")
    assert activation.activate() is None


def arguments(**given):
    """The part of SGLang's arguments that the platform reads, as the user gave them."""
    values = {
        "device": "cpu",
        "attention_backend": "intel_amx",
        "cuda_graph_config": CudaGraphConfig(prefill=PhaseConfig(backend=Backend.FULL)),
        "max_running_requests": None,
        "max_total_tokens": None,
        "context_length": None,
        "_raw_input": {"attention_backend": None},
    }
    return SimpleNamespace(**(values | given))


def test_defaults_bound_memory_and_disable_graphs():
    args = arguments()
    JetSpecCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "jetspec_cpu"
    assert args.max_running_requests == DEFAULT_MAX_RUNNING_REQUESTS
    assert args.max_total_tokens == DEFAULT_MAX_TOTAL_TOKENS
    assert args.cuda_graph_config.decode.backend == Backend.DISABLED
    assert args.cuda_graph_config.prefill.backend == Backend.DISABLED


def test_a_short_context_needs_fewer_slots():
    args = arguments(context_length=512, max_running_requests=2)
    JetSpecCpuPlatform().apply_server_args_defaults(args)
    assert args.max_total_tokens == 1024


def test_what_the_user_gave_stays():
    args = arguments(
        attention_backend="torch_native",
        _raw_input={"attention_backend": "torch_native"},
        max_running_requests=3,
        max_total_tokens=77,
    )
    JetSpecCpuPlatform().apply_server_args_defaults(args)
    assert args.attention_backend == "torch_native"
    assert (args.max_running_requests, args.max_total_tokens) == (3, 77)


@pytest.mark.parametrize(("value", "disabled"), [(None, True), ("0", True), ("1", False)])
def test_the_overlap_schedule_is_kept_when_asked_for(monkeypatch, value, disabled):
    monkeypatch.delenv("SGLANG_JETSPEC_CPU_OVERLAP", raising=False)
    if value is not None:
        monkeypatch.setenv("SGLANG_JETSPEC_CPU_OVERLAP", value)
    args = arguments(disable_overlap_schedule=False)
    JetSpecCpuPlatform().apply_server_args_defaults(args)
    assert args.disable_overlap_schedule is disabled


def test_another_value_of_the_overlap_variable_is_refused(monkeypatch):
    monkeypatch.setenv("SGLANG_JETSPEC_CPU_OVERLAP", "true")
    with pytest.raises(ValueError, match="SGLANG_JETSPEC_CPU_OVERLAP='true': use 0"):
        JetSpecCpuPlatform().apply_server_args_defaults(arguments())


def test_verify_slots_end_at_the_row():
    req_to_token = torch.arange(20, dtype=torch.int32).view(2, 10) + 100
    slots = verify_cache_locs(
        req_pool_indices=torch.tensor([1, 0]),
        req_to_token=req_to_token,
        start_offset=torch.tensor([8, 2]),
        end_offset=torch.tensor([12, 6]),
        batch_size=2,
        draft_token_num=4,
        device="cpu",
    )
    assert slots.tolist() == [118, 119, 0, 0, 102, 103, 104, 105]
    assert slots.dtype == torch.int64
