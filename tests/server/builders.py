"""Tiny models, tokenizers and a real server on a real port for the tests of the wire."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import httpx
import torch
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from model.interface import Executor
from model.loader import load_model
from model.tokenizer import Tokenizer as ModelTokenizer
from server.app import create_app
from server.assemble import assemble
from server.auth.keys import NO_KEYS, ApiKeys
from server.connections import http_protocol
from server.parts import PLAIN, Parts
from server.service import Service
from server.settings import Settings, load_settings
from server.tls import tls_options, uses_tls

CORPUS = [
    "the quick brown fox jumps over the lazy dog. the quick brown fox sleeps.",
    "def main():\n    return {'a': 1, 'b': [2, 3]}\n\n",
    "今天天气很好，我们去公园吧。 naïve café – “quotes” 😀🎉 emoji 👩‍👩‍👧",
    "Hello, world! Hello, moon! 0 1 2 3 4 5 6 7 8 9 10",
]
EOS = "<|endoftext|>"
SPECIAL = (EOS, "<|im_start|>", "<|im_end|>")
MODEL_NAME = "tiny"
CONTEXT = 512


def byte_level_tokenizer() -> ModelTokenizer:
    """Byte-level BPE: any string round-trips, and characters are split over tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS))


def byte_fallback_tokenizer() -> ModelTokenizer:
    """The sentencepiece kind: pieces with a leading ▁, and ``<0xXX>`` for bytes outside the vocabulary."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁the", "▁a", "lo", "▁hello", "好", ".", "\n"]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return ModelTokenizer(PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>"))


def save_tiny_model(
    folder: Path, *, seed: int = 0, tokenizer: ModelTokenizer | None = None, context: int = CONTEXT
) -> Path:
    """A random two-layer llama in bfloat16 with a byte-level tokenizer, as a checkpoint folder."""
    tokenizer = tokenizer or byte_level_tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=context,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        tie_word_embeddings=True,
        initializer_range=0.3,  # peaked enough that texts repeat, which is what the n-gram drafter lives on
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend, eos_token=EOS).save_pretrained(folder)
    return folder


def build_settings(**changes: object) -> Settings:
    flags = {"served_model_name": MODEL_NAME, "num_blocks": 256, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    return load_settings({**flags, "max_waiting": 64, "num_threads": 1, "engine_process": False, **changes})


def build_service(
    model: Path,
    home: Path,
    *,
    executor: Literal["generic", "fused"] = "generic",
    wrap: Callable[[Executor], Executor] | None = None,
    parts: Parts = PLAIN,
    keys: ApiKeys = NO_KEYS,
    **changes: object,
) -> Service:
    """``wrap`` replaces the model's executor after it was probed."""
    settings = build_settings(**changes)
    loaded = load_model(
        model, executor=executor, num_threads=1, max_batched_tokens=settings.max_num_batched_tokens, home=home
    )
    if wrap is not None:
        loaded = replace(loaded, executor=wrap(loaded.executor))
    return assemble(settings, loaded, settings.served_model_name, parts=parts, keys=keys)


@contextlib.contextmanager
def running(service: Service, send_buffer: int | None = None) -> Iterator[str]:
    """Serve on a free port from a thread; yields the base URL. ``send_buffer``: bytes the kernel keeps of an answer."""
    sock = socket.create_server(("127.0.0.1", 0))
    if send_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)  # its connections inherit it
    port = sock.getsockname()[1]
    started = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets: object = None) -> None:
            await super().startup([sock])
            started.set()

    server = Server(
        uvicorn.Config(
            create_app(service),
            host="127.0.0.1",
            port=0,
            http=http_protocol(service.settings),
            ws="none",
            log_config=None,
            lifespan="on",
            **tls_options(service.settings),
        )
    )
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])), name="http", daemon=True)
    thread.start()
    assert started.wait(60), "the server did not start"
    try:
        yield f"{'https' if uses_tls(service.settings) else 'http'}://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(30)


def metric(base: str, name: str, **labels: str) -> float:
    """One sample of /metrics, by its full name without the prefix."""
    total = 0.0
    for line in httpx.get(f"{base}/metrics").text.splitlines():
        if line.startswith(f"truedraft_{name}{{") and all(f'{k}="{v}"' in line for k, v in labels.items()):
            total += float(line.rsplit(" ", 1)[1])
    return total


def sse_events(raw: bytes) -> list[dict[str, object]]:
    """Parse a whole stream strictly; the end must be ``[DONE]``."""
    assert b"\r" not in raw
    assert raw.endswith(b"\n\n")
    blocks = raw[:-2].split(b"\n\n")
    assert all(block.startswith(b"data: ") and b"\n" not in block for block in blocks), blocks
    assert blocks[-1] == b"data: [DONE]"
    return [json.loads(block[6:]) for block in blocks[:-1]]


def joined(chunks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The choices that a client puts together from the chunks, with the shape of a whole answer's."""
    choices: dict[int, dict[str, Any]] = {}
    for chunk in chunks:
        for piece in chunk["choices"]:
            if piece["index"] not in choices:
                choices[piece["index"]] = copy.deepcopy(piece)
                continue
            choice = choices[piece["index"]]
            assert choice["finish_reason"] is None, "pieces after the end"
            choice["text"] += piece["text"]
            choice["finish_reason"], choice["stop_reason"] = piece["finish_reason"], piece["stop_reason"]
            choice["token_ids"] = choice.get("token_ids", []) + piece.get("token_ids", [])
            if piece["logprobs"] is not None:
                for name, values in piece["logprobs"].items():
                    choice["logprobs"][name] += values
    return [choices[index] for index in sorted(choices)]
