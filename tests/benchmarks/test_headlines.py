"""The headline tables, decoded again on the first problems of math and code: what a line counted,
to the last forward. `benchmarks.confirm` does so for every line.

In float64, so that no other machine rounds a count away.
"""

import json
from pathlib import Path

import pytest
from mrp_trainer.data.tasks import Family

from benchmarks import confirm, frontier
from benchmarks.common import load, read_lines
from benchmarks.frontier import JUDGED, SEED, Decoder, problems_of, setting_name, settings
from benchmarks.measure import SAMPLE
from benchmarks.tables import frontier_lines
from modeling_mrp.generate.option_table import DRAFTING, TARGETS
from tests.support.places import TINY

HEADLINES = (
    "released of static K=4",
    "mrp_remask reread tau=0.5",
    "draft_graph of dynamic K=8 tau=0.9",
    "psd K=8 tau=0.9",
)


@pytest.mark.parametrize("family", JUDGED)
def test_the_frontier(family: Family) -> None:
    """Every target alone, drafted with K = 8 by stale logits and by the head, and a setting of each
    other kind."""
    model, tokenizer = load(TINY)
    decoder = Decoder(model.double(), tokenizer, SAMPLE)
    asked = problems_of(family, "heldout", SAMPLE, SEED)
    lines = {setting_name(line): line for line in frontier_lines() if line["family"] == family}
    for setting in settings(family):
        alone = "num_draft_states" not in setting and setting["decoding"] in TARGETS
        drafted = (
            setting["decoding"] in DRAFTING
            and setting["num_draft_states"] == 8
            and setting.get("draft_passes", 1) == 1
        )
        if alone or drafted or setting_name(setting) in HEADLINES:
            line = lines[setting_name(setting)]
            assert confirm.setting_of(line) == setting
            assert decoder.decoded(setting, asked).sample() == line["sample"], setting


def test_other_counts_are_not_confirmed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One forward more, and no file changes; the same counts, and headers take today's digest."""
    setting = settings("math")[0]
    path = tmp_path / "lines.jsonl"
    frontier.main(
        ["--family", "math", "--count", "5", "--decoding", "static", "--output", str(path)]
    )
    written = path.read_text()
    monkeypatch.setattr(confirm, "deciding", lambda: "0123456789ab")
    header, line = map(json.loads, written.splitlines())
    assert setting_name(setting) == setting_name(line) == "static"
    line["sample"]["forwards"][1] += 1
    path.write_text(f"{json.dumps(header)}\n{json.dumps(line)}\n")
    changed = path.read_text()
    with pytest.raises(SystemExit):
        confirm.main([str(path)])
    assert "math, static: " in capsys.readouterr().err
    assert path.read_text() == changed
    path.write_text(written)
    confirm.main([str(path)])
    again, same = map(json.loads, path.read_text().splitlines())
    assert same == json.loads(written.splitlines()[1])
    assert again["deciding"] == "0123456789ab"
    assert again["commit"] == header["commit"]
    with pytest.raises(ValueError, match="today's is"):
        read_lines(path)
