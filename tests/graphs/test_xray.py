"""Nodes of graphs from a stand-in driver, fusion groups from generated code, and their figures."""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from labkit.figures import palette
from labkit.figures.xray import fusion_figure, nodes_figure, xray_sentence
from labkit.graphs.compiler import ClassReport, count_kernels
from labkit.graphs.graph_nodes import Node, _KernelParams, demangle, read_nodes
from labkit.graphs.xray import GraphXray, fusions, ops_of, piece_xrays, xray
from tests.engine.test_engine import EAGER, SMALL

MANGLED = "_ZN2at6native29vectorized_elementwise_kernelILi4EEEvi"

CODE = '''
async_compile = AsyncCompile()
# Topologically Sorted Source Nodes: [x], Original ATen: [aten.never]
triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0 = async_compile.triton("""
def call(self): pass
""")
class Runner:
    def call(self, args):
        arg0_1, arg1_1 = args
        # Topologically Sorted Source Nodes: [a, b], Original ATen: [aten._to_copy, aten.pow, aten.mean, aten.add]
        stream0 = get_raw_stream(0)
        triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0.run(arg0_1, buf0, s0, 576, stream=stream0)
        buf1 = empty_strided_cuda((s0, 64), (64, 1), torch.bfloat16)
        # Topologically Sorted Source Nodes: [a, b, linear], Original ATen: [aten.pow, aten.mean, aten.t, aten.mm]
        extern_kernels.mm(buf0, reinterpret_tensor(arg1_1, (64, 256), (1, 64), 0), out=buf1)
        buf2 = torch.ops.aten.index.Tensor(buf1, arg0_1)
        torch.ops.labkit.unified_attention_with_output(buf1)
        cpp_fused_mul_silu_split_1(buf1, buf2, s0)
        return (buf2, )

def benchmark():
    extern_kernels.mm(1, 2)
'''


class Driver:
    """Knows five nodes: two kernels of the driver's API, one of the runtime's, a copy and a fill."""

    KINDS = (0, 1, 0, 2, 0)
    NAMES = {11: b"rms_norm_kernel", 12: b"nvjet_tst_64x8", 21: MANGLED.encode()}  # noqa: RUF012

    def cuStreamGetCaptureInfo_v3(self, stream: Any, *out: Any) -> int:  # noqa: N802
        out[0]._obj.value, out[2]._obj.value = 1, 99
        return 0

    def cuGraphGetNodes(self, graph: Any, nodes: Any, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.KINDS)
        for i in range(len(self.KINDS) if nodes is not None else 0):
            nodes[i] = 1000 + i
        return 0

    def cuGraphNodeGetType(self, node: Any, kind: Any) -> int:  # noqa: N802
        kind._obj.value = self.KINDS[node.value - 1000]
        return 0

    def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:  # noqa: N802
        out = params._obj
        assert isinstance(out, _KernelParams) and self.KINDS[node.value - 1000] == 0
        func, kern = {1000: (11, 0), 1002: (12, 0), 1004: (0, 21)}[node.value]
        out.func, out.kern = func or None, kern or None
        return 0

    def name(self, out: Any, handle: Any) -> int:
        out._obj.value = self.NAMES[handle.value]
        return 0

    cuFuncGetName = cuKernelGetName = name


def test_nodes_have_kinds_and_kernels_names() -> None:
    nodes = read_nodes(7, Driver())
    assert nodes == (
        Node("kernel", "rms_norm_kernel"), Node("copy"), Node("kernel", "nvjet_tst_64x8"), Node("fill"),
        Node("kernel", demangle(MANGLED)),
    )  # fmt: skip
    one = GraphXray("x", "FULL", 4, (nodes,), 3)
    assert one.by_role() == {"copy": 2, "norm": 1, "gemm": 1, "other": 1}
    assert one.by_name()["rms_norm_kernel"] == 1 and "5 nodes in 1 graph (2 copy" in xray_sentence(one)


def test_a_driver_that_does_not_tell() -> None:
    class Old(Driver):
        cuFuncGetName = cuKernelGetName = property()  # noqa: N815 - asking raises AttributeError

    class Refuses(Driver):
        def cuGraphKernelNodeGetParams_v2(self, node: Any, params: Any) -> int:  # noqa: N802
            return 1

    for driver in (Old(), Refuses()):
        nodes = read_nodes(7, driver)
        assert [n.kind for n in nodes or ()] == ["kernel", "copy", "kernel", "fill", "kernel"]
        assert GraphXray("x", "FULL", 4, (nodes or (),)).by_role() == {"unnamed": 3, "copy": 2}
    assert read_nodes(7, SimpleNamespace()) is None


def test_the_struct_is_that_of_the_header() -> None:
    """Offsets of CUDA_KERNEL_NODE_PARAMS_v2 on a 64-bit machine."""
    fields = ("func", "grid", "block", "shared", "params", "extra", "kern", "ctx")
    assert [getattr(_KernelParams, f).offset for f in fields] == [0, 8, 20, 32, 40, 48, 56, 64]
    assert ctypes.sizeof(_KernelParams) == 72


