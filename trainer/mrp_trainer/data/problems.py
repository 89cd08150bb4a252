"""Encoding of the synthetic problems as token ids."""

from transformers import PreTrainedTokenizerBase

from .tasks import Problem


def encode(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the ids of a problem's prompt and the ids of its answer.

    The prompt is rendered as a chat, and the answer ends with the eos token. In the family
    `source`, both are plain text instead: the prompt is not rendered as a chat, and the answer has
    no eos token.
    """
    if problem.family == "source":
        return tokenizer.encode(problem.prompt, add_special_tokens=False), tokenizer.encode(
            problem.answer, add_special_tokens=False
        )
    prompt = tokenizer.apply_chat_template(
        problem.messages(), add_generation_prompt=True, tokenize=False
    )
    answer = tokenizer.encode(problem.answer, add_special_tokens=False)
    return tokenizer.encode(prompt, add_special_tokens=False), [*answer, tokenizer.eos_token_id]
