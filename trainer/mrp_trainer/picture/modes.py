"""The command `mrp show`: a picture of one prompt decoded in several modes, side by side."""

from typing import Any

from ..data.records import check_utf8
from ..evaluate.command import check_setting
from ..evaluate.options import generate_options
from ..evaluate.results import mode_name
from ..loading import load_config, load_model, tokenizer_of
from . import Picture, show
from .options import ShowOptions


def show_model(options: ShowOptions) -> Picture:
    """Decode a prompt in the modes of `options`, draw the texts, write the picture to
    `options.output`, and return the picture. `ValueError` if checkpoint, tokenizer, prompt or
    options do not fit each other, `OSError` if the checkpoint does not exist."""
    check_utf8(options.prompt)
    for setting in options.settings_to_draw({}):
        check_setting(setting, load_config(options.model, options.revision))
    model: Any = load_model(
        options.model, options.dtype, options.device, options.revision, options.backbone
    )
    tokenizer: Any = tokenizer_of(options)
    if options.plain or tokenizer.chat_template is None:
        inputs = tokenizer(options.prompt, return_tensors="pt")
    else:
        chat = [{"role": "user", "content": options.prompt}]
        inputs = tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
    arguments = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    arguments |= {"max_new_tokens": options.max_new_tokens, "return_dict_in_generate": True}
    settings = options.settings_to_draw(
        model.generation_config.to_dict(), model.mrp_head is not None
    )
    outputs = {}
    for setting in settings:
        outputs[mode_name(setting)] = model.generate(**arguments, **generate_options(setting))
    picture = show(outputs, tokenizer, prompt=options.prompt, animated=options.animated)
    picture.save(str(options.output), options.overwrite)
    return picture
