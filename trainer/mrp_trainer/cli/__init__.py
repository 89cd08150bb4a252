"""The console script `mrp`: train, decode, evaluate, show, serve, check a machine, make tasks,
publish.

``python -m mrp_trainer.cli`` is the same. Commands import what they need when they run, so that
help appears at once.
"""

import shlex
from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any

import typer

from modeling_mrp import __version__

from ..data.tasks import Family, Split
from ..doctor.options import DoctorOptions
from ..embedded import resolve_source
from ..evaluate.options import EvaluateOptions
from ..flags import Commands, for_typer, reported_errors, takes_flags
from ..outputs import write_output
from ..picture.options import ShowOptions
from ..serve.options import ServeOptions
from ..train.options import DecodeOptions, RunOptions, TrainCommand, TrainerFlags
from .options import CardOptions, HeadsOptions, PushOptions

app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Multi-token Residual Prediction for SDAR block-diffusion models.",
)
train = typer.Typer(no_args_is_help=True, help="Train a backbone or a head.")
app.add_typer(train, name="train")


def _print_version(requested: bool) -> None:
    if requested:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the package's version."
        ),
    ] = False,
) -> None:
    """Handle the options of `mrp` itself, which precede a command."""


@train.command("head")
@takes_flags(TrainCommand, RunOptions, TrainerFlags, only="mrp")
def train_head(**flags: Any) -> None:
    """Train a head on a frozen backbone.

    mrp train head --model JetLM/SDAR-1.7B-Chat-b16 --data chats.jsonl --output-dir head --bf16
    """
    _train("mrp", flags)


@train.command("backbone")
@takes_flags(TrainCommand, RunOptions, TrainerFlags, only="block_diffusion")
def train_backbone(**flags: Any) -> None:
    """Train a backbone with the block-diffusion loss; it may start as an autoregressive Qwen3
    checkpoint.

    mrp train backbone --model Qwen/Qwen3-0.6B --data chats.jsonl --output-dir backbone --bf16
    """
    _train("block_diffusion", flags)


def _train(objective: str, flags: dict[str, Any]) -> None:
    """Train a model, or with `--dry-run` only print the parameters and memory that the run would
    need."""
    names = [option.name for option in fields(TrainCommand) if option.name in flags]
    command = TrainCommand(**{name: flags.pop(name) for name in names})
    from ..train.runs import dry_run, open_run
    from ..train.settings import read_settings

    settings = read_settings(objective, command.config, flags, command.set)
    if command.dry_run:
        typer.echo(dry_run(settings))
        return
    run = open_run(settings, command.restart)
    folder = run.train()
    if run.trainer.args.should_save:
        typer.echo(f"saved to {folder}")
        typer.echo(f"next: {_next_command(settings.objective, settings.options, str(folder))}")


def _next_command(objective: str, options: RunOptions, folder: str) -> str:
    """Return the command to suggest after a run. After the training of a backbone, this command
    trains a head for it; after the training of a head, it draws a text decoded with the head."""
    if objective == "mrp":
        return shlex.join(["mrp", "show", "--model", folder])
    command = ["mrp", "train", "head", "--model", folder]
    for path in options.data:
        command += ["--data", path]
    return shlex.join([*command, "--output-dir", f"{folder}-head"])


@app.command()
@takes_flags(EvaluateOptions)
def evaluate(**flags: Any) -> None:
    """Measure accuracy, tokens per forward and acceptance with 95 % intervals; print a table row
    for each problem set and mode."""
    options = EvaluateOptions(**flags)
    from ..evaluate.command import evaluate as evaluate_model

    evaluate_model(options)


@app.command()
@takes_flags(DecodeOptions, required=["model", "data", "output"])
def decode(**flags: Any) -> None:
    """Decode prompts, on this machine or on a server, to make training data for the model's head; a
    repeated call resumes."""
    options = DecodeOptions(**flags)
    from ..train.decode import decode as decode_prompts

    if (message := decode_prompts(options)) is not None:
        typer.echo(message)


