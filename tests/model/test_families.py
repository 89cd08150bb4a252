"""Families of published models, and that of docs/own_backbone.md: each is asked the same."""

import json
import logging
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mrp_trainer.heads import new_head
from mrp_trainer.publish.card import render_card
from mrp_trainer.train.arguments import MRPTrainingArguments
from mrp_trainer.train.packed import PackedBatch
from mrp_trainer.train.trainer import MRPTrainer

from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.generate import generation
from modeling_mrp.model.families.sdar import families
from modeling_mrp.rules.gain import Amount, Fixed
from tests.support.families import FAMILIES, LLADA2, Twin, twin_of
from tests.support.fresh import Fresh
from tests.support.helpers import close, generate, left_padded, same_tensors, sample
from tests.support.places import ROOT
from tests.support.published import backbone_config
from tests.support.random_cases import dampened, make_model

PROMPTS = [
    [15, 17, 80, 3, 44, 9],
    [8],
    [7, 7, 21, 90],
    [33, 2, 60, 61, 62, 63, 64, 65],
    [12, 13, 14],
]
MODES = [
    {"decoding": decoding, "target": target, "num_draft_states": 4}
    for decoding in ("self_spec", "mrp_spec")
    for target in ("static", "sequential", "dynamic", "entropy_bound")
]
LIVELY = {"confidence_threshold": 0.05, "entropy_threshold": 5.0}
TWINS = [*((name, size) for name in ("sdar_moe", "llada2_moe", "fast_dllm_v2") for size in (4, 32))]
TWINS += [("stable_diffcoder", None), ("my_llama", None)]


@pytest.fixture(scope="module", autouse=True)
def _page_family() -> Any:
    """The page's class, registered for as long as these tests take."""
    blocks = (ROOT / "docs/own_backbone.md").read_text().split("```python\n")[1:]
    code = next(block.split("```")[0] for block in blocks if "FamilyBackbone" in block)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families(), "my_llama", None)
        exec(code[: code.index("\nmodel =")], {"tok": SimpleNamespace(mask_token_id=5)})
        yield


@pytest.fixture(scope="module", params=TWINS, ids=lambda twin: f"{twin[0]}-{twin[1]}")
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return twin_of(*request.param, tmp_path_factory.mktemp(request.param[0]))


