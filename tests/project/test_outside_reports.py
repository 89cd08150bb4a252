"""Public bug reports of other projects, each reduced to an input for this package;
docs/outside_reports.md lists them."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from mrp_trainer import MRPTrainer, MRPTrainingArguments, embedded_checkpoint
from mrp_trainer.data.records import RecordError
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import PreTrainedTokenizerFast, set_seed

from modeling_mrp import MRPForCausalLM
from tests.support.fresh import Fresh
from tests.support.helpers import LIVELY, PROMPTS, generate, older_than, same_tensors, text, texts
from tests.support.random_cases import batch_of, dampened, make_model, word_tokenizer

MASK = 60
TARGET: dict[str, Any] = {"decoding": "sequential", "max_new_tokens": 13, "eos_token_id": None}
DRAFTED: dict[str, Any] = {
    **TARGET,
    "decoding": "mrp_spec",
    "target": "sequential",
    "num_draft_states": 4,
}


@torch.no_grad()
def left_to_right(model: Any, prompt: list[int], tokens: int = 13, block: int = 4) -> list[int]:
    """Decode greedily by forwards of the model alone, one for each token."""
    ids = list(prompt)
    for position in range(len(prompt), len(prompt) + tokens):
        masks = [MASK] * (block - position % block)
        logits = model(torch.tensor([ids + masks])).logits[0, position]
        logits[MASK] = -torch.inf
        ids.append(int(logits.argmax()))
    return ids[len(prompt) :]


def adapted(model: MRPForCausalLM, names: tuple[str, ...] = ("default",), **options: Any) -> Any:
    """Put adapters on a model, as if trained."""
    config = {"r": 2, "target_modules": ["q_proj", "down_proj"], **options}
    peft_model: Any = get_peft_model(model, LoraConfig(**config), adapter_name=names[0])
    for name in names[1:]:
        peft_model.add_adapter(name, LoraConfig(**config))
    torch.manual_seed(0)
    for name, parameter in peft_model.named_parameters():
        if any(f".{adapter}" in name for adapter in names):
            parameter.data += 0.5 * torch.randn_like(parameter)
    return peft_model.double().eval()


def saved(model: MRPForCausalLM, folder: Path, **options: Any) -> MRPForCausalLM:
    """Save a model, and load what was saved."""
    model.save_pretrained(folder, **options)
    loaded: MRPForCausalLM = MRPForCausalLM.from_pretrained(folder, dtype=torch.float64)
    return loaded


def embedded_with_tokenizer() -> tuple[MRPForCausalLM, Any]:
    """Load the embedded checkpoint."""
    from transformers import AutoTokenizer

    model = MRPForCausalLM.from_pretrained(embedded_checkpoint())
    return model, AutoTokenizer.from_pretrained(embedded_checkpoint(), config=model.config)


CHATS = [
    {
        "messages": [
            {"role": "user", "content": f"What is {n} + 4?"},
            {"role": "assistant", "content": f"{n + 4}" + " x" * n},
        ]
    }
    for n in range(14)
]


def trainer_of(folder: Path, data: Any = CHATS, model: Any = None, **options: Any) -> MRPTrainer:
    """Make a trainer of the embedded backbone."""
    set_seed(0)
    own, tokenizer = embedded_with_tokenizer()
    given = {
        "max_length": 64,
        "use_cpu": True,
        "report_to": "none",
        "disable_tqdm": True,
        "seed": 3,
        **options,
    }
    held_out = given.pop("eval_dataset", None)
    args = MRPTrainingArguments(str(folder), objective="block_diffusion", **given)
    return MRPTrainer(
        model or own, args, train_dataset=data, eval_dataset=held_out, processing_class=tokenizer
    )


def weights_of(trainer: MRPTrainer) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


# Stop strings, processors and samples


@pytest.mark.parametrize("stop", ["語", "🧬", "語🧬"])
@pytest.mark.parametrize("drafted", [False, True])
def test_a_stop_string_whose_characters_are_split_into_bytes_ends_the_text(
    stop: str, drafted: bool
) -> None:
    """huggingface/transformers#46519; the texts are forced, as the model knows no such words."""
    model, tokenizer = embedded_with_tokenizer()
    ids = tokenizer("日本語🧬終", add_special_tokens=False)["input_ids"]
    assert len(ids) > 6  # several for a character
    prompt = tokenizer("hello", return_tensors="pt", add_special_tokens=False)["input_ids"]
    length = prompt.shape[1]

    def forces(input_ids: Tensor, scores: Tensor) -> Tensor:
        forced = torch.full_like(scores, -1e4)
        forced[:, ids[(input_ids.shape[1] - length) % len(ids)]] = 0
        return forced

    mode = (
        {"decoding": "mrp_spec", "target": "sequential"} if drafted else {"decoding": "sequential"}
    )
    options: dict[str, Any] = {
        "logits_processor": [forces],
        "stop_strings": [stop],
        "tokenizer": tokenizer,
    }
    out = model.generate(prompt, **mode, **options, max_new_tokens=len(ids) + 4, eos_token_id=None)
    ends = next(n for n in range(1, len(ids) + 1) if stop in tokenizer.decode(ids[:n]))
    assert out[0, length:].tolist() == ids[:ends]


