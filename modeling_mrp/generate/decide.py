"""Typed answers: a *form* is a text with blanks, and each blank is filled with one of several
labels, whose probabilities a forward computes exactly.

The form follows a prompt. When a block of it is scored, all blanks in the block are masks, and the
known tokens of the block are shown, on both sides of a blank. A label of one token has the
probability that it has at this state. A label of several tokens is revealed from left to right: for
each prefix of the label, the state after that prefix is scored too, in the same forward.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from string import Formatter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels.pick import Unembedding
from ..model.diffusion import taken_from
from ..model.loading import weights_on_device
from ..networks.inspection import check_weights
from .options import MRPGenerationConfig, check_ids, check_rows

# The most states of a row in a forward; numbers of three digits take 111 states.
_STATES_OF_FORM = 256


class Blank(NamedTuple):
    """A blank of a form, to be filled with the answer to a question.

    Attributes:
        name: The name of the question.
        start: Index of the blank's first token in the form.
        values: The possible answers.
        labels: The tokens of each answer, in the order of `values`. All answers have the same
            number of tokens.
    """

    name: str
    start: int
    values: list[Any]
    labels: list[tuple[int, ...]]

    @property
    def end(self) -> int:
        """One past the index of the blank's last token."""
        return self.start + len(self.labels[0])


class Form(NamedTuple):
    """A tokenised form, the text in whose blanks the answers are written.

    Attributes:
        ids: The token ids, with masks at blanks.
        places: The blanks, from left to right.
    """

    ids: list[int]
    places: list[Blank]


@dataclass(frozen=True)
class MRPDecideOutput:
    """The output of `decide`.

    Attributes:
        answers: For each row, a dict from questions to their likeliest answers, each a str, an int
            or a bool.
        probabilities: For each row, a dict from questions to the probability of each possible
            answer. The probabilities of a question add up to 1.
        mass: For each row, a dict from questions to the total probability of all possible answers
            under the model.
        forwards: Number of forwards of the whole batch.
    """

    answers: list[dict[str, Any]]
    probabilities: list[dict[str, dict[Any, float]]]
    mass: list[dict[str, float]]
    forwards: int


def answers_of(name: str, question: Any) -> tuple[list[Any], list[str]]:
    """Return the possible answers to a question, and their texts in a form.

    Args:
        name: The name of the question, for error messages.
        question: A list of texts; `bool` for "yes" and "no"; or a `range` of numbers.

    Raises:
        ValueError: for any other question, and if there are no answers, equal or empty ones.
    """
    if question is bool:
        return [True, False], ["yes", "no"]
    values = list(question) if isinstance(question, Iterable) else []
    is_text = isinstance(question, list | tuple) and all(isinstance(text, str) for text in values)
    if isinstance(question, str) or not (is_text or isinstance(question, range)):
        raise ValueError(
            f"questions has {question!r} for {name!r}: give a list of texts, bool for yes or no, "
            "or a range of numbers, such as range(10) for a digit"
        )
    if len(set(values)) != len(values) or not values or "" in values:
        raise ValueError(f"questions has {question!r} for {name!r}: give texts, all different")
    return values, [str(value) for value in values]


