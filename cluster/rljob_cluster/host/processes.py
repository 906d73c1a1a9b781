"""Named child processes, each with a log file. They die with the thread that started them."""

import ctypes
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
_STOP_TIMEOUT_SECONDS = 10.0
_LOG_LINES = 15


class ProcessGroup:
    """Starts and stops processes by name; `logs` receives their output."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes.values()]

    def start(self, name: str, command: Sequence[str]) -> None:
        self._logs.mkdir(parents=True, exist_ok=True)
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # the parent handles Ctrl-C, and stops the processes in order
                preexec_fn=_die_with_parent,
            )

    def is_running(self, name: str) -> bool:
        return name in self._processes and self._processes[name].poll() is None

    def stop(self, name: str, first: signal.Signals = signal.SIGTERM) -> None:
        """Stop one process if it was started: SIGKILL follows after a timeout."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(first)
        try:
            process.wait(_STOP_TIMEOUT_SECONDS)
        except subprocess.TimeoutExpired:  # an API server waits until its clients end their watches
            process.kill()
            process.wait()

    def stop_all(self) -> None:
        """Stop all processes, in the reverse order of their start."""
        for name in reversed(list(self._processes)):
            self.stop(name)

    def restart_dead(self) -> None:
        for name, process in list(self._processes.items()):
            if process.poll() is not None:
                print(f"{name} exited with {process.returncode}: restarting it", flush=True)
                self.start(name, process.args)  # type: ignore[arg-type]

    def last_lines(self, name: str) -> str:
        path = self._log(name)
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join([*lines[-_LOG_LINES:], f"(complete log: {path})"])

    def _log(self, name: str) -> Path:
        return self._logs / f"{name}.log"


def _die_with_parent() -> None:
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
