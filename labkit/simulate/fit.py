"""A machine's constants out of recorded rows, and how far the model of a step is off on rows.
Refuses to know files and the engine: rows and shapes are handed in.

The defaults of `Machine` are `fit` of the 86 SmolLM2-135M rows of the recording `h200.json.gz` (two backends, NONE and
FULL, batch 1 to 256, context 512). With these, 160 of its 172 rows are simulated within 20 %: 80 of those 86, and 80 of
the 86 Qwen3-0.6B rows, which no constant was fitted to (medians: 2 % too short for each; 167 of device time alone).
The region where it holds is therefore: an H200, those two shapes, decode steps of TRITON_ATTN and TORCH_SDPA, NONE and
FULL, not compiled. Elsewhere it is a model that nobody has compared with a measurement.

All 12 others were recorded *longer* than simulated. In the 7 FULL ones (SmolLM2 batch 120, 144, 152, 200, 248, 256;
Qwen3 batch 248) the host phases around the forward took 1.6 to 1.9 times what the line through all rows says; with a
row's own host phases each is within 5 %. In the 5 NONE ones (Qwen3: TRITON_ATTN batch 1, 32, 128, TORCH_SDPA batch 1
and 64) launching took longer than at neighbouring batches, and one part is the model's own: five launches of matrix
products per layer were counted for Qwen3, and the list of kernels has four. No constant was bent to meet these rows.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from labkit.config import ModelConfig
from labkit.errors import LabkitError
from labkit.measure.recordings import Row
from labkit.simulate.step import H200, SDPA_COPIES, SDPA_KERNELS, DecodeModel, Machine, kernels_of, simulate_step

#: How far a simulated step may be from a recorded one.
TOLERANCE = 0.2
#: `max_model_len` of the recorded suites: what TORCH_SDPA gathers under a graph. Rows do not carry it.
RECORDED_MAX_LEN = 1024


def decode_rows(rows: Iterable[Row]) -> list[Row]:
    """The rows that the model speaks of: decodes of one token, not compiled, on a GPU, of a mode and backend it has."""
    return [
        row for row in rows
        if not row.chunk and row.query_len == 1 and row.compile == "NONE" and not row.emulated
        and row.mode in ("NONE", "PIECEWISE", "FULL") and row.backend in ("TRITON_ATTN", "TORCH_SDPA")
        and row.device_us is not None and row.size == row.batch
    ]  # fmt: skip


def model_of(row: Row, shape: ModelConfig, max_model_len: int = RECORDED_MAX_LEN) -> DecodeModel:
    """What a recorded row did, as the question to simulate."""
    longest = max(max_model_len, row.context)
    return DecodeModel(shape, row.batch, row.context, backend=row.backend, max_model_len=longest)


def fit(rows: Iterable[Row], shape: ModelConfig, start: Machine = H200) -> Machine:
    """The constants of the machine that `rows` of one model were recorded on, each a median or a slope of its own rows.

    copy_gb_s: from gb_s, p50_ms and floor_ms. launch_us: as recorded. launch_factor: launch phase of NONE over Σ
    launches × cost. host_*: the phases around the forward, a line over the batch. graph_node_us: launch phase of FULL,
    per node. kernel_us: device time of FULL that bytes and launch leave unexplained, per kernel. sync_us: time between
    the device's end and the ids. sdpa_*: the same for TORCH_SDPA's rows, `start`'s where there are none. tflops and sms
    are taken from `start`.

    Raises:
        LabkitError: there are no NONE or no FULL rows of TRITON_ATTN.
    """
    rows = [row for row in decode_rows(rows) if row.model == shape.name]
    triton = [row for row in rows if row.backend == "TRITON_ATTN"]
    eager, full = (_of_mode(triton, mode) for mode in ("NONE", "FULL"))
    if not eager or not full or not eager[0].launch_cost_us:
        raise LabkitError(
            f"constants from rows of {shape.name}",
            "there are no rows of TRITON_ATTN in NONE and FULL with launch costs",
            "Record the suite `slice` or `modes`.",
        )  # fmt: skip
    bandwidth = [row.gb_s * row.p50_ms / row.floor_ms for row in rows if row.gb_s and row.floor_ms]
    now = dataclasses.replace(start, copy_gb_s=_median(bandwidth), launch_us=dict(eager[0].launch_cost_us),
                              launch_factor=1.0, kernel_us=0.0)  # fmt: skip
    factor = _median(row.phases_us["launch"] / _launching(row, shape, now) for row in eager)
    now = dataclasses.replace(now, launch_factor=factor)
    around = [(row.batch, 1e3 * row.p50_ms - row.phases_us["launch"] - row.phases_us["sample"]) for row in triton]
    per_request = slope(around)
    fixed = _median(us - per_request * batch for batch, us in around)
    head = now.launch("gemm") + now.launch_us.get("graph", 0.0)
    node = _median((row.phases_us["launch"] - head) / _nodes(row, shape, now) for row in full)
    now = dataclasses.replace(now, host_fixed_us=fixed, host_request_us=per_request, graph_node_us=max(0.0, node))
    kernel = _median(
        ((row.device_us or 0) - _replay(row, shape, now) - _work_us(row, shape, now, outside=False))
        / _nodes(row, shape, now) for row in full
    )  # fmt: skip
    now = dataclasses.replace(now, kernel_us=max(0.0, kernel))
    sync = _median(
        row.phases_us["launch"] + row.phases_us["sample"] - (row.device_us or 0)
        - _work_us(row, shape, now, outside=True) for row in full
    )  # fmt: skip
    now = dataclasses.replace(now, sync_us=max(0.0, sync))
    return _fit_sdpa([row for row in rows if row.backend == "TORCH_SDPA"], shape, now)


def _fit_sdpa(rows: Sequence[Row], shape: ModelConfig, now: Machine) -> Machine:
    eager, full = (_of_mode(rows, mode) for mode in ("NONE", "FULL"))
    if not eager or len(full) < 2:
        return now
    none = dataclasses.replace(now, sdpa_layer_us=0.0)
    layer = _median((row.phases_us["launch"] - _launching(row, shape, none)) / shape.num_layers for row in eager)
    still = dataclasses.replace(now, sdpa_traffic=0.0)
    one = dataclasses.replace(now, sdpa_traffic=1.0)
    found = slope([(row.batch, (row.device_us or 0) - _work_us(row, shape, still, outside=False)) for row in full])
    per_unit = slope([
        (row.batch, _work_us(row, shape, one, outside=False) - _work_us(row, shape, still, outside=False))
        for row in full
    ])  # fmt: skip
    now = dataclasses.replace(now, sdpa_layer_us=max(0.0, layer), sdpa_traffic=max(0.0, found / per_unit))
    bare = dataclasses.replace(now, sdpa_kernel_us=0.0)
    parts = shape.num_layers * (SDPA_KERNELS + SDPA_COPIES)
    kernel = _median(
        ((row.device_us or 0) - _replay(row, shape, now) - _work_us(row, shape, bare, outside=False)) / parts
        for row in full
    )
    return dataclasses.replace(now, sdpa_kernel_us=max(0.0, kernel))


def _replay(row: Row, shape: ModelConfig, machine: Machine) -> float:
    """Host µs of the one replay of a FULL step."""
    return machine.launch_us.get("graph", 0.0) + machine.graph_node_us * _nodes(row, shape, machine)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points (Theil and Sen): a few bad rows do not move it."""
    found = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in itertools.combinations(points, 2) if x1 != x2]
    return statistics.median(found) if found else 0.0


