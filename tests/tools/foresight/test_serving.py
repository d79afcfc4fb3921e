"""A server's rounds over paged pools against offline rounds over caches by position."""

import copy
import os
from dataclasses import replace

import pytest
import torch

from sglang_jetspec.foresight.calibration import Calibration, ClassCalibration
from sglang_jetspec.foresight.drafting import ForesightDrafter
from sglang_jetspec.foresight.executors import SerialExecutor, ThreadExecutor
from sglang_jetspec.foresight.layers import RowKeys, Seen, causal_rows
from sglang_jetspec.foresight.options import foresight_options
from sglang_jetspec.foresight.paged import KeyPool, PagedKeys
from sglang_jetspec.foresight.selection import RULES, RuleSettings
from sglang_jetspec.foresight.serving import Foresight, Requests, laws
from sglang_jetspec.tools.foresight.evaluate import parse_plan
from sglang_jetspec.tools.foresight.rounds import RoundPlan, Session, _sampling
from sglang_jetspec.verification import Sampling, target_choices

PROMPTS = [[3, 14, 15], [9, 2, 6, 5, 3, 5], [8]]
TOKENS, SLOTS, POSITIONS = 24, 400, 64
FITTED = ClassCalibration((-0.6, 1.7, 0.7, -0.2, 0.8, 0.1), 0.6, thresholds=(0.001,))


class Played:
    """Greedy rounds whose keys lie in pools, at slots in random order."""

    def __init__(self, models, options, prompts=PROMPTS, calibration=None, rows=None, reach=None):
        self.models = models
        self.rows = rows or models.head.block_size
        count = len(prompts)
        generator = torch.Generator().manual_seed(0)
        slots = torch.randperm(SLOTS - 1, generator=generator) + 1
        self.table = slots[: count * POSITIONS].view(count, POSITIONS)
        shapes = models.target.stack, models.foresight.drafter.layers
        self.target, self.head = (
            KeyPool(stack.shape, len(stack.layers), SLOTS, torch.zeros(1)) for stack in shapes
        )
        self.foresight = Foresight(
            models.foresight,
            foresight_options(options),
            calibration,
            rows=self.rows,
            requests=count,
            head=self.head.buffers,
            decoder=self.target.buffers[models.decoded_from :],
            on_cpu=True,
            reach=reach,
        )
        self.executor = SerialExecutor()
        self.lengths = torch.zeros(count, dtype=torch.long)
        self.text = torch.zeros(count, POSITIONS, dtype=torch.long)
        self.roots = torch.stack([self.prefill(row, ids) for row, ids in enumerate(prompts)])
        self.sampling = _sampling(0.0, count)

    def prefill(self, row, ids):
        """One request's prompt; the token behind it."""
        tokens, start = torch.tensor(ids), 0
        slots = self.table[row, : len(ids)]
        rows = torch.tensor([row])
        self.foresight.forget(rows)
        final, states = self.run_target(rows, tokens[None], torch.zeros(1).long())
        self.foresight.read_prompt(rows, slots, start, tokens, states[0])
        self.write_head(states, torch.arange(len(ids))[None], slots[None])
        self.text[row, : len(ids)] = tokens
        self.lengths[row] = len(ids)
        return self.models.target.logits(final[0, -1]).argmax()

    def run_target(self, rows, tokens, starts):
        """Final and captured states of `tokens` [B, R] behind `starts` [B] positions."""
        count = tokens.shape[1]
        positions = starts[:, None] + torch.arange(count)
        seen = self.target_seen(rows, starts, count)
        recorded = RowKeys()
        final, layers = self.models.target(
            self.models.embed(tokens), positions, causal_rows(count), seen, recorded
        )
        self.target.write(self.table[rows[:, None], positions], recorded)
        return final, self.models.captured(layers)

    def target_seen(self, rows, starts, count):
        keys = PagedKeys(self.target.buffers, self.table[rows])
        visible = torch.arange(POSITIONS) < starts[:, None]
        return [Seen(keys, visible[:, None].expand(-1, count, -1))]

    def write_head(self, states, positions, slots):
        self.head.write(slots, self.models.foresight.drafter.context_keys(states, positions))

    def round(self, rows=None):
        """(accepted drafts, bonus tokens, hits) of the requests `rows`."""
        rows = torch.arange(len(self.table)) if rows is None else rows
        starts, roots = self.lengths[rows], self.roots[rows]
        self.text[rows, starts] = roots
        longest = int(starts.max()) + 3
        requests = Requests(rows, starts, self.table[rows, :longest], self.text[rows])
        context = self.foresight.context(requests)
        block = self.foresight.draft(requests, context, roots)
        sampling = self.sampling.rows(rows)
        ticket = self.executor.submit(
            lambda: self.foresight.foresee(requests, context, block, sampling)
        )
        final, states = self.run_target(rows, block.tokens, starts)
        choices = target_choices(self.models.target.logits(final), sampling)
        accepted = (choices[:, :-1] == block.tokens[:, 1:]).long().cumprod(1).sum(1)
        bonus = choices.gather(1, accepted[:, None]).squeeze(1)
        index = torch.arange(self.rows)
        positions = starts[:, None] + index
        slots = self.table[rows[:, None], positions] * (index <= accepted[:, None])
        self.foresight.keep(requests, ticket.result())
        self.foresight.commit(context, block.tokens, states, positions, slots)
        self.write_head(states, positions, slots)
        self.text[rows[:, None], positions] = block.tokens
        self.lengths[rows] += accepted + 1
        self.roots[rows] = bonus
        return accepted, bonus, block.hit


