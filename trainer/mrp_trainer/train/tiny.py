"""The recipe of the embedded checkpoint, up to `./hub_configs/sdar-tiny-mrp`, with fixed seeds.

``python -m mrp_trainer.train.tiny --stage all`` runs it (backbone, trajectories, head), or one stage at a time; the head alone
is trained on the embedded backbone. Under ``torchrun --nproc-per-node 2 -m mrp_trainer.train.tiny`` two processes share every
step, which two cores do faster than two threads of one process (give each its own: ``OMP_NUM_THREADS=1``). It keeps the
embedded tokenizer, unless the stage ``tokenizer`` has made another in ``--work``, and stops short of ``export``, which
replaces the checkpoint. A stage that was interrupted resumes from its last checkpoint in ``--work``, so a run with other
settings wants another folder; every training stage logs to the console, and at its end to ``log.jsonl`` in its folder.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import typer
from accelerate import PartialState
from torch.utils.data import Dataset
from transformers import PreTrainedTokenizerFast, set_seed

from modeling_mrp.generate.generation import MRPGenerationConfig
from modeling_mrp.model.configuration import MRPConfig
from modeling_mrp.model.saving import written_beside
from modeling_mrp.modeling import MRPForCausalLM

from ..data.problems import TaskDataset
from ..data.samples import Sample
from ..data.tasks import Family
from ..data.tokenizer import train_tokenizer
from ..embedded import TINY
from ..flags import flag, takes_flags
from ..heads import NEW_HEADS, with_new_head
from .arguments import MRPTrainingArguments
from .trainer import MRPTrainer
from .trajectories import TrajectoryDataset, record_trajectories

FAMILIES: dict[Family, float] = {"math": 0.42, "code": 0.53, "source": 0.05}
BLOCK_SIZE = 16
TRAJECTORIES = "trajectories.jsonl"
RECORDED = 12800
# What the head drafts for, in the mix that it is trained on.
DECODINGS: tuple[dict[str, Any], ...] = (
    {"decoding": "dynamic", "confidence_threshold": 0.9},
    {"decoding": "static"},
    {"decoding": "dynamic", "confidence_threshold": 0.9},
    {"decoding": "sequential"},
    {"decoding": "entropy_bound", "entropy_threshold": 0.35},
)


@dataclass
class TinyOptions:
    """What the recipe takes; each field is a flag."""

    stage: str = flag(
        "What to do: all are backbone, trajectories and head.",
        "all",
        kind=Literal["tokenizer", "backbone", "trajectories", "head", "export", "all"],
    )
    work: Path = flag("Folder of everything that is made.", Path("runs/tiny"))
    steps: int = flag("Steps of the backbone.", 11000)
    batch_size: int = flag("Rows of each.", 24)
    learning_rate: float = flag("Of AdamW; Muon has half of it.", 3e-3)
    trajectories: int = flag("Problems decoded to train the head on.", RECORDED)
    head_steps: int = flag("Steps of the head.", 7200)
    head_batch_size: int = flag("Rows of each.", 16)
    head_layers: int = flag("Layers of the head.", 3)
    head_learning_rate: float = flag("Of AdamW; Muon has half of it.", 4e-3)
    unroll: int = flag("Head steps unrolled in training.", 2)
    order_weight: float = flag("Weight of the order of reveals in the head's loss.", 0.5)
    head_init: str = flag("identity, backbone (its last layers), published, or a trained model's folder.", "backbone")
    head_name: str = flag("The head's folder in --work.", "head")
    target: Path = flag("Where export writes.", Path(TINY), shown="the embedded checkpoint")


def _tokenizer(work: Path) -> PreTrainedTokenizerFast:
    """The one that the stage `tokenizer` made, if it was run; otherwise the embedded checkpoint's."""
    made = work / "tokenizer"
    return PreTrainedTokenizerFast.from_pretrained(made if made.exists() else TINY)


def _backbone(work: Path) -> Path:
    """The one that the stage `backbone` made, if it was run; otherwise the embedded checkpoint's."""
    made = work / "backbone" / "final"
    return made if made.exists() else Path(TINY)


def tiny_config(tokenizer: PreTrainedTokenizerFast, head_layers: int = 0) -> MRPConfig:
    """The embedded model's shape."""
    return MRPConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=320,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=0.05,
        block_size=BLOCK_SIZE,
        mask_token_id=tokenizer.mask_token_id,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        num_nextn_predict_layers=head_layers,
    )


