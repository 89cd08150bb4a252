"""Large data, encoded by several processes and kept in the cache of `datasets`: the same samples
and errors as in memory, once for all later runs."""

import copy
import gzip
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from mrp_trainer.data import encoded
from mrp_trainer.data.chat import RecordEncoder
from mrp_trainer.data.records import RecordError
from mrp_trainer.data.rows import RecordRows
from mrp_trainer.data.sampler import LengthBucketSampler
from mrp_trainer.data.samples import Sample
from mrp_trainer.data.sources import JsonFile, Source, TableRows, open_source
from mrp_trainer.train.collator import widths_of
from transformers import TrainerCallback

from tests.support.helpers import word_model
from tests.support.training_runs import trainer_of

datasets: Any = pytest.importorskip("datasets")

WROTE = {"ids": [9, 8, 7, 6, 5, 1], "response_start": 3, "reveal_step": [0, 2, 1]}


@pytest.fixture
def encoder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, word_tokenizer: Any) -> RecordEncoder:
    """Of files of any size, in several shards."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(encoded, "_LARGE_BYTES", 1)
    monkeypatch.setattr(encoded, "_LARGE_ROWS", 1)
    monkeypatch.setattr(encoded, "_SHARD_BYTES", 300)
    monkeypatch.setattr(encoded, "_SHARD_ROWS", 7)
    return RecordEncoder(copy.deepcopy(word_tokenizer), 4, 16, word_tokenizer.mask_token_id, (1, 0))


def records(count: int) -> list[dict[str, Any]]:
    """Prompts and completions of different lengths, some of them cut, one without a learned token,
    and one that a model wrote."""
    made: list[dict[str, Any]] = [
        {"prompt": f"{i // 10} {i % 10}", "completion": "the sum of two numbers " * (1 + i % 4)}
        for i in range(count)
    ]
    return [*made, {"prompt": "1 2 3 4 " * 9, "completion": "5"}, WROTE, {"text": "the sum"}]


def described(sample: Sample) -> tuple[Any, ...]:
    steps = None if sample.reveal_step is None else sample.reveal_step.tolist()
    return sample.index, sample.ids.tolist(), sample.response.tolist(), sample.length, steps


def contents(rows: RecordRows) -> list[Any]:
    return [described(sample) for row in rows for sample in row] + [
        described(sample) for sample in rows.held_back
    ]


def written(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("kind", ["lines", "gzip", "table", "weighted"])
def test_samples_are_those_of_memory(
    kind: str, tmp_path: Path, encoder: RecordEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are held back, and by two processes."""
    path = written(tmp_path / "records.jsonl", [*records(40)])
    source = open_source([path])
    if kind == "gzip":
        (tmp_path / "records.jsonl.gz").write_bytes(gzip.compress(Path(path).read_bytes()))
        source = open_source([f"{path}.gz", path])
    elif kind == "weighted":
        source = open_source([f"{path}*1.5"])
    elif kind == "table":
        plain = [row for row in records(40) if "completion" in row]
        source = Source({"rows": TableRows(datasets.Dataset.from_list(plain))})
    options: dict[str, Any] = {"hold_back": 3, "seed": 5}
    fast = RecordRows(source, encoder, processes=2, **options)
    assert isinstance(fast._samples, encoded.EncodedSamples)
    monkeypatch.setattr(encoded, "_LARGE_BYTES", 1 << 30)
    monkeypatch.setattr(encoded, "_LARGE_ROWS", 1 << 30)
    slow = RecordRows(source, encoder, **options)
    assert isinstance(slow._samples, list)
    assert contents(fast) == contents(slow)
    assert len(fast.held_back) == 3


def test_parts_of_a_file_are_its_lines(tmp_path: Path) -> None:
    """Blank lines and one without an end too; the number of each part's first line is told."""
    path = tmp_path / "lines.txt"
    path.write_bytes(b"{}\n\n{1}\n" * 20 + b"{2}")
    whole = [*JsonFile(str(path))]
    assert len(whole) == 61
    parts = [(first, [*part]) for part, first in JsonFile(str(path)).parts(25)]
    assert sum((lines for _, lines in parts), []) == whole  # noqa: RUF017 - short lists
    assert [first for first, _ in parts] == [
        1 + sum(len(lines) for _, lines in parts[:number]) for number in range(len(parts))
    ]
    assert len(parts) > 4


