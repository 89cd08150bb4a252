"""Batches that requests join and leave between rounds.

Requests share a batch if they agree in everything that a round shares (`setting_of`): sampling,
processors, drafting and refinement. Requests of a batch may differ in prompt, target, seed, limits
of length and stopping criteria.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..model.loading import weights_on_device
from ..networks.networks import Networks, networks_for
from ..rules.reveal import RevealRule
from ..rules.state import PendingReveal, Row
from .loop import Decoder, draft_amount
from .option_table import OPTIONS
from .request import Call, Request

# Options that requests of a batch need not share: those that make up the `Mode`, which is compared
# separately, and those that each row follows by itself.
_OF_REQUEST = {option.name for option in OPTIONS} - {"kernels", "graphs"} | {
    "max_new_tokens",
    "max_length",
    "min_new_tokens",
    "min_length",
    "max_time",
    "stop_strings",
    "num_return_sequences",
    "return_dict_in_generate",
    "output_scores",
    "output_logits",
}


class Batch:
    """Requests with the same setting (`setting_of`), decoded side by side.

    Args:
        model: An `MRPForCausalLM`.
        first: A request from which the batch takes its setting, mode and picker. It does not join
            by this; `add` lets it join.
        places: The largest number of rows that are decoded at the same time.
        capacity: Number of cache slots (tokens) of each row.
        prompt_tokens: The largest number of prompt tokens that are computed between two rounds.
        tell: A function that is called with each request whose text a round has extended or ended.

    Attributes:
        requests: Maps the `place` of each row to its request. It includes the requests that join
            before the next round.
        rounds: An iterator that runs one round at each step, until there is no request.
    """

    def __init__(
        self,
        model: Any,
        first: Request,
        places: int,
        capacity: int,
        prompt_tokens: int,
        tell: Callable[[Request], None],
    ) -> None:
        self.model = model
        self.call = first.call
        self.setting = first.setting
        self.places = places
        self.capacity = capacity
        self.prompt_tokens = prompt_tokens
        self.tell = tell
        self.requests: dict[int, Request] = {}
        self.joining: list[Row] = []
        self.rounds = self._rounds()

    @property
    def slots(self) -> int:
        """The number of tokens that fit into the batch's cache."""
        return self.places * self.capacity

    def takes(self, request: Request) -> bool:
        """Return whether a request can join the batch: it has the batch's setting, its text fits
        into the cache slots of a row, and the batch has fewer requests than `places`."""
        fits = request.setting == self.setting and request.size <= self.capacity
        return fits and len(self.requests) < self.places

    def add(self, request: Request, slot: int) -> None:
        """Add a request to the batch; its row joins before the next round.

        Args:
            request: A request that the batch `takes`.
            slot: A number that no other request of the batch has. It becomes the row's `place`, the
                request's key in `requests`.
        """
        request.begin()
        request.row.place = slot
        self.requests[slot] = request
        self.joining.append(request.row)

    def _rounds(self) -> Iterator[None]:
        call, block = self.call, self.model.config.block_size
        size = (self.places, self.capacity, call.mode.width * block, call.mode.uses_head)
        with weights_on_device(self.model.lm_head):
            picker = replace(call.picker, lm_head_weight=self.model.lm_head.weight)
            with networks_for(self.model, picker, call.config.graphs, None, *size) as networks:
                yield from JoinedRows(self, networks).rounds([], iter(()))

    def report(self, networks: Networks, rows: Sequence[Row]) -> None:
        """Update the results of requests after a round. Call `tell` (an argument of `Batch`) with
        each request that has new results, and remove the requests whose texts have ended.

        Args:
            networks: The networks of the batch, which compute the likeliest tokens for requests
                that ask for them.
            rows: The rows of the batch.
        """
        for row in rows:
            request = self.requests.get(row.place)
            if request is None:
                continue
            try:
                news = request.read(networks)
            except Exception as error:  # an error of the request's own criterion
                row.stop = row.prompt
                request.fail(f"{type(error).__name__}: {error}")
                news = True
            if row.stop is not None:
                del self.requests[row.place]
            if news:
                self.tell(request)

    def drop_cancelled(self) -> None:
        """End the rows of cancelled requests, and remove these requests."""
        for slot, request in list(self.requests.items()):
            if request.cancelled:
                del self.requests[slot]
                request.row.stop = request.row.prompt
                request.fail("it was cancelled")
                self.tell(request)
        self.joining = [row for row in self.joining if row.stop is None]


