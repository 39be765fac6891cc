"""Contract suites: one for each kind of plugin, run on every implementation, and open to plugins from elsewhere.

A test module subclasses a suite and says by fixtures what is to be tested::

    from forkd.testing.memory import MemoryBackendContract

    class TestMyBackend(MemoryBackendContract):
        @pytest.fixture
        def backend(self):
            return MyBackend()

They need pytest and pytest-trio (``trio_mode = true``).
"""
