"""Runs as processes of their own: killed in the middle, and two at once."""

import json
import os
import signal
import subprocess
import sys
import time

import msgspec
import pytest
import torch
from msgspec.structs import replace

from sglang_jetspec.tools.bench.server import free_port
from sglang_jetspec.tools.train.checkpoint import list_checkpoints, load_checkpoint
from sglang_jetspec.tools.train.data import read_jsonl
from sglang_jetspec.tools.train.run import run

TRAIN = ("-m", "sglang_jetspec.tools.train.run")
DEADLINE_S = 240


@pytest.fixture(autouse=True)
def one_thread(monkeypatch):
    """Sums in one order, here and in the processes started."""
    before = torch.get_num_threads()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def start(config, launcher):
    path = config.out.parent / f"{config.out.name}.json"
    values = msgspec.to_builtins(config, enc_hook=str).items()
    path.write_text(json.dumps({name: value for name, value in values if value is not None}))
    command = [sys.executable, *launcher, "--config", str(path)]
    return subprocess.Popen(command, start_new_session=True, stdout=subprocess.DEVNULL)


def newest(config):
    return load_checkpoint(list_checkpoints(config.out)[-1])


def without_time(path):
    return [{k: v for k, v in row.items() if k != "seconds"} for row in read_jsonl(path)]


def test_a_killed_run_resumes_to_the_same_curve_and_weights(train_config, tmp_path):
    # Checkpoints several steps apart, not in step with the log: the kill loses logged steps.
    whole = train_config(out=tmp_path / "whole", steps=90, dropout=0.1, log_every=2)
    run(whole)
    killed = replace(whole, out=tmp_path / "killed", checkpoint_minutes=0.003)
    process = start(killed, TRAIN)
    deadline = time.monotonic() + DEADLINE_S
    while not (found := list_checkpoints(killed.out)) or found[-1].stem < "checkpoint-0000020":
        assert process.poll() is None, "ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert newest(killed)["step"] < 90
    with (killed.out / "log.jsonl").open("a") as file:
        file.write('{"step": 99, "lo')  # as if killed while writing
    run(killed)
    assert without_time(killed.out / "log.jsonl") == without_time(whole.out / "log.jsonl")
    ends = newest(whole), newest(killed)
    assert ends[0]["step"] == ends[1]["step"] == 90
    for name, weight in ends[0]["head"].items():
        assert torch.equal(ends[1]["head"][name], weight), name


def test_two_processes_make_the_update_of_one(train_config, tmp_path):
    alone = train_config(
        out=tmp_path / "alone", steps=1, sequences_per_step=3, max_grad_norm=1e9, log_every=1
    )
    run(alone)
    both = replace(alone, out=tmp_path / "both")
    port = ("--main_process_port", str(free_port()))
    launcher = ("-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", *port)
    process = start(both, (*launcher, "--num_machines", "1", "--mixed_precision", "no", *TRAIN))
    assert process.wait(DEADLINE_S) == 0
    gradients = [
        {i: state["exp_avg"] for i, state in newest(config)["optimizer"]["state"].items()}
        for config in (alone, both)
    ]
    assert len(gradients[0]) > 10
    for i, gradient in gradients[0].items():
        assert gradient.abs().max() > 0
        torch.testing.assert_close(gradients[1][i], gradient, rtol=1e-3, atol=1e-7)
    rows = [next(read_jsonl(config.out / "log.jsonl")) for config in (alone, both)]
    for name in ("loss", "grad_norm", "chain_acceptance", "accuracy"):
        assert rows[1][name] == pytest.approx(rows[0][name], rel=1e-4), name
