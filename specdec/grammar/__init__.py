"""Structured output: a grammar that decides at every position which tokens may come.

How a request gets one: put its text into ``SamplingParams.grammar``, made by :mod:`specdec.grammar.text`::

    replace(params, grammar=json_schema({"type": "object"}))
    replace(params, grammar=regex("[0-9]+"))
    replace(params, grammar=choice(["yes", "no"]))
    replace(params, grammar=lark('start: "a"+'))

A lark grammar (llguidance's dialect) may hold JSON schemas, so that free text goes up to a marker and a schema applies
from there on; a special token is written by its name, without quotes::

    start: TEXT | call
    call: head body "</tool_call>"
    head[lazy]: TEXT "<tool_call>"
    TEXT: /(.|\\n)*/
    body: %json {"type": "object"}

    start: TEXT (<|python_tag|> body)?

The step asks a :class:`specdec.grammar.constraint.GrammarConstraint`. In a server, a text is checked first
(``service.grammars.check(text, param)`` in server/grammars.py: in a child process, with a timeout, raising the
APIError that names ``param``); one that was not checked is compiled when its sequence starts.

The grammar holds for the output alone. An end-of-text token may come exactly where the grammar accepts, and is all
that may come where nothing else can follow.
"""
