"""Benchmarks on the real engine: a step, an attention kernel, a recording. Refuses to print and to parse arguments.

`steps` measures `LLM.step()`, `attention` one backend's kernels alone, `imports` the import of the
package; `suites` records what the package ships.
Nothing here imports torch before something is measured.
"""

from labkit.bench.attention import AttentionOptions, AttentionShape, bench_attention, bench_attentions
from labkit.bench.imports import ImportRow, bench_import
from labkit.bench.steps import (
    Comparison,
    Yardsticks,
    bench,
    bench_modes,
    bench_step,
    compare,
    comparisons,
    make_row,
    measure_steps,
    measure_yardsticks,
)
from labkit.bench.suites import SUITES, Suite, record, record_attention

__all__ = [
    "SUITES", "AttentionOptions", "AttentionShape", "Comparison", "ImportRow", "Suite", "Yardsticks", "bench",
    "bench_attention", "bench_attentions", "bench_import", "bench_modes", "bench_step", "compare", "comparisons",
    "make_row", "measure_steps", "measure_yardsticks", "record", "record_attention",
]  # fmt: skip
