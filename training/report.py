"""Self-contained HTML reports: one file, no scripts, no external resources, so that it opens from disk and in a sandboxed iframe alike.

A report is ``page(title, blocks)``; blocks come from the functions here and every text in them is escaped. Figures are drawn with
matplotlib (imported only when one is drawn, never through pyplot, so no global state) and embedded as inline SVG.
"""

from __future__ import annotations

import hashlib
import html
import io
import math
import os
import re
import tempfile
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Html(str):
    """Text that is markup already, so that it is not escaped again. Only this module makes it."""

    __slots__ = ()


Cell = str | int | float | bool | None
Tone = Literal["good", "warn", "bad", "plain"]

PALETTE = ("#0b5fa5", "#d1660b", "#2a8a57", "#8a4fb0", "#6b7280")
"""Distinguishable with the common colour-vision deficiencies; first is the subject, second what it is compared with."""

_STYLE = """
:root{color-scheme:light}
*{box-sizing:border-box}
body{margin:0;background:#f5f6f8;color:#1c2430;font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:1080px;margin:0 auto;padding:28px 24px 64px}
h1{font-size:26px;line-height:1.25;margin:0 0 4px;overflow-wrap:anywhere}
h2{font-size:19px;margin:36px 0 10px}
h3{font-size:16px;margin:24px 0 8px;overflow-wrap:anywhere}
p{margin:8px 0;max-width:80ch}
.subtitle{color:#5b6675;margin:0 0 18px;overflow-wrap:anywhere}
.tiles{display:grid;grid-template-columns:repeat(auto-fill,minmax(160px,1fr));gap:12px;margin:16px 0}
.tile{background:#fff;border:1px solid #dfe3e8;border-radius:8px;padding:12px 14px}
.tile .name{color:#5b6675;font-size:13px}
.tile .value{font-size:23px;font-weight:600;font-variant-numeric:tabular-nums;overflow-wrap:anywhere;line-height:1.3}
.tile .note{color:#5b6675;font-size:12.5px;overflow-wrap:anywhere}
.scroll{overflow-x:auto;background:#fff;border:1px solid #dfe3e8;border-radius:8px;margin:10px 0}
table{border-collapse:collapse;width:100%;font-size:14px}
caption,figcaption{color:#5b6675;font-size:13px;text-align:left}
caption{padding:10px 12px 4px}
th,td{padding:6px 12px;text-align:left;vertical-align:top;border-top:1px solid #eceff2}
thead th{border-top:0;border-bottom:1px solid #cfd5dc;font-weight:600;vertical-align:bottom;background:#fafbfc}
td.num,th.num{text-align:right;font-variant-numeric:tabular-nums}
td.num{white-space:nowrap}
td.text{overflow-wrap:break-word;min-width:7em;max-width:34em}
td.none{color:#8a94a1}
figure{background:#fff;border:1px solid #dfe3e8;border-radius:8px;margin:12px 0;padding:12px 14px}
figure svg{width:100%;height:auto;display:block}
.grid{display:grid;grid-template-columns:repeat(auto-fill,minmax(440px,1fr));gap:14px}
.grid figure{margin:0}
.badge{display:inline-block;border-radius:999px;padding:1px 10px;font-size:13px;font-weight:600;white-space:nowrap;border:1px solid}
.good{color:#17643c;background:#e6f4ec;border-color:#b5dcc6}
.warn{color:#7a4a00;background:#fdf2dc;border-color:#ecd29a}
.bad{color:#9b1c1c;background:#fdeaea;border-color:#f0bcbc}
.plain{color:#414b58;background:#eef0f3;border-color:#d5dae0}
details{margin:10px 0}
summary{cursor:pointer;color:#0b5fa5}
code{font:13px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace;overflow-wrap:anywhere}
@media(max-width:520px){.grid{grid-template-columns:1fr}}
@media print{body{background:#fff}main{max-width:none;padding:0}}
"""


def page(title: str, blocks: Sequence[Html], *, subtitle: str = "") -> str:
    """A whole HTML document."""
    head = f"<h1>{html.escape(title)}</h1>" + (f'<p class="subtitle">{html.escape(subtitle)}</p>' if subtitle else "")
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{html.escape(title)}</title><style>{_STYLE}</style></head>\n<body><main>{head}\n"
        + "\n".join(blocks)
        + "\n</main></body></html>\n"
    )


def heading(text: str, *, level: Literal[2, 3] = 2) -> Html:
    """A section's title."""
    return Html(f"<h{level}>{html.escape(text)}</h{level}>")


def paragraph(*parts: str) -> Html:
    """Running text; parts that are ``Html`` (badges, code) stay as they are."""
    return Html("<p>" + "".join(_inline(part) for part in parts) + "</p>")


def code(text: str) -> Html:
    """A formula, path or command inside a paragraph or cell."""
    return Html(f"<code>{html.escape(text)}</code>")


def badge(text: str, tone: Tone) -> Html:
    """A small coloured label; the text carries the meaning, the colour only repeats it."""
    return Html(f'<span class="badge {tone}">{html.escape(text)}</span>')


def tiles(entries: Sequence[tuple[str, str, str]]) -> Html:
    """Headline numbers: (name, value, note) each."""
    cells = (
        f'<div class="tile"><div class="name">{html.escape(name)}</div><div class="value">{html.escape(value)}</div>'
        + (f'<div class="note">{html.escape(note)}</div>' if note else "")
        + "</div>"
        for name, value, note in entries
    )
    return Html('<div class="tiles">' + "".join(cells) + "</div>")


