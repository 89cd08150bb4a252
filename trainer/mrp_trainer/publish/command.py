"""The commands `mrp push`, which pushes a checkpoint's folder to the Hub in a single commit, and
`mrp card`, which only renders the card of such a folder."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, CommitOperationAdd, CommitOperationDelete, HfApi, ModelCard
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.utils import filter_repo_objects, validate_repo_id

from modeling_mrp.model.code import AUTO_MAP
from modeling_mrp.model.layouts import is_hub_id

from .card import FORM, is_users_card, read_results, renamed, render_card
from .evaluations import EVALUATIONS, Benchmark, evaluation_entries, evaluations_file
from .folder import CONFIGS, KINDS, Folder, json_of, read_folder, tensors_in
from .trial import try_out

# Errors of the HTTP library that huggingface_hub calls, which differs between versions.
_HTTP_ERRORS: Any = HfHubHTTPError.__bases__
# Patterns of files in the repository that the commit removes, unless it sends them.
_STALE = ["model*.safetensors*", "adapter_model*", "*_mrp.py", "custom_generate/*"]


@dataclass(frozen=True)
class Publication:
    """The result of a push or a dry run.

    Attributes:
        repo_id: The id of the repository.
        kind: The kind of the checkpoint: "full", "head" or "adapter".
        sizes: The number of bytes of each published file, by its path in the repository.
        left_out: The files of the folder that are not published.
        trial: A description of the trial, in which the files were loaded in a fresh process and
            decoded a block; or the reason why there was no trial.
        commit: The commit; None after a dry run.
    """

    repo_id: str
    kind: str
    sizes: dict[str, int]
    left_out: list[str]
    trial: str
    commit: CommitInfo | None = None

    def __str__(self) -> str:
        lines = [f"{KINDS[self.kind]} to {self.repo_id}"]
        lines += [f"{size:>15,}  {path}" for path, size in self.sizes.items()]
        lines += [f"{sum(self.sizes.values()):>15,}  bytes in {len(self.sizes)} files"]
        if self.left_out:
            lines += [f"left out: {', '.join(self.left_out)}"]
        lines += [self.trial]
        if self.commit is None:
            return "\n".join([*lines, "Dry run: nothing was sent."])
        return "\n".join([*lines, str(self.commit.pr_url or self.commit.commit_url)])


def push(
    folder: Path | str,
    repo_id: str,
    base_model: str | None = None,
    base_revision: str | None = None,
    *,
    private: bool = True,
    revision: str | None = None,
    create_pr: bool = False,
    commit_message: str | None = None,
    token: str | bool | None = None,
    dry_run: bool = False,
    new_card: bool = False,
    results: Sequence[Path | str] = (),
    about: Path | str | None = None,
    tags: Sequence[str] = (),
    license: str | None = None,
    language: Sequence[str] = (),
    dataset: Sequence[str] = (),
    benchmark: Sequence[str] = (),
) -> Publication:
    """Push a saved checkpoint to the Hub in one commit. The folder is only read. The remote code is
    the code that this package generates.

    Args:
        folder: A folder that `save_pretrained` wrote: a full model, a head (`head_only=True`) or a
            peft adapter.
        repo_id: "org/name", or "name" for a repository of the user.
        base_model: Hub id of the base of a head or an adapter. It is needed if the folder names
            another base, such as a local folder.
        base_revision: The base's commit, branch or tag.
        private: Whether the repository is private, if it is new.
        revision: The branch, created if it does not exist; `main` by default.
        create_pr: Whether to open a pull request instead of changing `main`.
        commit_message: The message of the commit; by default it names the kind of the checkpoint.
        token: As in `huggingface_hub`.
        dry_run: Whether to return the files that would be sent, and send nothing. The files are
            tried as before a push: they are loaded and decode a block. No connection is made.
        new_card: True: render a card and send it, in place of any that a person wrote. False: do
            the first of these that applies. If a person wrote the folder's README.md, send it as
            it is. If a person wrote the repository's card, keep that. Otherwise, send the folder's
            README.md; render it anew before, if it is missing or only an empty form, or if an
            argument changes the card.
        results: Files that `mrp evaluate --output` wrote, whose measurements the rendered card
            shows.
        about: A Markdown file that describes the checkpoint. Its text opens the rendered card, and
            its metadata override those of the template.
        tags: Further tags of the rendered card.
        license: Licence in the card's metadata. By default it is the licence in the base's card on
            the Hub, which a dry run does not look up.
        language: Languages in the card's metadata.
        dataset: Hub ids of the training data, in the card's metadata.
        benchmark: Problem sets of the results that are benchmarks on the Hub, each as a text
            "NAME=DATASET:TASK". Their accuracy is also written to `.eval_results`, which the Hub
            shows beside the benchmark.

    Raises:
        ValueError: if the folder does not hold a sound checkpoint of this package; if the base is
            not on the Hub; if arguments are malformed, or contradict each other or a card that a
            person wrote; or if the files to send do not load and decode.
        OSError: if the Hub refuses the commit, or cannot be reached. The folder and the branch are
            unchanged.
    """
    if revision is not None and create_pr:
        raise ValueError(
            f"revision={revision!r} and create_pr=True: push to a branch, or open a pull request"
        )
    validate_repo_id(repo_id)
    checkpoint = read_folder(folder)
    base = base_model or checkpoint.base
    if base_model is not None and checkpoint.kind == "full":
        raise ValueError(
            f"base_model is {base_model}, but {folder} holds {KINDS['full']}, which has its own"
        )
    if base is not None and not is_hub_id(base):
        raise ValueError(
            f"base_model is {base!r}: it must be the id of a model on the Hub, 'org/name', where "
            "others find it. Name it when saving (model.backbone_source), or with --base-model of "
            "the command"
        )
    metadata = card_metadata(license, language, dataset)
    measured = read_results(results)
    benchmarks = Benchmark.named(benchmark)
    evaluations = evaluation_entries(measured, benchmarks)
    card_text = FORM
    if "README.md" in checkpoint.files:
        card_text = checkpoint.files["README.md"].read_text(encoding="utf-8")
    is_ours = new_card or not is_users_card(card_text)
    if not is_ours and (results or about or metadata):
        names = " and ".join(["results", "about", *metadata] if metadata else ["results", "about"])
        raise ValueError(
            f"{folder}/README.md was written by a person: leave out {names}, or pass new_card=True"
        )
    is_asked = new_card or results or about or tags or base_model or metadata
    if is_ours and (is_asked or FORM in card_text):
        if not dry_run and base is not None and "license" not in metadata:
            metadata |= _license_of(base, token)
        card_text = str(
            render_card(
                checkpoint.path,
                checkpoint.kind,
                repo_id,
                measured,
                about,
                tags,
                base_model,
                metadata,
                benchmarks,
            )
        )
    contents = _contents(checkpoint, base_model, base_revision) | {
        "README.md": renamed(card_text, repo_id).encode()
    }
    if evaluations:
        contents[EVALUATIONS] = evaluations_file(evaluations)
    sizes = {}
    for name, content in sorted(contents.items()):
        sizes[name] = len(content) if isinstance(content, bytes) else content.stat().st_size
    trial = try_out(checkpoint, contents, tensors_in(checkpoint.path))
    if dry_run:
        return Publication(repo_id, checkpoint.kind, sizes, checkpoint.left_out, trial)
    api = HfApi(token=token)
    with network_errors(f"the Hub at {api.endpoint}", "repeat the push"):
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        remote_files = set(api.list_repo_files(repo_id, revision=revision))
        contents["README.md"] = renamed(card_text, repo_id).encode()
        if is_ours and not new_card and "README.md" in remote_files:
            remote_card = Path(api.hf_hub_download(repo_id, "README.md", revision=revision))
            if is_users_card(remote_card.read_text(encoding="utf-8")):
                del contents["README.md"]
        stale = filter_repo_objects(remote_files - contents.keys(), allow_patterns=_STALE)
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, content) for name, content in contents.items()),
                *map(CommitOperationDelete, stale),
            ],
            commit_message=commit_message or f"Upload {KINDS[checkpoint.kind]}",
            revision=revision,
            create_pr=create_pr,
        )
    return Publication(repo_id, checkpoint.kind, sizes, checkpoint.left_out, trial, commit)


def card_metadata(
    license: str | None, language: Sequence[str], dataset: Sequence[str]
) -> dict[str, Any]:
    """Return a dict of card metadata, with the fields `license`, `language` and `datasets`. A field
    is left out if its argument is None or empty. `ValueError` if an item of `dataset` does not have
    the form of an id on the Hub."""
    for name in dataset:
        if not is_hub_id(name):
            raise ValueError(f"dataset is {name!r}: it must be the id of a dataset on the Hub")
    metadata = {"license": license, "language": list(language), "datasets": list(dataset)}
    return {name: value for name, value in metadata.items() if value}


def _license_of(base: str, token: str | bool | None) -> dict[str, Any]:
    """Look up the licence in the card of a base on the Hub. Return the licence's fields of the
    card; an empty dict if there are none, or if the Hub cannot be reached."""
    try:
        given = token if isinstance(token, str) else None
        fields = ModelCard.load(base, token=given).data.to_dict()
    except (OSError, ValueError, *_HTTP_ERRORS):
        return {}
    return {
        name: fields[name]
        for name in ("license", "license_name", "license_link")
        if fields.get(name)
    }


@contextmanager
def network_errors(server: str, remedy: str) -> Iterator[None]:
    """A context manager that turns a connection error that is not an `OSError` into an `OSError`
    that names the server and the remedy."""
    try:
        yield
    except OSError:  # also for an error that the Hub answers
        raise
    except _HTTP_ERRORS as error:
        raise OSError(
            f"{server} cannot be reached: check the network, and {remedy} ({error})"
        ) from error


def _contents(
    checkpoint: Folder, base: str | None, revision: str | None
) -> dict[str, Path | bytes]:
    """Collect the files to send, by name: the folder's files, the remote code, and a config that
    names the code and the base."""
    config = CONFIGS[checkpoint.kind]
    fields = json_of(checkpoint.path / config)
    if checkpoint.code:
        fields |= {"auto_map": AUTO_MAP}
    if base is not None:
        fields |= {"base_model_name_or_path": base}
        fields |= {"revision" if checkpoint.kind == "adapter" else "base_model_revision": revision}
    code = {name: text.encode() for name, text in checkpoint.code.items()}
    return {**checkpoint.files, **code, config: json.dumps(fields, indent=2).encode()}


def card(
    folder: str,
    name: str | None = None,
    results: Sequence[str] = (),
    about: str | None = None,
    tags: Sequence[str] = (),
    license: str | None = None,
    language: Sequence[str] = (),
    dataset: Sequence[str] = (),
) -> str:
    """Render the card of a checkpoint's folder, as a push would, and return its text. No connection
    is made, so a licence that is not given is not looked up.

    Args:
        folder: A folder that `save_pretrained` wrote.
        name: The name in the card's title, which the card's examples load, such as the id of a
            repository; by default the folder.
        results: Files that `mrp evaluate --output` wrote, whose measurements the card shows.
        about: A Markdown file that describes the checkpoint; its text opens the card.
        tags: Further tags.
        license: Licence in the metadata.
        language: Languages in the metadata.
        dataset: Hub ids of the training data, in the metadata.
    """
    name = name or (f"./{folder}" if is_hub_id(folder) else folder)
    metadata = card_metadata(license, language, dataset)
    kind = read_folder(folder).kind
    measured = read_results(results)
    return str(render_card(folder, kind, name, measured, about, tags, metadata=metadata))
