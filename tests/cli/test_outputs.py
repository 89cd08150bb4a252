"""No command overwrites or removes what it did not write itself, whatever is where it is to
write."""

import errno
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data.tasks import training_lines
from mrp_trainer.outputs import LISTING, OwnFolder, report_full_disk, write_output
from safetensors import SafetensorError

from modeling_mrp import MRPForCausalLM
from tests.support.commands import leaves, mrp
from tests.support.helpers import word_model

MINE = "what a user wrote\n"


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, word_tokenizer: Any) -> dict[str, str]:
    """A model with a head, that head alone, and chats."""
    root = tmp_path_factory.mktemp("outputs")
    model = word_model(word_tokenizer)
    for name in ("full", "head"):
        word_tokenizer.save_pretrained(root / name)
    model.save_pretrained(root / "full")
    MRPForCausalLM.from_pretrained(root / "full").save_pretrained(root / "head", head_only=True)
    (root / "chats.jsonl").write_text("\n".join(training_lines("math", "train", 4)))
    return {path.stem: str(path) for path in root.iterdir()}


def tree(folder: Path) -> dict[str, Any]:
    """Collect all that lies under a folder: of files the contents, of links where they lead."""
    return {
        str(path.relative_to(folder)): os.readlink(path)
        if path.is_symlink()
        else path.read_bytes()
        if path.is_file()
        else None
        for path in folder.rglob("*")
    }


Arguments = Callable[[dict[str, str], str], list[str]]
FILES: dict[str, tuple[str, Arguments]] = {
    "tasks": (
        "made.jsonl",
        lambda files, output: ["--family", "math", "--count", "2", "--output", output],
    ),
    "card": ("README.md", lambda files, output: [files["full"], "--output", output]),
    "show": (
        "decode.svg",
        lambda files, output: [
            "--model",
            files["full"],
            "--max-new-tokens",
            "8",
            "--output",
            output,
        ],
    ),
    "evaluate": (
        "results.jsonl",
        lambda files, output: [
            *("--model", files["full"], "--family", "math", "--count", "1", "--decoding", "static"),
            *("--max-new-tokens", "8", "--output", output),
        ],
    ),
    "decode": (
        "decoded.jsonl",
        lambda files, output: [
            *("--model", files["full"], "--data", files["chats"], "--limit", "1"),
            *("--max-new-tokens", "8", "--output", output),
        ],
    ),
    "heads": ("HEADS.md", lambda files, output: ["--output", output]),
}
CARD_OF_DATA = "decode --card"
REFUSING: dict[str, tuple[str, Arguments]] = {
    **FILES,
    CARD_OF_DATA: (
        "README.md",
        lambda files, output: [
            *("--model", files["full"], "--data", files["chats"], "--limit", "1"),
            *("--output", str(Path(output).parents[1] / "decoded.jsonl"), "--card", output),
        ],
    ),
}


@pytest.fixture(autouse=True)
def hub_without_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mrp_trainer.publish.collection.published_heads", lambda **_: [])


def test_every_command_that_writes_is_tried() -> None:
    """Those below have a row in `REFUSING`; `train` has tests of its own."""
    writing = set()
    for path, parser in leaves():
        names = {parameter.name for parameter in parser.params}
        for flag in ("output", "card", "output_dir"):
            if flag in names:
                suffix = " --card" if flag == "card" else ""
                writing.add(" ".join(path) + suffix)
    assert writing == {*REFUSING, "train head", "train backbone"}


def user_file(path: Path) -> None:
    path.write_text(MINE)


def read_only(path: Path) -> None:
    path.write_text(MINE)
    path.chmod(0o444)


def one_line(path: Path) -> None:
    """A JSON file without a newline at its end, which is not the cut line of a run that was
    killed."""
    path.write_text('{"a": 1}')


def cut_line(path: Path) -> None:
    path.write_text('{"a": [1, 2')


def link_to_user_file(path: Path) -> None:
    path.with_name("mine.txt").write_text(MINE)
    path.symlink_to("mine.txt")


def full_folder(path: Path) -> None:
    path.mkdir()
    (path / "mine.txt").write_text(MINE)


def link_to_folder(path: Path) -> None:
    full_folder(path.with_name("folder"))
    path.symlink_to("folder")


def file_above(path: Path) -> None:
    path.parent.rmdir()
    path.parent.write_text(MINE)


def read_only_above(path: Path) -> None:
    path.parent.chmod(0o555)


REFUSED = [
    user_file,
    read_only,
    one_line,
    cut_line,
    link_to_user_file,
    full_folder,
    Path.mkdir,
    link_to_folder,
]


