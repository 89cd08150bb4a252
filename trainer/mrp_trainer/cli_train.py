"""`mrp train`: the flags of training runs. What they mean is in `trainer.settings` and `trainer.runs`."""

from typing import Annotated, Any, Literal

import typer

from .cli_errors import told

app = typer.Typer(no_args_is_help=True, help="Train a backbone or a head.")

_RUN, _MODEL, _DATA, _HEAD = "Run", "Model", "Data", "Head"
_LOSS, _OPTIMIZER, _WATCH, _ADAPTER = "Objective", "Optimizer", "Watching and saving", "Adapter (LoRA)"

Config = Annotated[
    str | None, typer.Option(metavar="FILE", rich_help_panel=_RUN, help="YAML file, or a recipe's name: sdar-4b-mrp, ...")
]
Set = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="NAME=VALUE", rich_help_panel=_RUN, help="Any other field of MRPTrainingArguments. Repeatable."
    ),
]
OutputDir = Annotated[
    str | None, typer.Option(metavar="FOLDER", rich_help_panel=_RUN, help="Folder for checkpoints and the result.")
]
Restart = Annotated[
    bool, typer.Option("--restart", rich_help_panel=_RUN, help="Begin again, instead of going on from the last checkpoint.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", rich_help_panel=_RUN, help="Only print parameters, memory and steps; nothing is loaded.")
]
Processes = Annotated[int, typer.Option(min=1, rich_help_panel=_RUN, help="Devices that --dry-run reckons with.")]
Seed = Annotated[
    int | None, typer.Option(rich_help_panel=_RUN, show_default="42", help="Seed of noise, order and new weights.")
]

Model = Annotated[str | None, typer.Option(metavar="PATH", rich_help_panel=_MODEL, help="Checkpoint: folder or Hub id.")]
Revision = Annotated[str | None, typer.Option(rich_help_panel=_MODEL, help="Commit, branch or tag of the model.")]
TokenizerPath = Annotated[
    str | None, typer.Option(metavar="PATH", rich_help_panel=_MODEL, show_default="the model's", help="Another tokenizer.")
]
MaskTokenId = Annotated[
    int | None, typer.Option(rich_help_panel=_MODEL, help="Mask id, of a Qwen3 checkpoint of another vocabulary.")
]
BlockSize = Annotated[
    int | None, typer.Option(rich_help_panel=_MODEL, show_default="16", help="Tokens per block, of a Qwen3 checkpoint.")
]

Data = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", rich_help_panel=_DATA, help="JSON lines, a datasets folder, or - . Repeatable."),
]
Split = Annotated[str | None, typer.Option(rich_help_panel=_DATA, show_default="train", help="Split of a folder of --data.")]
EvalData = Annotated[
    list[str] | None, typer.Option(metavar="FILE", rich_help_panel=_DATA, help="Data to evaluate on. Repeatable.")
]
EvalSplit = Annotated[
    str | None, typer.Option(rich_help_panel=_DATA, show_default="test", help="Split of a folder of --eval-data.")
]
MaxLength = Annotated[int | None, typer.Option(rich_help_panel=_DATA, show_default="2048", help="Tokens of a row.")]
Packed = Annotated[
    bool | None,
    typer.Option("--packed/--not-packed", rich_help_panel=_DATA, show_default="packed", help="Several samples a row."),
]
Streaming = Annotated[
    bool | None,
    typer.Option(
        "--streaming/--not-streaming", rich_help_panel=_DATA, show_default="not-streaming", help="Read data as they come."
    ),
]

Head = Annotated[
    str | None, typer.Option(metavar="PATH", rich_help_panel=_HEAD, show_default="a new one", help="Head to go on from.")
]
HeadLayers = Annotated[int | None, typer.Option(rich_help_panel=_HEAD, show_default="3", help="Layers of a new head.")]
HeadInit = Annotated[
    Literal["identity", "backbone", "published"] | None,
    typer.Option(
        rich_help_panel=_HEAD, show_default="identity", help="A new head's start: A + C = A, the last layers, or random."
    ),
]
Save = Annotated[
    Literal["head", "full"] | None,
    typer.Option(rich_help_panel=_HEAD, show_default="head", help="Save the head alone, or with the backbone."),
]

Unroll = Annotated[int | None, typer.Option(rich_help_panel=_LOSS, show_default="1", help="Head steps trained in a chain.")]
RevealRule = Annotated[
    Literal["on_policy", "random", "random_count"] | None,
    typer.Option(rich_help_panel=_LOSS, show_default="on_policy", help="What is revealed before the head is asked."),
]
HeadLoss = Annotated[
    Literal["kl", "reverse_kl", "cross_entropy", "mse"] | None,
    typer.Option(
        rich_help_panel=_LOSS, show_default="kl", help="Divergence between the head's logits and the backbone's next ones."
    ),
]
NoisyCopies = Annotated[
    int | None, typer.Option(min=1, max=2, rich_help_panel=_LOSS, show_default="2", help="Noisy copies of a sample.")
]

Epochs = Annotated[
    float | None, typer.Option("--epochs", rich_help_panel=_OPTIMIZER, show_default="1", help="Passes over the data.")
]
Steps = Annotated[
    int | None, typer.Option("--steps", rich_help_panel=_OPTIMIZER, show_default="by epochs", help="Steps of training.")
]
BatchSize = Annotated[
    int | None, typer.Option("--batch-size", rich_help_panel=_OPTIMIZER, show_default="4", help="Rows per device and pass.")
]
Accumulate = Annotated[
    int | None,
    typer.Option("--accumulate", rich_help_panel=_OPTIMIZER, show_default="1", help="Forward and backward passes per step."),
]
LearningRate = Annotated[
    float | None,
    typer.Option(rich_help_panel=_OPTIMIZER, show_default="1e-3 head, 1e-4 backbone", help="Learning rate of AdamW."),
]
MuonLearningRate = Annotated[
    float | None, typer.Option(rich_help_panel=_OPTIMIZER, show_default="no Muon", help="Trains layer matrices with Muon.")
]
Bf16 = Annotated[
    bool | None,
    typer.Option(
        "--bf16/--no-bf16", rich_help_panel=_OPTIMIZER, show_default="no-bf16", help="bfloat16 for passes and frozen weights."
    ),
]