def read_form(
    form: str, questions: Mapping[str, Any], tokenizer: Any, mask_id: int, eos: Sequence[int]
) -> Form:
    """Tokenise a form.

    A space before a blank is tokenised together with each answer, as most tokenizers do in a text.
    Tokens with which all answers to a question begin are written into the form, and the blank holds
    the rest. Answers to a question may have different numbers of tokens only if its blank ends the
    form. Such answers are filled up with eos tokens to one more than the largest number.

    Args:
        form: The text, with a blank `{name}` for each question.
        questions: Maps the name of each question to its possible answers: a list of texts, `bool`,
            or a `range` of numbers.
        tokenizer: The tokenizer of the model.
        mask_id: The id of the mask token.
        eos: Ids that end a text.

    Raises:
        ValueError: unless the form has exactly one blank for each question; if two answers to a
            question have the same tokens, or one contains the mask; if answers have different
            numbers of tokens, and text follows their blank or there is no eos; for a question that
            is something else, has no answers, or has equal or empty answers.
    """

    def encoded(text: str) -> list[int]:
        ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"] if text else []
        return ids

    parts = list(Formatter().parse(form))
    names = [name for _, name, _, _ in parts if name is not None]
    if sorted(names) != sorted(questions) or not names:
        raise ValueError(
            f"form has places for {names} and questions are {list(questions)}: give each question "
            "one place, as {name}"
        )
    ids: list[int] = []
    places = []
    for index, (literal, name, _, _) in enumerate(parts):
        space = " " if name is not None and literal.endswith(" ") else ""
        ids += encoded(literal.removesuffix(space) if space else literal)
        if name is None:
            continue
        values, texts = answers_of(name, questions[name])
        labels = [encoded(space + text) for text in texts]
        if len({len(label) for label in labels}) > 1:
            if index + 1 < len(parts) or not eos:
                raise ValueError(
                    f"the answers to {name!r} have from {min(map(len, labels))} to "
                    f"{max(map(len, labels))} tokens, and text follows their place: give answers "
                    "of equally many tokens, such as letters, or put the place last"
                )
            width = 1 + max(map(len, labels))
            labels = [label + [eos[0]] * (width - len(label)) for label in labels]
        while len(labels) > 1 and len(labels[0]) > 1 and len({label[0] for label in labels}) == 1:
            ids.append(labels[0][0])
            labels = [label[1:] for label in labels]
        if len(set(map(tuple, labels))) < len(labels) or any(mask_id in label for label in labels):
            raise ValueError(f"two answers to {name!r} have the same tokens: give others")
        places.append(Blank(name, len(ids), values, [tuple(label) for label in labels]))
        ids += [mask_id] * len(labels[0])
    return Form(ids, places)


class Sheet:
    """The prompt and the form of one row, while the blanks are filled in from left to right. A form
    is a text with blanks, and a blank a run of masks that one of a few given answers replaces.

    Args:
        prompt: The ids of the prompt.
        form: The form, with the ids of its text and the place and answers of each blank.
        block_size, mask_id: Block size and mask id of the model.

    Attributes:
        groups: Lists of blanks. The blanks of a group are answered in one forward. They lie in one
            block; a blank that lies in several blocks is a group of its own.
    """

    def __init__(self, prompt: list[int], form: Form, block_size: int, mask_id: int) -> None:
        self.text = prompt + form.ids
        self.block_size = block_size
        self.mask_id = mask_id
        self.groups: list[list[Blank]] = []
        for blank in form.places:
            positioned = Blank(blank.name, blank.start + len(prompt), blank.values, blank.labels)
            block = self.start_of([positioned])
            last = self.groups[-1] if self.groups else []
            shares = bool(last) and last[-1].end <= block + block_size
            if shares and self.start_of(last) == block and positioned.end <= block + block_size:
                last.append(positioned)
            else:
                self.groups.append([positioned])

    def start_of(self, group: Sequence[Blank]) -> int:
        """Return the position at which the first block of a group (see `groups`) begins."""
        return group[0].start // self.block_size * self.block_size

    def blocks_of(self, group: Sequence[Blank]) -> int:
        """Return the number of blocks over which a group of blanks (see `groups`) extends."""
        return (group[-1].end - 1 - self.start_of(group)) // self.block_size + 1

    def states(
        self, group: Sequence[Blank], length: int
    ) -> dict[tuple[int, tuple[int, ...]], list[int]]:
        """Return the states at which the answers to a group of blanks are scored. There is one for
        each beginning that an answer can have, short of the whole answer. If the answers to a
        question have the tokens (5, 6), (5, 7) and (8, 9), the beginnings are (), (5,) and (8,).

        Args:
            group: Blanks that are answered in one forward, one of `groups`.
            length: The number of ids of each state.

        Returns:
            A dict from pairs to states. A pair is the first column of a blank, counted from the
            beginning of the group's first block, and the beginning of an answer. The state is a
            list of `length` ids from the beginning of that block. It has the beginning of the
            answer in the blank, and masks in the rest of the blank and in the other blanks of the
            group.
        """
        start = self.start_of(group)
        old_ids = self.text[start : start + length]
        old_ids += [self.mask_id] * (length - len(old_ids))
        states = {}
        for blank in group:
            column = blank.start - start
            for label in blank.labels:
                for count in range(len(label)):
                    ids = list(old_ids)
                    ids[column : column + count] = label[:count]
                    states[column, label[:count]] = ids
        return states

    def fill(self, blank: Blank, label: Sequence[int]) -> None:
        """Write an answer, the tokens `label`, into a blank."""
        self.text[blank.start : blank.end] = label


