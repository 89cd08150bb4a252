"""Texts as a picture shows them: every character visible, and allowed in XML."""

import unicodedata

_SHOWN = {"\n": "↵\n", "\t": "⇥", "\u200c": "\u200c", "\u200d": "\u200d"}  # joiners stand within words and emoji


def visible(text: str) -> str:
    """Write a text so that everything in it is seen: line ends as ↵ before the break, controls as their code points."""
    return "".join(map(_shown, text.replace("\r\n", "\n")))


def _shown(character: str) -> str:
    if (shown := _SHOWN.get(character)) is not None:
        return shown
    # Categories of what is unseen, unassigned, or not allowed in XML.
    unseen = unicodedata.category(character) in ("Cc", "Cf", "Cs", "Cn", "Co", "Zl", "Zp")
    return f"⟨{ord(character):X}⟩" if unseen else character
