"""An SVG of decodes: tokens where they stand, coloured by the forward that revealed them, and forwards counted.

It refers to nothing outside of itself and runs no script; the animated form moves by CSS.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from rich.cells import cell_len, chop_cells

from .facts import Decode, Token
from .style import FIT, colour, plain, style
from .text import visible, xml

_MARGIN, _GAP, _PANEL = 20.0, 16.0, 472.0
_INSET = 16.0  # of a panel
_CHARACTER = 7.8  # of the fixed-width font, at 13 px
_LINE, _CHIP = 27.0, 21.0
_UNIT, _MOST = 5.0, 12  # of a bar: a token's height, and how many fit
_PROMPT_LINES = 3
_ID = "\0"  # stands for the picture's id until that is known; visible texts hold no controls


@dataclass(frozen=True)
class Picture:
    """A picture of decodes, which notebooks show as it is.

    Attributes:
        svg: The SVG.
        title: In words.
    """

    svg: str = field(repr=False)
    title: str

    def save(self, path: Path | str) -> Path:
        """Write it to a file.

        Raises:
            ValueError: if the name does not end in .svg or .png.
            ImportError: if it ends in .png, and cairosvg is not installed.
        """
        path = Path(path)
        check_name(path)
        drawn = self.png() if path.suffix == ".png" else self.svg.encode()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(drawn)
        return path

    def png(self, scale: float = 2.0) -> bytes:
        """Draw it as a PNG, in light colours, so many times as large.

        Raises:
            ImportError: if cairosvg is not installed.
        """
        try:
            from cairosvg import svg2png
        except (ImportError, OSError) as error:  # the package, or the library cairo that it calls
            raise ImportError(f"a .png needs cairosvg: pip install '.[picture]', or name an .svg ({error})") from error
        return bytes(svg2png(bytestring=plain(self.svg).encode(), scale=scale))

    def _repr_html_(self) -> str:
        return self.svg


def check_name(path: Path | str) -> None:
    """Refuse, with a `ValueError`, a file name that is no picture's."""
    if Path(path).suffix not in (".svg", ".png"):
        raise ValueError(f"{path}: a picture is an SVG or a PNG, give a name that ends in .svg or .png")


def draw(decodes: Sequence[Decode] | Decode, *, prompt: str | None = None, animated: bool = False) -> Picture:
    """Draw decodes side by side, two in a row, on one clock: the colours of a forward are the same in all of them.

    Args:
        decodes: What `read_decode` read.
        prompt: Is shown above, shortened to three lines.
        animated: Whether the texts come forward by forward, again and again; where the viewer asks for less motion they stand.

    Returns:
        The picture, the same for the same decodes.

    Raises:
        ValueError: if there are no decodes.
    """
    decodes = [decodes] if isinstance(decodes, Decode) else list(decodes)
    if not decodes:
        raise ValueError("there are no decodes to draw: pass at least one")
    clock = max(1, *(len(decode.forwards) for decode in decodes))
    across = min(2, len(decodes))
    width = 2 * _MARGIN + across * _PANEL + (across - 1) * _GAP
    parts, top = _prompt(prompt, width)
    for begin in range(0, len(decodes), across):
        panels = [_Panel(decode, clock, animated) for decode in decodes[begin : begin + across]]
        below = max(panel.below for panel in panels)
        height = max(panel.height for panel in panels) + below
        for place, panel in enumerate(panels):
            parts.append(panel.drawn(_MARGIN + place * (_PANEL + _GAP), top, height, height - 26 - below))
        top += height + _GAP
    legend, height = _legend(decodes, clock, width, top)
    parts += legend
    title = "; ".join(f"{visible(decode.name)}: {len(decode.forwards)} forwards" for decode in decodes)
    body = "\n".join(parts)
    name = "mrp-" + hashlib.sha256(f"auto{animated}{width}{body}".encode()).hexdigest()[:10]
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" id="{name}" viewBox="0 0 {_n(width)} {_n(height)}" width="{_n(width)}" '
        f'height="{_n(height)}" role="img" aria-label="{escape(title)}" style="{FIT}">\n'
        f"<style>{style(name, clock if animated else None, [len(one.forwards) for one in decodes])}</style>\n"
        f'<rect class="page" width="{_n(width)}" height="{_n(height)}" rx="10"/>\n{body.replace(_ID, name)}\n</svg>\n'
    )
    return Picture(svg, title)


