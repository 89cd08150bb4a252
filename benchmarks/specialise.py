"""A general head made a specialist by LoRA: what a few hundred steps on one family are worth on held-out problems of it.

``python -m benchmarks.specialise --work runs/specialise > benchmarks/results/tiny_specialise.jsonl`` decodes training
problems of the family with `static`, trains an adapter on the embedded head's layers on them, and decodes held-out problems
with the general head, with the adapter, and, for what the adapter costs elsewhere, the other families.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from mrp_trainer.acceptance import acceptance_by_depth
from mrp_trainer.arguments import MRPTrainingArguments
from mrp_trainer.data import TaskDataset
from mrp_trainer.decoded import Decoded, decode_problems
from mrp_trainer.runs import LORA_TARGETS
from mrp_trainer.tasks import FAMILIES, Family, problems
from mrp_trainer.trainer import MRPTrainer
from mrp_trainer.trajectories import TrajectoryDataset, record_trajectories
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import PreTrainedTokenizerFast, PrinterCallback, set_seed

from modeling_mrp.modeling import MRPForCausalLM

from .bootstrap import Cost, ratio
from .common import TINY, emit, header


def specialise(folder: Path, family: Family, options: argparse.Namespace) -> Path:
    """Trains the adapter; returns its folder."""
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    set_seed(options.seed)
    model = MRPForCausalLM.from_pretrained(TINY)
    recorded = folder / f"{family}.jsonl"
    asked = TaskDataset(tokenizer, options.recorded, {family: 1.0}, "train", model.config.block_size, seed=2)
    record_trajectories(model.eval(), asked, recorded)
    dataset = TrajectoryDataset(
        recorded,
        options.steps * options.batch_size,
        model.config.block_size,
        tokenizer.eos_token_id,
        tokenizer.pad_token_id,
        options.seed,
    )
    adapted = get_peft_model(model, LoraConfig(r=options.rank, lora_alpha=2 * options.rank, target_modules=LORA_TARGETS["mrp"]))
    arguments = MRPTrainingArguments(
        output_dir=str(folder / f"{family}-{options.seed}"),
        seed=options.seed,
        report_to=[],
        objective="mrp",
        unroll=2,
        order_weight=0.5,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        lr_scheduler_type="linear",
        warmup_steps=20,
        logging_steps=25,
        save_steps=100,
        save_total_limit=1,
        use_cpu=not torch.cuda.is_available(),
        disable_tqdm=True,
    )
    trainer = MRPTrainer(model=adapted, args=arguments, train_dataset=dataset)
    trainer.remove_callback(PrinterCallback)  # the standard output is for measurements
    trainer.train(resume_from_checkpoint=True)
    target = folder / f"{family}-{options.seed}" / "adapter"
    adapted.save_pretrained(target)
    return target


def compared(general: Decoded, special: Decoded) -> dict[str, Any]:
    """Both heads on the same problems; they decode the same text."""
    assert general.ids == special.ids, "drafts never change the text"
    over = ratio(Cost.of(special), Cost.of(general))
    first = [acceptance_by_depth(decoded)[0].rate for decoded in (general, special)]
    return {
        "general": round(general.tokens_per_forward, 3),
        "special": round(special.tokens_per_forward, 3),
        "ratio": round(over.value, 4),
        "ratio_95": over.rounded(4),
        "first_draft_accepted": [round(rate.value, 4) for rate in first],
        "first_draft_accepted_95": [rate.rounded(4) for rate in first],
    }


def main(arguments: list[str] | None = None) -> None:
    """Command line: a JSON line for each family decoded and K."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.specialise", description=__doc__)
    parser.add_argument("--work", type=Path, default=Path("runs/specialise"))
    parser.add_argument("--family", choices=FAMILIES, default="source", help="what the adapter is trained on")
    parser.add_argument("--recorded", type=int, default=1024, help="training problems decoded")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=100, help="held-out problems a family")
    parser.add_argument("--states", nargs="+", type=int, default=[4, 8])
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    general = MRPForCausalLM.from_pretrained(TINY).eval()
    emit(header("specialise", argparse.Namespace(**{**vars(options), "work": options.work.name}), general))
    adapter = specialise(options.work, options.family, options)
    size = sum(path.stat().st_size for path in adapter.glob("*.safetensors"))
    emit({"adapter_bytes": size, **json.loads((adapter / "adapter_config.json").read_text(), object_hook=_rank)})
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    special = PeftModel.from_pretrained(MRPForCausalLM.from_pretrained(TINY), adapter).eval()
    for family in FAMILIES:
        asked = problems(family, "heldout", options.count)
        for states in options.states:
            settings = {"decoding": "mrp_spec", "num_draft_states": states}
            both = (decode_problems(model, tokenizer, asked, 50, **settings) for model in (general, special))
            emit({"trained_on": options.family, "family": family, "states": states, **compared(*both)})


def _rank(config: dict[str, Any]) -> dict[str, Any]:
    return {name: config[name] for name in ("r", "lora_alpha") if name in config}


if __name__ == "__main__":
    main()
