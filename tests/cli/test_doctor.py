"""What doctor looks at and how it reports."""

import json
import shutil
from pathlib import Path

import pytest

from sglang_jetspec.cli import doctor as module
from sglang_jetspec.cli.doctor import Check, doctor, model_checks
from sglang_jetspec.hooks import HookStatus

HEAD = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 512,
    "vocab_size": 1000,
    "num_target_layers": 8,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 999, "target_layer_ids": [1, 6], "causal_head": True},
}


def test_a_missing_head_fails(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(HEAD))
    (check,) = model_checks(None, str(tmp_path))
    assert check.ok is False
    assert "safetensors" in check.detail
    (check,) = model_checks(None, str(tmp_path / "gone"))
    assert check.ok is False
    assert "gone" in check.detail


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (None, 0), (False, 1)])
def test_code_and_json(
    ok: bool | None,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    checks = [Check("versions", "sglang", True, "0"), Check("models", "target", ok, "why")]
    monkeypatch.setattr(module, "all_checks", lambda target, head: checks)
    assert doctor(None, None, as_json=True) == code
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is (code == 0)
    assert report["checks"][1] == {"group": "models", "name": "target", "ok": ok, "detail": "why"}
    assert doctor(None, None, as_json=False) == code
    assert "why" in capsys.readouterr().out


def test_a_missing_hook_is_shown_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "check_hooks", lambda: [HookStatus("a:b", False, "no parameter x")])
    (check,) = module.hook_checks()
    assert (check.name, check.ok, check.detail) == ("a:b", False, "no parameter x")


def test_a_foreign_sglang_version_fails_with_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "version", lambda package: "0.6.0")
    (check,) = (check for check in module.version_checks() if check.name == "sglang")
    assert check.ok is False
    assert check.detail == "0.6.0; pip install sglang==0.5.23"


def test_this_installation_is_sound() -> None:
    """The real plug-in, platform, hooks and versions."""
    checks = [
        *module.version_checks(),
        *module.hook_checks(),
        *module.plugin_checks(),
        *module.platform_checks(),
    ]
    assert [check for check in checks if check.ok is False] == []
    assert {check.group for check in checks} == {"versions", "SGLang hooks", "plug-in", "platform"}


def test_a_jetspec_plus_plus_folder_is_looked_at_whole(tmp_path: Path) -> None:
    fixture = Path(__file__).parents[1] / "fixtures" / "tiny-qwen3"
    folder = tmp_path / "folder"
    shutil.copytree(fixture / "jetspecpp", folder)
    checks = list(model_checks(str(fixture / "target"), str(folder)))
    assert [(check.name, check.ok) for check in checks] == [
        ("head", True),
        ("JetSpec++", True),
        ("target", True),
    ]
    assert checks[1].detail == "adapter found; calibration of greedy, sampled"
    (folder / "adapter" / "adapter.safetensors").write_bytes(b"damaged")
    checks = list(model_checks(str(fixture / "target"), str(folder)))
    assert checks[1].ok is False
    assert "adapter.safetensors: sha256 is" in checks[1].detail
