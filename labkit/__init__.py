"""labkit: a small LLM engine made to be looked at. `from labkit import LLM, EngineConfig, SamplingParams`.

Importing it loads neither torch nor triton and changes nothing in your process.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from labkit.config import CUDAGraphMode, EngineConfig, SamplingParams

if TYPE_CHECKING:
    from labkit.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "CUDAGraphMode", "EngineConfig", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name == "LLM":
        from labkit.llm import LLM

        return LLM
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")
