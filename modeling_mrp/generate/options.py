"""The options of `generate` for MRP models: `MRPGenerationConfig`, its defaults and checks."""

import difflib
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from transformers.generation import GenerationConfig

from ..rules.rules import Dynamic, EntropyBound, Sequential, Static, logit, reveal_schedule
from .modes import Direct, Drafting, Mode, RereadRemask, ResidualRemask, ThresholdRemask

# Of options that were checked: none is None.
_MODES: dict[str, Callable[[Any], Mode]] = {
    "static": lambda options: Mode(Static()),
    "dynamic": lambda options: Mode(Dynamic(logit(options.confidence_threshold))),
    "sequential": lambda options: Mode(Sequential()),
    "entropy_bound": lambda options: Mode(EntropyBound(options.entropy_threshold)),
    "self_spec": lambda options: Mode(Static(), drafting=_drafting(options, 0)),
    "mrp_direct": lambda options: Mode(Static(), Direct(options.mrp_steps)),
    "mrp_spec": lambda options: Mode(Static(), drafting=_drafting(options, options.draft_passes)),
    "mrp_remask": lambda options: Mode(Dynamic(logit(options.confidence_threshold)), _REMASKS[options.remask_rule](options)),
}
_REMASKS: dict[str, Callable[[Any], Any]] = {
    "reread": lambda options: RereadRemask(logit(options.confidence_threshold), logit(0.5 * options.confidence_threshold)),
    "threshold": lambda options: ThresholdRemask(logit(options.confidence_threshold)),
    "residual": lambda options: ResidualRemask(options.residual_delta),
}
DECODINGS = tuple(_MODES)
REMASK_RULES = tuple(_REMASKS)


def _drafting(options: Any, passes: int) -> Drafting:
    states = options.num_draft_states
    return Drafting(states, options.draft_branches, min(passes, states - 1), options.compute_bound_tokens)


# Options of `generate` whose meaning rests on one token per forward, one hypothesis per row, or a second model, and the
# values that switch them off.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "num_beams": (None, 1),
    "num_beam_groups": (None, 1),
    "penalty_alpha": (None, 0, 0.0),
    "dola_layers": (None,),
    "constraints": (None,),
    "force_words_ids": (None,),
    "prompt_lookup_num_tokens": (None,),
    "assistant_early_exit": (None,),
    "use_mtp": (None, False),
    "guidance_scale": (None, 1, 1.0),
    "token_healing": (None, False),
    "output_scores": (None, False),
    "output_logits": (None, False),
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "cache_implementation": (None,),
    "watermarking_config": (None,),
    "exponential_decay_length_penalty": (None,),
    "begin_suppress_tokens": (None,),
    "forced_bos_token_id": (None,),
    "forced_eos_token_id": (None,),
    "prefill_chunk_size": (None,),
}
_ONE_HYPOTHESIS = "block-diffusion decoding follows one hypothesis per row through its own rounds"
_LOGPROBS = "with return_dict_in_generate=True the output has token_logprobs, the log-probability of every token"
_FORWARD = "the forward of the model returns them, for any text"
_INSTEAD = {
    "output_scores": _LOGPROBS,
    "output_logits": _LOGPROBS,
    "output_attentions": _FORWARD,
    "output_hidden_states": _FORWARD,
}
# Values of our own options that are left open everywhere.
_DEFAULTS: dict[str, Any] = {
    "decoding": "static",
    "confidence_threshold": 0.9,
    "entropy_threshold": 0.35,
    "mrp_steps": 1,
    "num_draft_states": 4,
    "draft_branches": 3,
    "draft_passes": 1,
    "remask_rule": "reread",
    "residual_delta": 1.0,
}


