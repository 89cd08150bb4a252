"""A chat that shows blocks filling in: committed text and the current block apart, the cost, and a
picture of the decode.

``python space/app.py`` serves the embedded checkpoint on loopback; MRP_MODEL names another, a
folder or an id on the Hub. It sends nothing anywhere: no analytics, no fonts from elsewhere.
"""

import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import Queue
from typing import Any

os.environ.setdefault("GRADIO_ANALYTICS_ENABLED", "False")  # gradio reads it when it is imported

import gradio as gr
import torch
from mrp_trainer import TINY
from mrp_trainer.data.records import check_utf8
from mrp_trainer.loading import default_device, load_model, load_tokenizer
from mrp_trainer.picture import Decode, draw, read_decode
from mrp_trainer.picture.facts import token_texts
from mrp_trainer.picture.svg import visible
from transformers.generation.streamers import BaseStreamer

from modeling_mrp.generate.option_table import DECODINGS, DRAFTING, TARGETS

HERE = Path(__file__).parent
MODEL = os.environ.get("MRP_MODEL") or TINY
EXAMPLES = (
    "Sum the numbers of a list that are even, each plus 5.",
    "Write a function of a number: plus 9 when even, otherwise plus 3.",
    "Ana has 3 pens. Bo gives Ana 4 more. Ana loses 2. How many pens does Ana have?",
)
ABLE = (
    '<p id="able">It solves two kinds of small problems: a Python function of a number or a list, '
    "told in a sentence, and word problems with numbers up to 30. It is no model to talk to.</p>"
)
CSS = (HERE / "style.css").read_text(encoding="utf-8")
Chat = list[dict[str, str]]


@dataclass(frozen=True)
class Shown:
    """A snapshot of a text while it is decoded.

    Attributes:
        committed: Ids of finished blocks.
        block: Ids of the current block, with masks.
    """

    committed: tuple[int, ...]
    block: tuple[int, ...] = ()


class Stopped(Exception):
    """Raised to end a decode whose text nobody waits for any more."""


class BlockStreamer(BaseStreamer):
    """A streamer that puts every snapshot of one row's text into a queue, as fast as they come.

    Args:
        moments: The queue.
        stopped: Ends the decoding when it is set.
    """

    def __init__(self, moments: Queue[Any], stopped: threading.Event) -> None:
        self.moments, self.stopped = moments, stopped
        self.committed: tuple[int, ...] = ()
        self.at_prompt = True

    def put(self, value: torch.Tensor) -> None:
        """Receive the prompt in the first call, then finished tokens [n] or [1, n]."""
        if not self.at_prompt:
            self._hand_on(value, final=True)
        self.at_prompt = False

    def put_draft(self, value: torch.Tensor) -> None:
        """Receive the current block, [1, n]."""
        self._hand_on(value, final=False)

    def end(self) -> None:
        """Do nothing at the end of the text."""

    def _hand_on(self, value: torch.Tensor, final: bool) -> None:
        if self.stopped.is_set():
            raise Stopped
        ids = tuple(value.flatten().tolist())
        self.committed += ids if final else ()
        self.moments.put(Shown(self.committed, () if final else ids))


@cache
def loaded() -> tuple[Any, Any]:
    """Load the model and its tokenizer, once."""
    model: Any = load_model(MODEL)
    return model.to(default_device()), load_tokenizer(MODEL)


def moments_of(
    inputs: dict[str, Any], options: dict[str, Any]
) -> Iterator[Shown | tuple[Any, float]]:
    """Decode in a thread; yield every snapshot of the text, then the output and the seconds that it
    took.

    Raises:
        ValueError: if `generate` refuses the inputs or the options.
    """
    model, _ = loaded()
    moments: Queue[Any] = Queue()
    stopped = threading.Event()

    def work() -> None:
        begun = time.perf_counter()
        try:
            out = model.generate(
                **inputs,
                **options,
                streamer=BlockStreamer(moments, stopped),
                return_dict_in_generate=True,
            )
            moments.put((out, time.perf_counter() - begun))
        except Exception as error:  # raised again where the queue is read
            moments.put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while True:
            moment = moments.get()
            if isinstance(moment, Exception):
                raise moment
            yield moment
            if not isinstance(moment, Shown):
                return
    finally:
        stopped.set()


def escaped(text: str) -> str:
    """Escape a text for a page that reads HTML and Markdown: every character that is no letter or
    digit by its number."""
    return "".join(
        one if one.isalnum() or one == " " else "<br>" if one == "\n" else f"&#{ord(one)};"
        for one in text
    )


