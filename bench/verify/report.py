"""report.json: plain data about a run, for people, for the HTML page and for other programs."""

from __future__ import annotations

import json
import os
import platform
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from bench.verify.capture import BatchItem, Moment
from bench.verify.cases import Case
from bench.verify.compare import NEAR_TIE_SHARE
from bench.verify.counting import lacking
from bench.verify.coverage import COUNTED
from bench.verify.runner import CaseResult, Failure
from model.tokenizer import Tokenizer
from specdec.logprobs import best_tokens

SCHEMA = 1
WINDOW = 8  # tokens shown before and after the first difference


def case_entry(case: Case, result: CaseResult | None, tokenizer: Tokenizer | None, replay: str) -> dict[str, Any]:
    """One element of ``cases``; without a result the case was not run."""
    entry: dict[str, Any] = {"id": case.id, "factors": dict(case.values), "replay": replay}
    if result is None:
        return {**entry, "requests": int(case.values["batch"]), "positions": 0, "status": "not run"}
    entry |= {
        "requests": result.requests,
        "positions": result.positions,
        **{name: getattr(result.counts, name) for name in COUNTED},
        "drafted_by": dict(sorted(result.counts.drafted_by.items())),
        "most_sequences": result.counts.most_sequences,
        "steps_digest": result.counts.digest,
        "did_not_happen": lacking(case.values, result.counts),
        "seconds": round(result.seconds, 3),
        "near_ties": result.near_ties,
        "status": "passed" if result.passed else "failed" if result.error is None else "error",
        "divergence": None,
    }
    if result.failure is not None:
        entry["divergence"] = {**_divergence(result.failure, tokenizer), "replay": replay}
    if not result.passed:
        entry["reason"] = result.error or reason_of(result, tokenizer)
    return entry


def reason_of(result: CaseResult, tokenizer: Tokenizer | None) -> str:
    """Why a case failed, as one line."""
    failure = result.failure
    if failure is None:
        return result.problem or result.error or ""
    where = f"request {failure.request} ({failure.cell})"
    where += " while the cache was filled" if failure.warm_up else ""
    at, kind = failure.difference.output_index, failure.difference.kind
    expected, got = failure.expected, failure.got
    if kind == "token":
        what = f"output token {at} is {_named(got.token_ids[at], tokenizer)}, plain decoding says "
        what += _named(expected.token_ids[at], tokenizer)
    elif kind == "logprob":
        what = f"the logprobs of output token {at} are not those of plain decoding"
    elif kind == "length":
        what = f"{len(got.token_ids)} output tokens, plain decoding gives {len(expected.token_ids)}"
    else:
        what = f"finish reason {got.finish_reason!r}, plain decoding gives {expected.finish_reason!r}"
    notes = [note for note in (failure.note, result.problem) if note]
    return "; ".join([f"{where}: {what}", *notes])


def machine() -> dict[str, str]:
    """Where it ran."""
    return {"platform": platform.platform(), "python": platform.python_version(), "torch": torch.__version__}


def near_tie_rule(level: str) -> str:
    """What may differ at this exactness level."""
    if level == "L0":
        return "none: ids and logprobs are equal bit for bit"
    return (
        "a token may differ where the two tokens' logits nearly tie, and the rest of that sequence is not compared; "
        f"at most {NEAR_TIE_SHARE:.0%} of the positions"
    )


def write_atomically(path: Path, text: str) -> None:
    """Either the whole file is there or what was there before. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def check_folder(folder: Path) -> None:
    """Make sure that reports can be written there, before hours of work. Raises OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".try."):
        pass


def write_report(folder: Path, report: Mapping[str, Any]) -> list[str]:
    """report.json and report.html in ``folder``; a line for each that could not be written."""
    from bench.verify.html import render

    made: dict[str, Callable[[], str]] = {
        "report.json": lambda: json.dumps(report, indent=1, ensure_ascii=True) + "\n",
        "report.html": lambda: render(dict(report)),
    }
    missing: list[str] = []
    for name, make in made.items():
        try:
            write_atomically(folder / name, make())
        except Exception as error:  # one that cannot be made must not cost the other
            why = (error.strerror if isinstance(error, OSError) else None) or f"{type(error).__name__}: {error}"
            missing.append(f"cannot write {folder / name}: {' '.join(why.split())}")
    return missing


def _divergence(failure: Failure, tokenizer: Tokenizer | None) -> dict[str, Any]:
    at = failure.difference.output_index
    start = max(0, at - WINDOW)
    window = slice(start, at + WINDOW + 1)
    expected, got = list(failure.expected.token_ids[window]), list(failure.got.token_ids[window])
    found: dict[str, Any] = {
        "request": failure.request,
        "prompts": failure.cell.prompts,
        "sampling": failure.cell.sampling,
        "warm_up": failure.warm_up,
        "output_index": at,
        "kind": failure.difference.kind,
        "window_start": start,
        "expected": expected,
        "got": got,
        "expected_tokens": [_text(token, tokenizer) for token in expected],
        "got_tokens": [_text(token, tokenizer) for token in got],
        "expected_top": _top(failure.expected_moment, tokenizer),
        "got_top": _top(failure.got_moment, tokenizer),
        "expected_finish_reason": failure.expected.finish_reason,
        "got_finish_reason": failure.got.finish_reason,
        "step_batch": [_item(item, failure.request_of) for item in failure.got_moment.batch]
        if failure.got_moment
        else [],
    }
    if failure.difference.kind == "logprob":
        found["expected_logprob"] = failure.expected.logprobs[at].logprob
        found["got_logprob"] = failure.got.logprobs[at].logprob
    return found


def _item(item: BatchItem, request_of: Mapping[int, int]) -> dict[str, Any]:
    return {
        "request": request_of[item.seq_id],
        "num_computed": item.num_computed,
        "num_tokens": item.num_tokens,
        "drafts": list(item.drafts),
        "accepted": item.accepted,
    }


def _top(moment: Moment | None, tokenizer: Tokenizer | None) -> list[list[Any]]:
    if moment is None:
        return []
    return [[token, float(moment.row[token]), _text(token, tokenizer)] for token in best_tokens(moment.row, 2)]


def _named(token: int, tokenizer: Tokenizer | None) -> str:
    return str(token) if tokenizer is None else f"{token} {_text(token, tokenizer)!r}"


def _text(token: int, tokenizer: Tokenizer | None) -> str:
    return "" if tokenizer is None else tokenizer.token_bytes(token).decode("utf-8", "replace")
