"""Picks each sequence's drafter and draft length in each step, so that the whole batch emits the most tokens a second.

::

    cheap drafters propose -> plan: who drafts, whether the costly ones run, and how far
    costly drafters propose -> settle: what is verified of each draft
    the step runs -> observe: what came, and how long it took

What it picks can change the speed, never the output. It keeps no clock and draws no lots: the same calls give the same
picks, so a recorded run can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.draft_length.acceptance import FLOOR, Acceptance
from specdec.draft_length.cost import StepCost
from specdec.draft_length.lengths import Choice, DraftRounds, choose_lengths
from specdec.draft_length.pace import MOST_SKIPPED, Pace
from specdec.draft_length.worth import Worth
from specdec.drafters.draft import Draft

LEAST_GAIN = 1.03  # below it, no draft is the safer bet: estimates are noisy, and rows cost memory too
PROBE_SHARE = 0.01  # of the time, for drafts of costly drafters that nobody expects to pay
PROBE_TOKENS = 2
_WORTH_A_LOOK = 0.3  # chance that a draft token needs to be verified for the sake of the cost curve
_LOOK_PRICE = 4.0  # times what that should cost: it may be as dear as thought, or dearer
_MOST_SILENT = 63  # steps until a costly drafter that gave no draft is asked again
_SEQUENCES_PER_SKIP = 2  # a host that drafts for few sequences in a step is not what the step waits for
_MOST_SAVED = 2.0  # seconds of it, so that a long idle spell does not buy a burst
_TRUST_WEIGHT, _TRUST_DECAY, _LEAST_TRUST = 10.0, 0.98, 0.5  # tokens, a step, and what is never gone below
# Steps over which the rows that a costly drafter lacks are written off: so many, or more where many tokens are to come.
_CATCH_UP_STEPS = 16
_TOKENS_PER_STEP = 4  # that a sequence may get while it drafts; with fewer, it has even more steps
_MOST_CATCH_UP_STEPS = 256  # a limit of output tokens is seldom reached

Seconds = Callable[[int], float]  # of so many rows


@dataclass(frozen=True, slots=True)
class Ask:
    """What one sequence could have in this step."""

    seq_id: int
    max_drafts: int
    drafts: tuple[Draft, ...] = ()  # made by cheap drafters
    missing: Mapping[str, int] | None = None  # costly drafters that could draft, and the rows they lack
    fixed: bool = False  # its request asked for so many drafts: all are verified, whatever they bring
    tokens_left: int = 0  # that its request may still get at most

    @property
    def steps_left(self) -> int:
        """Over which a costly drafter may write off what it lacks."""
        return min(max(self.tokens_left // _TOKENS_PER_STEP, _CATCH_UP_STEPS), _MOST_CATCH_UP_STEPS)


@dataclass(frozen=True, slots=True)
class Pick:
    """``drafts[index]`` of an ask; or, if ``costly`` is named, up to ``length`` tokens of that drafter; or nothing."""

    index: int | None = None
    costly: str = ""
    length: int = 0


_NOTHING = Pick()


class DraftLengthController:
    """For one engine; called in the order of its steps, from the thread that runs them.

    ``rounds`` has the costly drafters by name and what a round of so many rows takes. With ``adaptive`` False every
    draft is verified as long as it was proposed, and only the drafter is picked. Raises ValueError for a gain below 1.
    """

    def __init__(
        self,
        cost: StepCost,
        *,
        rounds: Mapping[str, Seconds] | None = None,
        least_gain: float = LEAST_GAIN,
        adaptive: bool = True,
    ) -> None:
        if least_gain < 1.0:
            raise ValueError(f"the least gain is 1 or more, got {least_gain}")
        self.cost = cost
        self.acceptance = Acceptance()
        self._least_gain = least_gain
        self._adaptive = adaptive
        self._pace = Pace()
        self._most_skipped = MOST_SKIPPED  # by a sequence in a batch as large as the latest
        self._worth = Worth()
        self._rows = self._tokens = 0  # of the step without drafts
        self._rounds: dict[str, Seconds] = {}
        self._silent: dict[str, Pace] = {}  # costly drafters that gave no draft
        self._lacked: dict[tuple[int, str], int] = {}  # rows they lacked then
        self.use(rounds or {})
        # Drafts are verified because they look good, so more of them disappoint than surprise: what was expected of the
        # verified ones, and what came. Both fade, so that after a spell without drafts they are tried again.
        self._expected = self._right = 0.0
        self._chosen: list[tuple[float, int]] = []  # of each ask: expected, and how many drafts are verified
        self._saved = 0.0  # seconds that probing may take
        self._turn = 0  # of the costly drafters, for probing
        self._asked = True
        self._asks: Seq[Ask] = ()
        self._picks: list[Pick] = []
        self._known: list[list[float]] = []  # chances of each ask's best cheap draft
        self._made: Seq[Draft | None] = ()
        self._probed: int | None = None  # which ask's costly draft is a probe

    def use(self, rounds: Mapping[str, Seconds]) -> None:
        """Replace the costly drafters and what their rounds take."""
        self._rounds = dict(rounds)
        self._silent = {name: Pace() for name in rounds}

    def asking(self) -> bool:
        """Whether anybody should be asked for drafts in this step, but for requests that named a number; call it once a
        step, and ``due`` only if so."""
        self._asked = not self._adaptive or self._worth.asking()
        return self._asked

    def due(self, seq_id: int) -> bool:
        """Whether a sequence should be asked for drafts in this step; call it once a step."""
        return not self._adaptive or self._pace.due(seq_id, self._most_skipped)

    def plan(self, asks: Seq[Ask], *, rows: int, tokens: int) -> list[Pick]:
        """Who drafts for each sequence that is due, in a step that has ``rows`` rows and emits ``tokens`` without
        drafts."""
        self._asks, self._probed = asks, None
        cheap = [self._best_cheap(ask) for ask in asks]
        known = self._known = [chances for _, chances in cheap]
        picks = [
            self._fixed_pick(ask, index, chances)
            if self._is_fixed(ask)
            else _NOTHING
            if index is None
            else Pick(index, length=len(chances))
            for ask, (index, chances) in zip(asks, cheap, strict=True)
        ]
        self._picks = picks
        if not self._rounds:
            return picks
        able = {name: self._able(name) for name in self._rounds}
        best = self._lengths(known, rows, tokens).rate * self._least_gain
        chosen = picks
        for name, missing in able.items():
            chances = list(known)
            better: dict[int, int] = {}
            for s, lacks in missing.items():
                own = self.acceptance.survivals(asks[s].seq_id, name, asks[s].max_drafts, None)
                if sum(own) > sum(known[s]):
                    chances[s] = own
                    better[s] = -(-lacks // asks[s].steps_left)
            if not better:
                continue
            choice = self._lengths(chances, rows, tokens, DraftRounds(self._rounds[name], better))
            if choice.rate > best:
                best = choice.rate
                chosen = [
                    Pick(costly=name, length=choice.lengths[s]) if s in better and choice.lengths[s] else pick
                    for s, pick in enumerate(picks)
                ]
        if chosen is picks:
            self._probe(picks, able, rows, [sum(chances) / best for chances in known])
        self._picks = chosen
        return chosen

    def settle(self, drafts: Seq[Draft | None], *, rows: int, tokens: int) -> Choice:
        """How many tokens of each draft, made as planned, the step should verify."""
        self._made, self._rows, self._tokens = drafts, rows, max(1, tokens)
        chances: list[Seq[float]] = []
        for s, (ask, pick, draft) in enumerate(zip(self._asks, self._picks, drafts, strict=True)):
            if pick.index is not None:
                chances.append(self._known[s])
            elif draft is None or not draft.token_ids:
                chances.append([])
            else:
                whole = self._chances(ask, draft)
                chances.append([1.0] * len(whole) if s == self._probed else whole)  # it was paid for to be seen
        choice = self._lengths(chances, rows, tokens)
        if self._adaptive:
            choice = self._look_at_costs(chances, choice, rows)
        self._chosen = [(sum(c[:length]), length) for c, length in zip(chances, choice.lengths, strict=True)]
        if self._adaptive:
            if tokens:
                self._most_skipped = min(MOST_SKIPPED, tokens // _SEQUENCES_PER_SKIP)
            for ask, length in zip(self._asks, choice.lengths, strict=True):
                if any(draft.token_ids for draft in ask.drafts):
                    self._pace.decided(ask.seq_id, worth=length > 0, most=self._most_skipped)
        return choice

    def observe(self, emitted: Seq[Seq[int]], *, rows: int, seconds: float, drafting: float = 0.0) -> None:
        """The step ran ``rows`` rows in ``seconds``, without ``drafting`` before it; each ask got ``emitted``."""
        self._expected *= _TRUST_DECAY
        self._right *= _TRUST_DECAY
        drafted = accepted = 0  # of those that did not ask for a number
        for s, (ask, pick, made, ids) in enumerate(zip(self._asks, self._picks, self._made, emitted, strict=True)):
            if not ids:
                continue
            expected, length = self._chosen[s]
            if length and not self._is_fixed(ask):
                drafted += length
                accepted += min(len(ids) - 1, length)
            if length and s != self._probed:
                self._expected += expected
                self._right += min(len(ids) - 1, length)
            for draft in ask.drafts:
                self.acceptance.record(ask.seq_id, draft.drafter, draft.token_ids, draft.cumulative, ids)
            if pick.costly:
                self._note_silence(ask, pick.costly, made)
            # No draft at all says nothing: who still takes in a prompt, or failed, was neither right nor wrong.
            if pick.costly and made is not None and made.token_ids:
                # What it did not dare to draft counts as wrong: plans are made by position, before it dares.
                padded = (*made.token_ids, *(-1 for _ in range(pick.length - len(made.token_ids))))
                self.acceptance.record(ask.seq_id, pick.costly, padded, None, ids)
                if made.cumulative is not None:
                    self.acceptance.record(ask.seq_id, pick.costly, made.token_ids, made.cumulative, ids)
        if self._adaptive and self._asked and self._tokens:
            self._account(drafted, accepted, drafting * self._charged())
        self._asks, self._picks, self._made, self._tokens = (), [], (), 0
        self.cost.observe(rows, seconds)
        self._saved = min(self._saved + PROBE_SHARE * seconds, _MOST_SAVED)

    def _account(self, drafted: int, accepted: int, drafting: float) -> None:
        """An accepted token saves its share of a later step of as many sequences."""
        plain = self.cost.seconds(self._rows)
        self._worth.observe(
            accepted * self.cost.seconds(self._tokens) / self._tokens,
            self.cost.seconds(self._rows + drafted) - plain + drafting,
            plain,
        )

    def _charged(self) -> float:
        """The share of the time for drafting that is on the account: not that of requests that named a number, not that
        in which a costly drafter takes in what it lacks, which the plan wrote off over the steps to come, and not that
        of a probe, which was saved for. Where it does any of these, what is left for the others is not known, and next
        to it little."""
        if self._probed is not None:
            return 0.0
        named = 0
        for ask, pick, made in zip(self._asks, self._picks, self._made, strict=True):
            named += self._is_fixed(ask)
            if pick.costly and (self._is_fixed(ask) or made is None or not made.token_ids):
                return 0.0
        return 1.0 - named / len(self._asks) if named else 1.0

    @property
    def trust(self) -> float:
        """What came of verified drafts, over what was expected of them; at most 1."""
        ratio = (self._right + _TRUST_WEIGHT) / (self._expected + _TRUST_WEIGHT)
        return min(max(ratio, _LEAST_TRUST), 1.0)

    def release(self, seq_id: int) -> None:
        """Forget a sequence."""
        self.acceptance.release(seq_id)
        self._pace.release(seq_id)
        for name, pace in self._silent.items():
            pace.release(seq_id)
            self._lacked.pop((seq_id, name), None)

    def _is_fixed(self, ask: Ask) -> bool:
        return ask.fixed or not self._adaptive

    def _fixed_pick(self, ask: Ask, index: int | None, chances: Seq[float]) -> Pick:
        """Of all that could draft for a request that named a number, who should have the most tokens accepted."""
        best, most = _NOTHING if index is None else Pick(index, length=len(chances)), sum(chances)
        for name in ask.missing or ():
            expected = sum(self.acceptance.survivals(ask.seq_id, name, ask.max_drafts, None, 0.0))
            if expected > most:
                best, most = Pick(costly=name, length=ask.max_drafts), expected
        return best

    def _able(self, name: str) -> dict[int, int]:
        """The asks that costly drafter ``name`` could draft for, and the rows it lacks; not those it was silent at."""
        return {
            s: ask.missing[name]
            for s, ask in enumerate(self._asks)
            if ask.missing is not None
            and name in ask.missing
            and not self._is_fixed(ask)
            and self._silent[name].due(ask.seq_id)
        }

    def _note_silence(self, ask: Ask, name: str, made: Draft | None) -> None:
        """Who gives no draft though it lacks nothing, or lacks what it lacked before, is not asked again soon."""
        key = (ask.seq_id, name)
        if made is not None and made.token_ids:
            self._silent[name].decided(ask.seq_id, worth=True)
            self._lacked.pop(key, None)
            return
        missing = (ask.missing or {}).get(name, 0)
        moved_on = missing > 0 and missing < self._lacked.get(key, missing + 1)
        self._lacked[key] = missing
        self._silent[name].decided(ask.seq_id, worth=moved_on, most=_MOST_SILENT)

    def _look_at_costs(self, chances: Seq[Seq[float]], choice: Choice, rows: int) -> Choice:
        """Verify one more token of a promising draft for what was saved, though it should not pay: rows that no step
        has are not known to be dear, only thought to be."""
        rows += sum(choice.lengths)
        if self.cost.is_known(rows + 1):
            return choice
        price = self.cost.seconds(rows + 1) - self.cost.seconds(rows)
        if _LOOK_PRICE * price > self._saved:
            return choice
        chance, s = max(
            ((c[n], -s) for s, (c, n) in enumerate(zip(chances, choice.lengths, strict=True)) if n < len(c)),
            default=(0.0, 0),
        )
        if chance < _WORTH_A_LOOK:
            return choice
        self._saved -= _LOOK_PRICE * price
        lengths = tuple(length + (i == -s) for i, length in enumerate(choice.lengths))
        tokens, seconds = choice.tokens + chance, choice.seconds + price
        return Choice(lengths, tokens, seconds, tokens / seconds * choice.speedup / choice.rate)

    def _best_cheap(self, ask: Ask) -> tuple[int | None, list[float]]:
        """The cheap draft that should have the most tokens accepted, and its chances."""
        best: tuple[int | None, list[float]] = (None, [])
        most = 0.0
        for index, draft in enumerate(ask.drafts):
            chances = self._chances(ask, draft)
            expected = sum(chances)
            if expected > most:
                best, most = (index, chances), expected
        return best

    def _chances(self, ask: Ask, draft: Draft) -> list[float]:
        """Of all tokens for a request that named a number, else of those worth a thought."""
        floor = 0.0 if self._is_fixed(ask) else FLOOR
        return self.acceptance.survivals(ask.seq_id, draft.drafter, len(draft.token_ids), draft.cumulative, floor)

    def _lengths(self, chances: Seq[Seq[float]], rows: int, tokens: int, rounds: DraftRounds | None = None) -> Choice:
        fixed = {s for s, ask in enumerate(self._asks) if self._is_fixed(ask)}
        trust = self.trust
        choice = choose_lengths(
            [() if s in fixed else [trust * chance for chance in c] for s, c in enumerate(chances)],
            rows=rows + sum(len(chances[s]) for s in fixed),
            tokens=max(1, tokens) + sum(sum(chances[s]) for s in fixed),
            cost=self.cost,
            least_gain=self._least_gain,
            rounds=rounds,
        )
        if not fixed:
            return choice
        lengths = list(choice.lengths)
        for s in fixed:
            lengths[s] = len(chances[s])
        plain = max(1, tokens) / self.cost.seconds(rows)
        return Choice(tuple(lengths), choice.tokens, choice.seconds, choice.rate / plain)

    def _probe(self, picks: list[Pick], able: Mapping[str, Mapping[int, int]], rows: int, forgone: Seq[float]) -> None:
        """Spend what was saved on a short costly draft, for the sequence where it costs least.

        ``able``: rows that each drafter lacks, by ask. ``forgone``: the seconds that each one's cheap draft is worth.
        """
        names = list(self._rounds)
        for turn in range(len(names)):
            name = names[(self._turn + turn) % len(names)]
            if not able[name]:
                continue
            price, s = min((self._rounds[name](1 + lacks) + forgone[s], s) for s, lacks in able[name].items())
            length = min(PROBE_TOKENS, self._asks[s].max_drafts)
            price += (length - 1) * self._rounds[name](1)
            price += self.cost.seconds(rows + length) - self.cost.seconds(rows)
            if price <= self._saved:
                self._saved -= price
                self._turn += turn + 1
                picks[s] = Pick(costly=name, length=length)
                self._probed = s
                return
