"""LoopState: what the serving loop keeps on the device between launches, one row a request."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from jattn.pytree import pytree
from jattn.serving.steps.logit_rules import LogitRules, TokenHistory, empty_rules
from jattn.serving.steps.sampler import SamplingState

NOT_KNOWN = -1  # in a token's place on record


@pytree(kw_only=True)
class TokenRecord:
    """What drafting must know of each row's text.

    Attributes:
        limits: Tokens that the row may have at most, prompt included.
        ids: The row's tokens so far, by position; NOT_KNOWN where there is none yet, and for those that no prefill
            computed. None in what the host sends.
    """

    limits: Int[Array, " R"]
    ids: Int[Array, "R max_context_len"] | None = None


@pytree(kw_only=True)
class LoopState:
    """Rows of requests; donated to every launch.

    A launch works on some of the rows, named by index; an index out of range is padding, reads zeros and writes
    nowhere. The host writes a row only through a prefill launch.

    Attributes:
        last_tokens: The newest token, whose key is not in the pool yet.
        seq_lens: Tokens whose keys are in the pool.
        page_tables: For each page list of the pool each row's pages; 0 past its last page. In place of one that went
            back to its list anything may stand: no pass reads it. In what the host sends with a prompt there is the
            first list's alone, and None for others (`with_window_pages`).
        sampling: How each row's tokens are chosen.
        stop_ids: Tokens that end a row; padded with -1.
        finished: Rows that met a stop token, or logits that are not finite, or their limit amid drafted tokens. They
            stay inert until a prefill takes the row over.
        rules: What rows ask of their logits beyond `sampling`; None where the engine serves no such request.
        history: The tokens that the rows with rules have seen; likewise.
        tokens: What drafting must know; None where nothing is drafted.
    """

    last_tokens: Int[Array, " R"]
    seq_lens: Int[Array, " R"]
    page_tables: tuple[Int[Array, "R max_pages"], ...]
    sampling: SamplingState
    stop_ids: Int[Array, "R stops"]
    finished: Bool[Array, " R"]
    rules: LogitRules | None = None
    history: TokenHistory | None = None
    tokens: TokenRecord | None = None

    def take(self, rows: Int[Array, " B"]) -> "LoopState":
        """The named rows, zeros for padding."""
        num_rows = self.finished.shape[0]
        row = jnp.minimum(rows, num_rows - 1)

        def taken(leaf: Array) -> Array:
            there = (rows < num_rows).reshape(-1, *(1 for _ in leaf.shape[1:]))
            return jnp.where(there, leaf[row], jnp.zeros((), leaf.dtype))

        return jax.tree.map(taken, self)

    def put(self, rows: Int[Array, " B"], values: "LoopState") -> "LoopState":
        """The state with the named rows replaced; what is None in `values` stays."""
        return jax.tree.map(
            lambda new, leaf: leaf if new is None else leaf.at[rows].set(new, mode="drop"),
            values,
            self,
            is_leaf=lambda leaf: leaf is None,
        )

    def without_rules(self, rows: Int[Array, " B"]) -> "LoopState":
        """The state with no rules in force for the named rows."""
        if self.rules is None:
            return self
        in_force = self.rules.in_force.at[rows].set(False, mode="drop")
        return dataclasses.replace(self, rules=dataclasses.replace(self.rules, in_force=in_force))

    def without_tokens(self, rows: Int[Array, " B"]) -> "LoopState":
        """The state with no token of the named rows on record, if there is a record."""
        if self.tokens is None:
            return self
        assert self.tokens.ids is not None
        ids = self.tokens.ids.at[rows].set(NOT_KNOWN, mode="drop")
        return dataclasses.replace(self, tokens=dataclasses.replace(self.tokens, ids=ids))

    def with_tokens(
        self, rows: Int[Array, "..."], positions: Int[Array, "..."], token_ids: Int[Array, "..."]
    ) -> "LoopState":
        """The state with tokens on record, if there is one; a row out of range writes nowhere."""
        if self.tokens is None:
            return self
        assert self.tokens.ids is not None
        ids = self.tokens.ids.at[rows, positions].set(token_ids, mode="drop")
        return dataclasses.replace(self, tokens=dataclasses.replace(self.tokens, ids=ids))

    def taken_with_pages(self, plan: Int[Array, "B plan"]) -> tuple["LoopState", "LoopState"]:
        """The state that `with_pages` gives, and its rows that the plan names, as `take` does.

        The rows do not wait until the state's tables are written.
        """
        rows, columns, pages = self._planned(plan)
        values = self.take(rows)
        tables = (_opened(table, columns, new) for table, new in zip(values.page_tables, pages, strict=True))
        return self.with_pages(plan), dataclasses.replace(values, page_tables=tuple(tables))

    def places(self, rows: Int[Array, " B"], live: Bool[Array, " B"] | None = None) -> Int[Array, " R"]:
        """Where each row of the state stands among those named, of which none is named twice; -1 where nowhere.

        Args:
            live: Those that are meant; all if None.
        """
        named = rows[None] == jnp.arange(self.finished.shape[0], dtype=jnp.int32)[:, None]
        found = jnp.max(jnp.where(named, jnp.arange(rows.shape[0], dtype=jnp.int32)[None], -1), axis=1)
        return found if live is None else jnp.where(live[jnp.maximum(found, 0)], found, -1)

    def grown(self, rows: Int[Array, " B"], live: Bool[Array, " B"]) -> "LoopState":
        """The state once live rows have a key more; the others that are named have none."""
        places = self.places(rows)
        lengths = jnp.where(live[jnp.maximum(places, 0)], self.seq_lens + 1, 0)
        return dataclasses.replace(self, seq_lens=jnp.where(places < 0, self.seq_lens, lengths))

    def with_values(self, places: Int[Array, " R"], **values: Shaped[Array, " B"]) -> "LoopState":
        """The state with new values of some rows, field by field.

        XLA makes one kernel of it, which writes all fields in place. Scatters would be one each.

        Args:
            places: Of each row's values (`places`).
        """

        def replaced(leaf: Array, new: Array) -> Array:
            return jnp.where(places < 0, leaf, new[jnp.maximum(places, 0)])

        return dataclasses.replace(self, **{name: replaced(getattr(self, name), new) for name, new in values.items()})

    def _planned(self, plan: Int[Array, "B plan"]) -> tuple[Int[Array, " B"], Int[Array, " B"], list[Array]]:
        return plan[:, 0], plan[:, 1], jnp.split(plan[:, 2:], len(self.page_tables), axis=1)

    def with_pages(self, plan: Int[Array, "B plan"]) -> "LoopState":
        """The state with pages in the rows' tables.

        Args:
            plan: Of each row its index, a column of its tables, and the pages that stand from there on in each.
        """
        rows, columns, pages = self._planned(plan)
        tables = (_with_pages(table, rows, columns, new) for table, new in zip(self.page_tables, pages, strict=True))
        return dataclasses.replace(self, page_tables=tuple(tables))

    def with_window_pages(self, rows: Int[Array, " B"], windows: Sequence[Int[Array, "B pages"]]) -> "LoopState":
        """The state with pages in the rows' tables of all page lists but the first.

        Args:
            windows: For each list, of each row a column of its table, and the pages that stand from there on.
        """
        first, *others = self.page_tables
        tables = (_with_pages(table, rows, new[:, 0], new[:, 1:]) for table, new in zip(others, windows, strict=True))
        return dataclasses.replace(self, page_tables=(first, *tables))


def _with_pages(table: Any, rows: Int[Array, " B"], columns: Int[Array, " B"], pages: Int[Array, "B pages"]) -> Any:
    if rows.shape[0] == 1:  # XLA would make three kernels of it
        named = rows == jnp.arange(table.shape[0], dtype=jnp.int32)
        return jnp.where(named[:, None], _opened(table, columns, pages), table)
    places = columns[:, None] + jnp.arange(pages.shape[1], dtype=jnp.int32)[None]
    return table.at[rows[:, None], places].set(pages, mode="drop")


def _opened(table: Any, columns: Int[Array, " N"], pages: Int[Array, "N pages"]) -> Any:
    """Tables in which pages stand from a column on, each in its own or all in one's."""
    place = jnp.arange(table.shape[1], dtype=jnp.int32)[None] - columns[:, None]
    for number in range(pages.shape[1]):
        table = jnp.where(place == number, pages[:, number : number + 1], table)
    return table


