"""Wall clock: turns, spreads and shares that add up; random models that are whole."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY

from benchmarks import auto_clock, tables, wallclock
from modeling_mrp import MRPConfig

pytestmark = pytest.mark.skipif(not TINY.exists(), reason="the embedded checkpoint is not here")


def test_a_spread_by_hand() -> None:
    assert wallclock.spread([5, 1, 2, 4, 3]) == {"median": 3, "range": [1, 5], "quartiles": [2, 4]}


def test_modes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode warms up once; then each batch is decoded in every mode, another one first each time."""
    decoded: list[tuple[int, str]] = []

    def decode(job: wallclock.Job, batch: int, options: dict[str, Any]) -> tuple[int, float]:
        decoded.append((batch, options["decoding"]))
        return {"a": 4, "b": 9}[options["decoding"]], 2.0

    monkeypatch.setattr(wallclock.Job, "decode", decode)
    job = wallclock.Job(None, [{}, {}], 1)  # type: ignore[arg-type]
    speeds = wallclock.take_turns(job, {"a": {"decoding": "a"}, "b": {"decoding": "b"}}, 2)
    assert speeds == {"a": [2.0, 2.0], "b": [4.5, 4.5]}
    assert decoded[:2] == [(0, "a"), (0, "b")]
    assert decoded[2:] == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (0, "b"), (0, "a"), (1, "a"), (1, "b")]


def test_a_random_model_is_whole() -> None:
    """Built without an initialisation that walks the weights: no tensor is left as the memory was."""
    config = wallclock.published_config("1.7b", 2)
    assert (config.hidden_size, config.num_hidden_layers) == (2048, 2)
    small = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}
    ids = {"vocab_size": 200, "mask_token_id": 199, "pad_token_id": 0}
    config = MRPConfig(**small, **ids, num_hidden_layers=2, num_nextn_predict_layers=1, rope_parameters=config.rope_parameters)
    model, again = (wallclock.random_model(config, torch.bfloat16, "cpu") for _ in range(2))
    for (name, parameter), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, other)
        assert (parameter == 1).all() if "norm" in name else 0.01 < parameter.float().std() < 0.03
    expected = 1e6 ** -(torch.arange(0, 16, 2) / 16)
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, expected)
    job = wallclock.Job(model, [wallclock.pad_left([[1, 2, 3]], 0)], 20)
    assert job.decode(0, {"decoding": "mrp_spec"})[0] == 20


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    wallclock.main(["--count", "2", "--repeats", "2", "--new-tokens", "8", "--states", "2"])
    out = capsys.readouterr().out
    first, *lines = [json.loads(line) for line in out.splitlines()]
    assert first["benchmark"] == "wallclock"
    assert [line["mode"] for line in lines] == ["static", "self_spec K=2", "mrp_spec K=2"]
    assert lines[0]["over_static"] == {"median": 1, "range": [1, 1], "quartiles": [1, 1]}
    for line in lines:
        assert "ms_per_round" in line  # a difference of times, which noise may turn round
        assert sum(line["share"].values()) == pytest.approx(100, abs=0.3)
        assert all(share >= 0 for part, share in line["share"].items() if part != "bookkeeping")  # a difference of times
        assert (line["share"]["head"] > 0) == (line["mode"] == "mrp_spec K=2")
    with pytest.raises(SystemExit):
        wallclock.main(["--layers", "2"])


class Timed:
    """Takes the seconds that a mode's options say."""

    def decode(self, batch: int, options: dict[str, float]) -> tuple[int, float]:
        return 1, options["seconds"]


def test_hopeless_numbers_are_not_measured() -> None:
    modes = {"target": 1.0, "auto": 9.0, "K=1": 9.0, "K=2": 1.1, "K=4": 1.59, "K=6": 1.7, "K=8": 1.0}
    taking = {mode: {"seconds": seconds} for mode, seconds in modes.items()}
    assert list(auto_clock.hopeful(Timed(), taking)) == ["target", "auto", "K=1", "K=2", "K=4"]  # type: ignore[arg-type]
    assert auto_clock.hopeful(Timed(), {**taking, "K=6": {"seconds": 1.5}}).keys() == modes.keys()  # type: ignore[arg-type]


def test_cells_of_auto(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is measured once; the best fixed number is found; the table prints them."""
    path = tmp_path / "auto_clock.jsonl"
    monkeypatch.setattr(auto_clock, "HOPELESS", math.inf)
    command = ["--models", "tiny", "--targets", "static", "--batch-sizes", "1", "2", "--states", "1", "3", "--repeats", "2"]
    command += ["--new-tokens", "8", "--output", str(path)]
    auto_clock.main(command)
    written = path.read_text()
    auto_clock.main(command)
    assert path.read_text() == written
    header, *cells = map(json.loads, written.splitlines())
    assert header["benchmark"] == "auto_clock"
    assert [cell["batch_size"] for cell in cells] == [1, 2]
    for cell in cells:
        over = cell["over_target"]
        assert set(over) == {"auto", "K=1", "K=3"}
        assert over[cell["best"]]["median"] == max(over["K=1"]["median"], over["K=3"]["median"])
        assert cell["auto_over_best"]["range"][0] > 0
    head, _, *rows = tables.auto_clock(tmp_path).splitlines()
    assert head == "| model | batch | `static` |"
    assert [row.split("|")[1:3] for row in rows] == [[" tiny ", " 1 "], [" tiny ", " 2 "]]
    auto, best = cells[0]["over_target"]["auto"], cells[0]["auto_over_best"]["median"]
    shown = f"{auto['median']:.2f}x ({auto['range'][0]:.2f}-{auto['range'][1]:.2f}); {best:.2f}x, {cells[0]['best']}"
    assert rows[0].split("|")[3].strip() == shown
