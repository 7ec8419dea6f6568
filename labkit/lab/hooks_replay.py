"""The hook point of a replay: how a step's tokens get into a captured graph, and its result out. Refuses to judge.

The engine fills its buffers and launches in two places; here both are undone and asked of one function, which sees the
graph's buffers as numpy arrays. Every answer costs two replays, and a third where it did not count.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from labkit.lab.hook import Ask, bound


@contextlib.contextmanager
def install_replay(ask: Ask) -> Iterator[None]:
    import numpy as np
    import torch

    from labkit.config import CUDAGraphMode
    from labkit.engine.runner import Runner
    from labkit.lab.compare import difference
    from labkit.lab.static_graph import StaticGraph

    own = Runner._launch
    held: dict[tuple[int, int], Any] = {}  # what each graph found in its buffer of token ids when it last read it

    def asked(self: Any, graph: Any, descriptor: Any, view: Any, step: Any) -> Any:
        if graph is None or descriptor.mode is not CUDAGraphMode.FULL:
            return own(self, graph, descriptor, view, step)
        ids, n, output = view.token_ids, step.num_tokens, graph.output
        filled, size = ids.clone(), len(ids)
        before = held.setdefault((id(self), size), np.zeros(size, np.int32))

        def compute(reads: Any, writes: Any) -> None:
            before[:] = reads
            ids.copy_(torch.from_numpy(reads))
            graph.replay()
            writes[:] = output.float().cpu().numpy()

        if self._events:
            self._events[0].record()
        graph.replay()
        expected = [output[:n].float().cpu().numpy().copy()]  # float() and cpu() may copy nothing

        def usable(found: Any) -> str:
            if not isinstance(found, list | tuple) or len(found) != 1:
                return "one input gives a list of one result"
            shape = tuple(np.shape(found[0]))
            return "" if shape == expected[0].shape else f"{n} tokens need {list(expected[0].shape)}, not {list(shape)}"

        def same(a: Any, b: Any) -> bool:
            return difference(list(a), list(b)) is None

        buffers = StaticGraph(before.copy(), np.zeros((size, output.shape[1]), np.float32), compute,
                              f"the engine's graph of {size} tokens")  # fmt: skip
        answer = ask((buffers, [filled[:n].cpu().numpy()]), expected, usable, same)
        ids.copy_(filled)
        if answer is expected:  # not the function's: what it wrote into the KV cache must not stay
            graph.replay()
        output[:n].copy_(torch.from_numpy(np.array(answer[0], dtype=np.float32)))
        if self._events:
            self._events[1].record()
        return self._logits(output, view, step)

    with bound(Runner, "_launch", asked):
        yield


def own_replay() -> Callable[..., Any]:
    from labkit.lab.static_graph import replay

    return replay
