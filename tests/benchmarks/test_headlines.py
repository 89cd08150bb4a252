"""The headline tables, decoded again on the first problems of math and code: what a line counted,
to the last forward of the backbone; of the head no more passes than it took.

In float64, so that no other machine rounds a count away.
"""

import pytest
from mrp_trainer.data.tasks import Family, problems

from benchmarks.common import load
from benchmarks.frontier import JUDGED, Decoder, setting_name, settings
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
    decoder, asked = Decoder(model.double(), tokenizer, SAMPLE), problems(family, "heldout", SAMPLE)
    lines = {setting_name(line): line for line in frontier_lines() if line["family"] == family}
    for setting in settings(family):
        alone = "num_draft_states" not in setting and setting["decoding"] in TARGETS
        drafted = (
            setting["decoding"] in DRAFTING
            and setting["num_draft_states"] == 8
            and setting.get("draft_passes", 1) == 1
        )
        if alone or drafted or setting_name(setting) in HEADLINES:
            counted, told = (
                decoder.decoded(setting, asked).sample(),
                lines[setting_name(setting)]["sample"],
            )
            passes, before = counted.pop("head_forwards"), told.pop("head_forwards")
            assert counted == told, setting
            assert all(now <= then for now, then in zip(passes, before, strict=True)), setting
