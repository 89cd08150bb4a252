"""Texts as a picture shows them: every character visible, and safe in XML."""

import unicodedata
from html import escape

_JOINERS = "\u200c\u200d"  # within words and emoji
_BREAK = "↵"


def visible(text: str) -> str:
    """Write a text so that everything in it is seen: line ends as ↵ before the break, controls as pictures or code points."""
    return "".join(map(_shown, text.replace("\r\n", "\n")))


def _shown(character: str) -> str:
    code, category = ord(character), unicodedata.category(character)
    if character == "\n":
        return f"{_BREAK}\n"
    if character == "\t":
        return "⇥"
    if code < 0x20:
        return chr(0x2400 + code)
    if code == 0x7F:
        return "␡"
    if character in _JOINERS:
        return character
    if category in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp"):  # unseen, unassigned, or not allowed in XML
        return f"⟨{code:X}⟩"
    return character


def xml(text: str) -> str:
    """Escape a visible text for XML, its spaces kept."""
    return escape(text, quote=True).replace(" ", "\u00a0")


__all__ = ["visible", "xml"]
