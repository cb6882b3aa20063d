"""A load test of streaming completions and chats; docs/load_tests.md says what it measures and how to read it.

::

    locust -f deploy/locust/locustfile.py --host http://127.0.0.1:8000 --headless -u 8 -t 60s --warm-up 5
"""

from __future__ import annotations

import sys
import time
from typing import ClassVar

import gevent
from gevent.pool import Group
from load_test.flags import FLAGS
from load_test.options import read_options
from load_test.record import Record
from load_test.run import Run, Session
from locust import User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.env import Environment

NO_ANSWER = 1.0  # seconds that a user of a closed loop waits after a failure


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_flags(parser: LocustArgumentParser) -> None:
    for flag in FLAGS:
        parser.add_argument(flag.option, **flag.arguments)


@events.init.add_listener  # type: ignore[untyped-decorator]
def make_run(environment: Environment, **_: object) -> None:
    try:
        StreamingUser.load = Run(environment, read_options(vars(environment.parsed_options)))
    except ValueError as error:
        print(f"locust: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    # Timers count from when the event loop last looked at the clock, before all imports: --run-time would be cut short.
    gevent.get_hub().loop.update_now()


class StreamingUser(User):
    """In a closed loop it asks, reads the answer, thinks, and asks again. In an open loop it is a source of requests,
    each of which goes its own way."""

    load: ClassVar[Run]

    def __init__(self, environment: Environment) -> None:
        super().__init__(environment)
        self._requests = Group()
        self._pause = 0.0  # seconds before the next request: what the server asked for
        self._scheduled = False
        self._session = self.load.session()

    def wait_time(self) -> float:
        if self._session is None:
            return NO_ANSWER
        if self._session.arrivals is not None:
            return max(0.0, self._session.arrivals.next - time.perf_counter())
        pause, self._pause = self._pause, 0.0
        return max(pause, self.load.options.think_time)

    @task
    def ask(self) -> None:
        session = self._session
        if session is None:
            return
        if session.arrivals is None:
            self._send(session, time.perf_counter())
        elif self._scheduled:
            self._requests.spawn(self._send, session, session.arrivals.take())
        self._scheduled = True  # an open loop waits for its first arrival

    def _send(self, session: Session, due: float) -> None:
        wanted = session.bodies.next()
        now = time.perf_counter()
        closed = session.arrivals is None
        record = Record(kind=wanted.kind, intended=now if closed else due, sent=now)
        try:
            session.client.stream(self.load.options.path, wanted.body, record, wanted.leave_after)
        finally:
            self.load.ended(record)
        if closed:
            self._pause = self._pause_after(record)

    def _pause_after(self, record: Record) -> float:
        """Seconds. Without one, a user that gets nothing would ask thousands of times a second."""
        if record.outcome == "shed":
            return (record.retry_after or NO_ANSWER) if self.load.options.honour_retry_after else 0.0
        return NO_ANSWER if record.outcome == "failed" else 0.0

    def on_stop(self) -> None:
        """Requests that are still on their way get the time that --stop-timeout gives."""
        self._requests.join(timeout=self.environment.stop_timeout or 0)
        self._requests.kill()
        if self._session is not None:
            self._session.client.close()
