"""The command line: one file a verb; each declares arguments, calls the SDK and prints."""
