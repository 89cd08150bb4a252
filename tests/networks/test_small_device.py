"""Every mode, scoring and training on a stand-in for a device that has no float64, no pinned memory
and none of the operations that torch lacks on MPS, and that scatters only what is contiguous: with
the texts of the same model on a CPU."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mrp_trainer.loading import default_device, load_model
from mrp_trainer.picture.facts import read_decode
from mrp_trainer.train.measures import Measures
from mrp_trainer.train.objectives import HeadObjective, block_diffusion
from mrp_trainer.train.packed import PackedBatch
from mrp_trainer.train.reveals import Reveals
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._pytree import tree_map
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from modeling_mrp import MRPForCausalLM
from modeling_mrp.generate.option_table import DECODINGS, DRAFTING, PUBLISHED, REMASK_RULES, TARGETS
from modeling_mrp.kernels.pick import gumbel_noise
from modeling_mrp.networks.picker import Picker, Spots
from modeling_mrp.rules.draft import gumbel, noise_key
from tests.support.devices import SMALL, Placed, place, small_device
from tests.support.families import twin_of
from tests.support.helpers import PROMPTS, collate, left_padded, sample
from tests.support.places import TINY
from tests.support.random_cases import MASK, make_model

SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampled": {"do_sample": True, "top_k": 0, "seed": 5},
    "truncated": {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.9, "seed": 5},
}
LIVELY: dict[str, Any] = {
    "confidence_threshold": 0.04,
    "low_threshold": 0.03,
    "entropy_threshold": 5.0,
    "residual_delta": 0.3,
}
MODES = [{"decoding": mode, "target": target} for mode in DRAFTING for target in TARGETS]
MODES += [{"decoding": "mrp_remask", "remask_rule": rule} for rule in REMASK_RULES]
MODES += [{"decoding": "mrp_direct", "mrp_steps": 2}, *({"decoding": rule} for rule in TARGETS)]


def there(values: Any) -> Any:
    """Put tensors on `SMALL`."""
    return tree_map(lambda leaf: leaf.to(SMALL) if isinstance(leaf, Tensor) else leaf, values)


def here(values: Any) -> Any:
    """Bring tensors back to the CPU."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, values)


@pytest.fixture(scope="module")
def both() -> tuple[MRPForCausalLM, MRPForCausalLM]:
    """One float32 model on the CPU, and on `SMALL`."""
    on_cpu, on_small = make_model().float(), make_model().float()
    place(on_small, SMALL)
    return on_cpu, on_small


Call = Callable[[MRPForCausalLM, Callable[[Any], Any]], Any]


def same_on_both(both: tuple[MRPForCausalLM, MRPForCausalLM], call: Call) -> set[str]:
    """Compare what a call gives on both devices, integers exactly; return the operations that ran
    on `SMALL`."""
    with sdpa_kernel(SDPBackend.MATH):  # other devices have no other
        expected = call(both[0], lambda values: values)
    with small_device() as operations:
        found = here(call(both[1], there))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)
    assert {"aten::mm", "aten::_to_copy"} <= operations.names
    return operations.names


def decoded(options: dict[str, Any], prompts: list[list[int]] = PROMPTS) -> Call:
    """Make a call of `generate` that returns texts, steps, log-probabilities and counts."""

    def call(model: MRPForCausalLM, put: Callable[[Any], Any]) -> Any:
        common = {
            "max_new_tokens": 7,
            "return_dict_in_generate": True,
            "eos_token_id": None,
            **LIVELY,
        }
        out: Any = model.generate(**put(left_padded(prompts)), **{**common, **put(options)})
        kept = {
            "ids": out.sequences,
            "steps": out.reveal_step,
            "logprobs": out.token_logprobs,
            **vars(out.stats),
        }
        return {**kept, "scores": out.scores, "logits": out.logits}

    return call


# The device itself


@pytest.mark.parametrize(
    ("run", "why"),
    [
        (lambda x: x.double(), "float64"),
        (lambda x: torch.zeros(2, dtype=torch.float64, device=SMALL), "float64"),
        (lambda x: torch.zeros(2, dtype=torch.float64).to(SMALL), "float64"),
        (lambda x: torch.zeros(2).pin_memory(), "pins memory"),
        (
            lambda x: x.scatter(1, torch.zeros(2, 3, dtype=torch.long).to(SMALL).t(), 0.0),
            "not contiguous",
        ),
        (
            lambda x: x.scatter(1, torch.zeros(1, 1, dtype=torch.long).to(SMALL).expand(2, 2), 0.0),
            "not contiguous",
        ),
        (
            lambda x: (
                x.long()
                .t()
                .index_put_((torch.tensor([0]),), torch.ones(1, 3, dtype=torch.long).to(SMALL))
            ),
            "int64",
        ),
        (lambda x: torch.mm(x, x.t(), out_dtype=torch.float32), "none on MPS"),
    ],
)
def test_the_device_refuses(run: Callable[[Tensor], Any], why: str) -> None:
    with small_device():
        x = torch.ones(3, 2).to(SMALL)
        assert isinstance(x, Placed)
        assert (x + 1.5).sum().item() == 15
        with pytest.raises(RuntimeError, match=f"does not run on {SMALL}: .*{why}"):
            run(x)


