"""Who takes part: for each peer how it is started, with its best settings and the same memory, context and threads."""

from __future__ import annotations

import ctypes.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.peers.home import PeersHome
from bench.peers.weights import Weights
from bench.serving.options import OFF, Mode, parse_mode
from server.commands import CommandError

CACHE_GIB = 2  # KV memory of each; nobody is short of it
SLEEP_SECONDS = 86_400  # more than a run takes
PORT = "{port}"  # stands in a command for a free one
BATCHED_TOKENS = 512
DRIVER = Path(__file__).with_name("driver.py")
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Launch:
    """One process. Equal ones are the same process. ``settings``: JSON for a driver; empty: a server over HTTP."""

    command: tuple[str, ...]
    environment: tuple[tuple[str, str], ...] = ()
    settings: str = ""


@dataclass(frozen=True, slots=True)
class Way:
    """A peer with one kind of speculation. ``launch`` takes how many requests at a time there will be.

    ``mode``: what its requests say of speculation; only ours take it in the request.
    """

    peer: str
    speculation: str  # "off", or what it is called
    launch: Callable[[int], Launch]
    mode: Mode
    over_http: bool

    @property
    def name(self) -> str:
        return f"{self.peer}, {self.speculation}"


@dataclass(frozen=True, slots=True)
class Setting:
    """What all peers share. ``context``: most tokens of a request; ``most_seats``: the largest concurrency."""

    home: PeersHome
    weights: Weights
    precision: str
    threads: int
    context: int
    most_seats: int
    more_flags: Mapping[str, Sequence[str]]  # by peer, at the end of its command

    def flags_of(self, peer: str) -> tuple[str, ...]:
        return tuple(self.more_flags.get(peer, ()))


class NotAtThisPrecisionError(CommandError):
    """The peer has no such weights; the message is one line."""


def ways_of(peer: str, setting: Setting) -> list[Way]:
    """Without speculation first. Writes or exports the weights it needs.

    Raises NotAtThisPrecisionError and other CommandErrors.
    """
    return _MAKERS[peer](setting)


def _truedraft(setting: Setting) -> list[Way]:
    """Its watchdog is told to wait: who wakes after minutes of sleep has not moved for as long."""
    precision = ("--quantize", "int8") if setting.precision == "int8" else ("--dtype", DTYPES[setting.precision])
    launch = Launch(
        (
            *(setting.home.python("truedraft"), "-m", "server", "serve", "--host", "127.0.0.1", "--port", PORT),
            *("--model", str(setting.weights.folder), "--max-model-len", str(setting.context), *precision),
            *("--num-threads", str(setting.threads), "--max-num-seqs", str(setting.most_seats)),
            *("--kv-cache-memory", f"{CACHE_GIB}GiB", "--stall-timeout", str(SLEEP_SECONDS)),
            *setting.flags_of("truedraft"),
        )
    )
    return [Way("truedraft", mode, lambda seats: launch, parse_mode(mode), True) for mode in ("off", "auto")]


def _llama_cpp(setting: Setting) -> list[Way]:
    """As many slots as requests, hence another process for each concurrency. Of its drafters without a model that which
    needs the shortest match; the default of twelve tokens finds nothing in short prompts."""
    model = setting.weights.gguf(setting.precision)
    program = str(setting.home.of("llama.cpp") / "bin" / "llama-server")

    def launch(seats: int, *more: str) -> Launch:
        threads = str(setting.threads)
        return Launch(
            (
                *(program, "--model", str(model), "--host", "127.0.0.1", "--port", PORT),
                *("--parallel", str(seats), "--ctx-size", str(seats * setting.context), "--no-kv-unified"),
                *("--threads", threads, "--threads-batch", threads, "--flash-attn", "on", "--cont-batching"),
                *("--no-cache-prompt", "--cache-ram", "0", "--no-ui", *more, *setting.flags_of("llama.cpp")),
            )
        )

    ngram = ("--spec-type", "ngram-simple", "--spec-ngram-simple-size-n", "3", "--spec-ngram-simple-size-m", "8")
    return [
        Way("llama.cpp", OFF, launch, _server_decides(OFF), True),
        Way("llama.cpp", "ngram", lambda seats: launch(seats, *ngram), _server_decides("ngram"), True),
    ]


