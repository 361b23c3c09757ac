"""A user's first save, verification and load, in the container that it is started in. Prints one line of JSON.

    first_save.py DIR [RANKS [MIB]]

RANKS processes save MIB of state each (default 1 and 64). They are forked once PyTorch is imported, so that they share its memory. The
package's log goes to standard error.
"""

import json
import logging
import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

begun = time.monotonic()
import torch  # noqa: E402  # its import is timed

imported = time.monotonic()


def one_rank(path: str, rank: int, ranks: int, mib: int, attempt: str) -> dict:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    import holdfast

    # In place: a second tensor for a moment is more memory than a small container has.
    weights = torch.arange(mib << 18, dtype=torch.float32).add_(rank)
    state = {f"w{rank}": weights, "step": 1}
    many = {"rank": rank, "world_size": ranks, "attempt": attempt} if ranks > 1 else {}
    report = holdfast.save_async(state, path, step=1, **many).wait(300)
    if ranks == 1:
        verdict = holdfast.verify(path)["verdict"]
        assert verdict == "sound", verdict
        first, last = weights[0].item(), weights[-1].item()
        weights.zero_()
        holdfast.load(path, into=state)
        assert (weights[0].item(), weights[-1].item()) == (first, last)
    told = {key: report[key] for key in ("engine", "engine_reason", "pages", "direct_io", "streamed", "launcher")}
    return {**told, "pages_reason": holdfast.staging()["pages_reason"], "holdfast": holdfast.__version__}


def main() -> None:
    path = os.path.join(sys.argv[1], "step-1")
    ranks = int(sys.argv[2]) if len(sys.argv) > 2 else 1
    mib = int(sys.argv[3]) if len(sys.argv) > 3 else 64
    if ranks == 1:
        rows = [one_rank(path, 0, 1, mib, "")]
    else:
        # As torchrun says it: the ranks of a node share its memory.
        os.environ["LOCAL_WORLD_SIZE"] = str(ranks)
        with ProcessPoolExecutor(ranks, multiprocessing.get_context("fork")) as pool:
            saves = [pool.submit(one_rank, path, rank, ranks, mib, "5" * 32) for rank in range(ranks)]
            rows = [save.result() for save in saves]
        import holdfast

        verdict = holdfast.verify(path)["verdict"]
        assert verdict == "sound", verdict
    ended = time.monotonic()
    print(json.dumps({**rows[0], "ranks": ranks, "import": imported - begun, "seconds": ended - imported,
                      "torch": torch.__version__, "python": sys.version.split()[0],
                      "libc": os.confstr("CS_GNU_LIBC_VERSION")}))


if __name__ == "__main__":
    main()
