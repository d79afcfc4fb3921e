"""The JetSpec++ folder: what is loaded, what is refused and in which words."""

import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from sglang_jetspec.foresight.adapter import Adapter, AdapterConfig, save_adapter
from sglang_jetspec.foresight.calibration import (
    IDENTITY,
    Calibration,
    CalibrationError,
    save_calibration,
)
from sglang_jetspec.foresight.folder import (
    CALIBRATION,
    adapter_sha256,
    check_manifest,
    load_foresight,
    write_manifest,
)
from sglang_jetspec.foresight.layers import LayerShape
from sglang_jetspec.heads.format import HeadConfig, HeadError, load_head_config
from sglang_jetspec.heads.reference import JetSpecHead, load_reference_head
from sglang_jetspec.tools.train.export import export_head

SHAPE = LayerShape(16, 24, 2, 1, 8, 1e-6, 1e4, qk_norm=True)
HEAD = HeadConfig(
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rms_norm_eps=1e-6,
    rope_theta=1e4,
    max_position_embeddings=64,
    vocab_size=20,
    num_target_layers=4,
    block_size=4,
    mask_token_id=0,
    target_layer_ids=(0, 2),
    causal=True,
    draft_vocab_size=None,
    jetspec={"token_input": True},
)


@pytest.fixture
def folder(tmp_path):
    """A complete folder: head, adapter, calibration, manifest."""
    export_head(JetSpecHead(HEAD).state_dict(), HEAD, None, tmp_path)
    save_adapter(Adapter(AdapterConfig(SHAPE, (0, 2), (1, 1))), tmp_path / "adapter")
    (tmp_path / "calibration").mkdir()
    calibration = Calibration("target", adapter_sha256(tmp_path), 4, {"greedy": IDENTITY})
    save_calibration(calibration, tmp_path / CALIBRATION)
    write_manifest(tmp_path)
    return tmp_path


def test_complete_folder_loads(folder):
    found = load_foresight(folder, "target")
    assert found.adapter.config.target_layer_ids == (0, 2)
    assert found.calibration.of(greedy=True) == IDENTITY
    assert found.refused == ()
    listed = json.loads((folder / "manifest.json").read_text())["files"]
    assert set(listed) == {
        "config.json",
        "model.safetensors",
        "adapter/config.json",
        "adapter/adapter.safetensors",
        "calibration/calibration.json",
    }
    assert listed["config.json"]["size"] == (folder / "config.json").stat().st_size


def test_head_alone_is_a_folder_too(tmp_path):
    export_head(JetSpecHead(HEAD).state_dict(), HEAD, None, tmp_path)
    found = load_foresight(tmp_path, "target")
    assert found.adapter is None
    assert found.calibration is None


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "adapter/config.json"])
def test_changed_or_missing_files_are_named(folder, name):
    path = folder / name
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(HeadError, match=rf"{name}: sha256 is"):
        load_foresight(folder, "target")
    path.unlink()
    with pytest.raises(HeadError, match=f"lacks {name}"):
        load_foresight(folder, "target")


def test_manifest_cannot_point_outside(folder):
    (folder / "manifest.json").write_text(json.dumps({"files": {"../x": {"sha256": "0"}}}))
    with pytest.raises(HeadError, match="outside the folder"):
        check_manifest(folder)
    (folder / "manifest.json").write_text("[1]")
    with pytest.raises(HeadError, match="not a manifest"):
        check_manifest(folder)


def test_calibration_of_another_adapter_is_refused(folder):
    torch.manual_seed(1)
    save_adapter(Adapter(AdapterConfig(SHAPE, (0, 2), (1, 1))), folder / "adapter")
    write_manifest(folder)
    with pytest.raises(CalibrationError, match="adapter_sha256 is"):
        load_foresight(folder, "target")


def test_calibration_of_another_target_is_refused(folder):
    with pytest.raises(CalibrationError, match="target is 'target', this server has 'other'"):
        load_foresight(folder, "other")


def test_adapter_for_other_layers_is_refused(folder):
    other = dataclasses.replace(HEAD, target_layer_ids=(0, 1))
    export_head(JetSpecHead(other).state_dict(), other, None, folder)
    write_manifest(folder)
    with pytest.raises(HeadError, match=r"predicts layers \[0, 2\], the head reads \[0, 1\]"):
        load_foresight(folder, "target")


@pytest.fixture
def published(tmp_path):
    """The layout of the published repositories, with tensor names of its own."""
    plain = dataclasses.replace(HEAD, jetspec={})
    export_head(JetSpecHead(plain).state_dict(), plain, None, tmp_path)
    (tmp_path / "adapter").mkdir()
    (tmp_path / "calibration" / "decoder").mkdir(parents=True)
    save_file({"score.weight": torch.zeros(6, 16)}, tmp_path / "adapter/head.safetensors")
    save_file({"blocks.0.w": torch.zeros(2)}, tmp_path / "adapter/converter.safetensors")
    (tmp_path / "adapter/config.json").write_text('{"num_modules": 5}')
    (tmp_path / "calibration/thresholds.json").write_text("{}")
    (tmp_path / "calibration/decoder/manifest.json").write_text('{"layers": [34, 35]}')
    write_manifest(tmp_path)
    return tmp_path


def test_published_layout_serves_its_head_and_says_what_it_does_not_use(published):
    found = load_foresight(published, "target")
    assert found.adapter is None
    assert found.calibration is None
    assert len(found.refused) == 2
    assert "published adapter is not used" in found.refused[0]
    assert "num_modules" in found.refused[0]
    assert "thresholds.json" in found.refused[1]
    head, _ = load_reference_head(published)
    assert head.config == load_head_config(published)


def test_published_adapter_with_our_tensors_is_used(published):
    torch.manual_seed(0)
    adapter = Adapter(AdapterConfig(SHAPE, (0, 2), (1, 1)))
    save_adapter(adapter, published / "adapter")
    tensors = adapter.state_dict()
    names = sorted(tensors)
    (published / "adapter/adapter.safetensors").unlink()
    for name, part in (("head", names[:4]), ("converter", names[4:])):
        save_file({n: tensors[n] for n in part}, published / f"adapter/{name}.safetensors")
    write_manifest(published)
    found = load_foresight(published, "target")
    assert len(found.refused) == 1
    for name, value in tensors.items():
        torch.testing.assert_close(found.adapter.state_dict()[name], value)


def test_tensor_names_of_a_published_adapter_are_told(published):
    save_adapter(Adapter(AdapterConfig(SHAPE, (0, 2), (1, 1))), published / "adapter")
    (published / "adapter/adapter.safetensors").unlink()
    write_manifest(published)
    (reason, _) = load_foresight(published, "target").refused
    assert "blocks.0.w" in reason


def test_own_adapter_that_does_not_fit_is_an_error(folder):
    (folder / "adapter/config.json").write_text("{}")
    write_manifest(folder)
    with pytest.raises(HeadError, match=r"adapter/config\.json"):
        load_foresight(folder, "target")
