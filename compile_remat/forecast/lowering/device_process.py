"""The process with a fake device: ``python -m`` this module, started by `elsewhere`.

Reads pickles from its standard input: a `FakeDevice`, and then the pickle of each `Asked`.  For each of these it writes a pickle to
its standard output: an `Outcome`, or the `RematError` that was raised.  Printed text goes to standard error.  The process ends at
the end of its input.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading
from queue import SimpleQueue

from compile_remat._torch.fake_cuda import canaries
from compile_remat._torch.fake_cuda.installation import install


def main() -> None:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    install(pickle.load(sys.stdin.buffer))
    problem = canaries.problem()
    from compile_remat.errors import RematError
    from compile_remat.forecast.lowering.observing import NotObserved, observe, reason_of

    sent = SimpleQueue[bytes]()
    threading.Thread(target=_read, args=(sent,), daemon=True).start()
    while True:
        found: object
        try:
            found = NotObserved(problem) if problem else observe(pickle.loads(sent.get()))
        except RematError as error:
            found = error
        except Exception as error:  # raised by the user's module, which may not be importable here
            found = NotObserved(reason_of(error))
        pickle.dump(found, answer)
        answer.flush()


def _read(sent: SimpleQueue[bytes]) -> None:
    """Read requests as soon as they arrive, and end this process when the pipe is closed."""
    try:
        while True:
            sent.put(pickle.load(sys.stdin.buffer))
    except EOFError:
        os._exit(0)


if __name__ == "__main__":
    main()
