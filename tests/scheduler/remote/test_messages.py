"""Messages: what is sent is what arrives, and what is no message is no more than an error."""

from __future__ import annotations

import math
import random
from dataclasses import fields, replace
from typing import Any

import pytest

from kvcache.manager import KVCacheStats
from scheduler.audit import AuditCase, AuditFinding
from scheduler.remote.messages import (
    LENGTH_BYTES,
    MAX_FRAME_BYTES,
    Abort,
    Answer,
    Batch,
    Call,
    Ended,
    FrameReader,
    ProtocolError,
    Shutdown,
    Status,
    Submit,
    decode_from_engine,
    decode_to_engine,
    encode,
)
from scheduler.request import ChoiceEvent, ChoiceSpec, ChoiceTiming, EngineRequest, StepTrace
from scheduler.stats import FinishedChoice, SequenceStep, StepRecord
from specdec.params import SamplingParams
from specdec.plan import StepStats, TokenLogprobs

PARAMS = SamplingParams(
    seed=2**64 - 1,
    max_tokens=7,
    temperature=0.1,
    top_p=0.3,
    top_k=5,
    min_p=0.01,
    repetition_penalty=1.1,
    frequency_penalty=-2.0,
    presence_penalty=0.5,
    logit_bias=((3, -100.0), (4, 0.1)),
    min_tokens=2,
    stop_token_ids=frozenset({0, 9}),
    allowed_token_ids=(1, 2, 3),
    bad_words=((1, 2), (3,)),
    grammar='{"a": "\u4eca\U0001f600"}',
    logprobs=3,
    prompt_logprobs=0,
    num_speculative_tokens=0,
    drafter="suffix",
    trace_drafts=True,
)
REQUEST = EngineRequest(
    request_id="r-\u00e9",
    prompt_token_ids=(1, 2, 3),
    choices=(ChoiceSpec(2, PARAMS), ChoiceSpec(5, SamplingParams(seed=0))),
    arrival_time=123456.789012345,
    priority=-3,
    cache_salt="key/salt",
    stop=("\n", "\u0000"),
    include_stop_str_in_output=True,
    skip_special_tokens=False,
    shown_special_ids=frozenset({7}),
    read_prefix_cache=False,
    prediction_token_ids=(4, 5),
)
TIMING = ChoiceTiming(1.5, 2.5, 3.25, 4.0, 3, 2, 9, 1, 2, 6, 5, (0, 1, 1), 4, (3, 3), (2, 3))
LOGPROBS = (TokenLogprobs(3, -math.inf, 17, ((3, -0.1), (4, -math.inf))), TokenLogprobs(4, -5e-324, 1, ()))
TRACE = StepTrace((3, 5), 1, "ngram")
EVENT = ChoiceEvent(
    "r", 1, (3, 4), "a\ufffd", ("a", ""), LOGPROBS, LOGPROBS, "stop", 9, "failed", "invalid_request", TIMING, TRACE
)
CASE = AuditCase(REQUEST, 2, PARAMS, (1, 2), "stop", "\n", LOGPROBS, LOGPROBS, TIMING)
FINDING = AuditFinding("mismatch", "r", 1, "token_ids", 3, math.inf, CASE, (1,), "length", "failed")
RECORD = StepRecord(
    step=StepStats(5, 2, 3, 2, 4, 1, 1, 7, 8, {"draft": 0.1}, 1.5, 0.25, 1.1),
    step_seconds=0.1,
    overhead_seconds=0.01,
    num_prefill_tokens=3,
    num_decode_tokens=2,
    num_running=1,
    num_waiting=4,
    num_preemptions=1,
    kv=KVCacheStats(64, 60, 2, 2, 10, 5, 1, 16, 20, 1, 3),
    prefix_queries=3,
    prefix_hits=1,
    num_prompt_tokens=3,
    num_generation_tokens=4,
    sequences=(SequenceStep(2, 4, 3, 1, "ngram", 7),),
    first_token_seconds=(0.5,),
    inter_token_seconds=(0.25, 0.125),
    finished=(FinishedChoice("r", 1, "stop", TIMING, 5.0, True, 7),),
    error="raised",
    num_audit_tokens=2,
    audits=(FINDING,),
    audits_enabled=True,
)
TO_ENGINE = [Submit(3, REQUEST), Abort("r", None), Abort("r", "late"), Call(4, "tell", "x"), Shutdown(True, 30.0, 5.0)]
FROM_ENGINE = [
    Batch((EVENT, ChoiceEvent("r", 0)), (RECORD,), Status(3, 2, 70, 0.25, False, "failed")),
    Batch((), (replace(RECORD, step=None, audits=(), error=None, audits_enabled=None),), Status()),
    Answer(4, {"audit": None, "speculation": [{"rows": 1, "seconds": 0.1}]}, None),
    Answer(5, None, "ValueError: no"),
    Ended(False),
]


