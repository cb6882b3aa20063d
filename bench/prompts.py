"""Prompt sets for proof and measurement: plain data, no network, the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt; ``kind`` is its class (chat, code, json, mixed, multi-turn, long, copy, repeated, short)."""

    kind: str
    text: str


def chat(*turns: str) -> str:
    """ChatML of alternating user and assistant turns, open for the assistant's next answer."""
    roles = ("user", "assistant")
    lines = [f"<|im_start|>{roles[i % 2]}\n{turn}<|im_end|>\n" for i, turn in enumerate(turns)]
    return "".join(lines) + "<|im_start|>assistant\n"


_PARAGRAPHS = (
    "The river rises in the hills above the old town and runs south for ninety miles before it meets the sea. In spring it floods the"
    " meadows; in late summer children wade across it at the mill. The mill has ground no corn since 1911, but its wheel still turns.",
    "A cache keeps what was expensive to compute and is likely to be asked for again. It must decide what to forget. Most caches forget what"
    " was used least recently, because the past is the only guide to the future that a machine has at hand.",
    "The committee met on Tuesday to discuss the budget for the coming year. Three members argued for a new roof, two for a second librarian,"
    " and one for nothing at all. They agreed to meet again in a month, when the builder's estimate would be known.",
    "Salt the water generously, bring it to the boil, and add the pasta. Meanwhile melt the butter with a clove of garlic, a strip of lemon peel"
    " and a little pepper. Keep a cup of the water back; its starch binds the sauce. Serve at once, with cheese.",
    "Photosynthesis takes carbon dioxide and water and, with the energy of light, makes sugar and oxygen. The light is caught by chlorophyll in"
    " the leaf's chloroplasts. Red and blue light are used; green light is mostly thrown back, and so leaves look green.",
    "In 1869 the first message crossed the continent by wire in the time it takes to say it. Before that, letters took ten days by horse and"
    " three weeks by coach. Merchants complained that they now had to make up their minds at once.",
)

_CODE = '''def binary_search(items: list[int], target: int) -> int:
    """Return the index of target in the sorted list items, or -1."""
    low, high = 0, len(items) - 1
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == target:
            return middle
        if items[middle] < target:
            low = middle + 1
        else:
            high = middle - 1
    return -1
'''

_JSON = (
    '{"users": [{"id": 1, "name": "Ada", "roles": ["admin", "dev"], "active": true}, {"id": 2, "name": "Grace", "roles": ["dev"], '
    '"active": true}, {"id": 3, "name": "Alan", "roles": ["guest"], "active": false}]}'
)

_TOOL = (
    'You can call get_weather(city: str, unit: "C" | "F"). Answer with JSON only.\n'
    'User: weather in Paris?\n{"name": "get_weather", "arguments": {"city": "Paris", "unit": "C"}}\n'
    'User: and in Oslo?\n{"name": "get_weather", "arguments": {"city": "Oslo", "unit": "C"}}\nUser: and in Rome, in Fahrenheit?\n'
)

SHORT = (
    Prompt("short", "Hello"),
    Prompt("short", "1 2 3 4 5 6 7"),
    Prompt("short", "The capital of France is"),
    Prompt("short", "Once upon a time"),
)

CHAT = (
    Prompt("chat", chat("What is the capital of Italy?")),
    Prompt("chat", chat("Explain in three sentences why the sky is blue.")),
    Prompt("chat", chat("Give me a list of five things to pack for a hike.")),
    Prompt("chat", chat("Write a short poem about a lighthouse.")),
    Prompt("chat", chat("How do I boil an egg so that the yolk stays soft?")),
    Prompt("chat", chat("Translate to German: I would like a cup of coffee, please.")),
)

CODE = (
    Prompt("code", _CODE + "\n\ndef linear_search("),
    Prompt("code", "import numpy as np\n\ndef softmax(x):\n"),
    Prompt("code", "SELECT name, COUNT(*) FROM orders\nJOIN customers ON"),
    Prompt("code", chat("Write a Python function that reverses a linked list.")),
)