def table(columns: Sequence[str], rows: Sequence[Sequence[Cell]], *, caption: str = "", right: Collection[str] = ()) -> Html:
    """A table. Numbers are formatted by ``number`` and set right, None shows as a dash, and columns without names get no header.

    A column without text in it counts as numeric; ``right`` names more columns to set right, such as numbers with a sign.
    Raises ``ValueError`` if a row has another number of cells than there are columns.
    """
    by_column: list[tuple[Cell, ...]] = list(zip(*rows, strict=True)) or [()] * len(columns)
    numeric = [
        name in right or (any(map(_is_number, cells)) and all(_is_number(cell) or cell is None for cell in cells))
        for name, cells in zip(columns, by_column, strict=True)
    ]
    head = "".join(
        f'<th scope="col"{" class=num" if right else ""}>{html.escape(name)}</th>' for name, right in zip(columns, numeric, strict=True)
    )
    head = f"<thead><tr>{head}</tr></thead>" if any(columns) else ""
    body = "".join("<tr>" + "".join(_cell(value, right) for value, right in zip(row, numeric, strict=True)) + "</tr>" for row in rows)
    text = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return Html(f'<div class="scroll"><table>{text}{head}<tbody>{body}</tbody></table></div>')


def figure(drawing: Figure, caption: str) -> Html:
    """A figure as inline SVG with a caption that is its accessible name, too."""
    return Html(f"<figure>{_svg(drawing, caption)}<figcaption>{html.escape(caption)}</figcaption></figure>")


def grid(blocks: Sequence[Html]) -> Html:
    """Figures beside each other where the window is wide enough."""
    return Html('<div class="grid">' + "".join(blocks) + "</div>")


def details(summary: str, *blocks: Html) -> Html:
    """Blocks folded away behind a line of text; opens without a script."""
    return Html(f"<details><summary>{html.escape(summary)}</summary>" + "".join(blocks) + "</details>")


def number(value: float | None, *, digits: int = 4) -> str:
    """A number for reading: grouped integers, otherwise ``digits`` decimals (significant digits below 0.001); a dash for None and nan."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) >= 1e4):
        return f"{int(value):,}"
    if value != 0 and (abs(value) < 0.001 or abs(value) >= 1e6):
        return f"{value:.3g}"
    return f"{value:,.{digits}f}"


def percent(value: float | None, *, digits: int = 1) -> str:
    """A share in percent, 0.125 as 12.5 %; a dash for None and nan."""
    return "–" if value is None or math.isnan(value) else f"{100 * value:.{digits}f}\u00a0%"


def figure_text(text: str, *, limit: int = 24) -> str:
    """Text fit for a figure: at most ``limit`` characters, and no dollar sign that would start a formula."""
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return text.replace("$", r"\$")


def draw(plot: Callable[[Any], None], *, width: float = 6.0, height: float = 4.0) -> Figure:
    """A figure of ``width`` x ``height`` inches with one pair of axes, styled, on which ``plot(axes)`` draws."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(_figure_settings()):
        result = Figure(figsize=(width, height), layout="constrained")
        axes = result.subplots()
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(visible=True, color="#e6e9ed", linewidth=0.8)
        axes.set_axisbelow(True)
        plot(axes)
    return result


def pixels(drawing: Figure, *, dpi: int = 110) -> npt.NDArray[np.uint8]:
    """The figure as an image [height, width, 3]."""
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with mpl.rc_context(_figure_settings()):
        drawing.set_dpi(dpi)
        canvas = FigureCanvasAgg(drawing)
        canvas.draw()
    return np.asarray(canvas.buffer_rgba(), dtype=np.uint8)[:, :, :3].copy()


def write_text(path: Path, text: str) -> None:
    """Write UTF-8 text so that readers see the old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _inline(part: str) -> str:
    return part if isinstance(part, Html) else html.escape(part)


def _is_number(value: Cell) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Cell, right: bool) -> str:
    if value is None:
        return f'<td class="{"num " if right else ""}none">–</td>'
    if isinstance(value, bool):
        return f"<td>{'yes' if value else 'no'}</td>"
    if isinstance(value, int | float):
        return f'<td class="num">{number(value)}</td>'
    kind = "num" if right else "" if isinstance(value, Html) else "text"
    return f'<td class="{kind}">{_inline(value)}</td>'


def _figure_settings() -> dict[str, Any]:
    return {
        "font.family": "DejaVu Sans",
        "font.size": 10,
        "axes.titlesize": 11,
        "axes.titleweight": "bold",
        "axes.titlelocation": "left",
        "axes.labelcolor": "#333c48",
        "axes.edgecolor": "#9aa3ae",
        "xtick.color": "#414b58",
        "ytick.color": "#414b58",
        "legend.frameon": False,
        "svg.fonttype": "path",
        "svg.hashsalt": "satrap",
    }


def _svg(drawing: Figure, label: str) -> str:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.StringIO()
    with mpl.rc_context(_figure_settings()):
        FigureCanvasSVG(drawing).print_svg(buffer, metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    # Several figures share one document: their ids must differ. Metadata names external vocabularies, of no use inline.
    prefix = "f" + hashlib.sha256((label + text).encode()).hexdigest()[:8] + "-"
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{prefix}', text)
    text = re.sub(r'href="#', f'href="#{prefix}', text)
    text = re.sub(r"url\(#", f"url(#{prefix}", text)
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)