class MRPGenerationConfig(GenerationConfig):
    """A `GenerationConfig` plus the options of block-diffusion decoding.

    As with every generation config, None leaves an option to the model's own config, and then to the default in brackets.

    Args:
        decoding: `static`, `dynamic`, `sequential`, `entropy_bound` (backbone alone), `self_spec` (lossless, no head
            needed), `mrp_direct`, `mrp_spec` (lossless) or `mrp_remask` [`static`].
        denoising_steps: Steps per block [`block_size`, one token a step].
        confidence_threshold: tau of `dynamic` and `mrp_remask`, a probability [0.9].
        entropy_threshold: Bound of `entropy_bound`, in nats [0.35].
        mrp_steps: Unverified head reveals after each backbone step of `mrp_direct` [1].
        num_draft_states: K, the states a row may submit per round in `mrp_spec` and `self_spec`; 1 drafts nothing, though the
            next block's first state rides behind a clean one in every mode [4].
        draft_branches: How many followers of a state are considered in drafting; 1 drafts a chain [3].
        draft_passes: Head passes per round of `mrp_spec`, at most; each re-reads what is drafted so far [1].
        compute_bound_tokens: Tokens in a forward up to which its time hardly grows, a property of the device (about 140 for
            bf16 on an H200). Drafts are then submitted only as far as they were right often enough so far to be worth their
            time, none if the batch alone fills the device [None: the number of forwards is all that counts].
        remask_rule: Which reveals `mrp_remask` takes back: `reread` (the least believed one at a time, then echoes of the
            others), `threshold` (published) or `residual` (released code) [`reread`].
        residual_delta: Largest residual logit that the `residual` rule lets stand [1.0].
        kernels: Triton kernels in place of PyTorch. None: where they can be used (an NVIDIA GPU of compute capability 8.0 or
            more, float16, bfloat16 or float32), with PyTorch where one fails to compile; True: kernels or an error, also
            interpreted (`TRITON_INTERPRET=1`); False: PyTorch only [None].
        graphs: Whether rounds are recorded as CUDA graphs and replayed: True, or an error where that is impossible; False, or
            None: on CUDA where it is possible [None].
        seed: An int s gives row i the seed s + i; a list gives one per row [one per row from torch's generator].
    """

    def __init__(self, **kwargs: Any) -> None:
        self.decoding: str | None = kwargs.pop("decoding", None)
        self.denoising_steps: int | None = kwargs.pop("denoising_steps", None)
        self.confidence_threshold: float | None = kwargs.pop("confidence_threshold", None)
        self.entropy_threshold: float | None = kwargs.pop("entropy_threshold", None)
        self.mrp_steps: int | None = kwargs.pop("mrp_steps", None)
        self.num_draft_states: int | None = kwargs.pop("num_draft_states", None)
        self.draft_branches: int | None = kwargs.pop("draft_branches", None)
        self.draft_passes: int | None = kwargs.pop("draft_passes", None)
        self.compute_bound_tokens: int | None = kwargs.pop("compute_bound_tokens", None)
        self.remask_rule: str | None = kwargs.pop("remask_rule", None)
        self.residual_delta: float | None = kwargs.pop("residual_delta", None)
        self.kernels: bool | None = kwargs.pop("kernels", None)
        self.graphs: bool | None = kwargs.pop("graphs", None)
        self.seed: int | list[int] | None = kwargs.pop("seed", None)
        super().__init__(**kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is saved: the options that are set."""
        return {name: value for name, value in super().to_diff_dict().items() if value is not None}

    def check(self, block_size: int, has_head: bool) -> None:
        """Fills in defaults, then raises `ValueError`, with value and remedy, for the first option that cannot be honoured."""
        self.update(**_DEFAULTS, defaults_only=True)
        if not isinstance(self.decoding, str) or self.decoding not in _MODES:
            raise ValueError(f"decoding is {self.decoding!r}: choose one of {', '.join(DECODINGS)}")
        if self.decoding.startswith("mrp_") and not has_head:
            raise ValueError(
                f"decoding={self.decoding!r} needs an MRP head, and this model has none: load one with "
                "MRPForCausalLM.from_backbone(backbone, head=...) or model.attach_head(head), or use 'self_spec', which is "
                "lossless and needs no head"
            )
        if self.denoising_steps is not None:
            _require(
                self, "denoising_steps", int, lambda v: 1 <= v <= block_size, f"an int from 1 to block_size ({block_size})"
            )
        _require(self, "confidence_threshold", float, lambda v: 0 <= v <= 1, "a probability, a float from 0 to 1")
        _require(self, "entropy_threshold", float, lambda v: v >= 0, "a number of nats, a float of 0 or more")
        _require(self, "mrp_steps", int, lambda v: v >= 1, "an int of 1 or more")
        _require(self, "num_draft_states", int, lambda v: v >= 1, "an int of 1 or more")
        _require(self, "draft_branches", int, lambda v: v >= 1, "an int of 1 or more")
        _require(self, "draft_passes", int, lambda v: v >= 1, "an int of 1 or more")
        if self.compute_bound_tokens is not None:
            _require(self, "compute_bound_tokens", int, lambda v: v >= 1, "an int of 1 or more tokens, or None")
        _require(self, "residual_delta", float, lambda v: v > 0, "a positive number of logits, a float")
        if not isinstance(self.kernels, bool | None):
            raise ValueError(
                f"kernels is {self.kernels!r}: use None (where they can be used), True (or an error) or False (PyTorch only)"
            )
        if self.remask_rule not in REMASK_RULES:
            raise ValueError(f"remask_rule is {self.remask_rule!r}: choose one of {', '.join(REMASK_RULES)}")
        if self.graphs is not None and not isinstance(self.graphs, bool):
            raise ValueError(f"graphs is {self.graphs!r}: use True, False, or None for CUDA graphs where they are possible")
        if self.temperature is not None:
            _require(
                self,
                "temperature",
                float,
                lambda v: 0 < v < float("inf"),
                "a positive number (greedy decoding is do_sample=False)",
            )
        for name, ids in (("eos_token_id", self.eos_ids()), ("pad_token_id", [self.pad_token_id])):
            if any(not (one is None and name == "pad_token_id") and not _is_id(one) for one in ids):
                value, several = getattr(self, name), " or a list of them" if name == "eos_token_id" else ""
                raise ValueError(f"{name} is {value!r}: it must be an id, an int,{several} or None")
        seeds = self.seed if isinstance(self.seed, list) else [self.seed]
        if any(not (s is None or (isinstance(s, int) and not isinstance(s, bool) and 0 <= s < 1 << 62)) for s in seeds):
            raise ValueError(
                f"seed is {self.seed!r}: use None, an int of 0 or more and below 2**62, or a list of one such int per row"
            )
        for name, off in _UNSUPPORTED.items():
            if (value := getattr(self, name, None)) not in off:
                why = _INSTEAD.get(name, _ONE_HYPOTHESIS)
                raise ValueError(f"{name}={value!r} is not supported: {why}. Leave {name} unset")

    def mode(self) -> Mode:
        """What is revealed, refined and drafted."""
        assert self.decoding is not None, "check fills in defaults"
        return _MODES[self.decoding](self)

    def eos_ids(self) -> list[int]:
        """The ids that end a row."""
        eos: Any = self.eos_token_id
        if isinstance(eos, Tensor):
            return list(eos.flatten().tolist())
        return [] if eos is None else list(eos) if isinstance(eos, list | tuple) else [eos]

    def seeds(self, rows: int) -> Tensor:
        """[rows] long: the seed of every row.

        Raises:
            ValueError: if `seed` lists another number of them.
        """
        if isinstance(self.seed, list):
            if len(self.seed) != rows:
                raise ValueError(
                    f"seed lists {len(self.seed)} values for {rows} rows: give one per row (after num_return_sequences)"
                )
            return torch.tensor(self.seed, dtype=torch.long)
        if self.seed is not None:
            return self.seed + torch.arange(rows)
        return torch.randint(1 << 62, (rows,)) if self.do_sample else torch.zeros(rows, dtype=torch.long)

    def schedule(self, block_size: int) -> Tensor:
        """[block_size] long: how many positions each denoising step of a block reveals, then zeros."""
        return reveal_schedule(block_size, self.denoising_steps)


OPTION_NAMES = frozenset(name for name in vars(MRPGenerationConfig()) if not name.startswith("_"))


def did_you_mean(name: str) -> str:
    """ ": did you mean ...?" for a name that is like one or several options, and "" for others."""
    near = difflib.get_close_matches(name, sorted(OPTION_NAMES), n=1, cutoff=0.75)
    return f" (did you mean {near[0]}?)" if near else ""


def _is_id(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


def _require(config: MRPGenerationConfig, name: str, kind: type, holds: Callable[[Any], bool], wanted: str) -> None:
    value = getattr(config, name)
    allowed = (int, float) if kind is float else (int,)
    if not isinstance(value, allowed) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r}, of type {type(value).__name__}: it must be {wanted}")
    if not holds(value):
        raise ValueError(f"{name} is {value!r}: it must be {wanted}")


__all__ = ["DECODINGS", "OPTION_NAMES", "REMASK_RULES", "MRPGenerationConfig", "did_you_mean"]
