"""A test that fails, to be seen failing."""

import unittest


class Wrong(unittest.TestCase):
    def test_arithmetic(self) -> None:
        self.assertEqual(6 * 9, 42)
