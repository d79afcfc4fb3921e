"""Tree attention against its double-precision definition, in Triton's interpreter or on a GPU."""

from dataclasses import dataclass

import pytest
import torch

from sglang_jetspec.kernels.tree_attention import kernel, naive
from sglang_jetspec.trees.bitmask import pack_ancestors, suffix_block_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 1e-2}


def random_ancestors(batch, nodes, generator):
    """[B, N, N] bool: trees of random shape, from chains to stars, some with dead nodes."""
    ancestors = torch.eye(nodes, dtype=torch.bool).repeat(batch, 1, 1)
    for b in range(batch):
        reach = int(torch.randint(1, nodes + 1, (), generator=generator))
        live = int(torch.randint(1, nodes + 1, (), generator=generator))
        for i in range(1, live):
            parent = int(torch.randint(max(0, i - reach), i, (), generator=generator))
            ancestors[b, i] |= ancestors[b, parent]
    return ancestors


@dataclass
class Case:
    """One launch. Slots nobody owns, and the output before the launch, hold NaN."""

    lengths: list[int]
    queries: int
    local: int
    kv_heads: int = 1
    group: int = 2
    head: int = 64
    dtype: torch.dtype = torch.float32
    page: int = 1
    window: int | None = None
    cap: float = 0.0
    splits: int | None = None
    tile: tuple[int, int] | None = None
    visible: torch.Tensor | None = None
    seed: int = 0

    def tensors(self):
        generator = torch.Generator().manual_seed(self.seed)

        def normal(*shape):
            return torch.randn(*shape, generator=generator).to(DEVICE, self.dtype)

        batch = len(self.lengths)
        pages = [-(-length // self.page) for length in self.lengths]
        columns = max(pages) + 1
        order = torch.randperm(sum(pages) + 3, generator=generator) + 1
        pools = [normal(len(order) * self.page + self.page, self.kv_heads, self.head) * 2 + 0.5]
        pools.append(normal(*pools[0].shape) * 2 + 0.5)
        # Entries past a request's own lead out of the pool's live part.
        table = torch.full((batch + 2, columns), int(order[-1]), dtype=torch.int32)
        rows = torch.randperm(batch + 2, generator=generator)[:batch]
        owned = torch.zeros(len(pools[0]), dtype=torch.bool)
        start = 0
        for b, count in enumerate(pages):
            mine = order[start : start + count]
            table[rows[b], :count] = mine.int()
            slots = (mine.unsqueeze(1) * self.page + torch.arange(self.page)).flatten()
            owned[slots[: self.lengths[b]]] = True
            start += count
        for pool in pools:
            pool[~owned.to(DEVICE)] = float("nan")
        visible = self.visible
        if visible is None:
            visible = random_ancestors(batch, self.local, generator)[:, -self.queries :]
        lengths = torch.tensor(self.lengths)
        depths = torch.randint(0, 17, (batch, self.local), generator=generator).sort(1).values
        shape = (batch, self.local, self.kv_heads, self.head)
        queries = normal(batch, self.queries, self.kv_heads * self.group, self.head)
        arguments = (queries, normal(*shape), normal(*shape), *pools)
        indices = (table, rows, lengths.to(torch.int64), pack_ancestors(visible))
        options = {
            "scale": self.head**-0.5,
            "window": self.window,
            "positions": (lengths.unsqueeze(1) + depths).to(DEVICE),
            "logit_cap": self.cap,
            "page_size": self.page,
        }
        return arguments + tuple(x.to(DEVICE) for x in indices), options

    def check(self):
        arguments, options = self.tensors()
        expected = naive.tree_attention(*arguments, **options)
        out = torch.full_like(arguments[0], float("nan"))
        kernel.tree_attention(*arguments, **options, splits=self.splits, tile=self.tile, out=out)
        error = (out.double() - expected).abs().amax(-1) / expected.abs().amax(-1)
        assert error.nan_to_num(0.0).max() <= TOLERANCE[self.dtype], self
        assert not out.isnan().any(), self


def random_case(seed):
    generator = torch.Generator().manual_seed(1000 + seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=generator))]

    def number(low, high):
        return int(torch.randint(low, high + 1, (), generator=generator))

    nodes = pick(2, 3, number(2, 16), number(2, 40), 33)
    longest = pick(0, 1, 15, 64, 65, number(1, 130), number(1, 130), number(130, 700))
    batch = pick(1, 1, 1, 2)
    return Case(
        lengths=[longest] + [number(0, longest) for _ in range(batch - 1)],
        queries=pick(nodes, nodes, number(1, nodes)),
        local=nodes,
        kv_heads=pick(1, 1, 1, 2),
        group=number(1, 8),
        head=pick(16, 32, 64, 128),
        dtype=pick(torch.float32, torch.float32, torch.bfloat16, torch.float16),
        page=pick(1, 1, 16, 7, 64),
        window=pick(None, None, None, 0, 5, number(1, 300), -1),
        cap=pick(0.0, 0.0, 0.0, 20.0),
        splits=pick(None, 1, 2, 3),
        # Small tiles make many steps of the interpreter.
        tile=(pick(64, 128, 256), pick(32, 64, 256) if longest <= 130 else 256),
        seed=seed,
    )


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_cases(first):
    for seed in range(first, first + 20):
        random_case(seed).check()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("head", [64, 128, 256])
