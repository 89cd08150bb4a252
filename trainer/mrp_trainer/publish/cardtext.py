"""What every model card says."""

TEMPLATE = """---
{{ card_data }}
---

<!-- Rendered from a template for {{ name }}; without this line, pushing keeps the card as it is. -->

# {{ title }}

{{ summary }}

{{ facts }}
{% for heading, text in sections.items() %}
## {{ heading }}

{{ text }}
{% endfor %}"""

# How to load and to decode, and what goes before that in the card of a head or an adapter.
USE = """```python
from transformers import AutoModel, AutoTokenizer

model = AutoModel.from_pretrained("{model}", trust_remote_code=True)
{adapted}tok = AutoTokenizer.from_pretrained("{tokenizer}", trust_remote_code=True)
chat = [
    {{"role": "user", "content": "Ana has 3 pens. Bo gives Ana 4 more. Ana loses 2. How many pens does Ana have?"}},
]
inputs = tok.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
out = model.generate(**inputs, decoding="{decoding}", max_new_tokens=64, return_dict_in_generate=True)
print(tok.decode(out.sequences[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
print(out.tokens_per_forward)
```"""
HEAD_ALONE = """This repository holds the head alone. Loading it loads its backbone, `{base}`,
by name and revision, and attaches the head:

"""
ADAPTER_ALONE = "This repository holds a peft adapter of `{base}`:\n\n"

STOCK = """An SDAR model that is loaded already decodes with this repository on the Hub as it is, on its own weights:

```python
repository = "{name}"
sdar.generate(**inputs, custom_generate=repository, trust_remote_code=True, decoding="mrp_spec", max_new_tokens=64)
```"""

SUMMARIES = {
    "full": "{models} block-diffusion language model with an MRP head.",
    "backbone": "{models} block-diffusion language model without an MRP head.",
    "head": "an MRP head for {models} block-diffusion language model.",
    "adapter": "a peft adapter of {models} block-diffusion language model with an MRP head.",
}

# The file of a folder that its card shows, and what the card says with it and without.
PICTURE = "decode.svg"
SHOWN = f"![Which forward of the backbone revealed each token, in two modes]({PICTURE})\n\nSuch a picture is made by:"
NOT_SHOWN = f"This makes a picture of a decode, which the card shows if its folder holds `{PICTURE}`:"
SEE = """{shown}

```
mrp show --model "{name}"{more} --animated --output decode.svg
```"""

MODES = """`generate` takes `decoding=...`; `generation_config.json` asks for `{default}`.

| `decoding` | what it does | text |
| --- | --- | --- |
| `static` | reveals the most confident positions, `block_size / denoising_steps` a step | the reference |
| `dynamic` | reveals everything above `confidence_threshold` | differs: fewer forwards, less accurate |
| `sequential`, `entropy_bound` | reveals from the left; or in order of entropy up to `entropy_threshold` | differs |
| `self_spec` | drafts from the backbone's own stale logits and verifies; needs no head | that of its `target` |
| `mrp_spec` | submits up to `num_draft_states` states a row and round: its next one and drafts | that of its `target` |
| `mrp_direct` | after each backbone step the head reveals `mrp_steps` more positions, unverified | differs |
| `mrp_remask` | reveals like `dynamic`; the head takes reveals back that it no longer believes | differs |"""

UNIT = """

A *unit* is one forward of the backbone, with each pass of the head charged the share of it that a head reads at a published
shape: 27, 18 and 16 % at 1.7B, 4B and 8B."""

SOURCES = "- {name}: [arXiv {paper}](https://arxiv.org/abs/{paper})"
