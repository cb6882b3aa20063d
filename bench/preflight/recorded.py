"""Preflight of recorded traffic: the model is measured, verified and served here to a sample of it."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.offline import OfflineConfig, run_offline
from bench.preflight.acceptance import Replay, replay
from bench.preflight.checklist import (
    Line,
    Numbers,
    alerts_line,
    decided,
    exactness_line,
    memory_bound_line,
)
from bench.preflight.controlled import replay_controlled
from bench.preflight.cost import Range, StepCost, measure_cost
from bench.preflight.equivalence import with_played
from bench.preflight.gain import best_replay, expected_gain, gains
from bench.preflight.live import against_plain_lines, server_lines
from bench.preflight.load import Load, find_load
from bench.preflight.play import Played, play
from bench.preflight.report import Findings
from bench.preflight.traffic import RecordedRequest, Traffic, read_traffic
from bench.process import ServerStartError, server_process
from model.interface import Executor
from model.loader import LoadedModel
from server.assemble import load
from server.commands import CommandError
from server.settings import Settings
from specdec.drafters.registry import AUTO, DRAFTER_NAMES, make_drafter

Report = Callable[[str], None]
Verify = Callable[[LoadedModel, Path], Line]

MAX_REPLAYED = 512  # requests whose outputs are replayed through the drafters
BATCHES = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class RecordedOptions:
    traffic: Path
    samples: int  # requests that are run here
    tokens: int  # output tokens of each
    rounds: int
    serve: bool
    rules: Path | None


def preflight_recorded(
    options: RecordedOptions, settings: Settings, flags: Sequence[str], verify: Verify, report: Report
) -> Findings:
    """``settings`` and ``flags`` say the same: how the server would be started. Raises CommandError, ModelError."""
    loaded, folder = load(settings, report)
    info = loaded.info
    vocab_size = info.num_token_ids
    traffic = read_traffic(options.traffic, loaded.tokenizer, vocab_size=vocab_size, max_model_len=info.max_model_len)
    sample = spread(traffic.requests, options.samples)
    outputs, whose = _outputs(traffic, sample, loaded, options.tokens, settings, report)
    k = settings.num_speculative_tokens
    ks = sorted({1, 2, 4, 8, k} - {0})
    replays = replay_drafters(outputs, ks, vocab_size)
    cost = measure_cost(
        loaded.executor,
        batches=[batch for batch in BATCHES if batch <= settings.max_num_seqs],
        ks=ks,
        context=_typical_context(traffic.requests),
        rounds=options.rounds,
        kernels=settings.kernels,
        progress=report,
    )
    found_load = find_load(traffic.requests, cost)
    configured = replay_configured(settings, outputs, cost, found_load, vocab_size)
    replays = [*replays, *([configured] if configured is not None else [])]
    level = exactness_line(loaded.exactness.level, loaded.exactness.detail)
    equivalence = verify(loaded, folder)
    del loaded  # the server loads it again
    gc.collect()
    played = None
    if options.serve:
        played = _serve(sample, found_load, cost, options, flags, report)
    fit, acceptance = judge(replays, cost, found_load, settings)
    batch = max(1.0, found_load.concurrency or 1.0)
    memory = memory_bound_line(
        cost.row_cost(batch, max(1, k)), batch, max(1, k), cost.bound(cost.nearest(batch), max(1, k))
    )
    checklist = [
        with_played(equivalence, played),
        level,
        memory,
        acceptance,
        *against_plain_lines(played, "leave out --no-serve"),
        *_memory_lines(played, options.rules),
    ]
    return Findings(
        source=f"{options.traffic} ({len(traffic.requests)} requests)",
        model=info.name,
        fit=fit,
        checklist=checklist,
        bad_lines=traffic.bad_lines,
        load=found_load,
        cost=cost,
        outputs=whose,
        replays=replays,
        gains=gains(replays, cost),
    )


def spread(requests: Sequence[RecordedRequest], count: int) -> list[RecordedRequest]:
    """``count`` of ``requests``, evenly from beginning to end."""
    if count >= len(requests):
        return list(requests)
    return [requests[i * len(requests) // count] for i in range(count)]


def replay_drafters(
    outputs: Sequence[tuple[Sequence[int], Sequence[int]]], ks: Sequence[int], vocab_size: int
) -> list[Replay]:
    """Each drafter of the registry that can be made for the model, but the one that never drafts, with each k."""
    replays = []
    for name in DRAFTER_NAMES:
        if name == "none":
            continue
        try:
            replays += [replay(make_drafter(name, vocab_size), outputs, k) for k in ks]
        except ValueError:  # this drafter does not suit this model
            continue
    return replays


def replay_configured(
    settings: Settings,
    outputs: Sequence[tuple[Sequence[int], Sequence[int]]],
    cost: StepCost,
    load: Load,
    vocab_size: int,
) -> Replay | None:
    """The configured drafter with the controller, at the traffic's concurrency; None where no controller decides, or
    the drafter needs more than tokens."""
    if not settings.num_speculative_tokens or (settings.drafter != AUTO and settings.draft_length == "fixed"):
        return None
    try:
        return replay_controlled(
            settings.drafter,
            outputs,
            settings.num_speculative_tokens,
            batch=max(1, round(load.concurrency or 1.0)),
            cost=cost,
            vocab_size=vocab_size,
            adaptive=settings.draft_length == "auto",
        )
    except ValueError:
        return None


def judge(replays: Sequence[Replay], cost: StepCost, load: Load, settings: Settings) -> tuple[Line, Line]:
    """(fit for speculation, acceptance), at the traffic's concurrency, or alone where it is unknown."""
    known = load.concurrency is not None
    batch = max(1.0, load.concurrency or 1.0)
    at = f"at batch {batch:.3g}" + ("" if known else " (concurrency unknown)")
    usable = [one for one in replays if one.drafter != "random"]  # exists for tests
    best = best_replay(usable, cost, batch)
    if best is None or not best.steps:
        reason = "no output is longer than a token"
        return Line("fit for speculation", "unknown", reason), Line("acceptance", "unknown", reason)
    gain = expected_gain(best, cost, batch)
    numbers: Numbers = {"drafter": best.drafter, "k": best.k, "batch": batch, "gain": gain.median}
    told = f"expected gain {_shown(gain)} {at} with {best.drafter}, k = {best.k}"
    fit = Line("fit for speculation", decided(gain.low > 1, gain.high <= 1), told, numbers)
    k = settings.num_speculative_tokens
    # The last one is that with the controller, if there is one.
    chosen = [one for one in usable if one.k == k and one.drafter == settings.drafter][-1:]
    if not chosen:
        return fit, Line("acceptance", "unknown", f"drafter {settings.drafter}, k = {k} was not replayed")
    here = expected_gain(chosen[0], cost, batch)
    rate = chosen[0].acceptance_rate
    shown = "drafts nothing" if rate is None else f"{rate:.0%} of the draft tokens are accepted"
    return fit, Line(
        "acceptance",
        decided(here.low > 1, here.high <= 1),
        f"as configured ({settings.drafter}, k = {k}{_lacking(settings)}) {shown}, "
        f"{chosen[0].tokens_per_step:.2f} tokens a step: expected gain {_shown(here)} {at}",
        {"rate": rate, "tokens_per_step": chosen[0].tokens_per_step, "gain": here.median, "batch": batch},
    )