def test_a_tokenizer_without_latin_letters_is_named_where_stop_strings_need_them() -> None:
    """huggingface/transformers#48320."""
    words = {chr(0x4E00 + i): i for i in range(63)} | {"<unk>": 63}
    backend = Tokenizer(WordLevel(words, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    with pytest.raises(ValueError, match=r"abcdef.*pass a StoppingCriteria of your own"):
        text(make_model(), PROMPTS[0], **TARGET, tokenizer=tokenizer, stop_strings=["七"])


PROCESSORS: tuple[dict[str, Any], ...] = (
    {"repetition_penalty": 1.4},
    {"suppress_tokens": [5, 79]},
    {"sequence_bias": [[[75], 5.0]]},
)


@pytest.mark.parametrize("options", PROCESSORS, ids=lambda options: next(iter(options)))
def test_processors_act_on_an_lm_head_that_is_wider_than_the_tokenizer(
    options: dict[str, Any],
) -> None:
    """huggingface/transformers#48846: ids that no token has stay in reach, drafted as undrafted."""
    model = make_model(vocab_size=80)
    drafted = text(model, PROMPTS[0], **DRAFTED, **options)
    assert drafted == text(model, PROMPTS[0], **TARGET, **options)
    assert max(drafted) >= 64


@pytest.mark.parametrize("target", ["sequential", "static"])
def test_banned_words_are_those_of_every_row_of_a_drafted_batch(target: str) -> None:
    """vllm-project/vllm#31908 and #52311: of several tokens, in a row that is not the first, across
    a draft's border."""
    model, options = make_model(), {**DRAFTED, "target": target, "max_new_tokens": 16}
    free = texts(model, PROMPTS, **options)
    banned = [free[2][3:6], free[1][:2], [free[0][5]]]
    drafted = texts(model, PROMPTS, **options, bad_words_ids=banned)
    plain = {"decoding": target, "max_new_tokens": 16, "eos_token_id": None}
    assert drafted == texts(model, PROMPTS, **plain, bad_words_ids=banned)
    assert drafted == [text(model, prompt, **options, bad_words_ids=banned) for prompt in PROMPTS]
    assert not any(
        row[i : i + len(word)] == word
        for row in drafted
        for word in banned
        for i in range(len(row))
    )
    assert drafted != free


TRUNCATIONS: tuple[dict[str, Any], ...] = (
    {"min_p": 0.3},
    {"top_h": 0.5},
    {"typical_p": 0.8},
    {"top_p": 0.6},
)


@pytest.mark.parametrize("truncation", TRUNCATIONS, ids=lambda options: next(iter(options)))
def test_a_truncation_acts_on_drafted_tokens_and_in_every_row(truncation: dict[str, Any]) -> None:
    """vllm-project/vllm#42802 (`min_p` on verified tokens) and 1CatAI/1Cat-vLLM#656 (sampled
    batches of more than two)."""
    model, sampled = make_model(), {"do_sample": True, "temperature": 1.5, "top_k": 0, **truncation}
    drafted = texts(model, PROMPTS, **DRAFTED, **sampled, seed=[5, 9, 2])
    assert drafted == texts(model, PROMPTS, **TARGET, **sampled, seed=[5, 9, 2])
    assert drafted == [
        text(model, p, **DRAFTED, **sampled, seed=s)
        for p, s in zip(PROMPTS, (5, 9, 2), strict=True)
    ]
    assert drafted != texts(
        model, PROMPTS, **DRAFTED, **{**sampled, **dict.fromkeys(truncation)}, seed=[5, 9, 2]
    )


@pytest.mark.parametrize(
    "sampled",
    [{}, {**LIVELY, "seed": 3, "temperature": 0.7, "top_p": 0.9}],
    ids=["greedy", "sampled"],
)
def test_log_probabilities_of_drafted_tokens_are_the_targets(sampled: dict[str, Any]) -> None:
    """ggml-org/llama.cpp#27972, where drafted tokens had 0."""
    model = make_model()
    drafted, target = (
        generate(model, PROMPTS, **{**mode, **sampled}) for mode in (DRAFTED, TARGET)
    )
    torch.testing.assert_close(drafted.token_logprobs, target.token_logprobs)
    assert (drafted.token_logprobs < 0).all()


def test_a_grammar_that_needs_a_growing_prefix_is_refused() -> None:
    """vllm-project/vllm#45436."""
    with pytest.raises(
        ValueError, match=r"prefix_allowed_tokens_fn.*prefixes that grow from the left"
    ):
        text(make_model(), PROMPTS[0], **DRAFTED, prefix_allowed_tokens_fn=lambda *_: [1, 2])


# Batches, padding, caches


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("masked", [False, True])
def test_a_padded_batch_says_what_its_prompts_say_alone(side: str, masked: bool) -> None:
    """ZHZisZZ/dllm#87 (left) and TransformerLensOrg/TransformerLens#1760 (right, without a
    mask)."""
    model, batch = make_model(), batch_of(PROMPTS, side)
    width = batch["input_ids"].shape[1]
    out: Any = model.generate(
        **(batch if masked else batch | {"attention_mask": None}),
        **DRAFTED,
        return_dict_in_generate=True,
    )
    rows = zip(out.sequences, out.reveal_step, strict=True)
    assert [row[width:][steps >= 0].tolist() for row, steps in rows] == [
        text(model, p, **DRAFTED) for p in PROMPTS
    ]
    assert torch.equal(out.sequences[:, :width], batch["input_ids"])


def test_a_batch_encoding_in_place_of_ids_is_refused_with_the_remedy() -> None:
    """unslothai/unsloth#4112."""
    with pytest.raises(ValueError, match=r"pass \*\*inputs"):
        make_model().generate(word_tokenizer()("w01 w02", return_tensors="pt"), **TARGET)


@pytest.mark.parametrize("stop", range(1, 9))
def test_a_block_that_is_not_finished_is_not_gone_on_from(stop: int) -> None:
    """sgl-project/sglang#35781: a call ends at each position of a block, and the next one changes
    its last token."""
    model = make_model()
    first = generate(model, [PROMPTS[2]], **{**DRAFTED, "max_new_tokens": stop})
    kept, cache = first.sequences[0].tolist(), first.cache
    for conversation in (kept, [*kept[:-1], 3]):
        out = generate(model, [conversation], **DRAFTED, past_key_values=cache)
        assert torch.equal(out.sequences, generate(model, [conversation], **DRAFTED).sequences)
        cache = out.cache


def test_as_many_drafts_are_accepted_behind_a_reused_prefix() -> None:
    """vllm-project/vllm#47930."""
    model = dampened(make_model(), 0.05)
    first = generate(model, [PROMPTS[2]], **DRAFTED)
    conversation = [[*first.sequences[0].tolist(), 7, 8, 9, 10, 11]]
    fresh, reused = (
        generate(model, conversation, **DRAFTED),
        generate(model, conversation, **DRAFTED, past_key_values=first.cache),
    )
    assert torch.equal(reused.sequences, fresh.sequences)
    assert reused.stats.accepted.tolist() == fresh.stats.accepted.tolist() > [0]


def test_numbers_that_are_not_finite_end_one_call_alone() -> None:
    """vllm-project/vllm#47424, where NaN came out as padding."""
    model = make_model()
    before, weight = text(model, PROMPTS[0], **DRAFTED), model.model.layers[1].mlp.down_proj.weight
    whole = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = torch.nan
    with pytest.raises(ValueError, match="no token with a finite score"):
        text(model, PROMPTS[0], **DRAFTED)
    with torch.no_grad():
        weight.copy_(whole)
    assert text(model, PROMPTS[0], **DRAFTED) == before


def test_nothing_below_the_threshold_is_revealed_to_fill_a_quota() -> None:
    """Blaizzy/mlx-vlm#1235: at a threshold of 1 each step reveals one token, the most confident
    one."""
    model, options = make_model(), {"max_new_tokens": 12, "eos_token_id": None}
    out = generate(model, [PROMPTS[0]], decoding="dynamic", confidence_threshold=1.0, **options)
    assert out.sequences[0, len(PROMPTS[0]) :].tolist() == text(
        model, PROMPTS[0], decoding="static", **options
    )
    assert sorted(out.reveal_step[0].tolist()) == list(range(12))


def test_steps_of_a_whole_text_are_refused_as_steps_of_a_block() -> None:
    """NVlabs/Fast-dLLM#82."""
    with pytest.raises(ValueError, match=r"denoising_steps is 32.*from 1 to block_size \(4\)"):
        text(make_model(), PROMPTS[0], decoding="static", denoising_steps=32, max_new_tokens=32)


# Adapters


def test_merging_one_of_two_active_adapters_decodes_as_the_forward_says() -> None:
    """huggingface/peft#3756: peft leaves the other out of the forward until all is unmerged, and so
    does `generate`."""
    model = adapted(make_model(), ("A", "B"))
    model.base_model.set_adapter(["A", "B"])
    both = text(model, PROMPTS[0], **DRAFTED)
    model.merge_adapter(adapter_names=["A"])
    assert text(model, PROMPTS[0], **DRAFTED) == left_to_right(model, PROMPTS[0])
    model.unmerge_adapter()
    assert text(model, PROMPTS[0], **DRAFTED) == left_to_right(model, PROMPTS[0]) == both


def test_two_dora_adapters_at_once_decode_as_the_forward_says() -> None:
    """huggingface/peft#3608; merged, too, whatever the rounding of that is."""
    model = adapted(make_model(), ("A", "B"), use_dora=True)
    model.base_model.set_adapter(["A", "B"])
    for form in (model, copy.deepcopy(model).merge_and_unload()):
        assert text(form, PROMPTS[0], **DRAFTED) == left_to_right(form, PROMPTS[0])


@pytest.mark.parametrize("module", ["lm_head", "embed_tokens", "norm", "mrp_head"])
def test_modules_saved_with_an_adapter_come_back(module: str, tmp_path: Path) -> None:
    """huggingface/transformers#48595; a folder with the adapter alone is no model, which is
    said."""
    base = saved(make_model(), tmp_path / "base")
    model = adapted(base, modules_to_save=[module])
    said = text(model, PROMPTS[0], **DRAFTED)
    assert said == left_to_right(model, PROMPTS[0])
    model.save_pretrained(tmp_path / "adapter")
    plain, again = (
        MRPForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64) for _ in range(2)
    )
    if older_than("5.18"):
        with pytest.raises(
            ImportError, match=rf"{module} saved whole .* install transformers 5\.18"
        ):
            plain.load_adapter(str(tmp_path / "adapter"))
        plain = again
    else:
        plain.load_adapter(str(tmp_path / "adapter"))
    ids = torch.tensor([[*PROMPTS[2], MASK, MASK]])
    for loaded in (plain, PeftModel.from_pretrained(again, tmp_path / "adapter").eval()):
        assert text(loaded, PROMPTS[0], **DRAFTED) == said
        assert torch.equal(loaded(ids).logits, model(ids).logits)
    with pytest.raises(OSError, match=r"loaded with model\.load_adapter"):
        MRPForCausalLM.from_pretrained(tmp_path / "adapter")


OF_LM_HEAD: tuple[dict[str, Any], ...] = (
    {"modules_to_save": ["lm_head"]},
    {"trainable_token_indices": {"lm_head": [5, 17, 40, 3, 44]}},
)


@pytest.mark.parametrize("options", OF_LM_HEAD, ids=lambda options: next(iter(options)))
def test_scores_of_given_texts_have_the_adapters_lm_head(options: dict[str, Any]) -> None:
    """vllm-project/vllm#51594, where an adapter of `lm_head` acted on generated tokens alone."""
    model, prompt = adapted(make_model(), **options), PROMPTS[2]
    expected = []
    for position, token in enumerate(prompt):
        state = torch.tensor([[*prompt[:position], *[MASK] * (4 - position % 4)]])
        logits = model(state).logits[0, position].detach()
        logits[MASK] = -torch.inf
        expected.append(logits.log_softmax(-1)[token])
    torch.testing.assert_close(
        model.score(torch.tensor([prompt])).logprobs[0], torch.stack(expected)
    )


def test_a_lora_of_lm_head_is_refused_in_scores_as_in_texts() -> None:
    """vllm-project/vllm#51594."""
    with pytest.raises(ValueError, match=r"lm_head has an adapter.*merge_and_unload"):
        adapted(make_model(), target_modules=["lm_head"]).score(torch.tensor([PROMPTS[2]]))


@pytest.mark.parametrize("options", OF_LM_HEAD, ids=lambda options: next(iter(options)))
def test_an_lm_head_for_each_row_is_refused(options: dict[str, Any]) -> None:
    """vllm-project/vllm#55796: rows of several adapters had the active one's `lm_head`; embeddings
    of each row are right."""
    model = adapted(make_model(), ("A", "B"), **options)
    names = ["A", "B", "__base__"]
    with pytest.raises(ValueError, match=r"lm_head differs from adapter to adapter.*set_adapter"):
        texts(model, [PROMPTS[0]] * 3, **DRAFTED, adapter_names=names)
    model = adapted(
        make_model(), ("A", "B"), trainable_token_indices={"embed_tokens": [5, 17, 40, 3]}
    )
    of_rows = texts(model, [PROMPTS[0]] * 3, **DRAFTED, adapter_names=names)
    alone = []
    for name in ("A", "B"):
        model.set_adapter(name)
        alone.append(text(model, PROMPTS[0], **DRAFTED))
    with model.disable_adapter():
        alone.append(text(model, PROMPTS[0], **DRAFTED))
    assert of_rows == alone
    assert len({*map(tuple, alone)}) == 3


BOTH: tuple[tuple[dict[str, Any], bool], ...] = (
    ({"trainable_token_indices": [5, 17, 40, 3]}, True),
    ({"trainable_token_indices": {"embed_tokens": [5, 3], "lm_head": [17, 3]}}, False),
    ({"trainable_token_indices": {"lm_head": [5, 17]}}, False),
    ({"modules_to_save": ["embed_tokens"], "ensure_weight_tying": True}, True),
)


@pytest.mark.parametrize(
    ("options", "tied"), BOTH, ids=["tokens", "tokens of each", "tokens of one", "modules"]
)
@torch.no_grad()
def test_rows_that_peft_ties_stay_tied(options: dict[str, Any], tied: bool, tmp_path: Path) -> None:
    """vllm-project/vllm#36501: on a tied model, unmerged, loaded, merged, and merged, saved and
    loaded."""
    base = saved(make_model(tie_word_embeddings=True), tmp_path / "base")
    model = adapted(base, **copy.deepcopy(options))
    rows, columns = (
        base.model.embed_tokens(torch.arange(64)),
        base.lm_head(torch.eye(32, dtype=torch.float64)).T,
    )
    assert torch.allclose(rows, columns) == tied == base.config.tie_word_embeddings
    said = left_to_right(model, PROMPTS[0])
    assert text(model, PROMPTS[0], **DRAFTED) == said
    model.save_pretrained(tmp_path / "adapter")
    again: Any = MRPForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float64)
    assert (
        text(PeftModel.from_pretrained(again, tmp_path / "adapter").eval(), PROMPTS[0], **DRAFTED)
        == said
    )
    merged = model.merge_and_unload()
    assert text(merged, PROMPTS[0], **DRAFTED) == said
    assert text(saved(merged, tmp_path / "merged"), PROMPTS[0], **DRAFTED) == said


