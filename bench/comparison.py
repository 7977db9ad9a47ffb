"""The record of an H200 beside the peers' figures, row by row."""

from pathlib import Path

from bench.record_files import RECORD, ROOT, Row, read_rows

PEERS = ROOT / "bench" / "results" / "peers"
FLASHINFER = PEERS / "flashinfer-0.7.2-h200.jsonl"
TRITON = PEERS / "triton-h200.jsonl"
TORCH_STEP = PEERS / "torch-step-h200.jsonl"

# What says that two rows are of the same work; page and layout are not among them, for the peers have one of each.
_WORK = {
    "decode": ("kv", "batch", "ctx", "hq", "hkv", "d"),
    "prefill": ("batch", "q", "kv", "hq", "hkv", "d"),
    "decode_step": ("batch", "ctx"),
}


def fastest(rows: list[Row], time: str) -> Row | None:
    return min(rows, key=lambda row: row[time], default=None)


def pairs(case: str, *, record: Path = RECORD, peers: Path | None = None) -> list[tuple[Row, Row]]:
    """Each row of the record, jattn's fastest for its page and layout, with the peer's fastest of the same work."""
    time = "time_ms" if case == "decode_step" else "time_us"
    peers = peers or (TORCH_STEP if case == "decode_step" else FLASHINFER)
    theirs = [row for row in read_rows(peers) if row["case"] == case]
    ours: dict[tuple, list[Row]] = {}
    for row in read_rows(record / f"{case}.jsonl"):
        work = (*(row[name] for name in _WORK[case]), row.get("page"), row.get("layout"))
        ours.setdefault(work, []).append(row)
    found = []
    for rows in ours.values():
        row = fastest(rows, time)
        assert row is not None
        same = [peer for peer in theirs if all(peer[name] == row[name] for name in _WORK[case])]
        peer = fastest(same, time)
        if peer is not None:
            found.append((row, peer))
    return found


def triton_pairs(record: Path = RECORD) -> list[tuple[Row, dict[str, Row]]]:
    """Each row of Triton's attention, with those of others' Triton kernels for the same work by their names."""
    theirs = [row for row in read_rows(TRITON) if row["default"]]
    found = []
    for row in read_rows(record / "triton.jsonl"):
        if row["case"] not in ("decode", "prefill"):
            continue
        work = ("batch", "ctx", "kv") if row["case"] == "decode" else ("batch", "q")
        same = [
            peer for peer in theirs if peer["case"] == row["case"] and all(peer[name] == row[name] for name in work)
        ]
        found.append((row, {peer["impl"].partition("-")[0]: peer for peer in same}))
    return found


def latent_pairs(record: Path = RECORD) -> list[tuple[Row, Row | None]]:
    """Each row of latent attention, with the peer's fastest of the same work, if there is one."""
    work = ("case", "batch", "ctx", "hq")
    theirs = [row for row in read_rows(FLASHINFER) if row["case"] == "mla_decode"]
    return [
        (row, fastest([peer for peer in theirs if all(peer[name] == row[name] for name in work)], "time_us"))
        if "kv_dtype" not in row
        else (row, None)
        for row in read_rows(record / "latent.jsonl")
    ]


def mixture_pairs(record: Path = RECORD) -> list[tuple[Row, Row | None]]:
    """Each row of layers of experts with PyTorch's of the same work, if there is one."""
    work = ("model", "tokens", "draw")
    theirs = {tuple(row[name] for name in work): row for row in read_rows(record / "moe_layer_torch.jsonl")}
    ours = read_rows(record / "moe_layer.jsonl")
    return [(row, theirs.get(tuple(row[name] for name in work))) for row in ours]


def has_dense_equivalent(row: Row) -> bool:
    """Whether a row's work is whole prompts of one length in bf16, every key before a token seen."""
    more = ("window", "chunk", "rope", "two_passes", "batch_invariant", "kv_dtype", "q_dtype")
    return row["case"] == "prefill" and row["q"] == row["kv"] > 0 and not any(name in row for name in more)


def dense_equivalents(row: Row, *, record: Path = RECORD) -> dict[str, Row]:
    """By implementation, JAX's own dense attention on what a prefill does, if it does no more than that."""
    if not has_dense_equivalent(row):
        return {}
    dense = read_rows(record / "prefill_dense.jsonl")
    return {other["impl"]: other for other in dense if all(other[name] == row[name] for name in _WORK["prefill"])}
