"""Routing: the static facts of a mixture's router."""

import dataclasses
import math
import numbers
from typing import Literal

from jattn_kernels.spec import is_whole

Scoring = Literal["softmax", "sigmoid", "softmax_of_chosen"]
GroupScore = Literal["best", "two_best"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Routing:
    """How a router's logits become each token's experts and their weights; hashable.

    Attributes:
        num_experts: Experts.
        per_token: Experts that each token goes to.
        scoring: What an expert's score is: its part of the softmax over all experts' logits, the sigmoid of its own
            logit, or its logit, and then the weights are a softmax over the chosen experts' logits alone (gpt-oss).
        normalised: Whether the chosen experts' weights are scaled to a sum of 1.
        scaling_factor: On the weights, last of all.
        num_groups: Groups of consecutive experts, equally many in each.
        groups_per_token: Groups that a token's experts are chosen from, the best ones.
        group_score: What makes a group a good one: its best expert's score (DeepSeek-V2's `group_limited_greedy`), or
            the sum of its two best experts' (DeepSeek-V3's `noaux_tc`); in both the bias for the choice counts.
        shared: Experts behind the others, which have no logits: every token goes to them with a weight of 1, and they
            are the first of its choices.

    Raises:
        ValueError: A field contradicts its rule or another field.
    """

    num_experts: int
    per_token: int
    scoring: Scoring = "softmax"
    normalised: bool = False
    scaling_factor: float = 1.0
    num_groups: int = 1
    groups_per_token: int = 1
    group_score: GroupScore = "best"
    shared: int = 0

    def __post_init__(self):
        for name in ("num_experts", "per_token", "num_groups", "groups_per_token"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1. Got {name}={value!r}.")
        if not is_whole(self.shared) or self.shared < 0:
            raise ValueError(f"`shared` must be a whole number of at least 0. Got shared={self.shared!r}.")
        if self.scoring not in ("softmax", "sigmoid", "softmax_of_chosen"):
            raise ValueError(f"`scoring` must be one of softmax, sigmoid, softmax_of_chosen. Got {self.scoring!r}.")
        if self.group_score not in ("best", "two_best"):
            raise ValueError(f"`group_score` must be one of best, two_best. Got {self.group_score!r}.")
        if not isinstance(self.normalised, bool):
            raise ValueError(f"`normalised` must be True or False. Got normalised={self.normalised!r}.")
        if self.normalised and self.scoring == "softmax_of_chosen":
            raise ValueError(
                "`normalised` must be False with 'softmax_of_chosen', whose weights have a sum of 1. Got True."
            )
        factor = self.scaling_factor
        if isinstance(factor, bool) or not isinstance(factor, numbers.Real) or not 0 < factor < math.inf:
            raise ValueError(f"`scaling_factor` must be a finite number above 0. Got scaling_factor={factor!r}.")
        if self.per_token > self.num_experts:
            raise ValueError(f"`per_token` must be at most `num_experts`. Got {self.per_token} of {self.num_experts}.")
        if self.num_experts % self.num_groups:
            raise ValueError(
                f"`num_groups` must divide `num_experts`. Got {self.num_groups} groups of {self.num_experts} experts."
            )
        if self.groups_per_token > self.num_groups:
            raise ValueError(
                f"`groups_per_token` must be at most `num_groups`. Got {self.groups_per_token} of {self.num_groups}."
            )
        if self.per_token > self.groups_per_token * self.group_size:
            raise ValueError(
                "`per_token` must be at most the experts in `groups_per_token` groups. "
                f"Got {self.per_token} of {self.groups_per_token * self.group_size}."
            )
        if self.group_score == "two_best" and self.group_size < 2:
            raise ValueError(
                f"`group_score` may be 'two_best' only with two experts a group. Got {self.num_groups} groups of one."
            )

    @property
    def choices(self) -> int:
        """Experts that each token goes to, shared ones too."""
        return self.shared + self.per_token

    @property
    def all_experts(self) -> int:
        """Experts, shared ones too."""
        return self.num_experts + self.shared

    @property
    def group_size(self) -> int:
        """Experts in each group."""
        return self.num_experts // self.num_groups
