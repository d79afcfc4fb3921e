import torch

from sglang_jetspec.tools.train.batches import BatchSource, draw_anchors, pick_examples
from sglang_jetspec.tools.train.block_inputs import MaskInputs, TokenInputs
from sglang_jetspec.tools.train.data import Example


def test_an_epoch_visits_every_example_once():
    indices, lengths = list(range(5, 45)), list(range(100))
    picked = [i for step in range(10) for i in pick_examples(indices, lengths, 4, 0, step)]
    assert sorted(picked) == indices
    again = [i for step in range(10, 20) for i in pick_examples(indices, lengths, 4, 0, step)]
    assert sorted(again) == indices
    assert again != picked


def test_steps_are_reproducible_and_differ_by_seed():
    indices, lengths = list(range(40)), list(range(40))
    first = [pick_examples(indices, lengths, 4, 1, step) for step in range(10)]
    assert first == [pick_examples(indices, lengths, 4, 1, step) for step in range(10)]
    assert first != [pick_examples(indices, lengths, 4, 2, step) for step in range(10)]


def test_anchors_are_answer_positions_with_a_successor():
    example = Example("a", "s", list(range(12)), 5, finished=True)
    generator = torch.Generator().manual_seed(0)
    anchors = draw_anchors(example, 6, generator)
    assert anchors.tolist() == [5, 6, 7, 8, 9, 10]
    repeated = draw_anchors(example, 9, generator)
    assert len(repeated) == 9
    assert set(repeated.tolist()) == {5, 6, 7, 8, 9, 10}


def assemble(source, picked, anchors):
    anchors = torch.tensor(anchors)
    return source.assemble(picked, anchors, source.fill(picked, anchors, torch.Generator()))


def test_rows_are_aligned_with_the_state_that_predicts_them(counting_store):
    source = BatchSource(counting_store, torch.tensor([2.0]), block_size=4, inputs=MaskInputs(4, 9))
    batch = assemble(source, [1, 0], [[3, 10], [4, 7]])
    assert batch.inputs[..., 0].tolist() == [[23, 30], [4, 7]]
    assert (batch.inputs[..., 1:] == 9).all()
    # Example 1 starts at row 10 of the store; position p is predicted by the state at p - 1.
    assert batch.tokens[0].tolist() == [[23, 24, 25, 26], [30, 31, -1, -1]]
    assert batch.finals[0, 0, 1:, 0].tolist() == [13, 14, 15]
    assert batch.finals[1, 1, 1:3, 0].tolist() == [7, 8]
    # Open-ended answers know the law after their last token, finished ones do not.
    assert batch.supervised[0, 1].tolist() == [False, True, True, False]
    assert batch.supervised[1, 1].tolist() == [False, True, True, False]
    assert batch.supervised[1, 0].tolist() == [False, True, True, True]


def test_context_is_scaled_and_padded(counting_store):
    source = BatchSource(counting_store, torch.tensor([2.0]), block_size=4, inputs=MaskInputs(4, 9))
    batch = assemble(source, [0, 2], [[4, 8], [5, 5]])
    assert batch.taps.shape == (2, 8, 1)
    assert batch.taps[0, :, 0].tolist() == [i / 2 for i in range(8)]
    assert batch.taps[1, :, 0].tolist() == [*(i / 2 for i in range(22, 27)), 0, 0, 0]


def test_sampling_is_a_function_of_seed_and_step(counting_store):
    source = BatchSource(counting_store, torch.tensor([1.0]), block_size=4, inputs=MaskInputs(4, 9))
    one, two = source.sample([0, 1], 3, 0, 5), source.sample([0, 1], 3, 0, 5)
    assert torch.equal(one.anchors, two.anchors)
    others = [source.sample([0, 1], 3, 0, step).anchors for step in range(6, 12)]
    assert any(not torch.equal(one.anchors, other) for other in others)


def test_shares_of_processes_make_up_the_batch(counting_store):
    inputs = TokenInputs(4, shift=True)
    source = BatchSource(counting_store, torch.tensor([1.0]), block_size=4, inputs=inputs)
    whole = source.sample([0, 1, 2], 3, 0, 5)
    shares = [source.sample([0, 1, 2], 3, 0, 5, slice(rank, None, 2)) for rank in range(2)]
    for name in ("anchors", "inputs", "tokens", "finals", "supervised"):
        expected = getattr(whole, name)
        assert torch.equal(getattr(shares[0], name), expected[[0, 2]])
        assert torch.equal(getattr(shares[1], name), expected[[1]])