@app.command()
@takes_flags(ServeOptions)
def serve(**flags: Any) -> None:
    """Serve OpenAI's chat and completion endpoints over HTTP on this machine until Ctrl-C."""
    options = ServeOptions(**flags)
    from ..serve.server import serve as serve_model

    serve_model(options)


@app.command()
@takes_flags(ShowOptions)
def show(**flags: Any) -> None:
    """Decode a prompt in several modes, and draw the texts side by side in one picture that shows
    which forward revealed each token; or draw the log of a training run (--run)."""
    options = ShowOptions(**flags)
    if options.run is not None:
        from ..picture.run import draw_run

        picture = draw_run(options.run)
        typer.echo(f"wrote {picture.save(str(options.output), options.overwrite)}: {picture.title}")
        return
    from ..picture.modes import show_model

    typer.echo(f"wrote {options.output}: {show_model(options).title}")


@app.command()
@takes_flags(DoctorOptions)
def doctor(**flags: Any) -> None:
    """Check kernels, graphs and drafts on this machine, time rounds, and print a report; the exit
    status is 1 if a check fails."""
    options = DoctorOptions(**flags)
    from ..doctor.page import examine

    report = examine(options)
    typer.echo(report.page())
    if report.failed:
        raise typer.Exit(1)


@app.command()
def tasks(
    family: Annotated[
        for_typer(list[Family]),  # type: ignore[valid-type]
        typer.Option(help="Family of problems. Repeatable."),
    ],
    split: Annotated[Split, typer.Option(help="Split; splits share no prompt.")] = "train",
    count: Annotated[int, typer.Option(min=1, help="Problems of each family.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 0,
    output: Annotated[
        str | None,
        typer.Option(metavar="FILE", show_default="standard output", help="File to write."),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace another file there.")
    ] = False,
) -> None:
    """Make synthetic problems as JSON lines for mrp train: for the family "source", prompts with
    their completions; for the other families, chats."""
    with reported_errors():
        from ..data.tasks import training_lines

        lines: list[str] = []
        for choice in family:
            lines += training_lines(choice.value, split, count, seed)
        _print_or_write("".join(f"{line}\n" for line in lines), output, overwrite)
        if output is not None:
            typer.echo(f"wrote {len(lines)} records to {output}")


def _print_or_write(text: str, output: str | None, overwrite: bool) -> None:
    """Write a text to the file `output`, creating its folder (see `write_output`); print the text
    if `output` is None."""
    if output is None:
        typer.echo(text, nl=False)
    else:
        write_output(output, text, overwrite=overwrite)


@app.command()
@takes_flags(PushOptions, required=["folder", "repo_id"])
def push(**flags: Any) -> None:
    """Push a full model, a head or an adapter to the Hub in one commit; a new repository is private
    unless --public."""
    from ..publish import push as push_checkpoint

    tags = flags.pop("tag", [])
    typer.echo(push_checkpoint(resolve_source(flags.pop("folder")), tags=tags, **flags))


@app.command()
@takes_flags(CardOptions, required=["folder"])
def card(output: str | None = None, overwrite: bool = False, **flags: Any) -> None:
    """Print the model card of a checkpoint, as a push would render it."""
    from ..publish.command import card as rendered_card

    folder = resolve_source(flags.pop("folder"))
    text = rendered_card(folder, tags=flags.pop("tag", []), **flags)
    _print_or_write(text, output, overwrite)


@app.command()
@takes_flags(HeadsOptions)
def heads(output: str | None = None, overwrite: bool = False, **flags: Any) -> None:
    """List the heads on the Hub as a Markdown page, each with its backbone, recipe and measured
    speed."""
    from ..publish.collection import heads_page, published_heads

    _print_or_write(heads_page(published_heads(**flags)), output, overwrite)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the console script with `arguments`, by default those of the process; raise `SystemExit`
    if a command fails."""
    if status := app(arguments, prog_name="mrp", standalone_mode=arguments is None):
        raise SystemExit(status)
