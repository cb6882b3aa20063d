"""The flags that the locustfile adds to locust's own. Each can also be set as an environment variable, ``LOAD_...``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Flag:
    """``default`` gives the type; a value that is unset is an empty text, since web forms know nothing else."""

    name: str
    default: str | float | bool
    help: str
    choices: Sequence[str] = ()
    in_form: bool = True  # of locust's web page; what is read before it begins, or names a file or a secret, is not

    @property
    def option(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"LOAD_{self.name.upper()}"

    @property
    def arguments(self) -> Mapping[str, Any]:
        """For ``add_argument`` of locust's parser."""
        plain: dict[str, Any] = {
            "default": self.default,
            "help": self.help,
            "env_var": self.variable,
            "include_in_web_ui": self.in_form,
        }
        if isinstance(self.default, bool):
            return {**plain, "action": "store_true"}
        plain["type"] = type(self.default)
        return {**plain, "choices": list(self.choices)} if self.choices else plain


FLAGS = (
    Flag("endpoint", "completions", "what is asked: /v1/completions or /v1/chat/completions", ("completions", "chat")),
    Flag("model", "", "the model's name; empty: the first one that the server lists"),
    Flag(
        "rate",
        0.0,
        "open loop: requests a second that each locust user sends, whether or not answers come; with -u 10, ten "
        "times as many in all. 0: closed loop, each user waits for its answer",
    ),
    Flag("arrivals", "poisson", "of an open loop: at random times, or evenly spaced", ("poisson", "constant")),
    Flag("think_time", 0.0, "closed loop: seconds between an answer and the user's next request"),
    Flag("classes", "", "classes of prompts with weights, as chat=3,code,copy; empty: all, each as often"),
    Flag(
        "prompts",
        "",
        "a JSON file of other prompts: an object of classes, each a list of texts or of lists of turns",
        in_form=False,
    ),
    Flag(
        "prompt_tokens",
        0.0,
        "each prompt is brought to exactly so many tokens, by the server's /tokenize; completions only. 0: as it is",
    ),
    Flag("output_tokens", "64", "max_tokens: a number, or a range of which each length is as likely, as 16-128"),
    Flag("natural_end", False, "an answer may end before max_tokens; without it ignore_eos fixes its length"),
    Flag("temperature", 0.0, "0 is greedy; above, each request has a seed of its own"),
    Flag("seed", 0.0, "of the load: the same seed draws the same prompts, lengths and cancels for each user"),
    Flag("speculation", "server", "server: as it decides; off; or a number of draft tokens for every request"),
    Flag(
        "sharing",
        "none",
        "none: a cache_salt for each request, so that repeated prompts find neither cached blocks nor past outputs; "
        "all: no salt",
        ("none", "all"),
    ),
    Flag("cancel", 0.0, "share of requests, 0 to 1, whose client leaves at a random token before the end"),
    Flag("no_retry_after", False, "closed loop: a user that was refused goes on at once, not when Retry-After says"),
    Flag("plain_openai", False, "send only fields of OpenAI's own API, for servers that refuse others"),
    Flag("request_timeout", 120.0, "seconds without a byte after which a request has failed"),
    Flag(
        "api_key_env",
        "TRUEDRAFT_API_KEY",
        "the environment variable that holds the API key, if the server wants one",
        in_form=False,
    ),
    Flag("warm_up", 0.0, "seconds at the start of the test, and of each step, whose requests are not counted"),
    Flag(
        "steps", "", "step load: numbers of users one after the other, as 1,2,4,8, instead of -u and -t", in_form=False
    ),
    Flag("step_seconds", 30.0, "how long each step lasts", in_form=False),
    Flag(
        "metrics_urls",
        "",
        "where the server's metrics are, separated by commas: one for each replica, never through a load balancer. "
        "Empty: /metrics of the host; none: not asked",
    ),
    Flag("metrics_prefix", "truedraft_", "in front of the metrics' names; vllm: for vLLM's"),
    Flag("slo", "", "objectives, as ttft_p95<0.5,itl_p99<0.1,failed<0.001; one that is missed makes the exit code 3"),
    Flag("report", "", "a file for all figures as JSON", in_form=False),
)


def flags_table() -> str:
    """The rows of docs/load_tests.md."""
    rows = []
    for flag in FLAGS:
        default = f"{flag.default:g}" if isinstance(flag.default, float) else str(flag.default or "")
        shown = f"`{default}`" if default else ""
        rows.append(f"| `{flag.option}` | `{flag.variable}` | {shown} | {flag.help} |\n")
    return "".join(rows)
