"""The training data by hand, the losses against unpacked twins, and the Trainer: it learns, freezes, logs and resumes."""

import math
from collections.abc import Iterable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import make_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn
from transformers import PreTrainedTokenizerFast, set_seed

import trainer.data as data
from modeling_mrp import MRPConfig, MRPForCausalLM
from modeling_mrp.diffusion_mrp import PackedBatch
from trainer.data import DiffusionCollator, LengthBucketSampler, Sample, TaskDataset, encode
from trainer.optimizer import MuonAdamW
from trainer.tasks import Problem, make_problem
from trainer.trainer import MRPTrainer, MRPTrainingArguments

BLOCK, MASK, PAD = 4, 60, 0  # of make_model
ALPHA = 1e-4  # false-alarm rate of each chi-square test; seeds are fixed


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    expected = counts.sum() * probabilities.double()
    assert expected.min() >= 5
    statistic = ((counts - expected) ** 2 / expected).sum()
    return torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2, dtype=torch.float64), statistic / 2).item()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Whole words of 300 problems; other words are unknown."""
    splitter = pre_tokenizers.Whitespace()
    words = {"user", "assistant", ":"}
    for index in range(150):
        for family in ("math", "code"):
            problem = make_problem(family, "train", index)
            words |= {word for text in (problem.prompt, problem.answer) for word, _ in splitter.pre_tokenize_str(text)}
    vocab = {word: i for i, word in enumerate(["<pad>", "<end>", "<mask>", "<unk>", *sorted(words)])}
    words_only = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words_only.pre_tokenizer = splitter
    return PreTrainedTokenizerFast(
        tokenizer_object=words_only,
        pad_token="<pad>",
        eos_token="<end>",
        mask_token="<mask>",
        unk_token="<unk>",
        chat_template="{% for m in messages %}{{ m['role'] }} : {{ m['content'] }} {% endfor %}"
        "{% if add_generation_prompt %}assistant :{% endif %}",
    )


def sample(index: int, length: int, response_start: int) -> Sample:
    rng = np.random.default_rng(index)
    return Sample(index, rng.integers(1, 50, length), response_start)


def collate(samples: list[Sample], **options: Any) -> PackedBatch:
    return PackedBatch(**DiffusionCollator(BLOCK, MASK, PAD, **options)(samples))


# ------------------------------------------------------------------------------------------------ dataset


def test_encode_is_a_chat_turn_or_plain_text(tokenizer: PreTrainedTokenizerFast) -> None:
    chat = Problem("math", "Bo has 3 pens .", "#### 3", number=3)
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in encode(chat, tokenizer)]
    assert words == [["user", ":", "Bo", "has", "3", "pens", ".", "assistant", ":"], ["####", "3", "<end>"]]
    text = Problem("source", "Bo has", "3 pens .")
    words = [tokenizer.convert_ids_to_tokens(ids) for ids in encode(text, tokenizer)]
    assert words == [["Bo", "has"], ["3", "pens", "."]]


class NoTokenizer:
    pad_token_id = 9


def test_an_item_is_prompt_response_and_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[tuple[Any, ...]] = []
    pieces = ([1, 2, 3, 4, 5], [6, 7])
    monkeypatch.setattr(data, "make_problem", lambda *arguments: made.append(arguments))
    monkeypatch.setattr(data, "encode", lambda problem, tokenizer: pieces)
    dataset = TaskDataset(NoTokenizer(), 10, {"code": 1.0}, "tune", block_size=4, seed=5)  # type: ignore[arg-type]
    item = dataset[3]
    assert (item.index, item.ids.tolist(), item.response_start) == (3, [1, 2, 3, 4, 5, 6, 7, 9], 5)
    assert made == [("code", "tune", 3, 5)]
    cut = TaskDataset(NoTokenizer(), 10, {"code": 1.0}, block_size=4, max_length=6)[0]  # type: ignore[arg-type]
    assert (cut.ids.tolist(), cut.response_start) == ([1, 2, 3, 4, 5, 6, 9, 9], 5)
    assert len(dataset) == 10
    for outside in (-1, 10):
        with pytest.raises(IndexError, match=str(outside)):
            dataset[outside]


def test_items_are_a_function_of_seed_and_index(tokenizer: PreTrainedTokenizerFast) -> None:
    families: dict[Any, float] = {"math": 1.0, "code": 1.0, "source": 0.2}
    first, again, other, longer = (
        TaskDataset(tokenizer, size, families, seed=seed) for size, seed in ((20, 3), (20, 3), (20, 4), (99, 3))
    )
    backwards = {i: again[i] for i in reversed(range(20))}
    for i in range(20):
        for twin in (backwards[i], longer[i]):
            assert twin.ids.tolist() == first[i].ids.tolist()
            assert twin.response_start == first[i].response_start
    assert sum(first[i].ids.tolist() == other[i].ids.tolist() for i in range(20)) == 0
    assert len({tuple(first[i].ids) for i in range(20)}) == 20


def test_family_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shares need not sum to 1; chi-square over 4000 items."""
    chosen: list[str] = []
    monkeypatch.setattr(data, "make_problem", lambda family, *arguments: chosen.append(family))
    monkeypatch.setattr(data, "encode", lambda problem, tokenizer: ([1] * 16, [2] * 16))
    dataset = TaskDataset(NoTokenizer(), 4000, {"math": 5, "source": 2, "code": 1})  # type: ignore[arg-type]
    for i in range(4000):
        dataset[i]
    counts = torch.tensor([chosen.count(family) for family in ("math", "source", "code")])
    assert chi_square_p(counts, torch.tensor([5 / 8, 2 / 8, 1 / 8])) > ALPHA
    assert counts.sum() == 4000


