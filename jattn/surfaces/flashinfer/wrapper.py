"""What FlashInfer's wrappers share: the plan they keep, and `run` over keys and values, paged or not."""

import functools
from typing import Any

import jax
from jaxtyping import Array, Float, Int

from jattn.arguments import array, instance, scale_arrays, shown
from jattn.surfaces.flashinfer.cache import PagedCache, pages_of
from jattn.surfaces.flashinfer.layer_facts import page_layout
from jattn.surfaces.flashinfer.page_lists import Bounds
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan
from jattn.surfaces.flashinfer.planning import check_same_kind, current_plan
from jattn_kernels import lse_to_base2

AttentionResult = Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]


class Wrapper:
    """A wrapper's layout, buffers and last plan.

    Args:
        kv_layout: "NHD" or "HND".
        implementation: Which kernels to use; None lets dispatch choose.
    """

    def __init__(self, kv_layout: str, implementation: str | None):
        if implementation is not None:
            instance("implementation", implementation, str)
        self._kv_layout = page_layout(kv_layout)
        self._bounds: Bounds | None = None  # of buffers that every plan has the shapes of
        self._implementation = implementation
        self._planned: Any = None
        self._num_needed = 0  # pages, or keys that are not paged, which the kept plan's batch has at most

    @property
    def is_cuda_graph_enabled(self) -> bool:
        """Whether all plans share one shape."""
        return self._bounds is not None

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, and does nothing: there is no workspace."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer, which deprecates it."""

    def _kept[Plan](self, planned: Plan, num_needed: int) -> Plan:
        """The plan, which is now the one for calls of `run` outside jit.

        Args:
            num_needed: Pages, or keys that are not paged, which the batch reads in.

        Raises:
            ValueError: All plans share one shape, and this one differs from the first.
        """
        if self.is_cuda_graph_enabled:
            check_same_kind(self._planned, planned)
        self._planned, self._num_needed = planned, num_needed
        return planned

    def _check_room(self, name: str, size: int, of_what: str) -> None:
        """Checks that the kept plan's batch lies in what `run` is given; a plan given to jit has lengths as data."""
        if size < self._num_needed:
            raise ValueError(f"`{name}` must have the {self._num_needed} {of_what} of the plan. Got {size}.")


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
        out: Any = None,
        lse: Any = None,
        layer_index: Int[Array, ""] | int | None = None,
        planned: PagedPlan | None = None,
    ) -> AttentionResult:
        """Attention of the planned batch, and its base-2 lse if asked for; 0 and -inf for a query that sees no key.

        Args:
            paged_kv_cache: A pair of 4-D arrays, or one 5-D array whose axis after the pages' has keys and values;
                those of NumPy are copied to the device.
            q_scale, k_scale, v_scale: Factors of fp8 queries, keys and values; numbers, or arrays of one a KV head.
            out, lse: JAX arrays of the results' shapes and dtypes. They are not written, which no JAX array can be.
            layer_index: Which layer of a cache with a leading layer axis; may be traced.
            planned: What `plan` returned; the last plan if None, outside jit only.

        Raises:
            ValueError: There is no plan, or the arrays are not what it is for.
        """
        plan = current_plan(planned, self._planned, q, PagedPlan)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        found = self._attend(q, paged_kv_cache, plan, kept=planned is None, layer_index=layer_index, **scales)
        return answer(found, return_lse, out=out, lse=lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _attend(self, q, paged_kv_cache, plan: PagedPlan, *, kept: bool, layer_index, **scales: Any):
        """Output and natural-log lse.

        Args:
            kept: Whether the plan is of the batch that the wrapper keeps.
        """
        k_pages, _ = pages_of(paged_kv_cache)
        if kept and k_pages.ndim > 3:
            self._check_room("paged_kv_cache", k_pages.shape[0 if layer_index is None else 1], "pages")
        return plan.attend(q, paged_kv_cache, layer_index=layer_index, **scale_arrays(**scales))


class RaggedWrapper(Wrapper):
    """A wrapper over keys and values that are not paged."""

    def run(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "..."],
        v: Float[Array, "..."],
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        return_lse: bool = False,
        *,
        out: Any = None,
        lse: Any = None,
        planned: RaggedPlan | None = None,
    ) -> AttentionResult:
        """Attention of the planned batch, and its base-2 lse if asked for; 0 and -inf for a query that sees no key.

        Args:
            k, v: Keys and values, sequence by sequence; at least kv_indptr[-1] of each.
            Others: As in `PagedWrapper.run`.

        Raises:
            ValueError: There is no plan, or the arrays are not what it is for.
        """
        plan = current_plan(planned, self._planned, q, RaggedPlan)
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        return answer(self._attend(q, k, v, plan, kept=planned is None, **scales), return_lse, out=out, lse=lse)

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _attend(self, q, k, v, plan: RaggedPlan, *, kept: bool, **scales: Any):
        """As `PagedWrapper._attend`."""
        axes = ("S", "K", "H") if self._kv_layout == "NHD" else ("K", "S", "H")
        k, v = array("k", k, *axes), array("v", v, *axes)
        if self._kv_layout == "HND":
            k, v = k.swapaxes(0, 1), v.swapaxes(0, 1)
        if kept:
            self._check_room("k", k.shape[0], "keys")
        return plan.attend(q, k, v, **scale_arrays(**scales))


def answer(found: tuple[Any, Any], return_lse: bool, **room: Any) -> AttentionResult:
    """The output, and the base-2 lse if asked for, of an output and natural-log lse.

    Args:
        room: What FlashInfer would write into, `out` and `lse`; None where nothing is given.

    Raises:
        ValueError: An array to write into is none of JAX, or has another shape or dtype.
    """
    results = {"out": found[0], "lse": lse_to_base2(found[1])}
    for name, given in room.items():
        result = results[name]
        if given is not None and not (
            isinstance(given, jax.Array) and given.shape == result.shape and given.dtype == result.dtype
        ):
            raise ValueError(
                f"`{name}` must be None, or a JAX array {list(result.shape)} of {result.dtype}; it is not written, and "
                f"what is returned is new. Got {shown(name, given)}."
            )
    return (results["out"], results["lse"]) if return_lse else results["out"]
