"""Every setting of the server, once: its type, default, bounds and description.

Precedence: command-line flags, then ``TRUEDRAFT_*`` environment variables, then the file named by ``--config``
(TOML or YAML), then the defaults here. ``--help`` and docs/settings.md are made from these fields
(server.setting_flags).
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator, model_validator
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from server.sizes import parse_size

ENV_PREFIX = "TRUEDRAFT_"
DEFAULT_MODEL = "default"

_ORIGIN = re.compile(r"\*|https?://[A-Za-z0-9.\-]+(:\d+)?|https?://\[[0-9A-Fa-f:]+\](:\d+)?")
_ENDPOINT = re.compile(r"https?://([A-Za-z0-9._\-]+|\[[0-9A-Fa-f:]+\])(:\d+)?(/[A-Za-z0-9._~/\-]*)?")


class SettingsError(ValueError):
    """A setting that cannot be used; the message is one line that names it and holds its value."""


class Settings(BaseSettings):
    """Frozen; built by :func:`load_settings` and passed down from there."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX,
        extra="forbid",
        frozen=True,
        env_ignore_empty=True,
        protected_namespaces=(),
        allow_inf_nan=False,
    )

    # --- model ---
    model: str = Field(
        DEFAULT_MODEL,
        min_length=1,
        description="What to serve: `default` (SmolLM2-135M-Instruct, fetched once), a folder of safetensors, a GGUF "
        "file, or a Hugging Face hub name.",
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Names that a request may use for the model, separated by commas; answers carry the first. "
        "Empty: derived from `model`.",
    )
    dtype: Literal["auto", "bfloat16", "float32"] = Field(
        "auto", description="Type of weights and KV cache. `auto`: the checkpoint's where it is supported."
    )
    quantize: Literal["none", "int8"] = Field(
        "none",
        description="`int8`: the weights of all matrix products in int8, half of bfloat16's bytes, for the families of "
        "the fused executor. It is another model, with answers of its own. A draft model keeps its type.",
    )
    device: Literal["cpu", "cuda"] = Field("cpu", description="Where the model runs.")
    executor: Literal["auto", "fused", "generic"] = Field(
        "auto",
        description="How the forward runs. `auto`: fused for a Llama-shaped model that passes its check, else generic.",
    )
    kernels: Literal["auto", "torch"] = Field(
        "auto",
        description="`torch`: leave the compiled CPU kernels alone, as on a machine that cannot build or run them; "
        "`off` in the environment means the same. `auto`: use them where they can run.",
    )
    num_threads: int | None = Field(
        None,
        ge=1,
        le=1024,
        description="Threads of the forward on a CPU. Unset: what torch takes, one for each core or `OMP_NUM_THREADS`.",
    )
    require_exact: bool = Field(
        False, description="Refuse to serve a model that does not reach exactness level L0, and say why."
    )
    max_model_len: int | None = Field(
        None, ge=1, description="Most tokens of prompt and output together. Unset: what the model was trained for."
    )
    tool_call_parser: Literal["auto", "hermes", "llama3", "mistral", "json"] = Field(
        "auto",
        description="How the model writes tool calls: `hermes` (`<tool_call>`, as Qwen does), `llama3`, `mistral`, or "
        "plain `json`. `auto`: as its chat template has them, else `json`.",
    )

    # --- memory ---
    block_size: int = Field(16, ge=1, le=1024, description="Tokens in one block of the KV cache.")
    num_blocks: int | None = Field(
        None, ge=1, description="Blocks in the KV cache. Unset: as many as fit `kv_cache_memory`."
    )
    kv_cache_memory: int | None = Field(
        None,
        ge=1,
        description="Memory for the KV cache, in bytes or with a unit (`2GiB`). Unset: enough for `max_num_seqs` "
        "sequences of `max_model_len` tokens, at most a quarter of the free memory.",
    )
    enable_prefix_cache: bool = Field(True, description="Share KV blocks between requests that begin alike.")
    ledger: bool = Field(
        False,
        description="For debugging: check before every forward, against a record of what was written where, that each "
        "row reads the right token at every position. A violation fails the requests of its step and is logged, with "
        "the token ids of one position.",
    )

    # --- scheduling ---
    max_num_seqs: int = Field(32, ge=1, le=4096, description="Most sequences in one step.")
    max_num_batched_tokens: int = Field(
        512, ge=1, description="Token budget of one step: rows of prefill, decode and drafts together."
    )
    itl_slo: float | None = Field(
        None,
        gt=0,
        description="Seconds that a step may take for prompts while others decode: prompts are then cut into chunks as "
        "large as the measured cost of a step allows. Unset: chunks have what the token budget leaves.",
    )
    max_waiting: int = Field(1024, ge=1, description="Most requests that wait; beyond it the answer is 503.")

    max_waiting_tokens: int = Field(
        524288,
        ge=1,
        description="Most prompt tokens of requests that wait; beyond it the answer is 503. Until a prompt is "
        "tokenized its bytes count. A request that comes while nobody waits is taken in any case.",
    )

    # --- speculation ---
    num_speculative_tokens: int = Field(
        16,
        ge=0,
        le=64,
        description="Most draft tokens for each sequence and step; 0 turns speculation off. A request may "
        "ask for fewer.",
    )
    drafter: str = Field(
        "auto",
        min_length=1,
        description="Who proposes drafts: `ngram` and `suffix` look for earlier places where the text went on from the "
        "same tokens, in the request and (`suffix`) in past outputs of the same cache salt; `auto` takes, for each "
        "sequence and step, the best of all there are. `model`: `draft_model`. `exit`: the target's first layers. For "
        "tests: `random` (almost always wrong) and `none` (no drafts).",
    )
    draft_model: str | None = Field(
        None,
        min_length=1,
        description="A smaller model with the same tokenizer that drafts, named as `model` is. It takes memory for its "
        "weights and a part of the KV cache.",
    )
    exit_layers: int | None = Field(
        None,
        ge=1,
        description="How many of the target's first layers draft. Unset: `auto` does without, and `exit` takes a third "
        "of them.",
    )
    draft_length: Literal["auto", "fixed"] = Field(
        "auto",
        description="How much of a draft is verified. `auto`: as much as should give the whole batch the most tokens a "
        "second, from the time that steps take and from how drafts have come true; under load often nothing. `fixed`: "
        "all of it. A request that asks for a number of tokens gets it.",
    )

    # --- audits ---
    audit_rate: float = Field(
        0.0,
        ge=0,
        le=1,
        description="Share of finished choices that are run again without drafts and from a cold cache, and compared. "
        "0: none, at no cost.",
    )
    audit_share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="Most that audits take: this share of `max_num_batched_tokens` in a step (at least one row), and "
        "so many rows for each live row. Unset: `audit_rate`, but at least 0.05.",
    )
    audit_blocks: int | None = Field(
        None,
        ge=1,
        description="KV blocks for audits alone, on top of the KV cache: live requests never wait for an audit's "
        "blocks. A choice that does not fit is not audited (it counts as dropped). Unset: enough for `max_model_len` "
        "tokens, at most an eighth of the KV cache.",
    )
    audit_max_waiting: int = Field(256, ge=1, description="Most audits that wait or run; more are dropped.")
    audit_max_waiting_tokens: int = Field(
        131072,
        ge=1,
        description="Most tokens of audits that wait or run, their logprobs and whatever else they hold.",
    )
    audit_store: Path | None = Field(
        None,
        description="Folder for the records of audits that differed: prompt and output ids, for `truedraft replay`. "
        "Unset: only hashes are logged.",
    )
    audit_store_files: int = Field(100, ge=1, description="Most records in `audit_store`; the oldest go first.")
    audit_store_bytes: int = Field(
        64 * 1024**2, ge=1024, description="Most bytes in `audit_store`, in bytes or with a unit."
    )

    # --- limits of one request ---
    max_n: int = Field(16, ge=1, le=128, description="Largest `n` and `best_of`.")
    max_stop: int = Field(4, ge=1, le=64, description="Most stop strings of a request.")
    max_prompts: int = Field(128, ge=1, description="Most prompts in a request.")
    max_choices: int = Field(256, ge=1, description="Most choices of a request: prompts times `n` (or `best_of`).")
    max_body_bytes: int = Field(
        2 * 1024**2,
        ge=1024,
        description="Largest request body, in bytes or with a unit. Reading 2 MiB holds up others for up to 0.1 s; "
        "this grows with the size.",
    )
    max_bodies_bytes: int = Field(
        256 * 1024**2,
        ge=1024,
        description="Most bytes of all request bodies that are read or parsed at one time, in bytes or with a unit; "
        "beyond it the answer is 503.",
    )
    request_timeout: float = Field(
        600.0,
        gt=0,
        le=10**7,
        description="Seconds from a request's arrival in which its answer has to be complete, and the largest "
        "`timeout` that a request may ask for. What takes longer is aborted: 504, or an error event in a stream.",
    )
    header_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds in which the head of a request has to arrive: of the first from when its connection is "
        "made, of later ones from their first bytes on.",
    )
    body_timeout: float = Field(30.0, gt=0, description="Seconds in which a request body has to arrive.")
    grammar_timeout: float = Field(
        5.0, gt=0, description="Seconds that a request's schema, regex or grammar may take to compile."
    )
    grammar_cache_memory: int = Field(
        128 * 1024**2,
        ge=0,
        description="Most that compiled schemas, regexes and grammars take while no request uses them, in bytes or "
        "with a unit; the newest one stays in any case.",
    )
    template_timeout: float = Field(
        5.0, gt=0, description="Seconds that the model's chat template may take to render one chat."
    )
    send_timeout: float = Field(
        30.0,
        gt=0,
        description="Seconds in which a reader has to read something of what is sent; else the connection is closed, "
        "and the request of a stream aborted.",
    )

    # --- who may use it, and how much ---
    api_keys_file: Path | None = Field(
        None,
        description="File of API keys, one a line: a name and the key, or `sha256:` and the key's digest, in "
        "hexadecimal, and limits of its own, as `requests=60` or `tokens=none`. With keys, every request needs one but "
        "those to `/live`, `/health` and the files of the page `/ui`. Unset, and `TRUEDRAFT_API_KEYS` too: whoever "
        "reaches the port may use the server.",
    )
    metrics_without_key: bool = Field(False, description="Answer `/metrics` to those who have no API key, too.")
    share_cache_between_keys: bool = Field(
        False,
        description="Share KV blocks and past outputs to draft from between requests of different API keys. Off: only "
        "between those of one key, so that nobody can find out by times and counts what others sent.",
    )
    speculation_trace: bool = Field(
        True,
        description="Answer `speculation.trace`, which shows the drafts of a request. They may be other people's "
        "outputs, unless each has a key or a `cache_salt`; off: 400.",
    )
    rate_limit_requests: int | None = Field(
        None,
        ge=1,
        description="Most POST requests a minute of an API key, or of everybody without keys; beyond it the answer is "
        "429. Unset: no bound.",
    )
    rate_limit_tokens: int | None = Field(
        None,
        ge=1,
        description="Most tokens a minute of an API key, or of everybody without keys: prompts, and `max_tokens` of "
        "each choice until it ends; beyond it the answer is 429. Unset: no bound.",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="Origins whose web pages may use the server, separated by commas, as `https://app.example`; `*` "
        "for all. Empty: none (no CORS headers).",
    )
    metrics_alias: Literal["none", "vllm"] = Field(
        "none",
        description="`vllm`: `/metrics` tells the metrics that vLLM has too a second time, under vLLM's names, for "
        "dashboards and autoscalers made for it.",
    )
    ssl_certfile: Path | None = Field(
        None, description="Certificate of the server, PEM, with its chain: the port speaks HTTPS."
    )
    ssl_keyfile: Path | None = Field(None, description="Its private key, PEM, if it is not in the same file.")
    ssl_keyfile_password: SecretStr | None = Field(
        None, description="Password of the private key; better as an environment variable than as a flag."
    )
    ssl_ca_certs: Path | None = Field(
        None,
        description="Certificates of those who sign clients' certificates, PEM: only clients with such a certificate "
        "can connect.",
    )

    # --- server ---
    max_connections: int = Field(
        4096,
        ge=1,
        description="Most connections that are served; over others the answer is 503, but for `/live` and `/health`. "
        "The process is allowed so many descriptors, if it may be.",
    )
    engine_process: bool = Field(
        True,
        description="Run the model and the scheduler in a process of their own, so that HTTP, tokenizing and metrics "
        "do not share an interpreter with them. The answers are the same.",
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(8000, ge=0, le=65535, description="Port to listen on; 0 picks a free one.")
    shutdown_timeout: float = Field(
        30.0, ge=0, description="Seconds that running requests get to finish after SIGTERM or SIGINT."
    )
    stall_timeout: float = Field(
        300.0,
        gt=0,
        description="Seconds without progress after which a running step, or the event loop, counts as frozen: the "
        "server exits.",
    )
    ui: bool = Field(
        True,
        description="Serve the page `/ui`, which shows speculation at work, and what feeds it and `truedraft top`.",
    )
    otlp_endpoint: str | None = Field(
        None,
        description="Send traces of requests to this OpenTelemetry receiver (OTLP over HTTP), as "
        "`http://collector:4318`; needs the extra `otel`. Unset: no traces, at no cost.",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="Least severe log line shown.")
    log_format: Literal["text", "json"] = Field("text", description="Log lines as text or as one JSON object each.")
    log_prompts: bool = Field(False, description="Write prompts to the log. Off: no text of a request is logged.")

    _file_values: ClassVar[Mapping[str, Any]] = {}

    @field_validator("served_model_name", "cors_origins", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        if isinstance(value, str):
            return tuple(name.strip() for name in value.split(",") if name.strip())
        return value

    @field_validator("otlp_endpoint")
    @classmethod
    def _check_endpoint(cls, value: str | None) -> str | None:
        if value is not None and not _ENDPOINT.fullmatch(value):
            raise ValueError(
                "write it as http://collector:4318 or https://host/path, without a name or password; headers for the "
                "receiver go into OTEL_EXPORTER_OTLP_HEADERS"
            )
        return value

    @field_validator("cors_origins")
    @classmethod
    def _check_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not _ORIGIN.fullmatch(origin):
                raise ValueError(f"{origin!r} is not an origin; write scheme, host and port, as https://app.example")
        return value

    @field_validator(
        "kv_cache_memory",
        "max_body_bytes",
        "max_bodies_bytes",
        "audit_store_bytes",
        "grammar_cache_memory",
        mode="before",
    )
    @classmethod
    def _read_size(cls, value: object) -> object:
        return parse_size(value) if isinstance(value, str) else value

    @field_validator("kernels", mode="before")
    @classmethod
    def _read_kernels(cls, value: object) -> object:
        # What is no server reads TRUEDRAFT_KERNELS too (model.kernels.load), as a switch.
        word = str(value).lower()
        if word in ("off", "0", "no", "false"):
            return "torch"
        return "auto" if word in ("on", "1", "yes", "true") else value

    @field_validator("port", mode="before")
    @classmethod
    def _explain_service_links(cls, value: object) -> object:
        # Kubernetes puts TRUEDRAFT_PORT=tcp://... into every pod beside a Service named "truedraft".
        if isinstance(value, str) and value.startswith("tcp://"):
            raise ValueError(
                "Kubernetes sets this for a Service named truedraft; set enableServiceLinks: false in the pod"
            )
        return value

    @model_validator(mode="after")
    def _check_together(self) -> Settings:
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("num_blocks and kv_cache_memory exclude each other; give one of them")
        if self.ssl_certfile is None:
            for name in ("ssl_keyfile", "ssl_keyfile_password", "ssl_ca_certs"):
                if getattr(self, name) is not None:
                    raise ValueError(f"{name} needs ssl_certfile: without a certificate there is no TLS")
        if self.max_bodies_bytes < self.max_body_bytes:
            raise ValueError(
                f"max_bodies_bytes ({self.max_bodies_bytes}) must be at least max_body_bytes ({self.max_body_bytes})"
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs a row"
            )
        return self

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, InitSettingsSource(settings_cls, init_kwargs=dict(cls._file_values))


SECRETS = frozenset(name for name, info in Settings.model_fields.items() if SecretStr in get_args(info.annotation))


def read_config_file(path: Path) -> dict[str, Any]:
    """Settings from a TOML or YAML file; names may be written with ``-`` or ``_``."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SettingsError(f"cannot read the config file {path}: {getattr(exc, 'strerror', None) or exc}") from exc
    try:
        if path.suffix == ".toml":
            values: object = tomllib.loads(text)
        elif path.suffix in (".yaml", ".yml"):
            values = yaml.safe_load(text) or {}
        else:
            raise SettingsError(f"the config file {path} must end in .toml, .yaml or .yml")
    except (tomllib.TOMLDecodeError, yaml.YAMLError) as exc:
        raise SettingsError(f"the config file {path} is not valid: {' '.join(str(exc).split())}") from exc
    if not isinstance(values, dict):
        raise SettingsError(f"the config file {path} must hold names and values")
    renamed = {str(name).replace("-", "_"): value for name, value in values.items()}
    unknown = sorted(set(renamed) - set(Settings.model_fields))
    if unknown:
        raise SettingsError(f"the config file {path} has an unknown setting: {unknown[0]}")
    return renamed


def load_settings(flags: Mapping[str, Any] | None = None, config: Path | None = None) -> Settings:
    """Merge flags, environment and file. Raises SettingsError with one line that names the setting."""
    # A subclass carries the file's values, so that nothing is kept between two calls.
    values = read_config_file(config) if config is not None else {}
    cls = type("Settings", (Settings,), {"_file_values": values, "__module__": __name__, "__doc__": Settings.__doc__})
    try:
        return cls(**(flags or {}))  # type: ignore[no-any-return]
    except ValidationError as exc:
        raise SettingsError(_one_line(exc)) from exc


def _one_line(exc: ValidationError) -> str:
    error = exc.errors(include_url=False)[0]
    message = error["msg"].removeprefix("Value error, ")
    if not error["loc"]:
        return message
    name = str(error["loc"][0])
    if error["type"] == "extra_forbidden":
        return f"unknown setting: {name}"
    # A secret of the wrong type is a secret, too.
    value = "**********" if name in SECRETS else repr(error["input"])
    return f"{name} = {value[:80]}: {message[0].lower()}{message[1:]}"
