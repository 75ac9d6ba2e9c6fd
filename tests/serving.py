"""Servers that stand in for others, in a thread of the test."""

import contextlib
import threading


@contextlib.contextmanager
def serving(server):
    """Answers in the background, until the end of the block."""
    with server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
