"""Who drafts in a case: every drafter that the registry can make for this model, and oracles that know the answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from bench.verify.factors import ORACLES
from specdec.drafters.base import Drafter
from specdec.drafters.registry import DRAFTER_NAMES, make_drafter
from specdec.drafters.synthetic import OracleDrafter, WrongDrafter


def drafter_names(vocab_size: int, only: str | None = None) -> tuple[tuple[str, ...], dict[str, str]]:
    """Names to prove, and those that cannot be made for this model, with the reason.

    ``only`` keeps one drafter of the registry; the oracles stay, as they take what no drafter reaches. Raises
    ValueError if it is unknown or cannot be made.
    """
    names: list[str] = []
    left_out: dict[str, str] = {}
    if only is not None:
        make_drafter(only, vocab_size)
    for name in DRAFTER_NAMES if only is None else (only,):
        try:
            make_drafter(name, vocab_size)
        except ValueError as error:
            left_out[name] = str(error)
        else:
            names.append(name)
    oracles = [name for name in ORACLES if name != "wrong" or vocab_size > 1]
    return tuple(dict.fromkeys([*names, *oracles])), left_out


def make_case_drafter(name: str, vocab_size: int, known: Mapping[int, Sequence[int]], seed: int) -> Drafter:
    """A drafter for one engine; ``known`` are the outputs of its sequences by seq_id."""
    if name not in ORACLES:
        return make_drafter(name, vocab_size)
    return WrongDrafter(OracleDrafter(known), seed, vocab_size, error_rate=ORACLES[name])