def empty_rows(
    num_rows: int,
    *,
    max_pages: int,
    max_stop_ids: int,
    max_logit_bias: int | None = None,
    with_limits: bool = False,
    num_lists: int = 1,
    numpy: Any = jnp,
) -> LoopState:
    """Rows that no request uses yet, made by `numpy`: jax.numpy for the device, NumPy for the host.

    Args:
        max_logit_bias: Tokens with a bias that a row may have; None is rows without rules.
        with_limits: Whether rows have a record of their tokens, still without ids.
        num_lists: Page lists of the pool.
    """
    zeros = functools.partial(numpy.zeros, num_rows)
    return LoopState(
        last_tokens=zeros(jnp.int32),
        seq_lens=zeros(jnp.int32),
        page_tables=tuple(numpy.zeros((num_rows, max_pages), jnp.int32) for _ in range(num_lists)),
        sampling=SamplingState(
            temperature=zeros(jnp.float32),
            top_k=zeros(jnp.int32),
            top_p=zeros(jnp.float32),
            min_p=zeros(jnp.float32),
            seed=zeros(jnp.uint32),
        ),
        stop_ids=numpy.full((num_rows, max_stop_ids), -1, jnp.int32),
        finished=zeros(jnp.bool_),
        rules=None if max_logit_bias is None else empty_rules(num_rows, max_logit_bias, numpy),
        tokens=TokenRecord(limits=zeros(jnp.int32)) if with_limits else None,
    )
