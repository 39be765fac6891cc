"""Fails if another file's test has written to the log before."""

import unittest
from pathlib import Path

LOG = Path("/srv/state/log")


class Log(unittest.TestCase):
    def test_the_log_is_as_it_was_prepared(self) -> None:
        self.assertEqual(LOG.read_text(), "prepared\n")
        LOG.write_text("spoiled by two\n")
