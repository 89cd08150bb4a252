"""The console script `mrp`: train, evaluate, make tasks, convert, publish. ``python -m trainer.cli`` is the same.

Commands import what they need when they run, so that help comes at once.
"""

from argparse import Namespace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Literal

import typer

from . import cli_train
from .cli_errors import told

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Multi-token Residual Prediction for SDAR block-diffusion models.",
)
app.add_typer(cli_train.app, name="train")

_WHAT, _HOW, _MODEL, _OUTPUT = "What is asked", "How it is decoded", "Model", "Output"
_KIND, _TARGET, _CARD = "What is pushed", "Where to", "Card"
Splits = Literal["train", "tune", "heldout"]


class Family(StrEnum):
    """Of synthetic problems. (typer knows lists of enums, not of literals.)"""

    MATH = "math"
    CODE = "code"
    SOURCE = "source"


class Decoding(StrEnum):
    """A mode of decoding."""

    STATIC = "static"
    DYNAMIC = "dynamic"
    SEQUENTIAL = "sequential"
    ENTROPY_BOUND = "entropy_bound"
    SELF_SPEC = "self_spec"
    MRP_DIRECT = "mrp_direct"
    MRP_SPEC = "mrp_spec"
    MRP_REMASK = "mrp_remask"


@app.command()
def evaluate(
    model: Annotated[str, typer.Option(metavar="PATH", rich_help_panel=_MODEL, help="Checkpoint: folder or Hub id.")],
    tokenizer: Annotated[
        str | None, typer.Option(metavar="PATH", rich_help_panel=_MODEL, show_default="the model's", help="Another tokenizer.")
    ] = None,
    dtype: Annotated[
        Literal["auto", "float64", "float32", "bfloat16", "float16"] | None,
        typer.Option(rich_help_panel=_MODEL, show_default="the checkpoint's", help="Type of the weights."),
    ] = None,
    device: Annotated[str | None, typer.Option(rich_help_panel=_MODEL, show_default="first GPU, or cpu", help="Where.")] = None,
    prompts: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", rich_help_panel=_WHAT, help="JSON lines: prompt or messages, and answer. Repeatable."),
    ] = None,
    judge: Annotated[
        Literal["exact", "last_number", "contains"], typer.Option(rich_help_panel=_WHAT, help="Of answers to --prompts.")
    ] = "exact",
    chat: Annotated[bool, typer.Option("--chat", rich_help_panel=_WHAT, help="Chat template around every prompt.")] = False,
    family: Annotated[
        list[Family] | None,
        typer.Option(rich_help_panel=_WHAT, show_default="math, code", help="Synthetic problems. Repeatable."),
    ] = None,
    split: Annotated[Splits, typer.Option(rich_help_panel=_WHAT, help="Of these.")] = "heldout",
    count: Annotated[int, typer.Option(min=1, rich_help_panel=_WHAT, help="Problems of a family.")] = 500,
    limit: Annotated[int | None, typer.Option(min=1, rich_help_panel=_WHAT, help="Only so many of each set.")] = None,
    decoding: Annotated[
        list[Decoding] | None, typer.Option(rich_help_panel=_HOW, show_default="static", help="Modes. Repeatable.")
    ] = None,
    tau: Annotated[
        list[float] | None,
        typer.Option(rich_help_panel=_HOW, show_default="0.9", help="Of dynamic and mrp_remask. Repeatable."),
    ] = None,
    states: Annotated[
        list[int] | None, typer.Option(rich_help_panel=_HOW, show_default="4", help="Drafts of *_spec. Repeatable.")
    ] = None,
    branches: Annotated[
        list[int] | None, typer.Option(rich_help_panel=_HOW, show_default="3", help="Their branches. Repeatable.")
    ] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=_HOW, show_default="the family's, or 256", help="Per prompt.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, rich_help_panel=_HOW, help="Prompts per generate.")] = 32,
    output: Annotated[
        str | None, typer.Option(metavar="FILE", rich_help_panel=_OUTPUT, help="Append lines; what is there is skipped.")
    ] = None,
    show: Annotated[int, typer.Option(min=0, rich_help_panel=_OUTPUT, help="Answers to print.")] = 0,
) -> None:
    """Measure accuracy, tokens per forward and acceptance, with 95 % intervals: one JSON line per set and mode."""
    options = Namespace(
        model=model,
        tokenizer=tokenizer,
        dtype=dtype,
        device=device,
        prompts=prompts,
        judge=judge,
        chat=chat,
        family=[one.value for one in family or []],
        split=split,
        count=count,
        limit=limit,
        decoding=[one.value for one in decoding or [Decoding.STATIC]],
        tau=tau or [0.9],
        states=states or [4],
        branches=branches or [3],
        max_new_tokens=max_new_tokens,
        batch_size=batch_size,
        output=output,
        show=show,
    )
    with told():
        from .evaluate import evaluate as evaluate_model

        evaluate_model(options)


