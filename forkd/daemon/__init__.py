"""The REST app and the daemon that serves it."""