def _prompt(prompt: str | None, width: float) -> tuple[list[str], float]:
    """The lines of the prompt, and where the panels begin."""
    if not prompt:
        return [], _MARGIN
    wide = int((width - 2 * _MARGIN - 70) / _CHARACTER)
    lines = [part.lstrip() for line in visible(prompt).splitlines() for part in chop_cells(line, wide)]
    if len(lines) > _PROMPT_LINES:
        lines = [*lines[: _PROMPT_LINES - 1], f"{lines[_PROMPT_LINES - 1][:-1]}…"]
    drawn = [f'<text class="small" x="{_n(_MARGIN + 4)}" y="32">prompt</text>']
    drawn += [
        f'<text class="mono" x="{_n(_MARGIN + 62)}" y="{32 + 19 * at}">{xml(line)}</text>' for at, line in enumerate(lines)
    ]
    return drawn, 46.0 + 19 * (len(lines) - 1)


@dataclass(frozen=True)
class _Piece:
    """A part of a token on one line: where it stands within the text, and what is written there."""

    token: Token
    text: str
    x: float
    line: int
    width: float


def _pieces(decode: Decode, width: float) -> tuple[list[_Piece], list[tuple[float, int]]]:
    """Lay out a text's tokens, with a break behind each line end; and the places at which blocks begin."""
    pieces: list[_Piece] = []
    begins: list[tuple[float, int]] = []
    x, line = 0.0, 0
    most = int((width - 5) / _CHARACTER)
    for column, token in enumerate(decode.tokens):
        shown = visible(token.text) or "‥"
        for number, of_line in enumerate(shown.splitlines(keepends=True)):
            for part in chop_cells(of_line.removesuffix("\n"), most) or [""]:
                wide = max(1, cell_len(part)) * _CHARACTER + 5
                gap = 7.0 if column in decode.blocks and not number and x else 0.0
                if x + gap + wide > width:
                    x, line, gap = 0.0, line + 1, 0.0
                if column in decode.blocks and not number and (not begins or pieces[-1].token is not token):
                    begins.append((x + gap / 2 - (1 if gap else 3), line))
                x += gap
                pieces.append(_Piece(token, part, x, line, wide))
                x += wide + 2
            if of_line.endswith("\n"):
                x, line = 0.0, line + 1
    return pieces, begins