@app.command()
def tasks(
    family: Annotated[list[Family], typer.Option(help="Which problems. Repeatable.")],
    split: Annotated[Splits, typer.Option(help="No prompt is in two of them.")] = "train",
    count: Annotated[int, typer.Option(min=1, help="Problems of each family.")] = 1000,
    seed: Annotated[int, typer.Option(help="Other seeds, other problems.")] = 0,
    problems: Annotated[bool, typer.Option("--problems", help="With hidden cases and numbers, not as training data.")] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", show_default="standard output", help="Written anew.")] = None,
) -> None:
    """Make synthetic problems as JSON lines that mrp train reads (source: text and its continuation)."""
    with told():
        from .tasks import problem_lines, training_lines

        make = problem_lines if problems else training_lines
        lines = [line for one in family for line in make(one.value, split, count, seed)]
        text = "".join(f"{line}\n" for line in lines)
        if output is None:
            typer.echo(text, nl=False)
        else:
            output.parent.mkdir(parents=True, exist_ok=True)
            output.write_text(text, encoding="utf-8")
            typer.echo(f"wrote {len(lines)} records to {output}")


@app.command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Folder or Hub id.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder that does not exist or is empty.")],
    layout: Annotated[
        Literal["mrp", "sdar", "heavyball"], typer.Option(help="This package's, the published backbone's, or head's.")
    ] = "mrp",
) -> None:
    """Write a checkpoint in another layout, its numbers byte for byte."""
    with told():
        from .convert import convert as convert_checkpoint

        written = convert_checkpoint(source, target, layout)
    size = sum(path.stat().st_size for path in written.iterdir())
    typer.echo(f"wrote {written} in the layout {layout}: {size:,} bytes")


Results = Annotated[
    list[str] | None,
    typer.Option(metavar="FILE", rich_help_panel=_CARD, help="Lines of mrp evaluate, for the card. Repeatable."),
]
About = Annotated[
    str | None, typer.Option(metavar="FILE", rich_help_panel=_CARD, help="Markdown that tells of the checkpoint, for the card.")
]


@app.command()
def push(
    folder: Annotated[str, typer.Argument(metavar="FOLDER_OR_ID", help="What training saved, or a repository to copy.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO", help="org/name.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list files and sizes; no connection is made.")] = False,
    head_only: Annotated[
        bool, typer.Option("--head-only", rich_help_panel=_KIND, help="The head of a full model alone.")
    ] = False,
    adapter: Annotated[bool, typer.Option("--adapter", rich_help_panel=_KIND, help="A peft adapter.")] = False,
    base_model: Annotated[
        str | None, typer.Option(metavar="ID", rich_help_panel=_KIND, help="With --head-only: the backbone on the Hub.")
    ] = None,
    base_revision: Annotated[
        str | None, typer.Option(rich_help_panel=_KIND, help="The backbone's commit, branch or tag.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", rich_help_panel=_TARGET, help="Create it public, not private.")] = False,
    branch: Annotated[str | None, typer.Option(rich_help_panel=_TARGET, help="Push to this branch.")] = None,
    pull_request: Annotated[
        bool, typer.Option("--pull-request", rich_help_panel=_TARGET, help="Open a pull request, leave main alone.")
    ] = False,
    message: Annotated[str | None, typer.Option(rich_help_panel=_TARGET, help="The commit's title.")] = None,
    card: Annotated[
        Path | None, typer.Option(metavar="FILE", rich_help_panel=_CARD, help="Publish this card, not a rendered one.")
    ] = None,
    new_card: Annotated[
        bool, typer.Option("--new-card", rich_help_panel=_CARD, help="Render it even where a person wrote one.")
    ] = False,
    results: Results = None,
    about: About = None,
) -> None:
    """Push a full model, a head or an adapter to the Hub in one commit, private unless told."""
    with told():
        for one, other, names in (
            (head_only, adapter, "--head-only and --adapter"),
            (branch, pull_request, "--branch and --pull-request"),
        ):
            if one and other:
                raise ValueError(f"{names}: give one of them")
        from .publish import push as push_checkpoint

        kind = "head" if head_only else "adapter" if adapter else None
        done = push_checkpoint(
            folder,
            repo_id,
            kind,
            base_model,
            base_revision,
            dry_run,
            private=not public,
            revision=branch,
            create_pr=pull_request,
            commit_message=message,
            card=card,
            new_card=new_card,
            results=results or [],
            about=about,
        )
    typer.echo(done)


@app.command()
def card(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A checkpoint.")],
    name: Annotated[str | None, typer.Option(show_default="the folder", help="Repository that the examples load.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", show_default="standard output", help="Written anew.")] = None,
    results: Results = None,
    about: About = None,
) -> None:
    """Print the model card of a checkpoint, as a push would render it."""
    with told():
        from .publish import card as rendered_card

        text = rendered_card(folder, name, results or [], about)
        if output is not None:
            output.write_text(text, encoding="utf-8")
    if output is None:
        typer.echo(text, nl=False)


def main() -> None:
    """The console script."""
    app(prog_name="mrp")


if __name__ == "__main__":
    main()
