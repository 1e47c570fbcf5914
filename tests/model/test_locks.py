"""Locks in a forked child."""

from __future__ import annotations

import os
import threading

from tests.support.model import process_lock


def test_a_lock_is_free_in_a_forked_child() -> None:
    lock = process_lock()
    is_held, is_forked = threading.Event(), threading.Event()

    def hold() -> None:
        with lock:
            is_held.set()
            is_forked.wait()

    holder = threading.Thread(target=hold)
    holder.start()
    is_held.wait()
    child = os.fork()
    if not child:
        taker = threading.Thread(target=lock.__enter__, daemon=True)
        taker.start()
        taker.join(10)
        os._exit(int(taker.is_alive()))
    is_forked.set()
    holder.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_no_method_in_python_takes_a_lock_as_an_interrupt_could_end_it_afterwards() -> None:
    assert type(process_lock()) is type(threading.Lock())
