"""Any store, its pushes and pulls in the order of urgency; and torch trained through one."""
