"""The road of an autoregressive checkpoint, on a small random one: opened, decoded, given a head,
measured."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer.cli import main
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from benchmarks import opened
from benchmarks.common import TINY
from modeling_mrp import MRPForCausalLM


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an opened model and its tokenizer, prompts, decoded texts and a head."""
    folder = tmp_path_factory.mktemp("opened")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(TINY)
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    config = Qwen2Config(vocab_size=len(tokenizer), **sizes, **heads, **special)
    Qwen2ForCausalLM(config).save_pretrained(folder / "source")
    model = MRPForCausalLM.from_backbone(
        folder / "source", block_size=4, mask_token_id=tokenizer.mask_token_id
    )
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    with (folder / "prompts.jsonl").open("w") as file:
        for kind, prompts in opened.PROMPTS.items():
            for prompt in prompts[:2]:
                messages = [{"role": "user", "content": prompt}]
                file.write(json.dumps({"messages": messages, "kind": kind}) + "\n")
    model = MRPForCausalLM.from_backbone(
        folder / "source", block_size=1, mask_token_id=tokenizer.mask_token_id
    )
    model.save_pretrained(folder / "ones")
    tokenizer.save_pretrained(folder / "ones")
    data = ["--data", str(folder / "prompts.jsonl"), "--target", "sequential"]
    made = ["--output", str(folder / "decoded.jsonl"), "--max-new-tokens", "16"]
    main(["decode", "--model", str(folder / "ones"), *data, *made])
    how = ["--reveal-rule", "sequential", "--head-init", "cancel", "--head-layers", "1"]
    run = ["--steps", "2", "--verdict-prompts", "0", "--output-dir", str(folder / "head")]
    data = ["--data", str(folder / "decoded.jsonl")]
    main(["train", "head", "--model", str(folder / "model"), *data, *how, *run])
    return folder


def test_texts_of_blocks_of_one_train_a_head_for_blocks_of_four(folder: Path) -> None:
    """`sequential` reveals from left to right in any block, so its texts fit any block size; those
    of other targets do not."""
    line = json.loads((folder / "decoded.jsonl").read_text().splitlines()[0])
    assert line["decoded_by"]["block_size"] == 1
    assert line["reveal_step"] == [*range(len(line["reveal_step"]))]
    assert json.loads((folder / "head" / "config.json").read_text())["block_size"] == 4
    line["decoded_by"]["target"] = "static"
    other = folder / "other.jsonl"
    other.write_text(json.dumps(line) + "\n")
    run = ["--data", str(other), "--output-dir", str(folder / "none"), "--steps", "1"]
    with pytest.raises(SystemExit) as refused:
        main(["train", "head", "--model", str(folder / "model"), *run])
    assert refused.value.code == 1


def test_each_way_is_measured(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every drafted text is its target's; a forward is charged for the states that it scored."""
    given = [str(folder / "model"), "--head", str(folder / "head"), "--tokens", "12"]
    given += [
        "--prompts",
        str(folder / "prompts.jsonl"),
        "--blocks",
        "4",
        "--states",
        "4",
        "8",
        "auto",
    ]
    given += ["--temperatures", "0", "1", "--output", str(folder / "lines.jsonl")]
    monkeypatch.setattr(sys, "argv", ["opened", *given, "--mask-token-id", "3"])
    opened.main()
    printed = capsys.readouterr().out
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in (folder / "lines.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 1 + 3 * 2 * (1 + 1 + 6 + 9 + 6)
    for line in lines[1:]:
        assert line.get("differ", 0) == 0, line
        assert len(line["tokens"]) == 2
        if line["way"] in (opened.ALONE, opened.ONE):
            assert line["tokens"] == line["forwards"]
        costs = opened.costs_of("4B", "H200", line["block"], 0, 1)
        forwards = sum(line["forwards"])
        passes = sum(line["head_forwards"])
        least = 1e3 * (forwards * costs.of_round(1, 1, 0) + passes * costs.head[0])
        most = 1e3 * (forwards * costs.of_round(1, 8, 0) + passes * costs.head[-1])
        assert least * (1 - 1e-4) <= sum(line["milliseconds"]) <= most
        if line["states"] != "auto":
            assert (passes > 0) == line["way"].startswith("head")
        elif not line["way"].startswith("head"):
            assert not passes
    monkeypatch.setattr(sys, "argv", ["opened", "--table", str(folder / "lines.jsonl")])
    opened.main()
    both = capsys.readouterr().out
    assert both in printed
    table, gains = both.split("\n\n")
    assert table.count("\n") == 1 + 3 * 2 * 23
    assert gains.count("\n") == 2 + 3 * 2 * 3
    assert "| chat | 0 | 4 | auto |" in gains


def test_a_head_is_compared_with_the_best_without_it() -> None:
    """Per forward and per millisecond, each with its own best way; not to draft is one of them."""
    common = {"kind": "chat", "temperature": 0, "block": 4, "tokens": [60]}
    ways = [
        ("alone", 1, 60, 120.0),
        ("lookup", 4, 50, 125.0),
        ("head", 4, 40, 150.0),
        ("head 3 passes", 4, 30, 200.0),
    ]
    lines = [
        {**common, "way": way, "states": states, "forwards": [forwards], "milliseconds": [spent]}
        for way, states, forwards, spent in ways
    ]
    row = opened.gains(lines).splitlines()[-1]
    assert row == "| chat | 0 | 4 | 4 | 1.67x | 0.80x | alone | head |"
