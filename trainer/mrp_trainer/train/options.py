"""The options of `mrp train` and `mrp decode`. The type, range, default and help of each flag are
declared here, and only here.

This module does not import torch, so that help appears at once.
"""

from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

from modeling_mrp.generate.option_table import TARGETS

from ..embedded import resolve_source
from ..evaluate.options import GenerateOptions
from ..flags import declared_of, flag

RevealRule = Literal["on_policy", "random", "sequential"]
HeadInit = Literal["identity", "backbone", "cancel", "published"]

_RUN, _MODEL, _DATA, _HEAD = "Run", "Model", "Data", "Head"
_LOSS, _OPTIMIZER, _WATCH = "Objective", "Optimizer", "Watching and saving"
_PROMPTS, _HOW, _OUTPUT = "Prompts", "Decoding", "Output"


@dataclass
class RunOptions:
    """Options of a training run that are not fields of `MRPTrainingArguments`. The help of each
    flag describes its option.

    At the end of a head's training, up to `verdict_prompts` prompts are decoded with and without
    the head. They are prompts of `eval_data`; without `eval_data`, they are held back from `data`,
    at most a tenth of its records. With `early_stopping_patience`, the weights with the lowest
    held-out loss are saved. `block_size` and `mask_token_id` are for an autoregressive Qwen3
    checkpoint, which becomes a block-diffusion model.
    """

    model: str = flag(
        "Checkpoint: folder or Hub id.", panel=_MODEL, metavar="PATH", name="--model --backbone"
    )
    revision: str | None = flag(
        "The model's commit, branch or tag.", None, panel=_MODEL, metavar="NAME"
    )
    tokenizer: str | None = flag(
        "Another tokenizer.", None, panel=_MODEL, metavar="PATH", shown="the model's"
    )
    block_size: int | None = flag(
        "Tokens per block, for a Qwen3 checkpoint.",
        None,
        panel=_MODEL,
        shown="16",
        only="block_diffusion",
    )
    mask_token_id: int | None = flag(
        "Mask id, for a Qwen3 checkpoint of another vocabulary.",
        None,
        panel=_MODEL,
        only="block_diffusion",
    )
    data: list[str] = flag(
        "JSON, parquet, a datasets folder or Hub id; PATH:CONFIG, PATH*WEIGHT.",
        [],
        panel=_DATA,
        metavar="PATH",
    )
    split: str = flag("Split to read of a --data folder or Hub id.", "train", panel=_DATA)
    eval_data: list[str] = flag("Data to evaluate on.", [], panel=_DATA, metavar="PATH")
    eval_split: str = flag("Split to read of an --eval-data folder or Hub id.", "test", panel=_DATA)
    head: str | None = flag(
        "Head to train further.", None, panel=_HEAD, metavar="PATH", shown="a new one", only="mrp"
    )
    head_layers: int = flag("Layers of a new head.", 3, panel=_HEAD, only="mrp", min=1)
    head_init: str | None = flag(
        "Start of a new head: adds nothing, copies layers, cancels h_A, or is random.",
        None,
        panel=_HEAD,
        kind=HeadInit,
        shown="backbone; identity where layers differ",
        only="mrp",
    )
    save: str = flag(
        "Save the head alone, or with the backbone.",
        "head",
        panel=_HEAD,
        kind=Literal["head", "full"],
        only="mrp",
    )
    lora_rank: int = flag(
        "Train an adapter of this rank for the model's head; 0: all of the head.",
        0,
        panel=_HEAD,
        only="mrp",
        min=0,
    )
    lora_alpha: int | None = flag(
        "Scale of the adapter.", None, panel=_HEAD, shown="2 x rank", only="mrp", min=1
    )
    verdict_prompts: int = flag(
        "Held-out prompts decoded at the end, with and without the head; 0: none.",
        16,
        panel=_WATCH,
        only="mrp",
        min=0,
    )
    early_stopping_patience: int = flag(
        "Evaluations without a lower loss before stopping; 0: never.", 0, panel=_WATCH, min=0
    )

    def __post_init__(self) -> None:
        self.model = resolve_source(self.model)
        if self.head is not None:
            self.head = resolve_source(self.head)
        if self.tokenizer is not None:
            self.tokenizer = resolve_source(self.tokenizer)


