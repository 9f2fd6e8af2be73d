"""What is in C: CRIU's plugin, the shim, the hash of chunks; the list of the driver's functions; what compiles it."""