def payload(message: Any) -> bytes:
    (found,) = FrameReader().feed(encode(message))
    return found


@pytest.mark.parametrize("message", TO_ENGINE, ids=lambda message: type(message).__name__)
def test_what_is_sent_to_an_engine_is_what_arrives(message: Any) -> None:
    assert decode_to_engine(payload(message)) == message


@pytest.mark.parametrize("message", FROM_ENGINE, ids=lambda message: type(message).__name__)
def test_what_an_engine_sends_is_what_arrives(message: Any) -> None:
    assert decode_from_engine(payload(message)) == message


@pytest.mark.parametrize(
    "value",
    [PARAMS, REQUEST, TIMING, EVENT, CASE, FINDING, RECORD, RECORD.step, RECORD.kv],
    ids=lambda v: type(v).__name__,
)
def test_the_examples_differ_from_the_default_in_every_field(value: Any) -> None:
    """So that no field can be forgotten on the way unseen."""
    for field in fields(value):
        assert getattr(value, field.name) != field.default, field.name


def test_frames_are_found_however_the_bytes_are_cut() -> None:
    messages = [*TO_ENGINE, Abort("", None)]
    stream = b"".join(map(encode, messages))
    rng = random.Random(0)
    for _ in range(50):
        cuts = sorted(rng.randrange(len(stream) + 1) for _ in range(rng.randrange(40)))
        reader = FrameReader()
        found = []
        for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
            found += reader.feed(stream[start:end])
        assert [decode_to_engine(each) for each in found] == messages


def test_what_is_no_message_is_an_error_whatever_it_is() -> None:
    rng = random.Random(0)
    samples = [rng.randbytes(rng.randrange(60)) for _ in range(300)]
    for message in (*TO_ENGINE, *FROM_ENGINE):
        whole = payload(message)
        samples += [whole[:-1], whole + b"\0", b"\xc1" + whole]
    for sample in samples:
        for decode in (decode_to_engine, decode_from_engine):
            with pytest.raises(ProtocolError):
                decode(sample)


def test_a_message_of_the_other_direction_or_with_a_field_of_another_type_is_an_error() -> None:
    with pytest.raises(ProtocolError):
        decode_to_engine(payload(Ended(True)))
    with pytest.raises(ProtocolError):
        decode_from_engine(payload(Abort("r", None)))
    with pytest.raises(ProtocolError, match="int"):
        decode_to_engine(payload(Submit("3", REQUEST)))  # type: ignore[arg-type]
    with pytest.raises(ProtocolError):
        decode_to_engine(payload(Submit(3, replace(REQUEST, prompt_token_ids=(1, "2")))))  # type: ignore[arg-type]


def test_a_length_that_no_frame_has_is_an_error() -> None:
    with pytest.raises(ProtocolError, match=str(MAX_FRAME_BYTES + 1)):
        FrameReader().feed((MAX_FRAME_BYTES + 1).to_bytes(LENGTH_BYTES, "big"))


@pytest.mark.parametrize(
    "message",
    [Abort("\ud800", None), Answer(1, 2**64, None), Answer(1, object(), None)],
    ids=["text", "number", "object"],
)
def test_what_cannot_be_sent_is_an_error_of_the_sender(message: Any) -> None:
    with pytest.raises(ValueError):
        encode(message)
