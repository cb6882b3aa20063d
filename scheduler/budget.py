"""How the rows of a step are shared out among drafts and prefill.

Every decoding sequence has its one row first. Drafts are a bet, prompt tokens are owed: while prompts wait
to be computed, drafts get at most half of the rows that are left, or what the prompts do not need, whichever
is more. So at least one prompt row runs in every step that owes one, and speculation never stops altogether.
"""

from __future__ import annotations

from collections.abc import Sequence


def draft_allowance(rows_left: int, pending_prefill: int) -> int:
    """Rows that drafts may take out of ``rows_left``, when ``pending_prefill`` prompt tokens could run now."""
    return max(rows_left // 2, rows_left - pending_prefill)


def share_drafts(wants: Sequence[int], allowance: int) -> list[int]:
    """Grant each sequence at most what it wants, as evenly as ``allowance`` allows; earlier ones get the remainder.

    ::

        wants 4 1 4, allowance 7  ->  grants 3 1 3
    """
    grants = [0] * len(wants)
    # Modest wants first, so that what they leave goes to the others; on a tie the later one, so that the remainder of
    # the division ends with the earlier one.
    order = sorted(range(len(wants)), key=lambda i: (wants[i], -i))
    left = allowance
    for position, i in enumerate(order):
        grants[i] = min(wants[i], left // (len(wants) - position))
        left -= grants[i]
    return grants
