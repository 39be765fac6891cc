"""The Model Context Protocol: forkd as tools an agent's own client can call."""
