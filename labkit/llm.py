"""The public face: text in, text out, one step at a time if you like. Refuses to know how any of it is done.

from labkit import LLM, EngineConfig, SamplingParams

with LLM("smollm2-135m-instruct") as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=5))[0].text)
"""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any

from labkit.config import CUDAGraphMode, EngineConfig, ModelConfig, SamplingParams
from labkit.engine.report import CaptureRecord, GraphMemory, ReconfigureReport, RequestOutput, StepReport, Usage
from labkit.errors import BackendError, ConfigError, LabkitError, RequestError

if TYPE_CHECKING:
    import torch

    from labkit.attention.interface import Availability, Platform
    from labkit.attention.selector import Selection
    from labkit.engine.compiled import CompileReport
    from labkit.engine.engine import Engine
    from labkit.measure.launches import LaunchCount

__all__ = ["LLM", "EngineConfig", "SamplingParams"]

Prompt = str | Sequence[int]
_RELOADS = ("model", "dtype", "device", "seed")
#: Asked for the backend where neither a keyword nor the config says one.
BACKEND_VARIABLE = "LABKIT_ATTENTION_BACKEND"
#: Set to anything, it makes engines check before every replay where the graph's inputs lie.
DEBUG_VARIABLE = "LABKIT_DEBUG"


