"""One attention call of the tests: what it is, and the numbers made for it."""

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jattn_kernels.call import Operation
from jattn_kernels.packed_latents import DTYPE as PACKED
from jattn_kernels.spec import AttentionSpec
from tests.kernels.harness.packed_rows import packed

# Static buckets are larger than what a batch needs: pages nobody owns, a page-table column, K/V rows, mask entries.
UNUSED_PAGES = 3
UNUSED_COLUMNS = 1
UNUSED_KEYS = 3
UNUSED_MASK = 7


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One attention call, without its numbers.

    Attributes:
        q_lens: New tokens a request; all equal in decode.
        kv_lens: Keys a request.
        dtype: Of the queries.
        kv_dtype: Of keys and values; that of the queries if None.
        num_layers: Layers of the pool, the wanted one holding the only numbers; None is a pool without that axis.
        kv_start, q_start: One value a request, or None to leave the argument out.
        custom_mask: Give a random mask.
        q_positions: Give each query a random position near the end of its request, several sharing one.
        tree: Parent of each new token of a request among them, -1 for none: every request has this tree, as a mask and
            as positions.
        q_scale, kv_scale: What a scale is given for: all heads, each, or each of each sequence or layer.
        alibi, sinks: Give slopes, or sinks; "layers" gives each layer its own.
        padding_rows: Inert requests after the real ones; in decode they have queries (NaN) too.
        padding_tokens: Query rows (NaN) after the last request; not in decode.
    """

    name: str
    operation: Operation
    spec: AttentionSpec
    q_lens: tuple[int, ...]
    kv_lens: tuple[int, ...]
    page_size: int = 8
    dtype: str = "float32"
    num_layers: int | None = None
    layer_index: int | None = None
    kv_start: tuple[int, ...] | None = None
    q_start: tuple[int, ...] | None = None
    custom_mask: bool = False
    q_positions: bool = False
    tree: tuple[int, ...] | None = None
    kv_dtype: str | None = None
    q_scale: Literal["scalar", "heads", "rows"] | None = None
    kv_scale: Literal["scalar", "heads", "rows"] | None = None
    alibi: bool = False
    sinks: bool | Literal["layers"] = False
    padding_rows: int = 0
    padding_tokens: int = 0

    @property
    def is_decode(self) -> bool:
        """Whether queries have an axis of sequences."""
        return self.operation.endswith("decode")

    @property
    def is_mla(self) -> bool:
        """Whether keys and values are latent rows."""
        return self.operation.startswith("mla")

    @property
    def is_packed(self) -> bool:
        """Whether latent rows are of bytes, with a scale for each tile."""
        return self.kv_dtype == PACKED

    @property
    def out_dtype(self) -> Any:
        """What answers are in, and products are computed in: the queries' dtype, bfloat16 for fp8."""
        return jnp.dtype("bfloat16" if self.dtype.startswith("float8") else self.dtype)