def _of_mode(rows: Sequence[Row], mode: str) -> list[Row]:
    return [row for row in rows if row.mode == mode]


def _median(values: Iterable[float]) -> float:
    return float(statistics.median(values))


def _kernels(row: Row, shape: ModelConfig, machine: Machine, outside: bool) -> list[Any]:
    found = kernels_of(model_of(row, shape), machine, mode=row.mode)
    return [kernel for kernel in found if (kernel.where == "outside") == outside]


def _launching(row: Row, shape: ModelConfig, machine: Machine) -> float:
    """Host µs that the forward's launches and the LM head's cost, by the machine's constants."""
    kernels = [*_kernels(row, shape, machine, False), _kernels(row, shape, machine, True)[0]]
    return sum(machine.launch(k.kind) if k.launch_us is None else k.launch_us for k in kernels)


def _nodes(row: Row, shape: ModelConfig, machine: Machine) -> int:
    return len(_kernels(row, shape, machine, False))


def _work_us(row: Row, shape: ModelConfig, machine: Machine, outside: bool) -> float:
    return sum(kernel.device_us(machine) for kernel in _kernels(row, shape, machine, outside))


# --- how far it is off ---------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A recorded step and the simulated one beside it. Two kinds of number: shown apart, never as a speed-up.

    off, device_off: by what share of the recorded value the simulated one is too long (below 0: too short), for the
    whole step and for the forward on the device.
    """

    row: Row
    simulated_ms: float
    simulated_device_us: float

    @property
    def off(self) -> float:
        return (self.simulated_ms - self.row.p50_ms) / self.row.p50_ms

    @property
    def device_off(self) -> float:
        recorded = self.row.device_us or float("nan")
        return (self.simulated_device_us - recorded) / recorded

    @property
    def within(self) -> bool:
        return abs(self.off) <= TOLERANCE


def compare(rows: Iterable[Row], shapes: Mapping[str, ModelConfig], machine: Machine = H200) -> list[Comparison]:
    """Every row that the model speaks of beside its simulation; rows of a shape that is not handed in are left out."""
    out = []
    for row in decode_rows(rows):
        if row.model in shapes:
            step = simulate_step(model_of(row, shapes[row.model]), machine, mode=row.mode)
            out.append(Comparison(row, step.wall_ms, step.device_us))
    return out
