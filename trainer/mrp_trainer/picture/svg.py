"""An SVG of decoded texts: their tokens in their places, coloured by the forward that revealed
them, and bars of tokens per forward.

The SVG is self-contained and runs no script; its animation is CSS. This module computes the layout,
and `decode.svg.jinja` writes it.
"""

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from colorsys import hls_to_rgb
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from rich.cells import cell_len, chop_cells

from ..outputs import write_output
from .facts import Decode, Forward, Token

_MARGIN, _GAP, _PANEL = 20.0, 16.0, 472.0
_INSET = 16.0  # within a panel
_CHARACTER, _LINE = 7.8, 27.0  # width and height in the fixed-width font, at 13 px
_UNIT, _MAX_BAR = 5.0, 12  # height of a token in a bar, and the most tokens of a bar
_PROMPT_LINES = 3
_LEGEND = 236.0  # the largest width of an entry
# How some characters are shown. Joiners stay as they are, within words and emoji.
_REPLACEMENTS = {"\n": "↵\n", "\t": "⇥", "\u200c": "\u200c", "\u200d": "\u200d"}
# placeholder of the picture's id, which is a hash of the rest; visible texts hold no controls
_ID = "\0"
# the most seconds per forward, and seconds for which the complete text stays
_MAX_TICK, HOLD = 0.28, 3.0
_MAX_DURATION, _MIN_TICK = 12.0, 0.04  # the most seconds of all forwards, and the least per forward


@dataclass(frozen=True)
class Picture:
    """An SVG picture of decoding or training runs. Notebooks display it; its title summarises its
    content."""

    svg: str = field(repr=False)
    title: str

    def save(self, path: Path | str, overwrite: bool = False) -> Path:
        """Write the picture to an .svg or a .png, and return the path.

        Raises:
            ValueError: for a path with another ending, and for an existing file, unless `overwrite`
                is set or the file is an unchanged .svg of this package.
            ImportError: for a .png without cairosvg.
        """
        path = Path(path)
        check_name(path)
        content = self._png() if path.suffix == ".png" else self.svg.encode()
        write_output(path, content, overwrite=overwrite, is_own=is_unchanged)
        return path

    def _png(self) -> bytes:
        try:
            from cairosvg import svg2png
        except (ImportError, OSError) as error:  # the package, or the library cairo that it calls
            raise ImportError(
                "a .png needs cairosvg: pip install 'modeling-mrp[picture]', or name an .svg "
                f"({error})"
            ) from error
        return bytes(svg2png(bytestring=self.svg.encode(), scale=2.0))

    def _repr_html_(self) -> str:
        return self.svg


def check_name(path: Path | str) -> None:
    """Raise `ValueError` for a file name that ends neither in .svg nor in .png."""
    if Path(path).suffix not in (".svg", ".png"):
        raise ValueError(
            f"{path}: a picture is an SVG or a PNG, give a name that ends in .svg or .png"
        )


