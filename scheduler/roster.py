"""Who is there, in which state, and who holds blocks.

::

    add -> HELD ----> WAITING <----> RUNNING ----> FINISHED
           (the       queue,  admit  a seat and
           prompt is  no      <----  blocks
           computed   blocks preempt
           by another)

Every change of state is made here, so every block that is given out comes back here. While a step runs its planned
sequences and the KV manager belong to it: what ends meanwhile is only marked, and freed when the step is over.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence

from kvcache.manager import KVCacheManager
from scheduler.choice import Choice, ChoiceState, RequestGroup
from scheduler.queue import WaitingQueue
from scheduler.stats import FinishedChoice, StepTally
from specdec.plan import StepPlan
from specdec.sequence import Sequence as DecodedSequence


class Roster:
    def __init__(self, manager: KVCacheManager, max_num_seqs: int) -> None:
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.groups: dict[str, RequestGroup] = {}
        self.choices: dict[int, Choice] = {}  # unfinished ones, by seq_id
        self.running: list[Choice] = []  # by rank, best first
        self.waiting = WaitingQueue()
        self.in_flight: StepPlan | None = None
        self.released: list[int] = []  # sequences that the step must forget
        self.tally = StepTally()
        self.num_unstarted = 0  # requests of which no choice has run
        self.unstarted_tokens = 0  # their prompt tokens
        self._doomed: list[DecodedSequence] = []
        # The head of the queue that found no room, and how many blocks were available then.
        self._blocked: tuple[Choice, int] | None = None

    @property
    def oldest_arrival(self) -> float | None:
        """Of the requests of which no choice has run; None without any."""
        if not self.num_unstarted:
            return None
        return min(group.request.arrival_time for group in self.groups.values() if not group.started)

    @property
    def num_seats(self) -> int:
        """Free ones."""
        return self.max_num_seqs - len(self.running)

    @property
    def blocked(self) -> bool:
        """The head of the queue found no room, and no blocks came back since."""
        return (
            self._blocked is not None
            and bool(self.running)
            and self._blocked[0] is self.waiting.head
            and self._available_blocks() <= self._blocked[1]
        )

    def add(self, group: RequestGroup) -> None:
        """Take in a request with all its choices in state HELD, and send on who need not wait."""
        group.num_open = len(group.choices)
        group.held = group.choices[::-1]  # the next one to go is the last
        self.groups[group.request.request_id] = group
        self.choices.update((choice.sequence.seq_id, choice) for choice in group.choices)
        self.num_unstarted += 1
        self.unstarted_tokens += len(group.request.prompt_token_ids)
        self.send_on(group)

    def send_on(self, group: RequestGroup) -> None:
        """Queue the held choices that need not wait: all once the prompt is computed, else one to compute it."""
        while group.held and (group.ready or len(group.held) == group.num_open):
            choice = group.held.pop()
            choice.state = ChoiceState.WAITING
            self.waiting.push(choice)

    def admit(self, now: float) -> Choice | None:
        """Give the queue's head a seat and blocks for all its known tokens, so that its prefill never runs out of them.

        None if there is nobody, no seat, or no room. One block for each running choice must be left over: they all
        grow, and the one that came last would be preempted for it before long.
        """
        choice = self.waiting.head
        # While it is blocked nothing is tried: hashing a long prompt in every step is dear.
        if choice is None or self.num_seats <= 0 or self.blocked:
            return None
        sequence = choice.sequence
        num_known = len(sequence.tokens)
        hits = 0
        if choice.may_read_prefix:
            # At least one row must run: the last token's logits are not cached.
            hits = self.manager.match_prefix(sequence.table, sequence.tokens, num_known - 1)
        if not self.manager.reserve(sequence.table, num_known) or self._available_blocks() < len(self.running):
            self.manager.free(sequence.table)
            self._blocked = (choice, self._available_blocks())
            return None
        self._blocked = None
        if choice.may_read_prefix:
            self.tally.prefix_queries += num_known - 1
            self.tally.prefix_hits += hits
        self.waiting.remove(choice)
        choice.state = ChoiceState.RUNNING
        sequence.num_computed = hits
        insort(self.running, choice, key=lambda other: other.rank)
        choice.emitted_since_admission = False
        if choice.first_scheduled_time is None:
            choice.first_scheduled_time = now
            choice.num_cached_tokens = hits
        self._mark_started(choice.group)
        return choice

    def preempt(self, choice: Choice) -> None:
        """Back to the queue, without blocks, to compute all its tokens again."""
        self.running.remove(choice)
        # The step forgets it too: what a drafter computed for it lies in the blocks that are given back.
        self._let_go(choice.sequence)
        choice.sequence.num_computed = 0
        choice.num_preemptions += 1
        choice.state = ChoiceState.WAITING
        self.waiting.push(choice)
        self.tally.num_preemptions += 1

    def finish(self, choice: Choice, reason: str, now: float) -> None:
        """End the choice; its blocks are free at once, or when the step that runs is over."""
        group = choice.group
        request_id = group.request.request_id
        if choice.state is ChoiceState.RUNNING:
            self.running.remove(choice)
            if self.in_flight is None:
                self._let_go(choice.sequence)
            else:
                self._doomed.append(choice.sequence)
        elif choice.state is ChoiceState.WAITING:
            self.waiting.remove(choice)
        elif choice.state is ChoiceState.HELD:
            group.held.remove(choice)
        choice.state = ChoiceState.FINISHED
        del self.choices[choice.sequence.seq_id]
        group.num_open -= 1
        last = group.num_open == 0
        self.tally.finished.append(
            FinishedChoice(
                request_id,
                choice.index,
                reason,
                choice.timing(now),
                now,
                last_of_request=last,
                key=choice.sequence.seq_id,
            )
        )
        if last:
            self._mark_started(group)
            del self.groups[request_id]
        else:
            self.send_on(group)

    def open_choices(self, request_id: str) -> list[Choice]:
        """The unfinished choices of a request, those that wait for others first; empty for an unknown id."""
        group = self.groups.get(request_id)
        if group is None:
            return []
        others = (c for c in group.choices if c.state not in (ChoiceState.HELD, ChoiceState.FINISHED))
        return [*group.held, *others]

    def check_in_flight(self, plan: StepPlan) -> None:
        """Raises RuntimeError if ``plan`` is not the one that runs."""
        if plan is not self.in_flight:
            raise RuntimeError("this plan is not the one that runs")

    def end_step(self, plan: StepPlan) -> None:
        """Raises RuntimeError if ``plan`` is not the one that runs."""
        self.check_in_flight(plan)
        self.in_flight = None
        for sequence in self._doomed:
            self._let_go(sequence)
        self._doomed.clear()

    def check_integrity(self, others: Sequence[DecodedSequence] = ()) -> None:
        """Raise AssertionError unless seats, queue, groups and blocks agree; ``others`` hold blocks too."""
        ranks = [choice.rank for choice in self.running]
        assert ranks == sorted(ranks), ranks
        assert len(self.running) <= self.max_num_seqs, len(self.running)
        assert len(self.choices) == sum(1 for _ in self._by_state())
        for choice, state in self._by_state():
            sequence = choice.sequence
            assert choice.state is state, (sequence.seq_id, choice.state, state)
            assert self.choices.get(sequence.seq_id) is choice, sequence.seq_id
            sequence.check_integrity()
            if state is not ChoiceState.RUNNING:
                assert not sequence.table.blocks, (sequence.seq_id, "waits with blocks")
                assert sequence.num_computed == 0, sequence.seq_id
        self.waiting.check_integrity()
        for request_id, group in self.groups.items():
            num_open = sum(choice.state is not ChoiceState.FINISHED for choice in group.choices)
            assert group.request.request_id == request_id
            assert group.num_open == num_open > 0, (request_id, group.num_open, num_open)
            assert not (group.ready and group.held), (request_id, "ready, and holds choices back")
            assert len(group.held) < num_open, (request_id, "all choices are held back")
        unstarted = [group.request for group in self.groups.values() if not group.started]
        assert self.num_unstarted == len(unstarted), (self.num_unstarted, len(unstarted))
        assert self.unstarted_tokens == sum(len(request.prompt_token_ids) for request in unstarted)
        assert self.in_flight is not None or not self._doomed
        holders = [choice.sequence for choice in self.running] + self._doomed
        self.manager.check_integrity(sequence.table for sequence in (*holders, *others))

    def _let_go(self, sequence: DecodedSequence) -> None:
        self.manager.free(sequence.table)
        self.released.append(sequence.seq_id)

    def _by_state(self) -> Iterator[tuple[Choice, ChoiceState]]:
        yield from ((choice, ChoiceState.RUNNING) for choice in self.running)
        yield from ((choice, ChoiceState.WAITING) for choice in self.waiting)
        yield from ((choice, ChoiceState.HELD) for group in self.groups.values() for choice in group.held)

    def _available_blocks(self) -> int:
        stats = self.manager.stats()
        return stats.free_blocks + stats.cached_blocks

    def _mark_started(self, group: RequestGroup) -> None:
        if not group.started:
            group.started = True
            self.num_unstarted -= 1
            self.unstarted_tokens -= len(group.request.prompt_token_ids)