@pytest.mark.parametrize(
    "kind", [*REFUSED, file_above, read_only_above], ids=lambda kind: kind.__name__
)
@pytest.mark.parametrize("command", REFUSING)
def test_a_file_is_not_written_over_what_is_there(
    command: str, kind: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """It says so in one line, and everything stays as it was."""
    name, arguments = REFUSING[command]
    path = tmp_path / "out" / name
    path.parent.mkdir()
    kind(path)
    before = tree(tmp_path)
    said = mrp(command.split()[0], *arguments(files, str(path)), fails=True)
    assert "Error: " in said
    assert str(path.parent) in said.replace("\n", "")
    assert tree(tmp_path) == before


@pytest.mark.parametrize("command", FILES)
def test_a_file_of_the_command_itself(command: str, files: dict[str, str], tmp_path: Path) -> None:
    """Where nothing is, also at the end of a link, it is written, and what is beside it stays; the
    same command again is no error, but for decode, which says that all is done; with --overwrite
    what is there is replaced."""
    name, arguments = FILES[command]
    path = tmp_path / "out" / name
    path.parent.mkdir()
    path.symlink_to(f"real.{path.suffix}")
    beside = path.parent / f"{path.stem}.part"
    full_folder(beside)
    mrp(command, *arguments(files, str(path)))
    assert path.is_symlink()
    assert path.read_bytes()
    assert (beside / "mine.txt").read_text() == MINE
    before = tree(tmp_path)
    assert len(before) == 5, "nothing else is left behind"
    mrp(command, *arguments(files, str(path)), fails=command == "decode")
    assert tree(tmp_path) == before
    if command in ("tasks", "card", "show", "heads"):
        path.write_text(MINE)
        mrp(command, *arguments(files, str(path)), "--overwrite")
        assert tree(tmp_path) == before


def test_a_picture_that_nobody_changed_is_drawn_anew(files: dict[str, str], tmp_path: Path) -> None:
    """Also of another text; one that was edited is kept."""
    path = tmp_path / "decode.svg"
    show = ["show", "--model", files["full"], "--output", str(path)]
    mrp(*show, "--max-new-tokens", "8")
    first = path.read_text()
    mrp(*show, "--max-new-tokens", "12")
    assert path.read_text() != first
    edited = path.read_text().replace("</svg>", "<!-- mine --></svg>")
    path.write_text(edited)
    assert "is there already" in mrp(*show, "--max-new-tokens", "8", fails=True)
    assert path.read_text() == edited


def train(
    objective: str,
    files: dict[str, str],
    folder: Path,
    *more: str,
    model: str = "",
    fails: bool = False,
) -> str:
    quick = [
        "--max-length",
        "64",
        "--set",
        "use_cpu=true",
        "--set",
        "disable_tqdm=true",
        "--steps",
        "2",
        "--save-steps",
        "1",
    ]
    given = [
        "--model",
        model or files["full"],
        "--data",
        files["chats"],
        "--output-dir",
        str(folder),
        *more,
    ]
    return mrp("train", objective, *given, *quick, fails=fails)


def a_model(folder: Path, files: dict[str, str]) -> None:
    shutil.copytree(files["full"], folder)


def a_head(folder: Path, files: dict[str, str]) -> None:
    shutil.copytree(files["head"], folder)


def a_file_of_the_user(folder: Path, files: dict[str, str]) -> None:
    full_folder(folder)


def notes_on_checkpoints(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir()
    full_folder(folder / "checkpoint-notes")


def a_checkpoint(folder: Path, files: dict[str, str]) -> None:
    shutil.copytree(files["full"], folder / "checkpoint-1")


def settings_of_a_run(folder: Path, files: dict[str, str]) -> None:
    """As one that was copied beside a model to be used as --config."""
    a_model(folder, files)
    (folder / "run.yaml").write_text("model: m\n")


def a_file(folder: Path, files: dict[str, str]) -> None:
    folder.write_text(MINE)


def a_link_to_a_model(folder: Path, files: dict[str, str]) -> None:
    a_model(folder.with_name("model"), files)
    folder.symlink_to("model")


def a_link_to_nothing(folder: Path, files: dict[str, str]) -> None:
    folder.symlink_to("nothing")


def a_read_only_folder(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(mode=0o555)


FOLDERS = [
    a_model,
    a_head,
    a_file_of_the_user,
    notes_on_checkpoints,
    a_checkpoint,
    settings_of_a_run,
    a_file,
]
FOLDERS += [a_link_to_a_model, a_link_to_nothing, a_read_only_folder]


@pytest.mark.parametrize("restart", [[], ["--restart"]], ids=["", "restart"])
@pytest.mark.parametrize("kind", FOLDERS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize("objective", ["head", "backbone"])
def test_no_run_begins_in_a_folder_of_others(
    objective: str, kind: Any, restart: list[str], files: dict[str, str], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    kind(folder, files)
    before = tree(tmp_path)
    said = train(objective, files, folder, *restart, fails=True)
    assert "Error: " in said
    assert "run" in said
    assert tree(tmp_path) == before


@pytest.mark.parametrize("objective", ["head", "backbone"])
@pytest.mark.parametrize("reads", ["model", "head", "tokenizer"])
def test_no_run_writes_into_what_it_reads(
    objective: str, reads: str, files: dict[str, str], tmp_path: Path
) -> None:
    """Not with --restart either, nor if that is the result of an earlier run."""
    if reads == "head" and objective == "backbone":
        pytest.skip("it reads no head")
    folder = tmp_path / "run"
    train("backbone" if reads == "model" else "head", files, folder)
    before = tree(tmp_path)
    given = {"model": str(folder)} if reads == "model" else {}
    more = [] if reads == "model" else [f"--{reads}", str(folder)]
    said = train(objective, files, folder, *more, "--restart", fails=True, **given)
    assert f"which is also {reads}" in said.replace("\n", " ")
    assert tree(tmp_path) == before


def test_a_run_removes_its_own_checkpoints_alone(files: dict[str, str], tmp_path: Path) -> None:
    """In an empty folder, taken up and begun again: what a user put beside its files stays, be it
    called like a checkpoint."""
    folder = tmp_path / "run"
    folder.mkdir()
    train("head", files, folder, "--set", "save_total_limit=1")
    assert [path.name for path in folder.glob("checkpoint-*")] == ["checkpoint-2"]
    for name in ("checkpoint-notes", "checkpoint-2-best", "notes"):
        full_folder(folder / name)
    shutil.copy(folder / "checkpoint-2" / "trainer_state.json", folder / "checkpoint-2-best")
    mine = {
        name: tree(folder / name) for name in ("checkpoint-notes", "checkpoint-2-best", "notes")
    }
    result = (folder / "model.safetensors").read_bytes()
    assert "all 2 steps of this run are done" in train(
        "head", files, folder, "--set", "save_total_limit=1"
    )
    assert (folder / "model.safetensors").read_bytes() == result
    train("head", files, folder, "--set", "save_total_limit=1", "--restart", "--seed", "5")
    assert (folder / "model.safetensors").read_bytes() != result
    assert {name: tree(folder / name) for name in mine} == mine
    assert (folder / "checkpoint-2").is_dir()
    (folder / "README.md").write_text(MINE)
    write_output(folder / "mine" / "model.safetensors", MINE)
    OwnFolder(folder).remove("model.safetensors")
    shutil.move(folder / "mine" / "model.safetensors", folder)
    before = tree(folder)
    for restart in ([], ["--restart"]):
        said = train("head", files, folder, *restart, "--seed", "5", fails=True).replace("\n", " ")
        assert "model.safetensors was not written by this command: move it elsewhere" in said
        assert tree(folder) == before
    (folder / "model.safetensors").unlink()
    shutil.copytree(folder / "checkpoint-2", folder / "checkpoint-1")
    before = tree(folder)
    assert "checkpoint-1, which no run here wrote" in train(
        "head", files, folder, "--restart", fails=True
    ).replace("\n", " ")
    assert tree(folder) == before


@pytest.mark.parametrize(
    "kind",
    [a_model, a_checkpoint, a_head, a_file, a_link_to_a_model],
    ids=lambda kind: kind.__name__,
)
def test_a_head_is_not_saved_over_its_backbone(
    kind: Any, files: dict[str, str], tmp_path: Path
) -> None:
    """By the library, either; over an earlier head it is, and into a folder without one."""
    folder = tmp_path / "run"
    kind(folder, files)
    model = MRPForCausalLM.from_pretrained(files["full"])
    before = tree(tmp_path)
    if kind in (a_head, a_checkpoint):
        model.save_pretrained(folder, head_only=True)
        assert before.keys() <= tree(tmp_path).keys()
        assert MRPForCausalLM.from_pretrained(folder).mrp_head is not None
    else:
        with pytest.raises(ValueError, match=r"of another checkpoint than a head's|is no folder"):
            model.save_pretrained(folder, head_only=True)
        assert tree(tmp_path) == before


FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_disk(*args: Any, **kwargs: Any) -> Any:
    raise FULL


def save_in_part(folder: OwnFolder) -> None:
    with folder.saving() as partial:
        (partial / "other").write_text("second")
        full_disk()


def test_a_full_disk_leaves_what_was_there(
    files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file, a listing and a result of a run; each error says what to do."""
    path, folder = tmp_path / "file", OwnFolder(tmp_path / "folder")
    write_output(path, "first")
    folder.claim("a")
    with folder.saving() as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "result").write_text("first")
    before = tree(tmp_path)
    assert before["folder/sub/result"] == b"first"
    with pytest.raises(OSError, match="No space left"):
        save_in_part(folder)
    assert tree(tmp_path) == before
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        for write in (
            lambda: write_output(path, "second", overwrite=True),
            lambda: folder.claim("b"),
        ):
            with pytest.raises(OSError, match="No space left"):
                write()
        said = mrp(
            "tasks",
            "--family",
            "math",
            "--count",
            "1",
            "--output",
            str(tmp_path / "new.jsonl"),
            fails=True,
        )
        assert "No space left on device: free some space, and repeat the command" in said.replace(
            "\n", " "
        )
    assert tree(tmp_path) == before


def test_folders_above_a_file_are_made(tmp_path: Path) -> None:
    write_output(tmp_path / "a" / "b" / "file", "first")
    assert (tmp_path / "a" / "b" / "file").read_text() == "first"


def test_what_a_killed_save_left_is_no_result(tmp_path: Path) -> None:
    """The next one saves as if it was not there."""
    folder = OwnFolder(tmp_path / "runs" / "run")
    left = folder.saving()
    (left.__enter__() / "half").write_text("of an earlier save")  # a killed process exits nothing
    with folder.saving() as partial:
        (partial / "whole").write_text("result")
    assert tree(folder.path).keys() == {LISTING, "whole"}
    assert folder.names() == ["whole"]


@pytest.mark.parametrize(
    "error",
    [
        FULL,
        OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)),
        SafetensorError(
            "Error while serializing: I/O error: No space left on device (os error 28)"
        ),
        RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos 64 vs 0"),
    ],
)
def test_every_sign_of_a_full_disk_is_told_alike(error: Exception) -> None:
    whole = r"the disk is full, or your quota is used up: free some: 'inside'"
    with (
        pytest.raises(OSError, match=whole) as caught,
        report_full_disk("place", "free some"),
        report_full_disk("inside", "free some"),
    ):
        raise error
    assert caught.value.errno == errno.ENOSPC
    with pytest.raises(RuntimeError, match=r"^shapes"), report_full_disk("place", "free some"):
        raise RuntimeError("shapes differ")


@pytest.fixture
def saving_fails(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Let the disk be full from the n-th file of weights on."""
    from modeling_mrp.model import loading

    save = loading.save_file

    def after(count: int) -> None:
        left = [count]

        def saved(tensors: Any, path: Any, **kwargs: Any) -> None:
            left[0] -= 1
            if left[0] < 0:
                Path(path).write_bytes(b"half")
                raise SafetensorError("I/O error: No space left on device (os error 28)")
            save(tensors, path, **kwargs)

        monkeypatch.setattr(loading, "save_file", saved)

    return after


def test_a_disk_that_fills_up_while_a_run_saves(
    files: dict[str, str], tmp_path: Path, saving_fails: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each of its saves in turn: earlier checkpoints stay, and the command goes on once there is
    room."""
    whole = tmp_path / "whole"
    train("head", files, whole)
    right = (whole / "model.safetensors").read_bytes()
    for saves in range(3):  # two checkpoints, and the result
        folder = tmp_path / str(saves)
        saving_fails(saves)
        said = train("head", files, folder, fails=True).replace("\n", " ")
        assert (
            "free some space and repeat the command, which goes on from the last whole checkpoint"
            in said
        )
        assert sorted(path.name for path in folder.glob("checkpoint-*")) == [
            f"checkpoint-{step + 1}" for step in range(saves)
        ]
        assert not (folder / "model.safetensors").exists()
        saving_fails(99)
        train("head", files, folder)
        assert (folder / "model.safetensors").read_bytes() == right
        saving_fails(0)
        train("head", files, folder, fails=True)  # its result is saved again
        assert (folder / "model.safetensors").read_bytes() == right
        assert LISTING in tree(folder)
        saving_fails(99)


@pytest.mark.parametrize(
    ("names", "shown"),
    [(["a"], "a"), (["b", "a"], "a and 1 more"), (["c", "b", "a"], "a and 2 more")],
)
def test_a_folder_that_is_not_ours_is_named_with_what_it_holds(
    tmp_path: Path, names: list[str], shown: str
) -> None:
    for name in names:
        (tmp_path / name).write_text("mine")
    with pytest.raises(ValueError, match=f" holds {shown}, which this command did not write"):
        OwnFolder(tmp_path).check()


def test_a_file_is_overwritten_only_if_that_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_output(path, "first")
    with pytest.raises(
        ValueError, match="holds something else: name another file, or pass --overwrite"
    ):
        write_output(path, "second")
    assert path.read_text() == "first"
    write_output(path, "second", overwrite=True)
    assert path.read_text() == "second"