def test_symbols_are_demangled_where_the_system_can() -> None:
    assert demangle("rms_norm_kernel") == "rms_norm_kernel"
    assert demangle(MANGLED) in (MANGLED, "void at::native::vectorized_elementwise_kernel<4>(int)")
    assert demangle("_Znonsense") == "_Znonsense"


# --- fusion groups ----------------------------------------------------------------------------------------------------


def test_fusion_groups_are_the_calls_of_the_generated_code() -> None:
    found = fusions(CODE)
    assert [(f.kernel, f.ops, f.library, f.role) for f in found] == [
        ("triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_0", ("_to_copy", "pow", "mean", "add"), False, "norm"),
        ("mm", ("mm",), True, "gemm"),
        ("aten.index.Tensor", ("index",), True, "other"),
        ("cpp_fused_mul_silu_split_1", ("mul", "silu", "split"), False, "activation"),
    ]
    assert fusions("") == () and len(found) == count_kernels(CODE.split("def benchmark")[0])


@pytest.mark.parametrize(
    ("kernel", "ops"),
    [
        ("cpp_fused_add_mean_mul_0", ("add", "mean", "mul")),
        ("triton_poi_fused__to_copy_cat_split_with_sizes_sub_12", ("_to_copy", "cat", "split_with_sizes", "sub")),
        ("triton_poi_fused_mul_silu_split__to_copy_2", ("mul", "silu", "split", "_to_copy")),
        ("triton_per_fused_rsqrt_7", ("rsqrt",)), ("nvjet", ()), ("triton_poi_fused_3", ()),
    ],
)  # fmt: skip
def test_operators_are_read_from_a_kernels_name(kernel: str, ops: tuple[str, ...]) -> None:
    assert ops_of(kernel) == ops


def pieces() -> Any:
    return piece_xrays([ClassReport(0, 1, 9, 12, 4, CODE, 1.0), ClassReport(1, 29, 8, 7, 4, CODE, 1.0)])


def test_the_figures_show_every_call_and_every_node() -> None:
    figure = fusion_figure(pieces(), "LIVE")
    bars = {(y, base, x) for t in figure.data for y, base, x in zip(t.y, t.base, t.x, strict=True)}
    assert bars == {(y, *at) for y in (0, 1) for at in ((0, 4), (4, 1), (5, 1), (6, 3))}
    assert "29 pieces" in figure.layout.yaxis.ticktext[1] and "7 kernels → 4" in figure.layout.yaxis.ticktext[1]
    assert "LIVE" in figure.layout.title.text
    for trace in figure.data:
        assert trace.marker.pattern.shape == palette.ROLE_STYLES[trace.meta[1]][1] and all(trace.text)

    nodes = read_nodes(7, Driver()) or ()
    empty = GraphXray("cpu", "FULL", 1, (), None, pieces(), "graphs are emulated")
    figure = nodes_figure([GraphXray("x", "PIECEWISE", 4, (nodes, nodes), 6), empty], "RECORDED")
    assert {t.meta[1]: list(t.x) for t in figure.data} == {
        "norm": [2, 0],
        "gemm": [2, 0],
        "copy": [4, 0],
        "other": [2, 0],
    }
    assert figure.layout.annotations[0].text == "graphs are emulated"
    assert "215 kernels of single operators became 120" in xray_sentence(empty)


def test_as_dict_is_plain() -> None:
    import json

    made = GraphXray("x", "FULL", 4, (read_nodes(7, Driver()) or (),), 3, pieces())
    assert json.loads(json.dumps(made.as_dict()))["pieces"][1]["fusions"][1]["ops"] == ["mm"]


# --- on an engine -----------------------------------------------------------------------------------------------------


def test_on_a_cpu_nodes_are_not_there_and_it_says_so() -> None:
    from labkit import LLM
    from labkit.errors import LabkitError

    with LLM("tiny-llama", **{**SMALL, "cudagraph_capture_sizes": [1, 2]}, cudagraph_mode="FULL_DECODE_ONLY") as llm:
        found = xray(llm)
        assert (found.mode, found.size, found.nodes, found.kernel_nodes) == ("FULL", 1, (), None)
        assert "emulated" in found.reason and "emulated" in xray_sentence(found)
        with pytest.raises(LabkitError, match="sizes of that mode: 1, 2"):
            xray(llm, 3)
    with LLM("tiny-llama", **EAGER) as llm, pytest.raises(LabkitError, match="none"):
        xray(llm, mode="PIECEWISE")


def test_split_lists_fusions_and_its_page_has_the_code_one_click_away(tmp_path: Path) -> None:
    from labkit.cli.split import _describe_fusions, _write_page

    text = _describe_fusions(pieces())
    assert "    1  mm " in text and "_to_copy, pow, mean, add" in text and text.count("gemm") == 2
    _write_page(tmp_path / "x.html", pieces(), text)
    page = (tmp_path / "x.html").read_text()
    assert page.index("<summary>Generated code</summary>") < page.index("# --- class 1 ---")
    assert "class Runner" in page and "https://cdn" not in page.split("</script>")[-1]