class LLM:
    """An engine with a model in it.

    Args:
        model: "smollm2-135m-instruct" (real weights), a shape such as "qwen3-0.6b" (random weights of that shape), or a
            local Hugging Face folder of the Llama or Qwen3 family. None takes `config.model`.
        config: settings; None takes the defaults.
        progress: called as `progress(stage, done, total, detail)` while weights load and graphs are captured.
        changes: fields of `EngineConfig` to change, as in `LLM(attention_backend="TRITON_ATTN")`.

    With LABKIT_DEBUG=1 in the environment every replay first checks that what the graph reads (inputs, KV cache,
    weights) lies where it lay at capture, and raises CaptureError where it does not.

    The attention backend is what the first of these says: the keyword, the config's field, the environment variable
    LABKIT_ATTENTION_BACKEND as it is when the LLM is made, the automatic order. "auto" says "the automatic order".

    Raises:
        ConfigError, BackendError, LoadError: what was asked cannot work; the sentence says what would.
    """

    def __init__(
        self,
        model: str | None = None,
        config: EngineConfig | None = None,
        *,
        progress: Callable[[str, int, int, str], None] | None = None,
        **changes: Any,
    ) -> None:
        config = (config or EngineConfig()).replace(**changes)
        self._asked = config.replace(model=model) if model is not None else config
        self._variable = os.environ.get(BACKEND_VARIABLE, "")
        self._debug = bool(os.environ.get(DEBUG_VARIABLE))
        self._progress = progress
        self._ids = itertools.count()
        self._engine: Engine | None = None
        self._engine = self._build(self._asked)

    def _build(self, config: EngineConfig) -> Engine:
        from labkit.engine.engine import Engine
        from labkit.engine.plan import resolve_dtype
        from labkit.models.loader import load_model

        asked, config = config, self._with_environment(config)
        device, platform = find_device(config.device)
        available = find_backends(platform, config.attention_backend)
        dtype, _ = resolve_dtype(config.dtype, platform)
        if self._progress:
            self._progress("loading", 0, 1, config.model)
        loaded = load_model(config.model, dtype=dtype, device=device, seed=config.seed)
        if self._progress:
            self._progress("loading", 1, 1, config.model)
        with self._naming_the_variable(asked):
            return Engine(loaded, config, platform, device, available, self._progress, self._debug)

    def _with_environment(self, config: EngineConfig) -> EngineConfig:
        """`config` with the environment's backend where it says none itself."""
        if config.attention_backend is not None:
            return config
        return config.replace(attention_backend=environment_backend(self._variable))

    @contextlib.contextmanager
    def _naming_the_variable(self, asked: EngineConfig) -> Iterator[None]:
        """A backend that the environment asks for and that cannot serve: the sentence says where it was asked for."""
        try:
            yield
        except BackendError as error:
            what = f"attention_backend={self._variable.strip().upper()!r}"
            if asked.attention_backend is None and error.what == what:
                raise BackendError(f"{BACKEND_VARIABLE}={self._variable!r}", error.why, error.try_) from None
            raise

    # --- what was built --------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine itself, for those who want to look inside."""
        if self._engine is None:
            raise LabkitError("a call on a closed LLM", "close() gave its memory back", "Make a new LLM.")
        return self._engine

    @property
    def config(self) -> EngineConfig:
        """The settings in force, every "auto" replaced."""
        return self.engine.plan.config

    @property
    def model_config(self) -> ModelConfig:
        return self.engine.model.config

    @property
    def tokenizer(self) -> Any:
        return self.engine.model.tokenizer

    @property
    def weights(self) -> str:
        """ "real" or "random". Random weights time like real ones; their text is noise."""
        return self.engine.model.weights

    @property
    def device(self) -> torch.device:
        return self.engine.device

    @property
    def selection(self) -> Selection:
        """The attention backend picked, and every candidate with its reasons."""
        return self.engine.plan.selection

    @property
    def cudagraph_mode(self) -> CUDAGraphMode:
        """The resolved mode."""
        return self.engine.plan.mode

    @property
    def mode_trail(self) -> list[str]:
        """Every decision between the mode asked for and the mode in force."""
        return list(self.engine.plan.mode_trail)

    @property
    def capture_sizes(self) -> list[int]:
        return list(self.engine.plan.capture_sizes)

    @property
    def compile_report(self) -> CompileReport | None:
        """How the code that runs now was compiled: pieces, kernels before and after fusion, times; None without."""
        return self.engine.compile_report

    @property
    def capture_records(self) -> list[CaptureRecord]:
        """One record per captured graph, largest first."""
        return self.engine.capture_records

    @property
    def emulated_graphs(self) -> bool:
        """True where there is no CUDA: a "graph" then keeps the discipline of one and saves nothing."""
        return self.engine.runner.capturer.emulated

    @property
    def notes(self) -> list[str]:
        """Sentences that a reader should see once, such as a mode that had to be lowered."""
        return list(self.engine.notes)

    @property
    def graph_memory(self) -> GraphMemory:
        """MiB of graphs: estimated before the KV cache was sized, and taken."""
        return self.engine.graph_memory

    @property
    def memory(self) -> dict[str, int]:
        return self.engine.memory()

    # --- generating ------------------------------------------------------------------------------------------------

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        chat: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts, batched together; outputs come in the order of the prompts.

        Args:
            prompts: one text, one list of token ids, or a list of either.
            sampling_params: one for all, or one per prompt; None is greedy with 16 tokens.
            chat: put each text into the model's chat template as the user's message.

        A prompt that cannot be served comes back with finish_reason "error" and a sentence, the others complete; when
        no prompt can be served the first RequestError is raised.
        """
        batch: list[Any] = [prompts] if _is_single(prompts) else list(prompts)  # type: ignore[arg-type]
        params = self._params(sampling_params, len(batch))
        done: dict[str, RequestOutput] = {}
        order, errors = [], []
        for prompt, param in zip(batch, params, strict=True):
            request_id = self._next_id()
            order.append(request_id)
            try:
                over = self._add(prompt, param, request_id, chat)
            except RequestError as error:
                errors.append(error)
                over = RequestOutput(request_id, (), (), "", "", "error", Usage(0, 0), error=str(error))
            if over:
                done[request_id] = over
        if batch and len(errors) == len(batch):
            raise errors[0]
        try:
            while any(i not in done for i in order):
                for output in self.step().outputs:
                    if output.finished:
                        done[output.request_id] = output
        except BaseException:  # an interrupted cell must not leave requests that nobody waits for
            for request_id in order:
                self.engine.abort(request_id)
            raise
        return [done[i] for i in order]

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, chat: bool = False
    ) -> Iterator[RequestOutput]:
        """Complete one prompt and yield after every token; joining `delta` gives the whole text.

        Leaving the loop early aborts the request. Other live requests are stepped along.
        """
        request_id = self._next_id()
        over = self._add(prompt, sampling_params or SamplingParams(), request_id, chat)
        if over:
            yield over
            return
        finished = False
        try:
            while not finished:
                for output in self.step().outputs:
                    if output.request_id == request_id:
                        finished = output.finished
                        yield output
        finally:
            if not finished and self._engine is not None:
                self._engine.abort(request_id)

    def add_request(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        chat: bool = False,
    ) -> str:
        """Queue a prompt for `step()`.

        Raises:
            RequestError: it can never be served, or its id is in use; nothing else is touched.
        """
        request_id = request_id if request_id is not None else self._next_id()
        self._add(prompt, sampling_params or SamplingParams(), request_id, chat)
        return request_id

    def abort_request(self, request_id: str) -> RequestOutput | None:
        """End a request now and return what it has; None when no live request has that id."""
        return self.engine.abort(request_id)

    @property
    def has_unfinished(self) -> bool:
        return self.engine.has_unfinished

    def step(self) -> StepReport:
        """Run one step. With nothing to do the report has size 0."""
        return self.engine.step()

    def prime(self, batch: int, context: int, max_tokens: int = 64, *, fill: bool = True) -> list[str]:
        """Queue `batch` requests whose K/V holds `context` seeded finite tokens, to measure at that length at once.

        The next step decodes one token of each. They ignore end-of-sequence ids and never enter the prefix cache.
        `fill=False` takes the cache as it is: for many measurements after one `fill_kv`, which costs less than filling
        the part of each.
        """
        longest = self.engine.plan.max_model_len
        room = longest - context - 1
        if context < 1 or batch < 1 or room < 1:
            raise RequestError(
                f"prime(batch={batch}, context={context})",
                f"both must be at least 1, and a context leaves room below max_model_len={longest}",
                "Lower context or raise max_model_len.",
            )
        # The scheduler repeats the last token as the first output, which counts.
        params = SamplingParams(max_tokens=min(max_tokens, room) + 1, ignore_eos=True)
        ids = []
        try:
            for i in range(batch):
                request_id = f"primed-{self._next_id()}"
                self.engine.prime(request_id, context, params, seed=i, fill=fill)
                ids.append(request_id)
        except RequestError:
            for request_id in ids:
                self.engine.abort(request_id)
            raise
        return ids

    def fill_kv(self, seed: int = 0) -> None:
        """Fill the whole KV cache with seeded finite values, for `prime(…, fill=False)`. Live requests lose theirs."""
        self.reset()
        self.engine.fill_kv(seed)

    def drop_graphs(self) -> None:
        """Give back the memory of every captured graph; the next `reconfigure` captures what its settings need."""
        self.engine.runner.drop_graphs()

    def count_launches(self, batch: int, context: int) -> LaunchCount:
        """What the host starts for one decode step of `batch` primed requests, counted from a trace.

        From then on `StepReport.launches` has the number for steps of that (mode, size). On a CPU nothing is launched:
        `launches` is None and `reason` says so. Live requests are aborted.
        """
        from labkit.measure.launches import count

        self.reset()
        self.prime(batch, context, max_tokens=4)
        report = self.step()
        found = count(self.step)
        self.reset()
        if found.launches is not None:
            self.engine.note_launches(report.mode, report.size, found.launches)
        return found

    def reset(self) -> list[RequestOutput]:
        """Abort every live request and empty the prefix cache."""
        return self.engine.reset()

    def reconfigure(self, **changes: Any) -> ReconfigureReport:
        """Change settings; keep weights, tokenizer and every capture that is still valid; say what was rebuilt.

        Raises:
            ConfigError, BackendError, LoadError: the engine goes on with its old settings.
        """
        asked = self._asked.replace(**changes)
        if any(getattr(asked, field) != getattr(self._asked, field) for field in _RELOADS):
            report = self._reload(asked)
        else:
            backend = self._with_environment(asked).attention_backend
            if backend:
                self.engine.available = find_backends(self.engine.platform, backend)
            with self._naming_the_variable(asked):
                report = self.engine.reconfigure(**{**changes, "attention_backend": backend})
        self._asked = asked
        return report

    def _reload(self, asked: EngineConfig) -> ReconfigureReport:
        import time

        if self.engine.has_unfinished:
            raise ConfigError(
                "reconfigure with another model",
                "requests are still running on this one",
                "Finish or abort them first.",
            )
        begin, before = time.perf_counter(), self.config.as_dict()
        fresh = self._build(asked)  # the old engine stays whole until the new one stands
        self.engine.close()
        self._engine = fresh
        after = self.config.as_dict()
        changed = {k: (before[k], after[k]) for k in after if before[k] != after[k]}
        return ReconfigureReport(changed, {"model": (time.perf_counter() - begin) * 1e3}, (), tuple(fresh.notes))

    def close(self) -> None:
        """Give all memory back; safe to call twice."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _next_id(self) -> str:
        return str(next(self._ids))

    @staticmethod
    def _params(given: SamplingParams | Sequence[SamplingParams] | None, n: int) -> list[SamplingParams]:
        if given is None or isinstance(given, SamplingParams):
            return [given or SamplingParams()] * n
        if len(given) != n:
            raise RequestError(
                f"{len(given)} sampling parameters for {n} prompts",
                "the numbers differ",
                "Give one, or one per prompt.",
            )
        return list(given)

    def _add(self, prompt: Prompt, params: SamplingParams, request_id: str, chat: bool) -> RequestOutput | None:
        return self.engine.add(request_id, self._token_ids(prompt, chat), params)

    def _token_ids(self, prompt: Prompt, chat: bool) -> list[int]:
        if isinstance(prompt, str):
            if not chat:
                return self.tokenizer.encode(prompt)
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            return self.tokenizer.encode(text, add_special_tokens=False)  # the template has written them
        ids = list(prompt)
        for token in ids:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < self.model_config.vocab_size:
                raise RequestError(
                    f"a prompt with the token id {token!r}",
                    f"ids of this model are whole numbers from 0 to {self.model_config.vocab_size - 1}",
                    "Encode text with llm.tokenizer.encode(text).",
                )
        return ids