@dataclass
class TrainerFlags:
    """The fields of `MRPTrainingArguments` that have a command-line flag, with their defaults."""

    output_dir: str | None = flag(
        "Folder for checkpoints and the result.", None, panel=_RUN, metavar="FOLDER"
    )
    seed: int = flag("Seed of noise, order and new weights.", 42, panel=_RUN)
    max_length: int | None = flag(
        "Tokens per row.", None, panel=_DATA, shown="fits the records", min=1
    )
    last_turn_only: bool = flag("Learn the last turn of a chat alone.", False, panel=_DATA)
    skip_malformed: bool = flag(
        "Leave out malformed records, and name them, instead of stopping.", False, panel=_DATA
    )
    packed: bool = flag("Several samples per row.", True, panel=_DATA, name="--packed/--not-packed")
    unroll: int = flag("Head steps unrolled in training.", 2, panel=_LOSS, only="mrp", min=1)
    reveal_rule: str = flag(
        "Reveals before each head step.", "on_policy", panel=_LOSS, kind=RevealRule, only="mrp"
    )
    noisy_copies: int = flag("Noisy copies per sample.", 2, panel=_LOSS, min=1, max=2)
    num_train_epochs: float | None = flag(
        "Passes over the data.",
        None,
        panel=_OPTIMIZER,
        name="--epochs",
        shown="1, or more for 100 steps",
        min=0,
    )
    max_steps: int = flag(
        "Training steps.", -1, panel=_OPTIMIZER, name="--steps", shown="by epochs"
    )
    per_device_train_batch_size: int = flag(
        "Rows per device and pass.", 4, panel=_OPTIMIZER, name="--batch-size", min=1
    )
    gradient_accumulation_steps: int = flag(
        "Forward and backward passes per step.", 1, panel=_OPTIMIZER, name="--accumulate", min=1
    )
    learning_rate: float | None = flag(
        "Learning rate of AdamW.",
        None,
        panel=_OPTIMIZER,
        name="--learning-rate --lr",
        shown="1e-3 head, 1e-4 backbone",
    )
    muon_learning_rate: float | None = flag(
        "Muon's learning rate for layer matrices.", None, panel=_OPTIMIZER, shown="no Muon"
    )
    bf16: bool = flag(
        "bfloat16 for passes and frozen weights.", False, panel=_OPTIMIZER, name="--bf16/--no-bf16"
    )
    eval_steps: float = flag("Steps between evaluations.", 500, panel=_WATCH)
    eval_prompts: int = flag(
        "Held-out prompts decoded at each evaluation.", 0, panel=_WATCH, only="mrp", min=0
    )
    save_steps: float = flag("Steps between checkpoints.", 100, panel=_WATCH)
    logging_steps: float = flag("Steps between log lines.", 10, panel=_WATCH)
    report_to: list[str] = flag(
        "Trackers: tensorboard, trackio, ...", [], panel=_WATCH, shown="none"
    )


def check_declared(options: Any) -> None:
    """Raise `ValueError` if a field of the dataclass `options` has a value that is not among its
    declared choices, or that is outside its declared range. A field declares them by `flag(...)`,
    or by the keywords `min`, `max` and `one_of` of its help (see `Help`). The default of a field
    always counts as a choice. Fields without declarations are not checked."""
    for option in fields(options):
        declared = declared_of(option)
        flagged = declared.get("flag", {"kind": None, "more": declared})
        value = getattr(options, option.name)
        minimum = flagged["more"].get("min")
        maximum = flagged["more"].get("max")
        choices = declared.get("one_of", get_args(flagged["kind"]))
        if choices and value not in (*choices, option.default):
            raise ValueError(
                f"{option.name} is {value!r}: choose {', '.join(map(repr, choices[:-1]))} or "
                f"{choices[-1]!r}"
            )
        if None not in (minimum, value) and not minimum <= value <= (
            value if maximum is None else maximum
        ):
            needed = f"{minimum} or more" if maximum is None else f"from {minimum} to {maximum}"
            raise ValueError(f"{option.name} is {value}: it must be {needed}")


@dataclass
class TrainCommand:
    """Options of the command `mrp train` itself, which are not settings of the training run."""

    config: str | None = flag(
        "YAML file, or a recipe's name: sdar-4b-mrp, ...", None, panel=_RUN, metavar="FILE"
    )
    set: list[str] = flag(
        "Any other field of MRPTrainingArguments.", [], panel=_RUN, metavar="NAME=VALUE"
    )
    restart: bool = flag(
        "Remove checkpoints and begin again, instead of resuming.", False, panel=_RUN
    )
    dry_run: bool = flag(
        "Only print parameters and memory; no weights are loaded.", False, panel=_RUN
    )


@dataclass(kw_only=True)
class DecodeOptions(GenerateOptions):
    """Options of `mrp decode`; each field is a flag. Without `device`, each process takes its own
    GPU. With `endpoint`, a server writes the texts, and `model` is the name of the model on that
    server."""

    data: list[str] = flag(
        "JSON lines or a datasets folder, with prompts.", panel=_PROMPTS, metavar="FILE"
    )
    output: str = flag("JSON lines that mrp train reads.", panel=_OUTPUT, metavar="FILE")
    card: str | None = flag(
        "Also write a data card, the README.md of a data set.", None, panel=_OUTPUT, metavar="FILE"
    )
    split: str = flag("Split of a datasets folder.", "train", panel=_PROMPTS)
    limit: int | None = flag("Limit of records.", None, panel=_PROMPTS, min=1)
    target: str | None = flag(
        "Mode that decodes.", None, panel=_HOW, kind=Literal[TARGETS], shown="static"
    )
    max_new_tokens: int = flag("Limit of tokens per prompt.", 256, panel=_HOW, min=1)
    batch_size: int = flag("Prompts at once.", 32, panel=_HOW, min=1)
    endpoint: str | None = flag(
        "OpenAI's API of a server that answers; $OPENAI_API_KEY is its key.",
        None,
        panel=_HOW,
        metavar="URL",
    )
