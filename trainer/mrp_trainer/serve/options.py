"""Options of `mrp serve`, each declared once. Nothing here imports torch, so that help appears at
once."""

from dataclasses import dataclass
from typing import Any

from ..embedded import EMBEDDED
from ..evaluate.options import Decoding, GenerateOptions, Target
from ..flags import flag

_HOW, _WHERE, _LOAD = "Decoding, unless a request says otherwise", "Network", "Load"


@dataclass(kw_only=True)
class ServeOptions(GenerateOptions):
    """Options of `mrp serve`; each field is a flag."""

    model: str = flag(
        "Checkpoint: folder or Hub id; clients ask for it by this name.",
        EMBEDDED,
        metavar="MODEL",
        positional=True,
    )
    served_model_name: str | None = flag(
        "Another name for clients.", None, panel=_WHERE, metavar="NAME", shown="the checkpoint"
    )
    decoding: str | None = flag(
        "Mode of decoding.", None, panel=_HOW, kind=Decoding, shown="the checkpoint's"
    )
    target: str | None = flag(
        "Target mode of drafts.", None, panel=_HOW, kind=Target, shown="the checkpoint's"
    )
    set: list[str] = flag("Any other option of generate.", [], panel=_HOW, metavar="NAME=VALUE")
    host: str = flag(
        "Address; 0.0.0.0 serves every machine, see --api-key.", "127.0.0.1", panel=_WHERE
    )
    port: int = flag("Port; 0 for any free one.", 8000, panel=_WHERE, min=0, max=65535)
    api_key: str | None = flag(
        "Key that clients have to send.", None, panel=_WHERE, metavar="KEY", shown="none"
    )
    max_batch_size: int = flag("Texts decoded at once.", 16, panel=_LOAD, min=1)
    max_queue_size: int = flag(
        "Texts that wait for a place, at most; others get 429.", 64, panel=_LOAD, min=1
    )

    def setting(self) -> dict[str, Any]:
        """Collect the options of `generate` that flags set, in a dict by name: `decoding` and
        `target`, if they are given, and "set", a dict of the options that `--set` assigns, which
        may be empty."""
        setting: dict[str, Any] = {}
        if self.decoding is not None:
            setting["decoding"] = self.decoding
        if self.target is not None:
            setting["target"] = self.target
        setting["set"] = self.extra()
        return setting
