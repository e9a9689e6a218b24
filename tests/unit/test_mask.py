"""The mask: what a block sees, in words, and the two forms of it against each other."""

import itertools
import warnings

import pytest
import torch
from dflash_trainer.mask import FULL, Visibility, block_visibility, dense_mask, flex_mask
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

BLOCK = 4


def visible_positions(anchors: list[int], context_length: int, query: int) -> set[int]:
    mask = dense_mask(torch.tensor([anchors]), context_length, BLOCK)
    assert mask.shape == (1, 1, len(anchors) * BLOCK, context_length + len(anchors) * BLOCK)
    return set(mask[0, 0, query].nonzero().flatten().tolist())


def test_a_block_sees_the_context_strictly_below_its_anchor_and_itself() -> None:
    assert visible_positions([3, 7], 10, query=0) == {0, 1, 2} | {10, 11, 12, 13}
    assert visible_positions([3, 7], 10, query=BLOCK) == set(range(7)) | {14, 15, 16, 17}


def test_visibility_goes_by_the_anchor_and_not_by_the_index_of_the_block() -> None:
    overlapping = [8, 2, 3]  # the second block starts before the first and overlaps the third
    for index, anchor in enumerate(overlapping):
        for query in range(index * BLOCK, (index + 1) * BLOCK):
            seen = visible_positions(overlapping, 12, query)
            assert {p for p in seen if p < 12} == set(range(anchor))
            assert {p - 12 for p in seen if p >= 12} == set(range(index * BLOCK, (index + 1) * BLOCK))


def test_no_row_is_empty_even_of_a_padding_block_so_attention_has_no_nan() -> None:
    mask = dense_mask(torch.tensor([[5, 0], [0, 0]]), 6, BLOCK)
    assert mask.any(-1).all()
    q, k = torch.randn(2, 1, 8, 16), torch.randn(2, 1, 14, 16)
    assert torch.nn.functional.scaled_dot_product_attention(q, k, k, attn_mask=mask).isfinite().all()


def test_the_rows_of_a_batch_have_their_own_anchors() -> None:
    mask = dense_mask(torch.tensor([[1], [3]]), 4, BLOCK)
    assert mask[0, 0, 0, :4].tolist() == [True, False, False, False]
    assert mask[1, 0, 0, :4].tolist() == [True, True, True, False]


def test_a_sliding_layer_sees_its_window_and_nothing_later_in_the_block() -> None:
    anchor, length = 7, 12
    for causal, window in ((True, 5), (False, 3), (True, 1), (False, 100), (True, 0)):
        mask = dense_mask(torch.tensor([[2, anchor]]), length, BLOCK, Visibility(causal, window))
        for i in range(BLOCK):
            position = anchor + i
            near = [p for p in range(anchor + BLOCK) if not window or abs(position - p) < window]
            expected = {p for p in near if p < anchor} | {
                length + BLOCK + p - anchor for p in near if p >= anchor and (not causal or p <= position)
            }
            assert set(mask[0, 0, BLOCK + i].nonzero().flatten().tolist()) == expected
    assert mask.any(-1).all()


def by_torch(anchors: torch.Tensor, context_length: int, block_size: int, sight: Visibility) -> BlockMask:
    """What torch makes of the mask by forming it whole."""
    queries = anchors.shape[1] * block_size
    visible = block_visibility(anchors, context_length, block_size, sight)
    return create_block_mask(visible, len(anchors), None, queries, context_length + queries, device="cpu")


def tiles(mask: BlockMask) -> tuple[list[list[set[int]]], list[list[set[int]]]]:
    """Of each row of the batch and of each row of tiles: those seen in part, and those seen whole."""

    def listed(counts: torch.Tensor, indices: torch.Tensor) -> list[list[set[int]]]:
        return [
            [{*index[:count].tolist()} for count, index in zip(*rows, strict=True)]
            for rows in zip(counts[:, 0], indices[:, 0], strict=True)
        ]

    assert mask.full_kv_num_blocks is not None
    assert mask.full_kv_indices is not None
    return listed(mask.kv_num_blocks, mask.kv_indices), listed(mask.full_kv_num_blocks, mask.full_kv_indices)


@settings(max_examples=100)
@given(st.data())
def test_flex_attention_gets_the_tiles_that_torch_finds_by_forming_the_whole_mask(data: st.DataObject) -> None:
    context_length = data.draw(st.integers(1, 700), "context")
    block_size = data.draw(st.sampled_from([1, 3, 4, 8, 16, 32]), "block")
    blocks = data.draw(st.integers(1, 40), "blocks")
    anchor = st.integers(0, context_length - 1)
    rows = data.draw(
        st.lists(st.lists(anchor, min_size=blocks, max_size=blocks), min_size=1, max_size=3), "anchors"
    )
    padded = data.draw(st.integers(0, blocks), "padding")
    anchors = torch.tensor([[*sorted(row[padded:]), *[0] * padded] for row in rows])
    sight = data.draw(st.sampled_from([FULL, FULL, Visibility(True, 200), Visibility(False, 60)]), "sight")
    ours, theirs = (make(anchors, context_length, block_size, sight) for make in (flex_mask, by_torch))
    (partial, whole), (least, whole_or_not) = tiles(ours), tiles(theirs)
    for b, q in itertools.product(range(len(rows)), range(len(partial[0]))):
        assert partial[b][q] | whole[b][q] >= least[b][q] | whole_or_not[b][q]
        if sight == FULL:  # between the windows of a tile's queries there may be some that nobody sees
            assert partial[b][q] | whole[b][q] == least[b][q] | whole_or_not[b][q]
        assert whole[b][q] <= whole_or_not[b][q]  # a tile of keys of one block may be found whole by looking at it
        assert not partial[b][q] & whole[b][q]
    assert ours.seq_lengths == theirs.seq_lengths
    q_ours, q_theirs = (
        m.q_num_blocks + (0 if m.full_q_num_blocks is None else m.full_q_num_blocks) for m in (ours, theirs)
    )
    if sight == FULL:
        assert torch.equal(q_ours, q_theirs)


@pytest.mark.parametrize("sight", [FULL, Visibility(True, 150), Visibility(False, 20)])
@pytest.mark.parametrize(("context_length", "block_size"), [(128, 4), (200, 4), (300, 7), (513, 16)])
def test_flex_attention_gives_what_dense_attention_gives(
    context_length: int, block_size: int, sight: Visibility
) -> None:
    torch.manual_seed(0)
    anchors = torch.randint(1, context_length, (2, 40)).sort().values
    anchors[1, 30:] = 0
    queries = 40 * block_size
    q, k, v = (torch.randn(2, 2, n, 16) for n in (queries, *[context_length + queries] * 2))
    mask = flex_mask(anchors, context_length, block_size, sight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is slow when not compiled
        ours = flex_attention(q, k, v, block_mask=mask)
    dense = dense_mask(anchors, context_length, block_size, sight)
    theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=dense)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
