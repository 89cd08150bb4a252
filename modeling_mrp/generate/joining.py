"""Batches that requests join and leave between rounds.

Requests share a batch if all that its rounds have in common is equal (`setting_of`): sampling,
processors, drafting, refinement. Prompt, target, seed, limits of length and stopping criteria are
each request's own.
"""

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from ..model.loading import weights_on_device
from ..networks.networks import Networks, networks_for
from ..rules.reveal import RevealRule
from ..rules.state import Frontier, Row
from .loop import Decoder, draft_amount
from .option_table import OPTIONS
from .request import Call, Request

# Options of a request that others of its batch need not share: those behind its `Mode`, which is
# compared itself, and those that its row heeds.
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
    """Requests of one setting, decoded side by side.

    Args:
        model: An `MRPForCausalLM`.
        first: A request of the setting.
        places: Rows that decode at once, at most.
        capacity: Slots of each.
        prompt_tokens: Tokens of prompts that are computed between two rounds, at most.
        tell: Called with each request of which a round has made something.

    Attributes:
        requests: Those that are decoded, by the `place` of their rows, and those that join next.
        rounds: Runs a round each time it is advanced, until there is no request.
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
        """The number of tokens of texts that its cache has room for."""
        return self.places * self.capacity

    def takes(self, request: Request) -> bool:
        """Return whether a request can join."""
        fits = request.setting == self.setting and request.size <= self.capacity
        return fits and len(self.requests) < self.places

    def add(self, request: Request, slot: int) -> None:
        """Let a request join before the next round."""
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
        """Tell what a round has made of requests."""
        for row in rows:
            request = self.requests.get(row.place)
            if request is None:
                continue
            try:
                news = request.read(networks)
            except Exception as error:  # of the request's own criterion
                row.stop = row.prompt
                request.fail(f"{type(error).__name__}: {error}")
                news = True
            if row.stop is not None:
                del self.requests[row.place]
            if news:
                self.tell(request)

    def drop_cancelled(self) -> None:
        """End the rows of requests for which nobody waits any more."""
        for slot, request in list(self.requests.items()):
            if request.cancelled:
                del self.requests[slot]
                request.row.stop = request.row.prompt
                request.fail("it was cancelled")
                self.tell(request)
        self.joining = [row for row in self.joining if row.stop is None]


class JoinedRows(Decoder):
    """The decoder of a `Batch`: rows join it as requests come, and it grows for them."""

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
        """See `Decoder.rule_of`: the rule of the row's request."""
        return self.requests.requests[row.place].call.mode.rule

    def join(self, batch: list[Row], waiting: Iterator[Row]) -> bool:
        """See `Decoder.join`: those that wait are the requests that came since the last round. Of
        their prompts a part is computed at a time, so that a long one does not keep those that
        decode from their next round."""
        self.requests.drop_cancelled()
        for index, row in list(self.reading.items()):
            if row.stop is not None:
                del self.reading[index]
        self.make_room(batch)
        frontiers: list[Frontier | None] = [None] * len(batch)
        joined = bool(self.reading)  # the batch keeps its places for them
        room = max(self.requests.prompt_tokens, self.networks.block)
        for index, row in list(self.reading.items()):
            needed = row.state.start + row.block_size - row.held
            if needed > room:
                self.read_part(batch[index], row, index, room // row.block_size * row.block_size)
                break
            room -= needed
            del self.reading[index]
            batch[index] = row
            (frontiers[index],) = self.prefill([row], [row.held], index)
        if any(frontiers):
            self.write(batch, frontiers)
        return joined

    def make_room(self, batch: list[Row]) -> None:
        """Give requests that have come places of the batch, which grows for them."""
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
            if self.networks.recorded is not None:  # few sizes, each of which has its recordings
                size = min(self.requests.places, max(4, 1 << (needed - 1).bit_length()))
            ended += range(len(batch), size)
            while len(batch) < size:
                batch.append(vacant(joining[0]))
            self.networks.extend(size)
        for index, row in zip(ended, joining, strict=False):
            batch[index] = vacant(row)
            self.reading[index] = row

    def read_part(self, stand_in: Row, row: Row, index: int, tokens: int) -> None:
        """Compute the next `tokens` of a prompt; `stand_in` takes its row's place in rounds."""
        if tokens:
            self.networks.read_ahead(row, index, row.held, row.held + tokens)
            stand_in.held, stand_in.head_held = row.held, row.head_held


def vacant(row: Row) -> Row:
    """Make a row that has ended, for a place that another one may take."""
    ended = row.rewound(0)
    ended.place, ended.stop = -1, ended.prompt
    return ended


def setting_of(call: Call, options: dict[str, Any]) -> Hashable:
    """Return what the requests of a batch have in common; `options` are the arguments given."""
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
