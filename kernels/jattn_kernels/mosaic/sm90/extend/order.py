"""The order of extend's work tiles: how many key heads are done at a time.

All heads of a query block follow each other, the longest query blocks first: the last work tiles are short then, and
each block of the grid gets as much to do as the others. The blocks read the keys of all heads at the same time. Of few
key heads each tile of keys is read by many blocks at once; of many by one or two, and again for every query block if
the keys of all heads are more than the L2 cache holds. The 671 MB of 8,192 tokens of DeepSeek-V3, whose prompts have
128 key heads, would be read 32 times, which takes as long as the products.

There all query blocks of a few key heads come before the next heads. If each of these groups began with its longest
query block, short and long work tiles would meet in one round, and some blocks of the grid would have more to do than
others. So every second group goes from its shortest query block to its longest one, and the last group to its
shortest: lengths never jump. What a work tile computes does not depend on when it is done.
"""

import jax.numpy as jnp
from jaxtyping import Array, Int

_ENOUGH_READERS = 4  # blocks that read a tile of keys at the same time: a quarter of what the memory could give
_LEAST_ROUNDS = 7.0  # of a group: with 3.5, shares of uneven prompts are up to a third apart, and even ones 3 % slower


def key_heads_at_once(
    num_kv_heads: int,
    *,
    work_tiles_per_head: int,
    num_seqs: int,
    num_tokens: int,
    block_tokens: int,
    block_kv: int,
    blocks: int,
) -> int:
    """Key heads whose work tiles come before those of the next ones: all of them, or a divisor of their number.

    Args:
        work_tiles_per_head: Of a query block, for each key head.
        num_seqs: How many sequences share `num_tokens` queries.
        block_tokens: Query tokens a query block.
        block_kv: Keys a tile.
        blocks: Of the grid.
    """
    # Query blocks whose last tile of keys is the same follow each other too.
    neighbours = work_tiles_per_head * max(1, block_kv // block_tokens)
    readers = max(neighbours, blocks // (num_seqs * num_kv_heads))
    shared = num_tokens >= 2 * num_seqs * block_tokens  # by query blocks, if all sequences are of one length
    if readers >= _ENOUGH_READERS or not shared:
        return num_kv_heads
    work_tiles = num_tokens // block_tokens * work_tiles_per_head
    divisors = (heads for heads in range(1, num_kv_heads) if num_kv_heads % heads == 0)
    return next((heads for heads in divisors if heads * work_tiles >= _LEAST_ROUNDS * blocks), num_kv_heads)


def by_groups_of_heads(
    num_query_blocks: Int[Array, "1"], *, most: int, head_blocks: int, at_once: int
) -> Int[Array, " tiles"]:
    """Of each work tile in turn query block * head_blocks + block of heads; unused ones come last.

    Args:
        num_query_blocks: How many are used, the longest first.
        most: How many there are.
        head_blocks: Blocks of heads.
        at_once: Blocks of heads of a group.
    """
    turn = jnp.arange(most * head_blocks, dtype=jnp.int32)
    group_size = num_query_blocks * at_once
    group, within = turn // group_size, turn % group_size
    query_block = within // at_once
    backwards = (head_blocks // at_once - 1 - group) % 2 == 1
    query_block = jnp.where(backwards, num_query_blocks - 1 - query_block, query_block)
    tile = query_block * head_blocks + group * at_once + within % at_once
    return jnp.where(turn < num_query_blocks * head_blocks, tile, turn)
