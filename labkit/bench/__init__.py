"""Benchmarks on the real engine: a step, an attention kernel, a recording. Refuses to print and to parse arguments.

`steps` measures `LLM.step()`, `forms` the same step compiled, in graphs and both, `attention` one backend's kernels
alone, `imports` the import of the package; `suites` says what the package ships, `recorder` measures it.
Nothing here imports torch before something is measured.
"""

from labkit.bench.attention import AttentionOptions, AttentionShape, bench_attention, bench_attentions
from labkit.bench.comparison import Budget, Comparison, budget, compare, comparisons
from labkit.bench.forms import COMPILE_TABLE, Form, FormResult, bench_forms, mode_forms
from labkit.bench.imports import ImportRow, bench_import
from labkit.bench.recorder import missing, record, record_attention
from labkit.bench.steps import (
    DoesNotFit,
    Yardsticks,
    bench,
    bench_modes,
    bench_step,
    make_row,
    measure_steps,
    measure_yardsticks,
)
from labkit.bench.suites import COURSE_SUITES, SUITES, FormSuite, Suite

__all__ = [
    "COMPILE_TABLE", "COURSE_SUITES", "SUITES", "AttentionOptions", "AttentionShape", "Budget", "Comparison",
    "DoesNotFit", "Form", "FormResult", "FormSuite", "ImportRow", "Suite", "Yardsticks", "bench", "bench_attention",
    "bench_attentions", "bench_forms", "bench_import", "bench_modes", "bench_step", "budget", "compare",
    "comparisons", "make_row", "measure_steps", "measure_yardsticks", "missing", "mode_forms", "record",
    "record_attention",
]  # fmt: skip
