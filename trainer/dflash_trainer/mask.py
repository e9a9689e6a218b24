"""What a draft block may see: one definition, used dense by SDPA on CPU and as a BlockMask by FlexAttention.

Keys are the concatenation [context of length T, block 0, block 1, …]; queries are [block 0, block 1, …].
A block at anchor a sees the context strictly below a, and itself whole; no other block (arXiv 2602.06036,
section 4). Visibility goes by the anchor's position, never by the block's index: with overlapping blocks the
index would show a block the target's states of tokens that it has to predict. A layer with a sliding window sees
less; servers run it causally inside the block too, which full layers are not.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # queries and keys

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Visibility:
    """What a layer's queries see of what their anchor lets them see."""

    causal: bool = False  # inside the block nothing that comes later
    window: int = 0  # only what is less than so many positions away; 0: whatever is


FULL = Visibility()


def block_visibility(
    anchors: Tensor, context_length: int, block_size: int, sight: Visibility = FULL
) -> MaskFunction:
    """The mask function (batch, head, query, key) → visible, of `anchors` [B, N] int64.

    A padding block carries anchor 0: it sees no context, and itself, so that no row of the softmax is empty.
    """

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        block = query // block_size
        in_context = key < context_length
        anchor = anchors[batch, block]
        before_anchor = key < anchor
        same_block = (key - context_length) // block_size == block
        if sight.causal or sight.window:
            ahead = (key - context_length) % block_size - query % block_size  # inside the same block
            if sight.causal:
                same_block = same_block & (ahead <= 0)
            if sight.window:
                before_anchor = before_anchor & (anchor + query % block_size - key < sight.window)
                same_block = same_block & (ahead.abs() < sight.window)
        return (in_context & before_anchor) | (~in_context & same_block)

    return visible


def dense_mask(anchors: Tensor, context_length: int, block_size: int, sight: Visibility = FULL) -> Tensor:
    """The mask as booleans [B, 1, N·block_size, T + N·block_size], for scaled_dot_product_attention."""
    batch, blocks = anchors.shape
    queries = blocks * block_size
    index = torch.arange(context_length + queries, device=anchors.device)
    return block_visibility(anchors, context_length, block_size, sight)(
        torch.arange(batch, device=anchors.device)[:, None, None, None],
        torch.zeros((), dtype=torch.long, device=anchors.device),
        index[:queries, None],
        index[None, :],
    )


def flex_mask(anchors: Tensor, context_length: int, block_size: int, sight: Visibility = FULL) -> BlockMask:
    """The same mask for FlexAttention, which skips tiles that nobody sees and does not look into those all see.

    Made tile by tile from the least and the greatest anchor of a tile's queries: create_block_mask() would form the
    whole grid of queries and keys first, 8192 × 16384 a sequence. Nothing here waits for the GPU.
    """
    queries = anchors.shape[1] * block_size
    keys = context_length + queries
    rows, columns = _ceil(queries, TILE), _ceil(keys, TILE)
    device = anchors.device
    query = torch.arange(rows * TILE, device=device).clamp(max=queries - 1).view(rows, TILE)
    of_query = anchors[:, query // block_size]  # [B, rows, TILE]
    least, greatest = of_query.amin(-1)[..., None], of_query.amax(-1)[..., None]  # [B, rows, 1]
    begin = torch.arange(columns, device=device) * TILE
    end = begin + TILE
    whole = (torch.arange(1, rows + 1, device=device) * TILE <= queries)[:, None]
    seen_by_all = (end <= least) & (end <= context_length) & whole
    in_sight: Tensor | bool = True
    if sight.window:
        first = of_query + query % block_size - sight.window + 1  # the first position in a query's window
        seen_by_all &= begin >= first.amax(-1)[..., None]
        in_sight = end > first.amin(-1)[..., None]
    own_begin = context_length + query[:, :1] // block_size * block_size  # [rows, 1]
    own_end = context_length + (query[:, -1:] // block_size + 1) * block_size
    in_context = (begin < greatest) & (begin < context_length) & in_sight
    seen_by_some = in_context | ((begin < own_end) & (end > own_begin))
    partial = seen_by_some & ~seen_by_all
    return BlockMask.from_kv_blocks(
        *_listed(partial),
        *_listed(seen_by_all),
        BLOCK_SIZE=TILE,
        mask_mod=block_visibility(anchors, context_length, block_size, sight),
        seq_lengths=(queries, keys),
    )


def _ceil(length: int, tile: int) -> int:
    return -(-length // tile)


def _listed(tiles: Tensor) -> tuple[Tensor, Tensor]:
    """How many of each row are marked in [B, rows, columns], and an order with those first; one for all heads."""
    order = tiles.to(torch.int8).sort(dim=-1, descending=True, stable=True).indices
    return tiles.sum(-1, dtype=torch.int32)[:, None], order.to(torch.int32)[:, None]