class Lengths:
    """Stands for a dataset: samples of given lengths and response starts."""

    def __init__(self, lengths: Iterable[tuple[int, int]]) -> None:
        self.samples = [Sample(i, np.zeros(length), start) for i, (length, start) in enumerate(lengths)]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def sampler(self, batch_size: int) -> LengthBucketSampler:
        return LengthBucketSampler(self, batch_size)  # type: ignore[arg-type]


def random_lengths(count: int) -> Lengths:
    rng = np.random.default_rng(0)
    return Lengths((16 * int(rng.integers(2, 9)), int(rng.integers(1, 32))) for _ in range(count))


@pytest.mark.parametrize("size", [0, 1, 3, 47, 48, 49, 200])
def test_the_sampler_visits_each_index_once(size: int) -> None:
    """With batches of 3 a window is 48 samples."""
    sampler = random_lengths(size).sampler(3)
    order = list(sampler)
    assert sorted(order) == list(range(size))
    assert len(sampler) == size
    assert list(sampler) == order  # a resumed run sees the same batches
    if size == 200:
        assert order != sorted(order)
        for begin in range(0, 192, 48):
            assert sorted(order[begin : begin + 48]) == list(range(begin, begin + 48))
        assert list(random_lengths(100).sampler(3))[:96] == order[:96]


def test_samples_of_like_cost_meet_in_a_batch() -> None:
    """A packed row holds two noisy copies of the response's blocks and the whole text: 3 * length - 2 * response_start."""
    dataset = random_lengths(64)
    cost = [3 * len(s.ids) - 2 * s.response_start for s in dataset.samples]
    order = list(dataset.sampler(4))
    batches = sorted(sorted(cost[i] for i in order[begin : begin + 4]) for begin in range(0, 64, 4))
    assert sum(batches, []) == sorted(cost)  # noqa: RUF017 - 16 short lists
    ascending = sorted(range(64), key=lambda i: cost[i])
    assert order != ascending  # short batches do not all come first


# ------------------------------------------------------------------------------------------------ collator


