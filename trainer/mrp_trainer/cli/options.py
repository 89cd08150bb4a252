"""Flags of `mrp push`, `mrp card` and `mrp heads`. They have the names of the arguments of
`publish.push`, `publish.command.card` and `publish.collection.published_heads`."""

from dataclasses import dataclass

from ..flags import flag

_KIND, _TARGET, _CARD = "Checkpoint", "Repository", "Card"


@dataclass(kw_only=True)
class _Rendered:
    """Options that `mrp push` and `mrp card` share; each field is a flag."""

    folder: str = flag("Folder that training saved.", metavar="FOLDER", positional=True)
    results: list[str] = flag(
        "Results of mrp evaluate for the card, JSON lines.", [], panel=_CARD, metavar="FILE"
    )
    about: str | None = flag(
        "Markdown about the checkpoint, for the card.", None, panel=_CARD, metavar="FILE"
    )
    license: str | None = flag(
        "Licence in the card, such as apache-2.0.",
        None,
        panel=_CARD,
        metavar="ID",
        shown="the base's; unknown offline",
    )
    language: list[str] = flag("Languages in the card, such as en.", [], panel=_CARD)
    dataset: list[str] = flag(
        "Training data on the Hub, for the card.", [], panel=_CARD, metavar="ID"
    )
    tag: list[str] = flag("Further tags of the card.", [], panel=_CARD)


@dataclass(kw_only=True)
class PushOptions(_Rendered):
    """Options of `mrp push`: the checkpoint's folder, the repository, the commit and the card. Each
    field is a flag."""

    repo_id: str = flag(
        "Repository: org/name, or a name among your own.", metavar="REPO", positional=True
    )
    dry_run: bool = flag("Only list files and sizes; no connection is made.", False)
    base_model: str | None = flag(
        "Base of a head or an adapter on the Hub.", None, panel=_KIND, metavar="ID"
    )
    base_revision: str | None = flag("The base's commit, branch or tag.", None, panel=_KIND)
    private: bool = flag(
        "Visibility of a new repository.", True, panel=_TARGET, name="--private/--public"
    )
    revision: str | None = flag("Push to this branch.", None, panel=_TARGET, name="--branch")
    create_pr: bool = flag(
        "Open a pull request, leave main alone.", False, panel=_TARGET, name="--pull-request"
    )
    commit_message: str | None = flag("The commit's title.", None, panel=_TARGET, name="--message")
    new_card: bool = flag("Render the card even where a person wrote one.", False, panel=_CARD)
    benchmark: list[str] = flag(
        "Benchmark on the Hub that a family or file of the results is, for .eval_results.",
        [],
        panel=_CARD,
        metavar="NAME=ID:TASK",
    )


@dataclass(kw_only=True)
class HeadsOptions:
    """Options of `mrp heads`: which heads the page lists, and where it is written. Each field is a
    flag."""

    author: str | None = flag("Only heads of this user or organisation.", None)
    backbone: str | None = flag("Only heads of this backbone.", None, metavar="ID")
    limit: int = flag("The most heads to ask for, the most downloaded first.", 100, min=1)
    output: str | None = flag("File to write.", None, metavar="FILE", shown="standard output")
    overwrite: bool = flag("Replace another file there.", False)


@dataclass(kw_only=True)
class CardOptions(_Rendered):
    """Options of `mrp card`: the checkpoint's folder, the content of the card, and where it is
    written. Each field is a flag."""

    name: str | None = flag("Repository that the card's examples load.", None, shown="the folder")
    output: str | None = flag("File to write.", None, metavar="FILE", shown="standard output")
    overwrite: bool = flag("Replace another file there.", False)
