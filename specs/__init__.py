"""The contracts of forkd: what two separately written parties must agree on. Imports nothing of ours."""
