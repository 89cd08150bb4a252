"""Stopping criteria, asked as transformers' own loop would ask them, of rows that come along at different speeds."""

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers.generation import StoppingCriteria

from .decode_state import Request, Text


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
        self.asked = [0] * len(input_ids)  # how many tokens of each row have been shown
        self._shown: tuple[Tensor, Tensor, Tensor] | None = None  # of all rows: tokens, how many are final, whether that is all

    def ask(self, text: Text, request: Request, active: Tensor, end: Tensor, done: Tensor) -> None:
        """Ask about all newly final tokens; where a criterion ends a row's text, write that into `end` and `done`.

        Args:
            text: The rows' texts.
            request: What was asked for.
            active: [rows] bool, rows that have not ended.
            end: [rows] long, one past the last position of each text as far as eos and limit tell.
            done: [rows] bool, rows of which all before `end` is final.
        """
        start, rows = request.prompt_length, request.row.tolist()
        columns = torch.arange(int((request.limit - start).max()), device=end.device)
        tokens = text.tokens.gather(1, (start[:, None] + columns).clamp(max=text.capacity))
        masked = tokens == self.mask_id
        final = torch.where(masked.any(1), masked.int().argmax(1), len(columns))
        final = final.minimum(torch.where(active, end, text.stop) - start)
        here = tokens, final, done | ~active
        # Rows that have left the batch stay as they were.
        if self._shown is None:
            self._shown = here
        else:
            for whole, part in zip(self._shown, here, strict=True):
                whole[request.row] = part
        tokens, final, ended = self._shown
        news = {
            row: range(self.asked[row], upto)
            for row, upto, going in zip(rows, final[request.row].tolist(), active.tolist(), strict=True)
            if going
        }
        for column in sorted({column for news_of_row in news.values() for column in news_of_row}):
            asking = [row for row, news_of_row in news.items() if column in news_of_row]
            if not asking:  # those that had a token here have been stopped
                continue
            behind = torch.where(ended, self.pad_id, self.mask_id)[:, None]
            shown = torch.where(columns[: column + 1] < final[:, None], tokens[:, : column + 1], behind)
            stops = self._answers(torch.cat([self.prompt, shown], 1))
            for row in asking:
                self.asked[row] = column + 1
                if stops[row]:
                    place = rows.index(row)
                    final[row] = column + 1
                    end[place], done[place], ended[row] = start[place] + column + 1, True, True
                    del news[row]

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