def options(plan, outcomes=0, rule=None, **more):
    refine = parse_plan(plan)
    passes = {"passes": refine.passes, "refreshes": refine.refreshes}
    return {**passes, "outcomes": outcomes, "rule": rule, **more}


@pytest.mark.parametrize("adapter", ["exact", "random"])
@pytest.mark.parametrize(
    ("plan", "outcomes", "rule"),
    [
        ("J1", 0, None),
        ("J1-R1", 0, None),
        ("J3-R3", 0, None),
        ("J0", 4, "uncalibrated"),
        ("J1-R1", 1, "uncalibrated"),
        *(("J3-R1", 4, rule) for rule in sorted(RULES)),
        ("J3-R3", 8, "uncalibrated"),
    ],
)
@torch.inference_mode()
def test_served_rounds_equal_offline_rounds(make_models, plan, outcomes, rule, adapter):
    """The same drafts, hits and outcomes, whatever the networks."""
    models = make_models(adapter)
    calibration = Calibration("", "", 5, {"greedy": FITTED}) if rule == "calibrated" else None
    played = Played(models, options(plan, outcomes, rule), calibration=calibration)
    setup = RoundPlan(
        parse_plan(plan),
        "cached" if outcomes else "true",
        outcomes=outcomes,
        rule=rule or "calibrated",
        settings=RuleSettings(FITTED) if calibration else RuleSettings(),
    )
    hits = 0
    for offline in Session(models, setup, PROMPTS, TOKENS, seed=0).play():
        live = offline.live
        accepted, bonus, hit = played.round()
        assert torch.equal(accepted[live], offline.lengths[live])
        assert torch.equal(bonus[live], offline.anchors[live])
        assert torch.equal(hit[live], offline.cached[live])
        hits += int(hit[live].sum())
        if not live.all():
            break
    assert hits > 0 or not outcomes or rule == "geometric" or adapter == "random"


def random_rounds(models, executor, count):
    """Rounds of random parts of a batch, whose requests end, are aborted and replaced."""
    random = torch.Generator().manual_seed(count)
    played = Played(models, options("J1-R1", 4), [[1, 2], [3], [4, 5, 6], [7]])
    played.executor = executor
    seen, hits = [], 0
    for _ in range(count):
        for row in range(4):
            ended = int(played.lengths[row]) > POSITIONS - 14
            if ended or torch.rand(1, generator=random) < 0.02:
                ids = torch.randint(40, (int(torch.randint(1, 9, (1,), generator=random)),))
                played.roots[row] = played.prefill(row, ids.tolist())
        rows = torch.randperm(4, generator=random)[
            : int(torch.randint(1, 5, (1,), generator=random))
        ]
        found = played.round(rows)
        hits += int(found[2].sum())
        seen.append([x.tolist() for x in found])
    return seen, hits


@torch.inference_mode()
def test_a_thread_drafts_what_serial_execution_drafts(make_models):
    """The same drafts and the same hits, with requests that join, end and are aborted."""
    models = make_models("exact")
    count = int(os.environ.get("JETSPEC_FORESIGHT_ROUNDS", "150"))
    torch.manual_seed(0)
    serial, hits = random_rounds(models, SerialExecutor(), count)
    torch.manual_seed(0)
    threaded, _ = random_rounds(models, ThreadExecutor(), count)
    assert serial == threaded
    assert hits > count / 2


@torch.inference_mode()
def test_short_blocks_keep_the_text(make_models):
    """A budget below the head's block size."""
    models = make_models("exact")
    texts = []
    for rows in (3, 5):
        played = Played(models, options("J2-R2", 4), rows=rows)
        while int(played.lengths.min()) < 30:
            played.round()
        texts.append(played.text[:, :20])
    assert torch.equal(*texts)


@torch.inference_mode()
def test_a_request_is_drafted_alike_alone_and_among_others(make_models):
    models = make_models("random")
    together = Played(models, options("J2-R1", 4))
    rounds = [together.round() for _ in range(5)]
    for row, prompt in enumerate(PROMPTS):
        alone = Played(models, options("J2-R1", 4), [prompt])
        for whole in rounds:
            for one, many in zip(alone.round(), whole, strict=True):
                assert one[0] == many[row]


@torch.inference_mode()
def test_what_waits_for_a_request_goes_with_its_slot(make_models):
    """Aborted or retracted requests leave a row of the table, and others prefill there."""
    models = make_models("exact")
    played = Played(models, options("J1-R1", 8))
    played.round()
    played.roots[1] = played.prefill(1, [9, 2, 6, 5, 3, 5])
    _, _, hit = played.round()
    assert not hit[1]
    assert hit[0]
    fresh = Played(models, options("J1-R1", 8), [PROMPTS[1]])
    fresh.round()
    for _ in range(3):
        for one, many in zip(fresh.round(), played.round(), strict=True):
            assert one[0] == many[1]


