"""Where snapshots, disks and memory images live on disk. Nothing here knows about virtual machines."""
