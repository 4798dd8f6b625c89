"""When requests come and go: open loop from the workload's times, closed loop from the ends of earlier requests."""

from __future__ import annotations

import heapq
import math

from slacktide.core.types import FloatArray
from slacktide.workload.requests import Workload


class Arrivals:
    """Hands out requests when they are due, in (time, index) order, and tells when a client gives up.

    `time` holds the intended send times: latencies count from there. With `max_concurrency` a client sends a request
    only once fewer than that many are in the system (vllm bench's semaphore), so the engine sees it later.
    """

    def __init__(self, workload: Workload, max_concurrency: int | None = None) -> None:
        self._closed = workload.closed
        self._room: float = math.inf if max_concurrency is None else max_concurrency
        self._room_since = 0.0  # when a client last found the system no longer full
        self.time: FloatArray = workload.arrival_time.copy()
        self._patience = (workload.abort_time - workload.arrival_time).tolist()
        self._impatient = min(self._patience) < math.inf
        self._times: list[float] = self.time.tolist()
        self._next = 0  # first request not handed out (open) or not sent (closed)
        self._queue: list[tuple[float, int]] = []  # closed loop: sent, not yet due
        self._aborts: list[tuple[float, int]] = []
        self.ended = 0
        self.next_event = 0.0
        self.next_abort = math.inf
        if self._closed is not None:
            for _ in range(min(self._closed.concurrency, len(self._times))):
                self._send(0.0)
        self._find_next_event()

    def _send(self, time: float) -> None:
        index, self._next = self._next, self._next + 1
        self.time[index] = time
        heapq.heappush(self._queue, (time, index))

    def _find_next_event(self) -> None:
        if self._room < 1:
            time = math.inf
        elif self._closed is not None:
            time = self._queue[0][0] if self._queue else math.inf
        else:
            time = self._times[self._next] if self._next < len(self._times) else math.inf
        self.next_abort = self._aborts[0][0] if self._aborts else math.inf
        self.next_event = min(time, self.next_abort)

    @property
    def position(self) -> int | None:
        """The next request of an open loop with patient clients, whom compiled code may let in by itself; else None."""
        return None if self._closed is not None or self._impatient or self._room < math.inf else self._next

    def advance(self, position: int, ended: int) -> None:
        """Compiled code let in the requests before `position`, and `ended` requests ended."""
        self._next = position
        self.ended += ended
        self._find_next_event()

    def due(self, now: float) -> list[int]:
        """Requests that have arrived by `now` and were not handed out before."""
        found: list[int] = []
        if self._closed is not None:
            while self._queue and self._queue[0][0] <= now and len(found) < self._room:
                found.append(heapq.heappop(self._queue)[1])
        else:
            first = self._next
            last = min(len(self._times), first + self._room)
            while self._next < last and self._times[self._next] <= now:
                self._next += 1
            found = list(range(first, self._next))
        self._room -= len(found)
        if self._impatient:
            for index in found:
                if self._patience[index] < math.inf:
                    heapq.heappush(self._aborts, (self.abort_times([index])[0], index))
        self._find_next_event()
        return found

    def sent(self, index: int) -> float:
        """When the engine sees a request: on arrival, or once the client's semaphore lets it go."""
        return max(float(self.time[index]), self._room_since)

    def given_up(self, now: float) -> list[int]:
        """Requests whose client's patience ended by `now` (whether or not they have ended already)."""
        found = []
        while self._aborts and self._aborts[0][0] <= now:
            found.append(heapq.heappop(self._aborts)[1])
        if found:
            self._find_next_event()
        return found

    def abort_times(self, indices: list[int]) -> list[float]:
        """When the clients of these requests leave."""
        return [float(self.time[index]) + self._patience[index] for index in indices]

    def end(self, time: float) -> None:
        """A request ended; in a closed loop its user sends the next one after thinking."""
        self.ended += 1
        self._room += 1
        if self._room == 1:
            self._room_since = max(self._room_since, time)
        if self._closed is not None and self._next < len(self._times):
            self._send(time + self._closed.think_time)
            self._find_next_event()
        elif self._room == 1:
            self._find_next_event()
