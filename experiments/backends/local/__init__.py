"""One process, one device, torch."""
