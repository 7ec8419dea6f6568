"""A model from its name: real weights of a folder, or random ones of a shape. Refuses to know what runs it."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from labkit.config import ModelConfig
from labkit.errors import ConfigError, LoadError, did_you_mean
from labkit.models import fetch
from labkit.models.decoder import Decoder
from labkit.models.folder import load_config, read_tensors, shortened
from labkit.models.mla_config import is_mtp
from labkit.models.random_weights import fill_random
from labkit.models.shapes import DEFAULT_MODEL, SHAPES, model_names
from labkit.models.tokenizer import ByteTokenizer, FolderTokenizer, Tokenizer


@dataclasses.dataclass
class LoadedModel:
    """A decoder with its weights, and the tokenizer that belongs to it.

    weights: "real" or "random". source: where they are from, for people. dtype: "float32", "float16" or "bfloat16".
    `config` and `tokenizer` name the same EOS ids; random weights have none, or a benchmark would end by chance.
    """

    decoder: Decoder
    config: ModelConfig
    tokenizer: Tokenizer
    weights: str
    source: str
    dtype: str


def load_model(
    name: str,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    seed: int = 0,
    progress: Callable[[str], None] | None = None,
) -> LoadedModel:
    """Load `name`: the default model, a shape of `SHAPES` (random weights from `seed`), or the path of a folder.

    Args:
        dtype: "float32", "float16", "bfloat16"; "auto" is fp32 on a CPU, bf16 on a GPU that computes in it, else fp16.
        progress: told about fetching the default model when it is not in the cache yet; stderr when None.

    Raises:
        ConfigError: no model of that name. LoadError: a folder that cannot be loaded, see `load_config`.
    """
    dtype, device = resolve_dtype(dtype, device), torch.device(device)
    known = {option.casefold(): option for option in model_names()}
    name = known.get(name.casefold(), name)
    if name in SHAPES:
        return _load_random(SHAPES[name], dtype, device, seed)
    if name == DEFAULT_MODEL:
        folder = fetch.default_model_dir() or fetch.fetch_default_model(progress or _to_stderr)
        return load_folder(folder, dtype=dtype, device=device, name=DEFAULT_MODEL)
    folder = Path(name).expanduser()
    if folder.is_dir():
        return load_folder(folder, dtype=dtype, device=device)
    if any(sign in name for sign in "/\\~") or name.startswith("."):
        raise LoadError(
            f"model={name!r}", "there is no such folder, and nothing is downloaded from a hub", "Give a local folder."
        )
    raise ConfigError(f"model={name!r}", "there is no model or folder of that name", did_you_mean(name, model_names()))


def resolve_dtype(dtype: str, device: torch.device | str) -> str:
    """The dtype that "auto" means on a device; any other is returned as it is, ConfigError when it is unknown."""
    names = ("auto", "float32", "float16", "bfloat16")
    if dtype not in names:
        raise ConfigError(f"dtype={dtype!r}", "is not a known value", did_you_mean(str(dtype), names))
    if dtype != "auto":
        return dtype
    device = torch.device(device)
    if device.type != "cuda":
        return "float32"
    return "bfloat16" if torch.cuda.get_device_capability(device) >= (8, 0) else "float16"


def load_folder(
    folder: Path, *, dtype: str = "auto", device: torch.device | str = "cpu", name: str | None = None
) -> LoadedModel:
    """Load a Hugging Face folder. A folder without any tokenizer gets one token per byte and says so on stderr.

    Raises:
        LoadError: see `load_config`; weights missing, damaged, of another shape or not in safetensors.
    """
    dtype = resolve_dtype(dtype, device)
    config = load_config(folder, name)
    decoder = Decoder(config, dtype=getattr(torch, dtype), device=device)
    _load_weights(decoder, folder)
    tokenizer: Tokenizer
    if any((folder / file).exists() for file in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")):
        tokenizer = FolderTokenizer(folder, config.eos_token_ids, config.bos_token_id)
    else:
        _to_stderr(f"{folder} has no tokenizer: text is read as bytes, pass token ids to use the model")
        tokenizer = ByteTokenizer(config.vocab_size, config.eos_token_ids, config.bos_token_id)
    return LoadedModel(decoder, config, tokenizer, "real", str(folder), dtype)


def _load_random(shape: ModelConfig, dtype: str, device: torch.device, seed: int) -> LoadedModel:
    config = dataclasses.replace(shape, eos_token_ids=(), bos_token_id=None)
    decoder = Decoder(config, dtype=getattr(torch, dtype), device=device)
    fill_random(decoder, seed)
    folder = fetch.default_model_dir() if shape.name == "smollm2-135m" else None
    tokenizer: Tokenizer = FolderTokenizer(folder) if folder else ByteTokenizer(config.vocab_size)
    return LoadedModel(decoder, config, tokenizer, "random", f"random weights, seed {seed}", dtype)


def _to_stderr(line: str) -> None:
    print(f"labkit: {line}", file=sys.stderr, flush=True)


def _load_weights(decoder: Decoder, folder: Path) -> None:
    """Copy every tensor into its place, converting dtype and device on the way; all must be there, and nothing else."""
    views = decoder.checkpoint_views()
    missing, unknown, stacked = dict(views), [], decoder.stacked_views()
    for name, tensor in read_tensors(folder):
        if name in stacked:  # one tensor in place of many
            view, covered = stacked[name]
            views[name] = view
            if all(missing.pop(one, None) is not None for one in covered):
                missing[name] = view
        if name not in views:
            if not _is_derived(name, decoder.config):
                unknown.append(name)
            continue
        target = missing.pop(name, None)
        if target is None:
            raise LoadError(f"model folder {folder}", f"tensor {name} is there twice", "Copy the folder again.")
        if tensor.shape != target.shape:
            raise LoadError(
                f"model folder {folder}",
                f"tensor {name} is {list(tensor.shape)} and config.json makes it {list(target.shape)}",
                "config.json and weights are of different models.",
            )
        target.copy_(tensor)
    for names, why in ((missing, "tensors are missing"), (unknown, "tensors have no place in this architecture")):
        if names:
            counted = f"{len(names)} {why}: {shortened(list(names))}"
            raise LoadError(f"model folder {folder}", counted, "Copy the folder again.")


def _is_derived(name: str, config: ModelConfig) -> bool:
    """Tensors that some checkpoints carry although they follow: rotary frequencies, and the head of a tied model. Also
    those of a layer that only predicts further ahead.
    """
    if is_mtp(name, config.architecture, config.num_layers):
        return True
    return name.endswith("rotary_emb.inv_freq") or (name == "lm_head.weight" and config.tie_word_embeddings)
