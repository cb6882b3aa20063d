"""``truedraft verify`` on the command line. Cheap to import: torch comes with the first line of ``run``."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from server.commands import CommandError, Report
from server.setting_flags import choices_of, default_text, flag_name
from server.settings import Settings

if TYPE_CHECKING:
    from bench.verify.draft_model import DraftModel
    from bench.verify.run import Verification
    from model.loader import LoadedModel

HELP = "prove that speculation changes nothing: compare it with plain decoding, token by token"
DEFAULT_FOLDER = Path("truedraft-verify")

_AS_SERVE = ("model", "draft_model", "dtype", "quantize", "device", "executor", "kernels", "num_threads")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    for name in _AS_SERVE:
        info = Settings.model_fields[name]
        default_is = "the target itself, if memory allows" if name == "draft_model" else default_text(info)
        text = f"as for serve (default: {default_is})"
        # None leaves the kernels to the environment, as serve does.
        default = None if name == "kernels" else info.default
        options: dict[str, Any] = {"default": default, "help": text, "choices": choices_of(info)}
        if name == "num_threads":
            options["type"] = _positive
        parser.add_argument(
            flag_name(name), metavar=None if options["choices"] else name.rsplit("_", 1)[-1].upper(), **options
        )
    parser.add_argument("--ledger", action="store_true", help="check every slot that is read or written, which is slow")
    parser.add_argument("--draft", metavar="D", help="prove this drafter only (default: every one there is)")
    parser.add_argument(
        "--suite",
        choices=("quick", "full"),
        default="quick",
        help="quick: every pair of conditions, at least 40,000 positions; full: also every three of the dangerous ones",
    )
    parser.add_argument(
        "--report", type=Path, default=DEFAULT_FOLDER, metavar="DIR", help=f"where the reports go ({DEFAULT_FOLDER})"
    )
    parser.add_argument(
        "--case",
        action="append",
        default=[],
        metavar="ID",
        help="run only this case: its id, or its values as a report writes them; may be repeated",
    )
    parser.add_argument("--list", action="store_true", help="show the suite's cases and run none")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the requests and the choice of cases (0)")
    parser.add_argument(
        "--max-positions", type=_positive, metavar="N", help="leave cases out so that at most so many are compared"
    )
    parser.add_argument(
        "--reference",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with transformers' generate as well; it needs memory for two float32 models (default: on)",
    )


def run(arguments: argparse.Namespace, report: Report) -> int:
    """0 if everything held, else 1."""
    from bench.verify.progress import Progress
    from bench.verify.report import check_folder, write_report
    from bench.verify.run import Options, Verification
    from model.kernels import chosen_kernels
    from model.opening import open_model

    if not arguments.list:
        try:
            check_folder(arguments.report)
        except OSError as error:
            raise CommandError(f"cannot write to --report {arguments.report}: {error.strerror or error}") from error
    given = _command(arguments, whole=True)
    arguments.kernels = chosen_kernels(arguments.kernels)
    loaded, folder = open_model(
        arguments.model,
        report,
        dtype=arguments.dtype,
        device=arguments.device,
        executor=arguments.executor,
        kernels=arguments.kernels,
        num_threads=arguments.num_threads,
        quantize=arguments.quantize,
    )
    draft, no_draft = _draft(arguments, loaded, folder, report)
    options = Options(
        suite=arguments.suite,
        seed=arguments.seed,
        drafter=arguments.draft,
        no_draft=no_draft,
        cases=tuple(arguments.case),
        max_positions=arguments.max_positions,
        reference=folder if arguments.reference and not arguments.case else None,
        ledger=arguments.ledger,
        command=_command(arguments),
        given=given,
    )
    try:
        verification = Verification(loaded, options, Progress(), draft)
    except ValueError as error:
        raise CommandError(str(error)) from error
    if arguments.list:
        return _list(verification)
    result = verification.run()
    print("\n".join(summary(result)))
    missing = write_report(arguments.report, result)
    for line in missing:
        report(f"error: {line}")
    if "report.html" not in " ".join(missing):
        print(f"report: {arguments.report / 'report.html'}")
    if verification.ended is not None:
        raise verification.ended
    return 0 if result["passed"] and not missing else 1


def _draft(
    arguments: argparse.Namespace, loaded: LoadedModel, folder: Path, report: Report
) -> tuple[DraftModel | None, str]:
    """The model that drafts, or why there is none."""
    from bench.verify.draft_model import find_draft
    from bench.verify.drafters import NO_DRAFT_MODEL
    from specdec.drafters.registry import AUTO, MODEL

    if arguments.draft not in (None, MODEL, AUTO):
        return None, NO_DRAFT_MODEL
    options = {name: getattr(arguments, name) for name in ("dtype", "executor", "kernels", "num_threads")}
    return find_draft(arguments.draft_model, loaded, folder, report, **options)


def summary(result: Mapping[str, Any]) -> list[str]:
    """The result as a person wants to read it."""
    coverage, model = result["coverage"], result["model"]
    cases, states = result["cases"], ("passed", "failed", "error", "not run")
    counts = {state: sum(case["status"] == state for case in cases) for state in states}
    verdict = "passed" if result["passed"] else "interrupted" if result["interrupted"] else "FAILED"
    if not result["speculation_compared"]:
        verdict += " (nothing was compared with speculation)"
    lines = [
        f"{verdict}: {model['name']}, {model['dtype']}, {model['executor']}, level {model['exactness_level']}, "
        f"suite {result['suite']}, {result['seconds']:.0f} s",
        f"cases: {', '.join(f'{n} {state}' for state, n in counts.items() if n or state == 'passed')}",
        f"positions compared: {coverage['positions']:,} of {coverage['positions_planned']:,}; "
        f"with drafts: {coverage['drafted_positions']:,}; plainly decoded: {result['plain_positions']:,}",
        f"pairs of conditions that came about: {coverage['pairs_covered']:,} of {coverage['pairs_total']:,}",
    ]
    if missing := coverage["pairs_missing"]:
        shown = "; ".join(f"{item['pair']} ({item['reason']})" for item in missing[:2])
        lines.append(f"pairs that did not: {len(missing):,}, listed in report.json, such as {shown}")
    if "triples_total" in coverage:
        lines.append(
            f"threes of {', '.join(coverage['dangerous_factors'])}: "
            f"{coverage['triples_covered']:,} of {coverage['triples_total']:,}"
        )
    for name, values in coverage["factors"].items():
        lines.append(f"  {name}: " + ", ".join(_came_about(coverage, name, value) for value in values))
    if model["exactness_level"] != "L0":
        lines.append(f"near ties: {result['near_ties']}; {result['near_tie_rule']}")
        lines.append(f"why not L0: {model['exactness_detail']}")
    if result["draft"] is not None:
        lines.append(f"draft model: {result['draft']}")
    for name, reason in result["drafters_left_out"].items():
        lines.append(f"drafter {name} left out: {reason}")
    reference = result["reference"]
    if reference is not None and reference["status"] == "error":
        lines.append(f"reference ({reference['what']}): error: {reference.get('reason', 'not finished')}")
    elif reference is not None:
        lines.append(
            f"reference ({reference['what']}): {reference['status']}, {reference['prompts']} prompts, "
            f"{reference['positions']} positions, {reference['near_ties']} near ties, "
            f"{len(reference['mismatches'])} mismatches"
        )
    for case in cases:
        if case["status"] in ("failed", "error"):
            lines += [f"{case['id']} {case['status']}: {case['reason']}", f"  again: {case['replay']}"]
    return lines


def _came_about(coverage: Mapping[str, Any], name: str, value: str) -> str:
    """A value, and in how many of the cases that name it it came about."""
    counted = coverage["happened"].get(f"{name} {value}")
    if counted is None:
        return f"{value} x0"
    of = f"/{counted['cases']}" if counted["came_about"] < counted["cases"] else ""
    told = f"{value} x{counted['came_about']}{of}"
    shown = {"batch": "steps_of_8", "condition": "preemptions", "cache": "cached_tokens", "aborts": "aborted"}
    shown |= dict.fromkeys(("drafter", "k"), "drafted_positions")
    if name not in shown or not counted[shown[name]]:
        return told
    return f"{told} ({counted[shown[name]]:,} {shown[name].replace('_', ' ')})"


def _list(verification: Verification) -> int:
    suite = verification.suite
    for case in suite.cases:
        print(f"{case.id}  {case.spec}")
    valid = sum(1 for _ in suite.design.combinations(2))
    print(
        f"{len(suite.cases)} cases hold all {valid:,} valid pairs; more follow for those that did not come about, and "
        "for positions"
    )
    for constraint in suite.design.constraints:
        print(f"left out: {constraint.reason}")
    for name, reason in verification.drafters.left_out.items():
        print(f"left out: drafter {name}: {reason}")
    return 0


def _command(arguments: argparse.Namespace, *, whole: bool = False) -> str:
    """What runs a case of the same suite again, but for --case; ``whole``: the command as it was given."""
    words = ["truedraft", "verify", "--model", arguments.model]
    for name in _AS_SERVE[1:]:
        value = getattr(arguments, name)
        if value is not None and value != Settings.model_fields[name].default:
            words += [flag_name(name), str(value)]
    if arguments.ledger:
        words.append("--ledger")
    if arguments.draft is not None:
        words += ["--draft", arguments.draft]
    if arguments.suite != "quick":
        words += ["--suite", arguments.suite]
    if arguments.seed:
        words += ["--seed", str(arguments.seed)]
    if whole:
        words += [word for name in arguments.case for word in ("--case", name)]
        if arguments.max_positions is not None:
            words += ["--max-positions", str(arguments.max_positions)]
        if not arguments.reference:
            words.append("--no-reference")
        if arguments.report != DEFAULT_FOLDER:
            words += ["--report", str(arguments.report)]
    return shlex.join(words)


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value
