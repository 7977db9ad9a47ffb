"""A second derivation of every feature: one number after the other, in plain Python; no array is sliced or reshaped."""

import math
import struct

import numpy as np

from jattn_kernels.spec import AttentionSpec
from tests.kernels.harness.case import Case, Inputs


def numbers_of_bytes(row: bytes, compressed: int) -> list[float]:
    """The numbers of a latent row in bytes, each bit of e4m3 and bfloat16 by its worth."""
    scales_end = compressed + 4 * math.ceil(compressed / 128)
    scales = [x for (x,) in struct.iter_unpack("<f", row[compressed:scales_end])]
    rotated = [struct.unpack("<f", b"\0\0" + row[i : i + 2])[0] for i in range(scales_end, len(row), 2)]
    return [_of_e4m3(byte) * scales[i // 128] for i, byte in enumerate(row[:compressed])] + rotated


def _of_e4m3(byte: int) -> float:
    sign, exponent, fraction = -1 if byte >> 7 else 1, byte >> 3 & 15, byte & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    return sign * (fraction / 8 * 2**-6 if exponent == 0 else (1 + fraction / 8) * 2.0 ** (exponent - 7))


def sees(spec: AttentionSpec, query: int, key: int, mask_bit: bool | None) -> bool:
    """Whether a query at one absolute position sees the key at another."""
    before = query - key
    if mask_bit is False:
        return False
    if mask_bit is None and spec.causal and before < 0:
        return False
    if spec.window_left is not None and before > spec.window_left:
        return False
    if spec.window_right is not None and -before > spec.window_right:
        return False
    if spec.chunk_size is not None:
        first_of_chunk = query - query % spec.chunk_size
        return first_of_chunk <= key < first_of_chunk + spec.chunk_size
    return True


def turned(row: list[float], position: int, spec: AttentionSpec) -> list[float]:
    """A row after the rotary embedding of its position."""
    if spec.rope_theta is None:
        return row
    half = len(row) // 2
    found = list(row)
    for i in range(half):
        angle = position / (spec.rope_scale * spec.rope_theta ** (2 * i / len(row)))
        found[i] = row[i] * math.cos(angle) - row[i + half] * math.sin(angle)
        found[i + half] = row[i] * math.sin(angle) + row[i + half] * math.cos(angle)
    return found


class BruteForce:
    """One attention call, number by number."""

    def __init__(self, case: Case, inputs: Inputs):
        self.case, self.spec, self.kwargs = case, case.spec, inputs.kwargs
        lists = [None if x is None else np.asarray(x).astype(np.float64).tolist() for x in inputs.args]
        integers = [None if x is None else np.asarray(x).tolist() for x in inputs.args]
        self.q, self.k, self.v = lists[:3]
        if case.operation == "ragged_extend":
            self.cu_q_lens, self.cu_kv_lens = integers[3:]
            self.kv_lens = [b - a for a, b in zip(self.cu_kv_lens, self.cu_kv_lens[1:], strict=False)]
        else:
            self.page_table, self.kv_lens = integers[3:5]
            if not case.is_decode:
                self.cu_q_lens = integers[5]
        self.mask = self.given("custom_mask")

    def given(self, name: str):
        return np.asarray(self.kwargs[name]).tolist() if name in self.kwargs else None

    def q_len(self, request: int) -> int:
        if self.case.is_decode:
            return len(self.q[request])
        return self.cu_q_lens[request + 1] - self.cu_q_lens[request]

    def row(self, request: int, i: int) -> tuple[int, ...]:
        """Index of a query in `q`, `q_positions` and the results."""
        return (request, i) if self.case.is_decode else (self.cu_q_lens[request] + i,)

    def scale(self, name: str, row: int | None, kv_head: int) -> float:
        """The factor that stored numbers stand for when multiplied by it."""
        scale = self.given("kv_scale" if self.case.is_mla and name != "q_scale" else name)
        if scale is None or isinstance(scale, float):
            return 1.0 if scale is None else scale
        return scale[row][kv_head] if isinstance(scale[0], list) else scale[kv_head]

    def query(self, request: int, i: int, q_head: int) -> list[float]:
        parts = (self.q, self.k) if self.case.is_mla else (self.q,)
        found = []
        for part in parts:
            for index in (*self.row(request, i), q_head):
                part = part[index]
            found += part
        kv_head = q_head * self.spec.num_kv_heads // self.spec.num_q_heads
        found = [x * self.scale("q_scale", request, kv_head) for x in found]
        return turned(found, self.position(request, i), self.spec)

    def key(self, request: int, s: int, kv_head: int) -> list[float]:
        scale = self.scale("k_scale", self.case.layer_index, kv_head)
        row = [x * scale for x in self.stored(0, request, s, kv_head)]
        return turned(row, self.key_position(request, s), self.spec)

    def value(self, request: int, s: int, kv_head: int) -> list[float]:
        scale = self.scale("v_scale", self.case.layer_index, kv_head)
        return [x * scale for x in self.stored(1, request, s, kv_head)]

    def stored(self, which: int, request: int, s: int, kv_head: int) -> list[float]:
        """Key (0) or value (1) number s of a request, as it lies in memory."""
        if self.case.operation == "ragged_extend":
            return (self.k, self.v)[which][self.cu_kv_lens[request] + s][kv_head]
        page = self.page_table[request][s // self.case.page_size]
        row = s % self.case.page_size
        pool = self.v if self.case.is_mla or (which == 1 and not self.spec.combined_pool) else self.k
        if self.case.layer_index is not None:
            pool = pool[self.case.layer_index]
        if self.case.is_packed:
            numbers = numbers_of_bytes(bytes(map(int, pool[page][row])), self.spec.value_dim)
            return numbers[: self.spec.head_dim if which == 0 else self.spec.value_dim]
        if self.case.is_mla:
            return [pool[page][row][d] for d in range(self.spec.head_dim if which == 0 else self.spec.value_dim)]
        if self.spec.combined_pool == "pages_first":
            tokens = pool[page][which]
        elif self.spec.combined_pool == "kv_first":
            tokens = pool[which][page]
        else:
            tokens = pool[page]
        return tokens[row][kv_head] if self.spec.page_layout == "NHD" else tokens[kv_head][row]

    def position(self, request: int, i: int) -> int:
        if (positions := self.given("q_positions")) is not None:
            for index in self.row(request, i):
                positions = positions[index]
            return positions
        if (starts := self.given("q_start")) is not None:
            return starts[request] + i
        return self.key_position(request, self.kv_lens[request]) - self.q_len(request) + i

    def key_position(self, request: int, s: int) -> int:
        starts = self.given("kv_start")
        return s if starts is None else starts[request] + s

    def logit(self, request: int, i: int, q_head: int, s: int, query: list[float], kv_head: int) -> float:
        scale = self.spec.sm_scale or self.spec.head_dim**-0.5
        logit = scale * sum(a * b for a, b in zip(query, self.key(request, s, kv_head), strict=True))
        if self.spec.logits_soft_cap:
            logit = self.spec.logits_soft_cap * math.tanh(logit / self.spec.logits_soft_cap)
        if (slopes := self.given("alibi_slopes")) is not None:
            before = self.position(request, i) - self.key_position(request, s)
            logit -= slopes[q_head] * (before if self.spec.causal or before > 0 else -before)
        return logit

    def attend(self, request: int, i: int, q_head: int) -> tuple[list[float], float]:
        query = self.query(request, i, q_head)
        kv_head = q_head * self.spec.num_kv_heads // self.spec.num_q_heads
        mask_start = sum(self.q_len(r) * self.kv_lens[r] for r in range(request)) + i * self.kv_lens[request]
        p = self.position(request, i)
        terms = []
        for s in range(self.kv_lens[request]):
            bit = None if self.mask is None else self.mask[mask_start + s]
            if not sees(self.spec, p, self.key_position(request, s), bit):
                continue
            terms.append((self.logit(request, i, q_head, s, query, kv_head), self.value(request, s, kv_head)))
        if not terms:
            return [0.0] * self.spec.value_dim, -math.inf
        top = max(logit for logit, _ in terms)
        total = denominator = sum(math.exp(logit - top) for logit, _ in terms)
        if (sinks := self.given("sinks")) is not None:
            own = sinks[self.given("layer_index")] if isinstance(sinks[0], list) else sinks
            denominator += math.exp(own[q_head] - top)
        weighted = [sum(math.exp(logit - top) * v[d] for logit, v in terms) for d in range(self.spec.value_dim)]
        return [x / denominator for x in weighted], top + math.log(total)

    def run(self) -> tuple[np.ndarray, np.ndarray]:
        """Output and lse of all query rows."""
        leading = (len(self.q), len(self.q[0])) if self.case.is_decode else (len(self.q),)
        lse = np.full((*leading, self.spec.num_q_heads), -np.inf)
        out = np.zeros((*lse.shape, self.spec.value_dim))
        for request in range(len(self.kv_lens)):
            for i in range(self.q_len(request)):
                for n in range(self.spec.num_q_heads):
                    index = (*self.row(request, i), n)
                    out[index], lse[index] = self.attend(request, i, n)
        return out, lse