def _train(
    model: MRPForCausalLM,
    dataset: Dataset[Sample],
    folder: Path,
    seed: int,
    batch_size: int,
    **options: Any,
) -> None:
    """Trains a model, whose folder then has it as `final`; the processes share each batch."""
    processes = _processes().num_processes
    if batch_size % processes:
        raise ValueError(f"the batch size is {batch_size}, and {processes} processes share it: use a multiple of {processes}")
    folder.mkdir(parents=True, exist_ok=True)
    arguments = MRPTrainingArguments(
        output_dir=str(folder),
        seed=seed,
        per_device_train_batch_size=batch_size // processes,
        report_to=[],
        logging_steps=25,
        save_steps=500,
        save_total_limit=2,
        adam_beta2=0.98,
        use_cpu=not torch.cuda.is_available(),
        **options,
    )
    trainer = MRPTrainer(model=model, args=arguments, train_dataset=dataset)
    trainer.train(resume_from_checkpoint=True)
    if arguments.process_index == 0:
        model.save_pretrained(folder / "final")
        (folder / "log.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in trainer.state.log_history))
    _processes().wait_for_everyone()


def _processes() -> PartialState:
    """Those that torchrun has started, or this one alone."""
    return PartialState(cpu=not torch.cuda.is_available())


def train_backbone(options: TinyOptions) -> None:
    """Train a backbone by block diffusion on the three task families."""
    set_seed(0)
    tokenizer = _tokenizer(options.work)
    model = MRPForCausalLM(tiny_config(tokenizer))
    _train(
        model,
        TaskDataset(tokenizer, options.steps * options.batch_size, FAMILIES, "train", BLOCK_SIZE),
        options.work / "backbone",
        seed=0,
        batch_size=options.batch_size,
        objective="block_diffusion",
        max_steps=options.steps,
        learning_rate=options.learning_rate,
        muon_learning_rate=options.learning_rate / 2,
        lr_scheduler_type="linear",
        warmup_steps=100,
        weight_decay=0.01,
    )


def record(work: Path, count: int) -> None:
    """Decodes training problems drawn with another seed than the backbone's (most code prompts recur: there are few), unless
    it has been done."""
    if (work / TRAJECTORIES).exists():
        return
    tokenizer = _tokenizer(work)
    model = MRPForCausalLM.from_pretrained(_backbone(work)).eval()
    processes = _processes()
    problems = TaskDataset(tokenizer, count, FAMILIES, "train", BLOCK_SIZE, seed=1)
    work.mkdir(parents=True, exist_ok=True)
    record_trajectories(model.to(processes.device), problems, work / TRAJECTORIES, state=processes, decodings=DECODINGS)


def head_on_backbone(folder: Path, layers: int, init: str = "backbone", head_predicts: str = "residual") -> MRPForCausalLM:
    """A head on the backbone of a checkpoint: a new one (see `new_head`), or that of another model's folder."""
    model = MRPForCausalLM.from_pretrained(folder)
    if init not in NEW_HEADS:
        return MRPForCausalLM.from_backbone(model, head=init)
    model.config.head_predicts = head_predicts
    return with_new_head(model, layers, init)


def trajectories(
    work: Path, tokenizer: PreTrainedTokenizerFast, size: int, seed: int = 0, count: int = RECORDED
) -> TrajectoryDataset:
    """The recorded decodings as a dataset of a size; if they are not there, so many problems are recorded now."""
    record(work, count)
    eos, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    return TrajectoryDataset(work / TRAJECTORIES, size, BLOCK_SIZE, eos, pad, seed)


def train_head(options: TinyOptions, dataset: Dataset[Sample] | None = None, **loss: Any) -> Path:
    """Train a head by residual KL on the frozen backbone, at the states that decoding met; return the trained model's folder.

    Args:
        options: Of the recipe.
        dataset: What to train on in place of the recorded decodings.
        loss: Fields of `MRPTrainingArguments` that say which states are learned and how, in place of the recipe's.
    """
    set_seed(1)
    model = head_on_backbone(_backbone(options.work), options.head_layers, options.head_init)
    if dataset is None:
        size = options.head_steps * options.head_batch_size
        dataset = trajectories(options.work, _tokenizer(options.work), size, count=options.trajectories)
    loss = {"unroll": options.unroll, "order_weight": options.order_weight, "leftmost_share": 0.25, **loss}
    folder = options.work / options.head_name
    _train(
        model,
        dataset,
        folder,
        seed=1,
        batch_size=options.head_batch_size,
        objective="mrp",
        max_steps=options.head_steps,
        learning_rate=options.head_learning_rate,
        muon_learning_rate=options.head_learning_rate / 2,
        lr_scheduler_type="linear",
        warmup_steps=50,
        bf16=True,
        # The CPU's fused attention would lose by bfloat16 what the matrix products win.
        packed_attention="auto" if torch.cuda.is_available() else "eager",
        **loss,
    )
    return folder / "final"


def export(work: Path, name: str, target: Path) -> None:
    """Write the trained model as a checkpoint with its code. A failure leaves what was there."""
    tokenizer = _tokenizer(work)
    model = MRPForCausalLM.from_pretrained(work / name / "final")
    model.generation_config = MRPGenerationConfig(
        decoding="mrp_spec",
        target="sequential",  # the most accurate one that is on the frontier (`benchmarks.frontier`)
        num_draft_states="auto",
        do_sample=False,
        eos_token_id=[tokenizer.eos_token_id, tokenizer.pad_token_id],
        pad_token_id=tokenizer.pad_token_id,
    )
    with written_beside(target) as beside:
        model.save_pretrained(beside)
        tokenizer.save_pretrained(beside)


@takes_flags(TinyOptions)
def main(**given: Any) -> None:
    """Make the embedded checkpoint, or a stage of it."""
    options = TinyOptions(**given)
    if options.stage == "tokenizer":
        train_tokenizer().save_pretrained(options.work / "tokenizer")
    if options.stage in ("backbone", "all"):
        train_backbone(options)
    if options.stage in ("trajectories", "all"):
        record(options.work, options.trajectories)
    if options.stage in ("head", "all"):
        train_head(options)
    if options.stage == "export":
        export(options.work, options.head_name, options.target)


if __name__ == "__main__":
    typer.run(main)
