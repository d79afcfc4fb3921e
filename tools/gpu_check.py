"""Check every kernel against its oracle on a GPU, and time kernels and passes.

    python -m sglang_jetspec.tools.gpu_check

Needs torch and Triton; FlashInfer is compared with where it is installed. Shapes are Qwen3-8B's,
with random weights. Prints a table and, as the last line, one JSON object. Exit code 1 when a check
fails or a bar is missed. `--device cpu` walks through the same code at small sizes, in Triton's
interpreter, and judges no times.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import tyro


@dataclass(frozen=True)
class Row:
    """One line of the report. bar: what `value` must reach, as text; ok None: nothing to judge."""

    what: str
    value: float | None
    unit: str = ""
    bar: str = ""
    ok: bool | None = None
    note: str = ""


def check(what: str, equal: bool) -> Row:
    return Row(what, float(equal), "equal", "= 1", equal)


def at_most(what: str, value: float, unit: str, bar: float, judged: bool = True) -> Row:
    return Row(what, value, unit, f"<= {bar:g}", value <= bar if judged else None)


def at_least(what: str, value: float, unit: str, bar: float, judged: bool = True) -> Row:
    return Row(what, value, unit, f">= {bar:g}", value >= bar if judged else None)


@dataclass(frozen=True)
class Run:
    """Where and at what size the checks run."""

    device: str
    small: bool
    prefix: int

    @property
    def judged(self) -> bool:
        """Whether times mean anything."""
        return self.device != "cpu"


def tree_rows(run: Run) -> Iterator[Row]:
    from sglang_jetspec.kernels.tree_accept.benchmark import measure as measure_accept
    from sglang_jetspec.kernels.tree_build.benchmark import Shape, measure

    shapes = [Shape(2, 9, 3, 4)] if run.small else [Shape(64, 256, 7, 16), Shape(1, 64, 7, 15)]
    for shape in shapes:
        name = f"{shape.batch} x {shape.nodes}"
        built, accepted = measure(shape, run.device), measure_accept(shape, run.device)
        yield check(f"tree_build {name}", built.equal)
        yield at_most(f"tree_build {name}", built.kernel_us, "us", 100, run.judged)
        yield Row(f"the same in torch, {name}", built.torch_us, "us")
        yield check(f"tree_accept {name}", accepted.equal)
        yield Row(f"tree_accept {name}", accepted.kernel_us, "us")
        yield Row(f"the same in torch, {name}", accepted.torch_us, "us")


def commit_rows(run: Run) -> Iterator[Row]:
    from sglang_jetspec.kernels.commit.benchmark import Shape, measure

    small = Shape(1, 8, 4, 3, 1, 2, 8, 32)
    for shape in [small] if run.small else [Shape(batch=1), Shape(batch=8)]:
        found = measure(shape, run.device)
        yield check(f"commit, batch {shape.batch}", found.equal)
        yield Row(f"commit, batch {shape.batch}", found.kernel_us, "us")
        yield Row(f"commit, batch {shape.batch}", found.gigabytes_s, "GB/s")
        yield Row(f"the same in torch, batch {shape.batch}", found.torch_us, "us")


def draft_kv_rows(run: Run) -> Iterator[Row]:
    from sglang_jetspec.kernels.draft_kv.benchmark import Shape, measure

    small = Shape(rows=3, hidden=32, taps=2, layers=1, heads=1, head=32)
    for shape in [small] if run.small else [Shape(rows=16), Shape(rows=128)]:
        found = measure(shape, run.device)
        name = f"draft_kv, {shape.rows} rows"
        yield at_most(f"{name}: error to float64", found.error, "relative", 1e-2)
        yield Row(name, found.kernel_us, "us")
        yield Row(name, found.gigabytes_s, "GB/s of weights")
        yield Row(f"the same in torch, {shape.rows} rows", found.torch_us, "us")


def attention_rows(run: Run) -> Iterator[Row]:
    import torch

    from sglang_jetspec.kernels.tree_attention import naive
    from sglang_jetspec.kernels.tree_attention.kernel import tree_attention
    from sglang_jetspec.trees.bitmask import pack_ancestors

    # Correctness at a size the float64 definition can hold.
    torch.manual_seed(0)
    batch, nodes, prefix = (1, 5, 7) if run.small else (2, 64, 1000)
    for dtype, bar in ((torch.float32, 1e-5), (torch.bfloat16, 1e-2)):

        def normal(*size: int, dtype: torch.dtype = dtype) -> torch.Tensor:
            return torch.randn(*size, device=run.device).to(dtype)

        pools = [normal(batch * prefix + 1, 2, 64) for _ in range(2)]
        table = (torch.randperm(batch * prefix, device=run.device) + 1).int().view(batch, prefix)
        ancestors = torch.rand(batch, nodes, nodes, device=run.device) < 0.3
        ancestors |= torch.eye(nodes, dtype=torch.bool, device=run.device)
        arguments = (
            normal(batch, nodes, 4, 64),
            normal(batch, nodes, 2, 64),
            normal(batch, nodes, 2, 64),
            *pools,
            table,
            torch.arange(batch, device=run.device),
            torch.full((batch,), prefix - 1, device=run.device),
            pack_ancestors(ancestors),
        )
        exact = naive.tree_attention(*arguments, scale=0.125)
        got = tree_attention(*arguments, scale=0.125).double()
        error = float((got - exact).abs().max() / exact.abs().max())
        name = str(dtype).removeprefix("torch.")
        yield at_most(f"tree_attention {name}: error to float64", error, "relative", bar)
    if run.judged:
        yield from _attention_times(run)


def _attention_times(run: Run) -> Iterator[Row]:
    import torch

    from sglang_jetspec.kernels.timing import copy_bandwidth
    from sglang_jetspec.kernels.tree_attention.benchmark import Shape, measure

    bandwidth = copy_bandwidth(run.device)
    for batch in (1, 8):
        for nodes in (16, 64, 128):
            shape = Shape(batch, nodes, run.prefix, 32, 8, 128)
            found = measure(shape, torch.bfloat16, bandwidth)
            name = f"tree_attention {batch} x {nodes}, prefix {run.prefix}"
            yield Row(name, found.ours_us, "us")
            if found.flashinfer_us is None:
                yield Row(f"{name}: over FlashInfer", None, note="FlashInfer is not installed")
            else:
                ratio = found.flashinfer_us / found.ours_us
                yield at_least(f"{name}: over FlashInfer", ratio, "x", 1.5, nodes >= 64)
            share = 100 * found.of_copy_bandwidth
            yield at_least(f"{name}: of copy bandwidth", share, "%", 70, batch == 8)


def pass_rows(run: Run) -> Iterator[Row]:
    """A round's two passes, eager and captured."""
    import torch

    from sglang_jetspec.kernels.timing import median_us
    from sglang_jetspec.tools.gpu_passes import (
        DraftPass,
        ModelShape,
        Stack,
        VerifyPass,
        graphed,
    )

    target = ModelShape(2, 32, 48, 4, 2, 16, 50) if run.small else ModelShape()
    head = replace(target, layers=1 if run.small else 5)
    depth, width, nodes = (3, 2, 6) if run.small else (15, 7, 64)
    lm_head = torch.empty(target.vocabulary, target.hidden, device=run.device).bfloat16()
    lm_head.normal_(std=target.hidden**-0.5)
    head_stack = Stack(head, 1, run.prefix, depth + 1, run.device)
    draft = DraftPass(head_stack, lm_head, 1, depth, width, nodes)
    verify = VerifyPass(Stack(target, 1, run.prefix, nodes, run.device), lm_head, draft())
    times = {}
    for name, one in (("draft", draft), ("verify", verify)):
        times[name] = _wall_us(one, run)
        yield Row(f"{name} pass, eager, batch 1", times[name], "us")
    if not run.judged:
        yield Row("draft graph over eager, batch 1", None, note="CUDA graphs need a GPU")
    else:
        eager_tree = draft()
        replay, graph_tree = graphed(draft)
        replay()
        same = all(torch.equal(a, b) for a, b in zip(*_fields(eager_tree, graph_tree), strict=True))
        yield check("draft trees, graph and eager", same)
        verify_replay, _ = graphed(verify)
        graph = {"draft": _wall_us(replay, run), "verify": _wall_us(verify_replay, run)}
        for name, value in graph.items():
            yield Row(f"{name} pass, graph, batch 1", value, "us")
        ratio = times["draft"] / graph["draft"]
        yield at_least("draft graph over eager, batch 1", ratio, "x", 2)
        times = graph
    share = 100 * times["draft"] / (depth + 1) / times["verify"]
    yield at_most("draft cost a token, of a verify pass", share, "%", 0.5, run.judged)
    # What the kernels themselves cost, without the launches in between.
    yield Row("verify pass, device time", median_us(verify, run.device), "us")