EvalSteps = Annotated[float | None, typer.Option(rich_help_panel=_WATCH, show_default="500", help="Steps between evaluations.")]
EvalPrompts = Annotated[
    int | None, typer.Option(rich_help_panel=_WATCH, show_default="0", help="Held-out prompts decoded at each evaluation.")
]
SaveSteps = Annotated[float | None, typer.Option(rich_help_panel=_WATCH, show_default="500", help="Steps between checkpoints.")]
LoggingSteps = Annotated[float | None, typer.Option(rich_help_panel=_WATCH, show_default="10", help="Steps between log lines.")]
ReportTo = Annotated[
    list[str] | None,
    typer.Option(rich_help_panel=_WATCH, show_default="none", help="Trackers: tensorboard, trackio, ... Repeatable."),
]

LoraRank = Annotated[
    int | None, typer.Option(rich_help_panel=_ADAPTER, show_default="0", help="Train only an adapter of this rank.")
]
LoraAlpha = Annotated[int | None, typer.Option(rich_help_panel=_ADAPTER, show_default="2 x rank", help="Scale of the adapter.")]

_OF_THE_COMMAND = ("config", "set_", "restart", "dry_run", "processes")


@app.command("head")
def train_head(
    context: typer.Context,
    model: Model = None,
    data: Data = None,
    output_dir: OutputDir = None,
    config: Config = None,
    set_: Set = None,
    restart: Restart = False,
    dry_run: DryRun = False,
    processes: Processes = 1,
    seed: Seed = None,
    revision: Revision = None,
    tokenizer: TokenizerPath = None,
    head: Head = None,
    head_layers: HeadLayers = None,
    head_init: HeadInit = None,
    save: Save = None,
    split: Split = None,
    eval_data: EvalData = None,
    eval_split: EvalSplit = None,
    max_length: MaxLength = None,
    packed: Packed = None,
    streaming: Streaming = None,
    unroll: Unroll = None,
    reveal_rule: RevealRule = None,
    head_loss: HeadLoss = None,
    noisy_copies: NoisyCopies = None,
    num_train_epochs: Epochs = None,
    max_steps: Steps = None,
    per_device_train_batch_size: BatchSize = None,
    gradient_accumulation_steps: Accumulate = None,
    learning_rate: LearningRate = None,
    muon_learning_rate: MuonLearningRate = None,
    bf16: Bf16 = None,
    eval_steps: EvalSteps = None,
    eval_prompts: EvalPrompts = None,
    save_steps: SaveSteps = None,
    logging_steps: LoggingSteps = None,
    report_to: ReportTo = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Train a head on a frozen backbone, or with --lora-rank an adapter of a trained head.

    mrp train head --model JetLM/SDAR-1.7B-Chat-b16 --data chats.jsonl --output-dir head --bf16
    """
    _train("mrp", context.params)


@app.command("backbone")
def train_backbone(
    context: typer.Context,
    model: Model = None,
    data: Data = None,
    output_dir: OutputDir = None,
    config: Config = None,
    set_: Set = None,
    restart: Restart = False,
    dry_run: DryRun = False,
    processes: Processes = 1,
    seed: Seed = None,
    revision: Revision = None,
    tokenizer: TokenizerPath = None,
    block_size: BlockSize = None,
    mask_token_id: MaskTokenId = None,
    split: Split = None,
    eval_data: EvalData = None,
    eval_split: EvalSplit = None,
    max_length: MaxLength = None,
    packed: Packed = None,
    streaming: Streaming = None,
    noisy_copies: NoisyCopies = None,
    num_train_epochs: Epochs = None,
    max_steps: Steps = None,
    per_device_train_batch_size: BatchSize = None,
    gradient_accumulation_steps: Accumulate = None,
    learning_rate: LearningRate = None,
    muon_learning_rate: MuonLearningRate = None,
    bf16: Bf16 = None,
    eval_steps: EvalSteps = None,
    save_steps: SaveSteps = None,
    logging_steps: LoggingSteps = None,
    report_to: ReportTo = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
) -> None:
    """Train a backbone with the block-diffusion loss, also from an autoregressive Qwen3 checkpoint.

    mrp train backbone --model Qwen/Qwen3-0.6B --data chats.jsonl --output-dir backbone --bf16
    """
    _train("block_diffusion", context.params)


def _train(objective: str, given: dict[str, Any]) -> None:
    """Trains, or only reckons, as the flags say."""
    flags = {name: value for name, value in given.items() if name not in _OF_THE_COMMAND}
    for name in ("data", "eval_data", "report_to"):
        flags[name] = list(flags[name]) if flags.get(name) else None
    with told():
        # These import torch and transformers, for which `mrp --help` should not wait.
        from .runs import dry_run, open_run
        from .settings import read_settings

        settings = read_settings(objective, given["config"], flags, given["set_"] or ())
        if given["dry_run"]:
            from .cli_tables import print_dry_run

            print_dry_run(dry_run(settings, given["processes"]))
            return
        run = open_run(settings, given["restart"])
    folder = run.train()
    if run.trainer.args.should_save:
        typer.echo(f"saved to {folder}")
