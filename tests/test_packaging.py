"""Names that must not collide, seen from the repository root as users run it."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def run(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )


def test_hugging_face_kernels_stays_importable_from_the_root():
    result = run("from kernels import get_kernel; print(callable(get_kernel))")
    assert result.stdout.strip() == "True", result.stderr


def test_source_folders_are_parts_of_the_package():
    result = run("import sglang_jetspec.tools.demo_target as m; print(m.__name__)")
    assert result.stdout.strip() == "sglang_jetspec.tools.demo_target", result.stderr