def _fields(*trees: Any) -> list[list[Any]]:
    return [list(vars(tree).values()) for tree in trees]


def _wall_us(call: Callable[[], Any], run: Run) -> float:
    """Median wall time of a call with the launches it makes, in microseconds."""
    import torch

    times = []
    for _ in range(3 if run.small else 30):
        if run.judged:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if run.judged:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


SECTIONS: dict[str, Callable[[Run], Iterator[Row]]] = {
    "trees": tree_rows,
    "commit": commit_rows,
    "draft_kv": draft_kv_rows,
    "attention": attention_rows,
    "passes": pass_rows,
}


def run_section(name: str, run: Run) -> list[Row]:
    """The section's rows; an error is a failed row, so that the others still run."""
    rows: list[Row] = []
    try:
        rows.extend(SECTIONS[name](run))
    except Exception as error:
        traceback.print_exc(file=sys.stderr)
        rows.append(Row(name, None, ok=False, note=f"{type(error).__name__}: {error}"[:200]))
    return rows


def versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "triton", "flashinfer-python", "sglang", "sglang-jetspec"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found


def show(rows: list[Row], title: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("what", "value", "unit", "bar", "", title=title)
    verdicts = {True: "ok", False: "[red]no[/red]", None: ""}
    for row in rows:
        value = "-" if row.value is None else f"{row.value:.4g}"
        table.add_row(row.what, value, row.unit, row.bar, row.note or verdicts[row.ok])
    Console().print(table)


def main(
    device: Literal["cuda", "cpu"] = "cuda",
    sections: tuple[str, ...] = tuple(SECTIONS),
    prefix: int = 4096,
) -> int:
    """Run the checks.

    Args:
        device: cpu walks through the code at small sizes, in Triton's interpreter.
        sections: which of trees, commit, draft_kv, attention, passes.
        prefix: committed tokens of a request.
    """
    if device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise SystemExit("gpu_check needs a CUDA GPU; --device cpu walks through it without one.")
    name = torch.cuda.get_device_name() if device == "cuda" else "cpu, Triton interpreter"
    run = Run(device, small=device == "cpu", prefix=min(prefix, 8) if device == "cpu" else prefix)
    start = time.perf_counter()
    rows: list[Row] = []
    with torch.inference_mode():
        if run.judged:
            from sglang_jetspec.kernels.timing import copy_bandwidth

            rows.append(Row("copy bandwidth", copy_bandwidth(device) / 1e9, "GB/s"))
        for section in sections:
            rows += run_section(section, run)
    seconds = time.perf_counter() - start
    show(rows, f"{name}, {seconds:.0f} s")
    report = {"device": name, "seconds": seconds, "versions": versions()}
    print(json.dumps(report | {"rows": [asdict(row) for row in rows]}))
    return int(any(row.ok is False for row in rows))


if __name__ == "__main__":
    sys.exit(tyro.cli(main))
