"""Lines of text on a matplotlib figure, measured before they are placed; lengths in inches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.artist import Artist
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties

Line = tuple[str, float, dict[str, Any]]
"""A text without a line break, its size in points and how it looks."""

_LEADING = 1.4  # from one line's foot to the next, in sizes


class Words:
    """Measures, wraps and writes text on ``figure``, from ``LEFT`` on and as far from the right."""

    LEFT = 0.22

    def __init__(self, figure: Figure) -> None:
        assert isinstance(figure.canvas, FigureCanvasAgg)
        canvas: Any = figure.canvas  # matplotlib's methods are not typed
        self._figure, self._renderer = figure, canvas.get_renderer()

    @property
    def dpi(self) -> float:
        """Pixels to an inch."""
        return float(self._figure.dpi)

    def wide(self, text: str, size: float) -> float:
        """Return how wide a plain line of text is."""
        return self._width(text, FontProperties(size=size))

    @property
    def width(self) -> float:
        """What a line may be wide."""
        return self._figure.get_figwidth() - 2 * self.LEFT

    def wrapped(
        self, text: str, size: float, *, bold: bool = False, beside: float = 0.0
    ) -> list[str]:
        """Break ``text`` into lines that fit; ``beside`` is what else stands on them.

        A word that is wider than a line is broken where the line ends.
        """
        font = FontProperties(size=size, weight="bold" if bold else "normal")
        lines: list[str] = []
        for word in text.split():
            longer = f"{lines[-1]} {word}" if lines else word
            if lines and self._width(longer, font) <= self.width - beside:
                lines[-1] = longer
            else:
                lines += self._pieces(word, font, self.width - beside)
        return lines

    def _pieces(self, word: str, font: FontProperties, most: float) -> Iterator[str]:
        while len(word) > 1 and self._width(word, font) > most:
            cut = next(
                n
                for n in range(len(word) - 1, 0, -1)
                if n == 1 or self._width(word[:n], font) <= most
            )
            yield word[:cut]
            word = word[cut:]
        yield word

    def _width(self, text: str, font: FontProperties) -> float:
        width, _, _ = self._renderer.get_text_width_height_descent(text, font, ismath=False)
        return float(width) / self._figure.dpi

    def height(self, lines: Sequence[Line]) -> float:
        """Return how much room the lines take, one below the other."""
        return sum(_LEADING * size / 72 for _, size, _ in lines)

    def width_of(self, artist: Artist) -> float:
        """Return how wide something is as it would be drawn."""
        return float(artist.get_window_extent(self._renderer).width) / self._figure.dpi

    def height_of(self, artist: Artist) -> float:
        """Return how high something is as it would be drawn."""
        return float(artist.get_window_extent(self._renderer).height) / self._figure.dpi

    def write(self, lines: Sequence[Line], top: float) -> None:
        """Write the lines below ``top``; a name in them is no formula."""
        for text, size, look in lines:
            top -= _LEADING * size / 72
            self._figure.text(
                self.LEFT,
                top,
                text,
                fontsize=size,
                va="bottom",
                parse_math=False,
                transform=self._figure.dpi_scale_trans,
                **look,
            )
