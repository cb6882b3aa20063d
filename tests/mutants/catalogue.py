"""All mutants, and what the equivalence suite is that is tried on each of them in the long form."""

from __future__ import annotations

from tests.mutants.decoding import DECODING
from tests.mutants.drafting import DRAFTING
from tests.mutants.forward import FORWARD
from tests.mutants.guards import GUARDS
from tests.mutants.memory import MEMORY
from tests.mutants.mutant import Mutant

MUTANTS: tuple[Mutant, ...] = (*DECODING, *DRAFTING, *MEMORY, *FORWARD, *GUARDS)

# The engine compared with itself on one tiny model; not test_reference.py, which compares with another program.
EQUIVALENCE = (
    "tests/exactness/test_poison.py",
    "tests/exactness/test_follow_up.py",
    "tests/exactness/test_shared_prefix.py",
    "tests/exactness/test_rows.py",
    "tests/exactness/test_bit_exact.py",
)
