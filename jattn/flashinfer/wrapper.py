"""What FlashInfer's wrappers share: the plan they keep, and `run` over paged keys and values."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from jattn.flashinfer.layer_facts import page_layout, scale_array
from jattn.flashinfer.page_lists import Bounds
from jattn.flashinfer.plan import PagedCache, PagedPlan
from jattn.flashinfer.planning import check_same_kind, current_plan
from jattn_kernels import lse_to_base2

AttentionResult = Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]


class Wrapper:
    """A wrapper's layout, buffers and last plan.

    Args:
        kv_layout: "NHD" or "HND".
        implementation: Which kernels to use; None lets dispatch choose.
    """

    def __init__(self, kv_layout: str, implementation: str | None):
        self._kv_layout = page_layout(kv_layout)
        self._bounds: Bounds | None = None  # of buffers that every plan has the shapes of
        self._implementation = implementation
        self._planned: Any = None

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether all plans share one shape."""
        return self._bounds is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, and does nothing: there is no workspace."""

    def _kept[Plan](self, planned: Plan) -> Plan:
        """The plan, which is now the one for calls of `run` outside jit.

        Raises:
            ValueError: All plans share one shape, and this one differs from the first.
        """
        if self.is_cuda_graph_enabled:
            check_same_kind(self._planned, planned)
        self._planned = planned
        return planned


class PagedWrapper(Wrapper):
    """A wrapper over paged keys and values."""

    def run(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse: bool = False,
        *,
        layer_index: Int[Array, ""] | int | None = None,
        planned: PagedPlan | None = None,
    ) -> AttentionResult:
        """Attention of the planned batch, and its base-2 lse if asked for; 0 and -inf for a query that sees no key.

        Args:
            paged_kv_cache: A pair of 4-D arrays, or one 5-D array whose axis after the pages' has keys and values.
            q_scale, k_scale, v_scale: Factors of fp8 queries, keys and values; numbers, or arrays of one a KV head.
            layer_index: Which layer of a cache with a leading layer axis; may be traced.
            planned: What `plan` returned; the last plan if None, outside jit only.

        Raises:
            ValueError: There is no plan, or the arrays are not what it is for.
        """
        plan = current_plan(planned, self._planned, q)
        out, lse = plan.attend(
            q,
            paged_kv_cache,
            layer_index=layer_index,
            q_scale=scale_array(q_scale),
            k_scale=scale_array(k_scale),
            v_scale=scale_array(v_scale),
        )
        return (out, lse_to_base2(lse)) if return_lse else out

    run_return_lse = functools.partialmethod(run, return_lse=True)
