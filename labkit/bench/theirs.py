"""transformers as the other engine: its model over labkit's tensors, and its ways of generating. Refuses to measure.

Every way is a `run(prompts, num_tokens)` that returns greedy tokens and the time at which each was on the host. Nothing
here imports transformers before a model is asked for.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import logging
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from labkit.config import ModelConfig
from labkit.errors import ConfigError, LabkitError

if TYPE_CHECKING:
    import torch

    from labkit.models.decoder import Decoder

#: Tokens of a page in transformers' continuous batching, its own default.
PAGE = 256
#: Tokens of a step of its continuous batching at most.
BUDGET = 2048

Tokens = list[list[int]]
Stamps = list[list[float]]


def needs_transformers() -> None:
    try:
        import transformers  # noqa: F401
    except ImportError as error:
        raise LabkitError("compare", f"transformers does not load ({error})", "pip install 'labkit[engine]'") from None


def their_config(model: ModelConfig) -> Any:
    """The transformers config of a model's shape."""
    import transformers

    kind = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}.get(model.architecture)
    if kind is None:
        raise ConfigError(f"model={model.name!r}", f"{model.architecture} is not exported to transformers", "")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": model.rope_theta}
    if model.rope_scaling is not None:
        rope |= model.rope_scaling.parameters()
    heads = model.num_heads
    # LlamaConfig wants a hidden size that the heads divide, although its model does not need one: set afterwards.
    divisible = model.hidden_size if model.hidden_size % heads == 0 else heads * model.head_size
    config = kind(
        vocab_size=model.vocab_size, hidden_size=divisible, intermediate_size=model.intermediate_size,
        num_hidden_layers=model.num_layers, num_attention_heads=heads, num_key_value_heads=model.num_kv_heads,
        head_dim=model.head_size, max_position_embeddings=model.max_position_embeddings,
        rms_norm_eps=model.rms_norm_eps, rope_parameters=rope, tie_word_embeddings=model.tie_word_embeddings,
        attention_bias=model.attention_bias, bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    config.hidden_size = model.hidden_size
    return config


def to_transformers(decoder: Decoder) -> Any:
    """A transformers model over the very tensors of `decoder`; its parameters are views, nothing is copied."""
    import torch
    import transformers

    config = their_config(decoder.config)
    kind = {"llama": transformers.LlamaForCausalLM, "qwen3": transformers.Qwen3ForCausalLM}[decoder.config.architecture]
    with torch.device("meta"):
        model = kind(config)
    weights = {name: view.detach() for name, view in decoder.checkpoint_views().items()}
    missing, unexpected = model.load_state_dict(weights, strict=False, assign=True)
    tied = {"lm_head.weight"} if decoder.config.tie_word_embeddings else set()
    if set(missing) - tied or unexpected:
        raise LabkitError("weights for transformers", f"names differ: {missing} {unexpected}", "Report it.")
    if tied:
        model.lm_head.weight = model.model.embed_tokens.weight
    # Its frequencies are computed, not loaded, so that the ones made without memory are replaced.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(decoder.device)
    return model.requires_grad_(False).eval()


class Static:
    """`generate` with a static cache. Each token is taken when transformers hands it to a streamer, on the host."""

    def __init__(self, model: Any, compiled: bool) -> None:
        from transformers import CompileConfig, GenerationConfig

        self._model, self._attention = model, str(model.config._attn_implementation)
        self._compile: Any = None
        if compiled:
            on_gpu = model.device.type == "cuda"
            self._compile = CompileConfig(mode="reduce-overhead" if on_gpu else "default")
            # By itself transformers compiles on accelerators only.
            self._compile._compile_all_devices = True
        self._generation = GenerationConfig(
            do_sample=False, cache_implementation="static", disable_compile=not compiled, compile_config=self._compile,
            eos_token_id=None, pad_token_id=0,
        )  # fmt: skip

    def run(self, prompts: Tokens, num_tokens: int) -> tuple[Tokens, Stamps]:
        import torch

        ids = torch.tensor(prompts, device=self._model.device)
        stamps = _Stamps()
        with torch.inference_mode(self._compile is None), torch.no_grad():
            out = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=self._generation,
                max_new_tokens=num_tokens, streamer=stamps,
            )  # fmt: skip
        # The first call hands over the prompt.
        return out[:, ids.shape[1] :].tolist(), [stamps.times[1:] for _ in prompts]

    def settings(self) -> dict[str, str]:
        found = {"attention": self._attention, "cache": "static"}
        if self._compile is not None:
            found |= {f"compile {k}": str(v) for k, v in self._compile.to_dict().items() if not k.startswith("_")}
        return found

    def close(self) -> None:
        self._model = None


