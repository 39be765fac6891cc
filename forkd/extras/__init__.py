"""forkd in the shapes other code expects: E2B's Sandbox, and tools for agent frameworks, none of which is required."""