@torch.no_grad()
def test_each_token_is_the_likeliest_of_the_slow_model(twin: Twin) -> None:
    """Given what was revealed before it; and the logits are the same, up to what transformers'
    norms, rotation and router compute in float32."""
    model, block, mask = twin.model, twin.model.config.block_size, twin.model.config.mask_token_id
    prompt, end = PROMPTS[0], max(16, 2 * block)
    for rule in ("static", "sequential"):
        out = generate(
            model, [prompt], decoding=rule, max_new_tokens=end - len(prompt), eos_token_id=None
        )
        ids, steps = (
            out.sequences[0],
            torch.cat([torch.full((len(prompt),), -1), out.reveal_step[0]]),
        )
        for at in range(len(prompt), end):
            seen = ids.where(steps < steps[at], mask)[: (at // block + 1) * block]
            scores = twin.logits(seen.tolist())[at].index_fill(0, torch.tensor([mask]), -torch.inf)
            assert scores.argmax() == ids[at], (rule, at)
    ids = [
        *torch.randint(6, 90, (38,), generator=torch.Generator().manual_seed(0)).tolist(),
        mask,
        mask,
    ]
    close(model(torch.tensor([ids])).logits[0, 1:], twin.logits(ids)[1:], 1e-4)


def test_drafts_are_lossless(twin: Twin) -> None:
    """Each drafted mode gives its target's text in fewer forwards, in a ragged batch; and a row's
    text is the one that it has alone, also where the head changes it. Of long blocks the modes in
    which most can go wrong."""
    few, left = twin.model.config.block_size > 8, left_padded(PROMPTS)
    options = {
        "max_new_tokens": 36 if few and twin.name == "fast_dllm_v2" else 14,
        "eos_token_id": None,
        **LIVELY,
    }
    for mode in (MODES[2], MODES[5]) if few else MODES:
        target = generate(twin.model, PROMPTS, decoding=mode["target"], **options)
        drafted = generate(twin.model, PROMPTS, **mode, **options)
        assert drafted.sequences.equal(target.sequences), mode
        assert drafted.stats.row_forwards.sum() <= target.stats.row_forwards.sum(), mode
    for decoding in ("sequential", "mrp_direct", "mrp_remask"):
        whole = twin.model.generate(**left, decoding=decoding, **options)[
            :, left["input_ids"].shape[1] :
        ]
        for row, prompt in list(zip(whole, PROMPTS, strict=True))[: 1 if few else 3]:
            alone = twin.model.generate(torch.tensor([prompt]), decoding=decoding, **options)[
                0, len(prompt) :
            ]
            assert row.equal(alone), decoding


@pytest.mark.parametrize("name", ["sdar_moe", "llada2_moe", "fast_dllm_v2", "stable_diffcoder"])
def test_a_head_is_trained_saved_and_loaded(name: str, tmp_path: Path) -> None:
    """In our layout, the head by itself too; two steps of its objective change the head alone."""
    model = twin_of(name, 4, tmp_path, head_layers=1).model
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for where, alone in (("whole", False), ("head", True)):
        model.save_pretrained(tmp_path / where, head_only=alone)
        again = MRPForCausalLM.from_pretrained(tmp_path / where, dtype=torch.float64)
        assert again.config.family == model.config.family
        assert same_tensors(again, model)
    options: dict[str, Any] = {
        "max_steps": 2,
        "per_device_train_batch_size": 2,
        "save_strategy": "no",
        "report_to": [],
    }
    options |= {
        "logging_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "objective": "mrp",
        "learning_rate": 1e-3,
    }
    args, rows = (
        MRPTrainingArguments(str(tmp_path / "run"), **options),
        [sample(index, 20, 6) for index in range(4)],
    )
    MRPTrainer(model=model, args=args, train_dataset=rows).train()
    changed = {
        name
        for name, tensor in model.state_dict().items()
        if not tensor.double().equal(before[name])
    }
    assert changed
    assert all(name.startswith("mrp_head.") for name in changed)


def test_sdar_moe(tmp_path: Path) -> None:
    """A head's layers are no copies of experts, and processes do not divide these."""
    model = twin_of("sdar_moe", 4, tmp_path, head_layers=0).model
    with pytest.raises(
        ValueError,
        match="layers are Qwen3MoeDecoderLayers and a head's Qwen3DecoderLayers: use 'identity'",
    ):
        new_head(model, 1, "backbone")
    model.config.distributed_config = {"tp_size": 2}
    with pytest.raises(
        ValueError,
        match="a model of the family 'sdar_moe' is not divided over processes: use device_map",
    ):
        MRPForCausalLM(model.config)
    with pytest.raises(ValueError, match="families here are"):
        MRPConfig(family="qwen9")


@pytest.mark.parametrize(
    ("name", "vocabulary", "expected"),
    [
        ("sdar_moe", 151936, (4, 151669)),
        ("llada2_moe", 157184, (32, 156895)),
        ("fast_dllm_v2", 152064, (32, 151665)),
    ],
)
def test_what_published_configs_leave_out(
    name: str, vocabulary: int, expected: tuple[int, int]
) -> None:
    said = {
        key: value
        for key, value in FAMILIES[name].twin.items()
        if key not in ("block_size", "mask_token_id")
    }
    config = MRPConfig.from_dict(
        {
            **said,
            "vocab_size": vocabulary,
            **({"mask_token_id": 151669} if name == "sdar_moe" else {}),
        }
    )
    assert (config.block_size, config.mask_token_id) == expected


def test_llada2_rotates_half_of_each_head_by_default(tmp_path: Path) -> None:
    """Where the config names no part: the logits are those of the slow model, which rotates 4 of 8
    numbers."""
    twin = twin_of("llada2_moe", 4, tmp_path, head_layers=0)
    config = tmp_path / "twin" / "config.json"
    fields = json.loads(config.read_text())
    assert fields.pop("partial_rotary_factor") == 0.5
    config.write_text(json.dumps(fields))
    model = MRPForCausalLM.from_pretrained(tmp_path / "twin", dtype=torch.float64).eval()
    ids = torch.randint(6, 90, (40,), generator=torch.Generator().manual_seed(0)).tolist()
    with torch.no_grad():
        close(model(torch.tensor([ids])).logits[0], twin.logits(ids), 1e-4)


def test_cards_link_to_papers_of_arxiv() -> None:
    papers = [family.paper for family in families().values() if vars(family).get("paper")]
    assert papers
    assert all(re.fullmatch(r"\d{4}\.\d{5}", paper) for paper in papers)


def test_a_family_may_be_made_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the code of a repository is loaded beside this package."""
    original = families()["llada2_moe"]
    monkeypatch.setitem(families(), "llada2_moe", original)
    again = type(original.__name__, (original,), {"family": "llada2_moe"})
    assert families()["llada2_moe"] is again


def test_llada2_has_the_published_numbers_of_experts_by_default() -> None:
    """Where a config names none."""
    fields = {"model_type": "llada2_moe", "hidden_size": 64, "num_attention_heads": 4}
    fields |= {"vocab_size": 157184, "num_key_value_heads": 4}
    config: Any = MRPConfig.from_dict(fields)
    names = ("num_experts", "num_experts_per_tok", "n_shared_experts", "n_group", "topk_group")
    assert [getattr(config, name) for name in names] == [256, 8, 1, 8, 4]
    assert (config.moe_intermediate_size, config.routed_scaling_factor) == (512, 2.5)


def test_llada2(fresh: Fresh, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """From a process without this package: the whole model, and its head, which loads the published
    checkpoint; its card; and the bias of the router, which stays in float32."""
    model = twin_of("llada2_moe", 4, tmp_path, head_layers=1).model
    model.save_pretrained(tmp_path / "whole")
    model.save_pretrained(tmp_path / "head", head_only=True)
    saved = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert (
        saved["family"],
        saved["n_group"],
        saved["rope_parameters"]["partial_rotary_factor"],
    ) == ("llada2_moe", 4, 0.5)
    options = {"decoding": "mrp_spec", "target": "static", "max_new_tokens": 9}
    text = model.generate(torch.tensor([[15, 17, 8]]), **options).tolist()
    script = f"""
    from transformers import AutoModel
    for name in ("whole", "head"):
        how = dict(trust_remote_code=True, dtype=torch.float64)
        model = AutoModel.from_pretrained("{tmp_path}/" + name, **how)
        ids = model.generate(torch.tensor([[15, 17, 8]]), **{options})
        print(model.config.family, ids.tolist())
    """
    assert fresh(script) == f"llada2_moe {text}\n" * 2
    card = render_card(tmp_path / "whole", "full", "org/name")
    assert "A LLaDA2.0 block-diffusion language model with an MRP head." in card.text
    assert "LLaDA2.0: [arXiv 2512.15745]" in card.text
    assert "SDAR" not in card.text
    assert "custom_generate" not in card.text, "that is for stock models of the dense family"
    assert "llada2_moe" in card.data.tags
    assert "with editing off" not in caplog.text
    (tmp_path / "twin").rename(tmp_path / "LLaDA2.2-flash")
    with caplog.at_level(logging.WARNING):
        narrow = MRPForCausalLM.from_pretrained(tmp_path / "LLaDA2.2-flash", dtype=torch.bfloat16)
    assert "with editing off" in caplog.text, "a version that can"
    assert narrow.model.layers[1].mlp.gate.e_score_correction_bias.dtype == torch.float32
    assert narrow.dtype == torch.bfloat16


def test_fast_dllm_goes_on_from_its_cache(tmp_path: Path) -> None:
    """Also at the beginning of a block, whose first token is predicted from what a copy of the
    cache has kept. A forward with transformers' own cache, which has not, is refused."""
    model, ids = twin_of("fast_dllm_v2", 4, tmp_path).model, torch.tensor(PROMPTS[:1])
    options = {
        "decoding": "mrp_spec",
        "target": "sequential",
        "eos_token_id": None,
        "num_draft_states": 4,
    }
    for kept in (8, 12, 14):
        before = model.generate(ids, max_new_tokens=10, return_dict_in_generate=True, **options)
        prompt = torch.cat([before.sequences[:, :kept], torch.tensor([[7]])[:, : kept % 4]], 1)
        expected = model.generate(prompt, max_new_tokens=9, **options)
        again = model.generate(
            prompt, max_new_tokens=9, past_key_values=before.past_key_values, **options
        )
        assert again.equal(expected)
    cache = model(ids[:, :4], use_cache=True).past_key_values
    with pytest.raises(ValueError, match="the logits of a position come from the one before it"):
        model(ids[:, 4:], past_key_values=cache)


def test_a_loss_of_fast_dllm_is_that_of_the_shifted_logits(tmp_path: Path) -> None:
    """Every masked position of the noisy copy is predicted from the column before: within a block
    the noisy one, else the clean one."""
    twin, length = twin_of("fast_dllm_v2", 4, tmp_path), 10
    ids = torch.randint(6, 90, (1, length), generator=torch.Generator().manual_seed(3))
    noise = torch.full((1, 1 + length), 0.5)
    noise[0, [4, 5, 6, 9]] = 0.0
    hidden = noise[:, 1:] < 0.5
    with torch.no_grad():
        loss = twin.model(ids, labels=ids, text_noise=noise).loss
    total = 0.0
    for at in (3, 4, 5, 8):
        start = at // 4 * 4
        state = torch.cat(
            [ids[0, :start], torch.where(hidden, 97, ids)[0, start : start + 4]]
        ).tolist()
        total -= twin.logits(state)[at].log_softmax(-1)[ids[0, at]].item() / 0.5
    assert loss.item() == pytest.approx(total / length, abs=1e-4)
    # A sample of 6 tokens in blocks of 4, a noisy copy of it before the clean one, and padding.
    position = torch.tensor([[0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4, 5, 0]])
    view, zeros = torch.tensor([[1] * 6 + [0] * 6 + [-1]]), torch.zeros_like(position)
    batch = PackedBatch(
        zeros, zeros, position, position // 4, view, zeros, zeros.float(), torch.tensor(6), zeros
    )
    assert batch.before().tolist() == [[-1, 0, 1, 2, 9, 4, -1, 6, 7, 8, 9, 10, -1]]


def test_rounds_of_unequal_width_of_fast_dllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As under `auto`: a head pass may ask for all that the round before scored, in order."""
    numbers = random.Random(0)
    unequal = SimpleNamespace(
        outline=3,
        plan=lambda drafts: Amount(numbers.choice((2, 3)), 1),
        cut=lambda amount, drafts: amount.states,
        learn=lambda *_: None,
    )
    monkeypatch.setattr(
        generation, "draft_amount", lambda mode, *_: unequal if mode.drafting else Fixed()
    )
    model = dampened(
        make_model(69, family="fast_dllm_v2", block_size=8, initializer_range=0.6), 0.3
    )
    ids, options = torch.tensor([[35]]), {"max_new_tokens": 31, "eos_token_id": None}
    drafted = model.generate(
        ids, decoding="mrp_spec", target="fast_dllm", num_draft_states="auto", **options
    )
    assert drafted.equal(model.generate(ids, decoding="fast_dllm", **options))


PLAIN = backbone_config(block_size=4, mask_token_id=97)
OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    # I-DLM and UNO declare themselves SDAR: `use_regular_causal` is what their code reads, and
    # UNO's may leave it out.
    "yifanyu/I-DLM-8B": (
        {**PLAIN, "use_regular_causal": True},
        "each token of it sees the tokens before it alone",
    ),
    "uno-qwen3-8B": (PLAIN, "each token of it sees the tokens before it alone"),
    "lfm2-diffusion": (
        {"model_type": "lfm2_diffusion", "canvas_length": 128},
        "model_type is 'lfm2_diffusion': what loads",
    ),
    "LLaDA2.0 with biases": (
        {**LLADA2, "use_qkv_bias": True},
        "the config has {'use_qkv_bias': True}",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_looks_like_a_family_is_refused(name: str, tmp_path: Path) -> None:
    config, message = OTHERS[name]
    (tmp_path / name).mkdir(parents=True)
    (tmp_path / name / "config.json").write_text(json.dumps(config))
    for load in (MRPForCausalLM.from_pretrained, MRPForCausalLM.from_backbone):
        with pytest.raises(ValueError, match=message):
            load(tmp_path / name)
