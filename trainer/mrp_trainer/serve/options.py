"""What `mrp serve` is asked to do: every option, once. Nothing here imports torch, so that help comes at once."""

from dataclasses import dataclass
from typing import Any

from ..embedded import EMBEDDED
from ..evaluate.options import Decoding, GenerateOptions, Target
from ..flags import flag

_HOW, _WHERE = "How it is decoded, unless a request says otherwise", "Where it listens"


@dataclass(kw_only=True)
class ServeOptions(GenerateOptions):
    """What is served, and where; each field is a flag."""

    model: str = flag(
        "Checkpoint: folder or Hub id; clients ask for it by this name.", EMBEDDED, metavar="MODEL", positional=True
    )
    decoding: str | None = flag("Mode of decoding.", None, panel=_HOW, kind=Decoding, shown="the checkpoint's")
    target: str | None = flag("Mode whose text is drafted.", None, panel=_HOW, kind=Target, shown="the checkpoint's")
    set: list[str] = flag("Any other option of generate.", [], panel=_HOW, metavar="NAME=VALUE")
    host: str = flag("Address; 0.0.0.0 lets other machines in, unasked.", "127.0.0.1", panel=_WHERE)
    port: int = flag("Port; 0 for any that is free.", 8000, panel=_WHERE, min=0, max=65535)

    def setting(self) -> dict[str, Any]:
        """Collect the options of `generate` that were given; those of `set` are together under that name."""
        modes = {name: value for name in ("decoding", "target") if (value := getattr(self, name)) is not None}
        return {**modes, "set": self.extra()}
