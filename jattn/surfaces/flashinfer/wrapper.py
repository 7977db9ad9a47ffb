"""What FlashInfer's wrappers share: the plan they keep, and `run` over keys and values, paged or not.

Their methods have many arguments, which go on by their names: `given` are those of a call, self too, as `locals()`.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from jattn.arguments import array, instance, scale_arrays, shown
from jattn.surfaces.flashinfer.buffers import Bounds
from jattn.surfaces.flashinfer.cache import PagedCache, pages_of
from jattn.surfaces.flashinfer.layer_facts import data_types, layer_facts, page_layout
from jattn.surfaces.flashinfer.page_lists import PageLists, padded, page_rows, room
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan
from jattn_kernels import lse_to_base2

AttentionResult = Float[Array, "..."] | tuple[Float[Array, "..."], Float[Array, "..."]]
_scheduled = jax.jit(PagedPlan.scheduled)


class WithoutWorkspace:
    """The methods of wrappers that do nothing here."""

    def reset_workspace_buffer(self, float_workspace_buffer: Any, int_workspace_buffer: Any) -> None:
        """Accepted, and does nothing: there is no workspace."""

    def end_forward(self) -> None:
        """Does nothing, as in FlashInfer, which deprecates it."""


class Wrapper(WithoutWorkspace):
    """A wrapper's layout, buffers and last plan.

    Args:
        kv_layout: "NHD" or "HND".
        implementation: Which kernels to use; None lets dispatch choose.
    """

    _kind: type[PagedPlan | RaggedPlan]

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

    def _facts(self, given: dict[str, Any]) -> dict[str, Any]:
        """The static facts of a plan, and its slopes, from the arguments of `plan`."""
        types = data_types(given["q_data_type"], given["kv_data_type"], given.get("data_type"))
        return layer_facts(given | {"kv_layout": self._kv_layout}) | types | {"implementation": self._implementation}

    def _kept[Plan: (PagedPlan, RaggedPlan)](self, planned: Plan, num_needed: int) -> Plan:
        """The plan, which is now the one for calls of `run` outside jit.

        Args:
            num_needed: Pages, or keys that are not paged, which the batch reads in.

        Raises:
            ValueError: All plans share one shape, and this one differs from the first.
        """
        before = self._planned
        if self.is_cuda_graph_enabled and before and jax.tree.structure(before) != jax.tree.structure(planned):
            first, new = _named_facts(before), _named_facts(planned)
            others = ", ".join(f"{name}={new[name]} after {first[name]}" for name in new if new[name] != first[name])
            raise ValueError(
                "With CUDA graphs every plan must have the static facts of the first: heads, sizes, dtypes, window, "
                f"cap, scale, position encoding, and a mask or none. Got {others}."
            )
        self._planned, self._num_needed = planned, num_needed
        return planned

    def _current(self, planned: Any, q: Any) -> Any:
        """The plan that a call is to use: the one given, or the one kept.

        Raises:
            ValueError: There is none of this kind, or the kept one would become a constant of what is being compiled.
        """
        if planned is not None:
            if not isinstance(planned, self._kind):
                got = type(planned).__name__
                raise ValueError(f"`planned` must be what this wrapper's `plan` returned. Got {got}.")
            return planned
        if self._planned is None:
            raise ValueError("`plan` must be called before `run`, or its result given as `planned`.")
        if isinstance(q, Tracer):
            raise ValueError("`planned` must be given inside jit: the kept plan would become a constant of the step.")
        return self._planned

    def _run(self, given: dict[str, Any]) -> AttentionResult:
        """What `run` answers, and `forward`, whose arguments say the facts of the layer in place of the plan's.

        Raises:
            ValueError: As there.
        """
        plan = self._current(given["planned"], given["q"])
        if "pos_encoding_mode" in given:
            spec = plan.spec
            sizes = {"num_qo_heads": spec.num_q_heads, "num_kv_heads": spec.num_kv_heads, "head_dim": spec.head_dim}
            sizes |= {"head_dim_vo": spec.v_head_dim, "kv_layout": spec.page_layout}
            plan = plan.with_facts(**layer_facts(sizes | given))
        scales = scale_arrays(**{name: given.get(name) for name in ("q_scale", "k_scale", "v_scale")})
        out, lse = self._attend(plan, given, scales)
        results = {"out": out, "lse": lse_to_base2(lse)}
        for name, result in results.items():
            space = given.get(name)
            if space is not None and not (
                isinstance(space, jax.Array) and space.shape == result.shape and space.dtype == result.dtype
            ):
                raise ValueError(
                    f"`{name}` must be None, or a JAX array {list(result.shape)} of {result.dtype}; it is not written, "
                    f"and what is returned is new. Got {shown(name, space)}."
                )
        return (results["out"], results["lse"]) if given["return_lse"] else results["out"]

    def _attend(self, plan: Any, given: dict[str, Any], scales: dict[str, Any]) -> tuple[Any, Any]:
        """Output and natural-log lse of the queries that are `given`."""
        raise NotImplementedError

    def _check_room(self, given: dict[str, Any], name: str, size: int, of_what: str) -> None:
        """Checks that the kept plan's batch lies in what `run` is given; a plan given to jit has lengths as data."""
        if given["planned"] is None and size < self._num_needed:
            raise ValueError(f"`{name}` must have the {self._num_needed} {of_what} of the plan. Got {size}.")