# Saving and loading


@pytest.mark.parametrize("tied", [False, True])
def test_a_vocabulary_that_grew_reaches_lm_head_and_what_is_saved(
    tied: bool, tmp_path: Path
) -> None:
    """huggingface/transformers#45276, and #45079: `post_init` behind it drew the rows anew."""
    model = make_model(tie_word_embeddings=tied)
    rows, before = model.lm_head.weight.detach().clone(), text(model, PROMPTS[0], **DRAFTED)
    model.resize_token_embeddings(70)
    model.post_init()
    assert (model.config.vocab_size, model.lm_head.out_features, len(model.lm_head.weight)) == (
        70,
        70,
        70,
    )
    assert torch.equal(model.lm_head.weight[:64], rows)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert text(model, PROMPTS[0], **DRAFTED) == text(model, PROMPTS[0], **TARGET) == before
    assert text(saved(model, tmp_path), PROMPTS[0], **DRAFTED) == before


@pytest.mark.parametrize("family", ["sdar", "stable_diffcoder"])
def test_memory_given_to_a_model_of_the_meta_device_gets_rotary_frequencies(family: str) -> None:
    """huggingface/transformers#45902: no checkpoint holds them."""
    model = make_model(family=family)
    with torch.device("meta"):
        empty = MRPForCausalLM(model.config)
    empty.to_empty(device="cpu").double().load_state_dict(model.state_dict())
    assert torch.equal(empty.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
    assert text(empty.eval(), PROMPTS[0], **DRAFTED) == text(model, PROMPTS[0], **DRAFTED)


@pytest.mark.parametrize("variant", [None, "ema"])
@pytest.mark.parametrize("sizes", [("5KB", "5GB"), ("5GB", "5KB"), ("5KB", "20KB")], ids=str)
def test_what_is_saved_last_is_loaded(
    variant: str | None, sizes: tuple[str, str], tmp_path: Path
) -> None:
    """huggingface/diffusers#14719: other shards, one file in place of several, several in place of
    one."""
    first, second = make_model(0), make_model(1)
    for model, size in zip((first, second), sizes, strict=True):
        model.save_pretrained(tmp_path, max_shard_size=size, variant=variant)
    loaded = MRPForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, variant=variant)
    assert same_tensors(loaded, second)
    named = {
        f
        for index in tmp_path.glob("*.index.*json")
        for f in json.loads(index.read_text())["weight_map"].values()
    }
    files = {path.name for path in tmp_path.glob("*.safetensors")}
    assert files == named or (not named and len(files) == 1)