JSON = (
    Prompt("json", _JSON + "\n" + '{"users": [{"id": 4,'),
    Prompt("json", _TOOL),
    Prompt("json", chat("Return this as JSON with keys name, age, city: Maria is 31 and lives in Lisbon.")),
    Prompt("json", '[{"x": 0, "y": 0}, {"x": 1, "y": 1}, {"x": 2, "y": 4}, {"x": 3, "y": 9},'),
)

MIXED = (
    Prompt("mixed", chat("请用中文和 English 各写一句话, to describe the moon.")),
    Prompt("mixed", "今天天气很好, so we went to the park. 我们看到了 a lot of birds and 很多花。Then"),
    Prompt("mixed", "Das Wort 'tree' heißt auf Deutsch 'Baum', auf Französisch « arbre », 中文是「树」, 日本語では"),
    Prompt("mixed", "🙂 emoji, naïve café, Ελληνικά, русский, العربية, हिन्दी:"),
)

MULTI_TURN = (
    Prompt(
        "multi-turn",
        chat(
            "I have three apples and buy two more. How many do I have?",
            "You have five apples.",
            "I eat one and give two away. And now?",
        ),
    ),
    Prompt(
        "multi-turn",
        chat(
            "Who wrote Hamlet?",
            "William Shakespeare wrote Hamlet, around the year 1600.",
            "Name two other plays by him.",
            "Macbeth and King Lear are two other plays by Shakespeare.",
            "Which of the three is the shortest?",
        ),
    ),
    Prompt("multi-turn", chat("Remember the number 4817.", "I will remember the number 4817.", "Which number was it?")),
)

COPY = (
    Prompt("copy", chat("Repeat this text exactly:\n" + _PARAGRAPHS[0])),
    Prompt("copy", chat("Rename the variable middle to mid in this code and print all of it:\n" + _CODE)),
    Prompt("copy", "the cat sat on the mat. " * 12),
    Prompt("copy", _PARAGRAPHS[3] + "\n\n" + _PARAGRAPHS[3][:90]),
)


def _long(length: int, first: int) -> str:
    """About ``length`` words of running text that does not repeat itself word for word."""
    words: list[str] = []
    section = 0
    while len(words) < length:
        section += 1
        paragraph = _PARAGRAPHS[(first + section) % len(_PARAGRAPHS)]
        words += f"Section {section * 7 + first}, page {section * 13 % 97}: {paragraph}".split()
    return " ".join(words[:length])


LONG = (
    Prompt("long", _long(240, 0)),
    Prompt("long", _long(480, 1) + "\n\nSummary:"),
    Prompt("long", _long(1150, 2)),
)

VARIED: tuple[Prompt, ...] = (*SHORT, *CHAT, *CODE, *JSON, *MIXED, *MULTI_TURN, *COPY, *LONG)
"""32 prompts of 1 to about 1,500 tokens, of every class."""

MIXED_LOAD: tuple[Prompt, ...] = tuple(
    Prompt("load", chat(f"{task}\n\n{_PARAGRAPHS[(i * 5 + j) % len(_PARAGRAPHS)]}"))
    for i, task in enumerate(
        (
            "Summarise this text in one sentence.",
            "Continue this text in the same style.",
            "Ask three questions about this text.",
            "Repeat this text, correcting any mistakes.",
        )
    )
    for j in range(4)
)
"""16 prompts of about 100 tokens: half free writing, half close to the text."""

COPY_LOAD: tuple[Prompt, ...] = tuple(
    Prompt("copy", chat(f"Repeat this text exactly, word for word:\n\n{a} {b}"))
    for a in _PARAGRAPHS[:4]
    for b in _PARAGRAPHS[2:]
)
"""16 copy prompts, where drafts from the prompt pay."""
