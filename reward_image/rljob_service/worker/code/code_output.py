"""What the model sees of a program: the beginning and the end of its output, and how it ended. Pure."""

import signal

_MAX_BYTES_OF_CHARACTER = 4
_GAP = "\n[...]\n"
NO_OUTPUT = "[no output]"


class Output:
    """The output of a program, bounded to what the model may see."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._max_bytes = _MAX_BYTES_OF_CHARACTER * max_characters
        self._head, self._tail = bytearray(), bytearray()
        self.num_bytes = 0
        """Bytes of the whole output."""

    def take(self, data: bytes) -> None:
        """Add what the program has written."""
        self.num_bytes += len(data)
        room = self._max_bytes - len(self._head)
        self._head += data[:room]
        self._tail += data[room:]
        del self._tail[: -self._max_bytes]

    def describe(self, end: str = "") -> str:
        """Return the output and, in brackets, how the program ended, with at most max_characters."""
        text = (self._head + self._tail).decode(errors="replace").rstrip()
        last = f"[{end}]" if end else "" if text else NO_OUTPUT
        between = "\n" if text and last else ""
        return (self._shorten(text, len(between + last)) + between + last)[: self._max_characters]

    def _shorten(self, text: str, num_reserved: int) -> str:
        room = max(0, self._max_characters - num_reserved)
        if len(text) <= room:
            return text
        num_kept = max(0, room - len(_GAP))
        num_last = num_kept - num_kept // 2
        return text[: num_kept // 2] + _GAP + text[len(text) - num_last :]


def describe_exit(code: int) -> str:
    """Return how a program ended by its exit code, or by the negative number of a signal; empty for success."""
    if code >= 0:
        return f"exit code {code}" if code else ""
    return f"killed by {name_signal(-code)}" + (", perhaps for its memory" if -code == signal.SIGKILL else "")


def describe_end(code: int) -> str:
    """Return how a process ended, by its exit code, or by the negative number of a signal."""
    return f"ended with exit code {code}" if code >= 0 else f"was ended by {name_signal(-code)}"


def name_signal(number: int) -> str:
    """Return `SIGTERM`; of a number without a name, `signal 40`."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
