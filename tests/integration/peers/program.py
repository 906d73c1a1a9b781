"""The process of environment.Peers: reads calls from standard input and writes their results to standard output.

Runs in the peers' environment, and imports nothing of RLJob.
"""

from __future__ import annotations

import importlib
import os
import pickle
import sys
import traceback


def main() -> None:
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what the peers print is not a result
    while True:
        try:
            peer, function, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        try:
            found = getattr(importlib.import_module(f"{peer}_calls"), function)(**arguments), None
        except Exception:
            found = None, traceback.format_exc()
        pickle.dump(found, results)
        results.flush()


if __name__ == "__main__":
    main()
