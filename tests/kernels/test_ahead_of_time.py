"""Kernels compile for GPUs that are not there, without spills; in a process without interpreter."""

import json
import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("match", "architectures"),
    [
        ("reduce head 128", (80, 90, 100)),
        ("attend bf16 head 64", (90,)),
        ("tree_build 256 nodes", (90,)),
        ("tree_accept 64 nodes", (80, 90, 100)),
        ("commit", (90,)),
        ("draft_kv write bf16, 16 rows, head 128", (90,)),
    ],
)
def test_machine_code_fits_the_gpu(match, architectures):
    command = (sys.executable, "-m", "sglang_jetspec.tools.compile_kernels", "--match", match)
    command += ("--architectures", *map(str, architectures))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert [one["architecture"] for one in found] == list(architectures)
    for one in found:
        assert match in one["name"]
        assert 16 <= one["registers"] <= 255
        assert one["spilled"] == 0
        assert one["shared"] <= 227 << 10  # a block's limit on H100, H200 and B200


def test_attention_multiplies_on_tensor_cores():
    command = (sys.executable, "-m", "sglang_jetspec.tools.compile_kernels")
    command += ("--match", "attend bf16 head 64", "--architectures", "90", "100")
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert [one["matrix"] for one in found] == ["wgmma.mma_async", "tcgen05.mma"]
