"""The tiny checkpoint's tokenizer: byte-level BPE, trained on the synthetic tasks and on Python source."""

from collections.abc import Iterator

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from .tasks import make_problem, source_modules

VOCAB_SIZE = 1280
PAD, START, END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|MASK|>"
# Words take their leading space or mark with them, numbers are at most two digits, punctuation stands alone.
_PIECES = r" ?\d{1,2}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s*[\r\n]+|\s+(?!\S)|\s+"
# `generation` marks what an assistant writes, for `return_assistant_tokens_mask`; it renders nothing.
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}"
    "{{ '\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def _corpus() -> Iterator[str]:
    for index in range(8000):
        for family in ("math", "code"):
            problem = make_problem(family, "train", index)
            yield problem.prompt
            yield problem.answer
    yield "user assistant " + " ".join(f"{n} ({n}" for n in range(100) for _ in range(300))
    yield from source_modules("train")


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Trains the tokenizer; the same standard library gives the same tokenizer."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(_PIECES), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[PAD, START, END, MASK],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        chat_template=CHAT_TEMPLATE,
        model_max_length=1024,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],
    )