class _Stamps:
    """A streamer of transformers that keeps the time at which it was called."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


class Continuous:
    """transformers' continuous batching with the fastest attention that it loads here, and on a GPU with its graphs.

    Left alone it records no graphs without a FlashAttention package, since another attention needs a mask; and it sizes
    a step by the memory that is free, so that the mask of a decode is that of a hundred thousand tokens. Asked, it does
    better: steps are bounded as labkit's benchmark bounds them, and graphs are recorded.
    """

    def __init__(self, model: Any, batch: int, length: int) -> None:
        from transformers import ContinuousBatchingConfig, GenerationConfig

        self._model = model
        self._generation = GenerationConfig(do_sample=False, eos_token_id=-1, pad_token_id=0)
        pages = batch * (-(-length // PAGE) + 1)
        # transformers 5.17 calls it block_size; page_size is the later name.
        known = inspect.signature(ContinuousBatchingConfig).parameters
        page = {"page_size" if "page_size" in known else "block_size": PAGE}
        graphs = {"use_cuda_graph": True} if model.device.type == "cuda" else {}
        self._asked = ContinuousBatchingConfig(
            **page, num_blocks=max(pages, 16), allow_block_sharing=False, max_batch_tokens=max(BUDGET, batch), **graphs
        )
        self._found: dict[str, str] = {}

    def run(self, prompts: Tokens, num_tokens: int) -> tuple[Tokens, Stamps]:
        outputs = self._model.generate_batch(
            prompts, generation_config=self._generation, continuous_batching_config=self._asked,
            record_timestamps=True, persistent_manager=True, max_new_tokens=num_tokens,
        )  # fmt: skip
        self._remember()
        found = list(outputs.values())
        errors = [str(one.error) for one in found if one.error]
        if errors or len(found) != len(prompts):
            raise LabkitError("continuous batching", errors[0] if errors else "a request did not come back", "")
        return [list(one.generated_tokens) for one in found], [list(one.timestamps or ()) for one in found]

    def _remember(self) -> None:
        manager = getattr(self._model, "_cached_continuous_batching_manager", None)
        config = getattr(manager, "continuous_batching_config", self._asked)
        names = ("use_cuda_graph", "use_async_batching", "page_size", "block_size", "num_blocks", "max_batch_tokens",
                 "max_requests_per_batch", "max_blocks_per_request", "q_padding_interval_size",
                 "kv_padding_interval_size", "default_compile_level", "scheduler_type")  # fmt: skip
        self._found = {name: str(getattr(config, name)) for name in names if hasattr(config, name)}
        self._found = {"attention": str(self._model.config._attn_implementation), **self._found}

    def settings(self) -> dict[str, str]:
        return dict(self._found)

    def close(self) -> None:
        if self._model is not None:
            self._model.destroy_cached_continuous_batching_manager()
        self._model = None


@contextlib.contextmanager
def quieter() -> Iterator[None]:
    """transformers' warnings about what is asked for on purpose here are not shown."""
    names = ("ContinuousBatchingLogger", "transformers")
    before = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)


def in_fp32(model: Any) -> Any:
    """A copy of a transformers model in fp32."""
    return copy.deepcopy(model).float()