def _is_single(prompts: Any) -> bool:
    if isinstance(prompts, str):
        return True
    items = list(prompts)
    return bool(items) and all(isinstance(x, int) for x in items)


def find_device(asked: str = "auto") -> tuple[torch.device, Platform]:
    """The torch device and the platform that selection sees."""
    import torch

    from labkit.attention.interface import Platform

    name = asked if asked != "auto" else ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"device={asked!r}", "torch knows no such device", "Take 'auto', 'cpu' or 'cuda'.") from None
    if device.type == "cpu":
        return device, Platform("cpu")
    if device.type != "cuda":  # a ROCm build of torch calls its devices so, too
        raise ConfigError(f"device={asked!r}", "labkit runs on CUDA and on the CPU", "Take 'auto', 'cpu' or 'cuda'.")
    if not torch.cuda.is_available():
        raise ConfigError(
            f"device={asked!r}", "torch sees no CUDA GPU here", "Take 'cpu'; `labkit doctor` says what is missing."
        )
    device = torch.device("cuda", device.index if device.index is not None else torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    if torch.version.hip is not None:
        return device, Platform("rocm", None, name)
    return device, Platform("cuda", torch.cuda.get_device_capability(device), name)


def environment_backend(word: str | None = None) -> str | None:
    """The backend that LABKIT_ATTENTION_BACKEND asks for, "auto", or None where it is unset or empty.

    Args:
        word: what the variable held; None reads it now.

    Raises:
        ConfigError: there is no backend of that name.
    """
    word = (os.environ.get(BACKEND_VARIABLE, "") if word is None else word).strip()
    if not word:
        return None
    try:
        return EngineConfig(attention_backend=word).attention_backend
    except ConfigError as error:
        raise ConfigError(f"{BACKEND_VARIABLE}={word!r} (environment variable)", error.why, error.try_) from None


def find_backends(platform: Platform, requested: str | None = None) -> Mapping[str, Availability]:
    """Which backends load in this process. A Triton backend asked for on a CPU switches its interpreter on first."""
    from labkit.attention import registry

    # Triton reads it when it is first imported; set later, it would be believed and not be true.
    if requested in ("TRITON_ATTN", "TRITON_MLA") and platform.device_type == "cpu" and "triton" not in sys.modules:
        os.environ.setdefault("TRITON_INTERPRET", "1")
    return registry.Installed()
