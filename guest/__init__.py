"""What runs inside the VM: init and agent, standard library only; data to the host, imported by nobody."""
