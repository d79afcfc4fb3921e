"""`jetspec doctor`: everything JETSPEC stands on, looked at without starting a server."""

from __future__ import annotations

import importlib
import json
import logging
import platform
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sglang_jetspec.config import resolve_options
from sglang_jetspec.foresight.folder import ADAPTER, MANIFEST, load_foresight
from sglang_jetspec.heads.fit import fit_problems
from sglang_jetspec.heads.format import (
    HeadConfig,
    check_tensors,
    load_head_config,
    resolve_head,
)
from sglang_jetspec.hooks import SUPPORTED_SGLANG, check_hooks
from sglang_jetspec.plugin import ALGORITHM


@dataclass(frozen=True)
class Check:
    """One line of the report; `ok` None: worth knowing, nothing to pass."""

    group: str
    name: str
    ok: bool | None
    detail: str


def version_checks() -> Iterator[Check]:
    yield Check("versions", "python", None, platform.python_version())
    for package in ("sglang-jetspec", "sglang", "torch", "transformers"):
        try:
            found = version(package)
        except PackageNotFoundError:
            yield Check("versions", package, False, f"not installed; pip install {package}")
            continue
        good = package != "sglang" or found == SUPPORTED_SGLANG
        fix = "" if good else f"; pip install sglang=={SUPPORTED_SGLANG}"
        yield Check("versions", package, good, found + fix)


def hook_checks() -> Iterator[Check]:
    for status in check_hooks():
        yield Check("SGLang hooks", status.name, status.found, status.detail or "found")


def plugin_checks() -> Iterator[Check]:
    """Loads the plug-ins as a server does and looks for what they register."""
    from sglang.srt.plugins import load_plugins
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    load_plugins()
    try:
        algorithm = SpeculativeAlgorithm.from_string(ALGORITHM)
        yield Check("plug-in", ALGORITHM, True, f"registered by {type(algorithm).__module__}")
    except ValueError:
        why = "not registered: a hook above is missing, or SGLANG_PLUGINS leaves jetspec out"
        yield Check("plug-in", ALGORITHM, False, why)
    try:
        module = importlib.import_module("kernels")
        yield Check("plug-in", "kernels", True, f"{module.get_kernel.__name__} found")
    except (ImportError, AttributeError) as error:
        yield Check("plug-in", "kernels", False, f"{error}; another `kernels` hides the package")


def platform_checks() -> Iterator[Check]:
    from sglang.srt.platforms import current_platform

    from sglang_jetspec.platforms.cpu.activation import PLATFORM_CLASS, activate

    active = f"{type(current_platform).__module__}.{type(current_platform).__qualname__}"
    wanted = activate()
    good = wanted is None or active == wanted
    why = "" if good else f"; {PLATFORM_CLASS} is wanted here, set SGLANG_PLATFORM=jetspec_cpu"
    yield Check("platform", current_platform.device_name, good, active + why)


def model_checks(target: str | None, head: str | None) -> Iterator[Check]:
    """The head's files, the options it gives, and whether the target is the one it was made for."""
    from sglang_jetspec.tools.demo_target import (
        TARGET_FOLDER,
        default_cache_dir,
        demo_head_path,
    )

    name = head or str(demo_head_path())
    try:
        folder = resolve_head(name)
        config = load_head_config(folder)
        check_tensors(folder, config)
        options = resolve_options(config, on_cpu=_on_cpu())
    except (ValueError, OSError) as error:  # ours, and the hub's for a name it cannot find
        yield Check("models", "head", False, f"{name}: {error}")
        return
    yield Check("models", "head", True, f"{name} ({config.kind}): {options}")
    if any((folder / part).exists() for part in (MANIFEST, ADAPTER)):
        yield _foresight_check(folder, target)
    demo = default_cache_dir() / TARGET_FOLDER
    if target is None and (head is not None or not demo.is_dir()):
        why = "not given" if head else "demo target not fetched yet; run jetspec demo-paths"
        yield Check("models", "target", None, why)
        return
    yield _target_check(target or str(demo), config)


def _foresight_check(folder: Path, target: str | None) -> Check:
    """What a JetSpec++ folder holds besides its head."""
    try:
        found = load_foresight(folder, None if target is None else Path(target).name)
    except ValueError as error:
        return Check("models", "JetSpec++", False, str(error))
    parts = [f"adapter {'found' if found.adapter else 'absent'}"]
    classes = sorted(found.calibration.classes) if found.calibration else []
    parts.append(f"calibration {'of ' + ', '.join(classes) if classes else 'absent'}")
    return Check("models", "JetSpec++", True, "; ".join([*parts, *found.refused]))


def _on_cpu() -> bool:
    from sglang_jetspec.platforms.cpu.activation import accelerator_present

    return not accelerator_present()


def _target_check(target: str, head: HeadConfig) -> Check:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(target).get_text_config()
    except (OSError, ValueError) as error:
        return Check("models", "target", False, f"{target}: {error}")
    sizes = [config.vocab_size]
    problems = fit_problems(head, config.hidden_size, config.num_hidden_layers, sizes)
    detail = f"the head's {'; its '.join(problems)}" if problems else "fits"
    return Check("models", "target", not problems, f"{target}: {detail}")


def all_checks(target: str | None, head: str | None) -> list[Check]:
    warnings.simplefilter("ignore")  # importing much of SGLang brings remarks on other devices
    logging.disable(logging.WARNING)
    return [
        *version_checks(),
        *hook_checks(),
        *plugin_checks(),
        *platform_checks(),
        *model_checks(target, head),
    ]


def doctor(target: str | None, head: str | None, *, as_json: bool) -> int:
    """Prints the report; 0 when nothing failed, else 1."""
    checks = all_checks(target, head)
    good = all(check.ok is not False for check in checks)
    if as_json:
        print(json.dumps({"ok": good, "checks": [asdict(check) for check in checks]}))
    else:
        Console().print(report(checks))
        print(
            "JETSPEC can serve here."
            if good
            else "JETSPEC cannot serve here: see the lines marked no."
        )
    return 0 if good else 1


def report(checks: list[Check]) -> Table:
    table = Table()
    for heading in ("", "what", "ok", "detail"):
        table.add_column(heading, overflow="fold")
    for index, check in enumerate(checks):
        first = index == 0 or checks[index - 1].group != check.group
        mark = {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[check.ok]
        table.add_row(check.group if first else "", check.name, mark, escape(check.detail))
    return table
