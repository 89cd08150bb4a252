"""Encoding of the synthetic problems as token ids."""

from transformers import PreTrainedTokenizerBase

from .tasks import Problem


def encode(problem: Problem, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Encode a problem as a chat. Return the ids of the prompt, and the ids of the response, which
    ends with the eos token.

    Problems of the family `source` are plain text, without a chat and without eos.
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
