"""FlashInfer's deprecated `forward`: `run` with a layer's facts as its own arguments, in place of the plan's."""

import functools
from typing import Any

from jaxtyping import Array, Float, Int

from jattn.surfaces.flashinfer.cache import PagedCache
from jattn.surfaces.flashinfer.layer_facts import alibi_slopes, attention_spec
from jattn.surfaces.flashinfer.plan import PagedPlan, RaggedPlan
from jattn.surfaces.flashinfer.planning import current_plan
from jattn.surfaces.flashinfer.wrapper import AttentionResult, PagedWrapper, RaggedWrapper, answer


class DecodeForward(PagedWrapper):
    """`forward` of the decode wrappers."""

    def forward(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        pos_encoding_mode: str = "NONE",
        q_scale: Any = None,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
        layer_index: Int[Array, ""] | int | None = None,
        planned: PagedPlan | None = None,
    ) -> AttentionResult:
        """As `run`, but for a layer of these facts, their defaults too, whatever the plan says of them.

        Raises:
            ValueError: As in `plan` and `run`.
        """
        plan = with_facts(
            current_plan(planned, self._planned, q, PagedPlan),
            causal=True,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        scales = {"q_scale": q_scale, "k_scale": k_scale, "v_scale": v_scale}
        found = self._attend(q, paged_kv_cache, plan, kept=planned is None, layer_index=layer_index, **scales)
        return answer(found, return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class PagedPrefillForward(PagedWrapper):
    """`forward` of the prefill wrapper over paged keys."""

    def forward(
        self,
        q: Float[Array, "T N H"],
        paged_kv_cache: PagedCache,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: Any = None,
        v_scale: Any = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
        layer_index: Int[Array, ""] | int | None = None,
        planned: PagedPlan | None = None,
    ) -> AttentionResult:
        """As `DecodeForward.forward`; a mask of the plan stays, and still replaces the causal rule.

        Raises:
            ValueError: As in `plan` and `run`.
        """
        plan = with_facts(
            current_plan(planned, self._planned, q, PagedPlan),
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        scales = {"k_scale": k_scale, "v_scale": v_scale}
        found = self._attend(q, paged_kv_cache, plan, kept=planned is None, layer_index=layer_index, **scales)
        return answer(found, return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


class RaggedForward(RaggedWrapper):
    """`forward` of the prefill wrapper over keys that are not paged."""

    def forward(
        self,
        q: Float[Array, "T N H"],
        k: Float[Array, "..."],
        v: Float[Array, "..."],
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        return_lse: bool = False,
        planned: RaggedPlan | None = None,
    ) -> AttentionResult:
        """As `PagedPrefillForward.forward`.

        Raises:
            ValueError: As in `plan` and `run`.
        """
        plan = with_facts(
            current_plan(planned, self._planned, q, RaggedPlan),
            causal=causal,
            pos_encoding_mode=pos_encoding_mode,
            window_left=window_left,
            logits_soft_cap=logits_soft_cap,
            sm_scale=sm_scale,
            rope_scale=rope_scale,
            rope_theta=rope_theta,
        )
        return answer(self._attend(q, k, v, plan, kept=planned is None), return_lse)

    forward_return_lse = functools.partialmethod(forward, return_lse=True)


def with_facts[Plan: PagedPlan | RaggedPlan](plan: Plan, *, pos_encoding_mode: str, **facts: Any) -> Plan:
    """The plan with its own sizes and layout, and these facts."""
    spec = attention_spec(
        num_qo_heads=plan.spec.num_q_heads,
        num_kv_heads=plan.spec.num_kv_heads,
        head_dim=plan.spec.head_dim,
        head_dim_vo=plan.spec.v_head_dim,
        kv_layout=plan.spec.page_layout,
        pos_encoding_mode=pos_encoding_mode,
        **facts,
    )
    return plan.with_facts(spec, alibi_slopes(pos_encoding_mode, spec.num_q_heads))
