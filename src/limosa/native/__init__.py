"""What is in C: CRIU's plugin, the software GPU, the shim and the hash of chunks, and what compiles them."""
