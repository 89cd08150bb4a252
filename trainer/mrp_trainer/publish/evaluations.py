"""Results in the form that benchmarks on the Hub read: files `.eval_results/*.yaml` in a
repository."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from huggingface_hub import EvalResultEntry, eval_result_entries_to_yaml

from modeling_mrp.model.layouts import is_hub_id

from ..evaluate.results import mode_name

EVALUATIONS = ".eval_results/mrp.yaml"


@dataclass(frozen=True)
class Benchmark:
    """A benchmark on the Hub: the id of a dataset, and the name of a task in it."""

    dataset: str
    task: str

    @classmethod
    def named(cls, texts: Sequence[str]) -> "dict[str, Benchmark]":
        """Parse texts of the form NAME=DATASET:TASK, where NAME is a problem set in the results.
        Return a dict that maps NAME to its benchmark. `ValueError` for a text of another form."""
        benchmarks = {}
        for text in texts:
            name, _, benchmark = text.partition("=")
            dataset, _, task = benchmark.partition(":")
            if not name or not task or not is_hub_id(dataset):
                raise ValueError(
                    f"benchmark is {text!r}: write NAME=DATASET:TASK, the name of a family or file "
                    "in the results, and the id and task of its dataset on the Hub, such as "
                    "questions=openai/gsm8k:gsm8k"
                )
            benchmarks[name] = cls(dataset, task)
        return benchmarks


def evaluation_entries(
    lines: Sequence[Mapping[str, Any]], benchmarks: Mapping[str, Benchmark]
) -> list[EvalResultEntry]:
    """Make entries of an `.eval_results` file from the measurements `lines` (see `read_results`).
    `benchmarks` maps names of problem sets to benchmarks.

    There is an entry for each measurement that has an accuracy and whose problem set is in
    `benchmarks`. The entry holds the accuracy in percent, and notes with the mode and the tokens
    per forward. `ValueError` if a problem set in `benchmarks` has no measurement in `lines`, with
    or without an accuracy.
    """
    if missing := sorted(benchmarks.keys() - {line["family"] for line in lines}):
        raise ValueError(
            f"benchmark names {missing[0]}, and no result is of it: the results are of "
            f"{', '.join(sorted({line['family'] for line in lines})) or 'nothing'}"
        )
    entries = []
    for line in lines:
        benchmark = benchmarks.get(line["family"])
        if benchmark is not None and line["accuracy"] is not None:
            entries.append(
                EvalResultEntry(
                    dataset_id=benchmark.dataset,
                    task_id=benchmark.task,
                    value=round(line["accuracy"], 3),
                    notes=f"{mode_name(line)}, {line['tokens_per_forward']:.2f} tokens per forward",
                )
            )
    return entries


def evaluations_file(entries: Sequence[EvalResultEntry]) -> bytes:
    """Format entries as YAML in UTF-8, the content of a file in `.eval_results`."""
    text: str = yaml.safe_dump(eval_result_entries_to_yaml(list(entries)), sort_keys=False)
    return text.encode()