def draw(
    decodes: Sequence[Decode], *, prompt: str | None = None, animated: bool = False
) -> Picture:
    """Draw decoded texts side by side, at most two next to each other. They share one clock: the
    n-th forward has the same colour in all of them.

    The same arguments always give the same picture. The prompt is shown above, shortened to three
    lines. If `animated`, the texts appear forward by forward in a loop, but are shown complete if
    the viewer prefers less motion. `ValueError` if `decodes` is empty.
    """
    if not decodes:
        raise ValueError("there are no decodes to draw: pass at least one")
    forwards = [forward for decode in decodes for forward in decode.forwards]
    clock = max(1, *(len(decode.forwards) for decode in decodes))
    across = min(2, len(decodes))
    width = 2 * _MARGIN + across * _PANEL + (across - 1) * _GAP
    lines = _prompt(prompt or "", int((width - 2 * _MARGIN - 70) / _CHARACTER))
    above = _height(max((forward.own + forward.accepted for forward in forwards), default=1))
    below = _height(max((forward.refused for forward in forwards), default=0))
    panels = []
    top = 27.0 + 19 * len(lines) if lines else _MARGIN
    for begin in range(0, len(decodes), across):
        row = decodes[begin : begin + across]
        layouts = [_boxes(decode, _PANEL - 2 * _INSET) for decode in row]
        last_line = max((box.line for boxes, _ in layouts for box in boxes), default=0)
        base = 92 + above + _LINE * (1 + last_line)
        height = base + below + 26
        x = _MARGIN
        for decode, (boxes, blocks) in zip(row, layouts, strict=True):
            panel = {"decode": decode, "boxes": boxes, "blocks": blocks, "bars": _bars(decode)}
            panels.append(panel | {"x": x, "y": top, "base": base, "height": height})
            x += _PANEL + _GAP
        top += height + _GAP
    legend = _legend(decodes)
    columns = int((width - 2 * _MARGIN) / _LEGEND)
    title = "; ".join(
        f"{visible(decode.name)}: {len(decode.forwards)} forwards" for decode in decodes
    )
    return picture_of(
        "decode.svg.jinja",
        title,
        animated=animated,
        clock=clock,
        step=(_PANEL - 2 * _INSET) / clock,
        lines=lines,
        panels=panels,
        legend=legend,
        columns=columns,
        column=_LEGEND,
        top=top,
        width=width,
        height=top + 22 * (1 + len(legend) // columns) + 12,
        margin=_MARGIN,
        inset=_INSET,
        panel_width=_PANEL,
        line=_LINE,
        tick=min(max(_MAX_DURATION / clock, _MIN_TICK), _MAX_TICK),
        hold=HOLD,
        colours=["inherit", *(colour(forward / max(1, clock - 1)) for forward in range(clock))],
    )


def picture_of(template: str, title: str, **values: Any) -> Picture:
    """Render a template as a picture.

    Args:
        template: The name of the template file, in the folder of this module.
        title: The title of the picture. The template can use it as the variable `title`.
        values: Further variables of the template.

    Returns:
        The picture. Its SVG has an id, a hash of everything else in it, by which `is_unchanged`
        recognises a picture that nobody has changed.
    """
    svg = _template(template).render(name=_ID, title=title, **values)
    return Picture(svg.replace(_ID, _id_of(svg)), title)


def _bars(decode: Decode) -> list[tuple[Forward, float, float, float]]:
    """List the forwards of a decoded text, each with the heights of its three bars: tokens revealed
    without a draft, tokens of accepted drafts, and refused drafts."""
    bars = []
    for forward in decode.forwards:
        own = _height(forward.own)
        bars.append((forward, own, _height(forward.accepted), _height(forward.refused)))
    return bars


def _id_of(svg: str) -> str:
    """Make the id of a picture from its SVG, in which placeholders stand for the id."""
    return "mrp-" + hashlib.sha256(svg.encode()).hexdigest()[:10]


def is_unchanged(content: bytes) -> bool:
    """Return whether the content of a file is an SVG that this module made and that nobody has
    changed since, judged by its id."""
    text = content.decode("utf-8", "replace")
    match = re.search(r"mrp-[0-9a-f]{10}", text)
    return match is not None and _id_of(text.replace(match[0], _ID)) == match[0]


def _prompt(prompt: str, width: int) -> list[str]:
    """Break a prompt into lines of up to `width` cells; if there are more lines than fit, the last
    line ends with an ellipsis."""
    lines: list[str] = []
    for line in visible(prompt).splitlines():
        lines += map(str.lstrip, chop_cells(line, width))
    if len(lines) > _PROMPT_LINES:
        lines = [*lines[: _PROMPT_LINES - 1], f"{lines[_PROMPT_LINES - 1][:-1]}…"]
    return lines


@dataclass(frozen=True)
class _TokenBox:
    """The box of a token, or of the part of a token that is on one line, with the position of the
    box in the text."""

    token: Token
    text: str
    x: float
    line: int
    width: float

    @property
    def kind(self) -> str:
        """Return the CSS class of the box, which depends on how its token was revealed."""
        if self.token.forward is None:
            return "given"
        return "draft" if self.token.drafted else "own"

    @property
    def text_length(self) -> float | None:
        """Return the width in SVG units to which the text is stretched, so that it does not depend
        on the font. Return None for a text of at most one character of normal width, which is not
        stretched."""
        return cell_len(self.text) * _CHARACTER if cell_len(self.text) > 1 else None


def _boxes(decode: Decode, width: float) -> tuple[list[_TokenBox], list[tuple[float, int]]]:
    """Lay out the tokens of a text in lines up to `width`, with a break after each line end. Return
    the boxes of the tokens, and a pair (x, line) for each place where a block begins."""
    boxes: list[_TokenBox] = []
    begins: list[tuple[float, int]] = []
    x = 0.0
    line = 0
    max_cells = int((width - 5) / _CHARACTER)
    for column, token in enumerate(decode.tokens):
        begin = column in decode.blocks
        for of_line in (visible(token.text) or "‥").splitlines(keepends=True):
            for chunk in chop_cells(of_line.removesuffix("\n"), max_cells) or [""]:
                box_width = max(1, cell_len(chunk)) * _CHARACTER + 5
                gap = 7.0 if begin and x else 0.0
                if x + gap + box_width > width:
                    x = gap = 0.0
                    line += 1
                if begin:
                    begins.append((x + gap / 2 - (1 if gap else 3), line))
                begin = False
                boxes.append(_TokenBox(token, chunk, x + gap, line, box_width))
                x += gap + box_width + 2
            if of_line.endswith("\n"):
                x = 0.0
                line += 1
    return boxes, begins


# By CSS class, the labels of the legend.
_LABELS = {
    "own": "revealed without a draft",
    "draft": "revealed by an accepted draft",
    "refused": "drafts refused",
    "given": "given",
    "back": "a reveal was taken back here",
}


def _legend(decodes: Sequence[Decode]) -> list[tuple[str, str]]:
    """List the kinds of boxes and marks in the picture: the CSS class and the label of each."""
    present = {"own"}
    for decode in decodes:
        for token in decode.tokens:
            if token.drafted:
                present.add("draft")
            if token.forward is None:
                present.add("given")
            if token.taken_back:
                present.add("back")
        if any(forward.refused for forward in decode.forwards):
            present.add("refused")
    return [(kind, label) for kind, label in _LABELS.items() if kind in present]


def _height(count: int) -> float:
    """Return the height of a bar for a number of tokens."""
    return _UNIT * min(_MAX_BAR, count)


def visible(text: str) -> str:
    """Make every character of a text visible: line ends as ↵ before the line break, control
    characters as their code points."""
    return "".join(map(_visible_character, text.replace("\r\n", "\n")))


def _visible_character(character: str) -> str:
    if (replacement := _REPLACEMENTS.get(character)) is not None:
        return replacement
    # Categories that are invisible, unassigned, or not allowed in XML.
    unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
    return f"⟨{ord(character):X}⟩" if unseen else character


def colour(fraction: float) -> str:
    """Return the colour of a forward as text, such as "#e6a637". `fraction` is the place of the
    forward between the first one in the picture (0, a warm colour) and the last one (1, a cold
    colour)."""
    return "#" + "".join(
        f"{round(255 * channel):02x}"
        for channel in hls_to_rgb((38 - 183 * fraction) / 360 % 1, 0.56, 0.78)
    )


def _short(value: object) -> object:
    """Format a float with six significant digits; return any other value as it is."""
    return f"{value:.6g}" if isinstance(value, float) else value


@cache
def _template(name: str) -> Any:
    from jinja2 import Environment, StrictUndefined  # imported late, as help does not need it

    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_short,
    )
    environment.filters |= {
        "colour": colour,
        "visible": visible,
        "spaced": lambda text: text.replace(" ", "\u00a0"),
    }
    return environment.from_string(
        Path(__file__).with_name(name).read_text(encoding="utf-8") + "\n"
    )
