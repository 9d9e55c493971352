"""Samples of one node every ten seconds, in runs/NAME/system.jsonl: its GPUs, the ranks' memory, host, disk, network.

A thread of local rank 0 takes them through NVML and psutil; it never touches CUDA. What a machine does not report is
left out of the sample. `python -m training.system_samples` prints one sample of this machine and what it costs.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from common import machine_facts, rank_states
from common.json_files import append_json_line
from common.quantities import GIB
from common.rundir import RunDir

log = logging.getLogger("launch")
INTERVAL_S = 10.0
# bits of nvmlDeviceGetCurrentClocksEventReasons (nvml.h); 1 (idle) and 2 (application clocks) are no reason to worry
THROTTLE_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
    0x100: "display clocks",
}


class GpuReader:
    """Reads the GPUs that this process may use, through NVML; there are none where NVML does not answer."""

    def __init__(self) -> None:
        self._handles: list[tuple[int, Any]] = []
        self._events: Any = None
        self._xids: dict[int, list[int]] = {}
        try:
            import pynvml

            self._nvml: Any = pynvml
            pynvml.nvmlInit()
            for gpu in machine_facts.query_gpus().visible:
                self._handles.append((gpu.index, pynvml.nvmlDeviceGetHandleByIndex(gpu.index)))
        except Exception as problem:
            log.debug("system samples: no GPUs: %s", problem)
            return
        self._watch_xids()

    def _watch_xids(self) -> None:
        """Ask the driver to report Xid errors from now on (not offered inside some containers)."""
        nvml = self._nvml
        try:
            self._events = nvml.nvmlEventSetCreate()
            for _, handle in self._handles:
                nvml.nvmlDeviceRegisterEvents(handle, nvml.nvmlEventTypeXidCriticalError, self._events)
        except nvml.NVMLError:
            self._events = None

    def read(self) -> list[dict[str, Any]]:
        """One object per GPU: GiB, percent, watts, degrees Celsius, MHz, and counters since the driver was loaded."""
        self._take_xids()
        return [self._read_one(index, handle) for index, handle in self._handles]

    def _take_xids(self) -> None:
        nvml = self._nvml if self._events is not None else None
        while nvml is not None:
            try:
                event = nvml.nvmlEventSetWait_v2(self._events, 0)
                index = nvml.nvmlDeviceGetIndex(event.device)
            except nvml.NVMLError:  # the time of 0 ms is over: no event
                return
            self._xids.setdefault(index, []).append(int(event.eventData))

    def _read_one(self, index: int, handle: Any) -> dict[str, Any]:
        nvml = self._nvml
        readings: dict[str, Callable[[], Any]] = {
            "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
            "memory_used_gib": lambda: _gib(nvml.nvmlDeviceGetMemoryInfo(handle).used),
            "memory_total_gib": lambda: _gib(nvml.nvmlDeviceGetMemoryInfo(handle).total),
            "utilization_percent": lambda: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "power_w": lambda: nvml.nvmlDeviceGetPowerUsage(handle) / 1000,
            "power_limit_w": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1000,
            "energy_j": lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            "temperature_c": lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            "sm_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM),
            "sm_clock_max_mhz": lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM),
            "throttled_by": lambda: throttle_reasons(nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)),
            "ecc_corrected": lambda: self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED),
            "ecc_uncorrected": lambda: self._ecc(handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED),
        }
        row: dict[str, Any] = {"index": index}
        for name, reading in readings.items():
            try:
                row[name] = reading()
            except (nvml.NVMLError, AttributeError):  # not on this GPU, or not in this nvidia-ml-py
                continue
        if self._events is not None:
            row["xids"] = self._xids.get(index, [])
        return row

    def _ecc(self, handle: Any, kind: int) -> int:
        return int(self._nvml.nvmlDeviceGetTotalEccErrors(handle, kind, self._nvml.NVML_VOLATILE_ECC))


def throttle_reasons(bits: int) -> list[str]:
    """The names of the reasons for which a GPU runs below its clock."""
    return [name for bit, name in THROTTLE_REASONS.items() if bits & bit]


class HostReader:
    """Reads this node: memory of the ranks and of the host, CPU, disk, network.

    Args:
        disk: a folder on the file system whose free space is reported.
    """

    def __init__(self, disk: Path) -> None:
        self._disk = disk
        self._network: tuple[float, int, int] | None = None  # time, sent, received
        psutil.cpu_percent()  # the first call returns 0

    def read(self, ranks: dict[int, int]) -> dict[str, Any]:
        """One object: GiB, percent, and MB per second of all network interfaces but the loopback.

        Args:
            ranks: rank -> process id, of the ranks on this node.
        """
        memory = psutil.virtual_memory()
        readings: dict[str, Callable[[], Any]] = {
            "rank_memory_gib": lambda: {str(rank): _gib(tree_memory(pid)) for rank, pid in ranks.items()},
            "host_memory_used_gib": lambda: _gib(memory.total - memory.available),
            "host_memory_total_gib": lambda: _gib(memory.total),
            "cpu_percent": psutil.cpu_percent,
            "disk_free_gib": lambda: _gib(psutil.disk_usage(str(self._disk)).free),
            "shared_memory_free_gib": lambda: _gib(psutil.disk_usage("/dev/shm").free),
            "oom_kills": oom_kills,
        }
        row: dict[str, Any] = {}
        for name, reading in readings.items():
            try:
                row[name] = reading()
            except (OSError, psutil.Error, ValueError):
                continue
        return row | self._read_network()

    def _read_network(self) -> dict[str, float]:
        now, sent, received = time.monotonic(), 0, 0
        try:
            for name, counter in psutil.net_io_counters(pernic=True).items():
                if name != "lo":
                    sent, received = sent + counter.bytes_sent, received + counter.bytes_recv
        except OSError:
            return {}
        before, self._network = self._network, (now, sent, received)
        if before is None:
            return {}
        seconds = max(1e-9, now - before[0])
        rates = ((sent - before[1]) / seconds, (received - before[2]) / seconds)
        return {"network_sent_mb_s": round(rates[0] / 1e6, 3), "network_received_mb_s": round(rates[1] / 1e6, 3)}


def tree_memory(pid: int) -> int:
    """Resident bytes of a process and all its descendants (data workers, checkpoint writers); shared pages repeat."""
    process = psutil.Process(pid)
    total = process.memory_info().rss
    for child in process.children(recursive=True):
        try:
            total += child.memory_info().rss
        except psutil.NoSuchProcess:
            continue
    return int(total)


def oom_kills() -> int:
    """How many processes of this machine the kernel has killed for memory since it was started (/proc/vmstat)."""
    for line in Path("/proc/vmstat").read_text().splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    raise ValueError("this kernel does not count them")


def _gib(count: float) -> float:
    return round(count / GIB, 3)


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


class SystemSampler:
    """Appends one sample per interval to the file of this node. Readings that fail are logged once.

    Args:
        run: the run directory.
        attempt: whose rank files name the ranks' processes.
        node: number of this node, from 0.
    """

    def __init__(self, run: RunDir, attempt: int, node: int = 0, interval_s: float = INTERVAL_S) -> None:
        self._logs, self._path = run.attempt(attempt), run.system_samples(node)
        self._fixed = {"host": socket.gethostname(), "node": node, "attempt": attempt}
        self._folder, self._interval_s = run.path, interval_s
        self._logged_problem = False
        self._stopped = threading.Event()

    def start(self) -> None:
        """Start the thread; it ends with `stop` or with the process."""
        threading.Thread(target=self._repeat, name="system-samples", daemon=True).start()

    def stop(self) -> None:
        """Take no further samples."""
        self._stopped.set()

    def _repeat(self) -> None:
        gpus, host = GpuReader(), HostReader(self._folder)
        while not self._stopped.is_set():
            try:
                self.append(gpus, host)
            except Exception as problem:  # whatever a driver does: the training goes on
                if not self._logged_problem:
                    log.warning("system samples: %s: %s", type(problem).__name__, problem)
                self._logged_problem = True
            self._stopped.wait(self._interval_s)

    def append(self, gpus: GpuReader, host: HostReader) -> None:
        """Take one sample and write it."""
        name = self._fixed["host"]
        ranks = {s.rank: s.pid for s in rank_states.read(self._logs) if s.host == name and s.state == "running"}
        row = {"time": round(time.time(), 3), **self._fixed, **host.read(ranks)}
        if found := gpus.read():
            row["gpus"] = found
        append_json_line(self._path, row)


def _print_one_sample() -> None:
    gpus, host = GpuReader(), HostReader(Path.cwd())
    host.read({0: os.getpid()})
    times = []
    for _ in range(20):
        start = time.thread_time(), time.perf_counter()
        row = host.read({0: os.getpid()}) | {"gpus": gpus.read()}
        times.append((time.thread_time() - start[0], time.perf_counter() - start[1]))
    print(json.dumps(row, indent=1))
    cpu, wall = (sorted(one)[10] * 1e3 for one in zip(*times, strict=True))
    print(f"one sample: {cpu:.2f} ms of CPU, {wall:.2f} ms in all: {wall / INTERVAL_S / 10:.3f}% of the interval")


if __name__ == "__main__":
    _print_one_sample()
