"""Packs, manifests, signatures and registries: formats and checks, without network, store or machines."""
