"""What `mrp show` is asked to draw: every option, once. Nothing here imports torch, so that help comes at once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..evaluate.options import Decoding, EvaluateOptions, ModelOptions, Target
from ..flags import flag
from .svg import check_name

_WHAT, _HOW, _OUTPUT = "What is asked", "How it is decoded", "Picture"


@dataclass(kw_only=True)
class ShowOptions(ModelOptions):
    """What is decoded and drawn; each field is a flag.

    Raises:
        ValueError: for a file name that is no picture's, an assignment that is no NAME=VALUE.
    """

    prompt: str = flag("Prompt.", "Sum the numbers of a list that are even, each plus 5.", panel=_WHAT)
    plain: bool = flag("No chat template around the prompt.", False, panel=_WHAT)
    max_new_tokens: int = flag("Tokens of the text.", 64, panel=_WHAT, min=1)
    decoding: list[str] = flag("Modes, side by side.", [], panel=_HOW, kind=list[Decoding], shown="the target, and its drafts")
    target: list[str] = flag("Modes whose text is drafted.", [], panel=_HOW, kind=list[Target], shown="the checkpoint's")
    tau: list[float] = flag("Confidence thresholds (dynamic, mrp_remask).", [0.9], panel=_HOW)
    states: list[int] = flag("States per round (self_spec, mrp_spec).", [], panel=_HOW, shown="the checkpoint's, or 8 for auto")
    set: list[str] = flag("Any other option of generate.", [], panel=_HOW, metavar="NAME=VALUE")
    animated: bool = flag("The text comes forward by forward.", False, panel=_OUTPUT)
    output: str = flag("File, an .svg or .png.", "decode.svg", panel=_OUTPUT, metavar="FILE")

    def __post_init__(self) -> None:
        check_name(self.output)
        if self.animated and self.output.endswith(".png"):
            raise ValueError(f"--output is {self.output}, and a .png does not move: name an .svg, or leave out --animated")
        self.settings()

    def settings(self, own: Mapping[str, Any] | None = None, has_head: bool = True) -> list[dict[str, Any]]:
        """List the options of `generate` for each mode that the picture shows, in the form of `EvaluateOptions.settings`.

        Args:
            own: The fields of the checkpoint's generation config: its target and states are drafted if none are asked for.
            has_head: Whether the checkpoint has a head to draft with.
        """
        given = {name: getattr(self, name) for name in ("target", "tau", "states", "set")}
        options = EvaluateOptions(**given).of_checkpoint(own or {}, states=8)
        decoding = self.decoding or [*options.target, "mrp_spec" if has_head else "self_spec"]
        return replace(options, decoding=decoding).settings()


__all__ = ["ShowOptions"]