def message_html(shown: Shown, tokenizer: Any, mask_id: int) -> str:
    """Format a snapshot as HTML: committed text, then each token of the current block in a box,
    masks as empty boxes."""
    text = escaped(tokenizer.decode(list(shown.committed), skip_special_tokens=True))
    for one in shown.block:
        if one == mask_id:
            text += '<span class="mrp-mask">&nbsp;&nbsp;</span>'
        else:
            text += (
                f'<span class="mrp-block">{escaped(visible(token_texts([one], tokenizer)[0]))}'
                "</span>"
            )
    return f'<span class="mrp-text">{text}</span>'


def cost_html(decode: Decode, seconds: float, same: bool | None) -> str:
    """Format the cost of a text as a line of HTML; `same` tells if the text is its target's, None
    if that is unknown."""
    parts = [
        f"<b>{decode.tokens_per_forward:.2f}</b> tokens per forward",
        f"<b>{len(decode.tokens)}</b> tokens",
        f"<b>{len(decode.forwards)}</b> forwards",
        f"<b>{seconds:.2f}</b> s",
    ]
    parts += (
        [f"<b>{decode.accepted}</b> of {decode.drafted} drafts accepted"] if decode.drafted else []
    )
    parts += (
        [("the same text as its target" if same else "<b>another</b> text than its target")]
        if same is not None
        else []
    )
    return f'<div id="mrp-cost">{" · ".join(parts)}</div>'


def options_of(decoding: str, target: str, tau: float, states: int, tokens: int) -> dict[str, Any]:
    """Return the options of `generate` that a mode has."""
    options: dict[str, Any] = {"decoding": decoding, "max_new_tokens": int(tokens)}
    options |= {"target": target, "num_draft_states": int(states)} if decoding in DRAFTING else {}
    uses_tau = "dynamic" in (decoding, options.get("target")) or decoding == "mrp_remask"
    return options | ({"confidence_threshold": float(tau)} if uses_tau else {})


def named(options: dict[str, Any]) -> str:
    """Format the options of a decode as its name in the picture."""
    name = str(options["decoding"])
    name += f" of {options['target']}" if "target" in options else ""
    name += f" K={options['num_draft_states']}" if "num_draft_states" in options else ""
    return name + (
        f" tau={options['confidence_threshold']:g}" if "confidence_threshold" in options else ""
    )


