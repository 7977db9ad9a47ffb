"""The picture of decode bandwidth: jattn beside FlashInfer under the roofline, as SVG for light and dark pages."""

from typing import Any
from xml.sax.saxutils import escape

Row = dict[str, Any]

ROOFLINE_GBPS = 4386
_TOP_GBPS = 4800
_WIDTH, _HEIGHT = 860, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 16, 52, 56
_BAR = 38
_STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1f2328 }
.small { font-size: 11px; fill: #59636e }
.jattn { fill: #0a7d5c } .peer { fill: #b3bcc6 }
.on-jattn { font-size: 10px; fill: #ffffff } .on-peer { font-size: 10px; fill: #1f2328 }
.grid { stroke: #d1d9e0; stroke-width: 1 }
.roofline { stroke: #c2410c; stroke-width: 1.5; stroke-dasharray: 6 4 }
.roofline-text { fill: #c2410c; font-size: 11px }
@media (prefers-color-scheme: dark) {
  text { fill: #f0f6fc } .small { fill: #9198a1 }
  .jattn { fill: #34c796 } .peer { fill: #5a6572 }
  .on-jattn { fill: #0d1117 } .on-peer { fill: #f0f6fc }
  .grid { stroke: #3d444d } .roofline { stroke: #fb923c } .roofline-text { fill: #fb923c }
}
""".strip()


def decode_picture(pairs: list[tuple[Row, Row]]) -> str:
    """SVG of the plain rows: bf16, page 16, NHD, and the fewest query heads among them.

    Raises:
        ValueError: There is no such row.
    """
    plain = [(row, peer) for row, peer in pairs if row["page"] == 16 and "layout" not in row and row["kv"] == "bf16"]
    if not plain:
        raise ValueError("The picture needs a decode row of bf16, page 16, NHD.")
    heads = min(row["hq"] for row, _ in plain)
    plain = [(row, peer) for row, peer in plain if row["hq"] == heads]
    title = f"Paged decode on an H200, GB/s of keys and values (bf16, page 16, {heads}/{plain[0][0]['hkv']} heads)"
    step = (_WIDTH - _LEFT - _RIGHT) / len(plain)
    bar = min(_BAR, step * 0.42)
    parts = [_text(_LEFT, 18, title), *_legend(), *_grid()]
    for index, (row, peer) in enumerate(plain):
        middle = _LEFT + step * (index + 0.5)
        for name, figures, x in (("jattn", row, middle - bar - 1), ("peer", peer, middle + 1)):
            y = _y(figures["GBps"])
            parts.append(
                f'<rect class="{name}" x="{x:.1f}" y="{y:.1f}" width="{bar:.1f}" height="{_y(0) - y:.1f}" rx="2"/>'
            )
            parts.append(_text(x + bar / 2, y + 13, f"{figures['GBps']:,.0f}", anchor="middle", name=f"on-{name}"))
        ragged = row["batch"] == "ragged64"
        parts.append(_text(middle, _y(0) + 18, "ragged" if ragged else f"batch {row['batch']}", anchor="middle"))
        context = "64 sequences" if ragged else f"context {row['ctx']:,}"
        parts.append(_text(middle, _y(0) + 34, context, anchor="middle", name="small"))
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            *parts,
            "</svg>",
            "",
        ]
    )


def _y(gbps: float) -> float:
    return _HEIGHT - _BOTTOM - gbps / _TOP_GBPS * (_HEIGHT - _TOP - _BOTTOM)


def _text(x: float, y: float, text: str, *, anchor: str = "start", name: str | None = None) -> str:
    style = f' class="{name}"' if name else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{style}>{escape(text)}</text>'


def _legend() -> list[str]:
    parts = []
    for x, name, label in ((_LEFT, "jattn", "jattn"), (_LEFT + 80, "peer", "FlashInfer 0.7.2")):
        parts.append(f'<rect class="{name}" x="{x}" y="28" width="12" height="12" rx="2"/>')
        parts.append(_text(x + 18, 38.5, label, name="small"))
    return parts


def _grid() -> list[str]:
    parts = []
    for gbps in range(0, _TOP_GBPS, 1000):
        parts.append(_rule(gbps, "grid"))
        parts.append(_text(_LEFT - 8, _y(gbps) + 4, f"{gbps:,}", anchor="end", name="small"))
    label = f"read bandwidth {ROOFLINE_GBPS:,} GB/s"
    parts.append(_rule(ROOFLINE_GBPS, "roofline"))
    return [*parts, _text(_WIDTH - _RIGHT, _y(ROOFLINE_GBPS) - 7, label, anchor="end", name="roofline-text")]


def _rule(gbps: float, name: str) -> str:
    return f'<line class="{name}" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{_y(gbps):.1f}" y2="{_y(gbps):.1f}"/>'
