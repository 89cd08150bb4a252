"""Stopping criteria, asked as transformers' own loop would ask them, of rows that come along at different speeds."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria

from ..rules.state import Row


class Stopping:
    """The stopping criteria of one `generate` call, asked at every token of a row once it is final (no mask before it).

    A criterion sees what it would see in transformers' loop: [rows, prompt + n] ids, the prompts as they were given, padding
    included, and n tokens of every row behind them. Criteria that count columns or rows keep their meaning so. Here rows are
    not equally far: one with fewer final tokens shows the mask id in their place, one that has ended shows padding behind its
    end. The answer counts for rows whose n-th token is newly final.

    Args:
        criteria: Those to ask.
        input_ids: [rows, prompt] long, as given.
        pad_token_id: What stands behind the end of a text.
        mask_token_id: What stands where there is no token yet.
    """

    def __init__(self, criteria: Sequence[StoppingCriteria], input_ids: Tensor, pad_token_id: int, mask_token_id: int) -> None:
        self.criteria, self.prompt = criteria, input_ids
        self.pad_id, self.mask_id = pad_token_id, mask_token_id
        self.final: list[list[int]] = [[] for _ in input_ids]  # of all rows of the call, also of those that have left
        self.ended = [False] * len(input_ids)
        self.asked = [0] * len(input_ids)  # how many tokens of each row have been shown

    def ask(self, rows: Sequence[Row]) -> None:
        """Ask about all newly final tokens of some rows; where a criterion ends a row's text, it has its `stop`."""
        going = {row.place: row for row in rows if not self.ended[row.place]}
        for place, row in going.items():
            upto = row.limit if row.stop is None else row.stop
            masked = next((at for at in range(row.prompt, upto) if row.text[at] == self.mask_id), upto)
            self.final[place] = row.text[row.prompt : masked]
            self.ended[place] = row.stop is not None
        most = max((len(self.final[place]) for place in going), default=0)
        for column in range(min((self.asked[place] for place in going), default=0), most):
            asking = [place for place in going if self.asked[place] <= column < len(self.final[place])]
            if not asking:
                continue
            shown = [self._shown(tokens, column + 1, ended) for tokens, ended in zip(self.final, self.ended, strict=True)]
            stops = self._answers(torch.cat([self.prompt, self.prompt.new_tensor(shown)], 1))
            for place in asking:
                self.asked[place] = column + 1
                if stops[place]:
                    going[place].stop, self.ended[place] = going[place].prompt + column + 1, True
                    del self.final[place][column + 1 :], going[place]

    def _shown(self, tokens: list[int], count: int, ended: bool) -> list[int]:
        return (tokens + [self.pad_id if ended else self.mask_id] * count)[:count]

    def _answers(self, ids: Tensor) -> list[bool]:
        """Ask of each row if some criterion ends it; one that gives a single answer gives it for all rows."""
        stops = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
        for criterion in self.criteria:
            try:
                answer = criterion(ids, None)
            except (AttributeError, TypeError) as error:
                if "None" not in str(error):
                    raise
                raise ValueError(
                    f"the stopping criterion {type(criterion).__name__} failed ({error}), and the scores that it is given are "
                    "None here: let it decide by input_ids"
                ) from error
            try:
                given = torch.as_tensor(answer, device=ids.device)
            except (RuntimeError, TypeError, ValueError):
                given = ids
            if given.dtype != torch.bool or given.numel() not in (1, len(ids)):
                raise ValueError(
                    f"the stopping criterion {type(criterion).__name__} returned {answer!r}: it must return a bool, or a "
                    f"tensor of one bool for each of the {len(ids)} rows"
                )
            stops |= given.flatten()
        return stops.tolist()


__all__ = ["Stopping"]