# Decoding


@pytest.mark.parametrize("mode", MODES, ids=lambda mode: " ".join(map(str, mode.values())))
def test_every_mode_is_as_on_a_cpu(mode: dict[str, Any], both: Any) -> None:
    rule = mode.get("target", mode["decoding"])  # rules from papers differ on the host alone
    for sampling in ("greedy", "truncated") if rule in PUBLISHED else SAMPLINGS:
        same_on_both(
            both, decoded({"max_new_tokens": 5, **mode, **SAMPLINGS[sampling]}, PROMPTS[:2])
        )


def test_every_mode_was_among_them() -> None:
    assert {mode["decoding"] for mode in MODES} == set(DECODINGS)


DRAFTED: dict[str, Any] = {
    "decoding": "mrp_spec",
    "target": "static",
    "num_draft_states": 6,
    "draft_passes": 2,
}
OTHERS: dict[str, dict[str, Any]] = {
    "a batch of copies": {"num_return_sequences": 2, **SAMPLINGS["sampled"]},
    "scores and logits": {
        "output_scores": True,
        "output_logits": True,
        **SAMPLINGS["truncated"],
        **DRAFTED,
    },
    "infilling": {
        "infill_ids": torch.tensor([[MASK, 7, MASK, MASK, 9]] * 3),
        "output_scores": True,
        **DRAFTED,
    },
    "an end": {
        "eos_token_id": [3, 5, *range(20, 50)],
        "min_new_tokens": 3,
        **SAMPLINGS["sampled"],
        **DRAFTED,
    },
    "bans": {
        "bad_words_ids": [[4], [7, 8]],
        "no_repeat_ngram_size": 2,
        **SAMPLINGS["sampled"],
        **DRAFTED,
    },
    "a processor": {
        "logits_processor": LogitsProcessorList([RepetitionPenaltyLogitsProcessor(1.5)]),
        **DRAFTED,
    },
    "other truncations": {
        "min_p": 0.02,
        "typical_p": 0.9,
        "top_h": 0.6,
        **SAMPLINGS["sampled"],
        **DRAFTED,
    },
    "cutoffs": {"epsilon_cutoff": 0.01, "eta_cutoff": 0.02, **SAMPLINGS["truncated"], **DRAFTED},
    "as many as pay": {
        "decoding": "self_spec",
        "target": "entropy_bound",
        "num_draft_states": "auto",
        "round_costs": {"states": [1, 8], "backbone": [1.0, 2.0]},  # else as each device has them
    },
}


@pytest.mark.parametrize("name", OTHERS)
def test_options_are_as_on_a_cpu(name: str, both: Any) -> None:
    same_on_both(both, decoded(OTHERS[name]))


class Heard(list[Any]):
    """A streamer that keeps what it gets."""

    def put(self, ids: Tensor) -> None:
        self.append(ids.tolist())

    def end(self) -> None:
        self.append([-1])


def test_streams_stopping_and_a_cache_are_as_on_a_cpu(both: Any) -> None:
    def call(model: MRPForCausalLM, put: Callable[[Any], Any]) -> Any:
        heard, common = (
            [Heard(), Heard(), Heard()],
            {"return_dict_in_generate": True, "eos_token_id": None, **DRAFTED},
        )
        stops = [lambda ids, scores, **_: ids[:, -1] == 7]
        first: Any = model.generate(
            **put(left_padded(PROMPTS)),
            streamer=heard,
            stopping_criteria=stops,
            max_new_tokens=9,
            **common,
        )
        again = model.generate(
            **put(left_padded(PROMPTS)),
            past_key_values=first.past_key_values,
            num_return_sequences=1,
            max_new_tokens=6,
            **common,
        )
        return list(map(list, heard)), first.sequences, again.sequences

    same_on_both(both, call)


@pytest.mark.parametrize("sampled", [False, True])
def test_a_shortlist_is_as_on_a_cpu(sampled: bool, both: Any) -> None:
    """Asked of the picker: `generate` lists only where a weight is no tensor of another class, as
    those of the stand-in are."""
    hidden = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))

    def call(model: MRPForCausalLM, put: Callable[[Any], Any]) -> Any:
        picker = Picker(
            model.lm_head.weight.detach(),
            MASK,
            sample=sampled,
            candidates=64 if sampled else 9,
            shortlist=9,
            entropy=True,
        )
        picks = picker(put(hidden))
        return picks, picker.among(put(hidden.flip(0)), picks.candidates, Spots([], model.device))

    assert "aten::scatter" in same_on_both(both, call)