def _named_facts(plan: PagedPlan | RaggedPlan) -> dict[str, Any]:
    """What tells the plans of one wrapper apart, in FlashInfer's words."""
    spec = dataclasses.asdict(plan.spec)
    return {
        "num_qo_heads": spec.pop("num_q_heads"),
        "head_dim_vo": spec.pop("v_head_dim"),
        **spec,
        "page_size": getattr(plan, "page_size", None),
        "q_data_type": plan.q_dtype,
        "kv_data_type": plan.kv_dtype,
        "custom_mask": None if plan.custom_mask is None else "a mask",
        "alibi_slopes": None if plan.alibi_slopes is None else "slopes",
    }


class PagedWrapper(Wrapper):
    """A wrapper over paged keys and values."""

    _kind = PagedPlan

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
        return self._run(locals())

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _keep_lists(self, lists: PageLists, **facts: Any) -> PagedPlan:
        """The plan of page lists, in arrays that have room for the bounds, or for about as much as there is."""
        most = max(1, int((lists.indptr[1:] - lists.indptr[:-1]).max()))
        bounds = self._bounds
        num_pages, max_pages = (room(len(lists.indices)), room(most)) if bounds is None else (bounds.num_pages,) * 2
        indptr, indices = jnp.asarray(lists.indptr), jnp.asarray(padded(lists.indices, num_pages, 0))
        table, lens = page_rows(indptr, indices, max_pages=max_pages), jnp.asarray(lists.seq_lens)
        return self._kept(_scheduled(PagedPlan(page_table=table, seq_lens=lens, **facts)), lists.num_pages)

    def _attend(self, plan: PagedPlan, given: dict[str, Any], scales: dict[str, Any]) -> tuple[Any, Any]:
        cache, layer_index = given["paged_kv_cache"], given["layer_index"]
        k_pages, _ = pages_of(cache)
        if k_pages.ndim > 3:
            self._check_room(given, "paged_kv_cache", k_pages.shape[0 if layer_index is None else 1], "pages")
        return plan.attend(given["q"], cache, layer_index=layer_index, **scales)


class RaggedWrapper(Wrapper):
    """A wrapper over keys and values that are not paged."""

    _kind = RaggedPlan

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
        return self._run(locals())

    run_return_lse = functools.partialmethod(run, return_lse=True)

    def _attend(self, plan: RaggedPlan, given: dict[str, Any], scales: dict[str, Any]) -> tuple[Any, Any]:
        k, v = keys_and_values(given["k"], given["v"], self._kv_layout)
        self._check_room(given, "k", k.shape[0], "keys")
        return plan.attend(given["q"], k, v, **scales)


def keys_and_values(k: Any, v: Any, kv_layout: str) -> tuple[Float[Array, "S K H"], Float[Array, "S K Hv"]]:
    """Keys and values that are not paged, whatever their layout.

    Raises:
        ValueError: One is no array of three axes.
    """
    axes = ("S", "K", "H") if page_layout(kv_layout) == "NHD" else ("K", "S", "H")
    k, v = array("k", k, *axes), array("v", v, *axes)
    return (k, v) if axes[0] == "S" else (k.swapaxes(0, 1), v.swapaxes(0, 1))