def test_the_layout_of_a_batch() -> None:
    """A: 12 tokens, the response from 6 on, so its noisy blocks begin at 4. B: 8 tokens, the response from 4 on."""
    a, b = sample(0, 12, 6), sample(1, 8, 4)
    batch = collate([a, b])
    a_noisy, b_noisy = list(range(4, 12)), [4, 5, 6, 7]
    assert batch.view.tolist() == [
        [1] * 8 + [2] * 8 + [0] * 12,
        [1] * 4 + [-1] * 4 + [2] * 4 + [-1] * 4 + [0] * 8 + [-1] * 4,
    ]
    assert batch.position_ids.tolist() == [
        a_noisy + a_noisy + list(range(12)),
        b_noisy + [0] * 4 + b_noisy + [0] * 4 + list(range(8)) + [0] * 4,
    ]
    assert batch.sample.tolist() == [[0] * 28] * 2
    assert batch.response_tokens == 6 + 4
    a_ids, b_ids = a.ids.tolist(), b.ids.tolist()
    assert batch.target_ids.tolist() == [
        a_ids[4:] + a_ids[4:] + a_ids,
        b_ids[4:] + [PAD] * 4 + b_ids[4:] + [PAD] * 4 + b_ids + [PAD] * 4,
    ]
    masked = batch.input_ids == MASK
    assert torch.equal(batch.input_ids[~masked], batch.target_ids[~masked])
    assert torch.equal(masked, batch.supervised)
    assert batch.weight.unique().tolist() == [0, 1]
    single = collate([a, b], copies=1)
    assert single.view.tolist() == [[1] * 8 + [0] * 12, [1] * 4 + [-1] * 4 + [0] * 8 + [-1] * 4]
    assert torch.equal(single.input_ids[0, :8], batch.input_ids[0, :8])  # the same noise


def test_complementary_copies_mask_every_response_token_once() -> None:
    for index in range(50):
        length, start = 4 * (index % 5 + 1), index % 4
        batch = collate([sample(index, length, start)])
        times = torch.zeros(length, dtype=torch.long)
        times.index_add_(0, batch.position_ids[0, batch.supervised[0]], torch.ones(int(batch.supervised.sum())).long())
        assert times.tolist() == [0] * start + [1] * (length - start)
        assert (batch.view[batch.supervised] > 0).all()


def test_inverse_levels() -> None:
    """A block's masked tokens weigh 1 / t in the first copy and 1 / (1 - t) in the second, a t for each block."""
    batch = collate([sample(i, 40, 0) for i in range(20)], inverse_level=True)
    assert torch.equal(batch.supervised, batch.input_ids == MASK)
    checked, levels = 0, set()
    for row in range(20):
        for block in range(10):
            here = (batch.position_ids[row] // BLOCK == block) & batch.supervised[row]
            first, second = (batch.weight[row, here & (batch.view[row] == copy)].unique() for copy in (1, 2))
            assert len(first) <= 1
            assert len(second) <= 1
            if len(first) and len(second):
                assert (1 / first + 1 / second).item() == pytest.approx(1, abs=1e-5)
                levels.add(first.item())
                checked += 1
    assert checked == len(levels) > 50


def test_each_block_draws_its_own_level() -> None:
    """With t ~ U(0, 1] a block of 4 has 0 to 4 masks, each with probability 1/5, and two blocks of a sample are
    independent: chi-square of the pairs of counts in 2500 samples over 25 cells."""
    pairs = []
    for begin in range(0, 2500, 500):
        masked = collate([sample(i, 8, 0) for i in range(begin, begin + 500)], copies=1).supervised[:, :8]
        pairs.append(masked.view(500, 2, 4).sum(-1))
    counts = torch.cat(pairs)
    assert chi_square_p((5 * counts[:, 0] + counts[:, 1]).bincount(minlength=25), torch.full((25,), 0.04)) > ALPHA


def test_a_masked_token_is_masked_with_the_level_of_its_weight() -> None:
    """Given t the first of four tokens is masked with probability t, whatever another shows: by E[1{masked}] = E[t] in two
    halves of t as seen from the weight of a masked neighbour. Density of t given one mask is 2t: E[t | t < 1/2] = 1/3 and
    E[t | t > 1/2] = 7/9; each share within 4.5 standard errors (false-alarm rate 7e-6 each)."""
    batch = collate([sample(i, 4, 0) for i in range(4000)], copies=1, inverse_level=True)
    masked, weight = batch.supervised[:, :4], batch.weight[:, :4]
    known = masked[:, 1]
    level = 1 / weight[known, 1]
    for half, share in ((level < 0.5, 1 / 3), (level >= 0.5, 7 / 9)):
        n = int(half.sum())
        assert n > 300
        assert masked[known, 0][half].double().mean().item() == pytest.approx(
            share, abs=4.5 * math.sqrt(share * (1 - share) / n)
        )


def test_noise_is_a_function_of_seed_and_index() -> None:
    samples = [sample(i, 16, 3) for i in range(6)]
    batch = collate(samples, seed=7)
    again = collate(list(reversed(samples)), seed=7)
    assert torch.equal(again.input_ids.flip(0), batch.input_ids)
    assert torch.equal(collate(samples[2:3], seed=7).input_ids[0], batch.input_ids[2])
    assert not torch.equal(collate(samples, seed=8).supervised, batch.supervised)
    copies = [Sample(i, samples[0].ids, 3) for i in range(6)]  # one text under six indices
    assert len(collate(copies, seed=7).supervised.unique(dim=0)) == 6


# ------------------------------------------------------------------------------------------------ losses


def new_trainer(model: MRPForCausalLM, folder: Path, dataset: Any = None, **options: Any) -> MRPTrainer:
    arguments = MRPTrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **{"save_strategy": "no", "logging_strategy": "no", **options},
    )
    config = model.config
    collator = DiffusionCollator(config.block_size, config.mask_token_id, config.pad_token_id)
    return MRPTrainer(model=model, args=arguments, train_dataset=dataset, data_collator=collator)


