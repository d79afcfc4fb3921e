import torch

from sglang_jetspec.tools.train.precision import computes_bf16
from sglang_jetspec.tools.train.target import load_target


def test_targets_compute_in_bf16_only_where_the_device_does(corpus, monkeypatch):
    cpu = torch.device("cpu")
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
    assert not computes_bf16(cpu)
    assert load_target(str(corpus / "target"), cpu).dtype is torch.float32
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: True)
    assert computes_bf16(cpu)
    assert load_target(str(corpus / "target"), cpu).dtype is torch.bfloat16
