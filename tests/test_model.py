"""Forward, training pass, head and cache against slow twins: one row, one block, no packing, no cache, no attention kernel.

Qwen3's RMSNorm computes in float32 whatever its input. The tests that ask for 1e-10 use `exact_norms`, so that what they
measure is the package's arithmetic and not that rounding.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from torch import Tensor, nn
from transformers import DynamicCache, Trainer, TrainingArguments
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

import modeling_mrp.modeling_mrp as modeling
from modeling_mrp import MRPConfig, MRPForCausalLM, MRPHead
from modeling_mrp.cache_mrp import BlockCache
from modeling_mrp.diffusion_mrp import PackedBatch, packed_mask

BLOCK, MASK = 4, 60  # of make_model


@pytest.fixture
def exact_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Qwen3RMSNorm, "forward", lambda norm, x: naive_norm(norm, x))


def random_ids(seed: int, *shape: int) -> Tensor:
    return torch.randint(1, 50, shape, generator=torch.Generator().manual_seed(seed))


def close(actual: Tensor, expected: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


# ------------------------------------------------------------------------------------------------ naive twins


def naive_norm(norm: Any, x: Tensor) -> Tensor:
    return norm.weight * x / (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).sqrt()


def naive_rotary(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotates the pairs (i, i + d/2) of x [d] by position * theta^(-2i/d); angles in float32, as transformers does."""
    half = len(x) // 2
    angle = position * (1.0 / theta ** (torch.arange(0, len(x), 2, dtype=torch.float) / len(x)))
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    return torch.cat([x[:half] * cos - x[half:] * sin, x[half:] * cos + x[:half] * sin])