class MRPDecidingMixin:
    """Adds the method `decide` to an MRP model. It answers typed questions about prompts: for each
    question, it computes the probabilities of the possible answers, and returns the likeliest
    answer."""

    @torch.no_grad()
    def decide(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        questions: Mapping[str, Any],
        tokenizer: Any,
        form: str | None = None,
        temperature: float = 1.0,
    ) -> MRPDecideOutput:
        """Answer typed questions about each prompt, by the probabilities of the possible answers.

        Questions whose blanks lie in one block are answered in one forward, each of them while the
        other blanks are masked. Questions of later blocks see the likeliest answers to earlier
        questions. A blank that lies in two blocks takes a forward of its own. No keys or values are
        kept.

        Args:
            input_ids: int64 [rows, length], the prompts.
            attention_mask: [rows, length], 1 for real tokens, with padding on either side.
            questions: Maps the name of each question to its possible answers: a list of texts;
                `bool` for "yes" or "no"; a `range` of numbers, as `range(10)` for one digit or
                `range(10, 100)` for two.
            tokenizer: The tokenizer of the model.
            form: The text that follows each prompt. It has a blank `{name}` for each question, and
                `{{` stands for a brace. By default the form is just the blank of the only question.
            temperature: Divides the logits.

        Raises:
            ValueError: for invalid arguments, a model in training mode, or probabilities that are
                not numbers.

        Example:
            >>> from modeling_mrp import MRPForCausalLM
            >>> from mrp_trainer import embedded_checkpoint
            >>> from transformers import AutoTokenizer
            >>> model = MRPForCausalLM.from_pretrained(embedded_checkpoint())
            >>> tokenizer = AutoTokenizer.from_pretrained(
            ...     embedded_checkpoint(), config=model.config
            ... )
            >>> task = "Bo has 5 pens. Ana gives Bo 3 more. How many pens does Bo have?"
            >>> chat = [{"role": "user", "content": task}]
            >>> how = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
            >>> inputs = tokenizer.apply_chat_template(chat, **how)
            >>> form = "The pens are n.\\nn = 5 + 3 = {sum}\\n"
            >>> out = model.decide(
            ...     **inputs, questions={"sum": range(10)}, form=form, tokenizer=tokenizer
            ... )
            >>> out.answers, out.forwards
            ([{'sum': 8}], 1)
        """
        config = self.config
        if form is None:
            if len(questions) != 1:
                raise ValueError(
                    f"questions are {list(questions)} without a form: pass form=..., a text that "
                    "has a place {name} for each"
                )
            form = "".join(f"{{{name}}}" for name in questions)
        if not isinstance(temperature, Real) or not 0 < temperature < float("inf"):
            raise ValueError(f"temperature is {temperature!r}: it must be a finite number above 0")
        if self.training:
            raise ValueError(
                "decide was called in training mode, with dropout: call model.eval() first"
            )
        generation_config: MRPGenerationConfig = self.generation_config
        eos = generation_config.eos_ids()
        mask_id = config.mask_token_id
        written = read_form(form, questions, tokenizer, mask_id, eos)
        real = check_ids(input_ids, attention_mask, config)
        check_rows(real, len(written.ids), config.max_position_embeddings)
        check_weights(self)
        sheets = []
        for ids, keep in zip(input_ids, real, strict=True):
            prompt = ids[keep.to(ids.device)].tolist()
            sheets.append(Sheet(prompt, written, config.block_size, mask_id))
        output = MRPDecideOutput(
            [{} for _ in sheets],
            [{} for _ in sheets],
            [{} for _ in sheets],
            forwards=max(len(sheet.groups) for sheet in sheets),
        )
        with weights_on_device(self.lm_head):
            unembedding = Unembedding(self.lm_head.weight, mask_id, float(temperature))
            for number in range(output.forwards):
                groups = {}
                for index, sheet in enumerate(sheets):
                    if number < len(sheet.groups):
                        groups[index] = sheet.groups[number]
                scores = _scores(self, unembedding, sheets, groups)
                for index, group in groups.items():
                    for blank in group:
                        _answer(output, index, sheets[index], blank, scores[index])
        return output


