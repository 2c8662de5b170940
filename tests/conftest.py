"""For all tests."""

import signal

# What a script starts in the background ignores Ctrl-C, and so does what that starts:
# tests that send SIGINT would wait for ever.
signal.signal(signal.SIGINT, signal.default_int_handler)
