"""Options of `mrp show`, each declared once. Nothing here imports torch, so that help appears at
once."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from ..evaluate.options import Decoding, ModeOptions
from ..flags import flag
from ..outputs import check_output
from .svg import check_name

_WHAT, _HOW, _OUTPUT = "Prompt", "Decoding", "Picture"


@dataclass(kw_only=True)
class ShowOptions(ModeOptions):
    """Options of `mrp show`; each field is a flag. `ValueError` for an output that is neither an
    .svg nor a .png, or cannot be written, and for an animated .png."""

    decoding: list[str] = flag(
        "Modes, side by side.",
        [],
        panel=_HOW,
        kind=list[Decoding],
        shown="the target, and its drafts",
    )
    prompt: str = flag(
        "Prompt.", "Sum the numbers of a list that are even, each plus 5.", panel=_WHAT
    )
    plain: bool = flag("No chat template around the prompt.", False, panel=_WHAT)
    max_new_tokens: int = flag("Tokens of the text.", 64, panel=_WHAT, min=1)
    animated: bool = flag("The text appears forward by forward.", False, panel=_OUTPUT)
    run: str | None = flag(
        "Folder of a training run whose log is drawn, in place of a decode.",
        None,
        panel=_WHAT,
        metavar="FOLDER",
    )
    output: str | None = flag(
        "File, an .svg or .png.",
        None,
        panel=_OUTPUT,
        metavar="FILE",
        shown="decode.svg, or run.svg",
    )
    overwrite: bool = flag(
        "Replace any file there, not only a picture of this command.", False, panel=_OUTPUT
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output is None:
            self.output = "decode.svg" if self.run is None else "run.svg"
        check_name(self.output)
        check_output(self.output)
        if self.animated and self.output.endswith(".png"):
            raise ValueError(
                f"--output is {self.output}, and a .png does not move: name an .svg, or leave out "
                "--animated"
            )

    def settings_to_draw(
        self, defaults: Mapping[str, Any], has_head: bool = True
    ) -> list[dict[str, Any]]:
        """List the settings to draw, one for each combination of a mode with values of its options.
        A setting is a dict of options of `generate`, as in `ModeOptions.settings`.

        If no flag sets the modes, they are each target without drafts, and one drafting mode with
        each target: `mrp_spec`, or `self_spec` for a checkpoint without a head.

        Args:
            defaults: The fields of the checkpoint's generation config. They give the target and K
                (`num_draft_states`) if no flag does. K is 8 if it is `auto` or missing there.
            has_head: Whether the checkpoint has a head.
        """
        options = self.of_checkpoint(defaults, has_head, states=8)
        decoding = self.decoding or [*options.target, "mrp_spec" if has_head else "self_spec"]
        return replace(options, decoding=decoding).settings()