# By the column of a blank and a prefix of its labels, log-probabilities [vocab].
_ScoresOfStates = dict[tuple[int, tuple[int, ...]], Tensor]


def _scores(
    model: Any,
    unembedding: Unembedding,
    sheets: Sequence[Sheet],
    groups: Mapping[int, Sequence[Blank]],
) -> dict[int, _ScoresOfStates]:
    """Score the states of each row's group in one forward; return the scores of each row, by its
    index.

    In the forward, a row holds the text before the group and then the states side by side. A state
    attends to that text and to itself, block by block.
    """
    block_size = model.config.block_size
    mask_id = model.config.mask_token_id
    device = unembedding.weight.device
    starts = {index: sheets[index].start_of(group) for index, group in groups.items()}
    before = max(starts.values())
    width = block_size * max(sheets[index].blocks_of(group) for index, group in groups.items())
    states = {index: sheets[index].states(group, width) for index, group in groups.items()}
    count = max(map(len, states.values()))
    if count > _STATES_OF_FORM:
        raise ValueError(
            f"the answers have {count} beginnings, each a state to score, and a row may have "
            f"{_STATES_OF_FORM}: ask for fewer digits, or generate(regex=...)"
        )
    texts = []
    sources = []
    for index, row_states in states.items():
        start = starts[index]
        text = sheets[index].text[:start] + [mask_id] * (before - start)
        row_sources = []
        for number, ((column, beginning), ids) in enumerate(row_states.items()):
            text += ids
            # the index of the hidden state that predicts the token after the prefix
            within = column + len(beginning) - model.model.shifted
            row_sources.append(before + number * width + within if within >= 0 else start - 1)
        texts.append(text + [mask_id] * (width * (count - len(row_states))))
        sources.append(row_sources + [0] * (count - len(row_states)))
    inputs = torch.tensor(texts, device=device)
    start_of_row = torch.tensor(list(starts.values()), device=device)[:, None]
    text_positions = torch.arange(before, device=device).expand(len(texts), -1)
    state_columns = torch.arange(width, device=device).repeat(count)
    positions = torch.cat([text_positions, start_of_row + state_columns], 1)
    is_text = torch.zeros_like(inputs, dtype=torch.bool)
    is_text[:, :before] = text_positions < start_of_row
    # the state of a token; text, and what fills it up to the longest, are apart
    owner = torch.arange(inputs.shape[1], device=device).sub(before).clamp(min=-1) // width
    same = (owner[:, None] == owner) & ~is_text[:, :, None]
    blocks = positions // block_size
    mask = (is_text[:, None] | same) & (blocks[:, None] <= blocks[:, :, None])
    hidden = model.backbone(inputs, positions, mask[:, None]).to(device)
    taken = taken_from(hidden, torch.tensor(sources, device=device))
    output = {}
    for (index, row_states), row_hidden in zip(states.items(), taken, strict=True):
        logits = unembedding.tempered(unembedding.logits(row_hidden[: len(row_states)]))
        output[index] = dict(zip(row_states, logits.log_softmax(-1), strict=True))
    return output


def _answer(
    output: MRPDecideOutput, index: int, sheet: Sheet, blank: Blank, scores: _ScoresOfStates
) -> None:
    """Answer the question of a blank for the row `index`: record the answer in `output`, and write
    it into the blank."""
    column = blank.start % sheet.block_size  # the column in the first block of its group
    totals = []
    for label in blank.labels:
        total = 0.0
        for length, token in enumerate(label):
            total += float(scores[column, label[:length]][token])
        totals.append(total)
    log_probs = torch.tensor(totals, dtype=torch.float64)
    mass = log_probs.logsumexp(0)
    if not bool(mass.isfinite()):
        raise ValueError(
            f"row {index}: the answers to {blank.name!r} have no probability: the weights are NaN "
            "or infinite, or the dtype overflows. Load or train them again, or load a wider dtype"
        )
    probabilities = (log_probs - mass).exp().tolist()
    best = max(range(len(totals)), key=totals.__getitem__)
    output.answers[index][blank.name] = blank.values[best]
    output.probabilities[index][blank.name] = dict(zip(blank.values, probabilities, strict=True))
    output.mass[index][blank.name] = float(mass.exp())
    sheet.fill(blank, blank.labels[best])