class _Panel:
    """One decode: its name and counts, its text, and a bar for each forward.

    Args:
        decode: The decode.
        clock: Forwards of the longest decode in the picture.
        animated: Whether it moves.
    """

    def __init__(self, decode: Decode, clock: int, animated: bool) -> None:
        self.decode, self.clock, self.animated = decode, clock, animated
        self.width = _PANEL - 2 * _INSET
        self.pieces, self.begins = _pieces(decode, self.width)
        self.text_height = _LINE * (1 + max((piece.line for piece in self.pieces), default=0))
        self.above = _UNIT * min(_MOST, max((one.own + one.accepted for one in decode.forwards), default=1))
        self.below = _UNIT * min(_MOST, max((one.refused for one in decode.forwards), default=0))
        self.height = 74 + self.text_height + 18 + self.above + 26

    def drawn(self, x: float, y: float, height: float, base: float) -> str:
        """The panel at a place, as high as its neighbours, with the bars on one line with theirs."""
        self.bottom = height - base
        parts = [
            f'<g transform="translate({_n(x)} {_n(y)})">',
            f'<rect class="panel" width="{_n(_PANEL)}" height="{_n(height)}" rx="8"/>',
            *self._header(),
            f'<g transform="translate({_n(_INSET)} 74)">',
            *self._text(),
            "</g>",
            f'<g transform="translate({_n(_INSET)} {_n(base)})">',
            *self._bars(),
            "</g></g>",
        ]
        return "\n".join(parts)

    def _header(self) -> list[str]:
        decode, right = self.decode, _n(_PANEL - _INSET)
        count = len(decode.forwards)
        told = [f"{decode.tokens_per_forward:.2f} tokens per forward"]
        told += [f"{decode.accepted} of {decode.drafted} drafts accepted"] if decode.drafted else []
        told += [f"{decode.head_forwards} head forwards"] if decode.head_forwards else []
        back = sum(token.taken_back for token in decode.tokens)
        told += [f"{back} taken back"] if back else []
        parts = [
            f'<text class="name" x="{_n(_INSET)}" y="30">{xml(visible(decode.name))}</text>',
            f'<text class="small" x="{_n(_INSET)}" y="51">{xml(" · ".join(told))}</text>',
            f'<text class="small end" x="{right}" y="30">forward{"s" * (count != 1)}</text>',
        ]
        at = _n(_PANEL - _INSET - (58 if count != 1 else 51))
        if not self.animated:
            return [*parts, f'<text class="count end" x="{at}" y="30">{count}</text>']
        strip = "".join(
            f'<text class="count end" x="{at}" y="{30 + 30 * number}">{number}</text>' for number in range(count + 1)
        )
        clip = f"{_ID}-{count}"
        return [
            *parts,
            f'<clipPath id="{clip}"><rect x="0" y="8" width="{right}" height="28"/></clipPath>',
            f'<g clip-path="url(#{clip})"><g class="strip{count}">{strip}</g></g>',
        ]

    def _text(self) -> list[str]:
        parts = [
            f'<rect class="block" x="{_n(x)}" y="{_n(line * _LINE - 2)}" width="2" height="{_n(_CHIP + 4)}" rx="1"/>'
            for x, line in self.begins
        ]
        if self.animated:
            parts += [_chip(piece, "mask") for piece in self.pieces if piece.token.forward is not None]
        for piece in self.pieces:
            token, middle = piece.token, piece.x + piece.width / 2
            kind = "given" if token.forward is None else "draft" if token.drafted else "own"
            ink = "mono tok special" if token.special else "mono tok"
            at = f'x="{_n(middle)}" y="{_n(piece.line * _LINE + 15)}"'
            fits = f'textLength="{_n(cell_len(piece.text) * _CHARACTER)}" lengthAdjust="spacingAndGlyphs"'
            fits = fits if cell_len(piece.text) > 1 else ""
            back = f'<circle class="back" cx="{_n(piece.x + piece.width - 1)}" cy="{_n(piece.line * _LINE + 1)}" r="3.2"/>'
            under = _chip(piece, "under") if self.animated else ""
            parts.append(
                f'<g class="{_when(token.forward)}" {_paint(token.forward, self.clock)}><title>{escape(_told(token))}</title>'
                f'{under}{_chip(piece, kind)}<text class="{ink}" {at} {fits}>{xml(piece.text)}</text>'
                f"{back if token.taken_back else ''}</g>"
            )
        return parts

    def _bars(self) -> list[str]:
        step = self.width / self.clock
        wide = max(1.0, min(step - 1.5, 22.0))
        parts = []
        for number, one in enumerate(self.decode.forwards, 1):
            at = (number - 0.5) * step - wide / 2
            own, accepted, refused = (_UNIT * min(_MOST, count) for count in (one.own, one.accepted, one.refused))
            accepted = min(accepted, _UNIT * _MOST - own)
            rects = _bar("own", at, -own, wide, own) + _bar("draft", at, -own - accepted, wide, accepted)
            rects += _bar("refused", at, 3, wide, refused)
            told = f"forward {number}: {one.own} revealed, {one.accepted} by accepted drafts, {one.refused} drafts refused"
            parts.append(f'<g class="bar f{number}" {_paint(number, self.clock)}><title>{told}</title>{rects}</g>')
        parts.append(f'<path class="axis" d="M0 1.5H{_n(self.width)}"/>')
        if self.animated:
            parts.append(f'<path class="head" d="M0 {_n(-self.above - 4)}V{_n(self.bottom - 22)}"/>')
        y = _n(self.bottom - 9)
        parts.append(f'<text class="tiny" x="0" y="{y}">forward 1</text>')
        parts.append(f'<text class="tiny end" x="{_n(self.width)}" y="{y}">{self.clock}</text>')
        return parts


