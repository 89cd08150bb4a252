"""The command `mrp` in this process."""

from collections.abc import Sequence

from mrp_trainer import cli


def main(arguments: Sequence[str]) -> None:
    """Run `mrp`; a flag may stand before several values, which are given one by one. `SystemExit` where it fails."""
    words: list[str] = []
    flag = None
    for word in arguments:
        if flag is not None and not word.startswith("--") and words[-1] != flag:
            words.append(flag)
        flag = word if word.startswith("--") else flag
        words.append(word)
    try:
        cli.app(words)
    except SystemExit as done:
        if done.code:
            raise
