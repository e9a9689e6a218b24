"""The mask: what a block sees, in words, and the two forms of it against each other."""

import pytest
import torch
from dflash_trainer.mask import dense_mask, flex_mask

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


@pytest.mark.parametrize("context_length", [128, 200])
def test_flex_attention_builds_the_same_mask(context_length: int) -> None:
    anchors = torch.randint(1, context_length, (2, 40))
    dense = dense_mask(anchors, context_length, BLOCK)[:, 0]
    blocks = flex_mask(anchors, context_length, BLOCK)
    tiles = blocks.to_dense()[:, 0].bool()
    rows, columns = blocks.BLOCK_SIZE
    padded = torch.zeros(2, tiles.shape[1] * rows, tiles.shape[2] * columns, dtype=torch.bool)
    padded[:, : dense.shape[1], : dense.shape[2]] = dense
    seen = padded.unflatten(1, (-1, rows)).unflatten(3, (-1, columns)).any(4).any(2)
    assert torch.equal(tiles, seen)