def _bar(kind: str, x: float, y: float, width: float, height: float) -> str:
    if not height:
        return ""
    return f'<rect class="{kind}" x="{_n(x)}" y="{_n(y)}" width="{_n(width)}" height="{_n(height)}" rx="1"/>'


def _chip(piece: _Piece, kind: str) -> str:
    y = piece.line * _LINE
    return f'<rect class="{kind}" x="{_n(piece.x)}" y="{_n(y)}" width="{_n(piece.width)}" height="{_n(_CHIP)}" rx="4"/>'


def _when(forward: int | None) -> str:
    return "token" if forward is None else f"token f{forward}"


def _paint(forward: int | None, clock: int) -> str:
    return "" if forward is None else f'style="color:{colour((forward - 1) / max(1, clock - 1))}"'


def _told(token: Token) -> str:
    """What a token says of itself."""
    shown = visible(token.text).replace("\n", "") or "part of a character"
    if token.forward is None:
        return f"{shown}: given"
    how = "an accepted draft" if token.drafted else "the forward's own"
    back = f", {token.taken_back} taken back here before" if token.taken_back else ""
    return f"{shown}: forward {token.forward}, step {token.step + 1}, p {token.probability:.2f}, {how}{back}"


def _legend(decodes: Sequence[Decode], clock: int, width: float, y: float) -> tuple[list[str], float]:
    """What colours and outlines mean, only what the picture shows; and where the picture ends."""
    tokens = [token for decode in decodes for token in decode.tokens]
    entries = [("own", "revealed without a draft", True)]
    entries += [("draft", "revealed by an accepted draft", any(token.drafted for token in tokens))]
    entries += [("refused", "drafts refused", any(one.refused for decode in decodes for one in decode.forwards))]
    entries += [("given", "given", any(token.forward is None for token in tokens))]
    entries += [("back", "a reveal was taken back here", any(token.taken_back for token in tokens))]
    x = _MARGIN + 4
    parts = [f'<text class="small" x="{_n(x)}" y="{_n(y + 13)}">forward 1</text>']
    for step in range(24):
        paint = f'style="fill:{colour(step / 23)}"'
        parts.append(f'<rect {paint} x="{_n(x + 66 + 4 * step)}" y="{_n(y + 3)}" width="4.3" height="11"/>')
    parts.append(f'<text class="small" x="{_n(x + 170)}" y="{_n(y + 13)}">{clock}</text>')
    x += 216
    for kind, label, shown in entries:
        wide = 44 + 6.6 * len(label)
        if not shown:
            continue
        if x + wide - 16 > width - _MARGIN:
            x, y = _MARGIN + 4, y + 23
        mark = f'<rect class="{kind}" x="{_n(x)}" y="{_n(y + 1)}" width="20" height="15" rx="4"/>'
        mark = f'<circle class="back" cx="{_n(x + 10)}" cy="{_n(y + 9)}" r="4"/>' if kind == "back" else mark
        label = f'<text class="small" x="{_n(x + 27)}" y="{_n(y + 13)}">{escape(label)}</text>'
        parts.append(f'<g style="color:{colour(0.5)}">{mark}{label}</g>')
        x += wide
    return parts, y + 34


def _n(number: float) -> str:
    return f"{number:.2f}".rstrip("0").rstrip(".")


__all__ = ["Picture", "draw"]