class Inputs(NamedTuple):
    """Arguments ready for `jattn_kernels.<operation>` and `jattn_kernels.reference.<operation>`; add `return_lse`."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def options(self) -> dict[str, Any]:
        """The arrays among the keywords: all of them but the spec."""
        return {name: value for name, value in self.kwargs.items() if name != "spec"}


def build(case: Case, seed: int = 0) -> Inputs:
    """The numbers of a case; NaN wherever no request owns the memory, but for page 0, which is zeros."""
    rng = np.random.default_rng(seed)
    spec = case.spec
    num_rows = len(case.kv_lens) + case.padding_rows
    kv_lens = np.array([*case.kv_lens, *[0] * case.padding_rows], np.int32)
    q_lens = np.array([*case.q_lens, *[case.q_lens[0] if case.is_decode else 0] * case.padding_rows], np.int32)
    cu_q_lens = _offsets(q_lens)
    num_owned = sum(case.q_lens)
    num_queries = int(cu_q_lens[-1]) + case.padding_tokens

    q = np.full((num_queries, spec.num_q_heads, spec.head_dim), np.nan, np.float32)
    q[:num_owned] = rng.standard_normal(q[:num_owned].shape)
    if case.is_decode:
        q = q.reshape(num_rows, -1, *q.shape[1:])
    kwargs: dict[str, Any] = {"spec": spec}
    widths = (spec.head_dim,) if case.is_mla else (spec.head_dim, spec.value_dim)
    keys_and_values = [
        [rng.standard_normal((length, spec.num_kv_heads, width)) for length in kv_lens] for width in widths
    ]
    kwargs |= _places(case, q_lens, kv_lens, q.shape[:-2], rng) | _factors(case, num_rows, rng)

    queries = (q.astype(jnp.dtype(case.dtype)),)
    if case.layer_index is not None:
        kwargs["layer_index"] = _ints(case.layer_index)
    if case.operation == "ragged_extend":
        k, v = (_ragged(parts, case) for parts in keys_and_values)
        return _on_the_device((*queries, k, v, _ints(cu_q_lens), _ints(_offsets(kv_lens))), kwargs)
    pages, page_table = _paged(case, keys_and_values, kv_lens, rng)
    if case.is_mla:
        queries = tuple(np.split(queries[0], [spec.value_dim], axis=-1))
    offsets = () if case.is_decode else (_ints(cu_q_lens),)
    return _on_the_device((*queries, *pages, page_table, _ints(kv_lens), *offsets), kwargs)


def _on_the_device(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Inputs:
    """Put there as they are: jnp.asarray and astype would compile for every shape."""
    return Inputs(
        *jax.tree.map(lambda leaf: jax.device_put(leaf) if isinstance(leaf, np.ndarray) else leaf, (args, kwargs))
    )


def _places(
    case: Case, q_lens: np.ndarray, kv_lens: np.ndarray, leading: tuple[int, ...], rng: Any
) -> dict[str, np.ndarray]:
    """Where queries and keys are, and which see which."""
    given = {}
    for name in ("kv_start", "q_start"):
        if getattr(case, name) is not None:
            given[name] = _ints([*getattr(case, name), *[0] * case.padding_rows])
    prefixes = np.array(case.kv_lens) - np.array(case.q_lens)
    num_owned = sum(case.q_lens)
    positions = np.zeros(leading, np.int32).reshape(-1)
    if case.custom_mask:
        given["custom_mask"] = rng.random(int(q_lens @ kv_lens) + UNUSED_MASK) < 0.5
    if case.q_positions:
        first = np.array(case.kv_start or [0] * len(case.kv_lens)) + prefixes
        positions[:num_owned] = np.repeat(first, case.q_lens) + rng.integers(0, max(case.q_lens), num_owned)
    if case.tree is not None:
        paths = [tree_path(case.tree, node) for node in range(len(case.tree))]
        within = np.array([[node in path for node in range(len(paths))] for path in paths])
        blocks = [np.concatenate([np.ones((len(paths), n), bool), within], axis=1).reshape(-1) for n in prefixes]
        given["custom_mask"] = np.concatenate([*blocks, np.zeros(UNUSED_MASK, bool)])
        positions[:num_owned] = (prefixes[:, None] + [len(path) - 1 for path in paths]).reshape(-1)
    if case.q_positions or case.tree is not None:
        given["q_positions"] = _ints(positions.reshape(leading))
    return given


def tree_path(parents: tuple[int, ...], node: int) -> list[int]:
    """The nodes from a root of a tree to one of its nodes, itself included."""
    return [*(tree_path(parents, parents[node]) if parents[node] >= 0 else []), node]


def _factors(case: Case, num_rows: int, rng: Any) -> dict[str, np.ndarray]:
    """What numbers are multiplied with, and what is added to logits and sums."""
    spec, given = case.spec, {}
    names = ("kv_scale",) if case.is_mla else ("k_scale", "v_scale")
    wanted = [("q_scale", case.q_scale, num_rows), *((name, case.kv_scale, case.num_layers) for name in names)]
    for name, kind, rows in wanted:
        if kind is not None:
            shape = {"scalar": (), "heads": (spec.num_kv_heads,), "rows": (rows, spec.num_kv_heads)}[kind]
            given[name] = np.asarray(rng.uniform(0.5, 2.0, shape), np.float32)
    if case.alibi:
        given["alibi_slopes"] = rng.uniform(0.01, 1.0, spec.num_q_heads).astype(np.float32)
    if case.sinks:
        layers = (case.num_layers,) if case.sinks == "layers" else ()
        given["sinks"] = (2 * rng.standard_normal((*layers, spec.num_q_heads))).astype(np.float32)
        if layers:
            given["sinks"][:, 0] = -np.inf  # a head without one
    return given


def _ints(values: Any) -> np.ndarray:
    return np.asarray(values, np.int32)


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)])


def _ragged(parts: list[np.ndarray], case: Case) -> np.ndarray:
    unowned = np.full((UNUSED_KEYS, *parts[0].shape[1:]), np.nan)
    rows = np.concatenate([*parts, unowned]).astype(np.float32)
    rows = rows if case.num_layers is None else _among_layers(rows, case)
    return rows.astype(jnp.dtype(case.kv_dtype or case.dtype))


def _paged(
    case: Case, keys_and_values: list[list[np.ndarray]], kv_lens: np.ndarray, rng: Any
) -> tuple[tuple[np.ndarray | None, ...], np.ndarray]:
    spec, page_size = case.spec, case.page_size
    page_counts = -(-kv_lens // page_size)
    num_pages = 1 + int(page_counts.sum()) + UNUSED_PAGES
    numbers = iter(1 + rng.permutation(num_pages - 1))
    page_table = np.zeros((len(kv_lens), page_counts.max(initial=0) + UNUSED_COLUMNS), np.int32)
    for row, count in zip(page_table, page_counts, strict=True):
        row[:count] = [next(numbers) for _ in range(count)]
    pools = []
    for parts in keys_and_values:
        pool = np.full((num_pages, page_size, *parts[0].shape[1:]), np.nan, np.float32)
        pool[0] = 0
        for row, part in zip(page_table, parts, strict=True):
            for s, token in enumerate(part):
                pool[row[s // page_size], s % page_size] = token
        pools.append(pool.swapaxes(1, 2) if spec.page_layout == "HND" and not case.is_mla else pool)
    if case.is_mla:
        pools = [pools[0][:, :, 0]]
    elif spec.combined_pool is not None:
        pools = [np.stack(pools, axis=1 if spec.combined_pool == "pages_first" else 0)]
    if case.num_layers is not None:
        pools = [_among_layers(pool, case) for pool in pools]
    if case.is_packed:
        pages = [packed(pool, spec.value_dim) for pool in pools]
    else:
        pages = [pool.astype(jnp.dtype(case.kv_dtype or case.dtype)) for pool in pools]
    return (*pages, *[None] * (spec.combined_pool is not None)), _ints(page_table)


def _among_layers(pool: np.ndarray, case: Case) -> np.ndarray:
    layers = np.full((case.num_layers, *pool.shape), np.nan, np.float32)
    layers[case.layer_index] = pool
    return layers