@torch.inference_mode()
def test_requests_may_leave_and_join_between_rounds(make_models):
    models = make_models("exact")
    whole, some = Played(models, options("J1-R1", 8)), Played(models, options("J1-R1", 8))
    for _ in range(4):
        whole.round()
    for rows in ([0, 1, 2], [2, 0], [1], [0, 2, 1], [1, 2], [0, 1]):
        some.round(torch.tensor(rows))
    for row in range(3):
        committed = int(torch.minimum(some.lengths[row], whole.lengths[row]))
        assert committed > len(PROMPTS[row]) + 4
        assert torch.equal(some.text[row, :committed], whole.text[row, :committed])


@torch.inference_mode()
def test_large_batches_draft_for_fewer_outcomes(make_models):
    models = make_models("exact")
    assert foresight_options({"outcomes": 8, "max_foresight_blocks": 6}).outcomes_of(3) == 2
    played = Played(models, options("J0", 8, max_foresight_blocks=6))
    played.round()
    assert (played.foresight.cache.lengths >= 0).sum(1).tolist() == [2, 2, 2]
    nothing = Played(models, options("J0", 8, max_foresight_blocks=2))
    nothing.round()
    assert (nothing.foresight.cache.lengths < 0).all()


@torch.inference_mode()
def test_a_head_of_short_context_sees_the_near_positions_only(make_models):
    """Keys out of reach may be anything."""
    models = make_models("random")
    drafts = []
    for damage in (0.0, 100.0):
        played = Played(models, options("J1", 0), [list(range(30))], reach=16)
        played.head.keys[:, played.table[0, :22]] += damage
        accepted, bonus, _ = played.round()
        drafts.append((accepted, bonus, played.text[0, 30:35].tolist()))
    assert drafts[0] == drafts[1]
    seen = Played(models, options("J1", 0), [list(range(30))], reach=30)
    seen.head.keys[:, seen.table[0, :22]] += 100.0
    seen.round()
    assert seen.text[0, 30:35].tolist() != drafts[0][2]


@torch.inference_mode()
@pytest.mark.parametrize("rule", sorted(RULES))
def test_nothing_is_read_back_to_the_host(make_models, rule):
    """On the meta device reading a value raises."""
    models = make_models("random")
    networks = models.foresight
    drafter = replace(
        networks.drafter,
        layers=copy.deepcopy(networks.drafter.layers).to("meta"),
        fuse=lambda states: states[..., :32],
        norm=lambda hidden: hidden,
        embed=lambda ids: torch.empty(*ids.shape, 32, device="meta"),
        logits=lambda hidden: torch.empty(*hidden.shape[:-1], 40, device="meta"),
    )
    decoder, adapter = (
        copy.deepcopy(part).to("meta") for part in (networks.decoder, networks.adapter)
    )

    def pool(stack):
        return KeyPool(stack.shape, len(stack.layers), 90, torch.zeros(1, device="meta")).buffers

    calibration = Calibration("", "", 5, {"greedy": FITTED, "sampled": FITTED})
    foresight = Foresight(
        ForesightDrafter(drafter, decoder, adapter),
        foresight_options(options("J2-R1", 4, rule)),
        calibration,
        rows=5,
        requests=3,
        head=pool(drafter.layers),
        decoder=pool(decoder.stack),
        on_cpu=False,
    )

    def empty(*shape, dtype=torch.int64):
        return torch.empty(shape, dtype=dtype, device="meta")

    requests = Requests(empty(3), empty(3), empty(3, 20), empty(3, 30))
    sampling = Sampling(
        temperatures=empty(3, dtype=torch.float32),
        top_ks=empty(3),
        top_ps=empty(3, dtype=torch.float32),
        min_ps=None,
        greedy=empty(3, dtype=torch.bool),
        all_greedy=False,
    )
    context = foresight.context(requests)
    block = foresight.draft(requests, context, empty(3))
    foresight.keep(requests, foresight.foresee(requests, context, block, sampling))
    features = empty(3, 5, 64, dtype=torch.float32)
    foresight.commit(context, block.tokens, features, empty(3, 5), empty(3, 5))


def test_laws_follow_each_requests_settings():
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(0)) * 3
    greedy = _sampling(0.0, 2)
    torch.testing.assert_close(laws(logits, greedy), logits.softmax(-1))
    mixed = _sampling(0.5, 2)
    mixed.greedy[0] = True
    mixed.top_ks[:] = torch.tensor([1, 2])
    found = laws(logits, mixed)
    torch.testing.assert_close(found[0], logits[0].softmax(-1))
    best = logits[1].topk(2).indices
    kept = torch.zeros(3, 7).scatter(1, best, (logits[1] / 0.5).softmax(-1).gather(1, best))
    torch.testing.assert_close(found[1], kept / kept.sum(1, keepdim=True))