def blocks_of(batch: PackedBatch, samples: list[Sample]) -> Iterable[tuple[int, list[int], list[int], int]]:
    """(row, columns of a noisy block, clean tokens before it, where it starts) for every noisy block of a batch."""
    for row, sample in enumerate(samples):
        for copy in range(1, int(batch.view.max()) + 1):
            columns = (batch.view[row] == copy).nonzero()[:, 0]
            for begin in range(0, len(columns), BLOCK):
                at = columns[begin : begin + BLOCK].tolist()
                start = int(batch.position_ids[row, at[0]])
                yield row, at, sample.ids[:start].tolist(), start


def run_alone(model: MRPForCausalLM, ids: list[int], hidden: Tensor | None = None) -> Tensor:
    """[length, hidden] of one unpacked sequence: the backbone, or the head on given hidden states."""
    position = torch.arange(len(ids))[None]
    mask = (position[:, None] // BLOCK <= position[:, :, None] // BLOCK)[:, None]
    tensor = torch.tensor([ids])
    return (model.backbone(tensor, position, mask) if hidden is None else model.residual(tensor, hidden[None], position, mask))[
        0
    ]


SAMPLES = [sample(2, 16, 6), sample(3, 12, 8)]


@pytest.mark.parametrize("inverse_level", [False, True])
def test_block_diffusion_loss_equals_the_loop_over_blocks(inverse_level: bool, tmp_path: Path) -> None:
    """Qwen3's norms and the package's cross-entropy are float32, hence 1e-5."""
    model = make_model()
    batch = collate(SAMPLES, inverse_level=inverse_level)
    loss = new_trainer(model, tmp_path).compute_loss(model, vars(batch))
    total = 0.0
    for row, at, clean, start in blocks_of(batch, SAMPLES):
        logits = model.lm_head(run_alone(model, clean + batch.input_ids[row, at].tolist())[start:])
        for i, column in enumerate(at):
            if batch.weight[row, column] > 0:
                total += batch.weight[row, column].item() * F.cross_entropy(logits[i], batch.target_ids[row, column]).item()
    assert int(batch.supervised.sum()) == 14
    assert loss.item() == pytest.approx(total / 14, rel=1e-5)


def confident_model(scale: float) -> MRPForCausalLM:
    """Sharper logits, so that eager reveals happen: at 6 a quarter of the masked positions is above 0.95."""
    model = make_model()
    with torch.no_grad():
        model.lm_head.weight *= scale
    return model


def naive_kl(model: MRPForCausalLM, student: Tensor, teacher: Tensor) -> float:
    """KL( softmax(B) || softmax(A + C) ) of one position, from hidden states [hidden]."""
    b, a = model.lm_head(teacher).log_softmax(-1), model.lm_head(student).log_softmax(-1)
    return (b.exp() * (b - a)).sum().item()


def test_mrp_loss_equals_the_loop_over_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two unrolled steps. The states that `_reveal` and the left-out tokens draw are recorded and then taken as given:
    acc_0 = h_A, acc_k = acc_{k-1} + Head(embed(x^(k)), acc_{k-1}) block by block, each step against the backbone at x^(k)."""
    model = confident_model(6)
    batch = collate(SAMPLES)
    trainer = new_trainer(model, tmp_path, objective="mrp", unroll=2)
    states: list[tuple[Tensor, Tensor]] = []
    left_out: list[Tensor] = []
    reveal, one_per_block = trainer._reveal, trainer._one_per_block

    def recorded_reveal(*arguments: Any) -> tuple[Tensor, Tensor]:
        states.append(reveal(*arguments))
        return states[-1]

    def recorded_lot(*arguments: Any) -> Tensor:
        left_out.append(one_per_block(*arguments))
        return left_out[-1]

    monkeypatch.setattr(trainer, "_reveal", recorded_reveal)
    monkeypatch.setattr(trainer, "_one_per_block", recorded_lot)
    torch.manual_seed(0)
    loss = trainer.compute_loss(model, vars(batch))
    assert (len(states), len(left_out)) == (2, 1)
    sums = {"step 1": 0.0, "step 2": 0.0, "reread": 0.0, "kl_stale": 0.0, "reread_kl_stale": 0.0}
    with torch.no_grad():
        for row, at, clean, start in blocks_of(batch, SAMPLES):
            h_a = acc = run_alone(model, clean + batch.input_ids[row, at].tolist())
            for step, (ids, masked) in enumerate(states):
                revealed = clean + ids[row, at].tolist()
                acc = torch.cat([h_a[:start], (acc + run_alone(model, revealed, acc))[start:]])
                h_b = run_alone(model, revealed)
                for i, column in enumerate(at):
                    if masked[row, column]:
                        sums[f"step {step + 1}"] += naive_kl(model, acc[start + i], h_b[start + i])
                        sums["kl_stale"] += (step == 0) * naive_kl(model, h_a[start + i], h_b[start + i])
                    if step == 0 and left_out[0][row, column]:
                        again = list(revealed)
                        again[start + i] = MASK
                        teacher = run_alone(model, again)[start + i]
                        sums["reread"] += naive_kl(model, acc[start + i], teacher)
                        sums["reread_kl_stale"] += naive_kl(model, h_a[start + i], teacher)
    assert min(sums.values()) > 1e-3
    assert loss.item() == pytest.approx((sums["step 1"] + sums["reread"] + sums["step 2"]) / 2 / 14, rel=1e-4)
    counts = {"kl": int(states[0][1].sum()), "reread_kl": int(left_out[0].sum())}
    measured = {name: values[0].item() for name, values in trainer._measured.items()}
    assert measured == pytest.approx(
        {
            "kl_stale": sums["kl_stale"] / counts["kl"],
            "kl_head": sums["step 1"] / counts["kl"],
            "reread_kl_stale": sums["reread_kl_stale"] / counts["reread_kl"],
            "reread_kl_head": sums["reread"] / counts["reread_kl"],
        },
        rel=1e-4,
    )


def test_what_a_training_step_reveals(tmp_path: Path) -> None:
    """The most confident masked position of every block, with the model's own token; eagerly, in about half of the blocks,
    also every position above a threshold of 0.2 to 0.95; and one of the revealed positions of each block is left out."""
    model = confident_model(6)
    samples = [sample(i, 44, 4) for i in range(30)]
    batch = collate(samples)
    trainer = new_trainer(model, tmp_path, objective="mrp")
    with torch.no_grad():
        hidden = model.packed_hidden_states(batch)
        logits = model.lm_head(hidden)
    logits[..., MASK] = -torch.inf
    confidence, favourite = logits.softmax(-1).max(-1)
    torch.manual_seed(0)
    ids, masked = trainer._reveal(model, batch, batch.input_ids, batch.supervised, hidden, False)
    eager_ids, eager_masked = trainer._reveal(model, batch, batch.input_ids, batch.supervised, hidden, True)
    left_out = trainer._one_per_block(batch, batch.supervised & ~eager_masked)
    more = sure = 0
    for row, at, _, _ in blocks_of(batch, samples):
        candidates = [column for column in at if batch.supervised[row, column]]
        revealed = [column for column in candidates if not masked[row, column]]
        eager = [column for column in candidates if not eager_masked[row, column]]
        ranked = sorted(candidates, key=lambda column: -confidence[row, column])
        assert revealed == ranked[:1]
        assert sorted(eager, key=lambda column: -confidence[row, column]) == ranked[: len(eager)]
        assert all(confidence[row, column] > 0.2 for column in eager if column not in revealed)
        assert int(left_out[row, at].sum()) == min(1, len(eager))
        assert all(column in eager for column in at if left_out[row, column])
        for column in at:
            for out, chosen in ((ids, revealed), (eager_ids, eager)):
                assert out[row, column] == (favourite if column in chosen else batch.input_ids)[row, column]
        if len(ranked) > 1 and confidence[row, ranked[1]] > 0.95:  # above every threshold
            sure += 1
            more += len(eager) > 1
    clean = batch.view == 0
    assert torch.equal(eager_ids[clean], batch.target_ids[clean])
    assert sure > 50
    assert abs(more - sure / 2) < 4.5 * math.sqrt(sure) / 2  # false-alarm rate 7e-6


@pytest.mark.parametrize("kind", ["sure", "tied"])
def test_a_training_step_reveals_one_position_of_a_block(kind: str, tmp_path: Path) -> None:
    """Also where every probability rounds to 1, and where all positions say the same: of equals the left one is revealed."""
    model, samples = confident_model(60), [sample(i, 44, 4) for i in range(10)]
    if kind == "tied":
        for layer in model.model.layers:  # tokens do not look at each other, so that all masks are alike
            nn.init.zeros_(layer.self_attn.o_proj.weight)
    batch = collate(samples)
    trainer = new_trainer(model, tmp_path, objective="mrp")
    with torch.no_grad():
        hidden = model.packed_hidden_states(batch)
    _, masked = trainer._reveal(model, batch, batch.input_ids, batch.supervised, hidden, False)
    for row, at, _, _ in blocks_of(batch, samples):
        candidates = [column for column in at if batch.supervised[row, column]]
        revealed = [column for column in candidates if not masked[row, column]]
        assert len(revealed) == min(1, len(candidates))
        if kind == "tied":
            assert revealed == candidates[:1]


# ------------------------------------------------------------------------------------------------ optimizer


def test_the_optimizer_splits_parameters_as_documented() -> None:
    model = make_model()
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = MuonAdamW(model, lr=0.01, muon_lr=0.02, weight_decay=0.1)
    groups = {type(part): [names[id(p)] for g in part.param_groups for p in g["params"]] for part in optimizer.parts}
    projections = [f"self_attn.{x}_proj" for x in "qkvo"] + [f"mlp.{x}_proj" for x in ("gate", "up", "down")]
    matrices = {f"{m}.layers.{i}.{x}.weight" for m in ("model", "mrp_head") for i in (0, 1) for x in projections}
    frozen = {"model.layers.0.mlp.up_proj.weight"}
    assert set(groups[torch.optim.Muon]) == matrices - frozen
    assert set(groups[torch.optim.AdamW]) == set(names.values()) - matrices
    assert sorted(sum(groups.values(), [])) == sorted(set(names.values()) - frozen)  # noqa: RUF017 - none twice
    settings = {type(p): [(g["lr"], g["weight_decay"]) for g in p.param_groups] for p in optimizer.parts}
    assert settings == {torch.optim.Muon: [(0.02, 0.1)], torch.optim.AdamW: [(0.01, 0.0)]}
    assert len(MuonAdamW(nn.Linear(2, 2), 0.01, 0.02).parts) == 1  # a module without layers is AdamW's alone


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)


def test_a_step_has_the_size_of_its_learning_rate() -> None:
    """AdamW's first step moves every entry by lr. Muon's is orthogonal up to its iteration's error (singular values 0.7 to
    1.2), times 0.2 muon_lr sqrt(max(rows, columns)): entries of about 0.2 muon_lr in root mean square, here of 32 x 32."""
    model = make_model()
    before = deepcopy(model.state_dict())
    optimizer = MuonAdamW(model, lr=0.01, muon_lr=0.5, weight_decay=0.0)
    give_gradients(model, 0)
    optimizer.step()
    moved = {name: value - before[name] for name, value in model.state_dict().items()}
    for name in ("lm_head.weight", "model.norm.weight", "mrp_head.eh_proj.weight"):
        torch.testing.assert_close(moved[name].abs(), torch.full_like(moved[name], 0.01), rtol=1e-4, atol=0)
    update = moved["model.layers.1.self_attn.q_proj.weight"] / 0.5
    assert update.square().mean().sqrt().item() == pytest.approx(0.2, rel=0.3)
    singular = torch.linalg.svdvals(update) / (0.2 * math.sqrt(32))
    assert singular.min() > 0.3  # a random matrix has some near 0
    assert singular.max() < 1.4
    for group in optimizer.param_groups:  # what a scheduler does reaches both parts
        group["lr"] = 0.0
    held = deepcopy(model.state_dict())
    optimizer.step()
    assert all(torch.equal(value, held[name]) for name, value in model.state_dict().items())


def test_the_optimizer_resumes_identically(tmp_path: Path) -> None:
    straight = make_model()
    optimizer = MuonAdamW(straight, lr=0.01, muon_lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    for step in range(3):
        give_gradients(straight, step)
        optimizer.step()
        schedule.step()
    resumed = deepcopy(straight)
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    restored = MuonAdamW(resumed, lr=9.0, muon_lr=9.0)  # the saved rates replace these
    restored.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    assert [g["lr"] for g in restored.param_groups] == [g["lr"] for g in optimizer.param_groups] == [0.02 / 4, 0.01 / 4]
    fresh, unrestored = deepcopy(straight), None
    unrestored = MuonAdamW(fresh, lr=0.01 / 4, muon_lr=0.02 / 4)
    for step in range(3, 6):
        for model, stepper in ((straight, optimizer), (resumed, restored), (fresh, unrestored)):
            give_gradients(model, step)
            for group in stepper.param_groups:
                group["lr"] *= 0.9
            stepper.step()
    for a, b, c in zip(straight.parameters(), resumed.parameters(), fresh.parameters(), strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)  # the moments matter


# ------------------------------------------------------------------------------------------------ trainer


def small_model(tokenizer: PreTrainedTokenizerFast, seed: int = 0, head_layers: int = 1) -> MRPForCausalLM:
    set_seed(seed)
    return MRPForCausalLM(
        MRPConfig(
            vocab_size=len(tokenizer),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            block_size=8,
            mask_token_id=tokenizer.mask_token_id,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            max_position_embeddings=256,
            initializer_range=0.1,
            num_nextn_predict_layers=head_layers,
        )
    )


def math_problems(tokenizer: PreTrainedTokenizerFast, size: int) -> TaskDataset:
    return TaskDataset(tokenizer, size, {"math": 1.0}, block_size=8)


RATES = {"learning_rate": 1e-2, "muon_learning_rate": 1e-2, "lr_scheduler_type": "constant"}


def test_block_diffusion_learns(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """30 steps of 8 problems; judged on 16 others. A uniform guess costs log(vocabulary); the head is not touched."""
    model = small_model(tokenizer)
    before = deepcopy(model.state_dict())
    options = {"max_steps": 30, "per_device_train_batch_size": 8, "logging_strategy": "steps", "logging_steps": 1}
    trainer = new_trainer(model, tmp_path, math_problems(tokenizer, 240), **options, **RATES)
    unseen = TaskDataset(tokenizer, 16, {"math": 1.0}, "tune", block_size=8)
    batch = trainer.data_collator([unseen[i] for i in range(16)])
    with torch.no_grad():
        first = trainer.compute_loss(model, batch).item()
    assert first == pytest.approx(math.log(len(tokenizer)), rel=0.1)
    trainer.train()
    with torch.no_grad():
        last = trainer.compute_loss(model, batch).item()
    assert last < 0.6 * first
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.7 * sum(losses[:5])
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("mrp_head"), name


def test_mrp_trains_the_head_alone(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """On a fixed set of 8 problems. A new head adds nothing, so the first line logs kl_head = kl_stale."""
    model = small_model(tokenizer)
    with torch.no_grad():  # a random backbone whose tokens look at each other and that is sure of something
        for parameter in model.model.parameters():
            parameter *= 3 if parameter.dim() == 2 else 1
        model.lm_head.weight *= 10
    before = deepcopy(model.state_dict())
    options = {"max_steps": 40, "per_device_train_batch_size": 8, "logging_strategy": "steps", "logging_steps": 1}
    trainer = new_trainer(model, tmp_path, math_problems(tokenizer, 8), objective="mrp", unroll=2, **options, **RATES)
    trainer.train()
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == (not name.startswith("mrp_head")), name
    lines = [line for line in trainer.state.log_history if "kl_head" in line]
    assert len(lines) == 40
    for line in lines:
        assert line["gap_closed"] == pytest.approx(1 - line["kl_head"] / line["kl_stale"])
    for name in ("kl", "reread_kl"):
        assert lines[0][f"{name}_stale"] > 1e-4
        assert lines[0][f"{name}_head"] == pytest.approx(lines[0][f"{name}_stale"], rel=1e-6)
    assert all(line["kl_head"] < line["kl_stale"] for line in lines[-8:])
    assert sum(line["gap_closed"] for line in lines[-8:]) / 8 > 0.25
    assert trainer._measured == {}


def test_log_lines_average_what_was_measured_since_the_last(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    trainer = new_trainer(small_model(tokenizer), tmp_path, objective="mrp")
    for stale, head in ((1.0, 0.5), (3.0, 0.5)):
        trainer._note("kl_stale", torch.tensor(stale))
        trainer._note("kl_head", torch.tensor(head))
    trainer.log({"loss": 1.0})
    trainer.log({"loss": 2.0})
    assert trainer.state.log_history[0] == {
        "loss": 1.0,
        "kl_stale": 2.0,
        "kl_head": 0.5,
        "gap_closed": 0.75,
        "step": 0,
        "epoch": 0,
    }
    assert trainer.state.log_history[1] == {"loss": 2.0, "step": 0, "epoch": 0}


@pytest.mark.parametrize("objective", ["block_diffusion", "mrp"])
def test_a_resumed_run_ends_with_the_same_weights(objective: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Six steps at once, against step 3's checkpoint taken up by a new trainer on other weights and another RNG state."""
    options = {
        "objective": objective,
        "max_steps": 6,
        "per_device_train_batch_size": 4,
        "save_strategy": "steps",
        "save_steps": 3,
        "warmup_steps": 2,
        **RATES,
        "lr_scheduler_type": "linear",
    }

    def run(seed: int, resume_from: Path | None) -> dict[str, Tensor]:
        model = small_model(tokenizer, seed)
        if objective == "mrp":
            nn.init.ones_(model.mrp_head.norm.weight)  # a head that answers, so that all of it learns
        trainer = new_trainer(model, tmp_path, math_problems(tokenizer, 24), **options)
        torch.manual_seed(seed)
        trainer.train(resume_from_checkpoint=str(resume_from) if resume_from else None)
        assert trainer.state.global_step == 6
        return model.state_dict()

    straight = run(0, None)
    resumed = run(1, tmp_path / "checkpoint-3")
    halfway = MRPForCausalLM.from_pretrained(tmp_path / "checkpoint-3").state_dict()
    learns = "mrp_head." if objective == "mrp" else "model."
    for name, value in straight.items():
        assert torch.equal(resumed[name], value), name
        if name.startswith(learns):
            assert not torch.equal(halfway[name], value), name


@pytest.mark.parametrize(
    ("options", "head_layers", "message"),
    [
        ({"objective": "mpr"}, 1, "objective is 'mpr': choose"),
        ({"unroll": 0}, 1, "unroll is 0: at least 1"),
        ({"objective": "mrp"}, 0, "needs a model with a head: set num_nextn_predict_layers"),
    ],
)
def test_rejected_values(
    options: dict[str, Any], head_layers: int, message: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        new_trainer(small_model(tokenizer, head_layers=head_layers), tmp_path, **options)
