"""The GPU check's control flow at small sizes on the CPU, and that it sees a broken kernel."""

import json
import os
import subprocess
import sys

BREAK = """
import os; os.environ["TRITON_INTERPRET"] = "1"
import sys, tyro
from sglang_jetspec.kernels.tree_accept import kernel
from sglang_jetspec.tools import gpu_check
whole = kernel.tree_accept
def broken(*args):
    found = whole(*args)
    found.lengths.add_(1)
    return found
kernel.tree_accept = broken
sys.exit(gpu_check.main("cpu", ("trees",)))
"""


def run(*command, **env):
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "TRITON_INTERPRET": "0", **env},
    )


def report(result):
    return json.loads(result.stdout.splitlines()[-1])


def test_every_check_passes_in_the_interpreter():
    result = run("-m", "sglang_jetspec.tools.gpu_check", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    rows = report(result)["rows"]
    checked = {row["what"] for row in rows if row["ok"]}
    assert {
        "tree_build 2 x 9",
        "tree_accept 2 x 9",
        "commit, batch 1",
        "draft_kv, 3 rows: error to float64",
        "tree_attention float32: error to float64",
        "tree_attention bfloat16: error to float64",
    } <= checked
    assert {"draft pass, eager, batch 1", "verify pass, eager, batch 1"} <= {
        r["what"] for r in rows
    }
    # Times on a CPU are no times of the kernels.
    assert all(row["ok"] is None for row in rows if row["unit"] in ("us", "x", "%", "GB/s"))


def test_a_broken_kernel_fails_the_check():
    result = run("-c", BREAK)
    assert result.returncode == 1
    rows = {(r["what"], r["unit"]): r["ok"] for r in report(result)["rows"]}
    assert rows["tree_accept 2 x 9", "equal"] is False
    assert rows["tree_build 2 x 9", "equal"] is True


def test_without_a_gpu_it_says_what_to_do():
    result = run("-m", "sglang_jetspec.tools.gpu_check", CUDA_VISIBLE_DEVICES="")
    assert result.returncode != 0
    assert "needs a CUDA GPU" in result.stderr
