"""Parts 1, 3, 5 and 11: `generate` as it is called everywhere."""

import pickle
import pydoc
import sys
import threading
from pathlib import Path
from typing import Any

import torch
from habits import (
    CHECKPOINT,
    QUESTION,
    QUESTIONS,
    asked,
    habit,
    in_a_process,
    model,
    new_model,
    refused,
    same,
    tokenizer,
    tried,
)
from transformers import StoppingCriteria, TextIteratorStreamer, pipeline

import modeling_mrp


@habit(0, "the package is the one from the wheel")
def installed() -> None:
    for name in ("modeling_mrp", "mrp_trainer"):
        __import__(name)
        where = Path(sys.modules[name].__file__ or "").resolve()
        assert Path(sys.prefix).resolve() in where.parents, f"{name} comes from {where}"


@habit(1, "generate(do_sample=False, temperature=0.0) decodes greedily")
def temperature_0() -> None:
    inputs = asked(QUESTION)
    cold = model().generate(**inputs, do_sample=False, temperature=0.0, max_new_tokens=16)
    assert same(cold, model().generate(**inputs, do_sample=False, max_new_tokens=16))


@habit(1, "a text-generation pipeline takes temperature=0.0")
def pipeline_at_temperature_0() -> None:
    pipe = pipeline("text-generation", model=model(), tokenizer=tokenizer())
    chat = [{"role": "user", "content": QUESTION}]
    cold, plain = (pipe(chat, max_new_tokens=16, do_sample=False, **more) for more in ({"temperature": 0.0}, {}))
    assert cold == plain


@habit(1, "AutoTokenizer runs no code, and asks for none where trust_remote_code is False")
def untrusted_tokenizer() -> None:
    code = f"""
import builtins, sys
from transformers import AutoTokenizer
builtins.input = lambda question: sys.exit("asked")
print(AutoTokenizer.from_pretrained({CHECKPOINT!r}, trust_remote_code=False)("def f(x):")["input_ids"])
print([name for name in sys.modules if name.endswith("configuration_mrp")])
"""
    done = in_a_process(code)
    assert done.returncode == 0, done.stderr[-300:]
    assert done.stdout == f"{tokenizer()('def f(x):')['input_ids']}\n[]\n"


@habit(1, "help(model.generate) tells the options")
def told() -> None:
    shown = pydoc.render_doc(model().generate, renderer=pydoc.plaintext)
    assert "num_draft_states" in shown
    assert "confidence_threshold: tau" in shown


@habit(1, "a wrong decoding in generation_config is refused where it would be saved")
def wrong_config() -> str:
    spoilt = new_model()
    spoilt.generation_config.decoding = "fast"
    return refused(lambda: spoilt.save_pretrained("wrong-config"), "decoding is 'fast'", "choose one of")


@habit(1, "compute_transition_scores of a drafted text")
def transition_scores() -> None:
    options: dict[str, Any] = {**asked(QUESTION), "max_new_tokens": 16, "return_dict_in_generate": True, "output_scores": True}
    out = model().generate(**options, decoding="mrp_spec", target="sequential")
    scores = model().compute_transition_scores(out.sequences, out.scores, normalize_logits=True)
    assert torch.allclose(scores, out.token_logprobs[:, : scores.shape[1]], atol=1e-4)


def _prompt_adapter(config: Any) -> str:
    from peft import get_peft_model

    adapted = get_peft_model(new_model(), config)
    return refused(lambda: adapted.generate(**asked(QUESTION), max_new_tokens=4), "LoRA")


@habit(3, "a prompt-tuning adapter in generate")
def prompt_tuning() -> str:
    from peft import PromptTuningConfig

    return _prompt_adapter(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@habit(3, "a prefix-tuning adapter in generate")
def prefix_tuning() -> str:
    from peft import PrefixTuningConfig

    return _prompt_adapter(PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))


@habit(3, "a P-tuning adapter in generate")
def p_tuning() -> str:
    from peft import PromptEncoderConfig

    return _prompt_adapter(PromptEncoderConfig(task_type="CAUSAL_LM", num_virtual_tokens=4, encoder_hidden_size=8))


@habit(3, "attn_implementation='flex_attention' in generate on a CPU")
def flex_attention() -> str | None:
    done = in_a_process(
        "import torch\nfrom modeling_mrp import MRPForCausalLM\n"
        f"model = MRPForCausalLM.from_pretrained({CHECKPOINT!r}, attn_implementation='flex_attention')\n"
        "ids = torch.tensor([[5, 6, 7, 8]])\n"
        "try:\n    print(model.generate(ids, decoding='static', max_new_tokens=4).tolist())\n"
        "except ValueError as error:\n    print('refused', error)"
    )
    assert done.returncode == 0, f"the process ended with {done.returncode}: {done.stderr[-200:]}"
    if not done.stdout.startswith("refused"):
        expected = model().generate(torch.tensor([[5, 6, 7, 8]]), decoding="static", max_new_tokens=4)
        assert done.stdout.strip() == str(expected.tolist())
        return None
    message = " ".join(done.stdout.split()[1:])
    assert "sdpa" in message, message
    return message