def test_long_prefixes_and_large_trees(dtype, head):
    Case([5000], 8, 8, group=4, head=head, dtype=dtype, splits=4, tile=(64, 512)).check()
    Case([300], 256, 256, group=1, head=head, dtype=dtype, splits=2, tile=(256, 256)).check()


def test_the_tiles_it_chooses_itself():
    for dtype in TOLERANCE:
        Case([130, 70], 20, 20, kv_heads=2, group=4, dtype=dtype).check()


@pytest.mark.parametrize("splits", [1, 3])
def test_a_row_that_sees_nothing_is_zero(splits):
    blind = torch.zeros(1, 4, 4, dtype=torch.bool)
    arguments, options = Case([0], 4, 4, visible=blind).tensors()
    out = torch.full_like(arguments[0], float("nan"))
    kernel.tree_attention(*arguments, **options, splits=splits, out=out)
    assert (out == 0).all()


def test_a_foresight_batch_shares_prefix_and_suffix():
    """Blocks behind 0, 2 and 5 of 5 suffix rows give what each gives alone."""
    rows, suffix, behind = 4, 5, torch.tensor([[0, 2, 5]])
    visible = suffix_block_mask(behind, rows, suffix)
    case = Case([100], 3 * rows, suffix + 3 * rows, group=4, visible=visible)
    case.check()
    arguments, options = case.tensors()
    together = kernel.tree_attention(*arguments, **options)
    queries, keys, values, *rest = arguments
    for block, seen in enumerate(behind[0].tolist()):
        mine = slice(suffix + block * rows, suffix + (block + 1) * rows)
        own = torch.cat([torch.arange(seen), torch.arange(mine.start, mine.stop)]).to(DEVICE)
        causal = torch.ones(rows, rows).tril().bool()
        mask = torch.cat([torch.ones(rows, seen, dtype=torch.bool), causal], 1).unsqueeze(0)
        alone = kernel.tree_attention(
            queries[:, block * rows : (block + 1) * rows],
            keys[:, own],
            values[:, own],
            *rest[:-1],
            pack_ancestors(mask).to(DEVICE),
            **{**options, "positions": None},
        )
        part = together[:, block * rows : (block + 1) * rows]
        torch.testing.assert_close(part, alone, rtol=1e-5, atol=1e-6)


def test_splits_follow_shapes_only():
    assert kernel.choose_splits(programs=16, resident=132, longest=40960) == 8
    assert kernel.choose_splits(programs=400, resident=132, longest=40960) == 1
    assert kernel.choose_splits(programs=16, resident=132, longest=600) == 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda a: (a[0][..., :48].contiguous(), *a[1:]), "head size 48"),
        (lambda a: (a[0].double(), *a[1:]), "float64"),
        (lambda a: (*a[:8], a[8].long()), "mask words"),
        (lambda a: (*a[:3], a[3][:, :, :32], *a[4:]), "pools"),
        (lambda a: (a[0], a[1].half(), *a[2:]), "local keys"),
        (lambda a: (a[0], a[1][:, :3], a[2][:, :3], *a[3:]), "C at least P"),
        (lambda a: (a[0], a[1].repeat(2, 1, 1, 1), a[2].repeat(2, 1, 1, 1), *a[3:]), "B and D"),
        (lambda a: (*a[:5], a[5].T, *a[6:]), "slot table"),
        (lambda a: (*a[:6], a[6].repeat(2), *a[7:]), "table_rows"),
        (lambda a: (*a[:7], a[7].repeat(2, 1), a[8]), "prefix_lens"),
    ],
)
def test_what_it_does_not_serve_is_named(change, message):
    arguments, options = Case([3], 4, 4).tensors()
    with pytest.raises(ValueError, match=message):
        kernel.tree_attention(*change(arguments), **options)


@pytest.mark.parametrize(
    "positions", [None, torch.zeros(1, 3), torch.zeros(4, 1).T.expand(4, 4)[:1, ::2]]
)
def test_a_window_needs_the_positions_of_all_local_rows(positions):
    arguments, options = Case([3], 4, 4, window=2).tensors()
    with pytest.raises(ValueError, match="positions"):
        kernel.tree_attention(*arguments, **{**options, "positions": positions})


def test_an_output_of_another_layout_is_refused():
    arguments, options = Case([3], 4, 4).tensors()
    out = torch.empty_like(arguments[0]).transpose(1, 2)
    with pytest.raises(ValueError, match="out"):
        kernel.tree_attention(*arguments, **options, out=out)


def test_a_negative_logit_cap_is_none():
    arguments, options = Case([3], 4, 4).tensors()
    expected = kernel.tree_attention(*arguments, **options)
    got = kernel.tree_attention(*arguments, **{**options, "logit_cap": -1.0})
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
