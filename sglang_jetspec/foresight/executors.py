"""Where blocks are drafted ahead while the target verifies.

`Executor.submit` starts the work, `Ticket.result` joins it. An executor reads what is true when it
is handed the work, and writes nothing that others read; its caller joins before anything that the
work reads may change. `SerialExecutor` is the oracle: the same drafts, at the cost of their time.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")


class ForesightFault(RuntimeError):
    """Work ahead failed or did not end in time; the round goes on without it."""


class Ticket(Protocol[T_co]):
    """Work that was submitted."""

    def result(self) -> T_co:
        """The work's value, waited for; ForesightFault where there will be none."""
        ...


class Executor(Protocol):
    """Runs one piece of work at a time."""

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        """Start `work`; ForesightFault where it cannot be started."""
        ...


@dataclass(frozen=True)
class Done(Generic[T]):
    """A ticket whose work has ended, with a value or a fault."""

    value: T | None = None
    fault: Exception | None = None

    def result(self) -> T:
        if self.fault is not None:
            raise ForesightFault(str(self.fault)) from self.fault
        return self.value  # type: ignore[return-value]


class SerialExecutor:
    """Does the work when it is submitted."""

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        try:
            return Done(work())
        except Exception as fault:
            return Done(fault=fault)


@dataclass(frozen=True)
class _Promised(Generic[T]):
    future: Future[T]
    deadline: float

    def result(self) -> T:
        try:
            return self.future.result(max(0.0, self.deadline - time.monotonic()))
        except TimeoutError as fault:
            raise ForesightFault("the work did not end in time") from fault
        except Exception as fault:
            raise ForesightFault(f"{type(fault).__name__}: {fault}") from fault


class ThreadExecutor:
    """A thread of the same process, for CPUs: torch leaves the interpreter while it computes.

    cores: which the thread may use, None for all. timeout: seconds until work is given up; a thread
    that hangs is not asked again.
    """

    def __init__(self, cores: set[int] | None = None, timeout: float = 10.0) -> None:
        self.timeout = timeout
        self.last: Future[object] | None = None
        self.pool = ThreadPoolExecutor(1, "jetspec-foresight", _pin, (cores,))

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        if self.last is not None and not self.last.done():
            raise ForesightFault("earlier work has not ended")

        def run() -> T:
            with torch.inference_mode():
                return work()

        try:
            future = self.pool.submit(run)
        except RuntimeError as fault:
            raise ForesightFault(f"the thread is gone: {fault}") from fault
        self.last = future  # type: ignore[assignment]
        return _Promised(future, time.monotonic() + self.timeout)


def _pin(cores: set[int] | None) -> None:
    """Keep the calling thread, and the kernels it starts, on these cores."""
    if cores:
        os.sched_setaffinity(0, cores)
        torch.set_num_threads(len(cores))


@dataclass(frozen=True)
class _Streamed(Generic[T]):
    value: T
    ended: torch.cuda.Event

    def result(self) -> T:
        """The calling stream waits, the host does not."""
        torch.cuda.current_stream().wait_event(self.ended)
        return self.value


class StreamExecutor:
    """A second stream of the same GPU.

    The work starts behind what its caller's stream has been given so far. Its inputs and its value
    stay referenced until the caller has joined, which keeps their memory from being used again.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream: torch.cuda.Stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def submit(self, work: Callable[[], T]) -> Ticket[T]:
        try:
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                value = work()
                ended = torch.cuda.Event()  # type: ignore[no-untyped-call]
                ended.record(self.stream)
        except Exception as fault:
            return Done(fault=fault)
        return _Streamed(value, ended)


EXECUTORS = ("serial", "thread", "stream")


def make_executor(name: str, device: str, cores: set[int] | None = None) -> Executor:
    """The executor `name` of a server on `device`; ValueError where it cannot run there."""
    if name == "thread":
        if device != "cpu":
            raise ValueError("executor='thread': for CPUs; on a GPU use stream, or serial.")
        return ThreadExecutor(cores)
    if name == "stream":
        if device == "cpu":
            raise ValueError("executor='stream': needs a GPU; on a CPU use thread, or serial.")
        return StreamExecutor(torch.device(device))
    return SerialExecutor()
