"""From the text of an answer to its content and tool calls, piece by piece."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection

from server.tools.call import MAX_NAME, CallReader
from server.tools.deltas import Arguments, CallStart, Content, Delta
from server.tools.formats import ToolFormat

_SPACE = " \t\n\r"
_NAME = re.compile(r"[A-Za-z0-9_\-]*")
_SEPARATORS = ";,"
MAX_SPACE = 64  # of white space, so much at most is held back: it is left out in front of a call


class ToolParser:
    """Takes text in pieces, as it becomes final; gives deltas. Their join does not depend on how the text was cut.

    A call is a known name and a JSON object. What only looks like one stays content, to the character; white space
    around a call and what marks it are no content. ``enforced``: the grammar of server/tools/grammar.py guarantees
    that what begins as a call is one, so that its arguments are given as they come; else a call is held back until it
    is seen to be valid.
    Where the text ends inside a list of calls, or under a grammar a sequence, the beginning of the next call is no
    content either: it is left out.
    ``parallel``: more than one call may come; without it all behind the first is content. ``hidden`` are markers that
    are special tokens: never part of the content.

    ::

        free: content, looking for an opening     start: the same, but the text may begin with a call
          -> body: [ { or a name                  item: the next call of a list
          -> call: name and arguments             -> after item: , or ]
          -> after: the closing, or the next call of a sequence -> free
    """

    def __init__(
        self,
        tool_format: ToolFormat,
        names: Collection[str],
        *,
        parallel: bool = True,
        enforced: bool = False,
        hidden: Collection[str] = (),
    ) -> None:
        self._format = tool_format
        self._names = frozenset(names)
        self._parallel = parallel
        self._enforced = enforced
        self._hidden = frozenset(hidden)
        self._words = tuple({*self._hidden, *([tool_format.opening] if tool_format.opening else [])})
        self._state: Callable[[bool], bool] = self._start if tool_format.bare else self._free
        self._buffer = ""  # not yet looked at, or not yet decided
        self._settled = 0  # characters of the buffer in which no call begins: one was tried there and is none
        self._attempt: list[str] = []  # what was taken as part of a call that is not yet sure
        self._space = ""  # held back; content if content follows
        self._call: CallReader | None = None
        self._called = ""  # the name in front of arguments alone
        self._in_list = False
        self._further = False  # a call came before in this list or sequence
        self._sure = enforced and tool_format.bare  # the grammar has this call end well
        self._started = False  # the call's start was given
        self._after_call = False  # the last thing given was a call, not content
        self._deltas: list[Delta] = []
        self.num_calls = 0

    @property
    def unfinished(self) -> bool:
        """Whether the last call given has not come to its end."""
        return self._started

    def push(self, text: str) -> list[Delta]:
        """The next piece of text; gives what became sure with it."""
        self._buffer += text
        self._run(final=False)
        return self._take()

    def finish(self) -> list[Delta]:
        """There is no more text: gives the rest."""
        self._run(final=True)
        if not self._after_call:
            self._give(Content(self._space))
        self._space = ""
        return self._take()

    def _run(self, final: bool) -> None:
        while self._state(final):
            pass

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each state looks at the buffer and returns whether another state has something to do now. With ``final`` it comes
    # to a decision, and returns False only if nothing is left.

    def _free(self, final: bool) -> bool:
        text = self._buffer
        found = min(((text.find(word), word) for word in self._words if word in text), default=None)
        if found is None:
            keep = len(text) if final else self._possible_start(text)
            self._pass(text[:keep])
            self._drop(keep)
            return False
        start, word = found
        end = start + len(word)
        self._pass(text[:start])
        opens = word == self._format.opening and end > self._settled and self._may_call
        self._drop(end)
        if opens:
            self._attempt = [] if word in self._hidden else [word]
            self._settled, self._sure = 0, self._enforced
            self._state = self._body
        elif word not in self._hidden:
            self._pass(word)
        return True

    def _start(self, final: bool) -> bool:
        self._skip_space()
        text, opening = self._buffer, self._format.opening
        if not text or (opening is not None and opening.startswith(text)):
            return self._fail_if(final or text == opening)
        return self._to(self._body)

    def _body(self, final: bool) -> bool:
        self._further = False
        self._skip_space()
        text = self._buffer
        if not text:
            return self._fail_if(final)
        if text[0] == "{":
            return self._begin_call(CallReader())
        if text[0] == "[" and self._format.lists:
            self._consume(1)
            self._in_list = True
            self._sure = self._sure and self._format.prefer_list
            return self._to(self._item)
        return self._to(self._name) if self._format.named and _NAME.match(text[0]) else self._fail()

    def _name(self, final: bool) -> bool:
        match = _NAME.match(self._buffer)
        assert match is not None
        if match.end() == len(self._buffer) <= MAX_NAME:
            return self._fail_if(final)
        if match.end() > MAX_NAME:
            return self._fail()
        self._called = match[0]
        self._consume(match.end())
        return self._to(self._after_name)

    def _after_name(self, final: bool) -> bool:
        text = self._buffer
        for marker in self._format.inner:
            if text.startswith(marker):
                self._consume(len(marker))
                return self._to(self._after_name if marker == self._format.inner[-1] else self._model_id)
        if any(marker.startswith(text) for marker in self._format.inner):
            return self._fail_if(final)
        return self._begin_call(CallReader(self._called)) if text[0] == "{" else self._fail()

    def _model_id(self, final: bool) -> bool:
        """What the model itself calls the call; it has an id of ours."""
        match = _NAME.match(self._buffer)
        assert match is not None
        self._consume(match.end())
        return self._to(self._after_name) if self._buffer else self._fail_if(final)

    def _item(self, final: bool) -> bool:
        self._skip_space()
        if not self._buffer:
            return self._cut_if(final)
        return self._begin_call(CallReader()) if self._buffer[0] == "{" else self._fail()

    def _in_call(self, final: bool) -> bool:
        call = self._call
        assert call is not None
        end = call.feed(self._buffer)
        self._consume(end)
        if self._sure and not self._started and call.begun(self._names):
            self._start_call(call)
        if self._started:
            self._attempt.clear()
            self._give(Arguments(self.num_calls - 1, call.take()))
        if call.done:
            return self._end_call(call)
        return self._fail_if(call.failed) or self._cut_if(final and not self._started)

    def _end_call(self, call: CallReader) -> bool:
        if not self._started:
            arguments = call.whole(self._names)
            if arguments is None:
                return self._fail()
            self._start_call(call)
            self._give(Arguments(self.num_calls - 1, arguments))
        self._started, self._further = False, True
        self._attempt.clear()
        return self._to(self._after_item if self._in_list else self._after)

    def _after_item(self, final: bool) -> bool:
        self._skip_space()
        text = self._buffer
        if not text:
            return self._fail_if(final)
        if text[0] == "]" or (text[0] == "," and self._may_call):
            self._consume(1)
            if text[0] == ",":
                return self._to(self._item)
            self._attempt.clear()
            return self._to(self._after)
        return self._fail()

    def _after(self, final: bool) -> bool:
        self._in_list = False
        closing = self._format.closing
        if closing is None and not self._format.sequence:
            return self._to(self._free)
        self._skip_space()
        text = self._buffer
        if closing is not None:
            if text.startswith(closing) or (final and closing.startswith(text)):  # the text may have been cut off here
                self._drop(len(closing))
                self._attempt.clear()
                return self._to(self._free)
            return False if closing.startswith(text) else self._fail()
        if not text:
            return self._fail_if(final)
        if text[0] in _SEPARATORS and self._may_call:
            self._consume(1)
            return self._to(self._item)
        return self._item(final) if self._may_call else self._fail()

    # Steps from state to state.

    @property
    def _may_call(self) -> bool:
        return self._parallel or self.num_calls == 0

    def _to(self, state: Callable[[bool], bool]) -> bool:
        self._state = state
        return True

    def _begin_call(self, call: CallReader) -> bool:
        self._call, self._started = call, False
        return self._to(self._in_call)

    def _start_call(self, call: CallReader) -> None:
        assert call.name is not None
        self._space = ""
        self._give(CallStart(self.num_calls, self._format.new_id(), call.name))
        self.num_calls += 1
        self._started = self._after_call = True

    def _fail(self) -> bool:
        """It was no call: what was taken for one is content, and no call begins inside it."""
        text = "".join(self._attempt)
        self._attempt.clear()
        self._in_list = False
        self._buffer, self._settled = text + self._buffer, len(text)
        return self._to(self._free)

    def _fail_if(self, condition: bool) -> bool:
        return condition and self._fail()

    def _cut_if(self, condition: bool) -> bool:
        """The text ends before a call does."""
        if condition and self._further and (self._in_list or self._sure):
            self._attempt.clear()
            return False
        return self._fail_if(condition)

    def _skip_space(self) -> None:
        self._consume(len(self._buffer) - len(self._buffer.lstrip(_SPACE)))

    def _consume(self, count: int) -> None:
        if count:
            self._attempt.append(self._buffer[:count])
            self._drop(count)

    def _drop(self, count: int) -> None:
        self._buffer = self._buffer[count:]
        self._settled = max(0, self._settled - count)

    def _possible_start(self, text: str) -> int:
        """From where on the text may be the beginning of a word that is looked for."""
        longest = max(map(len, self._words), default=0)
        for start in range(max(0, len(text) - longest + 1), len(text)):
            if any(word.startswith(text[start:]) for word in self._words):
                return start
        return len(text)

    def _pass(self, text: str) -> None:
        """It is content. White space at its end waits for what follows."""
        body = text.rstrip(_SPACE)
        if body:
            self._give(Content(self._space + body))
            self._space = ""
        self._space += text[len(body) :]
        if len(self._space) > MAX_SPACE:
            self._give(Content(self._space[:-MAX_SPACE]))
            self._space = self._space[-MAX_SPACE:]

    def _give(self, delta: Delta) -> None:
        match delta:
            case Content(text):
                if not text:
                    return
                self._after_call = False
                if self._deltas and isinstance(last := self._deltas[-1], Content):
                    self._deltas[-1] = Content(last.text + text)
                    return
            case Arguments(_, ""):
                return
        self._deltas.append(delta)
