"""`mrp train`: the flags are those of `mrp_trainer.train.options`; what they mean is in `settings` and `runs`."""

import shlex
from dataclasses import fields
from typing import Any

import typer

from ..flags import takes_flags
from ..train.options import RunOptions, TrainCommand, TrainerFlags
from .errors import told

app = typer.Typer(no_args_is_help=True, help="Train a backbone or a head.")


@app.command("head")
@takes_flags(TrainCommand, RunOptions, TrainerFlags, only="mrp")
def train_head(**given: Any) -> None:
    """Train a head on a frozen backbone, or with --lora-rank an adapter of a trained head.

    mrp train head --model JetLM/SDAR-1.7B-Chat-b16 --data chats.jsonl --output-dir head --bf16
    """
    _train("mrp", given)


@app.command("backbone")
@takes_flags(TrainCommand, RunOptions, TrainerFlags, only="block_diffusion")
def train_backbone(**given: Any) -> None:
    """Train a backbone with the block-diffusion loss, also from an autoregressive Qwen3 checkpoint.

    mrp train backbone --model Qwen/Qwen3-0.6B --data chats.jsonl --output-dir backbone --bf16
    """
    _train("block_diffusion", given)


def _train(objective: str, given: dict[str, Any]) -> None:
    """Train, or only reckon, as the flags say."""
    command = TrainCommand(**{one.name: given.pop(one.name) for one in fields(TrainCommand) if one.name in given})
    with told():
        from ..early import check_training
        from ..train.settings import read_settings

        check_training(read_settings(objective, command.config, given, command.set, early=True), command.dry_run)
        # These import torch, for which neither help nor an error should wait.
        from ..train.runs import dry_run, open_run

        settings = read_settings(objective, command.config, given, command.set)
        if command.dry_run:
            from .tables import print_dry_run

            print_dry_run(dry_run(settings, command.processes))
            return
        run = open_run(settings, command.restart)
        folder = run.train()
    if run.trainer.args.should_save:
        typer.echo(f"saved to {folder}")
        typer.echo(f"next: {_next_command(settings.objective, settings.options, str(folder))}")


def _next_command(objective: str, options: RunOptions, folder: str) -> str:
    """What to do with what a run has saved: have a backbone's head trained, or look at its drafts."""
    if objective == "mrp" or options.lora_rank:
        return shlex.join(["mrp", "show", "--model", folder])
    data = [word for path in options.data for word in ("--data", path)]
    return shlex.join(["mrp", "train", "head", "--model", folder, *data, "--output-dir", f"{folder}-head"])
