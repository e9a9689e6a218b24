"""What a draft block may see: one definition, used dense by SDPA on CPU and as a BlockMask by FlexAttention.

Keys are the concatenation [context of length T, block 0, block 1, …]; queries are [block 0, block 1, …].
A block at anchor a sees the context strictly below a, and itself whole; no other block (arXiv 2602.06036,
section 4). Visibility goes by the anchor's position, never by the block's index: with overlapping blocks the
index would show a block the target's states of tokens that it has to predict.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def block_visibility(anchors: Tensor, context_length: int, block_size: int) -> MaskFunction:
    """The mask function (batch, head, query, key) → visible, of `anchors` [B, N] int64.

    A padding block carries anchor 0: it sees no context, and itself, so that no row of the softmax is empty.
    """

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        block = query // block_size
        in_context = key < context_length
        before_anchor = key < anchors[batch, block]
        same_block = (key - context_length) // block_size == block
        return (in_context & before_anchor) | (~in_context & same_block)

    return visible


def dense_mask(anchors: Tensor, context_length: int, block_size: int) -> Tensor:
    """The mask as booleans [B, 1, N·block_size, T + N·block_size], for scaled_dot_product_attention."""
    batch, blocks = anchors.shape
    queries = blocks * block_size
    index = torch.arange(context_length + queries, device=anchors.device)
    return block_visibility(anchors, context_length, block_size)(
        torch.arange(batch, device=anchors.device)[:, None, None, None],
        torch.zeros((), dtype=torch.long, device=anchors.device),
        index[:queries, None],
        index[None, :],
    )


def flex_mask(anchors: Tensor, context_length: int, block_size: int) -> BlockMask:
    """The same mask for FlexAttention, which skips the tiles that nobody sees."""
    batch, blocks = anchors.shape
    queries = blocks * block_size
    return create_block_mask(
        block_visibility(anchors, context_length, block_size),
        batch,
        None,
        queries,
        context_length + queries,
        device=str(anchors.device),
    )
