"""Pictures of the record: jattn beside a peer under the hardware's limit, as SVG for light and dark pages."""

import dataclasses
from xml.sax.saxutils import escape

from bench.record_files import Row
from bench.workloads import MATMUL_TFLOPS, READ_GBPS

Pair = tuple[Row, Row]  # ours and the peer's, of the same work

_WIDTH, _HEIGHT = 860, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 52, 56
_BAR = 38
_TICKS = 4
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.jattn { fill: #0a7d5c } .peer { fill: #b3bcc6 }
.on-jattn { font-size: 10px; fill: #ffffff } .on-peer { font-size: 10px; fill: #1f2328 }
.grid { stroke: #d1d9e0; stroke-width: 1 }
.limit { stroke: #c2410c; stroke-width: 1.5; stroke-dasharray: 6 4 }
.limit-text { fill: #c2410c; font-size: 11px }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 }
  .jattn { fill: #34c796 } .peer { fill: #5a6572 }
  .on-jattn { fill: #0d1117 } .on-peer { fill: #f0f6fc }
  .grid { stroke: #3d444d } .limit { stroke: #fb923c } .limit-text { fill: #fb923c }
}
""".strip()


def decode_picture(pairs: list[Pair]) -> str:
    """SVG of decode's plain rows: bf16, page 16, NHD, and the fewest query heads among them.

    Raises:
        ValueError: There is no such row.
    """
    plain = [pair for pair in _plain(pairs) if pair[0]["kv"] == "bf16"]
    if not plain:
        raise ValueError("The picture needs a decode row of bf16, page 16, NHD.")
    heads = min(row["hq"] for row, _ in plain)
    plain = [pair for pair in plain if pair[0]["hq"] == heads]
    return _Picture(
        title=f"Paged decode on an H200, GB/s of keys and values (bf16, page 16, {heads}/{plain[0][0]['hkv']} heads)",
        peer="FlashInfer 0.7.2",
        rate="GBps",
        limit=READ_GBPS,
        limit_name=f"read bandwidth {READ_GBPS:,.0f} GB/s",
        pairs=plain,
        labels=[
            ("ragged", "64 sequences")
            if row["batch"] == "ragged64"
            else (f"batch {row['batch']}", f"context {row['ctx']:,}")
            for row, _ in plain
        ],
    ).svg()


def prefill_picture(pairs: list[Pair]) -> str:
    """SVG of prefill's plain rows: page 16, NHD.

    Raises:
        ValueError: There is no such row.
    """
    plain = _plain(pairs)
    if not plain:
        raise ValueError("The picture needs a prefill row of page 16, NHD.")
    row = plain[0][0]
    return _Picture(
        title=f"Paged causal prefill on an H200, TFLOP/s (bf16, page 16, {row['hq']}/{row['hkv']} heads)",
        peer="FlashInfer 0.7.2, FA3",
        rate="TFLOPs",
        limit=MATMUL_TFLOPS,
        limit_name=f"large bf16 products {MATMUL_TFLOPS:,.0f} TFLOP/s",
        pairs=plain,
        labels=[(f"{row['batch']} x {row['q']:,} tokens", f"context {row['kv']:,}") for row, _ in plain],
    ).svg()


def _plain(pairs: list[Pair]) -> list[Pair]:
    return [(row, peer) for row, peer in pairs if row["page"] == 16 and "layout" not in row]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Picture:
    """Two bars for each pair of rows.

    Attributes:
        peer: Whose the second bars are.
        rate: Which field of the rows is drawn.
        limit: What no bar should pass, in the unit of the rate.
        labels: Two lines under each pair.
    """

    title: str
    peer: str
    rate: str
    limit: float
    limit_name: str
    pairs: list[Pair]
    labels: list[tuple[str, str]]

    def svg(self) -> str:
        step = (_WIDTH - _LEFT - _RIGHT) / len(self.pairs)
        bar = min(_BAR, step * 0.42)
        parts = [_text(_LEFT, 18, self.title), *self._legend(), *self._grid()]
        for index, (rows, labels) in enumerate(zip(self.pairs, self.labels, strict=True)):
            middle = _LEFT + step * (index + 0.5)
            for name, row, x in zip(("jattn", "peer"), rows, (middle - bar - 1, middle + 1), strict=True):
                rate = row[self.rate]
                y = self._y(rate)
                height = self._y(0) - y
                parts.append(
                    f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{bar:.1f}" height="{height:.1f}" rx="2"/>'
                )
                parts.append(_text(x + bar / 2, y + 13, f"{rate:,.0f}", anchor="middle", name=f"on-{name}"))
            for label, below, name in zip(labels, (18, 34), (None, "small"), strict=True):
                parts.append(_text(middle, self._y(0) + below, label, anchor="middle", name=name))
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
                f"<title>{escape(self.title)}</title>",
                f"<style>{_STYLE}</style>",
                *parts,
                "</svg>",
                "",
            ]
        )

    def _y(self, rate: float) -> float:
        return _HEIGHT - _BOTTOM - rate / (1.1 * self.limit) * (_HEIGHT - _TOP - _BOTTOM)

    def _legend(self) -> list[str]:
        parts = []
        for x, name, label in ((_LEFT, "jattn", "jattn"), (_LEFT + 80, "peer", self.peer)):
            parts.append(f'<rect class="{name}" x="{x}" y="28" width="12" height="12" rx="2"/>')
            parts.append(_text(x + 18, 38.5, label, name="small"))
        return parts

    def _grid(self) -> list[str]:
        digits = 10 ** (len(str(int(self.limit / _TICKS))) - 1)
        tick = int(self.limit / _TICKS / digits) * digits
        parts = []
        for rate in range(0, int(self.limit), tick):
            parts.append(self._rule(rate, "grid"))
            parts.append(_text(_LEFT - 8, self._y(rate) + 4, f"{rate:,}", anchor="end", name="small"))
        parts.append(self._rule(self.limit, "limit"))
        above = self._y(self.limit) - 7
        return [*parts, _text(_WIDTH - _RIGHT, above, self.limit_name, anchor="end", name="limit-text")]

    def _rule(self, rate: float, name: str) -> str:
        y = self._y(rate)
        return f'<line class="{name}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", name: str | None = None) -> str:
    style = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'