def test_shards_of_another_variant_are_not_deleted(tmp_path: Path) -> None:
    """huggingface/diffusers#14719."""
    first, second = make_model(0), make_model(1)
    first.save_pretrained(tmp_path, max_shard_size="5KB", variant="ema")
    with pytest.raises(
        ValueError,
        match=r"model\.ema-00001-of-\d+\.safetensors of another variant, which would be deleted",
    ):
        second.save_pretrained(tmp_path)
    assert same_tensors(
        MRPForCausalLM.from_pretrained(tmp_path, dtype=torch.float64, variant="ema"), first
    )
    both = tmp_path / "both"
    second.save_pretrained(both)
    first.save_pretrained(both, max_shard_size="5KB", variant="ema")
    for variant, model in (("ema", first), (None, second)):
        assert same_tensors(
            MRPForCausalLM.from_pretrained(both, dtype=torch.float64, variant=variant), model
        )


@pytest.mark.parametrize(
    "on_disk",
    [{"": "disk"}, {"model": "disk", "lm_head": "disk", "mrp_head": "disk"}],
    ids=["all", "parts"],
)
def test_a_tied_model_that_lies_on_disk_decodes_and_is_saved(
    on_disk: dict[str, str], tmp_path: Path
) -> None:
    """huggingface/accelerate#4083, where all weights on disk were taken for one that is shared."""
    model = make_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path / "whole")
    places: Any = {"device_map": on_disk, "offload_folder": str(tmp_path / "offload")}
    loaded = MRPForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float64, **places)
    assert text(loaded, PROMPTS[0], **DRAFTED) == text(model, PROMPTS[0], **DRAFTED)
    assert same_tensors(saved(loaded, tmp_path / "again"), model)


