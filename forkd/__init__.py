"""forkd: boot a microVM once, warm it, fork children that share its memory copy-on-write."""

__version__ = "0.1.0"