def _vllm(setting: Setting) -> list[Way]:
    """Both of its recommended libraries are preloaded where they are; its threads are bound, one to a processor, since
    "auto" leaves one processor to the scheduler."""
    if setting.precision not in DTYPES:
        raise NotAtThisPrecisionError(f"vllm: has no {setting.precision} weights of this checkpoint")
    folder = setting.home.of("vllm")
    preload = [str(path) for path in sorted(folder.glob("lib/libiomp5.so"))]
    tcmalloc = ctypes.util.find_library("tcmalloc_minimal")
    environment = (
        ("VLLM_CPU_KVCACHE_SPACE", str(CACHE_GIB)),
        ("VLLM_CPU_OMP_THREADS_BIND", f"0-{setting.threads - 1}" if setting.threads > 1 else "0"),
        ("VLLM_NO_USAGE_STATS", "1"),
        ("HF_HUB_OFFLINE", "1"),
        ("LD_PRELOAD", ":".join(preload + ([tcmalloc] if tcmalloc else []))),
    )
    command = (
        *(setting.home.python("vllm"), "-m", "vllm.entrypoints.cli.main", "serve", str(setting.weights.folder)),
        *("--host", "127.0.0.1", "--port", PORT, "--served-model-name", "model"),
        *("--dtype", DTYPES[setting.precision], "--max-model-len", str(setting.context)),
        *("--max-num-seqs", str(setting.most_seats), "--no-enable-prefix-caching"),
    )
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4, "prompt_lookup_min": 2}

    def launch(*more: str) -> Launch:
        return Launch((*command, *more, *setting.flags_of("vllm")), environment)

    drafting = launch("--speculative-config", json.dumps(ngram))
    return [
        Way("vllm", OFF, lambda seats: launch(), _server_decides(OFF), True),
        Way("vllm", "ngram", lambda seats: drafting, _server_decides("ngram"), True),
    ]


def _openvino(setting: Setting) -> list[Way]:
    """KV in the precision of the weights; with int8 weights in u8, its default."""
    properties = {
        "bf16": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"},
        "fp32": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"},
        "int8": {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "u8"},
    }[setting.precision]
    settings: dict[str, Any] = {
        "backend": "openvino",
        "model": str(setting.weights.openvino(setting.precision)),
        "threads": setting.threads,
        "seats": setting.most_seats,
        "cache_gib": CACHE_GIB,
        "batched_tokens": BATCHED_TOKENS,
        "properties": properties,
    }
    lookup = {"num_assistant_tokens": 5, "max_ngram_size": 3}
    return [
        _driven("openvino", OFF, setting, settings),
        _driven("openvino", "lookup", setting, {**settings, "lookup": lookup}),
    ]


def _transformers(setting: Setting) -> list[Way]:
    if setting.precision not in DTYPES:
        raise NotAtThisPrecisionError(f"transformers: has no {setting.precision} weights of this checkpoint")
    page = 256
    settings: dict[str, Any] = {
        "backend": "transformers",
        "model": str(setting.weights.folder),
        "threads": setting.threads,
        "seats": setting.most_seats,
        "dtype": DTYPES[setting.precision],
        "attention": "sdpa",
        "page_size": page,
        "num_blocks": setting.most_seats * -(-setting.context // page) + 1,
        "batched_tokens": BATCHED_TOKENS,
    }
    return [_driven("transformers", OFF, setting, settings)]


def _driven(peer: str, speculation: str, setting: Setting, settings: Mapping[str, Any]) -> Way:
    """``-P``: the driver's folder is not on its path."""
    environment = (("HF_HUB_OFFLINE", "1"), ("OMP_NUM_THREADS", str(setting.threads)))
    launch = Launch((setting.home.python(peer), "-P", str(DRIVER)), environment, json.dumps(settings, sort_keys=True))
    return Way(peer, speculation, lambda seats: launch, _server_decides(speculation), False)


def _server_decides(name: str) -> Mode:
    return Mode(name)


_MAKERS: dict[str, Callable[[Setting], list[Way]]] = {
    "truedraft": _truedraft,
    "llama.cpp": _llama_cpp,
    "vllm": _vllm,
    "openvino": _openvino,
    "transformers": _transformers,
}
PEERS = tuple(name for name in _MAKERS if name != "truedraft")