def _offloaded(kept: str, computes: Any) -> str | None:
    names = [f"model.{name}" for name, _ in model().model.named_children() if name != "layers"]
    names += [f"model.layers.{number}" for number in range(len(model().model.layers))]
    places = {name: kept if name == "model.layers.1" else computes for name in (*names, "lm_head", "mrp_head")}
    spilled = new_model(device_map=places, offload_folder="spilled")
    assert spilled.model.layers[1].mlp.up_proj.weight.is_meta
    options: dict[str, Any] = {**asked(QUESTION), "decoding": "mrp_spec", "max_new_tokens": 16}
    text, message = tried(lambda: spilled.generate(**options), "device")
    assert message is not None or same(text, model().generate(**options))
    return message


@habit(3, "a layer that is offloaded to disk")
def on_disk() -> str | None:
    return _offloaded("disk", "cpu")


@habit(3, "a layer that is kept in memory beside the device that computes, for which a CPU stands in")
def in_memory() -> str | None:
    return _offloaded("cpu", torch.device("cpu"))  # which accelerate does not take for "cpu"


@habit(5, "a cache of an adapter that was switched off")
def cache_of_an_adapter() -> str:
    from peft import LoraConfig, get_peft_model

    adapted: Any = get_peft_model(new_model(), LoraConfig(target_modules=r"model\.layers.*up_proj", init_lora_weights=False))
    options: dict[str, Any] = {"max_new_tokens": 8, "return_dict_in_generate": True}
    out = adapted.generate(**asked(QUESTION), **options)
    with adapted.disable_adapter():
        call = {"input_ids": out.sequences, "past_key_values": out.past_key_values, "max_new_tokens": 4}
        return refused(lambda: adapted.generate(**call), "leave them unset")


@habit(5, "generate_batch, transformers' continuous batching")
def generate_batch() -> str:
    return refused(lambda: model().generate_batch([[5, 6, 7]], max_new_tokens=4), r"generate\b", kinds=(ValueError, TypeError))


@habit(5, "pickle of what generate returns")
def pickled() -> None:
    out = new_model().generate(**asked(QUESTION), max_new_tokens=8, return_dict_in_generate=True)
    assert torch.equal(pickle.loads(pickle.dumps(out)).sequences, out.sequences)


class _Sure(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> bool:
        return bool(scores[-1].max() > 9)


@habit(5, "a stopping criterion that reads scores")
def criterion_of_scores() -> str | None:
    call = {**asked(QUESTION), "max_new_tokens": 8, "stopping_criteria": [_Sure()]}
    return tried(lambda: model().generate(**call), "scores", "input_ids")[1]


@habit(5, "labels with the padding of the shipped tokenizer, which is on the left")
def left_padded_labels() -> str | None:
    batch = asked(*QUESTIONS)
    assert not batch["attention_mask"][:, 0].all(), "nothing is padded on the left"
    labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
    output, message = tried(lambda: new_model()(**batch, labels=labels), "padding_side")
    assert message is not None or output.loss.isfinite()
    return message


@habit(11, "a text streamer for each row of a batch")
def streamers() -> None:
    streams = [TextIteratorStreamer(tokenizer(), skip_prompt=True, timeout=120, skip_special_tokens=True) for _ in QUESTIONS]
    options: dict[str, Any] = {**asked(*QUESTIONS), "max_new_tokens": 24}
    thread = threading.Thread(target=model().generate, kwargs={**options, "streamer": streams})
    thread.start()
    read = ["".join(stream) for stream in streams]
    thread.join()
    ids = model().generate(**options)[:, options["input_ids"].shape[1] :]
    assert read == tokenizer().batch_decode(ids, skip_special_tokens=True)


@habit(11, "one streamer for two rows")
def one_streamer() -> str:
    stream = TextIteratorStreamer(tokenizer())
    call = {**asked(*QUESTIONS), "max_new_tokens": 4, "streamer": stream}
    return refused(lambda: model().generate(**call), "list of 2")


@habit(7, "modeling_mrp.__version__")
def version() -> None:
    from importlib.metadata import version as installed_version

    assert modeling_mrp.__version__ == installed_version("modeling-mrp")
