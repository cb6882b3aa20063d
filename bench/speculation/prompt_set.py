"""The frozen prompts: three workloads, the same bytes on every machine, named in every report by their hash."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from model.errors import ModelError
from model.tokenizer import Tokenizer

WORKLOADS = ("chat", "copy", "json")
FOLDER = Path(__file__).with_name("prompts")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """One prompt: messages with ``role`` and ``content``, the last one the user's."""

    name: str  # e.g. "copy-07"
    messages: tuple[Mapping[str, str], ...]


def load_prompts(workload: str) -> tuple[ChatPrompt, ...]:
    """The workload's prompts in their order. Raises ValueError for an unknown workload."""
    if workload not in WORKLOADS:
        raise ValueError(f"unknown workload {workload!r}; there are {', '.join(WORKLOADS)}")
    lines = (FOLDER / f"{workload}.jsonl").read_text("utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return tuple(ChatPrompt(row["name"], tuple(row["messages"])) for row in rows)


def prompt_set_hash() -> str:
    """SHA-256 over the files of all workloads, its first 16 hex digits."""
    digest = hashlib.sha256()
    for workload in WORKLOADS:
        digest.update(workload.encode() + b"\0" + (FOLDER / f"{workload}.jsonl").read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def encode_prompt(prompt: ChatPrompt, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The prompt's ids in the model's chat template, in ChatML if the tokenizer has no template."""
    try:
        text = tokenizer.chat_text(prompt.messages)
    except ModelError:
        text = chatml(prompt.messages)
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def chatml(messages: Sequence[Mapping[str, str]]) -> str:
    """``messages`` as ChatML, open for the assistant's answer."""
    turns = [f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n" for message in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
