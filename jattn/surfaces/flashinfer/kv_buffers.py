"""pymllm's view of a KVPool: a layer's keys and values by token slot."""

import dataclasses

from jaxtyping import Array, Float, Int

from jattn.arguments import in_words, instance
from jattn.kv_pool import KVPool
from jattn.pytree import pytree, static


@pytree()
class KVBuffers:
    """A pool with pymllm's methods. Donate it to a step and keep what the step returns.

    Attributes:
        pool: Any page size and layout.
        k_scale, v_scale: What is stored is key / k_scale, for all heads or for each; None is 1.
        group: Which group of the pool.
    """

    pool: KVPool
    k_scale: Float[Array, "..."] | None = None
    v_scale: Float[Array, "..."] | None = None
    group: int = static(default=0)

    def get_kv_buffer(
        self, layer_id: Int[Array, ""] | int
    ) -> tuple[Float[Array, "buf_len K H"], Float[Array, "buf_len K Hv"]]:
        """A layer's keys and values, as stored. Outside jit this copies them.

        Raises:
            ValueError: There is no such layer.
        """
        instance("pool", self.pool, KVPool)
        return self.pool.get_kv_buffer(layer_id, self.group)

    def set_kv_buffer(
        self,
        layer_id: Int[Array, ""] | int,
        indices: Int[Array, " T"],
        k: Float[Array, "T K H"],
        v: Float[Array, "T K Hv"],
    ) -> "KVBuffers":
        """The view with a layer's new rows at slots `indices`; rows with a slot out of range go nowhere.

        Raises:
            ValueError: A shape or dtype is wrong.
        """
        instance("pool", self.pool, KVPool)
        with in_words(slots="indices", layer_index="layer_id"):
            pool = self.pool.write(self.group, layer_id, indices, k, v, self.k_scale, self.v_scale)
        return dataclasses.replace(self, pool=pool)
