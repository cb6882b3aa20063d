"""Loading a checkpoint folder into an executor, with the checks that let it be served."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from kvcache.storage import TARGET_PLANES
from model.attach import ATTENTION_NAME, register
from model.checks_cache import ChecksCache, digest
from model.environment import environment
from model.errors import ModelError
from model.exactness import ExactnessReport
from model.gate import (
    QUANTIZED_TOLERANCE,
    TOLERANCE,
    check_behaviour,
    check_config,
    context_length,
    packed_logits,
    relative_difference,
    short_sequences,
)
from model.generic import GenericExecutor
from model.int8 import Quantize
from model.interface import Executor, ModelInfo, TiledExecutor
from model.kernels.build import INSTRUCTION_SET
from model.kernels.load import KernelsChoice, chosen_kernels, get_kernels, kernels_identity
from model.model_cache import default_home
from model.probe import probe_exactness
from model.quiet import quiet_transformers, reason_of
from model.structure import examine
from model.tokenizer import Tokenizer, text_hash
from model.weights import read_state, weight_files

_log = logging.getLogger(__name__)

DTypeName = Literal["bfloat16", "float32", "auto"]
ExecutorName = Literal["auto", "fused", "generic"]
_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# Numbers that a config of any architecture may hold, and that no model can have fewer than one of.
_COUNTS = (
    "vocab_size",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "n_embd",
    "n_head",
    "n_layer",
)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that may be served. ``executor`` needs a storage of the caller's (``bind``) before its first forward."""

    executor: Executor
    info: ModelInfo
    exactness: ExactnessReport
    fingerprint: str  # of all that ids depend on: weights, dtype, code, kernels, machine, threads, stop ids, tokenizer
    tokenizer_or_none: Tokenizer | None
    kernels: KernelsChoice = "auto"  # that it was loaded with; its sampler takes the same

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises ModelError for a checkpoint without one."""
        if self.tokenizer_or_none is None:
            raise ModelError(f"{self.info.name} has no tokenizer, so text cannot be turned into token ids")
        return self.tokenizer_or_none


def load_model(
    path: Path,
    *,
    dtype: DTypeName = "auto",
    device: str = "cpu",
    executor: ExecutorName = "auto",
    kernels: KernelsChoice | None = None,
    num_threads: int | None = None,
    max_batched_tokens: int = 512,
    name: str | None = None,
    home: Path | None = None,
    plane_prefix: str = TARGET_PLANES,
    quantize: Quantize = "none",
) -> LoadedModel:
    """Load the checkpoint folder ``path`` (safetensors, config.json, tokenizer files), check it and measure it.

    ``dtype`` "auto" is the checkpoint's own if that is bfloat16, else float32. ``executor`` "auto" is the fused one
    where it supports the model and agrees with the generic one. ``kernels`` "torch" leaves the compiled kernels alone,
    as on a machine that cannot build or run them; its sampler must do the same (``LoadedModel.kernels``);
    None leaves it to the environment variable TRUEDRAFT_KERNELS. ``num_threads`` sets the process's torch threads.
    ``max_batched_tokens`` is the largest batch that the exactness probe covers. Results of the checks are kept under
    ``home`` (default: TRUEDRAFT_HOME). ``plane_prefix`` begins the names of its KV planes. ``quantize`` "int8" makes
    the weights of all products int8 (model.int8): another model, with a fingerprint of its own. Raises ModelError, one
    line, for whatever cannot be served.
    """
    if executor not in ("auto", "fused", "generic"):
        raise ModelError(f"executor must be auto, fused or generic, got {executor!r}")
    if kernels not in (None, "auto", "torch"):
        raise ModelError(f"kernels must be auto or torch, got {kernels!r}")
    if quantize not in ("none", "int8"):
        raise ModelError(f"quantize must be none or int8, got {quantize!r}")
    _check_device(device)
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    with quiet_transformers():
        loading = _Loading(
            path,
            dtype,
            device,
            chosen_kernels(kernels),
            max_batched_tokens,
            name or path.name,
            home or default_home(),
            plane_prefix,
            quantize,
        )
        return loading.run(executor)


class _Loading:
    """One call of :func:`load_model`."""

    def __init__(
        self,
        path: Path,
        dtype: str,
        device: str,
        kernels: KernelsChoice,
        budget: int,
        name: str,
        home: Path,
        plane_prefix: str,
        quantize: Quantize,
    ) -> None:
        register()
        self.path, self.device, self.kernels, self.budget, self.name = path, device, kernels, budget, name
        self.plane_prefix, self.quantize = plane_prefix, quantize
        self.cache = ChecksCache(home / "checks")
        self.config = _read_config(path)
        check_config(self.config)
        self.dtype = _choose_dtype(dtype, self.config)
        self.files = weight_files(path)
        self.weights_hash = self.cache.weights_hash(self.files)
        self.tokenizer = Tokenizer.from_folder(path)
        self.depends_on = {
            **environment(device),
            "weights": self.weights_hash,
            "config": digest((path / "config.json").read_text()),
            "dtype": self.dtype,
            "quantize": quantize,
        }

    def run(self, wanted: str) -> LoadedModel:
        executor: Executor | None = None
        if wanted == "generic" and self.quantize != "none":
            raise self._unquantizable("executor is generic")
        if wanted in ("auto", "fused"):
            executor = self._fused(required=wanted == "fused")
        if executor is None:
            executor = self._generic()
        computed_by = _identity(executor)
        text = None if self.tokenizer is None else text_hash(self.path)
        fingerprint = digest([self.depends_on, computed_by, executor.info.eos_token_ids, text])
        key = digest(["exactness", self.depends_on, computed_by, self.budget])
        report = self.cache.report(key)
        if report is None:
            report = probe_exactness(executor, budget=self.budget)
            self.cache.put_report(key, report)
        elif isinstance(executor, TiledExecutor):
            executor.tile_classes = report.tile_classes
        quantized = "" if self.quantize == "none" else f", {self.quantize} weights"
        _log.info("%s: %s%s, %s", self.name, executor.kind, quantized, report.line)
        return LoadedModel(executor, executor.info, report, fingerprint, self.tokenizer, self.kernels)

    def _fused(self, *, required: bool) -> Executor | None:
        """The fused executor if it supports the model and agrees with the generic one; else None, or ModelError."""
        from model.fused import FusedExecutor, unsupported_reason

        try:
            unsupported = unsupported_reason(self.config)
        except Exception as error:  # whatever transformers' own modules raise about the config's fields
            raise ModelError(f"{self.path}/config.json cannot be used: {reason_of(error)}") from error
        if unsupported is not None:
            if required:
                raise ModelError(f"model type {self.config.model_type!r} is not supported by the fused executor")
            if self.quantize != "none":
                raise self._unquantizable(f"that does not take it: {unsupported}")
            return None
        state = {key: value.to(_DTYPES[self.dtype]) for key, value in read_state(self.files).items()}
        embeddings = state.get("model.embed_tokens.weight")
        if embeddings is None:
            raise ModelError(f"{self.path} holds no model.embed_tokens.weight")
        head = state.get("lm_head.weight", embeddings)
        info = self._info(int(head.shape[0]), int(embeddings.shape[0]))

        def build(quantize: Quantize) -> Executor:
            try:
                return FusedExecutor.from_hf(
                    state,
                    self.config,
                    info=info,
                    device=self.device,
                    kernels=self.kernels,
                    plane_prefix=self.plane_prefix,
                    quantize=quantize,
                )
            except ModelError as error:
                raise ModelError(f"{self.path} cannot be loaded: {error}") from error

        fused = build(self.quantize)
        if self.quantize == "none":
            state.clear()  # what is left of it is the executor's
        del embeddings, head
        reason = self._disagreement(fused, lambda: build("none"))
        if reason is None:
            return fused
        if required:
            raise ModelError(reason)
        if self.quantize != "none":
            raise self._unquantizable(reason)
        _log.warning("%s: %s; the generic executor serves it", self.name, reason)
        return None

    def _unquantizable(self, reason: str) -> ModelError:
        return ModelError(
            f"{self.name} cannot be served with quantize {self.quantize}, which only the fused executor can: {reason}"
        )

    def _disagreement(self, fused: Executor, plain: Callable[[], Executor]) -> str | None:
        """How far the fused executor is from the generic one, if that is too far. With quantised weights the same
        executor in its own precision, ``plain``, is held to the tolerance, and the quantised one to a wider one."""
        key = digest(["fused against generic", self.depends_on, _identity(fused)])
        found = self.cache.get(key)
        if not (isinstance(found, list) and all(isinstance(difference, float) for difference in found)):
            sequences = short_sequences(fused, fused.info.max_model_len)
            # Without the kernels, so that a fault in them cannot hide on both sides.
            expected = packed_logits(self._generic(with_kernels=False), sequences)
            found = [self._difference(fused if self.quantize == "none" else plain(), sequences, expected, self.dtype)]
            if self.quantize != "none":
                found.append(self._difference(fused, sequences, expected, "bfloat16"))
            self.cache.put(key, found)
        for difference, allowed in zip(found, (TOLERANCE[self.dtype], QUANTIZED_TOLERANCE), strict=False):
            if not difference <= allowed:
                return (
                    f"the fused executor ({fused.kind}) differs from the generic one by {difference:.2g} of the "
                    f"logits' norm ({allowed:.2g} allowed)"
                )
        return None

    def _difference(self, executor: Executor, sequences: list[list[int]], expected: list[Tensor], rule: str) -> float:
        got = packed_logits(executor, sequences)
        return max(relative_difference(a, b, rule) for a, b in zip(got, expected, strict=True))

    def _generic(self, *, with_kernels: bool = True) -> GenericExecutor:
        model = self._hf_model()
        try:
            structure = examine(model, self.plane_prefix)
        except ModelError:
            raise
        except Exception as error:  # whatever the model's own forward raises
            raise ModelError(f"{self.path}: the model's own forward fails: {reason_of(error)}") from error
        info = self._info(structure.vocab_size, int(model.get_input_embeddings().weight.shape[0]))
        on_cpu = torch.device(self.device).type == "cpu"
        kernels = get_kernels(choice=self.kernels) if with_kernels and on_cpu and self.dtype == "bfloat16" else None
        executor = GenericExecutor(model, structure, info, kernels=kernels)
        key = digest(["gate", self.depends_on, _identity(executor)])
        if self.cache.get(key) is not True:
            check_behaviour(executor)
            self.cache.put(key, True)
        return executor

    def _hf_model(self) -> Any:
        try:
            model, loading = AutoModelForCausalLM.from_pretrained(
                self.path,
                dtype=_DTYPES[self.dtype],
                attn_implementation=ATTENTION_NAME,
                use_safetensors=True,
                trust_remote_code=False,
                local_files_only=True,
                ignore_mismatched_sizes=True,  # they are refused below, by name
                output_loading_info=True,
            )
        except ModelError:
            raise
        except Exception as error:  # whatever a model's own code raises about its config or weights
            raise ModelError(f"{self.path} cannot be loaded: {reason_of(error)}") from error
        mismatched = sorted(loading["mismatched_keys"])
        if mismatched:
            name, stored, expected = mismatched[0]
            others = f" (and {len(mismatched) - 1} more such weights)" if len(mismatched) > 1 else ""
            raise ModelError(
                f"{self.path} cannot be loaded: {name} has shape {tuple(stored)}, "
                f"the config says {tuple(expected)}{others}"
            )
        absent = sorted(loading["missing_keys"])
        if absent:
            raise ModelError(f"{self.path} lacks {len(absent)} weights of the model: {', '.join(absent[:3])}")
        unused = sorted(loading["unexpected_keys"])
        if unused:
            _log.warning("%s: the model has no use for %d stored weights: %s", self.name, len(unused), unused[0])
        return model.to(self.device)

    def _info(self, vocab_size: int, embedding_rows: int) -> ModelInfo:
        text = self.config.get_text_config()
        architectures = getattr(self.config, "architectures", None) or [type(self.config).__name__]
        return ModelInfo(
            name=self.name,
            architecture=str(architectures[0]),
            model_type=str(self.config.model_type),
            dtype=self.dtype,
            device=self.device,
            num_layers=int(text.num_hidden_layers),
            hidden_size=int(text.hidden_size),
            vocab_size=vocab_size,
            embedding_rows=embedding_rows,
            max_model_len=context_length(self.config),
            eos_token_ids=_stop_ids(self.path, self.config, self.tokenizer),
            weights_hash=self.weights_hash,
            quantization=self.quantize,
        )


def _identity(executor: Executor) -> list[str]:
    """Which code computes: of compiled kernels, which object."""
    return [executor.kind, kernels_identity() if INSTRUCTION_SET in executor.kind else ""]


def _read_config(path: Path) -> Any:
    file = path / "config.json"
    if not file.is_file():
        raise ModelError(f"{path} holds no config.json")
    try:
        _check_counts(json.loads(file.read_text("utf-8")))
        return AutoConfig.from_pretrained(path, trust_remote_code=False, local_files_only=True)
    except Exception as error:  # whatever a config's own code raises about its fields
        raise ModelError(f"{file} cannot be used: {reason_of(error)}") from error


def _check_counts(config: object) -> None:
    """Raise ModelError for a field that code of transformers would divide by, or that leaves nothing of the model."""
    parts = config.values() if isinstance(config, dict) else ()
    for part in (config, *parts):  # the text model of a larger one has a config inside the config
        for name in _COUNTS if isinstance(part, dict) else ():
            value = part.get(name)
            if isinstance(value, int) and value < 1:
                raise ModelError(f"{name} is {value}, but must be at least 1")


def _choose_dtype(wanted: str, config: Any) -> str:
    if wanted == "auto":
        stored = getattr(config.get_text_config(), "dtype", None) or getattr(config, "dtype", None)
        return "bfloat16" if stored in (torch.bfloat16, "bfloat16") else "float32"
    if wanted not in _DTYPES:
        raise ModelError(f"dtype must be auto, {' or '.join(_DTYPES)}, got {wanted!r}")
    return wanted


def _stop_ids(path: Path, config: Any, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Stop ids of generation_config.json (of config.json, if there is none) and the tokenizer, without duplicates."""
    generation = config
    if (path / "generation_config.json").is_file():
        try:
            generation = GenerationConfig.from_pretrained(path, local_files_only=True)
        except Exception as error:  # whatever its validation raises
            raise ModelError(f"{path}/generation_config.json cannot be used: {reason_of(error)}") from error
    listed = getattr(generation, "eos_token_id", None)
    ids = [] if listed is None else list(listed) if isinstance(listed, list | tuple) else [listed]
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        ids.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(int(i) for i in ids))


def _check_device(device: str) -> None:
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise ModelError(f"unknown device {device!r}") from error
    if kind not in ("cpu", "cuda"):
        raise ModelError(f"device must be cpu or cuda, got {device!r}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"device {device!r} is not available: torch {torch.__version__} finds no CUDA device")
