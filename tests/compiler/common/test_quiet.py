"""What a thread logs by one logger is dropped for a while, and nothing else."""

from __future__ import annotations

import logging
import threading

from compiled_graphs.compiler.common.quiet import quiet

NAME = "compiled_graphs_test.quiet"


def test_only_this_threads_records_of_this_logger_are_dropped(caplog):
    own, other = logging.getLogger(NAME), logging.getLogger(f"{NAME}.other")
    own.error("before")
    with quiet(NAME):
        own.error("dropped")
        other.error("another logger")
        thread = threading.Thread(target=own.error, args=("another thread",))
        thread.start()
        thread.join()
    own.error("after")
    assert [record.message for record in caplog.records] == ["before", "another logger", "another thread", "after"]
    assert not own.filters