def _lacking(settings: Settings) -> str:
    """What the server would draft with, but its replay cannot."""
    lacking = []
    if settings.drafter == AUTO and settings.draft_model is not None:
        lacking.append("draft model")
    if settings.drafter == AUTO and settings.exit_layers is not None:
        lacking.append("first layers")
    return f", without its {' and '.join(lacking)}" if lacking else ""


def _shown(gain: Range) -> str:
    return f"{gain.median:.2f} times ({gain.low:.2f} to {gain.high:.2f})"


def _outputs(
    traffic: Traffic,
    sample: Sequence[RecordedRequest],
    loaded: LoadedModel,
    tokens: int,
    settings: Settings,
    report: Report,
) -> tuple[list[tuple[tuple[int, ...], tuple[int, ...]]], str]:
    recorded = [(r.prompt, r.output) for r in traffic.requests if r.output is not None]
    if recorded:
        chosen = recorded[:MAX_REPLAYED]
        return chosen, f"{len(chosen)} recorded outputs"
    report(f"no line has an output: the model answers {len(sample)} of them")
    outputs = model_outputs(loaded.executor, sample, tokens, settings)
    return outputs, f"the model's own outputs to {len(outputs)} of the requests, at most {tokens} tokens"


def model_outputs(
    executor: Executor, sample: Sequence[RecordedRequest], tokens: int, settings: Settings
) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Plain decoding of ``sample`` with its own sampling parameters."""
    stops = frozenset(executor.info.eos_token_ids)
    requests = [(r.prompt, r.params(min(tokens, r.max_tokens), stops)) for r in sample]
    config = OfflineConfig(num_speculative_tokens=0, kernels=settings.kernels)
    done = run_offline(executor, config, requests, batch=8)
    return [(request.prompt, answer.token_ids) for request, answer in zip(sample, done, strict=True)]


def _typical_context(requests: Sequence[RecordedRequest]) -> int:
    """Half-way through the median request."""
    lengths = sorted(len(request.prompt) + request.num_output_tokens // 2 for request in requests)
    return lengths[len(lengths) // 2]


def _serve(
    sample: Sequence[RecordedRequest],
    load: Load,
    cost: StepCost,
    options: RecordedOptions,
    flags: Sequence[str],
    report: Report,
) -> Played:
    concurrency = max(1, min(len(sample), round(load.concurrency or 1), cost.batches[-1]))
    report("starting a server for the requests")
    with tempfile.TemporaryDirectory(prefix="truedraft-preflight-") as folder:
        try:
            with server_process([*flags, "--served-model-name", "preflight"], Path(folder) / "log") as url:
                bodies = [r.body("preflight", min(options.tokens, r.max_tokens)) for r in sample]
                return play(url, bodies, concurrency=concurrency, rounds=options.rounds, progress=report)
        except ServerStartError as error:
            raise CommandError(" ".join(str(error).split())) from error


def _memory_lines(played: Played | None, rules: Path | None) -> list[Line]:
    """Fragmentation and rollback of the server that was started for it; audit and alerts belong to a live one."""
    audit = Line("audit", "unknown", "recorded traffic does not tell; ask the live server with --url")
    if played is None:
        unseen = "no server was started (--no-serve)"
        names = ("KV fragmentation", "rollback")
        return [*(Line(name, "unknown", unseen) for name in names), audit, alerts_line(rules)]
    lines = {line.name: line for line in server_lines(played.window, rules)}
    return [lines["KV fragmentation"], lines["rollback"], audit, lines["alerts"]]