class JoinedRows(Decoder):
    """The decoder of a `Batch`: rows join the batch as requests arrive, and the batch grows for
    them.

    Args:
        batch: The `Batch`, whose requests are decoded.
        networks: The networks of the batch, which run the model and hold the cache.
    """

    def __init__(self, batch: Batch, networks: Networks) -> None:
        call = batch.call
        super().__init__(
            call.mode,
            networks,
            draft_amount(call.mode, call.picker, batch.model.config, call.config.round_costs),
            [lambda rows: batch.report(networks, rows)],
            1 if networks.recorded is None else 4,
            call.sources,
        )
        self.requests = batch
        self.reading: dict[int, Row] = {}  # rows whose prompts are being computed, by their places

    def rule_of(self, row: Row) -> RevealRule:
        """See `Decoder.rule_of`: return the rule of the row's request."""
        return self.requests.requests[row.place].call.mode.rule

    def join(self, batch: list[Row], waiting: Iterator[Row]) -> bool:
        """Let the rows of the requests that have arrived join `batch`, in place of ended rows or in
        new places. `waiting` is not used.

        Prompts are computed in parts, so that a long prompt does not delay the next round of the
        other rows. Return True if a row joined, or if one still waits because not all of its prompt
        has been computed; else False.
        """
        self.requests.drop_cancelled()
        for index, row in list(self.reading.items()):
            if row.stop is not None:
                del self.reading[index]
        self.make_room(batch)
        pending_reveals: list[PendingReveal | None] = [None] * len(batch)
        joined = bool(self.reading)  # the batch keeps places for these rows
        room = max(self.requests.prompt_tokens, self.networks.block)
        for index, row in list(self.reading.items()):
            needed = row.state.start + row.block_size - row.held
            if needed > room:
                self.read_part(batch[index], row, index, room // row.block_size * row.block_size)
                break
            room -= needed
            del self.reading[index]
            batch[index] = row
            (pending_reveals[index],) = self.prefill([row], [row.held], index)
        if any(pending_reveals):
            self.write(batch, pending_reveals)
        return joined

    def make_room(self, batch: list[Row]) -> None:
        """Assign a place in `batch`, the list of rows, to each request that has arrived: the place
        of an ended row, or a new one at the end. In each of these places, put an ended row. It
        stands in for the request's row until the keys and values of the whole prompt are
        computed."""
        joining, self.requests.joining = self.requests.joining, []
        if not joining:
            return
        ended = []
        for index, row in enumerate(batch):
            if row.stop is not None and index not in self.reading:
                row.forget()
                ended.append(index)
        if (needed := len(batch) - len(ended) + len(joining)) > len(batch):
            size = needed
            # there are few sizes, as each has its own recordings
            if self.networks.recorded is not None:
                size = min(self.requests.places, max(4, 1 << (needed - 1).bit_length()))
            ended += range(len(batch), size)
            while len(batch) < size:
                batch.append(vacant(joining[0]))
            self.networks.extend(size)
        for index, row in zip(ended, joining, strict=False):
            batch[index] = vacant(row)
            self.reading[index] = row

    def read_part(self, stand_in: Row, row: Row, index: int, tokens: int) -> None:
        """Compute keys and values of the next part of a row's prompt, before the row joins the
        batch.

        Args:
            stand_in: The ended row that is in the batch in the row's place.
            row: The row that will join.
            index: The index in the batch at which it will join.
            tokens: The number of tokens of the part, whole blocks; if 0, nothing is computed.
        """
        if tokens:
            self.networks.read_ahead(row, index, row.held, row.held + tokens)
            stand_in.held, stand_in.head_held = row.held, row.head_held


def vacant(row: Row) -> Row:
    """Make a row that is marked as ended, to fill a place of the batch until another row takes it:
    a copy of `row`, reset to its text before the first step. `row` stays as it is."""
    ended = row.rewound(0)
    ended.place, ended.stop = -1, ended.prompt
    return ended


def setting_of(call: Call, options: dict[str, Any]) -> Hashable:
    """Return the settings that all requests of a batch must share, as one value: two requests may
    share a batch if their values are equal.

    Args:
        call: The checked call of a request.
        options: The arguments with which the request was made. Of these, `logits_processor` and
            `draft_sources` must be the same objects.
    """
    shared = []
    for name, value in vars(call.config).items():
        if name not in _OF_REQUEST and value is not None and not name.startswith("_"):
            shared.append((name, repr(value)))
    objects = []
    for name in ("logits_processor", "draft_sources"):
        objects += [id(part) for part in options.get(name) or ()]
    mode = call.mode
    refine = (mode.refine, mode.drafting, mode.rule.needs_entropy)
    return refine, tuple(sorted(shared)), tuple(objects)