def test_a_later_run_encodes_nothing(
    tmp_path: Path, encoder: RecordEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the same data, tokenizer and options; also with a tokenizer that was used. Anything else
    is encoded anew."""
    path = written(tmp_path / "records.jsonl", records(40))
    first = contents(RecordRows(open_source([path]), encoder, processes=1))
    encoder.tokenizer(["a b c"], truncation=True, max_length=2)
    generated: list[Any] = []
    original = encoded._encoded_rows

    def counted(shards: Any, encoder: Any) -> Any:
        generated.append(len(shards))
        yield from original(shards, encoder)

    monkeypatch.setattr(encoded, "_encoded_rows", counted)
    assert contents(RecordRows(open_source([path]), encoder, processes=1)) == first
    assert generated == []
    longer = RecordEncoder(encoder.tokenizer, 4, 20, encoder.mask_token_id, (1, 0))
    other = copy.deepcopy(encoder.tokenizer)
    other.add_tokens(["sum of"])
    changed = RecordEncoder(other, 4, 16, encoder.mask_token_id, (1, 0))
    for different in (longer, changed):
        assert contents(RecordRows(open_source([path]), different, processes=1)) != first
        assert generated
        generated.clear()
    written(tmp_path / "records.jsonl", [*records(40), *records(1)])
    assert len(contents(RecordRows(open_source([path]), encoder, processes=1))) > len(first)
    assert generated


class Plain:
    """Rows that tell no sizes; two epochs of them are read beforehand."""

    def __init__(self, rows: RecordRows) -> None:
        self.length = len(rows)
        self.visits = [rows[visit] for visit in range(2 * len(rows) + 2)]

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, visit: int) -> list[Sample]:
        return self.visits[visit]


@pytest.mark.parametrize("large", [1, 1 << 30], ids=["cached", "in memory"])
def test_sizes_are_known_without_reading(
    large: int, tmp_path: Path, encoder: RecordEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What orders rows, and what a compiled attention is as wide as."""
    monkeypatch.setattr(encoded, "_LARGE_BYTES", large)
    path = written(tmp_path / "records.jsonl", records(40))
    rows = RecordRows(open_source([path]), encoder, processes=1, hold_back=3)
    plain = Plain(rows)
    order = [*LengthBucketSampler(plain, 2, lambda: 1)]
    widths = widths_of(plain, 4, 2)
    monkeypatch.setattr(RecordRows, "__getitem__", None)
    assert [*LengthBucketSampler(rows, 2, lambda: 1)] == order
    assert widths_of(rows, 4, 2) == widths
    assert len({rows.size(visit) for visit in order}) > 2


def test_a_resumed_run_reads_its_next_rows_alone(
    tmp_path: Path, encoder: RecordEncoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And none of the steps that are made: of 100,000 records these take minutes."""
    path = written(tmp_path / "records.jsonl", records(400))
    read: list[int] = []
    original = encoded.EncodedSamples.__getitem__

    def counted(self: Any, index: int) -> Sample:
        read.append(index)
        return original(self, index)

    monkeypatch.setattr(encoded.EncodedSamples, "__getitem__", counted)
    at_begin = []

    class Begins(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            at_begin.append((state.global_step, len(read)))

    options = {
        "objective": "mrp",
        "max_length": 16,
        "dataset_num_proc": 1,
        "max_steps": 31,
        "logging_strategy": "no",
    }
    options |= {"save_strategy": "steps", "save_steps": 30}
    for checkpoint in (None, str(tmp_path / "run" / "checkpoint-30")):
        read.clear()
        at_begin.clear()
        model = word_model(encoder.tokenizer)
        trainer = trainer_of(tmp_path / "run", model, path, None, encoder.tokenizer, **options)
        trainer.add_callback(Begins())
        trainer.train(resume_from_checkpoint=checkpoint)
        assert isinstance(trainer.train_dataset._samples, encoded.EncodedSamples)
    assert len(trainer.train_dataset) > 31 * trainer.args.train_batch_size
    (step, count), *_ = at_begin
    assert step == 30
    most = max(len(row) for row in trainer.train_dataset)
    assert 0 < count <= 2 * trainer.args.train_batch_size * most  # one batch ahead


def test_malformed_records_are_named_as_in_memory(
    tmp_path: Path,
    encoder: RecordEncoder,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = written(tmp_path / "records.jsonl", [*records(20), {"text": ""}, *records(20), 5])
    told = []
    for size in (1, 1 << 30):
        monkeypatch.setattr(encoded, "_LARGE_BYTES", size)
        with pytest.raises(RecordError) as caught:
            RecordRows(open_source([path]), encoder, processes=2)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            rows = RecordRows(open_source([path]), encoder, processes=2, skip_malformed=True)
        (warned,) = (line for line in caplog.messages if "and left out" in line)
        told.append((str(caught.value), warned, contents(rows)))
    assert told[0] == told[1]
    assert "2 of 48 records are malformed" in told[0][1]
    assert f"{path}, line 24, field text: found ''" in told[0][0]


def test_records_of_a_list_stay_in_memory(encoder: RecordEncoder) -> None:
    rows = RecordRows(Source({"rows": records(9)}), encoder)
    assert isinstance(rows._samples, list)
