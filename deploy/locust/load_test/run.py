"""One test in one process of locust: its options, its server, what it measures, and how it ends."""

from __future__ import annotations

import copy
import json
import logging
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import gevent
from locust.env import Environment
from locust.runners import MasterRunner, WorkerRunner

from .arrivals import Arrivals
from .bodies import Bodies
from .client import Client, ClientError
from .flags import FLAGS
from .measurement import Measurement
from .options import Options, read_options
from .prompts import Prompt
from .record import Record
from .report import report_lines
from .scrape import Scrape, Window
from .shapes import StepLoad
from .slo import judge

logger = logging.getLogger("truedraft.load")

MISSED = 3  # exit code
LATE = 0.05  # seconds; a load generator that starts later than this measures itself
REPORTED = "truedraft_load"  # key of what a worker sends every few seconds
END, ENDED = "truedraft_load_end", "truedraft_load_ended"  # messages to the workers, and their answers
LAST_REPORT = 15.0  # seconds that a worker has for it, beyond --stop-timeout


class LoadFailure(Exception):
    """What locust counts as a failed request."""


@dataclass(frozen=True, slots=True)
class Session:
    """What one user needs."""

    bodies: Bodies
    client: Client
    arrivals: Arrivals | None  # None: a closed loop


class Run:
    """Made once a process; each test of the web page begins it anew."""

    def __init__(self, environment: Environment, options: Options) -> None:
        self.options = options
        self.report: dict[str, Any] | None = None  # of the last test that ended
        self._environment = environment
        self._measurement = Measurement()
        self._workers: dict[str, dict[str, Any]] = {}  # what each has sent last
        self._ended_workers: set[str] = set()
        self._model = ""
        self._ids: Mapping[Prompt, Sequence[int]] | None = None
        self._before: Scrape | None = None
        self._refused = False
        self._num_sessions = 0
        self._tests = 0
        self._attach()

    def _attach(self) -> None:
        environment, events = self._environment, self._environment.events
        self._is_master = isinstance(environment.runner, MasterRunner)
        self._is_worker = isinstance(environment.runner, WorkerRunner)
        events.test_start.add_listener(self._on_test_start)
        events.test_stop.add_listener(self._on_test_stop)
        events.reset_stats.add_listener(self._on_reset)
        events.quitting.add_listener(self._on_quitting)
        events.report_to_master.add_listener(self._on_report_to_master)
        events.worker_report.add_listener(self._on_worker_report)
        events.test_stopping.add_listener(self._on_test_stopping)
        if isinstance(environment.runner, WorkerRunner):
            environment.runner.register_message(END, self._end_worker, concurrent=True)
        elif isinstance(environment.runner, MasterRunner):
            environment.runner.register_message(ENDED, self._on_worker_ended)
        if self.options.steps and not self._is_worker:
            shape = StepLoad(self.options.steps, self.options.step_seconds, self._on_step)
            shape.runner = environment.runner
            environment.shape_class = shape
        if environment.web_ui is not None and environment.web_ui.app is not None:
            environment.web_ui.app.add_url_rule(
                "/load-report", "load_report", environment.web_ui.auth_required_if_enabled(self._show)
            )

    # what users call

    def session(self) -> Session | None:
        """Of a user that starts; None if the test cannot run."""
        if self._refused:
            return None
        number, self._num_sessions = self._num_sessions, self._num_sessions + 1
        worker = getattr(self._environment.runner, "worker_index", 0)
        rng = random.Random(f"{self.options.seed}/{worker}/{number}")
        arrivals = None
        if self.options.rate:
            due = random.Random(rng.random())
            arrivals = Arrivals(self.options.rate, self.options.arrivals, due, time.perf_counter())
        return Session(Bodies(self.options, self._model, rng, self._ids), self._client(), arrivals)

    def ended(self, record: Record) -> None:
        """Count it, and tell locust."""
        if not self._measurement.add(record):
            return
        name = f"{self.options.path} [{record.kind}]"
        seconds = (record.ended or record.sent) - record.intended
        if record.outcome == "shed":
            self._fire("SHED", f"{self.options.path} {record.reason}", seconds)
        elif record.outcome == "cancelled":
            self._fire("CANCEL", name, seconds, record.num_tokens)
        else:
            failure = LoadFailure(record.reason) if record.outcome == "failed" else None
            self._fire("POST", name, seconds, record.num_tokens, failure)
        if record.ttft is not None:
            self._fire("METRIC", "TTFT", record.ttft)
        for gap in record.gaps:
            self._fire("METRIC", "ITL", gap)
        if record.e2e is not None:
            self._fire("METRIC", "E2E", record.e2e, record.num_tokens)
            if record.tpot is not None:
                self._fire("METRIC", "TPOT", record.tpot)
        if self.options.rate:
            self._fire("METRIC", "late start", record.late)

    def _fire(self, kind: str, name: str, seconds: float, tokens: int = 0, exception: Exception | None = None) -> None:
        self._environment.events.request.fire(
            request_type=kind,
            name=name,
            response_time=seconds * 1000,
            response_length=tokens,
            exception=exception,
            context={},
        )

    # the course of a test

    def _on_test_start(self, **_: object) -> None:
        self._refused, self._before, self.report = False, None, None
        self._workers.clear()
        self._tests += 1
        try:
            self.options = read_options(vars(self._environment.parsed_options))  # a web form may have changed them
            if not self._is_master:
                self._prepare()
        except (ValueError, ClientError) as error:
            self._refuse(str(error))
            return
        self._measurement.begin(time.perf_counter(), self.options.warm_up)
        if self.options.warm_up:
            gevent.spawn_later(self.options.warm_up, self._end_warm_up, self._tests)
        else:
            self._look_before()

    def _prepare(self) -> None:
        """What the requests need to know of the server. Raises ClientError or ValueError."""
        client, options = self._client(), self.options
        try:
            self._model = options.model or _first_model(client)
            self._ids = None
            if options.prompt_tokens:
                prompts = [prompt for group in options.mix.prompts.values() for prompt in group]
                self._ids = {prompt: _ids_of(client, self._model, prompt) for prompt in prompts}
        finally:
            client.close()

    def _refuse(self, reason: str) -> None:
        logger.error("the test cannot run: %s", reason)
        self._refused = True
        self._environment.process_exit_code = 1
        if self._environment.web_ui is None and self._environment.runner is not None:
            gevent.spawn(self._environment.runner.quit)

    def _end_warm_up(self, test: int) -> None:
        runner = self._environment.runner
        if test != self._tests or runner is None:
            return
        runner.stats.reset_all()  # nothing was counted, but rates count from here
        self._look_before()

    def _look_before(self) -> None:
        if not self._is_worker:
            self._before = self._scrape()

    def _on_step(self, users: int) -> None:
        logger.info("step: %d users", users)
        self._measurement.next_step(users, time.perf_counter(), self.options.warm_up)

    def _on_reset(self, **_: object) -> None:
        """The button of the web page."""
        self._measurement.begin(time.perf_counter(), 0.0)
        self._look_before()

    def _on_test_stopping(self, **_: object) -> None:
        """Locust's master ends its workers once it has ended the test; what they still count is wanted before."""
        runner = self._environment.runner
        if not isinstance(runner, MasterRunner) or self._refused:
            return
        self._ended_workers.clear()
        awaited = {client.id for client in runner.clients.all}
        runner.send_message(END)
        deadline = time.monotonic() + self._environment.stop_timeout + LAST_REPORT
        while not awaited <= self._ended_workers and time.monotonic() < deadline:
            gevent.sleep(0.05)

    def _end_worker(self, **_: object) -> None:
        runner = self._environment.runner
        assert runner is not None
        runner.stop()
        runner.send_message(ENDED, self._measurement.to_plain())

    def _on_worker_ended(self, msg: Any, **_: object) -> None:
        self._workers[msg.node_id] = msg.data
        self._ended_workers.add(msg.node_id)

    def _on_test_stop(self, **_: object) -> None:
        if self._is_worker or self._refused:
            return
        self.report = self._figures()
        for line in report_lines(self.report):
            logger.info("%s", line)
        late = self.report["total"]["late"]["p95"]
        if late is not None and late > LATE:
            logger.warning("requests started late (p95 %.0f ms): this load generator is too busy", late * 1000)
        if self.options.report is not None:
            text = json.dumps(self.report, indent=2, ensure_ascii=False) + "\n"
            self.options.report.write_text(text, "utf-8")

    def _on_quitting(self, **_: object) -> None:
        """An objective that was missed decides; one about failures that was met replaces locust's own rule."""
        if self.report is None or not self.options.objectives or self._refused:
            return
        if not all(line["met"] for line in self.report["slo"]):
            self._environment.process_exit_code = MISSED
        elif any(objective.name == "failed" for objective in self.options.objectives):
            self._environment.process_exit_code = 0

    # figures

    def _figures(self) -> dict[str, Any]:
        measurement = self._measurement
        if self._workers:
            measurement = copy.deepcopy(measurement)
            for plain in self._workers.values():
                measurement.merge_plain(plain)
            measurement.steps = []  # no worker knows in which one its requests were
        figures = measurement.figures()
        after = None if self._before is None else self._scrape()
        server = None if self._before is None or after is None else Window(self._before, after).figures()
        parsed = vars(self._environment.parsed_options)
        return {
            "host": self._environment.host,
            "model": self._model,
            "loop": "open" if self.options.rate else "closed",
            "flags": {flag.name: parsed[flag.name] for flag in FLAGS if parsed[flag.name] != flag.default},
            **figures,
            "server": server,
            "slo": judge(self.options.objectives, figures["total"], server),
        }

    def _show(self) -> Any:
        """The web page's figures: of the test that runs, or of the last one."""
        return self.report or (self._figures() if self._tests else {})

    def _on_report_to_master(self, data: dict[str, Any], **_: object) -> None:
        data[REPORTED] = self._measurement.to_plain()

    def _on_worker_report(self, client_id: str, data: dict[str, Any], **_: object) -> None:
        if REPORTED in data:
            self._workers[client_id] = data[REPORTED]

    # the server

    def _client(self, url: str | None = None) -> Client:
        """Raises ValueError for a host that is none."""
        options = self.options
        return Client(url or self._environment.host or "", headers=options.headers, timeout=options.request_timeout)

    def _scrape(self) -> Scrape | None:
        """None if it is not wanted or cannot be had, which is logged."""
        urls = self.options.metrics_urls
        if urls is None:
            return None
        texts = []
        try:
            for url in urls or (f"{(self._environment.host or '').rstrip('/')}/metrics",):
                parts = urlsplit(url)
                client = self._client(f"{parts.scheme}://{parts.netloc}")
                try:
                    texts.append(client.get(parts.path or "/metrics").decode("utf-8", "replace"))
                finally:
                    client.close()
        except (ClientError, ValueError) as error:
            logger.warning("no metrics of the server: %s", error)
            return None
        return Scrape(texts, self.options.metrics_prefix)


def _first_model(client: Client) -> str:
    try:
        return str(json.loads(client.get("/v1/models"))["data"][0]["id"])
    except (ValueError, TypeError, LookupError) as error:
        raise ClientError("GET /v1/models names no model; give one with --model") from error


def _ids_of(client: Client, model: str, prompt: Prompt) -> list[int]:
    ids = client.post("/tokenize", {"model": model, "prompt": prompt.text}).get("tokens")
    if not isinstance(ids, list) or not ids:
        raise ClientError("POST /tokenize gives no tokens; leave --prompt-tokens out")
    return ids
