"""A peer that has no server here, under a closed loop in its own process. Runs in the peer's environment.

It is run by its path and needs nothing but that peer. Lines of JSON on standard input and output: first the peer's
settings, answered when it is ready; then one load a line::

    {"backend": "openvino", "model": FOLDER, "threads": 2, ...}     -> {"ready": true, "versions": {...}}
    {"prompts": [[ids], ...], "tokens": 128, "seats": 8}            -> {"started": s, "traces": [{...}, ...]}

A trace has ``sent`` and ``chunks`` ([time, [ids]]), in seconds of the monotonic clock that all processes share.
Whatever the peer prints goes to standard error.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Backend(Protocol):
    """What the loop needs of a peer. Requests are named by numbers that it has not seen before."""

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        """Queue a greedy request for exactly ``tokens`` tokens."""

    def step(self) -> Sequence[tuple[int, Sequence[int], bool]]:
        """Wait for output; for each request that has some its number, its new ids, and whether it has ended.

        Raises RuntimeError if a request failed.
        """

    def versions(self) -> Mapping[str, str]: ...


def closed_loop(
    backend: Backend, prompts: Sequence[Sequence[int]], tokens: int, seats: int, first: int
) -> dict[str, Any]:
    """The next request takes the seat of one that ended. ``first`` is the number of the first request."""
    traces: list[dict[str, Any]] = []
    gc.collect()
    gc.disable()
    started = time.perf_counter()
    ended = 0
    try:
        while ended < len(prompts):
            while len(traces) < len(prompts) and len(traces) - ended < seats:
                traces.append({"sent": time.perf_counter(), "chunks": []})
                backend.add(first + len(traces) - 1, prompts[len(traces) - 1], tokens)
            outputs = backend.step()
            now = time.perf_counter()
            for number, ids, end in outputs:
                if ids:
                    traces[number - first]["chunks"].append((now, list(ids)))
                ended += end
    finally:
        gc.enable()
    return {"started": started, "traces": traces}


class OpenVino:
    """OpenVINO GenAI's ContinuousBatchingPipeline, driven by its own ``step``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        openvino = importlib.import_module("openvino")  # is in the peer's environment alone
        openvino_genai = importlib.import_module("openvino_genai")

        self._openvino, self._genai = openvino, openvino_genai
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = settings["cache_gib"]
        scheduler.max_num_seqs = max(settings["seats"], 1)
        scheduler.max_num_batched_tokens = settings["batched_tokens"]
        scheduler.dynamic_split_fuse = True
        scheduler.enable_prefix_caching = False
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": settings["threads"], **settings["properties"]}
        self._lookup = settings.get("lookup")  # {"num_assistant_tokens": .., "max_ngram_size": ..}
        if self._lookup:
            properties["prompt_lookup"] = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(settings["model"], scheduler, "CPU", properties)
        self._running: dict[int, tuple[Any, int]] = {}  # handle, tokens that are left

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        numpy = importlib.import_module("numpy")
        config = self._genai.GenerationConfig()
        config.max_new_tokens = config.min_new_tokens = tokens
        config.ignore_eos = True
        config.do_sample = False
        if self._lookup:
            config.num_assistant_tokens = self._lookup["num_assistant_tokens"]
            config.max_ngram_size = self._lookup["max_ngram_size"]
        ids = self._openvino.Tensor(numpy.asarray([prompt], dtype=numpy.int64))
        self._running[number] = (self._pipeline.add_request(number, ids, config), tokens)

    def step(self) -> list[tuple[int, Sequence[int], bool]]:
        self._pipeline.step()
        found: list[tuple[int, Sequence[int], bool]] = []
        for number, (handle, left) in list(self._running.items()):
            ids: list[int] = []
            while handle.can_read():
                for output in handle.read().values():
                    ids += output.generated_ids
            left -= len(ids)
            end = handle.get_status() != self._genai.GenerationStatus.RUNNING
            if end:
                del self._running[number]
                if left != 0:
                    raise RuntimeError(f"request {number} ended {left} tokens early: {handle.get_status()}")
            else:
                self._running[number] = (handle, left)
            if ids or end:
                found.append((number, ids, end))
        return found

    def versions(self) -> dict[str, str]:
        return {"openvino": self._openvino.__version__, "openvino_genai": self._genai.__version__}


class Transformers:
    """transformers' continuous batching: its manager's thread makes the steps, this one takes what comes out."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        torch = importlib.import_module("torch")
        transformers = importlib.import_module("transformers")
        self._torch, self._transformers = torch, transformers
        torch.set_num_threads(settings["threads"])
        model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["model"], dtype=getattr(torch, settings["dtype"]), attn_implementation=settings["attention"]
        )
        generation = transformers.GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        config = transformers.ContinuousBatchingConfig(
            page_size=settings["page_size"],
            num_blocks=settings["num_blocks"],
            max_batch_tokens=settings["batched_tokens"],
            max_requests_per_batch=settings["seats"],
            allow_block_sharing=False,
        )
        self._manager = model.eval().init_continuous_batching(generation, config)
        self._manager.start()
        self._tokens: dict[int, int] = {}  # that came, by request

    def add(self, number: int, prompt: Sequence[int], tokens: int) -> None:
        self._tokens[number] = 0
        if self._manager.add_request(list(prompt), str(number), max_new_tokens=tokens, streaming=True) is None:
            raise RuntimeError(f"request {number} was refused")

    def step(self) -> list[tuple[int, Sequence[int], bool]]:
        result = self._manager.get_result(timeout=1.0)
        found: list[tuple[int, Sequence[int], bool]] = []
        while result is not None:
            number = int(result.request_id)
            if result.error:
                raise RuntimeError(f"request {number}: {result.error}")
            new = result.generated_tokens[self._tokens[number] :]
            self._tokens[number] += len(new)
            found.append((number, new, result.is_finished()))
            if self._manager.output_router.output_queue.empty():
                break
            result = self._manager.get_result(timeout=0.001)
        if not found and not self._manager.is_running():
            raise RuntimeError("the generation thread has ended")
        return found

    def versions(self) -> dict[str, str]:
        return {"transformers": self._transformers.__version__, "torch": self._torch.__version__}


BACKENDS = {"openvino": OpenVino, "transformers": Transformers}


def serve(lines: Any, answer: Any, make: Mapping[str, Any] = BACKENDS) -> None:
    """Until ``lines`` end. An error ends it; its last words are ``{"error": ...}``."""
    settings = json.loads(next(lines))
    first = 0
    try:
        backend: Backend = make[settings["backend"]](settings)
        answer({"ready": True, "versions": dict(backend.versions())})
        for line in lines:
            load = json.loads(line)
            answer(closed_loop(backend, load["prompts"], load["tokens"], load["seats"], first))
            first += len(load["prompts"])
    except Exception as error:
        answer({"error": f"{type(error).__name__}: {error}"})
        raise


def main() -> None:
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # a library's prints are no answers

    def answer(value: Mapping[str, Any]) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    serve(sys.stdin, answer)
    os._exit(0)  # no library's threads keep it


if __name__ == "__main__":
    main()
