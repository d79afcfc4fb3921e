"""A JetSpec++ folder: draft head, adapter, calibration, and a manifest of their hashes.

    config.json, model.safetensors     the head, as any JetSpec head
    adapter/                           `foresight.adapter`'s config.json and safetensors
    calibration/calibration.json       `foresight.calibration`'s artefact
    manifest.json                      {"files": {path: {"sha256": ..., "size": ...}}}

The published JetSpec++ repositories have the same head and a manifest, with an adapter in
`head.safetensors` and `converter.safetensors` and thresholds in `calibration/thresholds.json`. Such
an adapter is used if its tensors are ours; otherwise the head alone is, and the reason is told.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import torch

from sglang_jetspec.foresight.adapter import Adapter, load_adapter
from sglang_jetspec.foresight.calibration import Calibration, load_calibration
from sglang_jetspec.heads.fields import HeadError
from sglang_jetspec.heads.format import check_tensors, load_head_config

MANIFEST, ADAPTER, CALIBRATION = "manifest.json", "adapter", "calibration/calibration.json"
PUBLISHED_ADAPTER = ("head.safetensors", "converter.safetensors")
PUBLISHED_THRESHOLDS = "calibration/thresholds.json"
CHUNK = 1 << 20


@dataclass(frozen=True)
class Foresight:
    """What a folder offers beyond its head.

    adapter, calibration: None where absent or refused. refused: why, one sentence each.
    """

    adapter: Adapter | None
    calibration: Calibration | None
    refused: tuple[str, ...]


def sha256(path: Path) -> str:
    """Hex digest of a file."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def adapter_sha256(folder: Path) -> str:
    """Hex digest that pins the adapter of a JetSpec++ folder: over its weight files in order."""
    digest = hashlib.sha256()
    for path in sorted((Path(folder) / ADAPTER).glob("*.safetensors")):
        digest.update(sha256(path).encode())
    return digest.hexdigest()


def write_manifest(folder: Path) -> None:
    """Record size and sha256 of every file in `folder`, in place of an older manifest."""
    files = {
        path.relative_to(folder).as_posix(): {"sha256": sha256(path), "size": path.stat().st_size}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    encoded = msgspec.json.format(msgspec.json.encode({"files": files}), indent=2)
    (folder / MANIFEST).write_bytes(encoded + b"\n")


def check_manifest(folder: Path) -> None:
    """Compare the files with the manifest, if there is one; HeadError on the first difference.

    Files that the manifest does not list (a README, say) are not looked at.
    """
    path = Path(folder) / MANIFEST
    if not path.exists():
        return
    try:
        listed = dict(_entries(msgspec.json.decode(path.read_bytes())))
    except (msgspec.DecodeError, AttributeError, TypeError, KeyError) as error:
        raise HeadError(f"{path} is not a manifest of files ({error!r})") from error
    for name, digest in listed.items():
        file = (Path(folder) / name).resolve()
        if not file.is_relative_to(Path(folder).resolve()):
            raise HeadError(f"{path} lists {name!r}, which is outside the folder")
        if not file.is_file():
            raise HeadError(f"{folder} lacks {name}, which its {MANIFEST} lists; download it again")
        if (found := sha256(file)) != digest:
            raise HeadError(
                f"{file}: sha256 is {found}, {MANIFEST} says {digest}; download it again"
            )


def load_foresight(
    folder: Path, target: str | None, dtype: torch.dtype = torch.float32
) -> Foresight:
    """Load what the folder holds besides the head.

    target: what the calibration must have been fitted for, None for any. Raises HeadError for a
    folder that contradicts its manifest or whose head does not load, CalibrationError for a
    calibration made for something else. An adapter in another format is refused, not an error.
    """
    folder = Path(folder)
    check_manifest(folder)
    head = load_head_config(folder)
    check_tensors(folder, head)
    adapter, refused = None, []
    if (folder / ADAPTER).is_dir():
        try:
            adapter = load_adapter(folder / ADAPTER, dtype)
        except HeadError as error:
            if not _is_published(folder):
                raise
            refused.append(f"the published adapter is not used: {error}")
    if adapter is not None and adapter.config.target_layer_ids != head.target_layer_ids:
        raise HeadError(
            f"{folder}: the adapter predicts layers {list(adapter.config.target_layer_ids)}, the "
            f"head reads {list(head.target_layer_ids)}; use an adapter trained for this head"
        )
    calibration = None
    if (folder / CALIBRATION).exists():
        calibration = load_calibration(
            folder / CALIBRATION,
            target=target,
            adapter_sha256=adapter_sha256(folder),
            block_size=head.block_size,
        )
    elif (folder / PUBLISHED_THRESHOLDS).exists():
        refused.append(
            f"{PUBLISHED_THRESHOLDS} is not used: its keys are not known; run `jetspec calibrate`"
        )
    return Foresight(adapter, calibration, tuple(refused))


def _is_published(folder: Path) -> bool:
    return any((folder / ADAPTER / name).exists() for name in PUBLISHED_ADAPTER)


def _entries(manifest: Any) -> Iterator[tuple[str, str]]:
    """(path, sha256) of a manifest's files, given as a mapping or as a list with paths."""
    files = manifest["files"]
    pairs = files.items() if isinstance(files, dict) else ((f["path"], f) for f in files)
    for name, entry in pairs:
        yield name, entry["sha256"]
