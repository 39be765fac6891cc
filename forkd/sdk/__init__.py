"""Clients of the REST app: over TCP, a unix socket, or hosting the app in this very process."""
