"""What the controller would have drafted and had accepted on known outputs, at the step times that were measured here.

The drafters, the controller and its decisions are the server's; only the forwards are replaced by the outputs, which
say what the target emits, and by the cost curve, which says how long a step takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from bench.preflight.acceptance import Replay, Tally
from bench.preflight.cost import StepCost
from kvcache.table import BlockTable
from specdec.draft_length.controller import DraftLengthController
from specdec.draft_length.cost import StepCost as StepCurve
from specdec.drafters.registry import AUTO, make_drafter
from specdec.drafting import Drafting
from specdec.params import SamplingParams
from specdec.proposing import Proposing, Wish
from specdec.sequence import Sequence
from specdec.speculation import TEXT_DRAFTERS, Speculation


@dataclass(slots=True)
class _Seat:
    sequence: Sequence
    output: Seq[int]

    @property
    def left(self) -> Seq[int]:
        return self.output[self.sequence.num_output_tokens :]


def replay_controlled(
    name: str,
    outputs: Iterable[tuple[Seq[int], Seq[int]]],
    k: int,
    *,
    batch: int,
    cost: StepCost,
    vocab_size: int,
    adaptive: bool = True,
) -> Replay:
    """``name`` (a drafter of text, or auto for all of them) along each (prompt, output) in ids, ``batch`` at a time.

    The first output token comes from the prefill, without a draft; prefills take no time. ``adaptive`` as in
    :class:`DraftLengthController`. Raises ValueError for a drafter that needs more than tokens.
    """
    names = TEXT_DRAFTERS if name == AUTO else (name,)
    speculation = Speculation(
        {one: make_drafter(one, vocab_size) for one in names},
        name,
        DraftLengthController(_curve(cost), adaptive=adaptive),
    )
    drafting = Drafting(speculation.drafters, name, vocab_size, speculation.auto)
    proposing = Proposing(drafting, name, speculation.controller)
    waiting = deque(enumerate(outputs))
    tally = Tally(k)
    seats: list[_Seat] = []
    while True:
        while waiting and len(seats) < batch:
            seq_id, (prompt, output) = waiting.popleft()
            tally.num_requests += 1
            if len(output) > 1:
                sequence = Sequence(seq_id, list(prompt), SamplingParams(seed=0, max_tokens=len(output)), BlockTable(1))
                sequence.tokens.extend(output[:1])
                seats.append(_Seat(sequence, output))
        if not seats:
            return tally.replay(name, batch)
        _step(seats, k, drafting, proposing, cost, tally)
        for seat in seats:
            if not seat.left:
                drafting.release(seat.sequence.seq_id)
                proposing.release(seat.sequence.seq_id)
        seats = [seat for seat in seats if seat.left]


def _step(seats: list[_Seat], k: int, drafting: Drafting, proposing: Proposing, cost: StepCost, tally: Tally) -> None:
    wishes = {i: Wish(seat.sequence, limit) for i, seat in enumerate(seats) if (limit := min(k, len(seat.left) - 1))}
    found, _ = proposing.drafts(list(wishes.values()), rows=len(seats), tokens=len(seats))
    drafts = dict(zip(wishes, found, strict=True))
    emitted: dict[int, list[int]] = {}
    rows = len(seats)
    for i, seat in enumerate(seats):
        draft = drafts[i].token_ids if i in drafts else ()
        rows += len(draft)
        new = list(seat.left[: tally.count(draft, seat.left) + 1])
        emitted[seat.sequence.seq_id] = new
        seat.sequence.tokens.extend(new)
    for seat in seats:
        drafting.update(seat.sequence, len(emitted[seat.sequence.seq_id]))
    proposing.observe(emitted, rows=rows, seconds=cost.seconds(len(seats), rows / len(seats) - 1))


def _curve(cost: StepCost) -> StepCurve:
    """Seconds by rows, whatever the batch they belong to."""
    by_rows: dict[int, list[float]] = {}
    for (batch, k), timing in cost.timings.items():
        by_rows.setdefault(batch * (k + 1), []).append(timing.median)
    return StepCurve([(rows, sum(seconds) / len(seconds)) for rows, seconds in by_rows.items()])