def answer(
    prompt: str,
    history: Chat,
    decoding: str,
    target: str,
    tau: float,
    states: int,
    tokens: int,
    pause: int,
    compare: bool,
    remember: bool,
) -> Iterator[tuple[str, list[dict[str, str]], Chat, str, str]]:
    """Answer a prompt; yield for each snapshot the prompt's box, the chat as shown, the chat, the
    cost and the picture.

    Args:
        prompt: The user's prompt.
        history: The chat so far.
        decoding, target, tau, states, tokens: See `options_of`.
        pause: Least time in milliseconds that each snapshot is shown; the decoding does not wait
            for it.
        compare: Whether to decode the target without drafts, too.
        remember: Whether the model reads earlier turns.
    """
    if not prompt.strip():
        raise gr.Error(
            "There is no prompt: write one, or choose an example.", print_exception=False
        )
    try:
        check_utf8(prompt)
    except ValueError as error:
        raise gr.Error(f"The prompt has {error}.", print_exception=False) from error
    model, tokenizer = loaded()
    chat: Chat = [*history, {"role": "user", "content": prompt}]
    asked = chat if remember else chat[-1:]
    inputs = tokenizer.apply_chat_template(
        asked, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    given = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    options = options_of(decoding, target, tau, states, tokens)
    mask_id = model.config.mask_token_id
    shown = [
        {"role": one["role"], "content": f'<span class="mrp-text">{escaped(one["content"])}</span>'}
        for one in chat
    ]
    yield "", shown, chat, "", ""
    try:
        for moment in moments_of(given, options):
            if isinstance(moment, Shown):
                content = message_html(moment, tokenizer, mask_id)
                yield "", [*shown, {"role": "assistant", "content": content}], chat, "", ""
                time.sleep(pause / 1000)
            else:
                out, seconds = moment
    except ValueError as error:  # `generate` says what does not fit, and the remedy
        raise gr.Error(str(error), print_exception=False) from error
    ids = out.sequences[0, given["input_ids"].shape[1] :]
    chat = [
        *chat,
        {"role": "assistant", "content": tokenizer.decode(ids, skip_special_tokens=True)},
    ]
    whole = [
        *shown,
        {
            "role": "assistant",
            "content": message_html(Shown(tuple(ids.tolist())), tokenizer, mask_id),
        },
    ]
    decodes, same = [read_decode(out, tokenizer, named(options))], None
    if compare and decoding in DRAFTING:
        alone = options_of(target, target, tau, states, tokens)
        reference = model.generate(**given, **alone, return_dict_in_generate=True)
        decodes.insert(0, read_decode(reference, tokenizer, named(alone)))
        same = reference.sequences.equal(out.sequences)
    picture = draw(decodes, animated=True)
    yield (
        "",
        whole,
        chat,
        cost_html(decodes[-1], seconds, same),
        f'<div id="mrp-picture">{picture.svg}</div>',
    )


def build() -> gr.Blocks:
    """Lay out the page."""
    embedded = MODEL == TINY
    model, _ = loaded()
    modes = [one for one in DECODINGS if model.config.has_head or not one.startswith("mrp_")]
    with gr.Blocks(title="Blocks filling in", analytics_enabled=False) as page:
        gr.HTML(
            "<h1>Blocks filling in</h1><p>A block-diffusion language model reveals the tokens of a "
            "block in any order. Drafts let one forward reveal several, and leave the text as it "
            f"is. The model here: <code>{escaped(Path(MODEL).name)}</code></p>"
            f"{ABLE if embedded else ''}"
        )
        chat = gr.State([])
        with gr.Row():
            with gr.Column(scale=3):
                shown = gr.Chatbot(
                    label="Chat",
                    height=330,
                    latex_delimiters=[],
                    buttons=[],
                    elem_id="chat",
                    feedback_options=None,
                )
                with gr.Row():
                    prompt = gr.Textbox(
                        label="Prompt",
                        placeholder=EXAMPLES[0],
                        scale=6,
                        elem_id="prompt",
                        show_label=False,
                        container=False,
                    )
                    send = gr.Button("Decode", variant="primary", elem_id="send", min_width=90)
                    stop = gr.Button("Stop", elem_id="stop", min_width=60)
                cost = gr.HTML(elem_id="cost")
                if embedded:
                    gr.Examples(
                        list(map(list, zip(EXAMPLES, strict=True))),
                        prompt,
                        label="Problems of the kind it learned",
                    )
            with gr.Column(scale=1, min_width=260):
                decoding = gr.Dropdown(
                    modes, value="mrp_spec" if "mrp_spec" in modes else "self_spec", label="Mode"
                )
                own = getattr(model.generation_config, "target", None) or TARGETS[0]
                target = gr.Dropdown(
                    list(TARGETS), value=own, label="Target: whose text is drafted"
                )
                states = gr.Slider(1, 16, 8, step=1, label="K: states per round")
                tau = gr.Slider(0.05, 0.99, 0.9, step=0.01, label="Threshold (dynamic, mrp_remask)")
                tokens = gr.Slider(
                    16, 512, 64 if embedded else 256, step=16, label="Tokens at most"
                )
                pause = gr.Slider(
                    0,
                    1000,
                    150 if embedded else 0,
                    step=50,
                    label="Milliseconds per round, to watch",
                )
                compare = gr.Checkbox(True, label="Decode its target beside it")
                remember = gr.Checkbox(not embedded, label="Earlier turns are read")
                clear = gr.Button("New chat", elem_id="clear")
        picture = gr.HTML(elem_id="picture")
        given = [prompt, chat, decoding, target, tau, states, tokens, pause, compare, remember]
        told = [prompt, shown, chat, cost, picture]
        running = gr.on(
            [send.click, prompt.submit],
            answer,
            given,
            told,
            show_progress="hidden",
            api_name="answer",
        )
        stop.click(None, cancels=[running])
        clear.click(
            lambda: ("", [], [], "", ""), None, told, cancels=[running], show_progress="hidden"
        )
    return page


def main() -> None:
    """Serve the page: on loopback, port 7860, unless GRADIO_SERVER_NAME and GRADIO_SERVER_PORT say
    otherwise."""
    fonts = ("ui-sans-serif", "system-ui", "sans-serif")
    theme = gr.themes.Base(
        primary_hue="violet",
        neutral_hue="slate",
        font=fonts,
        font_mono=("ui-monospace", "monospace"),
    )
    build().launch(
        theme=theme, css=CSS, share=False, ssr_mode=False, footer_links=[], enable_monitoring=False
    )


if __name__ == "__main__":
    main()