def test_families_with_experts_and_with_shifted_states(tmp_path: Any) -> None:
    for name in ("sdar_moe", "fast_dllm_v2"):
        (tmp_path / name).mkdir()
        on_cpu = twin_of(name, 4, tmp_path / name).model.float()
        on_cpu.config._experts_implementation = (
            "eager"  # the other counts by a type that is not a CPU's
        )
        on_small = copy.deepcopy(on_cpu)
        place(on_small, SMALL)
        same_on_both((on_cpu, on_small), decoded({"max_new_tokens": 5, **DRAFTED}))
        same_on_both((on_cpu, on_small), scored)


def test_the_noise_of_sampling_is_the_hosts(both: Any) -> None:
    """Keys to the bit, noise to float32's precision."""
    table = [(3, 7, 2), (1 << 61, 31000, 16), (0, 0, 1)]
    keys = [noise_key(*row) for row in table]
    with small_device():
        on_device = noise_key(*torch.tensor(table).to(SMALL).unbind(1))
        noise = gumbel_noise(on_device, 64, torch.float32)
    assert on_device.tolist() == keys
    expected = torch.from_numpy(gumbel(keys, torch.arange(64).expand(3, -1).numpy()))
    torch.testing.assert_close(noise.cpu().double(), expected, rtol=1e-5, atol=1e-6)


# Scores, logits, training


def scored(model: MRPForCausalLM, put: Callable[[Any], Any]) -> Any:
    inputs = put(left_padded(PROMPTS))
    labels = torch.where(inputs["attention_mask"] > 0, inputs["input_ids"], -100)
    return [
        vars(model.score(**inputs, labels=labels, tokens_per_forward=tokens))
        for tokens in (1, 30, 512)
    ]


def test_scores_are_as_on_a_cpu(both: Any) -> None:
    same_on_both(both, scored)


def test_logits_loss_and_gradients_are_as_on_a_cpu() -> None:
    def call(model: MRPForCausalLM, put: Callable[[Any], Any]) -> Any:
        inputs = put(left_padded(PROMPTS))
        with torch.no_grad():
            logits = model(**inputs).logits
        loss = model(**inputs, labels=inputs["input_ids"]).loss
        loss.backward()
        return logits, loss.detach(), model.model.layers[0].mlp.up_proj.weight.grad

    fresh = make_model().float(), make_model().float()
    place(fresh[1], SMALL)
    same_on_both(fresh, call)
    with small_device():  # noise drawn on the device
        inputs = there(left_padded(PROMPTS))
        assert fresh[1].train()(**inputs, labels=inputs["input_ids"]).loss.item() > 0


def objectives() -> Iterator[Any]:
    yield block_diffusion
    yield HeadObjective(Reveals("on_policy", 0.5), unroll=2, order_weight=0.5)
    yield HeadObjective(Reveals("random", 0.0))


@pytest.mark.parametrize(
    "objective", objectives(), ids=["backbone", "head", "head of random reveals"]
)
def test_a_step_of_training(objective: Any) -> None:
    """Of AdamW. Random numbers are float32 there, so that only the backbone's loss has to be that
    of a CPU."""
    batch = vars(collate([sample(index, 16, 6) for index in range(4)]))

    def call(model: MRPForCausalLM, put: Callable[[Any], Any]) -> Any:
        trained = model.mrp_head if isinstance(objective, HeadObjective) else model.model
        model.requires_grad_(False)
        trained.requires_grad_(True)
        optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-3, foreach=False)
        loss, measured = objective(model, PackedBatch(**put(batch)))
        loss.backward()
        optimizer.step()
        measures = Measures()
        measures.add(measured)
        measures.add(measured)
        return loss.detach(), trained.layers[0].mlp.up_proj.weight.detach(), dict(measures._sums)

    fresh = make_model().float(), make_model().float()
    place(fresh[1], SMALL)
    expected = call(fresh[0], lambda values: values)
    with small_device() as operations:
        found = here(call(fresh[1], there))
    assert "aten::mm" in operations.names
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, check_dtype=False)


# Commands


def test_the_facts_of_a_picture(both: Any, tiny_tokenizer: Any) -> None:
    with small_device():
        out = both[1].generate(
            **there(left_padded(PROMPTS[:1])), max_new_tokens=6, return_dict_in_generate=True
        )
        facts = read_decode(out, tiny_tokenizer)
    assert all(0 < token.probability <= 1 for token in facts.tokens)


def test_commands_take_the_gpu_that_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_device().type == ("cuda" if torch.cuda.is_available() else "cpu")
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("mps")
    )
    assert default_device().type == "mps"
    with pytest.raises(ValueError, match="which an Apple GPU"):
        load_model(str(TINY), "float64", None)


def test_float64_on_an_apple_gpu_is_refused_with_its_remedy() -> None:
    with pytest.raises(ValueError, match="which an Apple GPU"):
        load_model(str(TINY), "float64", "mps")