def naive_layer(layer: Any, x: Tensor, positions: list[int], sees: Callable[[int, int], bool], config: MRPConfig) -> Tensor:
    """A Qwen3 decoder layer on x [length, hidden], one query and one attention head at a time."""
    attention, width = layer.self_attn, config.head_dim
    normed = naive_norm(layer.input_layernorm, x)
    query, key, value = (
        proj(normed).unflatten(1, (-1, width)) for proj in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    theta = config.rope_parameters["rope_theta"]
    rows = []
    for q, query_position in enumerate(positions):
        visible = [k for k in range(len(positions)) if sees(q, k)]
        heads = []
        for head in range(config.num_attention_heads):
            group = head // (config.num_attention_heads // config.num_key_value_heads)
            asked = naive_rotary(naive_norm(attention.q_norm, query[q, head]), query_position, theta)
            keys = [naive_rotary(naive_norm(attention.k_norm, key[k, group]), positions[k], theta) for k in visible]
            weights = torch.stack([asked @ k / width**0.5 for k in keys]).softmax(0)
            heads.append(sum(w * value[k, group] for w, k in zip(weights, visible, strict=True)))
        rows.append(torch.cat(heads))
    x = x + attention.o_proj(torch.stack(rows))
    normed = naive_norm(layer.post_attention_layernorm, x)
    return x + layer.mlp.down_proj(F.silu(layer.mlp.gate_proj(normed)) * layer.mlp.up_proj(normed))


def same_or_earlier_block(positions: list[int]) -> Callable[[int, int], bool]:
    return lambda q, k: positions[k] // BLOCK <= positions[q] // BLOCK


def naive_logits(model: MRPForCausalLM, ids: list[int], positions: list[int] | None = None) -> Tensor:
    positions = positions or list(range(len(ids)))
    x = model.model.embed_tokens.weight[ids]
    for layer in model.model.layers:
        x = naive_layer(layer, x, positions, same_or_earlier_block(positions), model.config)
    return model.lm_head(naive_norm(model.model.norm, x))


def naive_loss(model: MRPForCausalLM, ids: Tensor, labels: Tensor, lengths: list[int], level: Tensor, noise: Tensor) -> Tensor:
    """Equation 3 of SDAR, block by block: [clean earlier blocks | noisy block] through the model, nothing packed."""
    total, learned = torch.zeros((), dtype=torch.float64), 0
    for row, length in enumerate(lengths):
        clean = ids[row, :length].tolist()
        response = [label != -100 for label in labels[row, :length].tolist()]
        learned += sum(response)
        for start in range(0, length, BLOCK):
            block = range(start, min(start + BLOCK, length))
            hidden = [i for i in block if response[i] and noise[row, i]]
            noisy = clean[:start] + [MASK if i in hidden else clean[i] for i in block]
            logp = model(torch.tensor([noisy])).logits[0].log_softmax(-1)
            total = total - sum(logp[i, clean[i]] for i in hidden) / level[row]
    return total / learned


# ------------------------------------------------------------------------------------------------ forward


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_forward_equals_a_transformer_written_out(random_model: MRPForCausalLM) -> None:
    """10 tokens: the last block is cut short."""
    ids = random_ids(0, 10)
    ids[[5, 8]] = MASK
    close(random_model(ids[None]).logits[0], naive_logits(random_model, ids.tolist()))


@torch.no_grad()
def test_forward_is_block_causal(random_model: MRPForCausalLM) -> None:
    ids = random_ids(1, 1, 3 * BLOCK)
    before = random_model(ids).logits[0]
    for changed in range(3 * BLOCK):
        other = ids.clone()
        other[0, changed] = 55
        after = random_model(other).logits[0]
        start = changed // BLOCK * BLOCK
        assert torch.equal(after[:start], before[:start])
        for position in range(start, 3 * BLOCK):  # its own block on both sides, and all later ones
            assert (after[position] - before[position]).abs().max() > 1e-6, (changed, position)


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("side", ["left", "right", "both"])
@torch.no_grad()
def test_padding_changes_nothing(random_model: MRPForCausalLM, side: str) -> None:
    lengths, width = (5, 11, 8), 13
    ids, mask, at = torch.full((3, width), 49), torch.zeros(3, width, dtype=torch.long), []
    for row, length in enumerate(lengths):
        begin = {"left": width - length, "right": 0, "both": 1}[side]
        at.append(slice(begin, begin + length))
        ids[row, at[row]] = random_ids(row, length)
        mask[row, at[row]] = 1
    logits = random_model(ids, attention_mask=mask).logits
    assert logits.isfinite().all()
    for row in range(3):
        close(logits[row, at[row]], random_model(ids[row, at[row]][None]).logits[0])


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("kind", ["boolean", "additive"])
@torch.no_grad()
def test_a_4d_mask_replaces_the_2d_one(random_model: MRPForCausalLM, kind: str) -> None:
    lengths, width = (10, 7), 10
    ids = random_ids(2, 2, width)
    valid = torch.tensor([[1] * length + [0] * (width - length) for length in lengths])
    sees = torch.zeros(2, 1, width, width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        for q in range(width):
            for k in range(width):
                sees[row, 0, q, k] = (k // BLOCK <= q // BLOCK and k < length) or k == q
    mask = sees if kind == "boolean" else torch.zeros(sees.shape, dtype=torch.float64).masked_fill(~sees, -torch.inf)
    full, flat = random_model(ids, attention_mask=mask).logits, random_model(ids, attention_mask=valid).logits
    for row, length in enumerate(lengths):
        close(full[row, :length], flat[row, :length])
    causal = sees & torch.ones(width, width, dtype=torch.bool).tril()  # another mask is another model
    assert (random_model(ids, attention_mask=causal).logits - full)[0, 0].abs().max() > 1e-6


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_position_ids_decide_the_blocks(random_model: MRPForCausalLM) -> None:
    """Positions 2..9 are the blocks {2, 3}, {4..7}, {8, 9}; one row of positions serves the batch."""
    ids, positions = random_ids(3, 2, 8), list(range(2, 10))
    logits = random_model(ids, position_ids=torch.tensor([positions])).logits
    for row in range(2):
        close(logits[row], naive_logits(random_model, ids[row].tolist(), positions))
    default = random_model(ids).logits
    close(random_model(ids, position_ids=torch.arange(8)).logits, default, atol=0)
    assert (logits - default).abs().max() > 1e-3


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_tokens_may_come_in_any_order(random_model: MRPForCausalLM) -> None:
    ids = random_ids(4, 1, 10)
    order = torch.tensor([7, 2, 9, 0, 4, 1, 8, 3, 6, 5])
    shuffled = random_model(ids[:, order], position_ids=order[None]).logits
    close(shuffled, random_model(ids).logits[:, order])


@pytest.mark.usefixtures("exact_norms")
@pytest.mark.parametrize("blocks", [(1, 1, 1, 1), (2, 1, 1), (1, 3)], ids=str)
@torch.no_grad()
def test_block_by_block_with_a_dynamic_cache(random_model: MRPForCausalLM, blocks: tuple[int, ...]) -> None:
    """Row 1 has a block of left padding, so that the rows' blocks still end in the same columns."""
    ids = random_ids(5, 2, 4 * BLOCK)
    mask = torch.ones_like(ids)
    mask[1, :BLOCK] = 0
    whole = random_model(ids, attention_mask=mask).logits
    cache, parts, end = DynamicCache(config=random_model.config), [], 0
    for count in blocks:
        begin, end = end, end + count * BLOCK
        out = random_model(ids[:, begin:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
        assert out.past_key_values is cache
        parts.append(out.logits)
    close(torch.cat(parts, 1)[mask.bool()], whole[mask.bool()])
    assert cache.get_seq_length() == 4 * BLOCK


@torch.no_grad()
def test_eager_attention_equals_sdpa() -> None:
    """transformers' eager attention takes its softmax in float32, hence 1e-5."""
    sdpa, eager = make_model(), make_model()
    eager.set_attn_implementation("eager")
    assert (sdpa.config._attn_implementation, eager.config._attn_implementation) == ("sdpa", "eager")
    ids, labels = random_ids(6, 2, 11), random_ids(6, 2, 11)
    labels[:, :5] = -100
    mask = torch.ones_like(ids)
    mask[1, 8:] = 0
    noise = {"noise_level": torch.tensor([0.5, 0.25]), "noise_mask": random_ids(7, 2, 11) > 20}
    close(eager(ids, attention_mask=mask).logits[mask.bool()], sdpa(ids, attention_mask=mask).logits[mask.bool()], atol=1e-5)
    losses = [model(ids, attention_mask=mask, labels=labels, **noise).loss for model in (eager, sdpa)]
    close(*losses, atol=1e-5)
    sees = torch.ones(1, 1, 11, 11, dtype=torch.bool).tril()
    close(eager(ids[:1], attention_mask=sees).logits, sdpa(ids[:1], attention_mask=sees).logits, atol=1e-5)
    positions, hidden = torch.arange(11)[None], torch.randn(1, 11, 32, dtype=torch.float64)
    close(eager.residual(ids[:1], hidden, positions, sees), sdpa.residual(ids[:1], hidden, positions, sees), atol=1e-5)


@torch.no_grad()
def test_logits_to_keep(random_model: MRPForCausalLM) -> None:
    ids = random_ids(8, 2, 9)
    logits = random_model(ids).logits
    close(random_model(ids, logits_to_keep=0).logits, logits, atol=0)
    close(random_model(ids, logits_to_keep=3).logits, logits[:, 6:])
    close(random_model(ids, logits_to_keep=torch.tensor([7, 1])).logits, logits[:, [7, 1]])


@torch.no_grad()
def test_the_last_hidden_states_are_h_a(random_model: MRPForCausalLM) -> None:
    ids = random_ids(9, 2, 8)
    out = random_model(ids, output_hidden_states=True)
    assert len(out.hidden_states) == 3  # embeddings, after layer 0, h_A
    close(out.hidden_states[0], random_model.model.embed_tokens(ids), atol=0)
    close(random_model.lm_head(out.hidden_states[-1]), out.logits, atol=0)
    positions = torch.arange(8).expand(2, 8)
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    close(out.hidden_states[-1], random_model.backbone(ids, positions, mask))
    assert random_model(ids).hidden_states is None


@torch.no_grad()
def test_embeddings_in_place_of_ids(random_model: MRPForCausalLM) -> None:
    ids = random_ids(10, 2, 6)
    embeds = random_model.model.embed_tokens(ids)
    close(random_model(inputs_embeds=embeds).logits, random_model(ids).logits, atol=0)
    close(random_model(inputs_embeds=embeds.flip(1)).logits, random_model(ids.flip(1)).logits, atol=0)


def test_return_dict_false_gives_a_tuple(random_model: MRPForCausalLM) -> None:
    ids = random_ids(10, 1, 4)
    close(random_model(ids, return_dict=False)[0], random_model(ids).logits)


# ------------------------------------------------------------------------------------------------ training pass


def training_example() -> dict[str, Tensor]:
    """Rows of 11, 6 and 8 real tokens; the prompts end inside a block, at a block's start and nowhere."""
    ids, labels, mask = random_ids(11, 3, 11), torch.full((3, 11), -100), torch.ones(3, 11, dtype=torch.long)
    for row, (prompt, length) in enumerate(((5, 11), (4, 6), (0, 8))):
        labels[row, prompt:length] = ids[row, prompt:length]
        mask[row, length:] = 0
    noise = torch.rand(3, 11, generator=torch.Generator().manual_seed(1)) < 0.6
    level = torch.tensor([0.9, 0.35, 0.6], dtype=torch.float64)
    return {"input_ids": ids, "labels": labels, "attention_mask": mask, "noise_level": level, "noise_mask": noise}


@pytest.mark.usefixtures("exact_norms")
def test_loss_and_gradients_equal_the_loop_over_blocks() -> None:
    """The package takes its cross-entropy in float32, hence 1e-6."""
    example = training_example()
    packed, naive = make_model(), make_model()
    loss = packed(**example).loss
    level, noise = example["noise_level"], example["noise_mask"]
    expected = naive_loss(naive, example["input_ids"], example["labels"], [11, 6, 8], level, noise)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for (name, parameter), twin in zip(packed.named_parameters(), naive.parameters(), strict=True):
        if name.startswith("mrp_head"):
            assert parameter.grad is None
        else:
            assert twin.grad.norm() > 1e-4, name
            assert (parameter.grad - twin.grad).norm() < 1e-6 * twin.grad.norm(), name


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_logits_of_the_training_pass_are_those_of_the_noisy_copy(random_model: MRPForCausalLM) -> None:
    example = training_example()
    logits = random_model(**example).logits
    assert logits.shape == (3, 11, 64)
    noisy = example["input_ids"][0].clone()
    noisy[(example["labels"][0] != -100) & example["noise_mask"][0]] = MASK
    for start in range(0, 11, BLOCK):
        ids = torch.cat([example["input_ids"][0, :start], noisy[start : start + BLOCK]])
        close(logits[0, start : start + BLOCK], random_model(ids[None]).logits[0, start:])


@torch.no_grad()
def test_labels_are_what_is_learned_and_seen(random_model: MRPForCausalLM) -> None:
    """Input ids at learned positions do not matter: a caller may have masked them already."""
    example = training_example()
    loss = random_model(**example).loss
    hidden = {**example, "input_ids": example["input_ids"].where(example["labels"] == -100, MASK)}
    assert random_model(**hidden).loss == loss
    changed = {**example, "labels": example["labels"].where(example["labels"] == -100, 7)}
    assert random_model(**changed).loss != loss


@torch.no_grad()
def test_only_learned_tokens_are_masked(random_model: MRPForCausalLM) -> None:
    example = training_example()
    example["noise_mask"] = torch.ones_like(example["noise_mask"])
    seen: list[Tensor] = []
    hook = random_model.model.embed_tokens.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    random_model(**example)
    hook.remove()
    ids, learned = example["input_ids"], example["labels"] != -100
    assert torch.equal(seen[0], torch.cat([ids.masked_fill(learned, MASK), ids], 1))


def test_the_noise_is_drawn_per_sequence_and_weighted_by_its_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """4000 sequences of 4 learned tokens. t ~ U(0, 1]: Kolmogorov-Smirnov by the DKW bound; given such t the number of masks in
    a sequence is uniform on 0..4: chi-square. Both at a false-alarm rate of 1e-6, and the seed is fixed."""
    captured: dict[str, Tensor] = {}
    original = modeling.pack_noisy

    def recorded(
        input_ids: Tensor, response: Tensor, valid: Tensor, masked: Tensor, weight: Tensor, mask_id: int
    ) -> PackedBatch:
        captured.update(masked=masked, weight=weight)
        return original(input_ids, response, valid, masked, weight, mask_id)

    monkeypatch.setattr(modeling, "pack_noisy", recorded)
    ids = random_ids(12, 4000, 4)
    model = make_model(num_hidden_layers=1)
    torch.manual_seed(0)
    with torch.no_grad():
        model(ids, labels=ids)
    level = 1 / captured["weight"]
    assert torch.equal(level, level[:, :1].expand_as(level))
    ordered, n = level[:, 0].sort().values, 4000
    uniform = torch.arange(n) / n
    distance = max((ordered - uniform).abs().max(), (ordered - uniform - 1 / n).abs().max())
    assert distance < (torch.tensor(2e6).log() / (2 * n)).sqrt()
    counts = captured["masked"].sum(1).bincount(minlength=5)
    chi_square = ((counts - n / 5) ** 2 / (n / 5)).sum()
    assert torch.special.gammaincc(torch.tensor(2.0), chi_square / 2) > 1e-6  # 4 degrees of freedom


@pytest.mark.usefixtures("exact_norms")
def test_gradient_checkpointing_changes_no_gradient() -> None:
    plain, checkpointed = make_model().train(), make_model().train()
    checkpointed.gradient_checkpointing_enable({"use_reentrant": False})
    for model in (plain, checkpointed):
        model(**training_example()).loss.backward()
    for a, b in zip(plain.model.parameters(), checkpointed.model.parameters(), strict=True):
        close(b.grad, a.grad)


def test_gradient_accumulation_in_transformers_trainer(tmp_path: Any) -> None:
    """Two micro-batches of one row give the step that one batch of the two rows gives; every learned token is masked."""
    ids = random_ids(13, 2, 8)
    rows = [{"input_ids": row, "labels": row, "noise_level": torch.tensor(1.0), "noise_mask": row > 0} for row in ids]
    norms = []
    for size in (1, 2):
        options = {"report_to": [], "use_cpu": True, "max_steps": 1, "logging_steps": 1, "save_strategy": "no"}
        arguments = TrainingArguments(
            output_dir=str(tmp_path), per_device_train_batch_size=size, gradient_accumulation_steps=2 // size, **options
        )
        trainer = Trainer(model=make_model(num_nextn_predict_layers=0), args=arguments, train_dataset=rows)
        trainer.train()
        norms.append(trainer.state.log_history[0]["grad_norm"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)


# ------------------------------------------------------------------------------------------------ packed pass


def test_packed_mask_by_its_rule() -> None:
    """Two samples in a row, two noisy copies each, blocks of 2, and padding in the middle and at the end."""
    tokens: list[tuple[int, int, int]] = []  # (sample, view, position)
    for sample, (first, length) in enumerate(((2, 6), (0, 4))):
        tokens += [(sample, copy, position) for copy in (1, 2) for position in range(first, length)]
        tokens += [(sample, 0, position) for position in range(length)]
        tokens += [(sample, -1, 5)] * 2
    expected = torch.zeros(len(tokens), len(tokens), dtype=torch.bool)
    for q, (q_sample, q_view, q_position) in enumerate(tokens):
        for k, (k_sample, k_view, k_position) in enumerate(tokens):
            q_block, k_block = q_position // 2, k_position // 2
            if q == k:
                expected[q, k] = True
            elif q_sample != k_sample or -1 in (q_view, k_view):
                expected[q, k] = False
            elif q_view > 0 and k_view > 0:
                expected[q, k] = q_view == k_view and q_block == k_block
            elif q_view > 0:
                expected[q, k] = k_block < q_block
            else:
                expected[q, k] = k_view == 0 and k_block <= q_block
    sample, view, position = (torch.tensor(column)[None] for column in zip(*tokens, strict=True))
    assert torch.equal(packed_mask(view, position // 2, sample), expected[None, None])


def two_samples_in_a_row() -> PackedBatch:
    """Samples of 8 and 7 tokens, each as two noisy copies and the clean one."""
    lengths = (8, 7)
    view = torch.cat([torch.full((n,), view) for n in lengths for view in (1, 2, 0)])
    sample = torch.cat([torch.full((3 * n,), index) for index, n in enumerate(lengths)])
    positions = torch.cat([torch.arange(n) for n in lengths for _ in range(3)])
    clean = [random_ids(14 + n, n) for n in lengths]
    targets = torch.cat([ids for ids in clean for _ in range(3)])
    hidden = (torch.rand(len(targets), generator=torch.Generator().manual_seed(2)) < 0.5) & (view > 0)
    ids, weight = targets.masked_fill(hidden, MASK), hidden.float()
    rows = (t[None] for t in (ids, targets, positions, view, sample, weight))
    return PackedBatch(*rows, response_tokens=torch.tensor(15))


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_nothing_crosses_samples_or_copies(random_model: MRPForCausalLM) -> None:
    batch = two_samples_in_a_row()
    hidden = random_model.packed_hidden_states(batch)
    residual = random_model.packed_residual(batch, batch.input_ids, hidden)
    for sample in (0, 1):
        for view in (0, 1, 2):
            changed = (batch.sample == sample) & (batch.view == view)
            ids = batch.input_ids.where(~changed, 55)
            after = random_model.packed_hidden_states(batch, ids)
            residual_after = random_model.packed_residual(batch, ids, after)
            # Noisy copies are seen by nobody else; the clean one by the later blocks of its own sample's copies.
            reached = changed | ((batch.sample == sample) & (batch.position_ids >= BLOCK) & (view == 0))
            assert torch.equal(after[~reached], hidden[~reached])
            assert torch.equal(residual_after[~reached], residual[~reached])
            assert (after - hidden)[reached].abs().amax(-1).min() > 1e-6
            assert (residual_after - residual)[reached].abs().amax(-1).min() > 1e-6


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_a_packed_pass_equals_each_block_alone(random_model: MRPForCausalLM) -> None:
    batch = two_samples_in_a_row()
    hidden = random_model.packed_hidden_states(batch)[0]
    residual = random_model.packed_residual(batch, batch.input_ids, hidden[None])[0]
    for sample in (0, 1):
        of_sample = batch.sample[0] == sample
        clean = batch.input_ids[0, of_sample & (batch.view[0] == 0)]
        for view in (0, 1, 2):
            at = of_sample & (batch.view[0] == view)
            for start in range(0, len(clean), BLOCK):
                ids = torch.cat([clean[:start], batch.input_ids[0, at][start : start + BLOCK]])[None]
                positions = torch.arange(ids.shape[1])[None]
                mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
                alone = random_model.backbone(ids, positions, mask)
                close(hidden[at][start : start + BLOCK], alone[0, start:])
                head = random_model.residual(ids, alone, positions, mask)
                close(residual[at][start : start + BLOCK], head[0, start:])


# ------------------------------------------------------------------------------------------------ head


def head_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, hidden states, positions and mask of 6 tokens from position 3 on: blocks {3}, {4..7}, {8}."""
    positions = torch.arange(3, 9)[None]
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    generator = torch.Generator().manual_seed(3)
    return random_ids(15, 1, 6), torch.randn(1, 6, 32, dtype=torch.float64, generator=generator), positions, mask


@torch.no_grad()
def test_the_head_of_a_new_model_adds_nothing() -> None:
    ids, hidden, positions, mask = head_inputs()
    config = make_model().config
    torch.manual_seed(0)
    fresh = MRPForCausalLM(config).double()
    assert fresh.residual(ids, hidden, positions, mask).eq(0).all()
    torch.nn.init.ones_(fresh.mrp_head.norm.weight)
    assert fresh.residual(ids, hidden, positions, mask).ne(0).all()


def test_a_bare_new_head_adds_nothing() -> None:
    assert MRPHead(make_model().config).norm.weight.eq(0).all()


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_the_head_equals_its_formula(random_model: MRPForCausalLM) -> None:
    """norm(layers(eh_proj([enorm(embed(x')) ; hnorm(h)]))), with norms that are told apart by their weights."""
    model = make_model()
    head, norms = model.mrp_head, (model.mrp_head.enorm, model.mrp_head.hnorm)
    for norm in norms:
        nn.init.normal_(norm.weight)
    ids, hidden, positions, mask = head_inputs()
    e, h = naive_norm(head.enorm, model.model.embed_tokens.weight[ids[0]]), naive_norm(head.hnorm, hidden[0])
    x = e @ head.eh_proj.weight[:, :32].T + h @ head.eh_proj.weight[:, 32:].T  # the embedding half first (method.md, 3)
    at = positions[0].tolist()
    for layer in head.layers:
        x = naive_layer(layer, x, at, same_or_earlier_block(at), model.config)
    close(model.residual(ids, hidden, positions, mask)[0], naive_norm(head.norm, x))


# ------------------------------------------------------------------------------------------------ config


def test_published_config_fields_load() -> None:
    """The config of heavyball/sdar-1_7b-mrp-3lyr, with the fields that transformers 4.52 wrote."""
    published = {
        "architectures": ["SDARMRPForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "block_size": 16,
        "bos_token_id": 151643,
        "eos_token_id": 151643,
        "fuse_cross_entropy": True,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "mask_token_id": 151669,
        "max_position_embeddings": 32768,
        "max_window_layers": 28,
        "model_type": "sdar",
        "num_attention_heads": 16,
        "num_hidden_layers": 28,
        "num_key_value_heads": 8,
        "num_mrp_heads": 1,
        "num_nextn_predict_layers": 3,
        "pad_token_id": 151643,
        "rms_norm_eps": 1e-06,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "transformers_version": "4.52.4",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": 151936,
    }
    config = MRPConfig.from_dict(published)
    renamed = {"rope_theta", "rope_scaling", "torch_dtype", "model_type", "transformers_version"}
    for name in published.keys() - renamed:
        assert getattr(config, name) == published[name], name
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 1000000}
    assert config.dtype == torch.bfloat16
    assert config.to_dict()["model_type"] == "sdar_mrp"
    assert config.has_head
    assert not MRPConfig.from_dict({**published, "num_nextn_predict_layers": 0}).has_head
    again = MRPConfig.from_dict(config.to_dict())
    assert (again.block_size, again.mask_token_id, again.rope_parameters) == (16, 151669, config.rope_parameters)


# ------------------------------------------------------------------------------------------------ cache

CPU, META = torch.device("cpu"), torch.device("meta")
ROWS, KV_HEADS, WIDTH, CAPACITY, SCRATCH = 3, 2, 5, 12, 8


def new_cache(layer_devices: list[torch.device]) -> BlockCache:
    return BlockCache(ROWS, KV_HEADS, WIDTH, layer_devices, CAPACITY, SCRATCH, torch.float64)


def numbered(first: int, length: int) -> Tensor:
    """[rows, heads, length, head_dim] of different numbers."""
    count = ROWS * KV_HEADS * length * WIDTH
    return torch.arange(first, first + count, dtype=torch.float64).view(ROWS, KV_HEADS, length, WIDTH)


def slots_of(cache: BlockCache, layer: int) -> tuple[Tensor, Tensor]:
    """Copies of all committed slots of a layer, read without writing."""
    cache.target_slots(CAPACITY, 0)
    nothing = numbered(0, 0)
    keys, values = cache.update(nothing, nothing, layer)
    return keys.clone(), values.clone()


def test_update_writes_in_place_what_attention_reads() -> None:
    cache = new_cache([CPU, CPU])
    cache.target_slots(4, 4)
    slots = numbered(1000, 4), numbered(2000, 4)
    keys, values = cache.update(*slots, 1)
    for read, written in zip((keys, values), slots, strict=True):
        close(read, torch.cat([torch.zeros_like(written), written], 2), atol=0)  # slots 0 to 7
    cache.target_scratch(6, 7)
    scratch = numbered(3000, 6), numbered(4000, 6)
    again_keys, again_values = cache.update(*scratch, 1)
    for read, new, old in zip((again_keys, again_values), scratch, slots, strict=True):
        close(read, torch.cat([new, torch.zeros_like(new[:, :, :4]), old[:, :, :3]], 2), atol=0)
    storage = keys.untyped_storage().data_ptr()
    assert {t.untyped_storage().data_ptr() for t in (keys, values, again_keys, again_values)} == {storage}
    assert again_keys[:, :, 6:].data_ptr() == keys.data_ptr()  # the scratch ends where the slots begin
    cache.target_slots(4, 4)
    cache.update(-slots[0], -slots[1], 1)
    close(keys[:, :, 4:], -slots[0], atol=0)  # the view handed out before shows it
    assert slots_of(cache, 0)[0].eq(0).all()  # the other layer is untouched


def test_commit_copies_one_block_of_some_rows_and_layers() -> None:
    """Layers on two devices in turn; `meta` stands for another device, whose numbers cannot be read."""
    devices = [CPU, META, CPU, META, CPU]
    cache = new_cache(devices)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for layer in range(5):
        cache.target_slots(0, CAPACITY)
        kept[layer] = numbered(10_000 * layer, CAPACITY), numbered(10_000 * layer + 5000, CAPACITY)
        cache.update(*(t.to(devices[layer]) for t in kept[layer]), layer)
    cache.target_scratch(SCRATCH, CAPACITY)
    fresh = {layer: (-numbered(10_000 * layer + 1, SCRATCH), -numbered(10_000 * layer + 5001, SCRATCH)) for layer in range(5)}
    for layer in range(5):
        cache.update(*(t.to(devices[layer]) for t in fresh[layer]), layer)
    cache.commit(torch.tensor([2, 0]), torch.tensor([4, 1]), torch.tensor([8, 0]), 4, range(1, 4))
    for layer in (0, 2, 4):
        for got, before, new in zip(slots_of(cache, layer), kept[layer], fresh[layer], strict=True):
            expected = before.clone()
            if layer == 2:
                expected[2, :, 8:12] = new[2, :, 4:8]
                expected[0, :, 0:4] = new[0, :, 1:5]
            close(got, expected, atol=0)


def test_commit_counts_from_the_scratch_of_the_last_forward() -> None:
    """A forward of 4 of the 8 scratch tokens uses the last 4."""
    cache = new_cache([CPU])
    cache.target_scratch(4, 0)
    new = numbered(1, 4)
    keys, _ = cache.update(new, -new, 0)
    close(keys, new, atol=0)
    cache.commit(torch.tensor([1]), torch.tensor([0]), torch.tensor([4]), 4, range(1))
    expected = torch.zeros(ROWS, KV_HEADS, CAPACITY, WIDTH, dtype=torch.float64)
    expected[1, :, 4:8] = new[1]
    keys, values = slots_of(cache, 0)
    close(keys, expected, atol=0)
    close(values, -expected, atol=0)


def test_nbytes() -> None:
    per_layer = 2 * ROWS * KV_HEADS * (SCRATCH + CAPACITY) * WIDTH * 8
    assert new_cache([CPU] * 3).nbytes == 3 * per_layer
    assert new_cache([CPU, META, META]).nbytes == 3 * per_layer
    half = BlockCache(1, 1, 1, [CPU], 4, 4, torch.bfloat16)
    assert half.nbytes == 2 * 8 * 2


@pytest.mark.usefixtures("exact_norms")
@torch.no_grad()
def test_packed_scoring_equals_separate_forwards(random_model: MRPForCausalLM) -> None:
    """Two rows with prefixes of 2 blocks and 1, three states side by side: two of the same block and, behind the second,
    the block after it. Then the second state is committed in row 0 alone, and three states follow in the next block."""
    model, width = random_model, 3
    prefix = [random_ids(20, 8).tolist(), random_ids(21, 4).tolist()]
    cache = model.block_cache(2, 16, width * BLOCK, with_head=True)
    positions = torch.arange(8).expand(2, 8)
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    cache.target_slots(0, 8)
    ids = torch.tensor([prefix[0], prefix[1] + [MASK] * 4])  # row 1's second block is not committed: it must not be read
    model.residual(ids, model.backbone(ids, positions, mask, cache), positions, mask, cache)

    def check(states: list[list[list[int]]], offsets: list[int]) -> None:
        """Scores `states` [row][state], each `offsets[state]` blocks behind its row's prefix, packed and one by one."""
        used = max(map(len, prefix))
        sees = torch.zeros(2, 1, width * BLOCK, width * BLOCK + used, dtype=torch.bool)
        where = torch.zeros(2, width * BLOCK, dtype=torch.long)
        for row in range(2):
            sees[row, 0, :, width * BLOCK : width * BLOCK + len(prefix[row])] = True
            for state, offset in enumerate(offsets):
                own = slice(state * BLOCK, (state + 1) * BLOCK)
                sees[row, 0, own, own] = True
                if offset:
                    sees[row, 0, own, own.start - BLOCK : own.start] = True
                where[row, own] = len(prefix[row]) + offset * BLOCK + torch.arange(BLOCK)
        ids = torch.tensor(states).flatten(1)
        cache.target_scratch(width * BLOCK, used)
        hidden = model.backbone(ids, where, sees, cache)
        residual = model.residual(ids, hidden, where, sees, cache)
        for row in range(2):
            for state, offset in enumerate(offsets):
                alone = torch.tensor([prefix[row] + (states[row][state - 1] if offset else []) + states[row][state]])
                at = torch.arange(alone.shape[1])[None]
                causal = (at[:, None] // BLOCK <= at[:, :, None] // BLOCK)[:, None]
                h_a = model.backbone(alone, at, causal)
                own = slice(state * BLOCK, (state + 1) * BLOCK)
                close(hidden[row, own], h_a[0, -BLOCK:])
                close(residual[row, own], model.residual(alone, h_a, at, causal)[0, -BLOCK:])

    first = [random_ids(22 + row, 3, BLOCK).tolist() for row in range(2)]
    first[0][0][1] = first[1][0][3] = MASK
    check(first, [0, 0, 1])
    layers = range(model.config.num_hidden_layers + model.config.num_nextn_predict_layers)
    cache.commit(torch.tensor([0]), torch.tensor([BLOCK]), torch.tensor([8]), BLOCK, layers)
    prefix[0] += first[0][1]
    check([random_ids(24 + row, 3, BLOCK).tolist() for row in range(2)], [0, 0, 0])


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@torch.no_grad()
def test_compiled_backbone_with_a_block_cache(random_model: MRPForCausalLM) -> None:
    """One graph without breaks, and no second one for the next round of the same shape."""
    graphs = []

    def counted(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward  # as backend="eager" does

    compiled = torch.compile(random_model.backbone, fullgraph=True, dynamic=False, backend=counted)
    caches = [random_model.block_cache(2, 16, 8, with_head=False) for _ in range(2)]
    positions = torch.arange(8).expand(2, 8)
    mask = (positions[:, None] // BLOCK <= positions[:, :, None] // BLOCK)[:, None]
    for cache in caches:
        cache.target_slots(0, 8)
        random_model.backbone(random_ids(30, 2, 8), positions, mask, cache)
    sees = torch.ones(2, 1, 8, 16, dtype=torch.bool)
    sees[0, 0, :, 12:] = False
    for turn in range(3):
        ids = random_ids(31 + turn, 2, 8)
        results = []
        for cache, backbone in zip(caches, (random_model.backbone, compiled), strict=True):
            cache.target_scratch(8, 8)
            results.append(backbone(ids, positions + 4 * turn, sees, cache))
            cache.commit(torch.tensor([1]), torch.tensor([4]), torch.tensor([4]), BLOCK, range(2))
        close(results[1], results[0])
    assert len(graphs) == 1
