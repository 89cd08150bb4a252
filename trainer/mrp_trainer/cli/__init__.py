"""The console script `mrp`: train, decode, evaluate, show, serve, make tasks, convert, publish.

``python -m mrp_trainer.cli`` is the same. Commands import what they need when they run, so that help comes at once, and look at
what is cheap first (`early`), so that errors do.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from modeling_mrp import __version__

from ..data.decode_options import DecodeOptions
from ..data.tasks import Family, Split
from ..embedded import located
from ..evaluate.options import EvaluateOptions
from ..flags import for_typer, takes_flags
from ..picture.options import ShowOptions
from ..serve.options import ServeOptions
from . import train
from .errors import told

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Multi-token Residual Prediction for SDAR block-diffusion models.",
)
app.add_typer(train.app, name="train")


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the package's version.")
    ] = False,
) -> None:
    """The options beside the commands."""


_KIND, _TARGET, _CARD = "What is pushed", "Where to", "Card"


@app.command()
@takes_flags(EvaluateOptions, defaults=True)
def evaluate(**given: Any) -> None:
    """Measure accuracy, tokens per forward and acceptance, with 95 % intervals: a row of a table per set and mode."""
    with told():
        options = EvaluateOptions(**given)
        from ..early import check_evaluation

        check_evaluation(options)
        from ..evaluate.command import evaluate as evaluate_model

        evaluate_model(options)


@app.command()
@takes_flags(DecodeOptions, required=["model", "data", "output"], defaults=True)
def decode(**given: Any) -> None:
    """Have a model answer prompts with static decoding: training data for its head. Run again, it goes on."""
    with told():
        options = DecodeOptions(**given)
        from ..early import check_decoding

        check_decoding(options)
        from ..data.decode import decode as decode_prompts

        written = decode_prompts(options)
    if written is not None:
        cut = f", {written.cut} of them without an end (of these training takes whole blocks)" if written.cut else ""
        typer.echo(f"wrote {written.texts} texts to {written.path}{cut}")


@app.command()
@takes_flags(ServeOptions, defaults=True)
def serve(**given: Any) -> None:
    """Answer OpenAI's chats and completions over HTTP on this machine until Ctrl-C."""
    with told():
        options = ServeOptions(**given)
        from ..early import check_asked

        check_asked(options.model, [options.setting()])
        from ..serve.server import serve as serve_model

        serve_model(options)


@app.command()
@takes_flags(ShowOptions, defaults=True)
def show(**given: Any) -> None:
    """Decode a prompt, and draw which forward revealed each token: one SVG, the modes side by side."""
    with told():
        options = ShowOptions(**given)
        from ..early import check_asked

        check_asked(options.model, options.settings())
        from ..picture.modes import show_model

        picture = show_model(options)
    typer.echo(f"wrote {options.output}: {picture.title}")


@app.command()
def tasks(
    family: Annotated[for_typer(list[Family]), typer.Option(help="Synthetic problems. Repeatable.")],  # type: ignore[valid-type]
    split: Annotated[Split, typer.Option(help="Split; no prompt is in two of them.")] = "train",
    count: Annotated[int, typer.Option(min=1, help="Problems of each family.")] = 1000,
    seed: Annotated[int, typer.Option(help="Seed of the problems.")] = 0,
    problems: Annotated[
        bool, typer.Option("--problems", help="Write problems with hidden cases and numbers, not training data.")
    ] = False,
    output: Annotated[Path | None, typer.Option(metavar="FILE", show_default="standard output", help="File to write.")] = None,
) -> None:
    """Make synthetic problems as JSON lines that mrp train reads (source: text and its continuation)."""
    with told():
        from ..data.tasks import problem_lines, training_lines

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
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="Checkpoint: folder or Hub id.")],
    target: Annotated[Path, typer.Argument(metavar="TARGET", help="Folder to write: new, or empty.")],
    layout: Annotated[
        Literal["mrp", "sdar", "heavyball"], typer.Option(help="Layout: this package's, the published backbone's, or head's.")
    ] = "mrp",
) -> None:
    """Write a checkpoint in another layout, its numbers byte for byte."""
    with told():
        from ..early import check_checkpoint, check_new_folder

        check_new_folder(target)
        source = located(source)
        check_checkpoint(source)
        from ..publish.convert import convert as convert_checkpoint

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
    repo_id: Annotated[str, typer.Argument(metavar="REPO", help="Repository: org/name, or a name among your own.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only list files and sizes; no connection is made.")] = False,
    head_only: Annotated[
        bool, typer.Option("--head-only", rich_help_panel=_KIND, help="Push the head of a full model alone.")
    ] = False,
    adapter: Annotated[bool, typer.Option("--adapter", rich_help_panel=_KIND, help="Push a peft adapter.")] = False,
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
        bool, typer.Option("--new-card", rich_help_panel=_CARD, help="Render the card even where a person wrote one.")
    ] = False,
    picture: Annotated[
        bool,
        typer.Option("--picture/--no-picture", rich_help_panel=_CARD, help="Draw a decode for the card."),
    ] = True,
    results: Results = None,
    about: About = None,
) -> None:
    """Push a full model, a head or an adapter to the Hub in one commit, private unless told."""
    with told():
        folder = located(folder)
        for one, other, names in (
            (head_only, adapter, "--head-only and --adapter"),
            (branch, pull_request, "--branch and --pull-request"),
        ):
            if one and other:
                raise ValueError(f"{names}: give one of them")
        from ..early import ABOUT, CARD, RESULTS, check_push

        check_push(folder, repo_id, [(card, CARD), (about, ABOUT), *((path, RESULTS) for path in results or [])])
        from ..publish.command import push as push_checkpoint

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
            picture=picture,
        )
    typer.echo(done)


@app.command()
def card(
    folder: Annotated[str, typer.Argument(metavar="FOLDER", help="A checkpoint.")],
    name: Annotated[str | None, typer.Option(show_default="the folder", help="Repository that the examples load.")] = None,
    output: Annotated[Path | None, typer.Option(metavar="FILE", show_default="standard output", help="File to write.")] = None,
    results: Results = None,
    about: About = None,
) -> None:
    """Print the model card of a checkpoint, as a push would render it."""
    with told():
        folder = located(folder)
        from ..early import ABOUT, RESULTS, check_push

        check_push(folder, None, [(about, ABOUT), *((path, RESULTS) for path in results or [])])
        from ..publish.command import card as rendered_card

        text = rendered_card(folder, name, results or [], about)
        if output is not None:
            output.write_text(text, encoding="utf-8")
    if output is None:
        typer.echo(text, nl=False)


def main() -> None:
    """The console script."""
    app(prog_name="mrp")
