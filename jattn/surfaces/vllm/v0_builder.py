"""FlashAttentionMetadataBuilder of vLLM v0: collects sequence groups on the host and builds a batch's metadata."""

import copy
import dataclasses
import itertools
from typing import Any

import jax.numpy as jnp
import numpy as np

from jattn.arguments import check_fields, host_integers, instance, whole
from jattn.surfaces.vllm.schedules import schedules_of
from jattn.surfaces.vllm.v0_inputs import InputBuilder, InterDataForSeqGroup
from jattn.surfaces.vllm.v0_metadata import PAD_SLOT_ID, FlashAttentionMetadata


@dataclasses.dataclass(frozen=True)
class _Row:
    """A sequence as the batch has it."""

    is_prompt: bool
    seq_len: int
    query_len: int
    block_table: list[int]
    slots: list[int]
    encoder_seq_len: int = 0
    cross_block_table: list[int] = dataclasses.field(default_factory=list)


_PADDING = _Row(False, 0, 0, [], [])


class FlashAttentionMetadataBuilder:
    """Holds the rows of the batch that is being collected; `prepare` starts the next one."""

    def __init__(self, input_builder: InputBuilder):
        instance("input_builder", input_builder, InputBuilder)
        self.input_builder = input_builder
        self.block_size = input_builder.block_size
        self.prepare()

    def prepare(self) -> None:
        """Forgets the rows collected so far."""
        self._rows: list[_Row] = []
        self._placeholders: dict[str, Any] = {}

    def _add_seq_group(
        self, inter_data: InterDataForSeqGroup | Any, chunked_prefill_enabled: bool, prefix_cache_hit: bool
    ) -> None:
        """Adds a group's rows; the batch is as it was if that fails.

        Args:
            chunked_prefill_enabled, prefix_cache_hit: Accepted for vLLM's sake and ignored: prefills read their pages
                in any case.

        Raises:
            ValueError: A prefill comes after a decode, or lengths and blocks contradict each other.
        """
        names = ("seq_ids", "seq_lens", "query_lens", "context_lens")
        check_fields("inter_data", inter_data, "is_prompt", "block_tables", *names)  # vLLM's own has them too
        if inter_data.is_prompt and any(not row.is_prompt for row in self._rows):
            raise ValueError("Groups of prefills must be added before those of decodes. Got a prefill after a decode.")
        columns = [_numbers(name, getattr(inter_data, name)) for name in names]
        if len(set(map(len, columns))) > 1:
            rule = f"`{'`, `'.join(names)}` must have an entry for each sequence."
            raise ValueError(f"{rule} Got {', '.join(str(len(column)) for column in columns)}.")
        self._rows += [self._row(inter_data, *of_sequence) for of_sequence in zip(*columns, strict=True)]
        for modality, places in (getattr(inter_data, "multi_modal_placeholder_maps", None) or {}).items():
            if modality in self._placeholders:
                self._placeholders[modality].extend(places)
            else:
                self._placeholders[modality] = copy.deepcopy(places)

    def _row(self, data: Any, seq_id: int, seq_len: int, query_len: int, context_len: int) -> _Row:
        longest = self.input_builder.max_model_len
        if context_len < 0 or query_len < 1 or context_len + query_len != seq_len or seq_len > longest:
            raise ValueError(
                f"Sequence {seq_id}: `seq_lens` must be `context_lens` + `query_lens`, with a query and at most "
                f"{longest}. Got {seq_len}, {context_len}, {query_len}."
            )
        most = self.input_builder.max_decode_query_len
        if not data.is_prompt and query_len > most:
            raise ValueError(f"Sequence {seq_id}: a decode must have at most {most} queries. Got {query_len}.")
        if data.block_tables is not None and seq_id not in data.block_tables:
            raise ValueError(
                f"Sequence {seq_id}: `block_tables` must have its blocks. Got those of {[*data.block_tables]}."
            )
        blocks = [] if data.block_tables is None else _numbers("block_tables", data.block_tables[seq_id])
        if data.block_tables is not None and len(blocks) * self.block_size < seq_len:
            raise ValueError(f"Sequence {seq_id}: its blocks must hold {seq_len} tokens. Got {len(blocks)} blocks.")
        slots = _slots(blocks, range(context_len, seq_len), self.block_size)
        encoder_len = whole("encoder_seq_len", getattr(data, "encoder_seq_len", 0), 0)
        cross = getattr(data, "cross_block_table", None)
        cross = [] if cross is None else _numbers("cross_block_table", cross)
        if encoder_len > min(self.input_builder.max_encoder_len or 0, len(cross) * self.block_size):
            raise ValueError(
                f"Sequence {seq_id}: `encoder_seq_len` must be within `max_encoder_len`="
                f"{self.input_builder.max_encoder_len} and `cross_block_table`. Got {encoder_len}."
            )
        return _Row(data.is_prompt, seq_len, query_len, blocks, slots, encoder_len, cross)

    def _get_graph_runner_block_tables(self, num_seqs: int, block_tables: list[list[int]]) -> np.ndarray:
        """The block tables as one array as wide as the longest sequence needs, 0 where they end.

        Raises:
            ValueError: There are more tables than `num_seqs`.
        """
        block_tables = [_numbers("block_tables", blocks) for blocks in (() if block_tables is None else block_tables)]
        if len(block_tables) > whole("num_seqs", num_seqs, 0):
            raise ValueError(f"`num_seqs` must be at least the {len(block_tables)} `block_tables`. Got {num_seqs}.")
        return _table(block_tables, num_seqs, -(-self.input_builder.max_model_len // self.block_size))

    def build(
        self, seq_lens: list[int], query_lens: list[int], cuda_graph_pad_size: int, batch_size: int
    ) -> FlashAttentionMetadata:
        """Metadata of the rows added since `prepare`, or of the input builder's groups, on the device.

        Args:
            seq_lens, query_lens: Of the rows added; entries beyond them are padding.
            cuda_graph_pad_size: Padded decodes to add; -1 for none, in a batch that is no bucket.
            batch_size: Tokens with these padded decodes, without what pads prefills.

        Raises:
            ValueError: The arguments do not fit the rows, or the rows do not fit the bucket.
        """
        for inter_data in () if self._rows else self.input_builder.inter_data_list:
            self._add_seq_group(inter_data, False, False)
        config, pad = self.input_builder, max(whole("cuda_graph_pad_size", cuda_graph_pad_size, -1), 0)
        self._check_given(_numbers("seq_lens", seq_lens), _numbers("query_lens", query_lens), pad, batch_size)
        prefills = [row for row in self._rows if row.is_prompt]
        decodes = [row for row in self._rows if not row.is_prompt] + [_PADDING] * pad
        num_prefill_tokens = sum(row.query_len for row in prefills)
        num_decode_tokens = batch_size - num_prefill_tokens
        num_encoder_tokens = sum(row.encoder_seq_len for row in prefills)
        if prefills:
            prefills += [_PADDING] * (_bucket(config, "num_prefills", len(prefills)) - len(prefills))
            num_prefill_tokens = _bucket(config, "num_prefill_tokens", num_prefill_tokens)
            num_encoder_tokens = _bucket(config, "num_encoder_tokens", num_encoder_tokens)
        rows = prefills + decodes
        lens = np.array([row.seq_len for row in rows], np.int32)
        queries = np.array([row.query_len for row in rows], np.int32)
        if config.max_decode_query_len == 1:
            queries[len(prefills) :] = 1
        slots = _padded([row.slots for row in prefills], num_prefill_tokens)
        slots += _padded([row.slots for row in decodes], num_decode_tokens)
        index_maps = {modality: places.index_map() for modality, places in self._placeholders.items()}
        metadata = FlashAttentionMetadata(
            num_prefills=len(prefills),
            num_prefill_tokens=num_prefill_tokens,
            num_decode_tokens=num_decode_tokens,
            slot_mapping=_ints(slots),
            multi_modal_placeholder_index_maps=index_maps or None,
            enable_kv_scales_calculation=True,
            seq_lens=lens,
            seq_lens_tensor=_ints(lens),
            max_prefill_seq_len=config.max_model_len if prefills else 0,
            max_decode_seq_len=config.max_model_len if decodes else 0,
            context_lens_tensor=_ints(np.maximum(lens - queries, 0)),
            block_tables=_ints(self._get_graph_runner_block_tables(len(rows), [row.block_table for row in rows])),
            use_cuda_graph=cuda_graph_pad_size != -1,
            max_query_len=max(num_prefill_tokens, config.max_decode_query_len if decodes else 0),
            max_decode_query_len=config.max_decode_query_len,
            query_start_loc=_starts(queries),
            seq_start_loc=_starts(lens),
            attention_chunk_size=config.attention_chunk_size,
            **self._encoder_fields(rows, len(prefills), num_encoder_tokens),
        )
        return self._with_schedules(metadata)

    def _check_given(self, seq_lens: list[int], query_lens: list[int], pad: int, batch_size: int) -> None:
        """Checks that what `build` is given are the rows added, then padding."""
        if len(seq_lens) != len(query_lens):
            raise ValueError(
                f"`seq_lens` and `query_lens` must have one length. Got {len(seq_lens)} and {len(query_lens)} entries."
            )
        count, given = len(self._rows), list(zip(seq_lens, query_lens, strict=True))
        if given[:count] != [(row.seq_len, row.query_len) for row in self._rows] or len(given) > count + pad:
            raise ValueError(
                "`seq_lens` and `query_lens` must be those of the rows added, then of padding. "
                f"Got seq_lens={seq_lens}, query_lens={query_lens}."
            )
        real = sum(row.query_len for row in self._rows)
        if batch_size != real + pad:
            raise ValueError(f"`batch_size` must be {real} tokens and {pad} padded ones. Got batch_size={batch_size}.")

    def _with_schedules(self, metadata: FlashAttentionMetadata) -> FlashAttentionMetadata:
        config = self.input_builder
        kinds = schedules_of(config.attention_layers, config.dtype, config.attention_chunk_size, self.block_size)
        parts = {"prefill_schedules": metadata.prefill_metadata, "decode_schedules": metadata.decode_metadata}
        made = {
            name: kinds.over(part.read(), part.num_prefill_tokens + part.num_decode_tokens)
            for name, part in parts.items()
            if kinds is not None and part is not None
        }
        return dataclasses.replace(metadata, **made)

    def _encoder_fields(self, rows: list[_Row], num_prefills: int, num_encoder_tokens: int) -> dict[str, Any]:
        longest = self.input_builder.max_encoder_len
        if longest is None:
            return {}
        lens = np.array([row.encoder_seq_len for row in rows], np.int32)
        slots = [
            _slots(row.cross_block_table, range(row.encoder_seq_len), self.block_size) for row in rows[:num_prefills]
        ]
        tables = _table([row.cross_block_table for row in rows], len(rows), -(-longest // self.block_size))
        return {
            "encoder_seq_lens": lens,
            "encoder_seq_lens_tensor": _ints(lens),
            "encoder_seq_start_loc": _starts(lens),
            "max_encoder_seq_len": longest,
            "num_encoder_tokens": num_encoder_tokens,
            "cross_slot_mapping": _ints(_padded(slots, num_encoder_tokens)),
            "cross_block_tables": _ints(tables),
        }


class CommonAttentionState:
    """Makes the metadata that a bucket of decodes is compiled with."""

    def __init__(self, runner: InputBuilder):
        instance("runner", runner, InputBuilder)
        self.runner = runner

    def graph_capture_get_metadata_for_batch(
        self, batch_size: int, is_encoder_decoder_model: bool = False
    ) -> FlashAttentionMetadata:
        """Metadata of `batch_size` padded decodes, of the tree and avals of every batch of that bucket.

        Raises:
            ValueError: The model has an encoder and the runner no `max_encoder_len`, or the other way round.
        """
        whole("batch_size", batch_size)
        if is_encoder_decoder_model != (self.runner.max_encoder_len is not None):
            raise ValueError(
                "`is_encoder_decoder_model` must say whether the runner has a `max_encoder_len`. "
                f"Got {is_encoder_decoder_model}, {self.runner.max_encoder_len}."
            )
        return FlashAttentionMetadataBuilder(self.runner).build([], [], batch_size, batch_size)


def _numbers(name: str, values: Any) -> list[int]:
    return host_integers(name, values, "n").tolist()


def _slots(blocks: list[int], positions: range, block_size: int) -> list[int]:
    if not blocks:
        return [PAD_SLOT_ID] * len(positions)
    return [blocks[p // block_size] * block_size + p % block_size for p in positions]


def _padded(slots_of_rows: list[list[int]], count: int) -> list[int]:
    slots = list(itertools.chain(*slots_of_rows))
    return slots + [PAD_SLOT_ID] * (count - len(slots))


def _table(block_tables: list[list[int]], num_seqs: int, width: int) -> np.ndarray:
    table = np.zeros((num_seqs, width), np.int32)
    for row, blocks in zip(table, block_tables, strict=False):
        row[: len(blocks)] = blocks[:width]
    return table


def _bucket(config: InputBuilder, name: str, size: int) -> int:
    """What prefills of a size are padded to."""
    bucket = getattr(config, name)
    if bucket is not None and size > bucket:
        raise ValueError(f"The batch must fit the bucket's `{name}`={bucket}. Got {size}.")
    return size if bucket is None else bucket


def _starts(lens: np.ndarray) -> Any:
    return _ints(np.concatenate([[0], np.cumsum(lens)]))


def _ints(values: Any) -> Any:
    return jnp.asarray(np.asarray(values, np.int32))
