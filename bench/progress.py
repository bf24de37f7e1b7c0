"""Progress lines on stderr, so that stdout holds only results."""

import sys
import time

_started = time.perf_counter()


def say(text: str) -> None:
    print(f"[{time.perf_counter() - _started:6.1f} s] {text}", file=sys.stderr, flush=True)
