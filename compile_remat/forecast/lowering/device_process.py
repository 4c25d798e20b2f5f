"""The process that believes in a device: ``python -m`` this module, started by `elsewhere`.

Takes two pickles on its standard input, a `FakeDevice` and an `Asked`, and writes one on its standard output, an `Outcome` or the
`RematError` that was raised.  What the model or torch prints goes to standard error.  It ends when its input does.
"""

from __future__ import annotations

import os
import pickle
import sys
import threading

from compile_remat._torch.fake_cuda import canaries, install


def main() -> None:
    answer = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    install.install(pickle.load(sys.stdin.buffer))
    from compile_remat.errors import RematError
    from compile_remat.forecast.lowering.observing import NotObserved, observe

    found: object
    asked = pickle.load(sys.stdin.buffer)
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        problem = canaries.problem()
        found = NotObserved(problem) if problem else observe(asked)
    except RematError as error:
        found = error
    pickle.dump(found, answer)
    answer.flush()
    os._exit(0)  # the thread below still reads


def _end_with_input() -> None:
    sys.stdin.buffer.read()
    os._exit(1)


if __name__ == "__main__":
    main()
