"""Worker processes: forked from a server that holds torch (megamoe.runner.forks), ended with their parent."""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import sys
import threading
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Final

from megamoe.runner.child import spare_shared_pages
from megamoe.runner.forks import ONE_THREAD, replace_environment, server_of_forks
from megamoe.runner.process import keeper_of_worker

if TYPE_CHECKING:
    from pebble import ProcessPool

LOOKS_EVERY_S: Final = 0.01
"""How often a pool looks whether a worker has ended or it shall end itself: it ends that much later than its last
row."""


def worker_pool(workers: int, module: str) -> ProcessPool:
    """A pool of that many workers, none of them started yet. Schedule its tasks within `interrupts_held_back`.

    Each worker imports `module` before its first task, so that no task pays for that with its time limit.
    """
    # It is not imported where nothing is run.
    from pebble import CONSTS, ProcessPool

    CONSTS.sleep_unit = LOOKS_EVERY_S
    return ProcessPool(
        workers, initializer=start_worker, initargs=(dict(os.environ), module), context=server_of_forks()
    )


def start_worker(environment: Mapping[str, str], module: str) -> None:
    """Runs first in each worker. `environment`: that of the parent, since the server may be older than its changes.

    One BLAS thread a worker: as many workers as cores would fight over more. `module` as in `worker_pool`.
    """
    sys.excepthook = sys.__excepthook__
    replace_environment({**environment, **ONE_THREAD})
    faulthandler.enable()
    import torch

    torch.set_num_threads(1)
    # Before anything of ours is imported, and before there is a second thread.
    keeper_of_worker()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    import_module(module)
    spare_shared_pages()


def _end_with_parent() -> None:
    """Ends a worker in the middle of a row, which would outlive a killed run for as long as the row takes."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
