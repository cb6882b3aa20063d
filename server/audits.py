"""What the operator hears of audits: a log line for each that differs, and a record that can be replayed.

The log line holds hashes, never an id or a text. Ids go only into the store, if there is one. A fault that every
request meets must not flood the log: after the first lines only some come each minute, with the number of those left
out; the counter has them all.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any

from scheduler.audit import AuditCase, AuditFinding
from scheduler.stats import StepRecord
from server.audit_store import AuditStore
from server.line_limit import LineLimit
from specdec.params import SamplingParams

logger = logging.getLogger("truedraft.audit")

RECORD_KIND = "truedraft.audit"
RECORD_VERSION = 1
_LEVELS = {"mismatch": logging.ERROR, "near_tie": logging.WARNING}
_WORDS = {"mismatch": "mismatch", "near_tie": "near tie"}
FIRST_LINES = 20  # of a kind: these come at once
LINES_A_MINUTE = 6.0  # then
_QUIET_SECONDS = 60.0  # so long nobody says how many were left out, if no line comes that would
# Counted in the log, not shown: they hold ids or text of a request.
_COUNTED = dict.fromkeys(("logit_bias", "allowed_token_ids", "bad_words", "stop_token_ids"), "entries")
_COUNTED["grammar"] = "characters"


class AuditReporter:
    """Reads step records. Called on the event loop; the store writes elsewhere, and a line comes when it is done."""

    def __init__(
        self,
        *,
        model: str,
        fingerprint: str,
        level: str,
        store: AuditStore | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._fingerprint = fingerprint
        self._level = level
        self.store = store
        self._limits = {  # each its own: near ties must not keep a mismatch out
            result: LineLimit(FIRST_LINES, LINES_A_MINUTE, clock) for result in _LEVELS
        }

    def observe(self, record: StepRecord) -> None:
        for finding in record.audits:
            if finding.case is None:
                continue
            try:
                self._tell(finding, finding.case)
            except Exception:  # the next finding is told all the same
                logger.exception("an audit found a %s that could not be told", _WORDS[finding.result])
        self._tell_left_out(_QUIET_SECONDS)

    def close(self) -> None:
        """Wait until every record is written. The reporter is not used afterwards."""
        if self.store is not None:
            self.store.close()
        self._tell_left_out(0.0)

    def _tell_left_out(self, quiet_seconds: float) -> None:
        for result, limit in self._limits.items():
            if left_out := limit.take_left_out(quiet_seconds):
                message = "audits found more of this kind than the log has lines for: %s"
                logger.log(_LEVELS[result], message, _WORDS[result], extra={"left_out": left_out})

    def _tell(self, finding: AuditFinding, case: AuditCase) -> None:
        left_out = self._limits[finding.result].take()

        def log(name: str | None) -> None:
            if left_out is not None:
                self._log(finding, case, name, left_out)

        if self.store is None:
            log(None)
        else:
            self.store.save(self._record(finding, case), log)

    def _log(self, finding: AuditFinding, case: AuditCase, name: str | None, left_out: int) -> None:
        logger.log(
            _LEVELS[finding.result],
            "an audit found a %s",
            _WORDS[finding.result],
            extra={
                "request_id": case.request.request_id,
                "choice": case.index,
                "what": finding.what,
                "position": finding.position,
                "gap": None if finding.gap is None or math.isinf(finding.gap) else round(finding.gap, 6),
                "prompt_sha256": ids_sha256(case.request.prompt_token_ids),
                "output_sha256": ids_sha256(case.token_ids),
                "rerun_sha256": ids_sha256(finding.rerun_token_ids),
                "num_prompt_tokens": len(case.request.prompt_token_ids),
                "num_output_tokens": len(case.token_ids),
                "num_rerun_tokens": len(finding.rerun_token_ids),
                "finish_reason": case.finish_reason,
                "rerun_finish_reason": finding.rerun_finish_reason,
                "error": finding.error,
                "seed": case.params.seed,
                "parameters": _shown(case.params),
                "num_stop_strings": len(case.request.stop),
                "num_cached_tokens": case.timing.num_cached_tokens,
                "num_preemptions": case.timing.num_preemptions,
                "num_drafted": case.timing.num_drafted,
                "num_accepted": case.timing.num_accepted,
                "model": self._model,
                "system_fingerprint": self._fingerprint,
                "exactness": self._level,
                "record": name,
                "left_out": left_out,
            },
        )

    def _record(self, finding: AuditFinding, case: AuditCase) -> bytes:
        request = case.request
        record = {
            "kind": RECORD_KIND,
            "version": RECORD_VERSION,
            "result": finding.result,
            "what": finding.what,
            "position": finding.position,
            "gap": None if finding.gap is None or math.isinf(finding.gap) else finding.gap,
            "error": finding.error,
            "model": self._model,
            "system_fingerprint": self._fingerprint,
            "exactness": self._level,
            "request_id": request.request_id,
            "choice": case.index,
            "prompt_token_ids": list(request.prompt_token_ids),
            "params": params_to_json(case.params),
            "stop": list(request.stop),
            "include_stop_str_in_output": request.include_stop_str_in_output,
            "skip_special_tokens": request.skip_special_tokens,
            "token_ids": list(case.token_ids),
            "finish_reason": case.finish_reason,
            "stop_reason": case.stop_reason,
            "rerun_token_ids": list(finding.rerun_token_ids),
            "rerun_finish_reason": finding.rerun_finish_reason,
            "timing": asdict(case.timing),
        }
        return json.dumps(record, ensure_ascii=False).encode()


def ids_sha256(token_ids: Iterable[int]) -> str:
    """Of the ids in decimal, separated by commas: ``printf '1,2,3' | sha256sum`` gives the same."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()


def params_to_json(params: SamplingParams) -> dict[str, Any]:
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    return {name: sorted(value) if isinstance(value, frozenset) else value for name, value in values.items()}


def params_from_json(values: dict[str, Any]) -> SamplingParams:
    """The inverse. Raises TypeError or ValueError if ``values`` are not the parameters of this version."""
    return SamplingParams(**{name: _frozen(name, value) for name, value in values.items()})


def _frozen(name: str, value: Any) -> Any:
    if not isinstance(value, Sequence) or isinstance(value, str):
        return value
    items = tuple(tuple(item) if isinstance(item, list) else item for item in value)
    return frozenset(items) if name == "stop_token_ids" else items


def _shown(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults, without ids or text of a request; the seed stands elsewhere."""
    default = SamplingParams(seed=params.seed)
    shown: dict[str, Any] = {}
    for field in fields(params):
        value = getattr(params, field.name)
        if value != getattr(default, field.name):
            shown[field.name] = f"{len(value)} {_COUNTED[field.name]}" if field.name in _COUNTED else value
    return shown