def test_an_lm_head_that_is_tied_in_the_config_alone_is_saved(tmp_path: Path) -> None:
    """NVIDIA-NeMo/Automodel#2511: made on the meta device, so that two weights were trained."""
    model = make_model(tie_word_embeddings=True)
    with torch.device("meta"):
        apart = MRPForCausalLM(model.config)
    apart.to_empty(device="cpu").double().load_state_dict(model.state_dict())
    apart.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach() + 1)
    again = saved(apart, tmp_path)
    assert torch.equal(again.lm_head.weight, apart.lm_head.weight)
    assert torch.equal(again.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_a_snapshot_of_links_into_a_cache_is_loaded_with_its_code(
    fresh: Fresh, tmp_path: Path
) -> None:
    """huggingface/transformers#46611 and #46022: by the path of its folder, whose files lie
    elsewhere under other names."""
    source, snapshot, blobs = (
        Path(embedded_checkpoint()),
        tmp_path / "snapshots" / "abc1.2",
        tmp_path / "blobs",
    )
    blobs.mkdir()
    for number, file in enumerate(path for path in sorted(source.rglob("*")) if path.is_file()):
        shutil.copy(file, blobs / str(number))
        link = snapshot / file.relative_to(source)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(blobs / str(number))
    script = f"""
        from transformers import AutoModel
        model = AutoModel.from_pretrained({str(snapshot)!r}, trust_remote_code=True)
        ids = torch.tensor([[20, 21, 22]])
        print(model.generate(ids, decoding="mrp_spec", max_new_tokens=8).tolist())
        """
    model, _ = embedded_with_tokenizer()
    expected = model.generate(
        torch.tensor([[20, 21, 22]]), decoding="mrp_spec", max_new_tokens=8
    ).tolist()
    assert fresh(script) == f"{expected}\n"


# Training


def test_a_generation_config_that_cannot_be_saved_is_refused_before_training(
    tmp_path: Path,
) -> None:
    """QwenLM/Qwen3-ASR#210: such a checkpoint loads and decodes, and ended a run at its first
    save."""
    folder = tmp_path / "model"
    shutil.copytree(embedded_checkpoint(), folder, ignore=shutil.ignore_patterns("__pycache__"))
    file = folder / "generation_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "do_sample": False, "temperature": 1e-6})
    )
    model = MRPForCausalLM.from_pretrained(folder)
    assert len(text(model, PROMPTS[2], **TARGET)) == 13
    with pytest.raises(
        ValueError, match=r"could not be saved with a checkpoint[\s\S]*`temperature`"
    ):
        trainer_of(tmp_path / "run", model=model)
    model.generation_config.temperature = None
    trainer_of(tmp_path / "run", model=model)


