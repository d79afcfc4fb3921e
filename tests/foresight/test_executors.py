"""Executors give what the work gives, and faults where there is nothing to give."""

import os
import threading
import time

import pytest
import torch

from sglang_jetspec.foresight.executors import (
    ForesightFault,
    SerialExecutor,
    ThreadExecutor,
    make_executor,
)


@pytest.fixture(params=[SerialExecutor, ThreadExecutor])
def executor(request):
    return request.param()


def test_results_come_in_order(executor):
    for number in range(5):
        assert executor.submit(lambda n=number: torch.tensor(n) + 1).result().item() == number + 1


def test_failed_work_is_a_fault_and_the_next_is_done(executor):
    def fail():
        raise torch.OutOfMemoryError("no memory left")

    with pytest.raises(ForesightFault, match="no memory left"):
        executor.submit(fail).result()
    assert executor.submit(lambda: 3).result() == 3


def test_a_thread_works_while_its_caller_does():
    started, go_on = threading.Event(), threading.Event()

    def work():
        started.set()
        assert go_on.wait(10)
        return threading.current_thread().name

    ticket = ThreadExecutor().submit(work)
    assert started.wait(10)
    go_on.set()
    assert ticket.result().startswith("jetspec-foresight")


def test_a_thread_computes_in_inference_mode_on_its_cores():
    core = min(os.sched_getaffinity(0))
    mine = os.sched_getaffinity(0)

    def work():
        return torch.is_inference_mode_enabled(), os.sched_getaffinity(0)

    assert ThreadExecutor({core}).submit(work).result() == (True, {core})
    assert os.sched_getaffinity(0) == mine


def test_a_stalled_thread_is_given_up_and_not_asked_again():
    release = threading.Event()
    executor = ThreadExecutor(timeout=0.05)
    before = time.monotonic()
    with pytest.raises(ForesightFault, match="did not end in time"):
        executor.submit(lambda: release.wait(20)).result()
    assert time.monotonic() - before < 5
    with pytest.raises(ForesightFault, match="earlier work has not ended"):
        executor.submit(lambda: 1)
    release.set()
    executor.last.result(10)
    assert executor.submit(lambda: 1).result() == 1


def test_a_dead_thread_is_a_fault():
    executor = ThreadExecutor()
    executor.pool.shutdown()
    with pytest.raises(ForesightFault, match="the thread is gone"):
        executor.submit(lambda: 1)


def test_executors_by_name():
    assert isinstance(make_executor("serial", "cpu"), SerialExecutor)
    assert isinstance(make_executor("thread", "cpu", {0}), ThreadExecutor)
    with pytest.raises(ValueError, match="on a CPU use thread"):
        make_executor("stream", "cpu")
    with pytest.raises(ValueError, match="on a GPU use stream"):
        make_executor("thread", "cuda")
