"""The options of the algorithm, named as in `MRPGenerationConfig`.

The options of a server come from the YAML file of `--dllm-algorithm-config`. A request may override
some of them by its `custom_params`.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from modeling_mrp import MRPGenerationConfig
from modeling_mrp.generate.loop import Mode
from modeling_mrp.generate.option_table import CONSTRAINTS, DRAFTING, OPTIONS, closest_name
from modeling_mrp.generate.refine import ResidualRemask
from modeling_mrp.kernels.dispatch import Dispatch

_NOT_SERVED = {
    "seed": "requests have one each (sampling_seed)",
    "max_batch_size": "the engine makes batches itself (--max-running-requests)",
    "graphs": "the engine records graphs itself (--disable-cuda-graph)",
    **dict.fromkeys(CONSTRAINTS, "the engine's requests have none yet: use `generate`"),
    "prompt_lookup_num_tokens": "the engine drafts from scores and the head alone",
    "max_matching_ngram_size": "the engine drafts from scores and the head alone",
    "draft_next_block": "the engine drafts within a block and the first state of the next",
}
SERVED = tuple(option.name for option in OPTIONS if option.name not in _NOT_SERVED)
# Options that a request may set. The others change how a text is computed, not the text, and only
# the server sets them; a new option is refused in requests until it is named here.
OF_REQUEST = (
    "decoding",
    "target",
    "denoising_steps",
    "confidence_threshold",
    "low_threshold",
    "entropy_threshold",
    "factor",
    "mrp_steps",
    "num_draft_states",
    "remask_rule",
    "residual_delta",
)
# Further `custom_params` of a request: they add fields to its response.
RESPONSE_FIELDS = ("return_reveal_step", "return_provisional")


@dataclass(frozen=True)
class Settings:
    """The checked options of a server.

    Attributes:
        mode: The default decoding mode; no request may draft more states than this mode does.
        dispatch: Decides between kernels and PyTorch.
        options: The options from which `mode` was made, by name.
        block_size: The number of tokens of a block, from the checkpoint.
        has_head: Whether the checkpoint has a head.
        devices: The number of devices among which the vocabulary is divided.
    """

    mode: Mode
    dispatch: Dispatch
    options: Mapping[str, Any]
    block_size: int
    has_head: bool
    devices: int = 1

    def config_of(
        self, custom_params: Mapping[str, Any], eos: Collection[int]
    ) -> MRPGenerationConfig:
        """Return the checked options of a request: those of the server, except where the request
        overrides them.

        Args:
            custom_params: The request's `custom_params`, which override the server's options.
            eos: Ids that end the request's text.

        Raises:
            ValueError: if an option is unknown, invalid or unsupported; the message gives its value
                and the remedy.
        """
        if not isinstance(custom_params, Mapping):
            raise ValueError(f"custom_params is {custom_params!r}: it must be an object of options")
        params = {}
        for name, value in custom_params.items():
            if value is not None and not name.startswith("__"):
                params[name] = value
        allowed = (*OF_REQUEST, *RESPONSE_FIELDS)
        problems = []
        for name in params:
            if name in allowed:
                continue
            if name in SERVED:
                problems.append(f"{name} is one of the server's options (--dllm-algorithm-config)")
            else:
                problems.append(f"{name} is no option of a request{closest_name(name, allowed)}")
        for name in RESPONSE_FIELDS:
            if not isinstance(params.get(name, True), bool):
                problems.append(f"{name} is {params[name]!r}, not true or false")
        if problems:
            raise ValueError(
                f"custom_params: {'; '.join(problems)}. They may hold {', '.join(allowed)}"
            )
        overrides = {name: value for name, value in params.items() if name not in RESPONSE_FIELDS}
        config = MRPGenerationConfig(**{**self.options, **overrides, "eos_token_id": sorted(eos)})
        config.check(self.block_size, self.has_head)
        return config

    def mode_of(self, config: MRPGenerationConfig) -> Mode:
        """Return the decoding mode that a request's checked options describe.

        Raises:
            ValueError: if the mode uses the head or drafts and the server's own mode does not, if
                it asks for more drafted states than the server has, or if it needs the whole
                vocabulary on one device and the vocabulary is divided among several.
        """
        mode = config.mode(self.block_size)
        server_mode = self.mode
        described = f"decoding is {config.decoding!r}"
        check_devices(mode, self.devices)
        if mode.uses_head and not server_mode.uses_head:
            raise ValueError(
                f"{described}: this server has no use of its head. Start it with "
                "'decoding: mrp_spec', or choose another"
            )
        if mode.drafting is None:
            return mode
        if server_mode.drafting is None:
            raise ValueError(
                f"{described}: this server drafts nothing. Start it with a mode that does, or "
                "choose another"
            )
        requested = config.num_draft_states
        limit = server_mode.drafting.states
        if requested != "auto" and requested is not None and int(requested) > limit:
            raise ValueError(
                f"num_draft_states is {requested}: this server has {limit} at most. Ask for less, "
                "or start it with more"
            )
        return replace(
            mode, drafting=replace(mode.drafting, states=min(mode.drafting.states, limit))
        )


def settings_of(
    file_options: Mapping[str, Any],
    defaults: Mapping[str, Any],
    block_size: int,
    has_head: bool,
    devices: int = 1,
) -> Settings:
    """Check the options of a server and return its settings.

    Args:
        file_options: The options in the server's file (`--dllm-algorithm-config`), by name.
        defaults: The fields of the checkpoint's generation config; options in it that are not
            served are ignored.
        block_size: The number of tokens of a block, from the checkpoint.
        has_head: Whether the checkpoint has a head.
        devices: The number of devices among which the vocabulary is divided.

    Raises:
        ValueError: if an option is unknown, if a value is invalid or unsupported, or if the mode
            needs a head and there is none.
    """
    check_names(file_options)
    if file_options.get("block_size", block_size) != block_size:
        raise ValueError(
            f"block_size is {file_options['block_size']!r}: the checkpoint's is {block_size}. "
            "Leave it out"
        )
    options = {"decoding": "mrp_spec"}
    for name in SERVED:
        if defaults.get(name) is not None:
            options[name] = defaults[name]
    for name, value in file_options.items():
        if name != "block_size" and value is not None:
            options[name] = value
    config = MRPGenerationConfig(**options)
    config.check(block_size, has_head)
    mode = config.mode(block_size)
    check_devices(mode, devices)
    return Settings(mode, Dispatch(config.kernels), options, block_size, has_head, devices)


def check_devices(mode: Mode, devices: int) -> None:
    """Raise `ValueError` if the mode reads rows of `lm_head`, and the vocabulary is divided among
    several devices."""
    if devices > 1 and isinstance(mode.refine, ResidualRemask):
        raise ValueError(
            "remask_rule is 'residual', which needs the whole vocabulary on one device: use "
            "another, or --tp-size 1"
        )


def decodes_as_stock(config: MRPGenerationConfig, block_size: int) -> bool:
    """Return whether the options ask for a reveal rule that the engine's own algorithm
    `LowConfidence` has, too: `dynamic`, or `static` with one step for each token of a block. In
    modes that draft, the rule is the one that `target` names."""
    rule = config.target if config.decoding in DRAFTING else config.decoding
    return rule == "dynamic" or (rule == "static" and config.denoising_steps in (None, block_size))


def check_names(names: Mapping[str, Any]) -> None:
    """Raise `ValueError` if any of the options in the server's file, the keys of `names`, is
    unknown or not served; the message lists all of these."""
    problems = []
    for name in map(str, names):
        if name in _NOT_SERVED:
            problems.append(f"{name} is not served, as {_NOT_SERVED[name]}: leave it out")
        elif name not in (*SERVED, "block_size"):
            problems.append(f"{name} is no option of MRP{closest_name(name, SERVED)}")
    if problems:
        raise ValueError(
            f"the file of --dllm-algorithm-config: {'; '.join(problems)}. Options are "
            f"{', '.join(SERVED)}"
        )
