"""A device that only exists in the books: work is issued, runs behind the host's back, and the clock is told.

SIMULATED, and exact: what a timer should have read is known. Refuses to take any real time.
"""

from __future__ import annotations

import collections

#: Launches that may wait; a further one lets the host wait. CUDA has about so many (documented in forums).
DEPTH = 1024


class FakeDevice:
    """One host clock, one device queue; all times in µs.

    issue(): start the work; returns at once. synchronize(): let the host wait until all work is done.
    clock(): what the host's clock says. Two devices are equal when they were made alike, whatever they did since.

    Args:
        kernel_us: how long the work takes on the device. launch_us: host time of one `issue`.
        cold: what the first runs take longer on the device, one entry each. busy_us: work of others that still runs.
    """

    def __init__(self, kernel_us: float, launch_us: float, cold: tuple[float, ...] = (), busy_us: float = 0.0) -> None:
        self._made = (float(kernel_us), float(launch_us), tuple(map(float, cold)), float(busy_us))
        self._now, self._device, self._runs = 0.0, float(busy_us), 0

    def clock(self) -> float:
        """The host's clock, in µs."""
        return self._now

    def issue(self) -> None:
        """Start the work once, behind everything that was started before."""
        kernel, launch, cold, _ = self._made
        self._now += launch
        extra = cold[self._runs] if self._runs < len(cold) else 0.0
        self._device = max(self._device, self._now) + kernel + extra
        self._runs += 1

    def synchronize(self) -> None:
        """Let the host wait until the device has nothing left to do."""
        self._now = max(self._now, self._device)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeDevice) and self._made == other._made

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        kernel, launch, cold, busy = self._made
        said = f"device(kernel_us={kernel:g}, launch_us={launch:g}"
        said += f", cold={tuple(f'{us:g}' for us in cold)}".replace("'", "") if cold else ""
        return said + (f", busy_us={busy:g})" if busy else ")")


class Queue:
    """The same with many kernels per run, a queue that can be full, and a time for each run.

    Beside the host's clock it knows when the first kernel of a run began and the last one ended: device events.
    """

    def __init__(self, depth: int = DEPTH) -> None:
        self.now = self.device = 0.0
        self._waiting: collections.deque[float] = collections.deque()
        self._depth = depth

    def run(self, kernels: int, kernel_us: float, launch_us: float) -> float:
        """Issue one run; returns the device time from its first kernel's begin to its last one's end."""
        begin = None
        for _ in range(kernels):
            while self._waiting and self._waiting[0] <= self.now:
                self._waiting.popleft()
            if len(self._waiting) >= self._depth:
                self.now = max(self.now, self._waiting.popleft())
            self.now += launch_us
            start = max(self.device, self.now)
            begin = start if begin is None else begin
            self.device = start + kernel_us
            self._waiting.append(self.device)
        return self.device - (begin or 0.0)

    def synchronize(self) -> None:
        """The host waits until all is done."""
        self.now = max(self.now, self.device)
        self._waiting.clear()
