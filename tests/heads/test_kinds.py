"""Released heads of every kind: they load unchanged, and draft what independent code drafts."""

import published
import pytest
import torch
import torch.nn.functional as F
from published import HEAD_DIM, HEADS, HIDDEN, KV, VOCAB

from sglang_jetspec.heads.drafting import corrected_tree, top_rows
from sglang_jetspec.heads.format import parse_head_config
from sglang_jetspec.heads.reference import block_ids, load_reference_head
from sglang_jetspec.tools.train.export import raw_config
from sglang_jetspec.trees import best_first_tree

FORMATS = {
    "jetspec": "jetspec",
    "dflash": "dflash",
    "dspark-deepseek-vanilla": "dspark",
    "dspark-deepseek-gated": "dspark",
    "dspark-deepseek-rnn": "dspark",
    "dspark-specforge": "dspark",
    "domino": "domino",
}
formats = pytest.mark.parametrize("name", FORMATS)
CONTEXT, ANCHOR = 9, 6


class Target:
    """The target's parts a head borrows, and taps of CONTEXT tokens."""

    def __init__(self):
        random = torch.Generator().manual_seed(3)
        self.embedding = torch.randn(VOCAB, HIDDEN, generator=random)
        self.lm_head = torch.randn(VOCAB, HIDDEN, generator=random)
        self.taps = torch.randn(CONTEXT, 3 * HIDDEN, generator=random)
        self.root = 11


def norm(x, weight):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rope(x, positions):
    """[..., P, HEAD_DIM] by pairs of complex numbers."""
    powers = 1e6 ** (-torch.arange(0, HEAD_DIM, 2).double() / HEAD_DIM)
    angles = positions.double()[:, None] * powers
    pairs = torch.complex(*x.double().chunk(2, -1)) * torch.polar(torch.ones(()).double(), angles)
    return torch.cat([pairs.real, pairs.imag], -1).float()


