"""LoopState reads and writes rows by number as scatters and gathers would; padding reads zeros and writes nowhere."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jattn.serving.steps.loop_state import empty_rows

ROWS, PAGES = 6, 5


def random_state(num_lists=1):
    random = np.random.default_rng(0)
    state = empty_rows(ROWS, max_pages=PAGES, max_stop_ids=2, num_lists=num_lists)

    def filled(leaf):
        return jnp.array(random.integers(0, 2 if leaf.dtype == jnp.bool_ else 100, leaf.shape)).astype(leaf.dtype)

    return jax.tree.map(filled, state)


@pytest.mark.parametrize("rows", [[2], [ROWS], [4, ROWS, 0], [ROWS, ROWS], [5, 1, 0, 3, 2, 4]])
def test_taken_rows_are_the_named_ones_and_zeros_for_padding(rows):
    state = random_state()
    expected = jax.tree.map(lambda leaf: leaf.at[jnp.array(rows)].get(mode="fill", fill_value=0), state)
    chex.assert_trees_all_equal(state.take(jnp.array(rows, jnp.int32)), expected)


@pytest.mark.parametrize("rows", [[2], [ROWS], [4, ROWS, 0], [5, 1, 0, 3, 2, 4]])
@pytest.mark.parametrize("live", [None, [False], [True, False, True]])
def test_values_go_to_the_named_rows_that_live(rows, live):
    state, rows = random_state(), jnp.array(rows, jnp.int32)
    if live is not None:
        live = jnp.resize(jnp.array(live), rows.shape)
    tokens, finished = 1000 + jnp.arange(rows.size, dtype=jnp.int32), jnp.arange(rows.size) % 2 == 0
    found = state.with_values(state.places(rows, live), last_tokens=tokens, finished=finished)
    written = rows if live is None else jnp.where(live, rows, ROWS)
    expected = dataclasses.replace(
        state,
        last_tokens=state.last_tokens.at[written].set(tokens, mode="drop"),
        finished=state.finished.at[written].set(finished, mode="drop"),
    )
    chex.assert_trees_all_equal(found, expected)


@pytest.mark.parametrize("rows", [[2], [ROWS], [4, ROWS, 0]])
def test_rows_that_live_grow_by_a_key_and_others_have_none(rows):
    state, rows = random_state(), jnp.array(rows, jnp.int32)
    live = jnp.arange(rows.size) % 2 == 0
    lengths = jnp.where(live, state.take(rows).seq_lens + 1, 0)
    expected = dataclasses.replace(state, seq_lens=state.seq_lens.at[rows].set(lengths, mode="drop"))
    chex.assert_trees_all_equal(state.grown(rows, live), expected)


@pytest.mark.parametrize("num_lists", [1, 2])
@pytest.mark.parametrize("width", [1, 2])
@pytest.mark.parametrize(
    "rows_and_columns", [[(3, 2)], [(0, 4)], [(ROWS, 0)], [(4, 0), (ROWS, 0), (1, 3)], [(5, 1), (2, 0)]]
)
def test_pages_stand_in_the_tables_of_the_state_and_of_what_is_taken(rows_and_columns, width, num_lists):
    state = random_state(num_lists)
    pages = np.arange(200, 200 + num_lists * width)
    plan = [(row, column, *(pages * (row < ROWS) + 10 * row * (row < ROWS))) for row, column in rows_and_columns]
    found, taken = state.taken_with_pages(jnp.array(plan, jnp.int32))
    tables = [np.array(table) for table in state.page_tables]
    for row, column, *pages in plan:
        for table, new in zip(tables, np.split(np.array(pages), num_lists), strict=True):
            for place, page in enumerate(new, column):
                if row < ROWS and place < PAGES:
                    table[row, place] = page
    expected = dataclasses.replace(state, page_tables=tuple(map(jnp.array, tables)))
    chex.assert_trees_all_equal(found, expected)
    chex.assert_trees_all_equal(state.with_pages(jnp.array(plan, jnp.int32)), expected)
    chex.assert_trees_all_equal(taken, expected.take(jnp.array([row for row, _ in rows_and_columns], jnp.int32)))