def test_a_run_resumed_in_the_midst_of_its_second_epoch_ends_as_one_that_went_on(
    tmp_path: Path,
) -> None:
    """modelscope/ms-swift#10050 and huggingface/accelerate#4071, where the order of the first epoch
    came again."""
    options: dict[str, Any] = {
        "num_train_epochs": 2,
        "per_device_train_batch_size": 2,
        "save_steps": 1,
        "save_total_limit": 99,
    }
    whole = trainer_of(tmp_path, **options)
    whole.train()
    per_epoch = whole.state.max_steps // 2
    assert per_epoch > 2
    resumed = trainer_of(tmp_path, **options)
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{per_epoch + per_epoch // 2}"))
    assert all(map(torch.equal, weights_of(whole), weights_of(resumed)))


def test_the_last_steps_of_an_epoch_do_not_depend_on_how_they_are_divided(tmp_path: Path) -> None:
    """modelscope/ms-swift#10084: 14 records in steps of 4."""
    plain = {
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "warmup_steps": 0,
        "learning_rate": 1e-2,
        "max_grad_norm": 0.0,
    }
    weights = []
    for rows, steps in ((4, 1), (1, 4), (2, 2)):
        division = {"per_device_train_batch_size": rows, "gradient_accumulation_steps": steps}
        trainer = trainer_of(
            tmp_path / f"{rows}", **plain, **division, num_train_epochs=1, save_strategy="no"
        )
        before = weights_of(trainer)
        trainer.train()
        weights.append(weights_of(trainer))
        assert not all(map(torch.equal, before, weights[-1]))
    for other in weights[1:]:
        for one, two in zip(weights[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_held_out_records_without_anything_to_learn_give_no_nan(tmp_path: Path) -> None:
    """huggingface/trl#5662."""
    long = [{"prompt": "word " * 80, "completion": "yes"}]
    with pytest.raises(ValueError, match=r"eval_dataset.*1 all that is learned: raise max_length"):
        trainer_of(tmp_path, eval_dataset=long, save_strategy="no")
    trainer = trainer_of(tmp_path, eval_dataset=[*CHATS[:3], *long], save_strategy="no")
    assert 0 < trainer.evaluate()["eval_loss"] < 100


def test_a_message_without_content_is_named_with_its_line(tmp_path: Path) -> None:
    """huggingface/transformers#45422, where templates wrote "None"."""
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    with pytest.raises(RecordError, match="train_dataset, record 1, field messages"):
        trainer_of(tmp_path, data=[{"messages": chat}])