def golden_rows(w, target, ids, causal):
    """Hidden states [R, HIDDEN] of one block `ids` behind ANCHOR context tokens."""
    fused = norm(target.taps[:ANCHOR] @ w["fc.weight"].T, w["hidden_norm.weight"])
    rows, count = target.embedding[ids], len(ids)
    seen = torch.ones(count, ANCHOR + count).bool()
    if causal:
        seen[:, ANCHOR:] = torch.ones(count, count).tril().bool()
    positions = torch.arange(ANCHOR + count)
    for i in range(2):
        layer = {k.split(".", 2)[2]: v for k, v in w.items() if k.startswith(f"layers.{i}.")}
        own = norm(rows, layer["input_layernorm.weight"])

        def heads(x, name, number, layer=layer):
            return (x @ layer[f"self_attn.{name}.weight"].T).view(len(x), number, HEAD_DIM)

        keyed = torch.cat([fused, own])
        q = norm(heads(own, "q_proj", HEADS), layer["self_attn.q_norm.weight"]).transpose(0, 1)
        k = norm(heads(keyed, "k_proj", KV), layer["self_attn.k_norm.weight"]).transpose(0, 1)
        v = heads(keyed, "v_proj", KV).transpose(0, 1)
        k, v = (t.repeat_interleave(HEADS // KV, 0) for t in (rope(k, positions), v))
        scores = rope(q, positions[ANCHOR:]) @ k.transpose(1, 2) / HEAD_DIM**0.5
        shares = scores.masked_fill(~seen, float("-inf")).softmax(-1)
        attended = (shares @ v).transpose(0, 1).flatten(1)
        rows = rows + attended @ layer["self_attn.o_proj.weight"].T
        inner = norm(rows, layer["post_attention_layernorm.weight"])
        gate, up = (inner @ layer[f"mlp.{n}_proj.weight"].T for n in ("gate", "up"))
        rows = rows + (F.silu(gate) * up) @ layer["mlp.down_proj.weight"].T
    return norm(rows, w["norm.weight"])


def golden_row_logits(name, w, target, hidden, path):
    """Log-probabilities [VOCAB] of the token after `path` (drafted tokens behind the root)."""
    depth = len(path)  # drafts before this one
    first = 0 if FORMATS[name] in ("dspark", "domino") else 1
    z = hidden[first + depth]
    logits = target.lm_head @ z
    tokens = [target.root, *path]
    if FORMATS[name] == "domino" and depth > 0:
        state = torch.zeros(published.STATE)
        for token in tokens:
            inputs = (w["prefix_gru.weight_ih_l0"] @ target.embedding[token]).chunk(3)
            inner = (w["prefix_gru.weight_hh_l0"] @ state).chunk(3)
            reset, update = (torch.sigmoid(a + b) for a, b in zip(inputs[:2], inner, strict=False))
            fresh = torch.tanh(inputs[2] + reset * inner[2])
            state = (1 - update) * fresh + update * state
        joined = w["embed_proj.0.weight"] @ torch.cat([z, state])
        logits = logits + w["embed_proj.2.weight"] @ F.silu(joined)
    if FORMATS[name] == "dspark":
        latent = w["markov_head.markov_w1.weight"][tokens[-1]]
        if name.endswith("gated"):
            joined = w["markov_head.gate_proj.weight"] @ torch.cat([z, latent])
            latent = latent * torch.sigmoid(joined + w["markov_head.gate_proj.bias"])
        if name.endswith("rnn"):
            state = torch.zeros(published.RANK)
            for step, token in enumerate(tokens):
                read = w["markov_head.markov_w1.weight"][token]
                joined = torch.cat([state, read, hidden[first + step]])
                joined = w["markov_head.joint_proj.weight"] @ joined
                gate, fresh, out = (joined + w["markov_head.joint_proj.bias"]).chunk(3)
                gate = torch.sigmoid(gate)
                state = gate * state + (1 - gate) * torch.tanh(fresh)
            latent = torch.tanh(out)
        logits = logits + w["markov_head.markov_w2.weight"] @ latent
    return logits.log_softmax(-1)


@pytest.fixture
def loaded(name, tmp_path):
    weights = published.write(tmp_path, name)
    head, _ = load_reference_head(tmp_path)
    target = Target()
    raw = published.config(name)
    ids = torch.tensor([target.root] + [28] * (raw["block_size"] - 1))
    golden = golden_rows(weights, target, ids, causal=name == "jetspec")
    return head, weights, target, golden


@formats
@torch.no_grad()
def test_the_backbone_equals_an_independent_forward(name, loaded):
    head, _, target, golden = loaded
    config = head.config
    assert config.kind == FORMATS[name]
    anchors = torch.tensor([[ANCHOR]])
    rows = block_ids(torch.tensor([[target.root]]), config.block_size, config.mask_token_id)
    hidden = head(target.embedding[rows], anchors, head.fuse(target.taps)[None])[0]
    torch.testing.assert_close(hidden, golden, rtol=1e-4, atol=1e-4)


def drafted(head, target, golden, depth, width, nodes):
    first = head.config.first_row
    rows = golden[None, first : first + depth]
    base, roots = F.linear(rows, target.lm_head), torch.tensor([target.root])
    if head.correction is None:
        tokens, logprobs, _ = top_rows(base, width, None)
        return best_first_tree(roots, tokens, logprobs, nodes)
    embed = lambda ids: F.embedding(ids, target.embedding)  # noqa: E731
    return corrected_tree(roots, rows, base, head.correction, embed, width, nodes)


@formats
@torch.no_grad()
def test_the_chain_is_the_greedy_one(name, loaded):
    head, weights, target, golden = loaded
    depth = head.config.max_depth
    tree = drafted(head, target, golden, depth, 1, depth + 1)
    path = []
    for _ in range(depth):
        path.append(int(golden_row_logits(name, weights, target, golden, path).argmax()))
    assert tree.tokens[0].tolist() == [target.root, *path]


@formats
@pytest.mark.parametrize(("width", "nodes"), [(3, 12), (2, 15), (3, 40)])
@torch.no_grad()
def test_the_tree_is_the_best_of_all_paths(name, loaded, width, nodes, monkeypatch):
    monkeypatch.setattr("sglang_jetspec.heads.drafting.LOGIT_ROWS", 4)
    head, weights, target, golden = loaded
    depth = 3
    tree = drafted(head, target, golden, depth, width, nodes)
    scores = {(): 0.0}
    children = {}
    for length in range(1, depth + 1):
        for path in [p for p in scores if len(p) == length - 1]:
            row = golden_row_logits(name, weights, target, golden, list(path))
            children[path] = row.topk(width).indices.tolist()
            scores |= {(*path, t): scores[path] + row[t].item() for t in children[path]}
    best = sorted(scores.values(), reverse=True)[:nodes]
    live = int(tree.live[0].sum())
    assert live == len(best)
    paths = [()]
    for node in range(1, live):
        paths.append((*paths[int(tree.parents[0, node])], int(tree.tokens[0, node])))
        assert tree.logprobs[0, node].item() == pytest.approx(scores[paths[-1]], abs=1e-4)
    assert sorted(tree.logprobs[0, :live].tolist(), reverse=True) == pytest.approx(best, abs=1e-4)
    assert len(set(paths)) == live


@pytest.mark.parametrize("name", ["domino"])
@torch.no_grad()
def test_domino_drafts_what_sglang_drafts(name, loaded):
    from sglang.srt.speculative.domino_utils import domino_greedy_rollout

    head, _, target, golden = loaded
    expected = domino_greedy_rollout(
        draft_hidden=golden[None],
        bonus_tokens=torch.tensor([target.root]),
        target_embedding=lambda ids: F.embedding(ids, target.embedding),
        lm_head_weight=target.lm_head,
        prefix_gru=head.prefix_gru,
        embed_proj=head.embed_proj,
        vocab_size=VOCAB,
        shift_label=True,
        candidate_pool_size=0,
        in_cuda_graph=False,
    )
    tree = drafted(head, target, golden, 4, 1, 5)
    assert tree.tokens[0, 1:].tolist() == expected[0].tolist()


@pytest.mark.parametrize(
    "name", [f"dspark-deepseek-{kind}" for kind in ("vanilla", "gated", "rnn")]
)
@torch.no_grad()
def test_markov_heads_are_sglangs(name, loaded):
    from sglang.srt.models import dspark

    head, weights, _, golden = loaded
    sizes = {"vocab_size": VOCAB, "markov_rank": published.RANK}
    theirs = {
        "vanilla": lambda: dspark.VanillaMarkov(**sizes),
        "gated": lambda: dspark.GatedMarkovHead(**sizes, hidden_size=HIDDEN),
        "rnn": lambda: dspark.RNNHead(**sizes, hidden_size=HIDDEN),
    }[name.split("-")[2]]()
    prefix = "markov_head."
    theirs.load_state_dict(
        {k.removeprefix(prefix): v for k, v in weights.items() if k.startswith(prefix)}
    )
    hidden, previous = golden[:3], torch.tensor([4, 9, 2])
    state, mine = theirs.init_state(hidden), None
    for depth in (1, 2):
        expected, state = theirs.step_bias(previous, hidden_states=hidden, state=state)
        bias, mine = head.correction.step(depth, hidden, previous, mine, None)
        torch.testing.assert_close(bias, expected)
    confidence = dspark.DSparkConfidenceHead(hidden_size=HIDDEN, markov_rank=published.RANK)
    confidence.proj.load_state_dict(head.confidence_head.proj.state_dict())
    expected = confidence(hidden, theirs.get_prev_embeddings(previous))
    torch.testing.assert_close(head.correction.confidence(hidden, previous), expected)


@formats
def test_an_exported_configuration_reads_back(name):
    config = parse_head_config(published.config(name))
    assert parse_head_config(raw_config(config)) == config
    if config.correction is not None:
        assert raw_config(config)["dflash_config"]["projector_type"] == config.kind
