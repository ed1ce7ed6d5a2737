"""A canvas that writes SVG, with colours for light and dark pages.

We do not use a plotting library: the pictures are rectangles, lines and words with tooltips, no library makes that
shorter, and each file must work alone in a browser.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

PALETTE = ("#4477aa", "#ee8866", "#44aa77", "#aa3377", "#ccbb44", "#66ccee", "#994455", "#77aadd", "#999933", "#bbbbbb")
"""A mix of Paul Tol's bright and light schemes, distinct for colour-blind readers too."""

_STYLE = """
.page{fill:#ffffff}.ink{fill:#1a1a1a}.soft{fill:#5a5a5a}.grid{stroke:#d5d5d5}.axis{stroke:#1a1a1a}.mark{stroke:#111111}
.empty{fill:#f4f4f4}.label{fill:#111111}
@media (prefers-color-scheme: dark){.page{fill:#16181c}.ink{fill:#f0f0f0}.soft{fill:#a8a8a8}.grid{stroke:#3a3d44}
.axis{stroke:#f0f0f0}.mark{stroke:#ffffff}.empty{fill:#22252b}}
text{font-family:system-ui,-apple-system,"Segoe UI",Helvetica,Arial,sans-serif}
"""


class Canvas:
    """Shapes in pixels, y downwards; later ones lie on top."""

    def __init__(self, width: float, height: float) -> None:
        self.width, self.height = width, height
        self._parts: list[str] = []

    def rectangle(
        self, x: float, y: float, width: float, height: float, *, fill: str = "", shape: str = "", opacity: float = 1.0,
        title: str = "",
    ) -> None:  # fmt: skip
        """Draws a rectangle with a colour, or with the class `shape`. `title` is its tooltip."""
        style = f'class="{shape}"' if shape else f'fill="{fill}" fill-opacity="{opacity:g}"'
        inside = f"<title>{escape(title)}</title>" if title else ""
        self._parts.append(
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}" {style}>{inside}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, shape: str, width: float = 1, dash: str = "") -> None:
        """Draws a straight line with the class `shape`."""
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        self._parts.append(
            f'<line x1="{x1:.2f}" y1="{y1:.2f}" x2="{x2:.2f}" y2="{y2:.2f}" class="{shape}" stroke-width="{width:g}"'
            f"{dashes}/>"
        )

    def text(
        self, x: float, y: float, words: str, *, size: float = 12, anchor: str = "start", shape: str = "ink",
        turned: bool = False, bold: bool = False,
    ) -> None:  # fmt: skip
        """Writes text on a baseline. With `turned` it reads upwards."""
        turn = f' transform="rotate(-90 {x:.1f} {y:.1f})"' if turned else ""
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size:g}" text-anchor="{anchor}" class="{shape}"{turn}{weight}>'
            f"{escape(words)}</text>"
        )

    def svg(self) -> str:
        """The whole picture as SVG text."""
        return "\n".join(
            (
                f'<svg xmlns="http://www.w3.org/2000/svg" width="{self.width:g}" height="{self.height:g}" '
                f'viewBox="0 0 {self.width:g} {self.height:g}">',
                f"<style>{_STYLE}</style>",
                f'<rect class="page" x="0" y="0" width="{self.width:g}" height="{self.height:g}"/>',
                *self._parts,
                "</svg>\n",
            )
        )


def round_ticks(low: float, high: float, about: int) -> Iterator[int]:
    """About `about` integers within low..high, spaced by 1, 2 or 5 times a power of ten."""
    span = max(high - low, 1)
    step = 1
    while span / step > about:
        step = step * 5 // 2 if str(step)[0] == "2" else step * 2
    value = -(-int(low) // step) * step
    while value <= high:
        yield value
        value += step
