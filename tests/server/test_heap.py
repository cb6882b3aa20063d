"""A process that serves leaves what start-up made out of its collections."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, weakref
class Node: pass
def cycle():
    a, b = Node(), Node()
    a.other, b.other = b, a
    return weakref.ref(a)
before = cycle()
from server.heap import settle
old = [[i] for i in range(1000)]
settle()
assert before() is None, "rubbish of the start stays for ever"
assert gc.get_freeze_count() > 1000
assert not any(thing is old[7] for thing in gc.get_objects()), "still looked at"
after = cycle()
gc.collect()
assert after() is None, "rubbish that comes later stays for ever"
"""


def test_only_what_comes_later_is_looked_at() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)
